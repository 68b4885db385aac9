"""Rollouts of an agent within a GRPO step: what is trained on, and with which advantage, is what a hand works out."""

import pytest
import torch
from trl.trainer.utils import use_adapter

from praison_agent_rl.agent_rollouts.jobs import Rollout, RolloutJob, RolloutOutcome, TokenCall
from praison_agent_rl.errors import TrainingFailed
from praison_agent_rl.records import Call
from praison_agent_rl.rewards import Reward
from praison_agent_rl.runs import RunFolder, write_record
from praison_agent_rl.training import grpo
from praison_agent_rl.training.agent_rollouts import Manner
from tests.model.test_grpo import lower_case, planned, rows_of, trainer_for

pytestmark = pytest.mark.usefixtures("one_thread")

END = 1
CALLS_A_TOOL = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": {}}]}


def said(prompt, drawn, *, reply=None, finish="stop", agent="solo", text="x"):
    reply = reply or {"role": "assistant", "content": text}
    call = Call(id="c", time=0.0, messages=[{"role": "user", "content": "q"}], reply=reply, finish=finish)
    return TokenCall(call=call, agent=agent, prompt_ids=prompt, completion_ids=drawn, log_probs=[-1.0] * len(drawn))


def rollout(*calls, error=None):
    answer = None if error else calls[-1].call.reply["content"]
    outcome = RolloutOutcome(id="j", output=answer, error=error, seconds=2.0, tool_seconds=0.5)
    return Rollout(job=RolloutJob(id="j", prompt="q", seconds=9.0), outcome=outcome, calls=list(calls))


TWO_ROUNDS = rollout(
    said([20, 21], [30, END], reply=CALLS_A_TOOL, finish="tool_calls"),
    said([20, 21, 30, END, 40, 41], [31, END], reply=CALLS_A_TOOL, finish="tool_calls"),
    said([20, 21, 30, END, 40, 41, 31, END, 42], [32, 33, END], text="best"),
)
REWRITTEN = rollout(
    said([20, 21], [34, END], reply=CALLS_A_TOOL, finish="tool_calls"), said([22, 23, 24], [35, END], text="worst")
)
ONE = rollout(said([20, 21], [36, 37, 38, END], text="middle"))
FAILED = rollout(said([20, 21], [39, END], reply=CALLS_A_TOOL), error="the tool look_up raised ValueError: no")
SCORES = {"best": 1.0, "worst": 0.0, "middle": 0.5}
ADVANTAGES = [0.5 / 0.5001, -0.5 / 0.5001, 0.0]  # mean 0.5 and deviation 0.5 of the three that came to an end


def by_words(completions, **_):
    return [SCORES.get(completion, 7.0) for completion in completions]


class Scripted:
    """Asks nobody."""

    agent, trained = "solo", None

    def __init__(self, *rollouts):
        self.rollouts, self.rows = list(rollouts), None

    def ask(self, rows, draw, sampling, **_):
        self.rows = rows
        return self.rollouts


def a_trainer(model, in_tmp, *rollouts, credit="all", discount=1.0, reward=by_words, **changes):
    size = {"num_generations": len(rollouts), "per_device_train_batch_size": len(rollouts)}
    changes = {"temperature": 1.0, "watch": False, **size, **changes}
    trainer = trainer_for(planned(in_tmp / "run", model, **changes), model, rewards=[Reward(reward, "words")])
    trainer.rollouts = Manner(Scripted(*rollouts), credit, discount)
    trainer.rollout_func = trainer._rolled_out
    trainer.current_gradient_accumulation_steps = 1
    trainer.sampler = "exact"
    trainer.model.train()
    return trainer


def scored(trainer, count):
    return trainer._generate_and_score_completions([{"prompt": "q"}] * count)


def by_hand(trainer, parts):
    """Gradients of -sum(advantage x log-probability) over the drawn tokens, by whole sequences one at a time."""
    trainer.model.zero_grad()
    drawn = sum(sum(mask) for _, _, mask, _ in parts)
    for prompt, completion, mask, advantage in parts:
        logits = trainer.model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        log_probs = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        (-(log_probs * torch.tensor(mask)).sum() * advantage / drawn).backward()
    return gradients_of(trainer)


