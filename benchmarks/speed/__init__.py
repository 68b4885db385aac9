"""How fast a GRPO step, its rollouts and what surrounds them are, against TRL, on this machine and in one run."""
