"""Ask a judge's model: one request at a time through litellm, within a budget, with every failure told and none raised.

These requests are no agent's. The recorder wraps the framework's own model classes (`capture.TAPS`), and litellm is
called directly here, so nothing of them is recorded, also not where a judge is asked within a recorded turn.
"""

import asyncio
import importlib
import importlib.util
import logging
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from praison_agent_rl.endpoints import keep_loopback_off_proxies
from praison_agent_rl.errors import MissingExtra, RewardError
from praison_agent_rl.judging.budget import Budget, Claim, JudgeUsage
from praison_agent_rl.judging.replies import Fault
from praison_agent_rl.judging.settings import JudgeSettings
from praison_agent_rl.judging.texts import Request
from praison_agent_rl.transcripts.redaction import mask_secrets

_LOG = logging.getLogger(__name__)
_EXTRA = 'a judge needs litellm: pip install "praison-agent-rl[judge]"'
_BYTES = 3
"""Of text in a token, as a first estimate; the share that is really counted corrects it."""
_LONGEST_WAIT = 20.0
"""Seconds that are waited at most after a refusal for asking too often."""
_SECRET_NAME = re.compile(r"(?i)key|token|secret|passw")
_QUOTA = re.compile(r"(?i)insufficient_quota|exceeded your current quota|billing")
_JSON_MODE = re.compile(r"(?i)response_format|json_object|json mode|json_schema")


_MOST_TOKENS = 10**9
"""Above it a count of tokens is no count."""
_NO_TEXT = ("unparsed", "cut off", "refused")
"""Faults of a reply that did come."""


class Reply(NamedTuple):
    """What came back: a text, or why there is none."""

    text: str = ""
    fault: Fault | None = None


class _Failed(Exception):
    """One attempt that brought no text."""

    def __init__(self, fault: Fault, *, billed: bool = False, wait: float | None = None, plain: bool = False) -> None:
        super().__init__(fault.text)
        self.fault = fault
        self.billed = billed
        """Whether the provider may charge for it all the same."""
        self.wait = wait
        """Seconds after which it may be tried again; None if that is not this module's affair."""
        self.plain = plain
        """Whether it is to be tried without asking for JSON."""


