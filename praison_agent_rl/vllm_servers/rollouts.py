"""Draw completions of the policy, as it is now, from a vLLM server that has its base weights; no NCCL, no shared GPU.

The server gets each new policy as an adapter under a name that no other ever had, so an answer of an old one cannot be
taken for one of the new. What the policy learns from the completions is not decided here.
"""

import contextlib
import itertools
import json
import math
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from praison_agent_rl.at_once import call_at_once
from praison_agent_rl.child import last_lines
from praison_agent_rl.endpoints import keep_loopback_off_proxies, list_models
from praison_agent_rl.errors import ConfigError, ServerFailed
from praison_agent_rl.process_settings import best_device
from praison_agent_rl.rollouts import Sampled, Sampling
from praison_agent_rl.serving import LOG
from praison_agent_rl.vllm_servers.adapters import save_servable
from praison_agent_rl.vllm_servers.calls import Refused, ask
from praison_agent_rl.vllm_servers.completions import completion_request, why_unreadable
from praison_agent_rl.vllm_servers.serving import VllmServer, rank_of, start_vllm_server

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
    """Prompts that are asked for at the same time."""


class VllmSampler:
    """Samples from the policy that was last offered; use as a context manager, or call ``close``."""

    def __init__(
        self,
        server: VllmServer | ForeignServer,
        folder: Path,
        *,
        base: str,
        run_id: str,
        patience: Patience = Patience(),
        tell: Callable[[str], None] = lambda note: None,
    ) -> None:
        """``folder`` gets an adapter for each policy, ``base`` is the folder or hub name of the trained weights.

        ``tell`` hears why completions begin to come without log-probabilities.
        """
        keep_loopback_off_proxies()
        self.note: str | None = None
        """Why the last completions came without log-probabilities; None if they came with them."""
        self._server = server
        self._url = server.url.rstrip("/").removesuffix("/v1") + "/v1"
        self._folder = folder
        self._base = base
        self._run_id = re.sub(r"[^\w.-]+", "-", run_id)
        self._patience = patience
        self._tell = tell
        self._offered: tuple[int, str] | None = None
        self._taken: tuple[int, str] | None = None  # what another process offered
        self._processed: bool | None = None

    def __enter__(self) -> "VllmSampler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self, longest: int) -> list[str]:
        """Compare the server with what the run needs; ``longest`` is in tokens, prompt and completion together.

        Returns what cannot be known from here, as notes.

        Raises:
            ConfigError: it serves other weights, or shorter texts.
            ServerFailed: it does not answer.
        """
        try:
            models = list_models(self._url, self._server.api_key, timeout=30.0)
        except (OSError, ValueError) as error:
            raise ServerFailed(f"{self._what} does not say which models it has: {error}{self._end_of_log()}") from error
        bases = [model for name, model in models.items() if name and not model.get("parent")]
        if not bases:
            raise ServerFailed(f"{self._what} lists no base model")
        room = bases[0].get("max_model_len")
        if isinstance(room, int) and room < longest:
            raise ConfigError(
                f"{self._what} takes {room} tokens of prompt and completion (max_model_len), the run needs {longest}; "
                "start it with a larger --max-model-len, or lower max_seq_length"
            )
        names = [str(model[key]) for model in bases for key in ("root", "id") if model.get(key)]
        return [] if any(_same_place(name, self._base) for name in names) else self._other(names[0])

    def _other(self, served: str) -> list[str]:
        here, there = _config_of(self._base), _config_of(served)
        shape = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
        differing = [key for key in shape if here and there and here.get(key) != there.get(key)]
        said = f"{self._what} serves {served!r}, and the run trains on {self._base!r}"
        if differing or (_hub_name(served) and _hub_name(self._base)):
            what = "; ".join(f"{key}: {there.get(key)!r} there, {here.get(key)!r} here" for key in differing)
            raise ConfigError(f"{said}{': ' + what if what else ''}; start it for the weights that are trained")
        return [f"{said}; whether these are the same weights cannot be known from here"]

    def offer(self, step: int, save: Callable[[Path], None]) -> str:
        """Have the server load the policy of ``step``, which ``save`` writes as a PEFT folder; returns its new name.

        The policy of a step that was offered last is not loaded again. The former one is taken out afterwards.

        Raises:
            ConfigError: vLLM cannot serve such an adapter.
            ServerFailed: the server is gone or refused it.
            TrainingFailed: it cannot be written, as the disk is full or the folder may not be written to.
        """
        if self._offered and self._offered[0] == step:
            return self._offered[1]
        name = f"{self._run_id}-{step}-{secrets.token_hex(4)}"
        folder = self._folder / name
        try:
            save_servable(folder, save)
            self._load(name, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        former, self._offered = self._offered, (step, name)
        self._take_out(former)
        return name

    def take(self, step: int, name: str) -> None:
        """Sample from the policy of ``step`` that another process offered to the same server as ``name``."""
        self._taken = step, name

    def has(self, step: int) -> bool:
        """Whether the policy of ``step`` is what is sampled from."""
        policy = self._offered or self._taken
        return policy is not None and policy[0] == step

    def sample(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Sampled:
        """One completion of the offered policy for each prompt, given as token ids; equal ones in a row are a group.

        With a seed, row i is drawn with seed + i. Log-probabilities are given where the server's are those before any
        truncation: with temperature 1 and nothing else by any server, at other temperatures by one that was started
        with ``--logprobs-mode processed_logprobs`` (a repetition penalty is then in them), and under top-p, top-k or
        min-p by one that was not. Otherwise they are None, and ``note`` says why.

        Raises:
            ServerFailed: the server is gone, refused, or answered with something else than was asked for.
        """
        policy = self._offered or self._taken
        if policy is None:
            raise ServerFailed("no policy was offered to the vLLM server yet; call offer before sample")
        if not prompts:
            return Sampled([], [])
        name = policy[1]
        before, self.note = self.note, self._why_unknown(name, list(prompts[0]), sampling)
        if self.note and self.note != before:
            self._tell(self.note)
        calls, row = [], 0
        for prompt, equal in itertools.groupby(map(list, prompts)):
            count = len(list(equal))
            calls.append(partial(self._group, name, prompt, count, _seeded(sampling, row)))
            row += count
        drawn = [pair for group in call_at_once(calls, at_once=self._patience.at_once) for pair in group]
        return Sampled([ids for ids, _ in drawn], None if self.note else [log_probs for _, log_probs in drawn])

    def close(self) -> None:
        """Take the policy out of a server of somebody else's, or stop ours; it is safe to call this twice."""
        former, self._offered = self._offered, None
        if isinstance(self._server, VllmServer):
            self._server.stop()
            if former:
                shutil.rmtree(self._folder / former[1], ignore_errors=True)
        else:
            self._take_out(former)

    # --- adapters ---------------------------------------------------------------------------------------------------

    def _load(self, name: str, folder: Path) -> None:
        seen_as = self._server.seen_as if isinstance(self._server, ForeignServer) else None
        path = f"{seen_as.rstrip('/')}/{name}" if seen_as else str(folder.resolve())
        try:
            self._post("load_lora_adapter", {"lora_name": name, "lora_path": path}, timeout=300.0)
        except Refused as refused:
            if "already been loaded" in refused.said:
                return  # by a first attempt, whose answer was lost: nobody else knows the name
            raise ServerFailed(
                f"{self._what} refused the adapter at {path!r} ({refused}); {_what_to_do(refused, rank_of(folder))}"
            ) from refused

    def _take_out(self, former: tuple[int, str] | None) -> None:
        if former:
            with contextlib.suppress(ServerFailed, Refused):  # its name is never asked for again
                self._post("unload_lora_adapter", {"lora_name": former[1]}, timeout=60.0, retries=0)
            shutil.rmtree(self._folder / former[1], ignore_errors=True)

    # --- completions ------------------------------------------------------------------------------------------------

    def _group(
        self, name: str, prompt: list[int], count: int, sampling: Sampling
    ) -> list[tuple[list[int], list[float]]]:
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
            raise ServerFailed(f"{self._what} refused {asked}: {refused}{gone}{log}") from refused
        if not answer:
            raise ServerFailed(f"{self._what} answered completions with no JSON object; is there a proxy before it?")
        if answer.get("model") != body["model"]:
            raise ServerFailed(
                f"{self._what} was asked for the policy {body['model']!r} and answered as {answer.get('model')!r}; its "
                "answer is not used. Is there a router before it that renames models?"
            )
        given = answer.get("choices") or []
        if unreadable := why_unreadable(given):
            raise ServerFailed(f"{self._what} answered as no vLLM does: with {unreadable}; see what runs there")
        choices = sorted(given, key=lambda choice: int(choice.get("index", 0)))
        if len(choices) != body["n"]:
            raise ServerFailed(f"{self._what} was asked for {body['n']} completions and gave {len(choices)}")
        return choices

    def _read(self, choice: Mapping[str, Any], prompt: list[int], sampling: Sampling) -> tuple[list[int], list[float]]:
        """Token ids and log-probabilities of one completion, each checked."""
        ids, given = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if not ids or given is None or len(ids) != len(given):
            raise ServerFailed(
                f"{self._what} gave {len(ids or [])} token ids with {len(given or [])} log-probabilities; a vLLM is "
                "needed that knows return_token_ids (0.22 or later)"
            )
        if (seen := choice.get("prompt_token_ids")) is not None and list(seen) != prompt:
            raise ServerFailed(f"{self._what} read a prompt of {len(prompt)} tokens as another of {len(seen)}")
        self._check_end(ids, choice, sampling)
        bad = [value for value in given if value is None or not _IMPOSSIBLE < value <= _SAME]
        if bad:
            raise ServerFailed(
                f"{self._what} gave {bad[0]} as the log-probability of a token that it drew; the weights or the "
                "adapter have become NaN, or it was started with a --logprobs-mode that gives logits"
            )
        return list(ids), [min(float(value), 0.0) for value in given]

    def _check_end(self, ids: list[int], choice: Mapping[str, Any], sampling: Sampling) -> None:
        early = [token for token in ids[:-1] if token in sampling.ends]
        reason = choice.get("finish_reason")
        fits = ids[-1] in sampling.ends if reason == "stop" else len(ids) == sampling.max_tokens
        if early or not fits or reason not in ("stop", "length"):
            raise ServerFailed(
                f"{self._what} ended a completion of {len(ids)} tokens with {ids[-1]} (finish_reason {reason!r}, "
                f"stop_reason {choice.get('stop_reason')!r}), but the run ends them with one of {list(sampling.ends)} "
                f"or after {sampling.max_tokens}; start it with --generation-config vllm"
            )

    # --- log-probabilities ------------------------------------------------------------------------------------------

    def _why_unknown(self, name: str, prompt: list[int], sampling: Sampling) -> str | None:
        """Why the server's log-probabilities are not those of the distribution before truncation; None if they are."""
        truncated = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
        shaped = sampling.temperature != 1 or sampling.repetition_penalty != 1
        if sampling.temperature == 0:
            return "at temperature 0 nothing is drawn, so there are no log-probabilities"
        if not truncated and not shaped:
            return None
        if self._processed is None:
            self._processed = self._gives_processed(name, prompt)
        if self._processed and truncated:
            return "the vLLM server gives log-probabilities after top_p, top_k and min_p only"
        if not self._processed and shaped:
            return (
                "the vLLM server gives log-probabilities before temperature and penalty only; start it with "
                "--logprobs-mode processed_logprobs"
            )
        return None

    def _gives_processed(self, name: str, prompt: list[int]) -> bool:
        """Whether the server's log-probabilities change with the temperature."""
        body = completion_request(name, prompt, Sampling(max_tokens=1)) | {"logprobs": 1, "n": 1}
        likeliest = []
        for temperature in (1.0, 2.0):  # vLLM takes none above 2
            choice = self._complete({**body, "temperature": temperature})[0]
            top = (choice.get("logprobs") or {}).get("top_logprobs") or [{}]
            likeliest.append(max([value for value in top[0].values() if value is not None], default=math.nan))
        changed: bool = abs(likeliest[0] - likeliest[1]) > _SAME  # False for a certain token too
        return changed

    # --- asking -----------------------------------------------------------------------------------------------------

    @property
    def _what(self) -> str:
        return f"the vLLM server at {self._url}"

    def _post(self, what: str, body: dict[str, Any], *, timeout: float, retries: int | None = None) -> dict[str, Any]:
        ours = self._server if isinstance(self._server, VllmServer) else None
        further = self._patience.retries if retries is None else retries
        try:
            return ask(
                f"{self._url}/{what}",
                body,
                api_key=self._server.api_key,
                timeout=timeout,
                # one of ours that has ended does not come back
                pauses=(2.0**n / 4 for n in range(further) if ours is None or ours.running),
            )
        except (OSError, ValueError) as error:
            slow = isinstance(error, TimeoutError) or "timed out" in str(error)
            do = (
                f"it did not answer within {timeout:.0f} s: give it more time, fewer prompts at once or shorter answers"
                if slow
                else "see that it runs"
                if ours is None or ours.running
                else "it has ended"
            )
            raise ServerFailed(f"{self._what} did not answer {what}: {error}; {do}{self._end_of_log()}") from error

    def _end_of_log(self) -> str:
        ours = isinstance(self._server, VllmServer)
        return f"; the end of its log:\n{last_lines(self._server.home / LOG)}" if ours else ""  # type: ignore[union-attr]


def start_sampling_server(base: str, *, rank: int, longest: int, options: Sequence[str] = ()) -> VllmServer:
    """A vLLM server of our own for ``base`` that a `VllmSampler` gets log-probabilities at any temperature from.

    ``longest`` is the prompt and the completion together, in tokens; ``options`` are further arguments of vLLM's.

    Raises:
        MissingExtra: there is no vLLM.
        ServerFailed: it did not come up.
    """
    own = ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--max-model-len", str(longest)]
    if best_device() == "cpu":
        # on a CPU vLLM 0.32 dies of a prompt that is computed in parts and has a seed (gpu_model_runner.py: set_offset)
        own.append("--no-enable-chunked-prefill")
    return start_vllm_server(base, max_rank=rank, options=[*own, *options])


def _what_to_do(refused: Refused, rank: int) -> str:
    if "max_lora_rank" in refused.said or "max-lora-rank" in refused.said:
        return f"the adapter has rank {rank}: start the server with --max-lora-rank {rank} or more, or lower lora_r"
    if refused.status in (401, 403):
        return "give the key that it asks for"
    if refused.status == 404 and "adapter" not in refused.said.lower():
        return "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
    if refused.status == 404:
        return "it does not see that folder: say by seen_as under which path it does"
    return f"the adapter has rank {rank}; the server's log says more"


def _seeded(sampling: Sampling, start: int) -> Sampling:
    # vLLM adds the number of a completion within its group (v1/engine/parallel_sampling.py)
    return sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + start)


def _same_place(one: str, other: str) -> bool:
    return one == other or (Path(one).exists() and Path(one).resolve() == Path(other).resolve())


def _hub_name(text: str) -> bool:
    return text.count("/") == 1 and not text.startswith(("/", ".", "~")) and not Path(text).exists()


def _config_of(source: str) -> dict[str, Any]:
    try:
        return dict(json.loads((Path(source) / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
