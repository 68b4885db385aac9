"""A tiny policy is trained in this process: it learns, only its adapter changes, and what went wrong is said."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import to_dataset
from praison_agent_rl.errors import ConfigError, TrainingFailed
from praison_agent_rl.models import load_model, load_tokenizer
from praison_agent_rl.records import Plan
from praison_agent_rl.rewards import Reward
from praison_agent_rl.runs import RunFolder, now, write_record
from praison_agent_rl.training import grpo, policies, policy_trainer
from praison_agent_rl.training.grpo import PolicyTrainer, train_grpo

SETTINGS = {
    "lora_r": 4,
    "lora_alpha": 8,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 6,
    "learning_rate": 1e-2,
    "max_steps": 2,
    "save_strategy": "no",
}
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "a much longer one than the others"]
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Finds it.", "parameters": {"type": "object", "properties": {}}},
}
WITH_TOOLS = (
    "{% if tools %}{{ 'TOOLS:' }}{% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}{{ '\n' }}{% endif %}"
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{{ 'assistant: ' }}"
)


pytestmark = pytest.mark.usefixtures("one_thread")


def rows_of(words=WORDS):
    return [{"prompt": [{"role": "user", "content": word}]} for word in words]


def planned(root, base, tools=(), **changes) -> RunFolder:
    """The folder of a run with ``SETTINGS`` and ``changes``."""
    config = TrainConfig.load({**SETTINGS, **changes}, need_model=False, need_data=False)
    run = RunFolder.create(root)
    plan(run, base, config, tools)
    return run


def plan(run, base, config, tools=()):
    write_record(
        run.plan_file,
        Plan(
            base=str(base),
            config=config.resolved(),
            rewards=[],
            tools=list(tools),
            device="cpu",
            notes=[],
            libraries={},
            created=now(),
        ),
    )


def lower_case(completions, **_):
    """Share of an answer's characters that are lower-case letters."""
    return [sum(char.isascii() and char.islower() for char in text) / max(len(text), 1) for text in completions]


def notes(run):
    return [event["text"] for _, event in run.events() if event["event"] == "note"]


def adapter_of(run):
    return load_file(run.adapter / "adapter_model.safetensors")


