"""Runs that happen on another machine, reached over SSH; `running` tells the story."""
