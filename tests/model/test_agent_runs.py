"""A real agent against a policy whose tokens are forced: parsed, run, joined and masked as a hand works it out."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from praisonaiagents import Agent
from pydantic import BaseModel

from praison_agent_rl.agent_rollouts.asking import AgentAsker
from praison_agent_rl.agent_rollouts.endpoint import RolloutEndpoint
from praison_agent_rl.agent_rollouts.host import RolloutHost
from praison_agent_rl.agent_rollouts.tool_texts import ToolWords
from praison_agent_rl.agent_rollouts.trajectories import join_calls
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.models import load_tokenizer
from praison_agent_rl.rollouts import Sampled, Sampling
from praison_agent_rl.run_views import run_columns
from tests.model.test_agent_rollouts import a_trainer, assert_alike, by_hand, gradients_of, scored

pytestmark = pytest.mark.usefixtures("agents_around")

END = 1


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def broken(text: str) -> str:
    """Break."""
    raise ValueError(f"no {text}")


def call(name: str, **arguments) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


ADD_2_3, ADD_5_40 = call("add", a=2, b=3), call("add", a=5, b=40)
SCRIPTS = {
    "TWO ROUNDS": [ADD_2_3, ADD_5_40, "It is 45."],
    "PARALLEL": [f"{ADD_2_3}\n{ADD_5_40}", "5 and 45."],
    "FAILED": [call("broken", text="way"), "It failed."],
    "UNKNOWN": [call("nothing"), "No such tool."],
    "MALFORMED": ['<tool_call>\n{"name": "add", "arguments": {"a": 2\n</tool_call>'],
    "REWRITTEN": [ADD_2_3.replace('"a": 2', '"a":  2'), "It is 5."],
    "PLAIN": ["Hello."],
    "HANGS": [call("hangs", text="on"), "It hung."],
    "REFUSED": ["It is much.", "It is 45."],
    "TOOL REFUSED": [ADD_2_3, "It is much.", "It is 45."],
    "NEVER": ["It is much."],
    "WHERE": ['{"answer": "here", "score": 7}'],
}
REFUSED = "Previous response failed validation"
"""How the framework begins to ask again (praisonaiagents/agent/agent.py)."""


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    config = TrainConfig(chat_template="chatml_tools")
    return load_tokenizer(str(tiny_model), config)


def forced(tokenizer) -> Callable[[list[list[int]], Sampling], Sampled]:
    """Draws what the script of the last question says next."""

    def draw(prompts: list[list[int]], sampling: Sampling) -> Sampled:
        texts = []
        for ids in prompts:
            asked = tokenizer.decode(ids)
            name = max(SCRIPTS, key=lambda each: asked.rfind(f"user\n{each}"))
            talk = asked[asked.rfind(f"user\n{name}") :]
            said = -1 if REFUSED in talk else talk.count("<|im_start|>assistant") - 1
            texts.append(SCRIPTS[name][said])
        drawn = [[*tokenizer(text, add_special_tokens=False)["input_ids"], END] for text in texts]
        return Sampled(drawn, [[-0.5] * len(ids) for ids in drawn])

    return draw


@pytest.fixture(params=["openai client", "litellm"])
def path(request):
    """Which of the framework's two clients asks."""
    return request.param


@pytest.fixture
def rolled(path, tokenizer, server_a):
    """Rollouts of an agent, by question."""
    model = "m1" if path == "openai client" else {"model": "openai/m1", "base_url": server_a.url}  # a dict is litellm's

    def roll(*questions: str, kind=Agent, tools=(add, broken), **options):
        agent = kind(name="solo", instructions="Use tools.", llm=model, tools=list(tools), rules=False, **options)
        assert vars(agent)["_using_custom_llm"] == (path == "litellm")
        words = ToolWords(tokenizer)
        host = RolloutHost(agent, at_once=4)
        with RolloutEndpoint(words, room=4000, at_most=200) as endpoint:
            host.follow(endpoint.address, endpoint.key)
            try:
                asker = AgentAsker(endpoint, "solo", 60.0)
                return asker.ask([{"prompt": q} for q in questions], forced(tokenizer), Sampling(200, ends=(END,)))
            finally:
                host.close()

    return roll


def views(rollout):
    run = rollout.as_run("solo")
    columns = run_columns([rollout.job.prompt], [[]], [run])
    return columns["tool_calls"][0], columns["final_answer"][0]


def drawn_text(tokenizer, sequence):
    """What the policy drew, and what was put between."""
    parts, last = [], None
    for token, by_policy in zip(sequence.completion_ids, sequence.drawn, strict=True):
        if by_policy != last:
            parts.append((by_policy, []))
            last = by_policy
        parts[-1][1].append(token)
    return [(by_policy, tokenizer.decode(ids)) for by_policy, ids in parts]


