"""The two rewards of the demo: a short answer, and a correct one; they may import the standard library only.

What they pay for, besides what is meant, so that a run's answers are read and not only its score:
- a list of guesses: ``correctness`` pays in full if one of them is right, ``length_penalty`` takes 0.05 a word;
- silence: an empty answer loses ``correctness`` but has the full 1.0 of ``length_penalty``;
- a denial: "It is not Paris" contains the answer "Paris".
"""

import re
import unicodedata

_WORD = re.compile(r"\d+(?:[.,]\d+)+|[^\W_]+")
"""A run of letters and digits, or a number with its decimals ("2.5" is not the word "5")."""


def length_penalty(prompts: list[str], completions: list[str], **kwargs: object) -> list[float]:
    """Score 1.0 for no words, 0.05 less for each word, and 0.0 from 20 words on."""
    return [max(0.0, 1.0 - len(c.split()) / 20) for c in completions]


def correctness(prompts: list[str], completions: list[str], answer: list[list[str]], **kwargs: object) -> list[float]:
    """Score 1.0 if an accepted answer occurs in the completion as whole words, else 0.0.

    >>> correctness(["?", "?"], ["It's PARIS!", "Comparison"], answer=[["Paris"], ["Paris"]])
    [1.0, 0.0]
    """
    pairs = zip(completions, answer, strict=True)
    return [float(any(_words(a) in _words(c) for a in accepted)) for c, accepted in pairs]


def _words(text: str) -> str:
    """The words in lower case without accents, one space around each: " new york "."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return f" {' '.join(_WORD.findall(plain.casefold())).replace(',', '')} "
