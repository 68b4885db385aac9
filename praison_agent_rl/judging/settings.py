"""The options of a judge: what they may be, checked all at once and before anything is loaded or asked."""

import difflib
import os
import re
from collections.abc import Mapping
from typing import Any, TypedDict
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, SecretStr, ValidationError

from praison_agent_rl.records import Record

_HELD_BACK = {
    "model",
    "messages",
    "stream",
    "n",
    "api_key",
    "base_url",
    "api_base",
    "timeout",
    "headers",
    "temperature",
}
_HELD_BACK |= {"extra_headers", "max_tokens", "num_retries", "max_retries", "tools", "functions", "fallbacks"}


class Prices(Record):
    """USD for a million tokens."""

    input: float = Field(ge=0, allow_inf_nan=False)
    output: float = Field(ge=0, allow_inf_nan=False)


class Options(TypedDict, total=False):
    """The options of `JudgeSettings`, for whoever types them."""

    base_url: str | None
    api_key_env: str | None
    temperature: float | None
    reply_tokens: int
    timeout: float
    at_once: int
    options: Mapping[str, Any]
    max_cost: float | None
    max_calls: int | None
    max_tokens: int | None
    price_per_million: Mapping[str, float] | None
    keep: str | bool | None
    instructions: str
    show_reference: bool


class JudgeSettings(Record):
    """Which model judges, how it is asked, and what that may cost."""

    model_config = ConfigDict(strict=True)

    model: str
    """Name of litellm (``openai/gpt-4o-mini``, ``anthropic/...``), or with ``base_url`` that of the server."""
    base_url: str | None = None
    """An OpenAI-compatible server: ``http://127.0.0.1:8000/v1``."""
    api_key_env: str | None = None
    """Variable of the environment that holds the key; without it litellm finds the provider's usual one."""
    temperature: float | None = Field(default=0.0, ge=0, le=2)
    """None sends none, for models that refuse one."""
    reply_tokens: int = Field(default=2048, ge=16)
    """Tokens of a reply at most; a thinking model's thoughts count."""
    timeout: float = Field(default=45.0, gt=0, allow_inf_nan=False)
    """Seconds for one answer (or group), with pauses where the model is asked too often. Less than
    ``reward_timeout``, so that the reason is told."""
    at_once: int = Field(default=8, ge=1)
    """Requests of one call that are under way at once."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further parameters of litellm: ``reasoning_effort``, ``extra_body``, ..."""
    max_cost: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """USD that may be spent; needs a known price."""
    max_calls: int | None = Field(default=None, ge=1)
    """Requests that may be sent."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens, asked and said, that may be used."""
    price_per_million: Prices | None = None
    """Where litellm does not know it."""
    keep: str | bool | None = None
    """File to which every judgement is appended with its reasons; True is ``.praisonai/rl/judged.jsonl``."""
    instructions: str = ""
    """Said to the judge besides the criteria: what the agent is for, say."""
    show_reference: bool = True
    """Whether the column ``answer`` is shown to the judge."""

    @property
    def price(self) -> tuple[float, float] | None:
        """USD for a token that is read and one that is written, where it was given."""
        given = self.price_per_million
        return None if given is None else (given.input / 1e6, given.output / 1e6)


def read_settings(given: Mapping[str, Any], faults: list[str]) -> JudgeSettings | None:
    """The settings; adds what is wrong with them, which shows no value that may be a key."""
    given = {key: value for key, value in given.items() if value is not None or key == "temperature"}
    if isinstance(given.get("keep"), os.PathLike):
        given["keep"] = os.fspath(given["keep"])
    if isinstance(given.get("options"), Mapping):
        given["options"] = dict(given["options"])
    before = len(faults)
    known = JudgeSettings.model_fields
    for name in [name for name in given if name not in known]:
        near = difflib.get_close_matches(name, known, 1)
        faults.append(
            f"a judge has no option {name!r}" + (f"; {near[0]!r}?" if near else f"; it has {', '.join(known)}")
        )
    given = {name: value for name, value in given.items() if name in known}
    _check_texts(given, faults)
    try:
        settings = JudgeSettings.model_validate(given)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            place = ".".join(map(str, one["loc"]))
            if place not in ("model", "base_url", "api_key_env"):  # said already
                shown = "" if one["type"] == "missing" or "options" in place else f"={str(one['input'])[:60]!r}"
                faults.append(f"{place}{shown}: {one['msg'][:1].lower()}{one['msg'][1:]}")
        return None
    return settings if len(faults) == before else None


def read_secret(given: object, faults: list[str]) -> str | None:
    """The key that was given in code; a plain text could stand in a config, which is copied into every run's folder."""
    if isinstance(given, SecretStr):
        return given.get_secret_value() or None
    if given is not None:
        faults.append(
            "api_key is given as plain text, which runs would write down; put it into the environment and name the "
            'variable (api_key_env="MY_KEY"), or in code: api_key=pydantic.SecretStr(...)'
        )
    return None


def _check_texts(given: Mapping[str, Any], faults: list[str]) -> None:
    model, url, variable = given.get("model"), given.get("base_url"), given.get("api_key_env")
    if not isinstance(model, str) or not model.strip() or model != model.strip():
        faults.append(f"model={model!r} names no model; write one that litellm knows: openai/gpt-4o-mini")
    if url is not None:
        parts = urlsplit(url) if isinstance(url, str) else None
        if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
            faults.append("base_url is no address; write it with http:// or https:// (http://127.0.0.1:8000/v1)")
        elif "@" in parts.netloc or parts.query:
            faults.append("base_url holds a password or a query, which runs would write down; use api_key_env")
    if variable is not None:
        if not isinstance(variable, str) or not re.fullmatch(r"[A-Za-z_]\w*", variable):
            faults.append("api_key_env is no name of a variable; write the name, not the key itself")
        elif not os.environ.get(variable):
            shown = repr(variable) if variable.isupper() else "that it names"
            faults.append(f"api_key_env: the variable {shown} is not set in the environment")
    options = given.get("options")
    for name in sorted(_HELD_BACK & options.keys()) if isinstance(options, Mapping) else []:
        faults.append(f"options holds {name!r}, which is not for there")