class FirstLook:
    """Keeps the model that is trained, and its tensors as they were before the first update."""

    def __init__(self, monkeypatch):
        self.before = {}
        load = policies.load_model

        def load_and_keep(*given, **options):
            self.model = load(*given, **options)  # peft puts the adapter into this object
            return self.model

        monkeypatch.setattr(policies, "load_model", load_and_keep)

    def reward(self, completions, **_):
        """Like `lower_case`; asked for the first time before anything was learned."""
        self.before = self.before or {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return lower_case(completions)


# --- learning ---------------------------------------------------------------------------------------------------------


def test_a_reward_rises_and_only_the_adapter_changes(tiny_model, in_tmp, monkeypatch):
    on_disk = (tiny_model / "model.safetensors").read_bytes()
    look = FirstLook(monkeypatch)
    run = planned(
        in_tmp / "run",
        tiny_model,
        lora_r=8,
        lora_alpha=16,
        num_generations=8,
        per_device_train_batch_size=32,
        max_completion_length=12,
        max_steps=40,
    )
    train_grpo(run, rows_of(), [Reward(look.reward, "lower_case")])

    rewards = [step["reward"] for step in run.steps()]
    assert [step["step"] for step in run.steps()] == list(range(1, 41))
    assert sum(rewards[:5]) / 5 < 0.3  # about a tenth of all bytes are lower-case letters
    assert sum(rewards[-5:]) / 5 > 0.8

    after = dict(look.model.named_parameters())
    trained = {name for name in look.before if "lora_" in name}
    assert len(trained) == 2 * 2 * 7  # A and B in 7 projections of 2 layers
    assert after.keys() == look.before.keys()
    assert all(bool((look.before[name] == 0).all()) == ("lora_B" in name) for name in trained)
    assert [name for name in trained if torch.equal(after[name], look.before[name])] == []
    frozen = look.before.keys() - trained  # merged for each sampling, and given back bit for bit
    assert len(frozen) == 2 * 9 + 2
    assert [name for name in frozen if not torch.equal(after[name], look.before[name])] == []
    assert (tiny_model / "model.safetensors").read_bytes() == on_disk

    saved = adapter_of(run)
    assert len(saved) == len(trained)
    for name, tensor in saved.items():
        inside = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
        assert torch.equal(tensor, after[inside]), name
    assert (run.adapter / "adapter_config.json").exists() and (run.adapter / "tokenizer_config.json").exists()


def test_each_step_reports_its_rewards_by_name(tiny_model, in_tmp):
    def none_for_some(completions, **_):
        return [None, *[0.5] * (len(completions) - 1)]

    heard = []
    run = planned(in_tmp / "run", tiny_model)
    run.listener = heard.append
    train_grpo(run, rows_of(), [Reward(lower_case, "lower"), Reward(none_for_some, "half", 2.0)])
    steps = [event for event in heard if event["event"] == "step"]
    assert [(step["step"], step["of"]) for step in steps] == [(1, 2), (2, 2)]
    for step in steps:
        assert step["rewards"]["half"] == pytest.approx(0.5)
        # 7 of 8 completions have both, one has only the first: the weights are those of the rewards
        assert step["reward"] == pytest.approx(step["rewards"]["lower"] + 2 * 0.5 * 7 / 8)
        assert step["mean_length"] <= 6 and 0 <= step["clipped"] <= 1 and step["grad_norm"] > 0
    assert steps == run.steps()


# --- the same numbers as TRL ------------------------------------------------------------------------------------------


def trainer_for(run, base, *, rows=None, tools=(), rewards=None):
    """A trainer made as `train_grpo` makes it, with an adapter that already does something."""
    config = TrainConfig.load(run.plan.config, need_model=False, need_data=False)
    torch.manual_seed(0)
    trainer = PolicyTrainer(
        model=load_model(str(base), config, device="cpu"),
        reward_funcs=rewards or [Reward(lower_case, "lower")],
        args=grpo._arguments(run, config, [1.0], "cpu"),
        train_dataset=to_dataset(rows or rows_of()),
        processing_class=load_tokenizer(str(base), config),
        peft_config=LoraConfig(**config.lora_arguments()),
        shown_tools=tools,
    )
    generator = torch.Generator().manual_seed(1)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    return trainer


def a_batch():
    """Two groups of three completions of 1 to 7 tokens, prompts padded on the left and completions on the right."""
    generator = torch.Generator().manual_seed(2)
    beginning = list(range(20, 32))
    prompts = [[*beginning, 50, 51], [*beginning, 60, 61, 62, 63, 64]]
    lengths = [7, 1, 4, 3, 7, 2]
    ids, mask = [], []
    for row, length in enumerate(lengths):
        prompt = prompts[row // 3]
        completion = torch.randint(3, 259, (length,), generator=generator).tolist()
        ids.append([2] * (17 - len(prompt)) + prompt + completion + [2] * (7 - length))
        mask.append([0] * (17 - len(prompt)) + [1] * (len(prompt) + length) + [0] * (7 - length))
    return torch.tensor(ids), torch.tensor(mask)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("bonus", [0.3, 0.0])
def test_log_probabilities_entropies_and_gradients_are_those_of_trl(
    untied_model, in_tmp, temperature, batch_size, bonus
):
    changes = {"entropy_coef": bonus} if bonus else {}  # entropies have a gradient where the loss asks for it
    trainer = trainer_for(planned(in_tmp / "run", untied_model, temperature=temperature, **changes), untied_model)
    assert trainer.not_shared_because is None and trainer._entropy_bonus_enabled == (bonus > 0)
    ids, mask = a_batch()
    kept = mask[:, 17:].bool()
    found = {}
    for way, reason in {"shared": None, "trl": "test"}.items():
        trainer.not_shared_because = reason
        log_probs, entropies, nothing = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, 7, batch_size=batch_size, compute_entropy=True
        )
        assert log_probs.shape == entropies.shape == (6, 7) and nothing is None
        weights = torch.linspace(-1, 1, int(kept.sum()))
        trainer.model.zero_grad()
        ((log_probs[kept] + bonus * entropies[kept]) * weights).sum().backward()
        gradients = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
        found[way] = log_probs[kept].detach(), entropies[kept].detach(), gradients
    for got, wanted in zip(found["shared"][:2], found["trl"][:2], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert len(found["trl"][2]) == 28
    for name, wanted in found["trl"][2].items():
        scale = float(wanted.abs().max())
        assert scale > 0, name
        assert float((found["shared"][2][name] - wanted).abs().max()) < 1e-4 * scale, name


def test_without_an_entropy_asked_for_none_is_given(tiny_model, in_tmp):
    trainer = trainer_for(planned(in_tmp / "run", tiny_model), tiny_model)
    ids, mask = a_batch()
    log_probs, entropies, nothing = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 7)
    assert log_probs.shape == (6, 7) and entropies is None and nothing is None
    assert bool((log_probs[mask[:, 17:] == 0] == 0).all())


@pytest.mark.parametrize("changes", [{}, {"beta": 0.1}, {"loss_type": "grpo", "num_iterations": 2}])
def test_two_whole_steps_end_with_the_adapter_of_trl(tiny_model, in_tmp, changes):
    # plain gradient descent: Adam would blow rounding up to whole steps where a gradient is nearly zero
    run = planned(in_tmp / "run", tiny_model, optim="sgd", learning_rate=0.5, **changes)
    adapters, answers = [], []
    for reason in (None, "test"):
        seen = []

        def reward(completions, seen=seen, **_):
            seen.extend(completions)
            return lower_case(completions)

        trainer = trainer_for(run, tiny_model, rewards=[Reward(reward, "lower")])
        before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
        trainer.not_shared_because = reason
        trainer.train()
        assert trainer.state.global_step == 2
        adapters.append({n: p.detach() - before[n] for n, p in trainer.model.named_parameters() if p.requires_grad})
        answers.append(seen)
    assert answers[0] == answers[1]  # 6 tokens are one block, so both draw the same numbers
    for name, wanted in adapters[1].items():
        assert float(wanted.abs().max()) > 0, name
        assert float((adapters[0][name] - wanted).abs().max()) < 1e-3 * float(wanted.abs().max()), name


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"lora_dropout": 0.1}, "lora_dropout"), ({"gradient_checkpointing": True}, "gradient checkpointing")],
)
def test_what_cannot_be_shared_is_trained_the_plain_way_and_said(tiny_model, in_tmp, changes, reason):
    run = planned(in_tmp / "run", tiny_model, **changes)
    train_grpo(run, rows_of(), [Reward(lower_case, "lower")])
    assert [note for note in notes(run) if note.startswith("prompts are not shared") and reason in note]
    assert run.adapter.is_dir()


