"""Rewards found by what they are named, called in a run, and their scores kept."""