class Asker:
    """Sends a judge's requests and counts what they cost; used by several threads and event loops at once."""

    def __init__(self, settings: JudgeSettings, secret: str | None, label: str) -> None:
        self._settings = settings
        self._secret = secret
        self._label = label
        self._lock = threading.Lock()
        self._litellm: Any = None
        self._json_mode = True
        self._density = 1 / _BYTES
        self._longest = settings.reply_tokens
        self._counts: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()
        self._price: tuple[float, float] | None = settings.price
        self.budget = Budget(settings.max_cost, settings.max_calls, settings.max_tokens)
        if importlib.util.find_spec("litellm") is None:
            raise MissingExtra(_EXTRA)
        if settings.max_cost is not None and self._price is None:
            self._price = known_price(settings)

    @property
    def usage(self) -> JudgeUsage:
        """What was asked and what it cost so far."""
        with self._lock:
            return JudgeUsage(
                **{name: self._counts[name] for name in ("calls", "failed", "unparsed", "reused")},
                **self.budget.told,
                kinds=dict(self._kinds),
            )

    def count(self, name: str, by: int = 1) -> None:
        """Add to a count of the usage."""
        with self._lock:
            self._counts[name] += by

    def note(self, fault: Fault) -> None:
        """Count a sample without a score by why it has none; each reason is said once."""
        with self._lock:
            self._kinds[fault.kind] += 1
            first = self._kinds[fault.kind] == 1
        if first:
            _LOG.warning("%s gave no score (%s): %s", self._label, fault.kind, fault.text)

    async def ask(self, request: Request) -> Reply:
        """The text of the model's reply; where it says that it is asked too often, after a pause and again."""
        settings = self._settings
        if self._litellm is None:
            self._litellm = await asyncio.to_thread(load)  # takes seconds, for which nothing else has to wait
        until = None
        for attempt in range(6):
            claim = await self.budget.claim(*self._estimate(request))
            if claim is None:
                return Reply(fault=Fault("budget", str(self.budget.exhausted)))
            until = until or time.monotonic() + settings.timeout
            try:
                return Reply(await self._sent(request, claim, until - time.monotonic()))
            except _Failed as failed:
                wait = failed.wait if failed.wait is None else failed.wait or min(2.0**attempt, _LONGEST_WAIT)
                if not failed.plain and (wait is None or time.monotonic() + wait >= until):
                    self.count("unparsed" if failed.fault.kind in _NO_TEXT else "failed")
                    return Reply(fault=failed.fault)
            await asyncio.sleep(wait or 0)
        self.count("failed")
        return Reply(fault=Fault("rate limit", "the model refused 6 times, for being asked too often"))

    async def _sent(self, request: Request, claim: Claim, seconds: float) -> str:
        """One attempt; what it cost is settled however it ends, and a lost one counts as if it was charged."""
        spent: tuple[int, int, float | None] | None = claim.worst
        try:
            self.count("calls")
            answer = await self._answered(request, seconds)
            spent = self._charged(request, answer)
            return _text_of(answer, self._settings)
        except _Failed as failed:
            if spent is claim.worst and not failed.billed:
                spent = None
            raise
        finally:
            self.budget.settle(claim, spent, lost=spent is claim.worst)

    async def _answered(self, request: Request, seconds: float) -> Any:
        asked = self._parameters(request, max(seconds, 0.01))
        try:
            # litellm's own limit is for each read: a server that drips would never reach it
            return await asyncio.wait_for(self._litellm.acompletion(**asked), max(seconds, 0.01))
        except asyncio.TimeoutError:
            text = f"no reply from {self._settings.model!r} within {self._settings.timeout:g} seconds"
            raise _Failed(Fault("timeout", text), billed=True) from None
        except Exception as error:  # noqa: BLE001 - each provider's client has errors of its own
            raise self._failure(error, "response_format" in asked) from None

    def _parameters(self, request: Request, seconds: float) -> dict[str, Any]:
        settings = self._settings
        asked: dict[str, Any] = {"model": settings.model, "messages": request, "max_tokens": settings.reply_tokens}
        asked |= {"timeout": seconds, "max_retries": 0, "num_retries": 0, "drop_params": True}
        if settings.temperature is not None:
            asked["temperature"] = settings.temperature
        if self._json_mode:
            asked["response_format"] = {"type": "json_object"}
        key = self._secret or (os.environ.get(settings.api_key_env) if settings.api_key_env else None)
        if settings.base_url:
            asked["base_url"] = settings.base_url
            if urlsplit(settings.base_url).hostname in ("127.0.0.1", "localhost", "::1"):
                keep_loopback_off_proxies()
            if settings.model.partition("/")[0] not in {
                str(getattr(p, "value", p)) for p in self._litellm.provider_list
            }:
                asked["custom_llm_provider"] = "openai"  # a model's own name, which may hold a slash
            if asked.get("custom_llm_provider") or settings.model.startswith("openai/"):
                key = key or os.environ.get("OPENAI_API_KEY") or "none"  # a local server asks for none, the client does
        if key:
            asked["api_key"] = key
        return {**asked, **settings.options}

    def _failure(self, error: Exception, json_mode: bool) -> _Failed:
        status = getattr(error, "status_code", None)
        text = self._without_keys(f"{type(error).__name__}: {error}")[:400]
        if status == 429:
            quota = _QUOTA.search(text)
            return _Failed(Fault("quota" if quota else "rate limit", text), wait=None if quota else _asked_wait(error))
        if status in (401, 403):
            return _Failed(Fault("not allowed", f"{text}; check the key{self._key_place()}"))
        if status in (400, 422) and json_mode and _JSON_MODE.search(text):
            self._json_mode = False  # a server without it; the reply is read leniently anyway
            return _Failed(Fault("bad request", text), plain=True)
        kinds = {400: "bad request", 404: "bad request", 422: "bad request", 408: "timeout"}
        if status in kinds:
            return _Failed(Fault(kinds[status], text), billed=status == 408)
        server = isinstance(status, int) and status >= 500
        return _Failed(Fault("server error" if server else "failed call", text), billed=not server)

    def _key_place(self) -> str:
        if self._secret:
            return " that was given as api_key"
        return f" in {self._settings.api_key_env}" if self._settings.api_key_env else " in the environment"

    def _without_keys(self, text: str) -> str:
        """An error as it may be shown: providers repeat the key that they refuse."""
        held = [value for name, value in os.environ.items() if _SECRET_NAME.search(name)]
        for value in sorted({*held, self._secret or ""}, key=len, reverse=True):
            if len(value) >= 6:
                text = text.replace(value, "***")
        return mask_secrets(text, {})

    def _estimate(self, request: Request) -> tuple[int, int, float | None]:
        """Tokens and USD that a request costs at most, as far as can be told before."""
        size = sum(len(message["content"].encode()) for message in request)
        asked = math.ceil(size * self._density) + 16 * len(request)
        price = self._price
        return asked, self._longest, None if price is None else asked * price[0] + self._longest * price[1]

    def _charged(self, request: Request, answer: Any) -> tuple[int, int, float | None]:
        """What a reply cost, as the server counts it; as estimated where it does not count."""
        usage = getattr(answer, "usage", None)
        asked, longest, _ = self._estimate(request)
        told = _counted(usage, "prompt_tokens") or asked
        said = _counted(usage, "completion_tokens") or math.ceil(len((_content(answer) or "").encode()) / _BYTES)
        size = sum(len(message["content"].encode()) for message in request)
        with self._lock:
            self._density = max(self._density, (told - 16 * len(request)) / max(size, 1))
            self._longest = max(longest, said)
        if self._settings.price is not None:
            return told, said, told * self._settings.price[0] + said * self._settings.price[1]
        return told, said, None if self._settings.base_url else _cost_of(answer, self._settings.model)


