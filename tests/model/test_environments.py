"""An environment that is found sound is taken by TRL's own loop, with the tools and rewards that it has."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.environments import check_environment
from praison_agent_rl.models import load_model, load_tokenizer


class Counting:
    """A counter that is to reach a number."""

    begun: ClassVar[list[dict[str, Any]]] = []

    def reset(self, **row: Any) -> str:
        self.count = 0
        self.begun.append(row)
        return f" Reach {row['goal']}."

    def add(self, number: int) -> str:
        """Add to the counter.

        Args:
            number: How much.
        """
        self.count += number
        return str(self.count)

    def get_reward(self) -> float:
        return 0.25

    def _private(self) -> None: ...


@pytest.fixture
def trainer(tiny_model: Path, tmp_path: Path) -> GRPOTrainer:
    config = TrainConfig.load({"model_name": str(tiny_model)}, need_data=False)
    tokenizer = load_tokenizer(str(tiny_model), config)
    tokenizer.chat_template = qwen3_chat_template
    arguments = GRPOConfig(
        output_dir=str(tmp_path), max_steps=1, use_cpu=True, bf16=False, per_device_train_batch_size=2,
        num_generations=2, max_completion_length=4, max_tool_calling_iterations=1, report_to="none",
        disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": "Count."}], "goal": 3}]
    model = load_model(str(tiny_model), config, device="cpu")
    Counting.begun.clear()
    return GRPOTrainer(
        model, [], args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        environment_factory=Counting,
    )  # fmt: skip


def test_trl_takes_what_was_found_sound(trainer: GRPOTrainer) -> None:
    assert check_environment(Counting) == []
    assert [tool.__name__ for tool in trainer.tools] == ["add"]
    assert trainer.reward_func_names == ["Counting"]


def test_reset_is_given_every_column_of_its_row(trainer: GRPOTrainer) -> None:
    trainer.train()
    assert [row["goal"] for row in Counting.begun] == [3, 3] and "prompt" in Counting.begun[0]
    (logged,) = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert logged["reward"] == 0.25


def test_trl_refuses_what_was_found_wrong(tiny_model: Path, trainer: GRPOTrainer, tmp_path: Path) -> None:
    class Still:
        def begin(self) -> None:
            """Begins."""

    assert check_environment(Still)[0].endswith("has no method reset; it begins an episode: def reset(self, **row)")
    with pytest.raises(ValueError, match="must define a callable `reset`"):
        GRPOTrainer(
            trainer.model, [], args=trainer.args, train_dataset=trainer.train_dataset,
            processing_class=trainer.processing_class, environment_factory=Still,
        )  # fmt: skip