def gradients_of(trainer):
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def assert_alike(found, wanted):
    assert found.keys() == wanted.keys() and len(wanted) > 4
    assert max(float(gradient.abs().max()) for gradient in wanted.values()) > 1e-5
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-6, msg=name)


JOINED = ([20, 21], [30, END, 40, 41, 31, END, 42, 32, 33, END], [1, 1, 0, 0, 1, 1, 0, 1, 1, 1])
FIRST, SECOND = ([20, 21], [34, END], [1, 1]), ([22, 23, 24], [35, END], [1, 1])
WHOLE = ([20, 21], [36, 37, 38, END], [1, 1, 1, 1])
PARTS = {
    ("last", 1.0): [(*JOINED, ADVANTAGES[0]), (*SECOND, ADVANTAGES[1]), (*WHOLE, 0.0)],
    ("all", 1.0): [(*JOINED, ADVANTAGES[0]), (*FIRST, ADVANTAGES[1]), (*SECOND, ADVANTAGES[1]), (*WHOLE, 0.0)],
    ("discounted", 0.5): [
        (*JOINED, ADVANTAGES[0]), (*FIRST, 0.5 * ADVANTAGES[1]), (*SECOND, ADVANTAGES[1]), (*WHOLE, 0.0)
    ],
}  # fmt: skip


@pytest.mark.parametrize("rule", PARTS, ids=lambda rule: rule[0])
def test_the_loss_of_joined_and_split_runs_is_what_a_hand_works_out(rule, untied_model, in_tmp):
    trainer = a_trainer(untied_model, in_tmp, TWO_ROUNDS, REWRITTEN, ONE, FAILED, credit=rule[0], discount=rule[1])
    batch = scored(trainer, 4)
    drawn_of_failed = 2  # it has no advantage, but is counted as any completion is
    drawn = sum(sum(mask) for _, _, mask, _ in PARTS[rule])
    assert int(batch["num_items_in_batch"]) == drawn + drawn_of_failed
    trainer._compute_loss(trainer.model, batch).backward()
    found = gradients_of(trainer)
    wanted = by_hand(trainer, PARTS[rule])
    assert_alike(found, {name: g * drawn / (drawn + drawn_of_failed) for name, g in wanted.items()})


def test_the_batch_has_a_row_for_each_rollout_and_further_ones_beneath(untied_model, in_tmp):
    trainer = a_trainer(untied_model, in_tmp, TWO_ROUNDS, REWRITTEN, ONE, FAILED)
    batch = scored(trainer, 4)
    assert len(batch["advantages"]) == 5
    assert batch["advantages"].tolist() == pytest.approx([*ADVANTAGES, 0.0, ADVANTAGES[1]], abs=1e-6)
    first = batch["completion_ids"][0][batch["completion_mask"][0].bool()].tolist()
    assert first == JOINED[1] and batch["tool_mask"][0][: len(first)].tolist() == JOINED[2]
    assert batch["prompt_ids"][4][batch["prompt_mask"][4].bool()].tolist() == FIRST[0]
    assert batch["completion_ids"][4][batch["completion_mask"][4].bool()].tolist() == FIRST[1]


def test_what_was_seen_is_logged(untied_model, in_tmp):
    trainer = a_trainer(untied_model, in_tmp, TWO_ROUNDS, REWRITTEN, ONE, FAILED)
    scored(trainer, 4)
    seen = {name: values[-1] for name, values in trainer._metrics["train"].items() if name.startswith("rollouts/")}
    assert seen["rollouts/joined"] == 0.75 and seen["rollouts/failed"] == 0.25
    assert seen["rollouts/calls"] == (3 + 2 + 1 + 1) / 4 and seen["rollouts/cut"] == 0.25
    assert (seen["rollouts/seconds"], seen["rollouts/tool_seconds"]) == (2.0, 0.5)


def test_rows_reach_the_agent_and_whole_runs_reach_the_rewards(untied_model, in_tmp):
    heard = []

    def whole(prompts, completions, **columns):
        heard.append((prompts, completions, columns["answer"]))
        return [[0.0, 1.0][place % 2] for place in range(len(completions))]

    trainer = a_trainer(untied_model, in_tmp, ONE, TWO_ROUNDS, reward=whole)
    trainer._generate_and_score_completions([{"prompt": "q", "answer": "4"}] * 2)
    assert trainer.rollouts.asker.rows == [{"prompt": "q", "answer": "4"}] * 2
    assert [answer for _, _, answers in heard for answer in answers] == ["4", "4"]


