"""A warm start on a tiny model: what is learned token by token, that it is learned, and what follows on it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import ConfigError, DataError, ModelError, TrainingFailed
from praison_agent_rl.models import load_model, load_tokenizer, render_prompts
from praison_agent_rl.planning import Draft, draft_from_config
from praison_agent_rl.problems import Problems
from praison_agent_rl.records import Call, Feedback, Run
from praison_agent_rl.runs import RunFolder
from praison_agent_rl.training.warm_start import Example, examples_of, warm_start, with_adapter
from praison_agent_rl.warm_examples import calls_to_keep, check_examples, notes_on
from tests.conftest import CHATML
from tests.fakes import FakeServer, build_agent
from tests.unit.test_recorded_calls import BLANK

END = "<|im_end|>"
TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<call>' + call['function']['name'] + ' ' + call['function']['arguments'] | tojson + '</call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


class Events(list[dict[str, Any]]):
    """What was reported, as the lines of a run's events."""

    def __call__(self, event: str, **facts: Any) -> None:
        self.append({"event": event, **facts})

    def notes(self) -> list[str]:
        return [event["text"] for event in self if event["event"] == "note"]

    def losses(self) -> list[float]:
        return [event["loss"] for event in self if event["event"] == "warm_step"]


def call(asked: str = "Hi", reply: Any = "Yes", **facts: Any) -> Call:
    said = {"role": "assistant", "content": reply} if isinstance(reply, str) else reply
    messages = [{"role": "user", "content": asked}]
    return Call(id="c", time=0.0, **{"messages": messages, "reply": said, "finish": "stop", **facts})


def settings(model: Path, **changes: Any) -> TrainConfig:
    usual = {"model_name": str(model), "learning_rate": 5e-3, "per_device_train_batch_size": 4, "num_generations": 4}
    return TrainConfig.load({**usual, **changes}, need_data=False)


def started(model: Path, examples: list[Example], *, steps: int, **changes: Any) -> tuple[Any, Events]:
    config, events = settings(model, **changes), Events()
    adapted = with_adapter(load_model(str(model), config, device="cpu"), config)
    warm_start(adapted, load_tokenizer(str(model), config), examples, steps=steps, config=config, report=events)
    return adapted, events


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(str(tiny_model), settings(tiny_model))


# --- examples ---------------------------------------------------------------------------------------------------------


