"""The reward for the right number, however it is written."""

from collections.abc import Sequence
from typing import Any

from .making import Scores, a_number, library_reward, one_of
from .quantities import last_amount, same
from .reading import each_against, final_answer


@library_reward("answer")
def numeric(
    completions: Sequence[Any],
    answer: Any,
    *,
    tolerance: float = 1e-9,
    units: str = "optional",
    decimal: str = "auto",
    tag: str = "answer",
) -> Scores:
    r"""1.0 if the number is the right one, else 0.0; None where the row's answer is no number.

    Read are signs, decimals, thousands separators, fractions, percent, powers of ten, currencies and units (pint),
    in the marked answer, else after "the answer is", else the last number. ``tolerance`` is a share of the right
    number. With ``units: required`` a number without the unit of the right one is wrong. ``decimal: ","`` reads 1.234
    as a thousand and more.

    >>> numeric(["It is 1,500 m.", "#### 0.75", r"\boxed{\frac{3}{4}}", "5 kg"], ["1.5 km", "75%", 0.75, "5 km"])
    [1.0, 1.0, 1.0, 0.0]
    """
    a_number(tolerance, "tolerance", least=0, most=1)
    one_of(units, "units", ("optional", "required"))
    one_of(decimal, "decimal", ("auto", ","))

    def score(text: str, accepted: list[str]) -> float | None:
        right = [found for one in accepted if (found := last_amount(final_answer(one).text))]
        given = last_amount(final_answer(text, tag).text, decimal=decimal)
        if not right:
            return None
        needs_unit = units == "required"
        return float(
            given is not None and any(same(given, r, tolerance=tolerance, needs_unit=needs_unit) for r in right)
        )

    return each_against(completions, answer, score)
