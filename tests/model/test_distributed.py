"""Two processes that train one model end with one adapter, that of one process with a batch twice as large."""

import pytest
import torch
from safetensors.torch import load_file

from tests.model.two_processes import adapter_file, first_token, planned, start, train

WAYS = {
    "shared": {},
    "accumulated": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "with a reference, by DDP": {"beta": 0.05},
    "after a warm start": {"warm_start": 3},
    "after a warm start, by DDP": {"warm_start": 2, "beta": 0.05},
}
BATCH = 8
RELATIVE = 2e-5
"""Of losses and gradient norms: two sums of half a batch each are rounded otherwise than one of the whole."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def together(tiny_model, tmp_path_factory):
    """The runs of ``WAYS`` by two processes, each with ``BATCH`` completions."""
    folder = tmp_path_factory.mktemp("together")
    runs = {
        way: planned(folder / way, tiny_model, **{"per_device_train_batch_size": BATCH, **changes})
        for way, changes in WAYS.items()
    }
    done = start(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return runs


@pytest.fixture(scope="module")
def alone(tiny_model, tmp_path_factory):
    """The same by one process with twice as many completions in each micro-batch."""
    folder = tmp_path_factory.mktemp("alone")
    torch.set_num_threads(1)
    runs = {}
    for way, changes in WAYS.items():
        batch = 2 * changes.get("per_device_train_batch_size", BATCH)
        runs[way] = planned(folder / way, tiny_model, **{**changes, "per_device_train_batch_size": batch})
        train(runs[way], share=not way.endswith("by DDP"))
    return runs


@pytest.mark.parametrize("way", WAYS)
def test_both_processes_end_with_the_adapter_that_is_published_to_the_last_bit(together, way):
    run = together[way]
    first, second = (load_file(adapter_file(run, number)) for number in (0, 1))
    assert len(first) == 2 * 2 * 7 and all(torch.equal(first[name], second[name]) for name in first)
    published = load_file(run.adapter / "adapter_model.safetensors")
    inside = {name.removeprefix("base_model.model.").replace(".weight", ".default.weight"): name for name in published}
    of_both = {name.removeprefix("base_model.model."): tensor for name, tensor in first.items()}
    assert inside.keys() == of_both.keys()
    assert all(torch.equal(published[inside[name]], tensor) for name, tensor in of_both.items())
    assert all(bool((tensor != 0).any()) for name, tensor in of_both.items() if "lora_B" in name)


@pytest.mark.parametrize("way", WAYS)
def test_steps_are_those_of_one_process_with_the_batch_twice_as_large(together, alone, way):
    several, one = together[way].steps(), alone[way].steps()
    assert [step["step"] for step in several] == [step["step"] for step in one] == [1, 2, 3, 4]
    for ours, its in zip(several, one, strict=True):
        for name in ("reward", "reward_std", "rewards", "mean_length", "clipped", "frac_reward_zero_std"):
            assert ours[name] == pytest.approx(its[name], abs=1e-6), (ours["step"], name)
        for name in ("loss", "grad_norm"):
            assert ours[name] == pytest.approx(its[name], rel=RELATIVE, abs=1e-6), (ours["step"], name)
    assert all(step["grad_norm"] > 0.01 for step in one)
    mine, theirs = (load_file(run[way].adapter / "adapter_model.safetensors") for run in (together, alone))
    for name, tensor in mine.items():
        assert torch.allclose(tensor, theirs[name], rtol=2e-5, atol=1e-5), name


@pytest.mark.parametrize("way", WAYS)
def test_rewards_are_counted_once_for_each_completion_of_all_processes(together, alone, way):
    for ours, its in zip(together[way].steps(), alone[way].steps(), strict=True):
        both, single = ours["calls"]["first"], its["calls"]["first"]
        assert both["samples"] == single["samples"] == 2 * BATCH
        assert both["none"] == pytest.approx(single["none"]) and both["failed"] == 0
        assert sorted(map(tuple, ours["signal"])) == sorted(map(tuple, its["signal"]))
    assert any(step["calls"]["first"]["none"] for step in alone[way].steps())


def test_only_the_run_that_was_asked_to_goes_by_ddp(together):
    said = {
        way: [event["text"] for _, event in run.events() if event["event"] == "note"] for way, run in together.items()
    }
    assert {way: any("not shared" in text for text in texts) for way, texts in said.items()} == {
        "shared": False, "accumulated": False, "with a reference, by DDP": True,
        "after a warm start": False, "after a warm start, by DDP": True,
    }  # fmt: skip


@pytest.mark.parametrize("way", [way for way in WAYS if "warm start" in way])
def test_a_warm_start_learns_from_the_examples_of_a_batch_twice_as_large(together, alone, way):
    ours, its = (
        [event for _, event in runs[way].events() if event["event"] == "warm_step"] for runs in (together, alone)
    )
    steps = list(range(1, WAYS[way]["warm_start"] + 1))
    assert [step["step"] for step in ours] == [step["step"] for step in its] == steps  # and one process tells
    for mine, theirs in zip(ours, its, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=RELATIVE)


def test_what_is_told_is_told_by_one(together):
    for run in together.values():
        told = [event["step"] for _, event in run.events() if event["event"] == "step"]
        assert told == [1, 2, 3, 4]


def test_the_reward_of_these_tests_gives_none_for_some():
    assert first_token([[11], [12], [10]]) == [None, 0.5, 0.0]
