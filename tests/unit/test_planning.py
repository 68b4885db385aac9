"""A run is checked and written whole, or not at all; a file that cannot be read is not blamed for what is in it."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from praison_agent_rl import planning
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import read_rows
from praison_agent_rl.errors import ConfigError, DataError, PraisonRLError
from praison_agent_rl.estimate import LEAST_DISK, estimate_run, in_words
from praison_agent_rl.past import EarlierPrompts, Incumbent, Past
from praison_agent_rl.planning import Draft, draft_from_config, write_run


def draft(rows=({"prompt": "a"},), base="owner/name", **changes) -> Draft:
    config = TrainConfig.load({"reward_funcs": [], **changes}, need_model=False, need_data=False)
    return Draft(config, base, list(rows), [], [])


@pytest.mark.parametrize("value", [b"raw", object(), {1, 2}])
def test_a_run_that_cannot_be_written_leaves_no_folder(tmp_path, value):
    with pytest.raises(DataError, match="row 2 cannot be written as JSON"):
        write_run(draft([{"prompt": "a"}, {"prompt": value}]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_ctrl_c_while_a_run_is_written_leaves_no_folder(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "write_record", stop)
    with pytest.raises(KeyboardInterrupt):
        write_run(draft(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_on_a_nearly_full_disk_is_refused_in_units_that_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "free_disk", lambda root: LEAST_DISK - 2**20)
    with pytest.raises(ConfigError, match=r"needs about 64 MiB of disk .* with 63 MiB free"):
        write_run(draft(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_disk_holds_the_merged_model_twice_and_one_checkpoint_more_than_are_kept(tmp_path):
    shape = {"model_type": "llama", "hidden_size": 1000, "num_hidden_layers": 10, "num_attention_heads": 10}
    shape["intermediate_size"] = 1000
    (tmp_path / "config.json").write_text(json.dumps(shape))
    header = json.dumps({"w": {"dtype": "F32", "shape": [50_000_000], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    config = TrainConfig.load({"lora_r": 10, "max_steps": 100, "save_steps": 10}, need_model=False, need_data=False)
    needed = estimate_run(config, str(tmp_path), train=100, held_out=0, device="cpu").disk_bytes
    adapter = 14 * 10 * 1000 * 10
    assert needed == 2 * 50_000_000 * 4 + adapter * 4 + 3 * (adapter * 12 + 16 * 2**20)
    assert (in_words(2**30), in_words(2**30 - 1), in_words(0)) == ("1.0 GiB", "1024 MiB", "0 MiB")


def test_a_run_in_few_bits_needs_memory_for_the_whole_model_that_is_measured():
    """Of Qwen2.5-7B 7,615,616,512 weights, 1,089,994,752 of them in embedding and head, which stay in 16 bits."""

    def memory(held_out: int, **keys: object) -> int:
        given = {"max_steps": 1, "per_device_train_batch_size": 1, "num_generations": 2, "max_completion_length": 16}
        config = TrainConfig.load({**given, **keys}, need_model=False, need_data=False)
        found = estimate_run(config, "Qwen/Qwen2.5-7B", train=100, held_out=held_out, device="cuda").memory_bytes
        return (found or 0) - 2**31

    for bits, layers in ((4, 6_525_621_760 / 2 * 1.03), (8, 6_525_621_760)):
        quantised = {f"load_in_{bits}bit": True}
        assert 0 < memory(0, **quantised) - layers - 2 * 1_089_994_752 < 500_000_000  # what trains beside the weights
        assert memory(10, **quantised) == 2 * 7_615_616_512
        assert memory(10, dtype="float32", **quantised) == 4 * 7_615_616_512
    assert memory(10) == memory(0) > 2 * 7_615_616_512  # trained in as many bits as it is measured in


@pytest.mark.parametrize("text", [None, "a: [1", b"\xff\xfe\x00", "- a\n"])
def test_of_a_file_that_cannot_be_read_only_that_is_said(tmp_path: Path, text):
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        draft_from_config(path)
    assert len(str(caught.value).splitlines()) == 1 and "reward_funcs" not in str(caught.value)


@pytest.mark.parametrize("entry", [{"name": None}, {"name": ""}, {"name": None, "split": "test"}])
def test_a_dataset_without_a_name_is_looked_up_nowhere(entry):
    with pytest.raises(PraisonRLError) as caught:
        draft_from_config({"model_name": "./nothing", "dataset": [entry], "reward_funcs": "json:dumps"})
    lines = str(caught.value).splitlines()
    assert any("dataset[0] needs a name" in line for line in lines) and "hub" not in str(caught.value).replace(
        "on the hub", ""
    ).replace("hub name", "")


# --- judges and the gate's rules --------------------------------------------------------------------------------------

SCORERS = """
def brief(completions, **_):
    return [1.0 / (1 + len(text)) for text in completions]

