"""How a value is shown in a message: short, whatever it is; it changes nothing and imports nothing of the package."""

import reprlib

_LONGEST = 120

_repr = reprlib.Repr()
_repr.maxlevel = 2  # a few lines of YAML with anchors make values of a thousand million items
_repr.maxlist = _repr.maxtuple = _repr.maxdict = _repr.maxset = _repr.maxfrozenset = 4
_repr.maxstring = _repr.maxother = 80
_repr.maxlong = 40


def shown(value: object) -> str:
    """``repr(value)``, shortened.

    >>> shown([[1, [2, [3]]]] * 9)
    '[[1, [...]], [1, [...]], [1, [...]], [1, [...]], ...]'
    """
    text = _repr.repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
