"""Pairs that are too long are counted before a model loads, and what a run on pairs costs is estimated by its size."""

import doctest
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import DataError, ModelError, RewardError
from praison_agent_rl.estimate import estimate_run
from praison_agent_rl.pairs import lengths as pair_lengths
from praison_agent_rl.pairs.lengths import check_lengths, fitting
from praison_agent_rl.pairs.texts import Rendered
from praison_agent_rl.preflight import check_adapter_targets
from praison_agent_rl.progress import RunProgress
from praison_agent_rl.rewards import resolve


def config_of(method: str, **changes: Any) -> TrainConfig:
    return TrainConfig.load({"method": method, **changes}, need_model=False, need_data=False)


def pair(letters: int) -> dict[str, Any]:
    return {"prompt": "Hi ", "chosen": "a" * letters, "rejected": "b"}


def rendered(length: int) -> Rendered:
    return Rendered([5] * length, [False] + [True] * (length - 1))


@pytest.mark.parametrize("method", ["reward", "cpo"])
def test_pairs_that_are_too_long_are_counted_with_the_longest(method: str, tiny_model: Path) -> None:
    rows = [pair(10), pair(96), pair(97), pair(300)]
    # three bytes of prompt, a token a byte, and the end token: 10 + 4, 96 + 4, 97 + 4, 300 + 4
    told = check_lengths(config_of(method, max_length=100), str(tiny_model), rows)
    assert told == ["2 of 4 pairs are longer than 100 tokens (max_length) and are left out; the longest has 304"]
    with pytest.raises(DataError, match=r"4 of 4 pairs are longer than 10 tokens .* the longest has 304: none is left"):
        check_lengths(config_of(method, max_length=10), str(tiny_model), rows)


def test_where_bytes_say_that_all_fit_no_tokenizer_is_loaded(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    def refuse(*given: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(pair_lengths, "load_tokenizer", refuse)
    rows = [pair(1000)] * 50
    assert check_lengths(config_of("cpo"), str(tiny_model), rows) == []  # max_seq_length is 2048
    assert check_lengths(config_of("cpo", max_length=8), "owner/of-the-hub", rows) == []
    assert check_lengths(config_of("grpo"), str(tiny_model), [{"prompt": "Hi"}] * 3) == []
    with pytest.raises(AssertionError, match="loaded"):
        check_lengths(config_of("cpo", max_length=1500), str(tiny_model), rows)


def test_a_pair_with_nothing_to_learn_is_refused() -> None:
    silent = Rendered([5, 6], [False, False])
    with pytest.raises(ModelError, match="renders an answer of the pairs as nothing"):
        fitting([(rendered(3), silent)], 10)


def test_what_fits_is_kept_in_its_order() -> None:
    pairs = [(rendered(n), rendered(2)) for n in (5, 11, 10)]
    kept, said = fitting(pairs, 10)
    assert kept == [pairs[0], pairs[2]]
    assert said == "1 of 3 training pairs are longer than 10 tokens (max_length) and are left out; the longest has 11"
    assert fitting(kept, 10) == (kept, None)


def test_an_epoch_of_pairs_has_as_many_steps_as_batches(tiny_model: Path) -> None:
    given = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_train_epochs": 2}
    sizes = {"train": 100, "held_out": 10, "device": "cpu", "pair_tokens": 60.0}
    for method in ("reward", "cpo"):
        assert (
            estimate_run(config_of(method, **given), str(tiny_model), **sizes).steps == 14
        )  # 2 x 100 / 16, rounded up
    # only CPO lets both models answer
    seconds = [
        estimate_run(config_of(m, max_steps=5), str(tiny_model), **sizes).seconds or 0 for m in ("reward", "cpo")
    ]
    assert 0 < seconds[0] < seconds[1]


def test_a_step_of_pairs_is_told_by_its_loss() -> None:
    out = io.StringIO()
    with RunProgress(Console(file=out, width=200)) as progress:
        progress({"event": "stage", "stage": "train", "method": "reward"})
        progress({"event": "step", "step": 4, "of": 4, "loss": 0.25, "accuracy": 1.0, "margin": None, "grad_norm": 2.0})
        progress({"event": "stage", "stage": "measure_new", "method": "reward"})
        progress({"event": "stage", "stage": "measure_new", "method": "cpo"})
    text = out.getvalue()
    assert "train 4/4  loss 0.250  accuracy 1.000  margin none" in text and "reward none" not in text
    assert "scoring the held-out pairs" in text and "asking the new model" in text


def test_the_output_head_of_a_reward_model_is_told_as_what_it_is() -> None:
    config = config_of("reward", lora_target_modules=["lm_head", "q_proj"])
    with pytest.raises(ModelError, match="a reward model has none, but a score head, which is always trained"):
        check_adapter_targets(config, tied=False, source="m")


def test_what_the_method_decides_is_left_out_aloud() -> None:
    config = config_of("reward", num_labels=2, task_type="CAUSAL_LM")
    assert config.lora_arguments()["task_type"] == "SEQ_CLS"
    assert [note for note in config.notes if "a reward model gives one number" in note]


def test_a_misspelt_reward_model_is_told_without_empty_brackets(in_tmp: Path) -> None:
    with pytest.raises(RewardError, match=r"reward model 'rewards/typo' cannot be made: there is no reward model"):
        resolve("rewards/typo")


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(pair_lengths).failed == 0
