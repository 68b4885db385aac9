"""Rewards for JSON: whether it parses, and whether it fits a schema."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from praison_agent_rl.errors import RewardError

from .making import Scores, a_flag, a_mapping, a_number, library_reward, missing_extra, one_of
from .reading import after_thinking, each

_KINDS: dict[str, tuple[type, ...]] = {"object": (dict,), "array": (list,), "any": (object,)}
_FENCE = re.compile(r"\s*```(?:json)?[ \t]*\n(.*?)\n?[ \t]*```\s*", re.DOTALL | re.IGNORECASE)
_NOTHING = object()


@library_reward()
def json_valid(completions: Sequence[Any], *, kind: str = "object", fenced: bool = True) -> Scores:
    """1.0 if the text is JSON and nothing else, else 0.0.

    ``kind``: ``object``, ``array`` or ``any``. With ``fenced`` it may stand in a Markdown fence. NaN is no JSON.

    >>> json_valid(['{"a": 1}', 'Sure: {"a": 1}', '{"a": 1', "42", "[1]"])
    [1.0, 0.0, 0.0, 0.0, 0.0]
    """
    one_of(kind, "kind", tuple(_KINDS))
    a_flag(fenced, "fenced")

    def score(text: str) -> float:
        value = _parsed(text, fenced)
        return float(value is not _NOTHING and isinstance(value, _KINDS[kind]))

    return each(completions, score)


@library_reward()
def json_schema(
    completions: Sequence[Any], *, schema: Mapping[str, Any] | None = None, near: float = 0.0, fenced: bool = True
) -> Scores:
    """1.0 if the text is JSON that fits ``schema``, ``near`` (0.0) if it is other JSON, else 0.0.

    The schema is a JSON Schema (draft 2020-12 if it does not say); a ``$ref`` to an address is not fetched.

    >>> city = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}}
    >>> json_schema(['{"city": "Paris"}', '{"city": 5}', "Paris"], schema=city, near=0.2)
    [1.0, 0.2, 0.0]
    """
    a_mapping(schema, "schema", "{type: object, required: [city]}")
    a_number(near, "near")
    a_flag(fenced, "fenced")
    fits = _validator(schema)

    def score(text: str) -> float:
        value = _parsed(text, fenced)
        return 0.0 if value is _NOTHING else 1.0 if fits(value) else near

    return each(completions, score)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _parsed(text: str, fenced: bool) -> Any:
    text = after_thinking(text)
    if fenced and (inside := _FENCE.fullmatch(text)):
        text = inside[1]
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return _NOTHING


def _validator(schema: Any) -> Any:
    try:
        from jsonschema import SchemaError
        from jsonschema.validators import Draft202012Validator, validator_for
        from referencing import Registry
        from referencing.exceptions import Unresolvable
    except ImportError as error:
        raise missing_extra("json_schema", error.name) from error
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise RewardError(f"schema is no JSON Schema: {error.message} (at {error.json_path})") from error
    # a registry of its own: the default one fetches what a $ref points at
    validator = kind(schema, registry=Registry())

    def fits(value: Any) -> bool:
        try:
            return bool(validator.is_valid(value))
        except Unresolvable as error:
            raise RewardError(f"schema points at {error.ref!r}, which is not in it; write it under $defs") from error
        except RecursionError:
            return False

    return fits
