"""What is masked in a store: all that its recordings ask for, in turn; the names of agents and sessions too."""

import functools
import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from praison_agent_rl.transcripts.redaction import Redactor, find_redactor, mask_secrets

_KEPT_NAMES = 1024
_LEAST_HASHED = 16
"""A shorter secret could be guessed from its hash."""


class Mask(NamedTuple):
    """A redactor with what a user named it by."""

    spec: Any
    redact: Redactor


def find_mask(spec: Any) -> Mask:
    """The redactor that ``redact=`` names; raises as `find_redactor` does."""
    return Mask(spec, find_redactor(spec))


class Masks:
    """Several redactors as one: each of them masks what the ones before it left. Secrets are always masked."""

    def __init__(self, masks: Iterable[Mask] = ()) -> None:
        asked: list[Mask] = []
        for mask in masks:
            if mask.spec is not None and not any(mask.spec == other.spec for other in asked):
                asked.append(mask)
        self.masks = tuple(asked)
        self._redactors = tuple(mask.redact for mask in asked) or (mask_secrets,)
        self.name = functools.lru_cache(_KEPT_NAMES)(self._name)
        """Of a name (an agent's, a session's, a tag): the same with what is masked in it as `hashed` has it."""

    @property
    def specs(self) -> list[str]:
        """The names of those redactors that another process can find too."""
        return [mask.spec for mask in self.masks if isinstance(mask.spec, str)]

    def __call__(self, text: str, names: dict[str, str]) -> str:
        """The text with all that is to be masked; ``names`` is added to, as by a redactor."""
        for redact in self._redactors:
            text = redact(text, names)
        return text

    def __or__(self, other: "Masks") -> "Masks":
        if self is other:
            return self
        both = Masks((*self.masks, *other.masks))
        return next((one for one in (self, other) if one.masks == both.masks), both)

    def _name(self, text: str) -> str:
        names: dict[str, str] = {}
        masked = self(text, names)
        for found, placeholder in names.items():
            masked = masked.replace(placeholder, hashed(found, placeholder))
        return masked


def hashed(found: str, placeholder: str) -> str:
    """A placeholder that stands for ``found`` in every run, so that runs of one session still belong together.

    >>> hashed("ann@mail.example", "<EMAIL_1>"), hashed("hunter22", "<SECRET_1>")
    ('<EMAIL_e15350>', '<SECRET_1>')
    """
    kind = placeholder.strip("<>").rpartition("_")[0]
    if kind == "SECRET" and len(found) < _LEAST_HASHED:
        return placeholder
    return f"<{kind}_{hashlib.sha256(found.encode(errors='surrogatepass')).hexdigest()[:6]}>"