def test_two_rounds_are_run_and_joined_with_results_masked(rolled, tokenizer):
    (rollout,) = rolled("TWO ROUNDS")
    assert rollout.outcome.error is None and rollout.outcome.output == "It is 45."
    calls, answer = views(rollout)
    assert [(each["name"], each["arguments"], each["result"], each["error"]) for each in calls] == [
        ("add", {"a": 2, "b": 3}, "5", False),
        ("add", {"a": 5, "b": 40}, "45", False),
    ]
    assert answer == "It is 45."
    (sequence,) = join_calls(rollout)
    between = "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert drawn_text(tokenizer, sequence) == [
        (1, f"{ADD_2_3}<|im_end|>"),
        (0, between.format(5)),
        (1, f"{ADD_5_40}<|im_end|>"),
        (0, between.format(45)),
        (1, "It is 45.<|im_end|>"),
    ]
    count = len(sequence.completion_ids)
    assert sequence.log_probs == [-0.5 * drawn for drawn in sequence.drawn] and len(sequence.drawn) == count
    assert not sequence.cut


def test_parallel_calls_are_both_run_and_stand_in_order(rolled, tokenizer):
    (rollout,) = rolled("PARALLEL")
    calls, answer = views(rollout)
    assert [(each["arguments"], each["result"]) for each in calls] == [
        ({"a": 2, "b": 3}, "5"),
        ({"a": 5, "b": 40}, "45"),
    ]
    assert answer == "5 and 45."
    (sequence,) = join_calls(rollout)
    assert [by_policy for by_policy, _ in drawn_text(tokenizer, sequence)] == [1, 0, 1]


def test_a_tool_that_raises_ends_the_run_as_in_production_and_costs_that_rollout_only(rolled):
    failed, other = rolled("FAILED", "TWO ROUNDS")
    assert failed.outcome.output is None and "no way" in failed.outcome.error
    assert failed.outcome.tool_errors == ["broken: ValueError: no way"]
    assert len(failed.calls) == 1 and failed.calls[0].completion_ids
    assert other.outcome.output == "It is 45." and other.outcome.error is None


def test_a_tool_that_is_not_there_is_told_the_model(rolled):
    (rollout,) = rolled("UNKNOWN")
    assert rollout.outcome.output == "No such tool."


def test_a_call_that_is_no_json_is_an_answer(rolled):
    (rollout,) = rolled("MALFORMED")
    ((called),), _ = views(rollout)
    assert called == {"name": "", "arguments": {}, "result": None, "error": True}
    assert len(rollout.calls) == 1 and "add" in (rollout.outcome.output or "")


def test_a_call_that_is_rendered_otherwise_than_it_was_drawn_makes_two_sequences(rolled, tokenizer):
    (rollout,) = rolled("REWRITTEN")
    first, second = join_calls(rollout)
    assert tokenizer.decode(first.completion_ids) == ADD_2_3.replace('"a": 2', '"a":  2') + "<|im_end|>"
    assert tokenizer.decode(second.completion_ids) == "It is 5.<|im_end|>"
    assert ADD_2_3 in tokenizer.decode(second.prompt_ids) and first.cut and not second.cut


def test_many_at_once_stay_apart_and_in_order(rolled):
    questions = [name for _ in range(4) for name in ("TWO ROUNDS", "PLAIN", "PARALLEL")]
    found = rolled(*questions)
    assert [rollout.outcome.output for rollout in found] == ["It is 45.", "Hello.", "5 and 45."] * 4
    assert [rollout.job.prompt for rollout in found] == questions
    for rollout in found:
        assert all(rollout.job.prompt in str(asked.call.messages) for asked in rollout.calls)


# --- guardrails -------------------------------------------------------------------------------------------------------

ASKED_AGAIN = (
    "\n<|im_start|>user\nPrevious response failed validation due to: give the number. Please provide an improved "
    "response.<|im_end|>\n<|im_start|>assistant\n"
)
BLOCKED = "I'm sorry, but I can't share that response because it did not pass the safety guardrail."


def with_the_number(answer: Any) -> tuple[bool, Any]:
    return ("45" in answer.raw, answer.raw if "45" in answer.raw else "give the number")


