"""The verbs of ``praison-agent-rl``, and how a command ends."""
