"""TRL's loop of tool calls with forced tokens: what is run, masked, left out and learned, as a hand works it out."""

import asyncio
import re
import sys
from functools import partial

import pytest
import torch
from peft import LoraConfig

from praison_agent_rl.agent_rollouts.tool_answers import told_absent
from praison_agent_rl.agent_rollouts.tool_loop import answers_with_tools
from praison_agent_rl.agent_rollouts.tool_texts import keep_response_template
from praison_agent_rl.agent_rollouts.toolboxes import boxes_of, environment_of, methods_of, tools_of
from praison_agent_rl.answering import Engine
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import to_dataset
from praison_agent_rl.environments import episode_reward
from praison_agent_rl.episodes import Telling
from praison_agent_rl.errors import ConfigError, RewardError, TrainingFailed
from praison_agent_rl.evaluation import score_answers
from praison_agent_rl.models import load_model, load_tokenizer
from praison_agent_rl.rewards import Reward
from praison_agent_rl.rollouts import Sampling
from praison_agent_rl.runs import RunFolder
from praison_agent_rl.scoring.calls import Caller, CallRules
from praison_agent_rl.training import grpo
from praison_agent_rl.training.policy_trainer import PolicyTrainer
from tests.model.test_agent_rollouts import assert_alike, by_hand, gradients_of
from tests.model.test_agent_runs import ADD_2_3, ADD_5_40, END, forced
from tests.model.test_grpo import SETTINGS, rows_of

pytestmark = pytest.mark.usefixtures("one_thread")

HERE = __name__
CALLS: list[tuple[str, object]] = []


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    CALLS.append(("add", (a, b)))
    return a + b


def broken(text: str) -> str:
    """Break.

    Args:
        text: What.
    """
    raise ValueError(f"no {text}")


def hangs(text: str) -> str:
    """Hang.

    Args:
        text: What.
    """
    while True:
        pass


def untyped(a, b):
    """Add."""
    return a + b


class Counting:
    """A number that can be raised."""

    def reset(self, **row) -> str:
        """Begin."""
        self.number = 0
        return f" from {row.get('start', 0)}"

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        self.number += a + b
        return self.number

    def get_reward(self) -> float:
        """The number."""
        return float(self.number)


