"""This package's own decoder of completions; it imports torch at once, so functions import it where they need it."""
