"""One vLLM server that gets policies as adapters and draws completions of them; sharing work is not its matter.

An answer is used if it is one to what was asked, by the policy that was asked; anything else is the server's failure.
"""

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from praison_agent_rl.backoff import Backoff
from praison_agent_rl.child import last_lines
from praison_agent_rl.endpoints import list_models
from praison_agent_rl.errors import ConfigError, PraisonRLError, ServerFailed
from praison_agent_rl.rollouts import Sampling
from praison_agent_rl.serving import LOG
from praison_agent_rl.vllm_servers.addresses import api_root
from praison_agent_rl.vllm_servers.calls import Refused, ask, without_key
from praison_agent_rl.vllm_servers.completions import completion_request, why_unreadable
from praison_agent_rl.vllm_servers.serving import VllmServer, rank_of

Drawn = tuple[list[int], list[float]]
"""Token ids of a completion, and the natural log-probability of each."""

_SAME = 0.02
"""Log-probabilities, in nats, that differ by less are equal but for rounding in 16 bits."""
_IMPOSSIBLE = -9999.0
"""What vLLM writes for minus infinity."""


@dataclass(frozen=True, kw_only=True)
class ForeignServer:
    """A vLLM server that somebody else started, with ``--enable-lora`` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True."""

    url: str
    """Base URL, with or without ``/v1``."""
    api_key: str | None = field(default=None, repr=False)
    seen_as: str | None = None
    """Path by which the server sees the folder of adapters, where it is another than here."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long and how often a server is asked."""

    timeout: float = 1800.0
    """Seconds for all completions of one prompt."""
    retries: int = 4
    """Further attempts after a connection was refused or broken; a server's own refusals are not repeated."""
    at_once: int = 64
    """Prompts that a server is asked for at the same time."""


