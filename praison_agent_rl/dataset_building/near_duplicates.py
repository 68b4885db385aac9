"""Finds prompts that say nearly the same as an earlier one, by MinHash; it keeps signatures and no text."""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from praison_agent_rl.errors import MissingExtra

if TYPE_CHECKING:
    import numpy

PERMUTATIONS = 128
SHINGLE = 3
"""Words that are taken together."""

_UNSPACED = r"\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff"  # Thai, kana, Han: no blanks between words
_WORDS = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+|[^\w\s]")

# How likely a pair just at the threshold must be to share a band; a pair above it is found more surely still
_FOUND = 0.98
# Standard errors below the threshold down to which an estimate counts: 98 of 100 pairs at the threshold are found then,
# where half of them would come out below it (Broder 1997: the share of equal minima is binomial)
_MARGIN = 2.0
# Prompts of one template fill a band by thousands; comparing with more than these would take the time of all
_MOST_COMPARED = 1000


class Signature(NamedTuple):
    """What is kept of a prompt: one byte for each permutation, and its form."""

    values: bytes
    form: int
    """Twice the number of user turns, plus one where something comes before the last of them.

    Prompts of different forms are never near-duplicates: a conversation's next turn is mostly its history.
    """

    def text(self) -> str:
        """For a line of JSON; ``Signature.parse`` reads it."""
        return f"{self.form}:{base64.b64encode(self.values).decode()}"

    @classmethod
    def parse(cls, text: str) -> Signature:
        """The signature that ``text`` was made from."""
        form, _, values = text.partition(":")
        return cls(base64.b64decode(values), int(form))


class NearDuplicates:
    """Signatures of prompts, in bands, so that one like a new prompt is found without comparing with all.

    Two prompts are near-duplicates where both the last user turn (with what follows it) and the history before it have
    a Jaccard similarity of at least ``threshold``, as far as an estimate can tell: it is let off two standard errors
    (0.05 at 0.9, and 0.07 where there is a history), so that pairs at the threshold are found, and some below it too.
    System prompts do not count: agents send the same one with every prompt, and it is mostly longer than what the user
    says.

    Raises:
        MissingExtra: datasketch is not installed.
    """

    def __init__(self, threshold: float) -> None:
        try:
            import numpy
            from datasketch import MinHash
        except ImportError as error:
            raise MissingExtra(
                'finding near-duplicates needs datasketch: pip install "praison-agent-rl[dedupe]"'
            ) from error
        self._numpy = numpy
        self._empty = MinHash(PERMUTATIONS, seed=1, hashfunc=zlib.crc32, scheme="affine32")
        self._threshold = threshold
        self._rows = _rows_of_a_band(threshold)
        # odd, so that no bit of a value is lost; fixed, so that bands mean the same in every process
        self._mix = numpy.random.RandomState(2).randint(0, 2**62, self._rows).astype("uint64") * 2 + 1
        self._values: list[bytes] = []
        self._labels: list[int] = []
        self._buckets: dict[int, list[int]] = {}

    def sign(self, messages: Sequence[dict[str, Any]]) -> Signature:
        """The signature of a prompt; about 0.15 ms for a thousand characters."""
        spoken = [message for message in messages if message.get("role") not in ("system", "developer")]
        turns = [at for at, message in enumerate(spoken) if message.get("role") == "user"]
        last = turns[-1] if turns else 0
        form = 2 * len(turns) + (last > 0)
        values = self._minima(spoken[last:])
        if last:  # the two in turn, so that a band tells of both
            half = PERMUTATIONS // 2
            values = self._numpy.stack([values[:half], self._minima(spoken[:last])[:half]], axis=1).ravel()
        return Signature(values.tobytes(), form)

    def find(self, signature: Signature) -> list[int]:
        """The labels of its near-duplicates, the most similar first."""
        candidates = list({at for band in self._bands(signature) for at in self._buckets.get(band, ())})
        if not candidates:
            return []
        candidates = candidates[:_MOST_COMPARED]
        known = self._numpy.frombuffer(b"".join(self._values[at] for at in candidates), "uint8")
        same = known.reshape(-1, PERMUTATIONS) == self._numpy.frombuffer(signature.values, "uint8")
        parts = [same[:, 0::2], same[:, 1::2]] if signature.form % 2 else [same]
        least = _least_estimate(self._threshold, PERMUTATIONS // len(parts))
        # two bytes are equal by chance in one of 256 cases (b-bit minwise hashing, Li & Koenig 2010, equation 4)
        shares = self._numpy.min([(part.mean(axis=1) - 1 / 256) / (1 - 1 / 256) for part in parts], axis=0)
        order = (-shares).argsort(kind="stable").tolist()
        return [self._labels[candidates[at]] for at in order if shares[at] >= least]

    def add(self, signature: Signature, label: int) -> None:
        """Keep a prompt under a label."""
        for band in self._bands(signature):
            self._buckets.setdefault(band, []).append(len(self._labels))
        self._labels.append(label)
        self._values.append(signature.values)

    def _minima(self, messages: Sequence[dict[str, Any]]) -> numpy.ndarray[Any, Any]:
        signed = self._empty.copy()
        signed.update_batch(_shingles(messages))
        # The low byte: minima are small, so that their high bytes are much alike
        return signed.hashvalues.astype("uint8")  # type: ignore[no-any-return]

    def _bands(self, signature: Signature) -> list[int]:
        count = PERMUTATIONS // self._rows
        values = self._numpy.frombuffer(signature.values, "uint8")[: count * self._rows]
        mixed = (values.reshape(count, self._rows).astype("uint64") + 1) @ self._mix
        return [hash((band, value, signature.form)) for band, value in enumerate(mixed.tolist())]


def _least_estimate(threshold: float, permutations: int) -> float:
    """The estimate from so many permutations from which a pair counts.

    >>> round(_least_estimate(0.9, 128), 3), _least_estimate(1.0, 128)
    (0.847, 1.0)
    """
    margin = _MARGIN * math.sqrt(threshold * (1 - threshold) / permutations)
    return max(threshold - margin, threshold / 2)


def _rows_of_a_band(threshold: float) -> int:
    """The most permutations a band may have so that a pair at the threshold is still found."""
    for rows in range(32, 1, -1):
        if 1 - (1 - threshold**rows) ** (PERMUTATIONS // rows) >= _FOUND:
            return rows
    return 1


def _shingles(messages: Iterable[dict[str, Any]]) -> list[bytes]:
    words = [word for text in _texts(messages) for word in _WORDS.findall(text.casefold())]
    if not words:
        return []
    runs = {" ".join(words[at : at + SHINGLE]) for at in range(max(1, len(words) - SHINGLE + 1))}
    return [run.encode("utf-8", "surrogatepass") for run in runs]


def _texts(messages: Iterable[dict[str, Any]]) -> Iterator[str]:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else [{"type": "text", "text": content or ""}]:
            text = part.get("text") if isinstance(part, dict) else part
            # an image is one word: the letters of its base64 form say nothing of what it shows
            yield text if isinstance(text, str) else f"part{zlib.crc32(repr(part).encode())}"
        if message.get("tool_calls"):
            yield json.dumps(message["tool_calls"], default=repr)