@pytest.mark.parametrize("fewer_bits", ["bfloat16", "quantised"])
def test_weights_of_fewer_bits_are_not_merged_to_sample(tiny_model, in_tmp, fewer_bits):
    run = planned(in_tmp / "run", tiny_model, dtype="bfloat16" if fewer_bits == "bfloat16" else "float32")
    trainer = trainer_for(run, tiny_model)
    trainer._policy().is_quantized = fewer_bits == "quantised"  # as transformers marks it
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    with trainer._ready_to_sample() as policy:
        assert not policy.training
        assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters())
    assert policy.training


def test_sampling_merges_the_adapter_and_takes_it_out_even_after_an_error(tiny_model, in_tmp):
    trainer = trainer_for(planned(in_tmp / "run", tiny_model), tiny_model)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    ids = torch.tensor([[5, 6, 7, 8]])
    trainer.model.eval()
    with torch.no_grad():
        adapted = trainer.model(input_ids=ids).logits
        with pytest.raises(KeyError), trainer._ready_to_sample() as policy:
            torch.testing.assert_close(policy(input_ids=ids).logits, adapted, rtol=1e-4, atol=1e-4)
            assert max(float((p - before[n]).abs().max()) for n, p in trainer.model.named_parameters()) > 1e-3
            raise KeyError
        torch.testing.assert_close(trainer.model.eval()(input_ids=ids).logits, adapted, rtol=0, atol=0)
    assert [n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])] == []


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_tool_schemas_are_in_the_prompt_that_is_trained_on(tiny_model, in_tmp):
    run = planned(in_tmp / "run", tiny_model, tools=[TOOL], chat_template=WITH_TOOLS)
    trainer = trainer_for(run, tiny_model, tools=run.plan.tools)
    prompts = [row["prompt"] for row in rows_of(["Hi", "Bye"])]
    ids, images, fields = trainer._tokenize_prompts(prompts)
    assert (images, fields) == (None, {})
    assert trainer.processing_class.batch_decode(ids) == [
        "TOOLS:look_up\nuser: Hi\nassistant: ",
        "TOOLS:look_up\nuser: Bye\nassistant: ",
    ]