def test_parts_of_a_generation_stay_of_one_size(untied_model, in_tmp):
    changes = {"steps_per_generation": 4, "per_device_train_batch_size": 1, "num_generations": 4}
    trainer = a_trainer(untied_model, in_tmp, TWO_ROUNDS, REWRITTEN, ONE, FAILED, **changes)
    batch = scored(trainer, 4)
    assert len(batch["advantages"]) == 8 and batch["advantages"][5:].tolist() == [0.0] * 3
    assert int(batch["tool_mask"][5:].sum()) == 0
    assert int(batch["num_items_in_batch"]) == 7 + 2 + 2 + 4 + 2


def test_runs_that_were_cut_can_be_masked_out_also_on_an_unanswered_call(untied_model, in_tmp):
    unanswered = rollout(said([20, 21], [36, END], reply=CALLS_A_TOOL, finish="tool_calls"))
    trainer = a_trainer(untied_model, in_tmp, ONE, unanswered, mask_truncated_completions=True)
    batch = scored(trainer, 2)
    assert batch["completion_mask"].sum(1).tolist() == [4, 0] and int(batch["num_items_in_batch"]) == 4


def test_a_step_without_any_answer_ends_the_run_and_says_why(untied_model, in_tmp):
    trainer = a_trainer(untied_model, in_tmp, FAILED, FAILED)
    with pytest.raises(TrainingFailed, match=r"none of 2 rollouts.*the tool look_up raised ValueError: no"):
        scored(trainer, 2)


def test_a_run_without_a_signal_says_which_rollouts_failed(untied_model, in_tmp):
    trainer = a_trainer(untied_model, in_tmp, ONE, FAILED)
    assert grpo._failures(trainer) == ""
    trainer.rolled = [ONE, FAILED]
    trainer.state.log_history = [{"rollouts/failed": 0.5}, {"loss": 1.0}, {"rollouts/failed": 1.0}]
    said = grpo._failures(trainer)
    assert "75% of the rollouts failed" in said and said.endswith("the tool look_up raised ValueError: no")
    run = RunFolder(in_tmp / "run")
    run.report_event("step", step=1, reward=1.0, grad_norm=0.0)
    with pytest.raises(TrainingFailed, match="equal within every group; 75% of the rollouts failed"):
        grpo._check_signal(run, said)


@pytest.mark.parametrize("warm", [False, True], ids=["the base", "what a warm start left"])
def test_with_a_reference_further_rows_are_scored_by_it_too(warm, untied_model, in_tmp):
    trainer = a_trainer(untied_model, in_tmp, TWO_ROUNDS, REWRITTEN, ONE, FAILED, beta=0.1)
    model = trainer.accelerator.unwrap_model(trainer.model)
    if warm:  # TRL keeps what it was given under this name
        model.add_adapter("ref", model.peft_config["default"])
        for name, parameter in model.named_parameters():
            if "lora_B.ref" in name:
                parameter.data.fill_(0.05)
    batch = scored(trainer, 4)
    with use_adapter(model, "ref") if warm else model.disable_adapter(), torch.no_grad():
        logits = trainer.model(input_ids=torch.tensor([FIRST[0] + FIRST[1]])).logits[0, 1:-1]
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(FIRST[1])[:, None])[:, 0]
    torch.testing.assert_close(batch["ref_per_token_logps"][4, :2], wanted, rtol=1e-4, atol=1e-5)


def test_what_a_sampler_of_fewer_bits_said_is_what_further_rows_are_weighted_by(untied_model, in_tmp):
    trainer = a_trainer(untied_model, in_tmp, TWO_ROUNDS, REWRITTEN, ONE, FAILED)
    trainer.sampler = "int8"
    batch = scored(trainer, 4)
    assert batch["old_per_token_logps"][4, :2].tolist() == [-1.0, -1.0]
    assert batch["old_per_token_logps"][0, :5].tolist() == [-1.0, -1.0, 0.0, 0.0, -1.0]


