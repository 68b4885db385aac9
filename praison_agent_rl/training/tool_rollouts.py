"""TRL's own loop of tool calls, with a record of what it leaves out.

Imported only by the process that trains, since it imports ``torch`` at once.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from praison_agent_rl.agent_rollouts.tool_answers import AwaitedTools, NamedTools, telling
from praison_agent_rl.episodes import Telling, fault_of
from praison_agent_rl.errors import TrainingFailed
from praison_agent_rl.training.drawing import DrawingTrainer
from praison_agent_rl.training.together import everywhere

logger = logging.getLogger(__name__)

DROPPED = "tools/results_dropped"
"""Metric: results of tools that ran and that no room was left for, a completion."""
CUT = "tools/cut"
"""Metric: the share of completions that end on a call of a tool that nothing answered."""
FAILED = "rollouts/failed"
"""Metric: the share of rollouts whose episode in an environment did not begin."""


class ToolTrainer(DrawingTrainer):
    """TRL's trainer, which knows the completions that end on an unanswered call, though TRL takes them for whole.

    A rollout whose episode did not begin has no reward and no advantage; ``tell`` is given the first of each kind.
    """

    def __init__(
        self,
        *,
        tools: Sequence[Callable[..., Any]] = (),
        tell: Callable[[str], None] = logger.warning,
        **options: Any,
    ) -> None:
        self._ran = 0
        self._telling = Telling(tell)
        self._unbegun: list[int] = []
        """Places, in the batch of all processes, of the rollouts whose episode did not begin."""
        rewards = list(options.pop("reward_funcs"))
        super().__init__(tools=list(tools) or None, reward_funcs=list(rewards), **options)
        for name in ("reward_funcs", "reward_func_names", "reward_processing_classes", "reward_weights"):
            setattr(self, name, getattr(self, name)[: len(rewards)])  # TRL adds an environment's own, unasked
        self._cut: list[bool] = []
        """Which completions of the last generation end unanswered."""

    def _told(self, tools: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        """The named tools and those of an environment, as they are told and counted."""
        return {name: self._counted(telling(tool)) for name, tool in tools.items()}

    def _counted(self, tool: Callable[..., Any]) -> Callable[..., Any]:
        """``tool``, with each result counted as it comes."""
        if inspect.iscoroutinefunction(tool):

            @functools.wraps(tool)
            async def counted_async(*given: Any, **named: Any) -> Any:
                result = await tool(*given, **named)
                self._ran += 1
                return result

            return counted_async

        @functools.wraps(tool)
        def counted(*given: Any, **named: Any) -> Any:
            result = tool(*given, **named)
            self._ran += 1
            return result

        return counted

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """As TRL does, which has reset the environments before.

        Raises:
            TrainingFailed: no episode began.
        """
        self._note_unbegun()
        found: tuple[Any, ...] = super()._generate(prompts)
        return found

    def _note_unbegun(self) -> None:
        if not self.environments:
            return
        own = [fault_of(environment) for environment in self.environments]
        faults = [fault for each in everywhere(own) for fault in each]
        self._unbegun = [place for place, fault in enumerate(faults) if fault is not None]
        self._metrics["train" if self.model.training else "eval"][FAILED].append(len(self._unbegun) / len(faults))
        if len(self._unbegun) == len(faults):
            raise TrainingFailed(
                f"none of {len(faults)} episodes of a step began; the first: {faults[0].text}. Mend the environment, "
                "or take out the rows with which it fails"
            )
        self._telling.hear(own)

    def _calculate_rewards(self, *given: Any, **options: Any) -> torch.Tensor:
        """As TRL does; NaN for rollouts whose episode did not begin."""
        found: torch.Tensor = super()._calculate_rewards(*given, **options)
        if self.environments:
            found[self._unbegun] = torch.nan
        return found

    def _tool_call_loop(self, *given: Any, **options: Any) -> tuple[Any, ...]:
        self._ran = 0
        pairs = list(zip(self._sync_tool_dicts, self._async_tool_dicts, strict=True))
        self._sync_tool_dicts: list[NamedTools] = [NamedTools(self._told(tools), later) for tools, later in pairs]
        self._async_tool_dicts: list[AwaitedTools] = [AwaitedTools(self._told(later)) for _, later in pairs]
        found: tuple[Any, ...] = super()._tool_call_loop(*given, **options)
        completions, failed = found[1], found[5] + sum(tools.absent for tools in self._sync_tool_dicts)
        told = sum(message["role"] == "tool" for completion in completions for message in completion)
        self._cut = [bool(completion[-1].get("tool_calls")) for completion in completions]
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics[DROPPED].append(max(0, self._ran + failed - told) / len(completions))
        metrics[CUT].append(sum(self._cut) / len(completions))
        return (*found[:5], failed, *found[6:])

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._cut = []
        scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
        return self._without_cut(scored) if self._cut and self.mask_truncated_completions else scored

    def _without_cut(self, scored: dict[str, Any]) -> dict[str, Any]:
        """The batch with the rows masked out that were cut off, also those that end on a call as if complete."""
        kept = torch.tensor([not each for each in self._cut], device=scored["completion_mask"].device).long()[:, None]
        mask, drawn = scored["completion_mask"] * kept, scored["tool_mask"] * kept
        drawn_by_all = self.accelerator.gather((mask * drawn).sum()).sum()
        return {**scored, "completion_mask": mask, "tool_mask": drawn, "num_items_in_batch": drawn_by_all}