def test_tool_schemas_of_the_plan_count_for_the_length_of_a_prompt(tiny_model, in_tmp):
    # "user: three\nassistant: " is 23 bytes, and "TOOLS:look_up\n" another 14
    rows = rows_of(["three"] * 2)
    options = {"chat_template": WITH_TOOLS, "max_prompt_length": 30}
    train_grpo(planned(in_tmp / "without", tiny_model, **options), rows, [Reward(lower_case, "lower")])
    with pytest.raises(ConfigError):
        train_grpo(planned(in_tmp / "with", tiny_model, [TOOL], **options), rows, [Reward(lower_case, "lower")])
    run = RunFolder(in_tmp / "with")
    assert notes(run) == [
        "2 of 2 training prompts are longer than 30 tokens (max_prompt_length) and are left out; the longest has 37"
    ]


@pytest.mark.parametrize(
    ("changes", "limit", "name"),
    [
        ({"max_prompt_length": 40}, 40, "max_prompt_length"),
        ({"max_seq_length": 46}, 40, "max_seq_length - max_completion_length"),
        ({"max_seq_length": 46, "max_prompt_length": 400}, 40, "max_seq_length - max_completion_length"),
    ],
)
def test_longer_prompts_are_left_out_and_counted(tiny_model, in_tmp, changes, limit, name):
    asked = set()

    def reward(prompts, completions, **_):
        asked.update(prompts)
        return lower_case(completions)

    run = planned(in_tmp / "run", tiny_model, max_steps=4, **changes)
    train_grpo(run, rows_of(), [Reward(reward, "lower")])
    # <|im_start|>user\n{word}<|im_end|>\n<|im_start|>assistant\n with one token for each mark and byte
    longest = 3 + len("user\n" + WORDS[-1] + "\n" + "assistant\n")
    assert notes(run) == [
        f"1 of 8 training prompts are longer than {limit} tokens ({name}) and are left out; the longest has {longest}"
    ]
    assert asked and WORDS[-1] not in asked


def test_fewer_prompts_than_a_batch_are_refused_before_training(tiny_model, in_tmp):
    run = planned(in_tmp / "run", tiny_model, per_device_train_batch_size=16)  # 4 prompts of 4 completions
    with pytest.raises(ConfigError, match="3 prompts to train on are fewer prompts than one generation batch"):
        train_grpo(run, rows_of(WORDS[:3]), [Reward(lower_case, "lower")])
    assert not run.adapter.exists() and not run.checkpoints.exists()


def test_prompts_that_are_left_out_do_not_fill_a_batch(tiny_model, in_tmp):
    run = planned(in_tmp / "run", tiny_model, per_device_train_batch_size=32, max_prompt_length=40)
    with pytest.raises(ConfigError, match="7 prompts to train on are fewer"):
        train_grpo(run, rows_of(), [Reward(lower_case, "lower")])
    assert not run.adapter.exists()


# --- runs that learn nothing ------------------------------------------------------------------------------------------


def test_a_constant_reward_is_no_signal(tiny_model, in_tmp):
    run = planned(in_tmp / "run", tiny_model)
    with pytest.raises(TrainingFailed, match="no step of 2 had a signal: the rewards were equal within every group"):
        train_grpo(run, rows_of(), [Reward(lambda completions, **_: [0.7] * len(completions), "flat")])
    assert not run.adapter.exists()
    assert [step["reward"] for step in run.steps()] == pytest.approx([0.7, 0.7])


def test_rewards_without_any_score_are_no_signal(tiny_model, in_tmp):
    run = planned(in_tmp / "run", tiny_model)
    with pytest.raises(TrainingFailed, match="no step of 2 had a signal: the rewards gave no score"):
        train_grpo(run, rows_of(), [Reward(lambda completions, **_: [None] * len(completions), "silent")])
    assert not run.adapter.exists()
    assert [step["reward"] for step in run.steps()] == [None, None]