def load() -> Any:
    """litellm, told to ask nobody for prices and to print nothing; raises MissingExtra."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    try:
        litellm: Any = importlib.import_module("litellm")
    except ImportError as error:
        raise MissingExtra(_EXTRA) from error
    litellm.suppress_debug_info = True  # as praisonaiagents has it; it would print to stdout at each failure
    return litellm


def known_price(settings: JudgeSettings) -> tuple[float, float]:
    """USD for a token that is read and one that is written; raises RewardError where litellm does not know them."""
    wrong = f"max_cost={settings.max_cost:g} cannot be kept: the price of {settings.model!r} is not known"
    help_ = "give price_per_million: {input: USD, output: USD}, or limit max_calls or max_tokens instead"
    if settings.base_url:
        raise RewardError(f"{wrong} at {settings.base_url}; {help_}")
    try:
        asked, said = load().cost_per_token(model=settings.model, prompt_tokens=1, completion_tokens=1)
    except MissingExtra:
        raise
    except Exception as error:  # it raises Exception itself for a model that it does not know
        raise RewardError(f"{wrong} to litellm; {help_}") from error
    return float(asked), float(said)


def _cost_of(answer: Any, model: str) -> float | None:
    try:
        return float(load().completion_cost(completion_response=answer, model=model))
    except Exception:  # noqa: BLE001 - it raises Exception itself for a model that it does not know
        return None


def _asked_wait(error: Exception) -> float:
    """Seconds that the server asks to wait; 0 where it does not say."""
    for headers in (getattr(error, "litellm_response_headers", None), _headers_of(error)):
        try:
            seconds = float((headers or {})["retry-after"])
        except (KeyError, TypeError, ValueError):
            continue
        if seconds >= 0:
            return max(seconds, 0.05)
    return 0.0


def _headers_of(error: Exception) -> Any:
    return getattr(getattr(error, "response", None), "headers", None)


def _counted(usage: Any, name: str) -> int:
    """A server's count of tokens; 0 where it is none, as a negative one would give a budget back."""
    count = getattr(usage, name, None)
    sound = isinstance(count, int | float) and not isinstance(count, bool) and 0 < count < _MOST_TOKENS
    return math.ceil(count) if sound and count is not None else 0


def _content(answer: Any) -> Any:
    choices: Sequence[Any] = getattr(answer, "choices", None) or []
    content = getattr(getattr(choices[0], "message", None), "content", None) if choices else None
    return content if isinstance(content, str) else None


def _text_of(answer: Any, settings: JudgeSettings) -> str:
    """The text of a whole reply; what was cut off or held back is none."""
    choices: Sequence[Any] = getattr(answer, "choices", None) or []
    finish = getattr(choices[0], "finish_reason", None) if choices else None
    if finish == "length":
        text = f"the reply was cut off at reply_tokens={settings.reply_tokens}; raise it (a thinking model needs more)"
        raise _Failed(Fault("cut off", text))
    refusal = getattr(getattr(choices[0], "message", None), "refusal", None) if choices else None
    if finish == "content_filter" or refusal:
        raise _Failed(Fault("refused", f"the model did not answer: {str(refusal or finish)[:200]}"))
    content = _content(answer)
    if not isinstance(content, str) or not content.strip():
        raise _Failed(Fault("unparsed", "the reply has no text"))
    return content
