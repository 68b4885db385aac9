"""Let agents make rollouts with the policy that this process has: it offers jobs, and draws what their agents ask for.

Over HTTP on 127.0.0.1; whoever has the agents may be another process. No model is loaded here.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from praison_agent_rl.agent_rollouts.chat_forms import Drawn, Words
from praison_agent_rl.agent_rollouts.desk import Desk, WaitingCall
from praison_agent_rl.agent_rollouts.http_door import Door
from praison_agent_rl.agent_rollouts.jobs import Rollout, RolloutJob
from praison_agent_rl.agent_rollouts.policy_chat import PolicyChat
from praison_agent_rl.errors import AgentError, TrainingFailed
from praison_agent_rl.rollouts import Draw, Sampling

__all__ = ["RolloutEndpoint", "Words"]


class RolloutEndpoint:
    """Offers rollouts to whoever follows it, and the policy to their agents; open within ``with``.

    - ``GET /jobs?wait=30&limit=8``: jobs that nobody has taken, which are then the asking host's; 410 at the end.
    - ``POST /jobs/<id>``: the outcome of one, which ends it.
    - ``POST /rollouts/<id>/<agent>/v1/chat/completions``: OpenAI's chat completions. How is drawn is said by ``run``;
      of a request only ``max_tokens`` and ``max_completion_tokens`` count, where they are lower, and ``logprobs``. Tool
      choices and response formats are kept with the call and change nothing, as with ``transformers serve``, which
      shows tools with ``tool_choice: "none"`` too; vLLM would force them.

    ``room`` is how many tokens a prompt may have, ``at_most`` how many an answer. ``key`` is what each request must
    carry; without one it is made. Where jobs wait, none is under way and nobody asks for one within
    ``first_host_seconds``, ``run`` raises.

    Raises:
        AgentError: no header can carry the key, or a number is below 1.
    """

    def __init__(
        self,
        words: Words,
        *,
        room: int,
        at_most: int,
        key: str | None = None,
        model: str = "policy",
        first_host_seconds: float = 120.0,
    ) -> None:
        if room < 1 or at_most < 1:
            raise AgentError(f"room and at_most must be at least 1, not {room} and {at_most}")
        self.key = secrets.token_urlsafe(24) if key is None else key
        """For the Authorization header, as ``Bearer``."""
        if not (self.key and self.key.isascii() and self.key.isprintable()):
            raise AgentError("the key is empty, or holds a character that no HTTP header can carry")
        self._at_most = at_most
        self._draw_seconds = 0.0  # of the last draw
        self._desk = Desk(first_host_seconds=first_host_seconds)
        self._door = Door(self._desk, PolicyChat(words, self._desk, room=room, model=model), self.key)
        self.address = f"http://127.0.0.1:{self._door.server_port}"

    def __enter__(self) -> "RolloutEndpoint":
        self._desk.is_open = True
        self._door.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._desk.close()
        self._door.stop()

    def run(
        self,
        jobs: Sequence[RolloutJob],
        draw: Draw,
        sampling: Sampling,
        *,
        on_end: Callable[[int, int], None] = lambda done, of: None,
    ) -> list[Rollout]:
        """Have ``jobs`` done, and return how each went, in their order.

        Blocks until all have ended. ``draw`` is called in this thread. A rollout whose host does not report in time
        ends with an error; if anything raises here, so do all that are left. Ids of jobs are not used again.

        Raises:
            AgentError: nobody asks for the jobs, two have the same id, or the endpoint is closed or busy.
            TrainingFailed: ``draw`` gives another number of completions than was asked for.
        """
        self._desk.lay_out(jobs)
        most, ended, drawn = min(sampling.max_tokens, self._at_most), 0, 0
        try:
            while ended < len(jobs):
                if calls := self._desk.next_calls(self._draw_seconds):
                    began = time.monotonic()
                    seed = None if sampling.seed is None else sampling.seed + drawn
                    _draw(calls, draw, replace(sampling, seed=seed, max_tokens=most))
                    self._draw_seconds = time.monotonic() - began
                    drawn += len(calls)
                if self._desk.ended > ended:
                    ended = self._desk.ended
                    on_end(ended, len(jobs))
            return self._desk.rollouts()
        except BaseException as error:
            self._desk.clear(f"the rollouts were broken off: {type(error).__name__}: {error}")
            raise


def _draw(calls: list[WaitingCall], draw: Draw, sampling: Sampling) -> None:
    """Answer each call; of a completion that is longer than its call wants, the end is dropped."""
    limits = [min(sampling.max_tokens, call.asked.limit or sampling.max_tokens) for call in calls]
    sampled = draw([call.prompt_ids for call in calls], replace(sampling, max_tokens=max(limits)))
    if len(sampled.ids) != len(calls):
        raise TrainingFailed(f"{len(calls)} completions were to be drawn, and {len(sampled.ids)} were")
    known: Sequence[list[float] | None] = [None] * len(calls) if sampled.log_probs is None else sampled.log_probs
    for call, limit, ids, log_probs in zip(calls, limits, sampled.ids, known, strict=True):
        kept = ids[:limit]
        ended = bool(kept) and kept[-1] in sampling.ends
        call.give(Drawn(kept, None if log_probs is None else log_probs[:limit], ended))
