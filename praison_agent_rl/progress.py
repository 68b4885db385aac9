"""Show a run's events to a person: a moving line on a terminal, plain lines elsewhere."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_STAGES = {
    "ask": "asking the agent what it would send for each prompt",
    "measure_base": "asking the base model the held-out prompts",
    "train": "training",
    "merge": "merging the adapter and proving the merge",
    "measure_new": "asking the new model the same held-out prompts",
    "reward measure_new": "scoring the held-out pairs",
}
_PLAIN_EVERY_SECONDS = 10.0


class RunProgress:
    """Takes events one by one; use as a context manager, so that the terminal is left clean."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, soft_wrap=True, emoji=False)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}", markup=False),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
        )
        self._task: Any = None
        self._last_plain = 0.0
        self._stage = ""
        self._said: set[str] = set()
        self._started = time.monotonic()

    def __enter__(self) -> "RunProgress":
        if self.console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        """Show one event."""
        kind = event["event"]
        if kind == "stage":
            told = _STAGES.get(f"{event.get('method')} {event['stage']}", _STAGES.get(event["stage"], event["stage"]))
            self._begin(event["stage"], told)
        elif kind == "note" and event["text"] not in self._said:  # several stages may notice the same
            self._said.add(event["text"])
            self.say(event["text"])
        elif kind == "diagnosis":
            ends = " (training ends)" if event["severity"] == "stop" else ""
            self.say(f"! step {event['step']}, {event['name']}{ends}: {event['text']}")
            self.say(f"  what to change: {event['advice']}")
        elif kind == "watched":
            self.say(_looked(event))
        elif kind == "step":
            self._advance(event["step"], event["of"], _facts(event))
        elif kind == "answered":
            self._advance(event["done"], event["of"], "answers")

    def say(self, text: str) -> None:
        """A plain line, above the moving one."""
        self.console.print(f"  {text}", markup=False, highlight=False)

    def _begin(self, stage: str, told: str) -> None:
        self._stage, self._started, self._last_plain = stage, time.monotonic(), 0.0
        self.console.print(told, style="bold", markup=False, highlight=False)
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(f"  {stage.replace('_', ' ')}", total=None, facts="starting")

    def _advance(self, done: int, of: int, facts: str) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=done, total=of, facts=facts)
        now = time.monotonic()
        if not self.console.is_terminal and (now - self._last_plain > _PLAIN_EVERY_SECONDS or done == of):
            self._last_plain = now
            self.say(f"{self._stage.replace('_', ' ')} {done}/{of}  {facts}")


def _looked(event: dict[str, Any]) -> str:
    """How the prompts fare that were put aside."""
    total = f"step {event['step']}: reward {event['total']:.3f} on the watched prompts"
    if not event["step"]:
        return f"{total}, before training"
    unsure = f" ±{event['gain_error']:.3f}" if event.get("gain_error") is not None else ""
    return f"{total} ({event['gain']:+.3f}{unsure}){', the best so far' if event.get('best') else ''}"


def _facts(event: dict[str, Any]) -> str:
    """Reward, KL or entropy, length, speed and the time left, of one training step; of pairs, how they fare."""
    if "loss" in event and "reward" not in event:
        seen = ((name, event[name]) for name in ("loss", "accuracy", "margin") if name in event)
        return "  ".join(f"{name} none" if value is None else f"{name} {value:.3f}" for name, value in seen)
    parts = [f"reward {event['reward']:.3f}" if event.get("reward") is not None else "reward none"]
    for name in ("kl", "entropy"):
        if event.get(name) is not None:
            parts.append(f"{name} {event[name]:.3f}")
            break
    if event.get("mean_length") is not None:
        parts.append(f"{event['mean_length']:.0f} tokens")
    if event.get("seconds"):
        left = (event["of"] - event["step"]) * event["seconds"]
        parts.append(f"{event['seconds']:.1f} s/step, {left / 60:.0f} min left")
    return "  ".join(parts)