def test_an_example_is_the_prompt_as_it_is_sent_and_the_reply_up_to_its_end_token(tokenizer: Any) -> None:
    (made,) = examples_of([call("Hi", "Yes")], tokenizer)
    assert tokenizer.decode(made.prompt_ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(made.completion_ids) == "Yes<|im_end|>"
    assert len(made.completion_ids) == 4  # one token a letter, and one end token


def test_a_tool_call_is_learned_as_the_template_writes_it(tokenizer: Any) -> None:
    tokenizer.chat_template = TOOL_TEMPLATE
    asked = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    reply = {"role": "assistant", "content": None, "tool_calls": [asked]}
    (made,) = examples_of([call("1?", reply, tools=[TOOL], finish="tool_calls")], tokenizer)
    prompt = tokenizer.decode(made.prompt_ids)
    assert prompt.startswith('<|im_start|>system\n{"type": "function", "function": {"name": "add"')
    assert prompt.endswith("<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(made.completion_ids) == '<call>add {"a": 1}</call><|im_end|>'
    (sent,) = render_prompts(tokenizer, [[{"role": "user", "content": "1?"}]], [TOOL])
    assert made.prompt_ids == sent


def test_calls_that_cannot_be_learned_are_left_out_and_counted(tokenizer: Any) -> None:
    events = Events()
    calls = [
        call("a", "kept"),
        call("b", None),
        call("c", ""),
        call("d", "half", finish="length"),
        call("e", "half", partial=True),
        call("f", f"one{END} two"),
        call("g", "x", error="refused"),
    ]
    made = examples_of(calls, tokenizer, report=events)
    assert [tokenizer.decode(one.completion_ids) for one in made] == ["kept<|im_end|>"]
    (said,) = events.notes()
    assert said.startswith("6 of 7 calls are left out of the warm start: 3 without a reply; 2 whose reply was cut; ")
    assert said.endswith("1 whose reply holds an end token")


def calls_tools(*names: str, text: str | None = None) -> dict[str, Any]:
    """A reply that calls tools."""
    made = [{"id": n, "type": "function", "function": {"name": n, "arguments": f'{{"to": "{n}"}}'}} for n in names]
    return {"role": "assistant", "content": text, "tool_calls": made}


@pytest.mark.parametrize(
    "written",
    ['{"to": ', "", "null", "[1]", "5", '"add"', '{"a": 1}{"b": 2}', None, "[" * 10**5],
    ids=lambda text: str(text)[:20],
)
def test_a_call_that_cannot_be_read_is_not_learned(tokenizer: Any, written: Any) -> None:
    tokenizer.chat_template = TOOL_TEMPLATE
    events = Events()
    sound, faulty = calls_tools("add"), calls_tools("add", "sub", text="I look.")
    faulty["tool_calls"][1]["function"]["arguments"] = written
    made = examples_of([call(reply=faulty, tools=[TOOL]), call(reply=sound, tools=[TOOL])], tokenizer, report=events)
    said = "1 of 2 calls are left out of the warm start: 1 whose arguments for a tool are no JSON object"
    assert events.notes() == [said] and len(made) == 1


CALLS = "{% for call in message['tool_calls'] or [] %}"
LOSING = {
    "calls": CHATML,
    "all calls but one": TOOL_TEMPLATE.replace(CALLS, "{% for call in (message['tool_calls'] or [])[:1] %}"),
    "text beside calls": TOOL_TEMPLATE.replace(
        "message['content'] }}", "(message['content'] if not message['tool_calls'] else '') }}"
    ),
    "text of answers": TOOL_TEMPLATE.replace(
        "message['content'] }}", "(message['content'] if message['role'] != 'assistant' else '<think></think>') }}"
    ),
}
"""Chat templates that render a part of replies alone."""


@pytest.mark.parametrize(
    ("template", "reply", "lost"),
    [
        ("calls", calls_tools("add"), "calls of tools"),
        ("calls", calls_tools("add", text="I look."), "calls of tools"),
        ("all calls but one", calls_tools("add", "sub"), "calls of tools"),
        ("all calls but one", calls_tools("add", "add"), "calls of tools"),
        ("text beside calls", calls_tools("add", text="I look."), "text"),
        ("text of answers", "Yes", "text"),
        ("all calls but one", calls_tools("add"), None),
        ("text beside calls", calls_tools("add", text="\n"), None),
        ("text beside calls", "Yes", None),
        ("calls", "Yes", None),
    ],
)
def test_a_reply_of_which_the_template_leaves_something_out_is_not_learned(
    tokenizer: Any, template: str, reply: Any, lost: str | None
) -> None:
    tokenizer.chat_template = LOSING[template]
    events = Events()
    made = examples_of([call(reply=reply, tools=[TOOL])], tokenizer, report=events)
    said = [f"1 of 1 calls are left out of the warm start: 1 whose {lost} the chat template leaves out"]
    assert events.notes() == (said if lost else []) and len(made) == (not lost)


@pytest.mark.parametrize("reply", [*BLANK[1:], "<|im_start|><pad> ", [{"type": "text", "text": " "}]], ids=ascii)
def test_a_reply_that_says_nothing_is_not_learned(tokenizer: Any, reply: Any) -> None:
    events = Events()
    blank = call(reply={"role": "assistant", "content": reply})
    assert examples_of([blank, call()], tokenizer, report=events) == examples_of([call()], tokenizer)
    assert events.notes() == ["1 of 2 calls are left out of the warm start: 1 whose reply says nothing"]


def test_what_was_left_out_is_logged_where_nobody_is_told(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert examples_of([call("a", None)], tokenizer) == []
    assert "1 of 1 calls are left out of the warm start: 1 without a reply" in caplog.text


def test_a_prompt_that_is_rendered_otherwise_once_answered_is_left_out(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + (' (last)' if loop.last else '') + m['content'] + '<|im_end|>' }}"
        "{% endfor %}"
    )
    events = Events()
    assert examples_of([call()], tokenizer, report=events) == []
    assert "1 whose prompt the chat template renders otherwise" in events.notes()[0]


def test_a_call_that_the_template_refuses_is_left_out(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% if messages[0]['content'] == 'bad' %}{{ 1 / 0 }}{% endif %}" + TOOL_TEMPLATE
    events = Events()
    made = examples_of([call("bad"), call("good")], tokenizer, report=events)
    assert len(made) == 1 and "1 that the chat template refuses" in events.notes()[0]


def test_a_template_without_an_end_token_gets_one_and_one_with_two_keeps_the_first(tokenizer: Any) -> None:
    turns = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}"
    opened = "{% if add_generation_prompt %}{{ 'assistant:' }}"
    tokenizer.chat_template = turns + opened + "{% endif %}"
    (made,) = examples_of([call("Hi", "Yes")], tokenizer)
    assert tokenizer.decode(made.completion_ids) == "Yes;<|im_end|>"
    tokenizer.chat_template = turns.replace(";", "<pad>\n") + opened + "{% else %}{{ '<|im_end|>' }}{% endif %}"
    (made,) = examples_of([call("Hi", "Yes")], tokenizer, ends=[1, 2])
    assert tokenizer.decode(made.completion_ids) == "Yes<pad>"


