"""Rollouts that the agent itself makes: its copies ask the policy that is trained, and every token is kept."""
