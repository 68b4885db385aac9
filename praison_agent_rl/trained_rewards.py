"""What training a reward model came to: its card, and where it lies to be used as a reward."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from praison_agent_rl.errors import RewardError
from praison_agent_rl.records import FEWEST_PROMPTS, RewardCard
from praison_agent_rl.report import write_report
from praison_agent_rl.reward_cards import CARD, FOLDER, publish_reward_model
from praison_agent_rl.runs import HOME, RunFolder, read_record, write_record, write_text

_STAMP = re.compile(r"-\d{8}-\d{6}-[0-9a-f]{4}$")
"""What ``planning.new_run_root`` puts behind a name."""


@dataclass(frozen=True)
class TrainedReward:
    """A reward model that was trained and published; prints as one line."""

    card: RewardCard
    folder: Path
    """Holds ``model/`` (merged), ``adapter/``, the card, and the run's records."""
    run: Path
    report: Path

    @property
    def name(self) -> str:
        """What to write into ``reward_funcs``."""
        return f"{FOLDER}/{self.card.name}/{self.card.version}"

    def reward(self, **options: Any) -> Any:
        """The model as a reward function; ``options`` as of `praison_agent_rl.rewards.from_model`."""
        from praison_agent_rl.rewards import from_model

        return from_model(str(self.folder), **options)

    def __str__(self) -> str:
        card = self.card
        seen = (
            f"{self.name}: right on {card.accuracy:.0%} of the pairs of {card.held_out} held-out prompts (95 % CI "
            f"{card.accuracy_low:.0%}..{card.accuracy_high:.0%}), margin {card.margin:.3g}"
        )
        if card.passed:
            return seen
        few = f", and fewer than {FEWEST_PROMPTS} prompts show nothing" if card.held_out < FEWEST_PROMPTS else ""
        return f"{seen}; not shown to be better than a coin{few}, so {FOLDER}/{card.name} does not mean it"


def finish_reward(run: RunFolder, *, home: Path = HOME) -> TrainedReward:
    """Publish the reward model of a run whose stages are done, and write its report; done twice it is published once.

    Raises:
        RewardError: nothing was held out, so there is nothing to say of its worth.
    """
    if not run.card.exists():
        raise RewardError(
            f"the reward model in {str(run.merged)!r} was trained and not measured, since no pair was held out; it can "
            "be used by that path. Set held_out for one with a card"
        )
    folder = publish_reward_model(home, name_of(run), run)
    card = read_record(folder / CARD, RewardCard)
    write_record(run.card, card)  # the report says by which name the model is used
    write_report(run)
    for file in (run.report, run.numbers):
        write_text(folder / file.name, file.read_text(encoding="utf-8"))
    return TrainedReward(card, folder.resolve(), run.root, run.report)


def name_of(run: RunFolder) -> str:
    """What a run's reward model is called: as ``run_name`` says, as the agent, or as the configuration file."""
    plan = run.plan
    return str(plan.config.get("run_name") or plan.agent or _STAMP.sub("", run.root.name))