def test_without_an_agent_nothing_is_different(untied_model, in_tmp):
    trainer = trainer_for(planned(in_tmp / "run", untied_model, watch=False), untied_model)
    assert trainer.rollouts is None and trainer.rollout_func is None


def test_rewards_of_steps_give_each_call_its_own_advantage(untied_model, in_tmp):
    def by_steps(completions, run, **_):
        found = {"best": [0.0, 1.0, 1.0], "worst": [0.5, 0.0]}
        return [found[completion] for completion in completions]

    trainer = a_trainer(untied_model, in_tmp, TWO_ROUNDS, REWRITTEN, reward=by_steps)
    batch = scored(trainer, 2)
    # totals 2 and 0.5, their deviation 1.06066; returns 2, 2, 1 and 0.5, 0
    first, second, third = ((2 - 1.25) / 1.06076, (2 - 1) / 1.06076, 0.0)
    wanted = [first, first, 0, 0, second, second, 0, third, third, third]
    assert batch["advantages"][0].tolist() == pytest.approx(wanted, abs=1e-4)
    assert batch["advantages"][1][:2].tolist() == pytest.approx([(0 - 1) / 1.06076] * 2, abs=1e-4)
    assert batch["advantages"][2][:2].tolist() == pytest.approx([(0.5 - 1.25) / 1.06076] * 2, abs=1e-4)
    assert torch.isfinite(trainer._compute_loss(trainer.model, batch))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_last_completions_are_kept_and_compared_with_the_merged_model(untied_model, in_tmp, temperature):
    from praison_agent_rl.data import read_rows, write_rows
    from praison_agent_rl.errors import ModelError
    from praison_agent_rl.measuring import measure
    from praison_agent_rl.runs import RunFolder
    from praison_agent_rl.stages import run_stages

    run = planned(in_tmp / "whole", untied_model, temperature=temperature, watch=False)
    write_rows(run.train_rows, rows_of())
    write_rows(run.held_out_rows, rows_of()[:2])
    rewards = [Reward(lower_case, "lower")]
    run_stages(run, ["train", "merge"], rewards)
    measure(run, "new", rewards)
    notes = [event["text"] for _, event in run.events() if event["event"] == "note"]
    (said,) = [note for note in notes if "agrees with the trainer on the last 8 completions" in note]
    assert float(said.partition("(")[2].split()[0]) < 1e-3
    rows = read_rows(run.sampled)
    assert len(rows) == 8 and all(len(row["log_probs"]) == len(row["completion_ids"]) for row in rows)
    write_rows(run.sampled, [{**row, "log_probs": [score + 0.5 for score in row["log_probs"]]} for row in rows])
    run.answers("new").unlink()
    with pytest.raises(ModelError, match=r"0\.5 nats a token apart"):
        measure(RunFolder(run.root), "new", rewards)


@pytest.mark.parametrize("parity", ["stop", "allow"])
def test_a_request_that_is_served_otherwise_stops_a_run_before_anything_is_loaded(
    untied_model, in_tmp, monkeypatch, parity
):
    from praison_agent_rl import stages
    from praison_agent_rl.data import write_rows
    from praison_agent_rl.errors import ModelError
    from praison_agent_rl.recorded_calls import write_calls

    run = planned(in_tmp / "run", untied_model, watch=False, parity=parity)
    write_rows(run.train_rows, rows_of())
    served = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if odd %}ODD{% endif %}"
    config = run.plan.config | {"chat_template": served}
    write_record(run.plan_file, run.plan.model_copy(update={"config": config}))
    settings = {"chat_template_kwargs": {"odd": True}}
    write_calls(run.calls, [Call(id="c", time=0.0, messages=[{"role": "user", "content": "q"}], settings=settings)])
    done = []
    monkeypatch.setattr(stages, "_STAGES", {"train": lambda *_: done.append("train")})
    if parity == "stop":
        with pytest.raises(ModelError, match="renders 1 of 1 recorded calls otherwise"):
            stages.run_stages(run, ["train"], [])
    else:
        stages.run_stages(run, ["train"], [])
    assert done == (["train"] if parity == "allow" else [])