@pytest.mark.parametrize("steps", [1, 3])
def test_weights_that_become_nan_are_named_with_the_learning_rate(tiny_model, in_tmp, steps):
    # the first update takes the rate itself as its size, and decay multiplies by 1 - rate * 100, beyond the largest
    # float32 (3.4e38); with more steps the next completions cannot be sampled either
    run = planned(in_tmp / "run", tiny_model, learning_rate=3e38, weight_decay=100, max_steps=steps)
    with pytest.raises(TrainingFailed, match=r"trained tensors hold NaN or infinity.*lower learning_rate \(3e\+38\)"):
        train_grpo(run, rows_of(), [Reward(lower_case, "lower")])
    assert not run.adapter.exists()


def test_a_runtime_error_with_sound_weights_stays_what_it_is(tiny_model, in_tmp, monkeypatch):
    class Trouble(RuntimeError):
        pass

    def broken(*_, **__):
        raise Trouble("the sampler is gone")

    monkeypatch.setattr(policy_trainer, "sample_completions", broken)
    run = planned(in_tmp / "run", tiny_model, sampler="generate")
    with pytest.raises(Trouble, match="the sampler is gone"):
        train_grpo(run, rows_of(), [Reward(lower_case, "lower")])
    assert not run.adapter.exists()


# --- going on ---------------------------------------------------------------------------------------------------------


def began(run):
    """What was said of where it began."""
    return [note for note in notes(run) if "going on from" in note or "from the start" in note]


SAVING = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 0}


def continued(tmp, run, base, name, **changes):
    """A copy of ``run`` that is planned for other steps."""
    shutil.copytree(run.root, tmp / name)
    copy = RunFolder(tmp / name)
    plan(copy, base, TrainConfig.load({**SETTINGS, **SAVING, **changes}, need_model=False, need_data=False))
    return copy


