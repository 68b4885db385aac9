"""Trainers whose checkpoints are whole or not there, from which a run comes to the result that it would have had.

Imported only by the process that trains, since it imports ``transformers`` at once.
"""

import shutil
from pathlib import Path
from typing import Any

from transformers import Trainer

from praison_agent_rl.runs import RunFolder, sync_to_disk
from praison_agent_rl.training.checkpoints import PART, made_now, publish_checkpoint
from praison_agent_rl.training.interruptions import Ending


class SavingTrainer(Trainer):  # type: ignore[misc]  # transformers is not typed
    """Mixed in before another trainer: a checkpoint is made aside and put in its place when it is whole.

    transformers writes it file by file where it is looked for, and takes older ones away by their time of writing.
    """

    def __init__(self, *, run: RunFolder, **options: Any) -> None:
        self._saved_in = run
        self._part: Path | None = None
        super().__init__(**options)
        self.ending = Ending(run, self)
        self.add_callback(self.ending)

    def is_exact_here(self) -> bool:
        """Whether a run that goes on from a checkpoint of this moment is the run that it would have been."""
        return True

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._part or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As the trainer does, but under another name until all of it is there."""
        part = Path(self.args.output_dir) / PART
        self._clear(part)
        self.accelerator.wait_for_everyone()
        self._part = part
        try:
            super()._save_checkpoint(model, trial)
            self._publish(part / f"checkpoint-{self.state.global_step}")
        finally:
            self._part = None
            self._clear(part)  # on a full disk it is room that is missing

    def _clear(self, part: Path) -> None:
        if self.accelerator.is_local_main_process:
            shutil.rmtree(part, ignore_errors=True)

    def _publish(self, made: Path) -> None:
        """Give the checkpoint its name: in the first process, and on the other machines where they have own disks."""
        run, accelerator = self._saved_in, self.accelerator
        if accelerator.is_main_process and run.events_file.exists():
            sync_to_disk(run.events_file)  # of which a resumed run reads what was seen up to here
        for publishes in (accelerator.is_main_process, accelerator.is_local_main_process):
            accelerator.wait_for_everyone()
            if publishes and made.is_dir():
                folder = Path(self.args.output_dir)
                publish_checkpoint(made, folder, made_now(run.plan.config), keep=self.args.save_total_limit)
        accelerator.wait_for_everyone()
