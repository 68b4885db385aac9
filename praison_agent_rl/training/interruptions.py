"""Where a run is saved and where it ends: only where it can be gone on with to the same result, bit for bit.

Imported only by the process that trains, since it imports ``transformers`` at once.
"""

import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from transformers import TrainerCallback

from praison_agent_rl.errors import TrainingFailed
from praison_agent_rl.runs import RunFolder
from praison_agent_rl.stop_requests import ENDING, heeding_signals, is_asked_to_end, take_back
from praison_agent_rl.training.together import everywhere


class RunInterrupted(TrainingFailed):
    """A run was asked to end before its time; what it had learned is kept."""


class Ending(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Puts a save off until the run can be gone on with exactly, and ends a run there that is asked to end.

    It decides after all that ask for a save after a step, and before those that act on one.
    """

    def __init__(self, run: RunFolder, trainer: Any) -> None:
        self._run, self._trainer = run, trainer
        self._due = False
        self._signal: int | None = None
        self.ended = False
        """Whether the run was ended before its last step, since it was asked to."""

    @property
    def asked(self) -> bool:
        """Whether this process knows of a wish that the run ends."""
        return self.ended or self._signal is not None or is_asked_to_end(self._run)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by transformers before the first step; a process that sees an older checkpoint would wait for ever.

        Raises:
            TrainingFailed: the processes would go on from different steps.
        """
        steps = everywhere(state.global_step)
        if len(set(steps)) > 1:
            raise TrainingFailed(
                f"the processes would go on from different steps ({', '.join(map(str, steps))}, by rank): they do not "
                f"see the same checkpoints in {str(self._run.checkpoints)!r}, which must be a folder that all machines "
                "see as it is"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by transformers after each update."""
        asked = self._agreed()
        if control.should_training_stop:  # nothing is trained from what is saved now
            return
        self._due = self._due or asked or control.should_save
        control.should_save = self._due and self._trainer.is_exact_here()
        if control.should_save:
            self._due = False
            self.ended = control.should_training_stop = asked
        if self.ended and self._trainer.accelerator.is_main_process:
            take_back(self._run)  # done: it is not to end again when it is gone on with

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """While the block lasts a first SIGTERM or Ctrl-C asks the run to end; a second one ends the process."""
        with heeding_signals(self._take):
            yield
        self._tell_end()

    def _take(self, number: int) -> bool:
        if self.asked:
            return False
        self._signal = number
        with suppress(OSError):  # on a full disk the note is missing, and the run ends all the same
            self._run.report_event("note", text=f"{signal.Signals(number).name}: {ENDING}")
        return True

    def _tell_end(self) -> None:
        """Raise what the wish to end has come to.

        Raises:
            RunInterrupted: the run was ended by it.
            KeyboardInterrupt: the same, by Ctrl-C in this process.
        """
        if not self.ended:
            return
        step, root = self._trainer.state.global_step, self._run.root
        text = (
            f"the run was asked to end and did so after step {step} of {self._trainer.state.max_steps}; its checkpoint "
            f"is saved. Go on with `praison-agent-rl train --resume {shlex.quote(str(root))}`"
        )
        raise KeyboardInterrupt(text) if self._signal == signal.SIGINT else RunInterrupted(text)

    def _agreed(self) -> bool:
        """Whether any process was asked, so that all end at one step."""
        return any(everywhere(self.asked))
