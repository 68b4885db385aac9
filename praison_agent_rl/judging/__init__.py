"""What a reward that asks a language model is made of; the rewards themselves are in ``judge``."""