def test_a_model_without_a_chat_template_is_told(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="has no chat template; set chat_template"):
        examples_of([call()], tokenizer)


# --- training ---------------------------------------------------------------------------------------------------------


def test_the_loss_is_that_of_the_answer_alone(tiny_model: Path, tokenizer: Any) -> None:
    """Worked out from the logits of the untouched model: the adapter begins with a zero change."""
    examples = examples_of([call("Hi", "Yes"), call("And you?", "No, no.")], tokenizer)
    _, events = started(tiny_model, examples, steps=1)
    base = load_model(str(tiny_model), settings(tiny_model), device="cpu").eval()
    wanted = []
    for one in examples:
        ids = torch.tensor([one.prompt_ids + one.completion_ids])
        with torch.no_grad():
            log_probs = base(input_ids=ids).logits[0].log_softmax(-1)
        first = len(one.prompt_ids)
        wanted += [-log_probs[place - 1, ids[0, place]].item() for place in range(first, ids.size(1))]
    assert len(wanted) == 4 + 8
    assert events.losses() == [pytest.approx(sum(wanted) / len(wanted), rel=1e-4)]


def test_the_answers_are_learned_and_only_the_adapter_changes(tiny_model: Path, tokenizer: Any) -> None:
    answers = {"Who?": "me", "Where?": "over there", "Why?": "so"}
    examples = examples_of([call(asked, said) for asked, said in answers.items()], tokenizer)
    model, events = started(tiny_model, examples, steps=60)
    losses = events.losses()
    assert [event["step"] for event in events if event["event"] == "warm_step"] == list(range(1, 61))
    assert losses[-1] < 0.1 * losses[0]
    model.eval()
    for one, said in zip(examples, answers.values(), strict=True):
        drawn = model.generate(
            input_ids=torch.tensor([one.prompt_ids]), max_new_tokens=30, do_sample=False, eos_token_id=1, pad_token_id=2
        )
        assert tokenizer.decode(drawn[0, len(one.prompt_ids) :]) == said + END
    fresh = with_adapter(load_model(str(tiny_model), settings(tiny_model), device="cpu"), settings(tiny_model))
    for (name, before), after in zip(fresh.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(before, after) != ("lora_" in name), name


def test_the_same_seed_gives_the_same_adapter(tiny_model: Path, tokenizer: Any, one_thread: None) -> None:
    examples = examples_of([call(str(n), "abc"[: 1 + n % 3]) for n in range(9)], tokenizer)
    first, one = started(tiny_model, examples, steps=5)
    second, other = started(tiny_model, examples, steps=5)
    third, another = started(tiny_model, examples, steps=5, seed=1)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(before, after) for before, after in pairs) and one == other
    # the adapter begins with a zero change, so the first loss tells another order of the examples
    assert one.losses()[0] != another.losses()[0] and third is not first


@pytest.mark.parametrize("bf16", [False, True])
def test_the_model_is_handed_back_with_its_own_forward(tiny_model: Path, tokenizer: Any, bf16: bool) -> None:
    model, _ = started(tiny_model, examples_of([call()], tokenizer), steps=1, bf16=bf16)
    assert "forward" not in vars(model) and "forward" not in vars(model.get_base_model())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_few_and_long_examples_are_said(tiny_model: Path, tokenizer: Any) -> None:
    examples = examples_of([call("Hi", "Yes"), call("Hi", "x" * 100)], tokenizer)
    _, events = started(tiny_model, examples, steps=2, max_seq_length=64, max_completion_length=16)
    assert events.notes() == [
        "1 of 2 examples of the warm start have more than 64 tokens (max_seq_length) and are left out",
        "the warm start repeats its examples: there are 1 for 2 steps of 4",
    ]
    assert len(events.losses()) == 2