def letters(completions, **_):
    return [sum(c.islower() for c in text) / (1 + len(text)) for text in completions]
"""


@pytest.fixture
def scorers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "planscorers.py").write_text(SCORERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield "planscorers"
    sys.modules.pop("planscorers", None)


def prepared(**settings):
    config = TrainConfig.load(settings, need_model=False, need_data=False)
    problems = planning.Problems()
    found = planning.prepare_rewards(config, [[{"role": "user", "content": "Hi"}]], {}, problems=problems)
    problems.raise_all()
    return found


def test_judges_are_tried_and_named_apart_from_the_rewards(scorers) -> None:
    rewards, judges = prepared(reward_funcs="planscorers:brief", judge_funcs=["planscorers:letters"])
    assert [reward.name for reward in rewards] == ["brief"] and [judge.name for judge in judges] == ["letters"]

    def brief(completions, **_):
        return [float(len(text)) for text in completions]

    _, judges = prepared(reward_funcs="planscorers:brief", judge_funcs=brief)
    assert [judge.name for judge in judges] == ["brief_judge"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"guards": {"breif": 0.1}}, r"guards names 'breif', .* they are 'brief' or 'letters'; did you mean 'brief'\?"),
        ({"guard_limits": {"longr": 3}}, r"guard_limits names 'longr', .*; did you mean 'longer'\?"),
        ({"judge_funcs": "planscorers:brief"}, "judge_funcs and reward_funcs both name 'brief'"),
        ({"judge_funcs": "planscorers:nope"}, "'planscorers' has no 'nope'"),
    ],
)
def test_what_the_gate_cannot_go_by_is_said_before_a_model_loads(scorers, settings, said) -> None:
    with pytest.raises(PraisonRLError, match=said):
        prepared(reward_funcs="planscorers:brief", **{"judge_funcs": "planscorers:letters", **settings})


def test_faults_of_all_rules_are_told_at_once(scorers) -> None:
    with pytest.raises(ConfigError) as caught:
        prepared(reward_funcs="planscorers:brief", guards={"x": 0}, guard_limits={"y": 1})
    assert len(str(caught.value).splitlines()) == 2


def test_a_plan_says_what_the_gate_will_go_by(scorers, tmp_path) -> None:
    settings = {"eval_samples": 3, "min_gain": 0.05, "guards": {"letters": 0.1}, "guard_limits": {"longer": 3}}
    funcs = {"reward_funcs": "planscorers:brief", "judge_funcs": "planscorers:letters"}
    config = TrainConfig.load({**settings, **funcs}, need_model=False, need_data=False)
    rewards, judges = prepared(**settings, **funcs)
    held_out = [{"prompt": "b"}]
    made = Draft(config, "owner/name", [{"prompt": "a"}], held_out, rewards, judges=judges)
    earlier = EarlierPrompts("v1", [{"prompt": "a"}, {"prompt": "c"}], planning._rewards_of(made))
    past = Past("Helper", "v2", [earlier], Incumbent("gpt", {0: "said"}), ["beat it"])
    past = replace(past, answered=[{"prompt": "a", "texts": ["one", "two"]}])
    run = write_run(made, tmp_path / "run", past)
    plan = run.plan
    assert (plan.samples, plan.agent, plan.parent, plan.incumbent) == (3, "Helper", "v2", "gpt")
    assert plan.rules.model_dump() == {"min_gain": 0.05, "guards": {"letters": 0.1}, "limits": {"longer": 3.0}}
    assert [judge.spec for judge in plan.judges] == ["planscorers:letters"]
    assert read_rows(run.guard_rows("earlier")) == [{"prompt": "c", "_version": "v1"}]
    assert len(read_rows(run.guard_rows("control"))) == 40
    assert read_rows(run.recorded) == [{"prompt": 0, "text": "said"}]
    assert read_rows(run.answered) == [{"prompt": "a", "texts": ["one", "two"]}]
    assert "beat it" in plan.notes and any("trained on now" in note for note in plan.notes)


def test_where_nothing_is_held_out_nothing_else_is_asked(tmp_path) -> None:
    run = write_run(draft(), tmp_path / "run")
    assert not run.guard_rows("control").exists() and not run.guard_rows("earlier").exists()


def test_a_judge_that_only_this_process_has_keeps_the_run_here(scorers) -> None:
    config = TrainConfig.load(
        {"reward_funcs": "planscorers:brief", "judge_funcs": [lambda completions, **_: [0.0] * len(completions)]},
        need_model=False,
        need_data=False,
    )
    rewards, judges = prepared(reward_funcs=config.reward_funcs, judge_funcs=config.judge_funcs)
    assert not Draft(config, "owner/name", [], [], rewards, judges=judges).nameable
    assert Draft(config.model_copy(update={"judge_funcs": None}), "owner/name", [], [], rewards).nameable


# --- prompts to watch with --------------------------------------------------------------------------------------------


def asked(count):
    return [{"prompt": f"question {place}"} for place in range(count)]


def put_aside_of(rows, **settings):
    from praison_agent_rl.watch_rows import put_aside

    return put_aside(rows, TrainConfig.load(settings, need_model=False, need_data=False))


@pytest.mark.parametrize(
    ("count", "settings", "wanted"),
    [
        (79, {}, 0),
        (80, {}, 8),
        (140, {}, 14),
        (1000, {}, 24),
        (20, {"watch_prompts": 5}, 5),
        (20, {"watch_prompts": 0.25}, 5),
        (1000, {"watch_prompts": 0}, 0),
        (1000, {"watch": False}, 0),
        (81, {"num_generations": 2, "per_device_train_batch_size": 160}, 0),  # 80 prompts a batch: none can be spared
    ],
)
def test_a_tenth_of_the_training_prompts_is_put_aside_where_there_are_enough(count, settings, wanted):
    rows = asked(count)
    rest, aside, notes = put_aside_of(rows, **settings)
    assert len(aside) == wanted and len(rest) == count - wanted
    assert sorted(row["prompt"] for row in [*rest, *aside]) == sorted(row["prompt"] for row in rows)
    assert len(notes) == bool(wanted)
    if wanted:
        assert notes[0].startswith(f"{wanted} of {count} training prompts are put aside to watch with")


def test_which_prompts_are_put_aside_depends_on_the_prompts_and_the_seed_alone():
    rows = asked(100)
    one = put_aside_of(rows)[1]
    assert {row["prompt"] for row in put_aside_of(rows[::-1])[1]} == {row["prompt"] for row in one}
    assert put_aside_of(rows, held_out_seed=1)[1] != one
    rest, aside, _ = put_aside_of([*rows, *rows], watch_prompts=8)  # rows with one prompt stay together
    assert len(aside) == 16 and not {row["prompt"] for row in rest} & {row["prompt"] for row in aside}


def test_all_prompts_cannot_be_put_aside():
    with pytest.raises(DataError, match="watch_prompts=20 would put aside all of 20 training prompts"):
        put_aside_of(asked(20), watch_prompts=20)


def test_the_prompts_put_aside_are_written_beside_those_that_are_trained_on(tmp_path):
    one = draft(asked(3))
    one.watch = asked(5)[3:]
    run = write_run(one, tmp_path / "run")
    assert read_rows(run.watch_rows) == asked(5)[3:] and read_rows(run.train_rows) == asked(3)
    assert not write_run(draft(asked(3)), tmp_path / "other").watch_rows.exists()
