"""Say in plain words what goes wrong in a training run, from its step events alone; nothing here reads files or trains.

Thresholds stand beside each symptom with their reasons. A healthy run has none of them: that is tested with the same
care as that each is found (``tests/unit/test_diagnosis.py``).
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from praison_agent_rl.diagnosis.answers import (
    hacking,
    identical,
    length_collapse,
    length_explosion,
    repetition,
    truncated,
)
from praison_agent_rl.diagnosis.breakdowns import (
    long_prompts,
    out_of_memory,
    reward_failures,
    tool_failures,
    what_to_lower,
)
from praison_agent_rl.diagnosis.seen import Seen, Symptom, WatchRules
from praison_agent_rl.diagnosis.signal import no_scores, no_signal, saturation, sparse
from praison_agent_rl.diagnosis.updates import entropy_collapse, kl_spike, learning_rate, nan, off_policy, plateau

__all__ = ["Symptom", "Watch", "WatchRules", "long_prompts", "out_of_memory", "what_to_lower"]

Check = Callable[[Seen], Symptom | None]

_AFTER_A_STEP: tuple[Check, ...] = (
    nan,
    reward_failures,
    no_scores,
    sparse,
    saturation,
    no_signal,
    hacking,
    length_explosion,
    length_collapse,
    truncated,
    identical,
    repetition,
    entropy_collapse,
    kl_spike,
    off_policy,
    learning_rate,
    tool_failures,
)
_AFTER_A_LOOK: tuple[Check, ...] = (hacking, plateau)


class Watch:
    """Takes the events of a run one by one and says what is wrong, each thing once."""

    def __init__(self, rules: WatchRules | None = None, *, said: Collection[tuple[str, str]] = ()) -> None:
        self.seen = Seen(rules or WatchRules())
        self._said = set(said)

    def see(self, event: Mapping[str, Any]) -> list[Symptom]:
        """What the event of a step, or of a watched evaluation, shows for the first time.

        A symptom that was a warning is told again only where it now ends the run.
        """
        self.seen.add(event)
        checks = _AFTER_A_LOOK if event.get("event") == "watched" else _AFTER_A_STEP
        found = [symptom for check in checks if (symptom := check(self.seen))]
        new = [s for s in found if not {(s.name, s.severity), (s.name, "stop")} & self._said]
        self._said |= {(symptom.name, symptom.severity) for symptom in new}
        return new