def test_a_warm_start_that_has_nothing_to_learn_is_refused(tiny_model: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match="has no examples: no recorded call can be learned from"):
        started(tiny_model, [], steps=2)
    long = examples_of([call("Hi", "x" * 100)], tokenizer)
    with pytest.raises(DataError, match="none of the 1 examples of the warm start fits into max_seq_length 64"):
        started(tiny_model, long, steps=2, max_seq_length=64, max_completion_length=16)


def test_a_loss_that_is_no_number_ends_it(tiny_model: Path, tokenizer: Any) -> None:
    with pytest.raises(TrainingFailed, match=r"the loss of the warm start is (nan|inf) at step 2; lower learning_rate"):
        started(tiny_model, examples_of([call()], tokenizer), steps=3, learning_rate=1e30)


def test_a_runs_folder_takes_the_events(tiny_model: Path, tokenizer: Any, tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    config = settings(tiny_model)
    model = with_adapter(load_model(str(tiny_model), config, device="cpu"), config)
    examples = examples_of([call()] * 8, tokenizer, report=run.report_event)
    warm_start(model, tokenizer, examples, steps=2, config=config, report=run.report_event)
    kinds = [(event["event"], event["step"], event["of"]) for _, event in run.events()]
    assert kinds == [("warm_step", 1, 2), ("warm_step", 2, 2)]


# --- beforehand -------------------------------------------------------------------------------------------------------


def test_a_warm_start_that_will_have_nothing_to_learn_is_told_before_a_model_is_loaded(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", None)
    config = settings(tiny_model, max_seq_length=64, max_completion_length=16)
    cut, long, short = call("a", "half", finish="length"), call("b", "x" * 100), call("c", "Yes")
    with pytest.raises(DataError, match=r"has no examples: .*; 2 of 2 calls are left out.*: 2 whose reply was cut$"):
        check_examples([cut, cut], str(tiny_model), config)
    with pytest.raises(DataError, match=r"none of the 1 examples .* max_seq_length 64 .*; 1 of 2 calls are left out"):
        check_examples([cut, long], str(tiny_model), config)
    check_examples([cut, long, short], str(tiny_model), config)
    with pytest.raises(DataError, match="has no examples"):
        check_examples([], str(tiny_model), config)


def test_what_a_warm_start_lacks_is_told_with_all_other_problems(tiny_model: Path) -> None:
    problems, wanted = Problems(), settings(tiny_model, warm_start=3)
    cut = Run(id="r", time=0.0, output="half", calls=[call("a", "half", finish="length")])
    sound = Run(id="s", time=0.0, output="Yes", calls=[call("b", "Yes")])
    assert calls_to_keep(None, [cut], settings(tiny_model), str(tiny_model), problems=problems) == cut.calls
    assert calls_to_keep(None, [cut, sound], wanted, str(tiny_model), problems=problems) == [*cut.calls, *sound.calls]
    assert problems.found == []
    assert calls_to_keep(None, [cut], wanted, str(tiny_model), problems=problems) == cut.calls
    assert calls_to_keep(None, [], wanted, str(tiny_model), problems=problems) == []
    first, second = map(str, problems.found)
    assert "1 whose reply was cut" in first and "no good runs of agent None" in second


AGENT = """
from praisonaiagents import Agent

agent = Agent(name="helper", instructions="Be brief.", llm="m1", rules=False)
"""


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def length(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(str(text))) for text in completions]


def drafted(model: Path, **changes: Any) -> Draft:
    """Of a file, which names an agent or does not."""
    usual = {"model_name": str(model), "dataset": [{"prompt": f"question {n}"} for n in range(24)], "held_out": 8}
    usual |= {"reward_funcs": f"{__name__}:length", "num_generations": 2, "per_device_train_batch_size": 2}
    return draft_from_config({**usual, **changes})


TOOLS = {"rollout": "tools", "tools": f"{__name__}:add", "chat_template": "chatml_tools"}


@pytest.mark.parametrize("given", [{"rollout": "direct"}, {}, TOOLS], ids=["direct", "auto", "tools"])
def test_in_a_file_without_an_agent_a_warm_start_is_refused_with_all_other_problems(
    tiny_model: Path, given: dict[str, Any]
) -> None:
    assert drafted(tiny_model, **given).calls == []
    with pytest.raises(ConfigError) as told:
        drafted(tiny_model, warm_start=3, guards={"odd": 1.0}, **given)
    first, second = str(told.value).splitlines()
    assert "warm_start is 3, but no agent is named" in first and "rollout_agent: module:name" in first
    assert "guards names 'odd'" in second


@pytest.mark.usefixtures("agents_around")
@pytest.mark.parametrize("given", [{"rollout": "direct"}, TOOLS], ids=["direct", "tools"])
def test_a_file_may_name_the_agent_whose_recorded_runs_are_learned_and_no_more(
    tiny_model: Path, in_tmp: Path, server_a: FakeServer, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    (in_tmp / "warmagent.py").write_text(AGENT)
    monkeypatch.syspath_prepend(in_tmp)
    wanted = {"warm_start": 3, "rollout_agent": "warmagent:agent", **given}
    with pytest.raises(DataError, match="no good runs of agent 'helper' are recorded to start from"):
        drafted(tiny_model, **wanted)
    agent = build_agent("environment", server_a.url, tools=[])
    with agent.record():
        agent.chat("hello")
    draft = drafted(tiny_model, **wanted)
    assert [one.messages[-1]["content"] for one in draft.calls] == ["hello"]
    assert (draft.hosting, draft.config.rollout) == (None, given["rollout"])
    assert drafted(tiny_model, **{**wanted, "warm_start": 0}).calls == []


def test_corrections_that_say_nothing_are_counted_before_a_warm_start(tiny_model: Path) -> None:
    said = [Feedback(run="r", time=0.0, correction=text) for text in (" ", "Yes", "<|im_end|>")]
    runs = [Run(id="r", time=0.0, output="Yes", calls=[call()], feedback=said)]
    wanted = ["2 corrections of recorded runs say nothing, and the warm start passes them over"]
    assert notes_on(runs, settings(tiny_model, warm_start=3)) == wanted
    assert notes_on(runs, settings(tiny_model)) == notes_on([], settings(tiny_model, warm_start=3)) == []


# --- what follows -----------------------------------------------------------------------------------------------------


def _grpo(model: Any, tokenizer: Any, folder: Path, *, steps: int) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def vowels(completions: list[Any], **_: Any) -> list[float]:
        return [float(turns[0]["content"].count("e")) + len(turns[0]["content"]) for turns in completions]

    arguments = GRPOConfig(
        output_dir=str(folder), max_steps=steps, save_steps=1, beta=0.5, learning_rate=1e-2, use_cpu=True, bf16=False,
        per_device_train_batch_size=4, num_generations=4, max_completion_length=6, report_to="none", disable_tqdm=True,
        gradient_checkpointing=False, logging_steps=1,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Say {n}"}]} for n in range(4)])
    return GRPOTrainer(model, vowels, args=arguments, train_dataset=rows, processing_class=tokenizer)


def _adapter(model: Any, name: str) -> dict[str, torch.Tensor]:
    found = {key: value.detach().clone() for key, value in model.named_parameters() if f".{name}." in key}
    return {key.replace(f".{name}.", "."): value for key, value in found.items()}


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def test_grpo_goes_on_from_it_and_its_kl_is_measured_from_there(
    tiny_model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    model, _ = started(tiny_model, examples_of([call("Say 1", "e e e")], tokenizer), steps=10)
    left = _adapter(model, "default")
    trainer = _grpo(model, tokenizer, tmp_path, steps=2)
    assert _same(_adapter(trainer.model, "ref"), left)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "kl" in entry]
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6) and steps[1]["kl"] > 1e-6
    assert _same(_adapter(trainer.model, "ref"), left) and not _same(_adapter(trainer.model, "default"), left)


def test_a_resumed_run_has_adapter_and_reference_from_its_checkpoint(
    tiny_model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    model, _ = started(tiny_model, examples_of([call("Say 1", "e e e")], tokenizer), steps=10)
    left = _adapter(model, "default")
    _grpo(model, tokenizer, tmp_path, steps=1).train()
    config = settings(tiny_model)
    again = _grpo(with_adapter(load_model(str(tiny_model), config, device="cpu"), config), tokenizer, tmp_path, steps=2)
    assert not _same(_adapter(again.model, "ref"), left)  # of a fresh adapter, until the checkpoint is read
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert _same(_adapter(again.model, "ref"), left) and again.state.global_step == 2