async def a_dd(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def go_wrong(how):
    """Raise, hang, leave, or give what is no text and no number."""
    if how == "raises":
        raise ValueError("no room")
    if how == "leaves":
        sys.exit(3)
    while how == "hangs":
        pass
    return {"a list": ["x"], "a number": 5, "nan": float("nan")}[how]


class Faulty(Counting):
    """A number that can be raised, where the row says what goes wrong."""

    def reset(self, **row):
        self.row = row
        return go_wrong(row["begin"]) if row["begin"] else super().reset(**row)

    def get_reward(self):
        return go_wrong(self.row["score"]) if self.row["score"] else super().get_reward()


GIVEN = {
    "a list": lambda: [1, {"x": 2}],
    "parts": lambda: [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    "half an emoji": lambda: "\ud83d",
    "later": lambda: given_later(),
    "cancelled": lambda: is_cancelled(),
}
TOLD = {
    "a list": "[1, {'x': 2}]",
    "parts": "ab",
    "half an emoji": str(
        {"error": "'utf-8' codec can't encode character '\\ud83d' in position 0: surrogates not allowed"}
    ),
    "later": "[3]",
    "cancelled": "{'error': 'Tool was cancelled'}",
}


async def given_later():
    return [3]


def is_cancelled():
    raise asyncio.CancelledError


class Odd(Counting):
    """A place where adding gives what the row says, which the environment itself makes use of."""

    def reset(self, **row):
        self.how, self.found = row["how"], []

    def add(self, a: int, b: int):
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        self.found.append(self.given())
        return self.found[-1]

    def given(self):
        """What is given."""
        return GIVEN[self.how]()

    def get_reward(self):
        return float(self.found == [[1, {"x": 2}]] * 2)


def by_end(completions, **_):
    return [float(text.startswith("It is 45")) for text in completions]


BY_END = Reward(by_end, "end")


def a_trainer(model, in_tmp, questions, *, reward=BY_END, **changes):
    size = {"num_generations": len(questions), "per_device_train_batch_size": len(questions)}
    settings = {"chat_template": "chatml_tools", "max_completion_length": 600, "watch": False, **size, **changes}
    config = TrainConfig.load({**SETTINGS, **settings}, need_model=False, need_data=False)
    run = RunFolder.create(in_tmp / "run")
    tokenizer = load_tokenizer(str(model), config)
    keep_response_template(tokenizer)
    torch.manual_seed(0)
    trainer = PolicyTrainer(
        model=load_model(str(model), config, device="cpu"),
        reward_funcs=[reward],
        args=grpo._arguments(run, config, [1.0], "cpu"),
        train_dataset=to_dataset(rows_of()),
        processing_class=tokenizer,
        peft_config=LoraConfig(**config.lora_arguments()),
        tools=tools_of(config),
        environment_factory=environment_of(config),
        sampler="exact",
    )
    generator = torch.Generator().manual_seed(1)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    draw = forced(tokenizer)
    trainer._generate_single_turn = lambda ids, *_, **__: (draw(ids, Sampling(600)).ids, None)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    CALLS.clear()
    return trainer


def scored(trainer, questions, **columns):
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in questions]
    for name, values in columns.items():
        rows = [{**row, name: value} for row, value in zip(rows, values, strict=True)]
    return trainer._generate_and_score_completions(rows)


TOOLS = [f"{HERE}:add", f"{HERE}:broken"]


def test_the_loss_of_a_run_with_two_rounds_is_what_a_hand_works_out(untied_model, in_tmp):
    questions = ["TWO ROUNDS", "PARALLEL", "FAILED", "PLAIN"]
    trainer = a_trainer(untied_model, in_tmp, questions, tools=TOOLS)
    batch = scored(trainer, questions)
    assert CALLS == [("add", (2, 3)), ("add", (2, 3)), ("add", (5, 40)), ("add", (5, 40))]
    first = batch["completion_ids"][0][batch["completion_mask"][0].bool()].tolist()
    mask = batch["tool_mask"][0][: len(first)].tolist()
    said = [trainer._tokenizer.decode([t for t, m in zip(first, mask, strict=True) if m == side]) for side in (1, 0)]
    assert said[0] == f"{ADD_2_3}<|im_end|>{ADD_5_40}<|im_end|>It is 45.<|im_end|>"
    assert "<tool_response>\n5\n</tool_response>" in said[1] and "<tool_response>\n45\n</tool_response>" in said[1]
    # five calls: two rounds, two at once, and one that fails
    assert trainer._metrics["train"]["tools/failure_frequency"][-1] == pytest.approx(0.2)
    assert trainer._metrics["train"]["tools/cut"][-1] == 0.0
    assert trainer._metrics["train"]["tools/results_dropped"][-1] == 0.0
    advantages = [0.75 / 0.5001, *[-0.25 / 0.5001] * 3]  # one of four is right: mean 0.25, deviation 0.5
    assert batch["advantages"].tolist() == pytest.approx(advantages, abs=1e-5)
    parts = []
    for row, advantage in enumerate(advantages):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
        kept = batch["completion_mask"][row].bool()
        parts.append(
            (prompt, batch["completion_ids"][row][kept].tolist(), batch["tool_mask"][row][kept].tolist(), advantage)
        )
    trainer._compute_loss(trainer.model, batch).backward()
    assert_alike(gradients_of(trainer), by_hand(trainer, parts))


def test_an_unanswered_call_is_known_and_can_be_masked_out(untied_model, in_tmp):
    questions = ["TWO ROUNDS", "PLAIN"]
    changes = {"max_tool_calling_iterations": 1, "mask_truncated_completions": True}
    trainer = a_trainer(untied_model, in_tmp, questions, tools=TOOLS, **changes)
    batch = scored(trainer, questions)
    assert trainer._metrics["train"]["tools/cut"][-1] == 0.5
    assert int(batch["completion_mask"][0].sum()) == 0 and int(batch["completion_mask"][1].sum()) > 0
    assert int(batch["num_items_in_batch"]) == int(batch["tool_mask"][1][batch["completion_mask"][1].bool()].sum())


@pytest.mark.parametrize("acted_in", [{"tools": TOOLS}, {"environment": f"{HERE}:Counting"}], ids=["tools", "methods"])
def test_a_result_that_no_room_was_left_for_is_counted(acted_in, untied_model, in_tmp):
    questions = ["TWO ROUNDS", "PLAIN"]
    trainer = a_trainer(untied_model, in_tmp, questions, **acted_in, max_completion_length=100)
    scored(trainer, questions)
    # it ran, and its result would have gone past 100 tokens
    assert CALLS == [("add", (2, 3))] or trainer.environments[0].number == 5
    assert trainer._metrics["train"]["tools/results_dropped"][-1] == 0.5


def results_in(trainer, batch, row):
    """What the model was told of its calls."""
    text = trainer._tokenizer.decode(batch["completion_ids"][row][batch["completion_mask"][row].bool()])
    return re.findall(r"<tool_response>\n(.*?)\n</tool_response>", text, re.DOTALL)


def test_a_tool_that_hangs_costs_its_call_only(untied_model, in_tmp):
    questions = ["HANGS", "TWO ROUNDS", "PLAIN"]
    trainer = a_trainer(untied_model, in_tmp, questions, tools=[*TOOLS, f"{HERE}:hangs"], rollout_timeout=0.2)
    batch = scored(trainer, questions)
    assert results_in(trainer, batch, 0) == ["{'error': 'Tool timed out after 0.2s'}"]
    assert results_in(trainer, batch, 1) == ["5", "45"]
    assert trainer._metrics["train"]["tools/failure_frequency"][-1] == pytest.approx(1 / 3)
    assert trainer._metrics["train"]["tools/cut"][-1] == 0.0 and batch["advantages"].isfinite().all()


def test_a_tool_that_is_not_there_is_told_as_the_deployed_agent_is_told(untied_model, in_tmp, monkeypatch):
    questions = ["UNKNOWN", "PLAIN"]
    trainer = a_trainer(untied_model, in_tmp, questions, tools=TOOLS)
    batch = scored(trainer, questions)
    told = told_absent("nothing", ["add", "broken"])
    assert results_in(trainer, batch, 0) == [told]
    assert trainer._metrics["train"]["tools/failure_frequency"][-1] == 1.0
    assert trainer._metrics["train"]["tools/results_dropped"][-1] == 0.0
    engine = an_engine(untied_model, monkeypatch, tools=TOOLS)
    (run,) = answers_with_tools(engine, [{"prompt": "UNKNOWN"}], boxes_of(engine.config), samples=1, rounds=4).runs
    assert run.calls[-1].messages[-1]["content"] == told


def test_an_environment_is_acted_in_and_its_own_score_is_not_added_unasked(untied_model, in_tmp):
    questions = ["TWO ROUNDS", "PLAIN"]
    trainer = a_trainer(untied_model, in_tmp, questions, environment=f"{HERE}:Counting")
    assert trainer.reward_func_names == ["end"] and len(trainer.reward_weights) == 1
    scored(trainer, questions)
    assert [environment.number for environment in trainer.environments] == [5 + 45, 0]


def test_what_is_given_in_an_environment_is_told_alike_in_training_and_in_the_comparison(
    untied_model, in_tmp, monkeypatch
):
    questions, hows = ["TWO ROUNDS"] * len(GIVEN), list(GIVEN)
    changes = {"environment": f"{HERE}:Odd", "max_completion_length": 900}
    trainer = a_trainer(untied_model, in_tmp, questions, reward=Reward(episode_reward, "episode"), **changes)
    batch = scored(trainer, questions, how=hows)
    assert [results_in(trainer, batch, row) for row in range(len(hows))] == [[TOLD[how]] * 2 for how in hows]
    assert trainer._metrics["train"]["tools/failure_frequency"][-1] == pytest.approx(4 / 10)
    assert trainer._metrics["train"]["reward"][-1] == pytest.approx(1 / 5)  # within, a list stays one
    engine = an_engine(untied_model, monkeypatch, **changes)
    rows = [{"prompt": "TWO ROUNDS", "how": how} for how in hows]
    answers, runs = answers_with_tools(engine, rows, boxes_of(engine.config), samples=1, rounds=4)
    told = [[m["content"] for m in run.calls[-1].messages if m["role"] == "tool"] for run in runs]
    assert told == [[TOLD[how]] * 2 for how in hows] and [answer.text for answer in answers] == ["It is 45."] * 5
    assert [run.feedback[0].score for run in runs] == [1.0, 0.0, 0.0, 0.0, 0.0]


FAULTS = ["raises", "hangs", "leaves"]
ALONE = 0.5 / (0.5**0.5 + 1e-4)
"""Advantage of the better one of two that were scored 1 apart, by TRL: their deviation is 0.5 ** 0.5."""


def test_an_episode_that_does_not_begin_costs_its_rollout_alone(untied_model, in_tmp):
    questions, begin = ["TWO ROUNDS", "PLAIN", *["PLAIN"] * 4], ["", "", *FAULTS, "a number"]
    trainer = a_trainer(untied_model, in_tmp, questions, environment=f"{HERE}:Faulty", rollout_timeout=0.2)
    told = []
    trainer._telling = Telling(told.append)
    for _ in range(2):
        batch = scored(trainer, questions, begin=begin, score=[""] * 6)
        assert batch["advantages"].tolist() == pytest.approx([ALONE, -ALONE, 0, 0, 0, 0], abs=1e-5)
        assert [environment.number for environment in trainer.environments[:2]] == [50, 0]
        assert trainer._metrics["train"]["rollouts/failed"][-1] == pytest.approx(4 / 6)
        assert trainer._metrics["train"]["reward"][-1] == pytest.approx(0.5)
    assert [text.partition(".reset ")[2].partition(".")[0] for text in told] == [
        "raised ValueError: no room",
        "did not end within 0",
        "ended the program (SystemExit: 3)",
        "returned a int, 5; wanted: a text that is put behind the prompt, or None",
    ]
    with pytest.raises(TrainingFailed, match=r"^none of 6 episodes .* Faulty\.reset raised ValueError: no room\. Mend"):
        scored(trainer, questions, begin=["raises"] * 6, score=[""] * 6)


def test_a_score_of_an_episode_that_is_none_costs_its_rollout_alone(untied_model, in_tmp):
    questions, score = ["TWO ROUNDS", "PLAIN", *["PLAIN"] * 5], ["", "", *FAULTS, "a list", "nan"]
    changes = {"environment": f"{HERE}:Faulty", "rollout_timeout": 0.2}
    trainer = a_trainer(untied_model, in_tmp, questions, reward=Reward(episode_reward, "episode"), **changes)
    batch = scored(trainer, questions, begin=[""] * 7, score=score)
    deviation = (50**2 / 2) ** 0.5
    assert batch["advantages"].tolist() == pytest.approx([25 / deviation, -25 / deviation, *[0] * 5], abs=1e-4)
    counts = trainer.caller.counts["episode"]
    assert (counts.samples, counts.failed) == (7, 5)
    assert "Faulty.get_reward raised ValueError: no room" in counts.first_error
    unused = a_trainer(untied_model, in_tmp / "unused", questions, **changes)
    assert scored(unused, questions, begin=[""] * 7, score=score)["advantages"].isfinite().all()
    assert unused._metrics["train"]["rewards/end/failed"] == [0.0]


def test_an_episode_of_a_held_out_prompt_that_goes_wrong_costs_its_answer_alone(untied_model, monkeypatch):
    engine = an_engine(untied_model, monkeypatch, environment=f"{HERE}:Faulty", rollout_timeout=0.2)
    begin, score = [*FAULTS, "raises", *[""] * 4], [*[""] * 5, *FAULTS]
    rows = [{"prompt": "TWO ROUNDS", "begin": b, "score": s} for b, s in zip(begin, score, strict=True)]
    told = []
    boxes = boxes_of(engine.config, tell=told.append)
    answers, runs = answers_with_tools(engine, rows, boxes, samples=1, rounds=4)
    wrong = ["raised ValueError: no room", "did not end within 0.2 s", "ended the program (SystemExit: 3)"]
    failed = [f"Faulty.reset {why}" for why in wrong]
    assert [answer.error for answer in answers] == [*failed, failed[0], *[None] * 4]
    assert [text.partition(". The episode")[0] for text in told] == failed
    assert [answer.text for answer in answers] == [*[""] * 4, *["It is 45."] * 4]
    scorers = [BY_END, Reward(episode_reward, "episode")]
    lenient = partial(Caller, rules=CallRules(most_failed=1.0))
    found = score_answers(answers, rows, scorers, calling=lenient, runs=runs)
    assert [answer.rewards for answer in found] == [
        *[{}] * 4,
        {"end": 1.0, "episode": 50.0},
        *[{"end": 1.0, "episode": None}] * 3,
    ]
    with pytest.raises(RewardError, match=r"Faulty\.get_reward raised ValueError: no room"):
        score_answers(answers, rows, scorers, runs=runs)


def test_a_name_written_almost_so_means_an_awaited_tool_in_training_and_in_the_comparison(
    untied_model, in_tmp, monkeypatch
):
    questions, tools = ["TWO ROUNDS", "PLAIN"], [f"{HERE}:a_dd"]  # the model calls add
    trainer = a_trainer(untied_model, in_tmp, questions, tools=tools)
    assert results_in(trainer, scored(trainer, questions), 0) == ["5", "45"]
    assert trainer._metrics["train"]["tools/failure_frequency"][-1] == 0.0
    engine = an_engine(untied_model, monkeypatch, tools=tools)
    rows = [{"prompt": question} for question in questions]
    _, (run, _) = answers_with_tools(engine, rows, boxes_of(engine.config), samples=1, rounds=4)
    assert [m["content"] for m in run.calls[-1].messages if m["role"] == "tool"] == ["5", "45"]


def test_held_out_prompts_are_answered_with_tools_too(untied_model, in_tmp, monkeypatch):
    engine = an_engine(untied_model, monkeypatch, tools=TOOLS)
    rows = [{"prompt": "TWO ROUNDS"}, {"prompt": "FAILED"}, {"prompt": "PLAIN"}]
    answers, runs = answers_with_tools(engine, rows, boxes_of(engine.config), samples=1, rounds=4)
    assert [answer.text for answer in answers] == ["It is 45.", "It failed.", "Hello."]
    assert [len(run.calls) for run in runs] == [3, 2, 1] and [answer.error for answer in answers] == [None] * 3
    (again,) = answers_with_tools(engine, rows[:1], boxes_of(engine.config), samples=1, rounds=1).answers
    assert again.text == ""  # ended on the second call, which nobody answered


def test_what_an_environment_says_of_a_held_out_episode_is_kept(untied_model, in_tmp, monkeypatch):
    engine = an_engine(untied_model, monkeypatch, environment=f"{HERE}:Counting")
    rows = [{"prompt": "TWO ROUNDS", "start": 3}]
    (answer,), (run,) = answers_with_tools(engine, rows, boxes_of(engine.config), samples=1, rounds=4)
    assert run.feedback[0].score == 50.0 and answer.text == "It is 45."
    assert run.calls[0].messages[-1]["content"] == "TWO ROUNDS from 3"


def an_engine(model, monkeypatch, **changes):
    from praison_agent_rl.agent_rollouts import tool_loop

    settings = {"chat_template": "chatml_tools", "max_completion_length": 600, **changes}
    config = TrainConfig.load(settings, need_model=False, need_data=False)
    tokenizer = load_tokenizer(str(model), config)
    draw = forced(tokenizer)
    monkeypatch.setattr(tool_loop, "complete", lambda engine, prompts, sampling: draw(prompts, sampling))
    return Engine(load_model(str(model), config, device="cpu"), tokenizer, config, [END])


def test_all_that_is_wrong_with_tools_is_said_at_once():
    config = TrainConfig.load({"tools": [f"{HERE}:untyped", f"{HERE}:gone"]}, need_model=False, need_data=False)
    with pytest.raises(ConfigError) as told:
        tools_of(config)
    assert f"{HERE!r} has no 'gone'" in str(told.value)
    assert "untyped: no type hint for 'a', 'b'" in str(told.value)


def test_the_methods_of_an_environment_are_its_tools():
    assert [method.__name__ for method in methods_of(Counting())] == ["add"]
