"""How far two ways of computing the same log-probabilities may be apart, and which errors say that one way cannot."""

FAULTS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What a model raises that is not computed so."""
_FLOAT32 = 1e-4
"""Largest difference that rounding may make, of the largest log-probability. A wrong position or mask makes 1e-1."""
_ROUNDINGS = 16
"""The same with fewer bits, in roundings of the format."""


def allowed_difference(rounding: float) -> float:
    """Largest difference, of the largest log-probability, where one rounding is relatively ``rounding``.

    >>> allowed_difference(1.2e-7), allowed_difference(2**-7)
    (0.0001, 0.125)
    """
    return max(_FLOAT32, _ROUNDINGS * rounding)