def test_an_answer_that_a_guardrail_refused_is_one_run_with_two_calls(rolled, path, tokenizer):
    (rollout,) = rolled("REFUSED", tools=(), guardrails=with_the_number)
    assert rollout.outcome.error is None and len(rollout.calls) == 2
    said = [asked.call.reply["content"] for asked in rollout.calls]
    assert said == ["It is much.", "It is 45."]
    sequences = join_calls(rollout)
    if path == "openai client":
        (sequence,) = sequences
        assert drawn_text(tokenizer, sequence) == [
            (1, "It is much.<|im_end|>"),
            (0, ASKED_AGAIN),
            (1, "It is 45.<|im_end|>"),
        ]
        assert views(rollout) == ([], "It is 45.") and rollout.outcome.output == "It is 45."
    else:  # by litellm the framework asks again without its system prompt, and does not take what it is told
        first, second = sequences
        assert tokenizer.decode(first.completion_ids) == "It is much.<|im_end|>" and first.drawn == [1] * 12
        assert tokenizer.decode(second.completion_ids) == "It is 45.<|im_end|>" and second.drawn == [1] * 10
        assert "Use tools." in tokenizer.decode(first.prompt_ids) not in tokenizer.decode(second.prompt_ids)
        assert views(rollout) == ([], BLOCKED) and rollout.outcome.output == BLOCKED


def test_an_answer_that_was_refused_after_a_tool_is_asked_for_without_what_the_tool_gave(rolled, path, tokenizer):
    (rollout,) = rolled("TOOL REFUSED", guardrails=with_the_number)
    first, second = join_calls(rollout)
    assert [by_policy for by_policy, _ in drawn_text(tokenizer, first)] == [1, 0, 1]
    assert tokenizer.decode(first.completion_ids).endswith("It is much.<|im_end|>")
    assert tokenizer.decode(second.completion_ids) == "It is 45.<|im_end|>"
    assert "tool_response" not in tokenizer.decode(second.prompt_ids).rpartition("TOOL REFUSED")[2]
    assert views(rollout)[1] == ("It is 45." if path == "openai client" else BLOCKED)


def test_an_answer_that_is_refused_to_the_end_is_answered_as_in_production(rolled):
    refused, fine = rolled("NEVER", "REFUSED", tools=(), guardrails=with_the_number)
    assert refused.outcome.output == BLOCKED and refused.outcome.error is None
    assert views(refused) == ([], BLOCKED) and all(asked.completion_ids for asked in refused.calls)
    assert fine.job.prompt == "REFUSED" and fine.calls[0].call.reply["content"] == "It is much."


def said_at_last(completions, run, **_):
    return [float("45" in str(one.calls[-1].reply)) for one in run]


@pytest.mark.usefixtures("one_thread")
def test_the_loss_of_runs_with_refused_answers_is_what_a_hand_works_out(rolled, untied_model, in_tmp):
    rollouts = rolled("REFUSED", "NEVER", tools=(), guardrails=with_the_number)
    trainer = a_trainer(untied_model, in_tmp, *rollouts, reward=said_at_last)
    batch = scored(trainer, 2)
    better = 0.5 / (0.5**0.5 + 1e-4)  # scores 1 and 0: mean 0.5, deviation 0.7071
    parts = [
        (sequence.prompt_ids, sequence.completion_ids, sequence.drawn, advantage)
        for rollout, advantage in zip(rollouts, (better, -better), strict=True)
        for sequence in join_calls(rollout)
    ]
    trainer._compute_loss(trainer.model, batch).backward()
    assert_alike(gradients_of(trainer), by_hand(trainer, parts))


def test_what_a_guardrail_makes_of_an_answer_is_what_rewards_see(rolled):
    (rollout,) = rolled("PLAIN", tools=(), guardrails=lambda answer: (True, answer.raw.upper()))
    assert len(rollout.calls) == 1 and views(rollout)[1] == "HELLO." == rollout.outcome.output


# --- structured output ------------------------------------------------------------------------------------------------


class Place(BaseModel):
    answer: str
    score: int


class Placing(Agent):
    def chat(self, prompt, **options):
        return super().chat(prompt, **{"output_pydantic": Place, **options})


def test_structured_output_is_asked_for_as_in_production_and_the_answer_is_json(rolled, tokenizer):
    (rollout,) = rolled("WHERE", kind=Placing, tools=())
    assert Place.model_validate_json(rollout.outcome.output) == Place(answer="here", score=7)
    assert json.loads(views(rollout)[1]) == {"answer": "here", "score": 7}
    (sequence,) = join_calls(rollout)
    assert drawn_text(tokenizer, sequence) == [(1, f"{SCRIPTS['WHERE'][0]}<|im_end|>")]
    asked = tokenizer.decode(sequence.prompt_ids)
    assert "Return ONLY a JSON object that matches this Pydantic model" in asked and '"title": "Place"' in asked
