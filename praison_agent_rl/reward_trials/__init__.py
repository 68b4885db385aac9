"""Rewards tried before anything is trained: what they return, and what that means."""