class Source:
    """A server, what it holds, and whether it is asked at present."""

    def __init__(self, server: VllmServer | ForeignServer, patience: Patience) -> None:
        self.failure: PraisonRLError | None = None
        """Why it is left out for now; None where it is asked."""
        self.backoff = Backoff()
        """When it is tried again."""
        self._server = server
        self._ours = server if isinstance(server, VllmServer) else None
        self._url = api_root(server.url)
        self._patience = patience
        self._held: list[str] = []
        self._processed: bool | None = None

    @property
    def what(self) -> str:
        """How a message names it."""
        return f"the vLLM server at {self._url}"

    def leave(self, failure: PraisonRLError) -> None:
        """Be left out from now on; the pause before it is tried again counts from its first failure."""
        if self.failure is None:
            with self.backoff.attempt():
                self.failure = failure

    # --- checks -----------------------------------------------------------------------------------------------------

    def check(self, base: str, longest: int, *, timeout: float = 30.0) -> list[str]:
        """Compare it with what the run needs: the weights of ``base``, and so many tokens of prompt and completion.

        Returns what cannot be known from here, as notes.

        Raises:
            ConfigError: it serves other weights, or shorter texts.
            ServerFailed: it does not answer within ``timeout`` seconds.
        """
        self._processed = None  # it may have been started anew
        try:
            models = list_models(self._url, self._server.api_key, timeout=timeout)
        except (OSError, ValueError) as error:
            said = without_key(str(error), self._server.api_key)
            raise ServerFailed(f"{self.what} does not say which models it has: {said}{self._end_of_log()}") from error
        bases = [model for name, model in models.items() if name and not model.get("parent")]
        if not bases:
            raise ServerFailed(f"{self.what} lists no base model")
        room = bases[0].get("max_model_len")
        if isinstance(room, int) and room < longest:
            raise ConfigError(
                f"{self.what} takes {room} tokens of prompt and completion (max_model_len), the run needs {longest}; "
                "start it with a larger --max-model-len, or lower max_seq_length"
            )
        names = [str(model[key]) for model in bases for key in ("root", "id") if model.get(key)]
        return [] if any(_same_place(name, base) for name in names) else self._other(names[0], base)

    def _other(self, served: str, base: str) -> list[str]:
        here, there = _config_of(base), _config_of(served)
        shape = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
        differing = [key for key in shape if here and there and here.get(key) != there.get(key)]
        said = f"{self.what} serves {served!r}, and the run trains on {base!r}"
        if differing or (_hub_name(served) and _hub_name(base)):
            what = "; ".join(f"{key}: {there.get(key)!r} there, {here.get(key)!r} here" for key in differing)
            raise ConfigError(f"{said}{': ' + what if what else ''}; start it for the weights that are trained")
        return [f"{said}; whether these are the same weights cannot be known from here"]

    def try_out(self, folder: Path) -> None:
        """Have it load the adapter in ``folder``, which has no tensor, and take it out again.

        Raises:
            ServerFailed: it takes none, none of this rank, or does not see the folder.
        """
        if self._ours:
            return
        try:
            self._post_load(folder)
        except Refused as refused:
            if advice := _what_to_do(refused, rank_of(folder)):
                raise ServerFailed(f"{self.what} takes no adapter of this run ({refused}); {advice}") from refused
            return  # vLLM 0.32 saw the folder and bore the rank, and then missed the tensors (lora/worker_manager.py)
        self.keep_only()

    # --- adapters ---------------------------------------------------------------------------------------------------

    def load(self, folder: Path) -> None:
        """Have it offer the adapter in ``folder``, under the folder's name, which no other adapter ever had.

        Raises:
            ServerFailed: it is gone, or refused.
        """
        try:
            self._post_load(folder)
        except Refused as refused:
            rank = rank_of(folder)
            advice = _what_to_do(refused, rank) or f"the adapter has rank {rank}; the server's log says more"
            path = self._path_of(folder)
            raise ServerFailed(f"{self.what} refused the adapter at {path!r} ({refused}); {advice}") from refused

    def keep_only(self, name: str | None = None) -> None:
        """Take out whatever this process had it load but the adapter ``name``; no other is ever asked for again."""
        for former in [held for held in self._held if held != name]:
            self._held.remove(former)
            with contextlib.suppress(ServerFailed, Refused):
                timeout = 60.0 if self.failure is None else 10.0
                self._post("unload_lora_adapter", {"lora_name": former}, timeout=timeout, retries=0)

    def close(self) -> None:
        """Stop a server of ours, and leave one of somebody else's as it was."""
        if self._ours:
            self._ours.stop()
        else:
            self.keep_only()

    def _post_load(self, folder: Path) -> None:
        body = {"lora_name": folder.name, "lora_path": self._path_of(folder)}
        try:
            self._post("load_lora_adapter", body, timeout=300.0)
        except Refused as refused:
            # by a first attempt, whose answer was lost, or by another process of this run: nobody else knows the name
            if "already been loaded" not in refused.said:
                raise
        self._held.append(folder.name)

    def _path_of(self, folder: Path) -> str:
        seen_as = self._server.seen_as if isinstance(self._server, ForeignServer) else None
        return f"{seen_as.rstrip('/')}/{folder.name}" if seen_as else str(folder.resolve())

    # --- completions ------------------------------------------------------------------------------------------------

    def draw(self, name: str, prompt: list[int], count: int, sampling: Sampling) -> list[Drawn]:
        """So many completions of one prompt by the policy ``name``.

        Raises:
            ServerFailed: it is gone, refused, or answered with something else than was asked for.
        """
        greedy = sampling.temperature == 0
        body = completion_request(name, prompt, sampling) | {"n": 1 if greedy else count}  # vLLM refuses equal answers
        choices = self._complete(body)
        drawn = [self._read(choice, prompt, sampling) for choice in choices]
        return drawn * count if greedy else drawn

    def _complete(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The choices of an answer, in order, if it is one to ``body``."""
        try:
            answer = self._post("completions", body, timeout=self._patience.timeout)
        except Refused as refused:
            gone = "; it was started again, or somebody took the adapter out" if refused.status == 404 else ""
            log = self._end_of_log() if refused.status >= 500 else ""  # its engine may have died behind its back
            asked = f"a prompt of {len(body['prompt'])} tokens"
            raise ServerFailed(f"{self.what} refused {asked}: {refused}{gone}{log}") from refused
        if not answer:
            raise ServerFailed(f"{self.what} answered completions with no JSON object; is there a proxy before it?")
        if answer.get("model") != body["model"]:
            raise ServerFailed(
                f"{self.what} was asked for the policy {body['model']!r} and answered as {answer.get('model')!r}; its "
                "answer is not used. Is there a router before it that renames models?"
            )
        given = answer.get("choices") or []
        if unreadable := why_unreadable(given):
            raise ServerFailed(f"{self.what} answered as no vLLM does: with {unreadable}; see what runs there")
        choices = sorted(given, key=lambda choice: int(choice.get("index", 0)))
        if len(choices) != body["n"]:
            raise ServerFailed(f"{self.what} was asked for {body['n']} completions and gave {len(choices)}")
        return choices

    def _read(self, choice: Mapping[str, Any], prompt: list[int], sampling: Sampling) -> Drawn:
        """Token ids and log-probabilities of one completion, each checked."""
        ids, given = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if not ids or given is None or len(ids) != len(given):
            raise ServerFailed(
                f"{self.what} gave {len(ids or [])} token ids with {len(given or [])} log-probabilities; a vLLM is "
                "needed that knows return_token_ids (0.22 or later)"
            )
        if (seen := choice.get("prompt_token_ids")) is not None and list(seen) != prompt:
            raise ServerFailed(f"{self.what} read a prompt of {len(prompt)} tokens as another of {len(seen)}")
        self._check_end(ids, choice, sampling)
        bad = [value for value in given if value is None or not _IMPOSSIBLE < value <= _SAME]
        if bad:
            raise ServerFailed(
                f"{self.what} gave {bad[0]} as the log-probability of a token that it drew; the weights or the "
                "adapter have become NaN, or it was started with a --logprobs-mode that gives logits"
            )
        return list(ids), [min(float(value), 0.0) for value in given]

    def _check_end(self, ids: list[int], choice: Mapping[str, Any], sampling: Sampling) -> None:
        early = [token for token in ids[:-1] if token in sampling.ends]
        reason = choice.get("finish_reason")
        fits = ids[-1] in sampling.ends if reason == "stop" else len(ids) == sampling.max_tokens
        if early or not fits or reason not in ("stop", "length"):
            raise ServerFailed(
                f"{self.what} ended a completion of {len(ids)} tokens with {ids[-1]} (finish_reason {reason!r}, "
                f"stop_reason {choice.get('stop_reason')!r}), but the run ends them with one of {list(sampling.ends)} "
                f"or after {sampling.max_tokens}; start it with --generation-config vllm"
            )

    # --- log-probabilities ------------------------------------------------------------------------------------------

    def why_unknown(self, name: str, prompt: list[int], sampling: Sampling) -> str | None:
        """Why its log-probabilities are not those of the distribution before truncation; None if they are."""
        truncated = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
        shaped = sampling.temperature != 1 or sampling.repetition_penalty != 1
        if sampling.temperature == 0:
            return "at temperature 0 nothing is drawn, so there are no log-probabilities"
        if not truncated and not shaped:
            return None
        if self._processed is None:
            self._processed = self._gives_processed(name, prompt)
        if self._processed and truncated:
            return f"{self.what} gives log-probabilities after top_p, top_k and min_p only"
        if not self._processed and shaped:
            return (
                f"{self.what} gives log-probabilities before temperature and penalty only; start it with "
                "--logprobs-mode processed_logprobs"
            )
        return None

    def _gives_processed(self, name: str, prompt: list[int]) -> bool:
        """Whether its log-probabilities change with the temperature."""
        body = completion_request(name, prompt, Sampling(max_tokens=1)) | {"logprobs": 1, "n": 1}
        likeliest = []
        for temperature in (1.0, 2.0):  # vLLM takes none above 2
            choice = self._complete({**body, "temperature": temperature})[0]
            top = (choice.get("logprobs") or {}).get("top_logprobs") or [{}]
            likeliest.append(max([value for value in top[0].values() if value is not None], default=math.nan))
        changed: bool = abs(likeliest[0] - likeliest[1]) > _SAME  # False for a certain token too
        return changed

    # --- asking -----------------------------------------------------------------------------------------------------

    def _post(self, what: str, body: dict[str, Any], *, timeout: float, retries: int | None = None) -> dict[str, Any]:
        further = self._patience.retries if retries is None else retries
        try:
            return ask(
                f"{self._url}/{what}",
                body,
                api_key=self._server.api_key,
                timeout=timeout,
                pauses=(2.0**n / 4 for n in range(further) if self._may_run()),
            )
        except (OSError, ValueError) as error:
            slow = isinstance(error, TimeoutError) or "timed out" in str(error)
            do = (
                f"it did not answer within {timeout:.0f} s: give it more time, fewer prompts at once or shorter answers"
                if slow
                else "see that it runs"
                if self._may_run()
                else "it has ended"
            )
            raise ServerFailed(f"{self.what} did not answer {what}: {error}; {do}{self._end_of_log()}") from error

    def _may_run(self) -> bool:
        """Whether it may answer yet; one of ours that has ended does not come back."""
        return self._ours is None or self._ours.running

    def _end_of_log(self) -> str:
        return f"; the end of its log:\n{last_lines(self._ours.home / LOG)}" if self._ours else ""


def _what_to_do(refused: Refused, rank: int) -> str | None:
    """What would make a server take an adapter of ``rank``; None where what it said is not known."""
    said = refused.said.lower()
    if "max_lora_rank" in said or "max-lora-rank" in said:
        return f"the adapter has rank {rank}: start the server with --max-lora-rank {rank} or more, or lower lora_r"
    if refused.status in (401, 403):
        return "give the key that it asks for"
    if "lora is not enabled" in said or (refused.status == 404 and "adapter" not in said):
        return "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
    if refused.status == 404:
        return "it does not see that folder: say by vllm_server_sees (seen_as) under which path it does"
    return None


def _same_place(one: str, other: str) -> bool:
    return one == other or (Path(one).exists() and Path(one).resolve() == Path(other).resolve())


def _hub_name(text: str) -> bool:
    return text.count("/") == 1 and not text.startswith(("/", ".", "~")) and not Path(text).exists()


def _config_of(source: str) -> dict[str, Any]:
    try:
        return dict(json.loads((Path(source) / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
