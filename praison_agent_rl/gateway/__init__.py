"""One address and one key for several agents and versions: names, swaps, restarts, health, drain; runs no model."""
