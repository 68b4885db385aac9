"""What `SavingTrainer` relies on in transformers and TRL: where a checkpoint is written, and who decides on it when."""

import inspect

from transformers import Trainer
from transformers.trainer import DEFAULT_CALLBACKS
from transformers.trainer_callback import DefaultFlowCallback
from trl import GRPOTrainer

from praison_agent_rl.training.grpo import SavingPolicyTrainer


def test_all_of_a_checkpoint_is_written_below_the_folder_that_one_method_names():
    saves = inspect.getsource(Trainer._save_checkpoint)
    assert list(inspect.signature(Trainer._save_checkpoint).parameters) == ["self", "model", "trial"]
    assert "run_dir = self._get_output_dir(trial=trial)" in saves and "output_dir=run_dir," in saves
    assert saves.index("TRAINER_STATE_NAME") < saves.index("rotate_checkpoints(")
    theirs = inspect.getsource(GRPOTrainer._save_checkpoint)
    assert "self._get_output_dir(trial=trial), checkpoint_folder" in theirs


def test_ours_comes_before_that_of_trl_which_writes_into_the_checkpoint_too():
    order = [kind.__name__ for kind in SavingPolicyTrainer.__mro__]
    assert order.index("SavingTrainer") < order.index("PolicyTrainer") < order.index("GRPOTrainer")
    assert order.index("GRPOTrainer") < order.index("Trainer")


def test_transformers_decides_first_what_is_due_after_a_step():
    assert DEFAULT_CALLBACKS[0] is DefaultFlowCallback
    step = inspect.getsource(Trainer._run_epoch)
    assert step.index("callback_handler.on_step_end") < step.index("self._maybe_log_save_evaluate(")


def test_trl_counts_batches_by_a_name_and_uses_rollouts_up_by_it():
    source = inspect.getsource(GRPOTrainer._prepare_inputs)
    assert "generate_every = self.args.steps_per_generation * self.num_iterations" in source
    assert "self._step % generate_every == 0 or self._buffered_inputs is None" in source
