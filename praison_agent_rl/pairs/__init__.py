"""Preference pairs: sampled, as tokens, and measured."""