@pytest.fixture(scope="module")
def stopped_at_4(tiny_model, tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run = planned(tmp_path_factory.mktemp("stopped") / "run", tiny_model, **{**SAVING, "max_steps": 4})
    train_grpo(run, rows_of(), [Reward(lower_case, "lower")])
    torch.set_num_threads(threads)
    return run


@pytest.mark.parametrize("start", [4, 2])  # at the end of the first pass over the prompts, and within it
def test_a_run_resumed_to_6_equals_an_uninterrupted_one_bit_for_bit(tiny_model, in_tmp, stopped_at_4, start):
    assert sorted(path.name for path in stopped_at_4.checkpoints.glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-4",
    ]
    whole = planned(in_tmp / "whole", tiny_model, **{**SAVING, "max_steps": 6})
    train_grpo(whole, rows_of(), [Reward(lower_case, "lower")])
    resumed = continued(in_tmp, stopped_at_4, tiny_model, "resumed", max_steps=6)
    if start == 2:
        shutil.rmtree(resumed.checkpoints / "checkpoint-4")
    train_grpo(resumed, rows_of(), [Reward(lower_case, "lower")], resume=True)
    assert began(resumed) == [f"going on from checkpoint-{start}"]
    assert [step["step"] for step in resumed.steps()] == [1, 2, 3, 4, 5, 6]
    got, wanted = adapter_of(resumed), adapter_of(whole)
    assert got.keys() == wanted.keys() and len(got) == 28
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []
    assert [name for name in wanted if torch.equal(got[name], adapter_of(stopped_at_4)[name])] == []
    timeless = [[{**step, "time": 0, "seconds": 0, "calls": 0} for step in run.steps()] for run in (resumed, whole)]
    assert [step["of"] for step in timeless[0]] == [4] * start + [6] * (6 - start)
    assert [{**step, "of": 6} for step in timeless[0]] == timeless[1]


def test_a_checkpoint_without_its_optimiser_is_passed_over_for_the_one_before(tiny_model, in_tmp, stopped_at_4):
    resumed = continued(in_tmp, stopped_at_4, tiny_model, "resumed", max_steps=4)
    (resumed.checkpoints / "checkpoint-4" / "optimizer.pt").unlink()
    shutil.rmtree(resumed.adapter)
    train_grpo(resumed, rows_of(), [Reward(lower_case, "lower")], resume=True)
    assert began(resumed) == ["going on from checkpoint-2"]
    state = json.loads((resumed.checkpoints / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    got, wanted = adapter_of(resumed), adapter_of(stopped_at_4)
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []


@pytest.mark.parametrize("steps", [{"max_steps": 4}, {"max_steps": 3}, {"max_steps": -1, "num_train_epochs": 1}])
def test_a_run_whose_last_step_was_saved_is_finished_and_not_trained_further(tiny_model, in_tmp, stopped_at_4, steps):
    # 8 prompts, 2 in a batch: one epoch is 4 steps
    resumed = continued(in_tmp, stopped_at_4, tiny_model, "resumed", **steps)
    shutil.rmtree(resumed.adapter)

    def reward(completions, **_):
        raise AssertionError("nothing is to be sampled")

    train_grpo(resumed, rows_of(), [Reward(reward, "lower")], resume=True)
    assert began(resumed) == ["going on from checkpoint-4"]
    assert [step["step"] for step in resumed.steps()] == [1, 2, 3, 4]
    assert sorted(path.name for path in resumed.checkpoints.glob("*-*")) == ["checkpoint-2", "checkpoint-4"]
    got, wanted = adapter_of(resumed), adapter_of(stopped_at_4)
    assert got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)
    there = {path.name for path in resumed.adapter.iterdir()}
    assert not [name for name in there if name.endswith((".bin", ".pt", ".pth", ".pkl"))]  # pickles
    assert there >= {"adapter_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


@pytest.mark.parametrize("fault", ["no signal", "NaN"])
def test_a_run_that_failed_at_its_last_step_fails_again_when_it_is_resumed(tiny_model, in_tmp, stopped_at_4, fault):
    resumed = continued(in_tmp, stopped_at_4, tiny_model, "resumed", max_steps=4)
    shutil.rmtree(resumed.adapter)
    if fault == "NaN":
        path = resumed.checkpoints / "checkpoint-4" / "adapter_model.safetensors"
        broken = {name: tensor * float("nan") for name, tensor in load_file(path).items()}
        save_file(broken, path, metadata={"format": "pt"})  # of the size that was recorded
    else:
        events = [{**event, "grad_norm": 0.0} for _, event in resumed.events()]
        resumed.events_file.write_text("".join(json.dumps(event) + "\n" for event in events))
    with pytest.raises(TrainingFailed, match=fault if fault == "NaN" else "had a signal"):
        train_grpo(resumed, rows_of(), [Reward(lower_case, "lower")], resume=True)
    assert not resumed.adapter.exists()


def test_prompts_come_in_another_order_in_each_pass_and_each_once(tiny_model, in_tmp):
    asked = []

    def reward(prompts, completions, **_):
        asked.extend(dict.fromkeys(prompts))
        return lower_case(completions)

    train_grpo(planned(in_tmp / "run", tiny_model, max_steps=8), rows_of(), [Reward(reward, "lower")])
    assert sorted(asked[:8]) == sorted(asked[8:]) == sorted(WORDS)
    assert asked[:8] != asked[8:]


def test_without_a_whole_checkpoint_a_resumed_run_begins_again(tiny_model, in_tmp, stopped_at_4):
    resumed = continued(in_tmp, stopped_at_4, tiny_model, "resumed", max_steps=4)
    for path in resumed.checkpoints.glob("*/adapter_model.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    resumed.events_file.unlink()
    train_grpo(resumed, rows_of(), [Reward(lower_case, "lower")], resume=True)
    assert began(resumed) == ["no whole checkpoint: from the start"]
    assert [step["step"] for step in resumed.steps()] == [1, 2, 3, 4]
    assert all(torch.equal(adapter_of(resumed)[n], tensor) for n, tensor in adapter_of(stopped_at_4).items())


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, 5),
        ({"num_iterations": 2}, 6),  # a generation is used twice, so only even steps lie between two
        ({"gradient_accumulation_steps": 2}, 5),  # sampled at once for one update
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 8}, 8),  # 8 micro-batches are 4 updates
    ],
)
def test_checkpoints_lie_between_two_generations(tiny_model, in_tmp, changes, wanted):
    run = planned(in_tmp / "run", tiny_model, save_strategy="steps", save_steps=5, **changes)
    config = TrainConfig.load(run.plan.config, need_model=False, need_data=False)
    assert grpo._arguments(run, config, [1.0], "cpu").save_steps == wanted
