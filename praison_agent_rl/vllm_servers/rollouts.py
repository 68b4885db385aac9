"""Draw completions of the policy, as it is now, from vLLM servers that have its base weights; no NCCL, no shared GPU.

The servers get each new policy as an adapter under a name that no other ever had, so an answer of an old one cannot be
taken for one of the new. What the policy learns from the completions is not decided here.
"""

import re
import secrets
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from praison_agent_rl.at_once import call_at_once
from praison_agent_rl.endpoints import keep_loopback_off_proxies
from praison_agent_rl.errors import ConfigError, PraisonRLError, ServerFailed
from praison_agent_rl.problems import Problems
from praison_agent_rl.process_settings import best_device
from praison_agent_rl.rollouts import Sampled, Sampling
from praison_agent_rl.vllm_servers.adapters import save_empty, save_servable
from praison_agent_rl.vllm_servers.division import Group, divided, groups_of
from praison_agent_rl.vllm_servers.serving import VllmServer, start_vllm_server
from praison_agent_rl.vllm_servers.sources import Drawn, ForeignServer, Patience, Source

T = TypeVar("T")

_USUAL = Patience()
_PROBE = 10.0
"""Seconds in which a server that was left out must answer to be asked again; the others wait for it."""


class VllmSampler:
    """Samples from the policy that was last offered; use as a context manager, or call ``close``.

    Several servers divide the prompts. One that fails is left out, its prompts go to the others, and it is tried again
    after a pause; the only one there is takes the call with it.
    """

    def __init__(
        self,
        servers: VllmServer | ForeignServer | Sequence[ForeignServer],
        folder: Path,
        *,
        base: str,
        run_id: str,
        patience: Patience = _USUAL,
        tell: Callable[[str], None] = lambda note: None,
    ) -> None:
        """``folder`` gets an adapter for each policy, ``base`` is the folder or hub name of the trained weights.

        ``tell`` hears which server is left out or back, and why completions begin to come without log-probabilities.
        The first server gets the first prompt, so processes that sample at the same time name them in another order.
        """
        keep_loopback_off_proxies()
        self.note: str | None = None
        """Why the last completions came without log-probabilities; None if they came with them."""
        several = list(servers) if isinstance(servers, Sequence) else [servers]
        self._sources = [Source(server, patience) for server in several]
        self._folder = folder
        self._base = base
        self._run_id = re.sub(r"[^\w.-]+", "-", run_id)
        self._at_once = patience.at_once
        self._tell = tell
        self._longest = 0
        self._offered: tuple[int, str] | None = None
        self._taken: tuple[int, str] | None = None  # what another process offered
        self._leaving = threading.Lock()

    def __enter__(self) -> "VllmSampler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self, longest: int, *, rank: int | None = None, all_needed: bool = True) -> list[str]:
        """Compare the servers with what the run needs; ``longest`` is in tokens, prompt and completion together.

        With a ``rank`` each of somebody else's is given an adapter of that rank, without a tensor, and takes it out.
        Where not all are needed, those that are wanting are left out if any other is left. Returns what cannot be known
        from here, as notes.

        Raises:
            ConfigError: one serves other weights, or shorter texts; or several are wanting, all of which are named.
            ServerFailed: one does not answer, or takes no such adapter.
        """
        self._longest = longest
        problems, notes, fitting = Problems(), [], 0
        for source in self._sources:
            found = problems.attempt(partial(self._checked, source, rank))
            notes += found or []
            fitting += found is not None
            if found is None and not all_needed:
                self._leave_out(source, problems.found[-1])
        if all_needed or not fitting:
            problems.raise_all()
        return notes

    def _checked(self, source: Source, rank: int | None) -> list[str]:
        notes = source.check(self._base, self._longest)
        if rank is not None:
            self._try_out(source, rank)
        return notes

    def _try_out(self, source: Source, rank: int) -> None:
        folder = self._folder / f"{self._run_id}-check-{secrets.token_hex(4)}"
        try:
            save_servable(folder, partial(save_empty, rank=rank))
            source.try_out(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def offer(self, step: int, save: Callable[[Path], None]) -> str:
        """Have the servers load the policy of ``step``, which ``save`` writes as a PEFT folder; returns its new name.

        The policy of a step that was offered last is not loaded again. The former one is taken out afterwards.

        Raises:
            ConfigError: vLLM cannot serve such an adapter.
            ServerFailed: no server is left that took it.
            TrainingFailed: it cannot be written, as the disk is full or the folder may not be written to.
        """
        if self._offered and self._offered[0] == step:
            return self._offered[1]
        name = f"{self._run_id}-{step}-{secrets.token_hex(4)}"
        folder = self._folder / name
        try:
            save_servable(folder, save)
            self._by_all(lambda source: source.load(folder))
            self._call_back(name)
            left = self._left()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        former, self._offered = self._offered, (step, name)
        for source in left:
            source.keep_only(name)
        if former:
            shutil.rmtree(self._folder / former[1], ignore_errors=True)
        return name

    def take(self, step: int, name: str) -> None:
        """Sample from the policy of ``step`` that another process offered to the same servers as ``name``."""
        self._taken = step, name
        for source in self._sources:
            source.keep_only(name)

    def has(self, step: int) -> bool:
        """Whether the policy of ``step`` is what is sampled from."""
        policy = self._offered or self._taken
        return policy is not None and policy[0] == step

    def sample(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Sampled:
        """One completion of the offered policy for each prompt, given as token ids; equal ones in a row are a group.

        With a seed, row i is drawn with seed + i, whichever server draws it. Log-probabilities are given where the
        servers' are those before any truncation: with temperature 1 and nothing else by any server, at other
        temperatures by one that was started with ``--logprobs-mode processed_logprobs`` (a repetition penalty is then
        in them), and under top-p, top-k or min-p by one that was not. Otherwise they are None, and ``note`` says why.

        Raises:
            ServerFailed: no server is left that answers what was asked for.
        """
        policy = self._offered or self._taken
        if policy is None:
            raise ServerFailed("no policy was offered to the vLLM server yet; call offer before sample")
        if not prompts:
            return Sampled([], [])
        name = policy[1]
        self._call_back(name)
        before, self.note = self.note, self._why_unknown(name, list(prompts[0]), sampling)
        if self.note and self.note != before:
            self._tell(f"completions are taken as drawn by the policy that is trained: {self.note}")
        groups, left = groups_of(prompts), self._left()
        calls = [
            partial(self._draw, source, name, group, sampling)
            for group, source in zip(groups, divided(groups, left), strict=True)
        ]
        drawn = [pair for group in call_at_once(calls, at_once=self._at_once * len(left)) for pair in group]
        return Sampled([ids for ids, _ in drawn], None if self.note else [log_probs for _, log_probs in drawn])

    def close(self) -> None:
        """Take the policy out of servers of somebody else's, or stop ours; it is safe to call this twice."""
        former, self._offered = self._offered, None
        for source in self._sources:
            source.close()
        if former:
            shutil.rmtree(self._folder / former[1], ignore_errors=True)

    # --- several servers --------------------------------------------------------------------------------------------

    def _left(self) -> list[Source]:
        """The servers that are asked at present.

        Raises:
            ServerFailed: there is none.
        """
        left = [source for source in self._sources if source.failure is None]
        if not left:
            said = "\n".join(f"- {source.failure}" for source in self._sources)
            raise ServerFailed(f"none of the {len(self._sources)} vLLM servers is left:\n{said}")
        return left

    def _draw(self, source: Source, name: str, group: Group, sampling: Sampling) -> list[Drawn]:
        """The completions of a group, by ``source`` or by one that is left when that fails."""
        # vLLM adds the number of a completion within its group (v1/engine/parallel_sampling.py)
        seeded = sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + group.row)
        while True:
            if source.failure is not None:
                left = self._left()
                source = left[group.number % len(left)]
            drawn = self._asked(source, partial(source.draw, name, group.prompt, group.size, seeded))
            if drawn is not None:
                return drawn

    def _why_unknown(self, name: str, prompt: list[int], sampling: Sampling) -> str | None:
        """Why the log-probabilities of some server are not to be used; None if they are of all."""
        asked = [self._asked(each, partial(each.why_unknown, name, prompt, sampling)) for each in self._left()]
        return next((reason for reason in asked if reason), None)

    def _by_all(self, do: Callable[[Source], None]) -> None:
        """Do something with all servers that are asked at present, at the same time."""
        asked = [source for source in self._sources if source.failure is None]
        call_at_once([partial(self._asked, each, partial(do, each)) for each in asked], at_once=len(asked))

    def _asked(self, source: Source, call: Callable[[], T]) -> T | None:
        """What a call of one server gives; None where that failed, and the server is left out from now on."""
        try:
            return call()
        except ServerFailed as failure:
            if len(self._sources) == 1:
                raise
            self._leave_out(source, failure)
            return None

    def _leave_out(self, source: Source, failure: PraisonRLError) -> None:
        with self._leaving:
            told = source.failure is not None
            source.leave(failure)
        if not told:
            self._tell(f"{failure}. It is left out until it is back")

    def _call_back(self, name: str) -> None:
        """Have each server that was left out load the policy ``name``, once its pause is over and if it is there."""
        for source in self._sources:
            if source.failure is None or source.backoff.seconds_left:
                continue
            with source.backoff.attempt():
                try:
                    source.check(self._base, self._longest, timeout=_PROBE)  # it may have other weights now
                    source.load(self._folder / name)
                except (ConfigError, ServerFailed) as failure:
                    source.failure = failure
                    continue
            source.failure = None
            source.keep_only(name)
            self._tell(f"{source.what} is back, and has the policy")


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
