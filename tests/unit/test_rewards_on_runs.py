"""Rewards that look at whole runs are given them wherever rewards are called, and may score each step of a run."""

import functools
import math
import re
from pathlib import Path

import pytest

from praison_agent_rl.answering import RawAnswer
from praison_agent_rl.errors import RewardError
from praison_agent_rl.evaluation import score_answers
from praison_agent_rl.records import Call, Run
from praison_agent_rl.reward_library import few_calls, right_tool
from praison_agent_rl.reward_trials.calls import Probe, Sample
from praison_agent_rl.reward_trials.short import short_trial
from praison_agent_rl.reward_trials.trying import try_rewards
from praison_agent_rl.rewards import Reward, Shape, as_scores, find_shape, prepare
from praison_agent_rl.scoring.cache import RewardCache
from praison_agent_rl.scoring.calls import Caller, CallRules
from praison_agent_rl.scoring.names import asked_views, needed_columns
from praison_agent_rl.scoring.readings import Fault, Stepped, read_values

QUICK = CallRules(timeout=20, retries=0, pause=0.001)
QUESTIONS = [{"role": "user", "content": f"{n}+1?"} for n in range(4)]


def made_run(number=0, *, tools=1, seconds=2.0, answer="done", id="r", time=50.0):
    """A run that calls a tool ``tools`` times, and whose second call, if any, the tool says no to."""
    messages, calls = [QUESTIONS[number]], []
    for n in range(tools):
        function = {"name": "add", "arguments": '{"x": 1}'}
        asked = {"role": "assistant", "content": None, "tool_calls": [{"id": f"{id}{n}", "function": function}]}
        calls.append(Call(id=f"{id}-{n}", run=id, time=time + n, messages=list(messages), reply=asked))
        messages += [asked, {"role": "tool", "tool_call_id": f"{id}{n}", "content": "Error: no" if n else "5"}]
    reply = {"role": "assistant", "content": answer}
    calls.append(Call(id=f"{id}-end", run=id, time=time + 9, messages=list(messages), reply=reply))
    return Run(id=id, time=time, seconds=seconds, prompt=QUESTIONS[number]["content"], output=answer, calls=calls)


def latency(completions, run):
    return [-one.seconds for one in run]


def calls_made(completions, run):
    return [float(len(one.calls)) for one in run]


def answered(completions, final_answer):
    return [float(len(text)) for text in final_answer]


def failed(completions, tool_calls):
    return [float(sum(call["error"] for call in calls)) for calls in tool_calls]


def each_call(completions, run):
    """1 for each call that asks for a tool, None for each that does not."""
    return [[1.0 if (call.reply or {}).get("tool_calls") else None for call in one.calls] for one in run]


def anything(completions, **columns):
    return [float("run" in columns or "final_answer" in columns or "tool_calls" in columns) for _ in completions]


def scored(fns, completions, *, runs=None, rules=QUICK, cache=None, **columns):
    """What a caller of its own gives, with the caller; prompts are the questions."""
    rewards = [fn if isinstance(fn, Reward) else Reward(fn, fn.__name__) for fn in fns]
    caller = Caller(rewards, rules, cache=cache, warn=lambda text: None)
    found = caller.score([[question] for question in QUESTIONS[: len(completions)]], completions, columns, runs=runs)
    caller.close()
    return found, caller


# --- what is asked for ------------------------------------------------------------------------------------------------


def test_what_a_reward_asks_of_a_run_is_named_in_its_signature():
    def by_default(completions, *, final_answer=None, tool_calls=()):
        return []

    assert asked_views(calls_made) == ["run"] and asked_views(by_default) == ["final_answer", "tool_calls"]
    assert asked_views(functools.partial(by_default, final_answer="x")) == ["tool_calls"]
    assert asked_views(anything) == asked_views(max) == asked_views(right_tool) == []
    assert needed_columns(calls_made) == needed_columns(failed) == needed_columns(answered) == []


def test_a_reward_that_takes_every_column_is_given_what_it_was_given_before():
    runs = [made_run(n) for n in range(4)]
    found, _ = scored([anything], ["a"] * 4, runs=runs)
    assert found["anything"] == [0.0] * 4

    def ids(completions, **columns):
        return [float(value[1:]) for value in columns["run"]]

    found, _ = scored([ids, calls_made], ["a"] * 4, runs=runs, run=["r1", "r2", "r3", "r4"])
    assert found == {"ids": [1.0, 2.0, 3.0, 4.0], "calls_made": [2.0] * 4}


def test_a_parameter_with_a_value_in_the_configuration_keeps_it():
    (reward,) = prepare([{"reward": fixed, "final_answer": "x"}], prompts=["p"], columns={})
    assert reward(["p"], ["abc"]) == [1.0]


def fixed(completions, final_answer):
    return [float(final_answer == "x")] * len(completions)


# --- where they are called --------------------------------------------------------------------------------------------


def test_in_training_rewards_are_given_the_runs_of_the_batch():
    runs = [made_run(n, tools=n, seconds=n + 0.5, answer="x" * n) for n in range(4)]
    found, _ = scored([latency, calls_made, answered, failed], ["ignored"] * 4, runs=runs)
    assert found == {
        "latency": [-0.5, -1.5, -2.5, -3.5],
        "calls_made": [1.0, 2.0, 3.0, 4.0],
        "answered": [0.0, 1.0, 2.0, 3.0],
        "failed": [0.0, 0.0, 1.0, 2.0],
    }


def test_without_runs_they_are_made_of_the_answers():
    found, _ = scored([latency, calls_made, answered, failed], ["", "ab"])
    assert found == {"latency": [0.0, 0.0], "calls_made": [1.0] * 2, "answered": [0.0, 2.0], "failed": [0.0, 0.0]}


def test_as_many_runs_as_completions_are_wanted():
    with pytest.raises(RewardError, match="1 runs were given for 2 completions"):
        scored([latency], ["a", "b"], runs=[made_run()])
    answers = [RawAnswer(0, 0, "a", 1), RawAnswer(0, 1, "b", 1)]
    with pytest.raises(RewardError, match="1 runs were given for 2 answers"):
        score_answers(answers, [{"prompt": "p"}], [Reward(latency, "l")], runs=[made_run()])


def test_a_call_that_fails_for_one_run_costs_that_run_alone():
    def picky(completions, run):
        if any(len(one.calls) == 3 for one in run):
            raise ValueError("three")
        return [float(len(one.calls)) for one in run]

    found, caller = scored([picky], ["a"] * 4, runs=[made_run(n, tools=n) for n in range(4)])
    assert found["picky"] == [1.0, 2.0, None, 4.0] and caller.counts["picky"].failed == 1


def test_an_async_reward_is_given_the_run_of_its_own_completion():
    async def later(completions, run):
        assert len(run) == len(completions) == 1
        return [float(len(one.calls)) for one in run]

    found, _ = scored([later], ["a"] * 4, runs=[made_run(n, tools=n) for n in range(4)])
    assert found["later"] == [1.0, 2.0, 3.0, 4.0]


def test_a_reward_can_change_no_run():
    def vandal(completions, run, tool_calls):
        for one, calls in zip(run, tool_calls, strict=True):
            one.calls[0].messages.append({"role": "user", "content": "and mine"})
            one.calls.clear()
            calls.clear()
        return [0.0] * len(completions)

    runs = [made_run(tools=2)]
    found, _ = scored([vandal, calls_made, failed], ["a"], runs=runs)
    assert found == {"vandal": [0.0], "calls_made": [3.0], "failed": [1.0]} and runs == [made_run(tools=2)]


def test_held_out_answers_are_scored_by_their_runs_and_those_that_failed_by_none():
    answers = [
        RawAnswer(0, 0, "done", 1),
        RawAnswer(0, 1, "", 0, error="gone"),
        RawAnswer(1, 0, "done", 1),
    ]
    runs = [made_run(0, tools=2), Run(id="e", time=0.0, error="gone"), made_run(1, tools=0, seconds=7.0)]
    rows = [{"prompt": [question], "tool": "add"} for question in QUESTIONS[:2]]
    rewards = [
        Reward(latency, "latency"),
        Reward(failed, "failed"),
        Reward(right_tool, "right_tool", shape=Shape("messages", "messages")),
    ]
    found = score_answers(answers, rows, rewards, judges=[Reward(calls_made, "calls")], runs=runs)
    assert [answer.rewards for answer in found] == [
        {"latency": -2.0, "failed": 1.0, "right_tool": 1.0},
        {},
        {"latency": -7.0, "failed": 0.0, "right_tool": 0.0},
    ]
    assert [answer.judged for answer in found] == [{"calls": 3.0}, {}, {"calls": 1.0}]
    assert [answer.text for answer in found] == ["done", "", "done"]
    plain = score_answers(answers, rows, rewards)
    assert [answer.rewards.get("latency") for answer in plain] == [0.0, None, 0.0]


def test_rewards_on_text_read_the_last_answer_of_a_run():
    def text(completions):
        return [float(len(said)) for said in completions]

    answers = [RawAnswer(0, 0, "other", 1)]
    (found,) = score_answers(answers, [{"prompt": "p"}], [Reward(text, "t")], runs=[made_run(tools=1, answer="abc")])
    assert found.rewards == {"t": 3.0}


@pytest.mark.parametrize("fn", [calls_made, answered, failed, each_call])
def test_the_probe_before_training_makes_runs_of_its_answers(fn):
    assert find_shape(fn, ["p"], {}) == Shape("text", "text")
    assert find_shape(fn, [[QUESTIONS[0]]], {}).completions in ("text", "messages")
    (reward,) = prepare([fn], prompts=["p", "q"], columns={"answer": ["1", "2"]})
    assert len(reward(["p"], ["abc"])) == 1


def test_the_short_trial_tries_them():
    rewards = [Reward(answered, "answered"), Reward(mixed_steps, "mixed")]
    found = short_trial(rewards, ["p", "q"], {"answer": ["1", "2"]})
    assert [(reward.deterministic, reward.by_sample) for reward in found.rewards] == [(True, True)] * 2
    assert found.notes == []


def test_the_short_trial_does_not_blame_a_reward_for_answers_that_call_no_tool():
    of_calls, of_texts = Reward(calls_made, "calls"), Reward(constant, "constant")
    (note,) = short_trial([of_calls], ["p", "q"], {"answer": ["1", "2"]}).notes
    assert note.startswith("the reward 'calls' cannot be judged beforehand: it gives the same score to all of")
    (warning,) = short_trial([of_texts], ["p", "q"], {"answer": ["1", "2"]}).notes
    assert warning.startswith("WARNING: the reward 'constant'") and "no signal" in warning
    (said,) = short_trial([of_texts], ["p", "q"], {"answer": ["1", "2"]}, acting=True).notes
    assert said.startswith("the reward 'constant' cannot be judged beforehand")


def constant(completions):
    return [1.0 for _ in completions]


def mixed_steps(completions, run):
    """A step's score for long answers, and one for the run for others."""
    lengths = [len(str(one.output)) for one in run]
    return [[length / 100] if length > 40 else length / 100 for length in lengths]


def test_trials_give_recorded_runs_as_they_were_recorded(monkeypatch, tmp_path):
    runs = [made_run(n, tools=n % 3, seconds=n + 1.0, id=f"r{n}") for n in range(4)]
    monkeypatch.setattr("praison_agent_rl.reward_trials.runs.read_runs", lambda store, agent: iter(runs))
    trials = try_rewards([latency, calls_made, {"reward": recorded_id, "columns": {"source": "run"}}], store=tmp_path)
    low = {trial.name: (trial.low, trial.high) for trial in trials.rewards}
    assert low == {"latency": (-4.0, -1.0), "calls_made": (1.0, 3.0), "recorded_id": (0.0, 3.0)}
    assert [trial.faults for trial in trials.rewards] == [()] * 3


def recorded_id(completions, source):
    return [float(text[1:]) for text in source]


# --- a column of the same name ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run", "final_answer", "tool_calls"])
def test_a_column_of_the_same_name_is_refused_with_what_to_do(name):
    fn = {"run": calls_made, "final_answer": answered, "tool_calls": failed}[name]
    said = rf"takes '{name}', which is given to it of each run, but the data has a column of that name too. Rename the "
    with pytest.raises(RewardError, match=rf"reward '{fn.__name__}' {said}"):
        prepare([fn], prompts=["p"], columns={name: ["x"]})
    trials = try_rewards([fn], [{"prompt": "p", "completion": "a", name: "x"}])
    (trial,) = trials.rewards
    assert trial.verdict == "broken" and re.match(said, trial.faults[0].text)


def test_a_column_of_the_same_name_may_fill_another_parameter_or_by_name_that_one():
    entry = {"reward": against, "columns": {"gold": "final_answer"}}
    (reward,) = prepare([entry], prompts=["p"], columns={"final_answer": ["abc"]})
    assert reward(["p", "q"], ["abc", "x"], final_answer=["abc", "abc"]) == [1.0, 0.0]
    entry = {"reward": answered, "columns": {"final_answer": "final_answer"}}
    (reward,) = prepare([entry], prompts=["p"], columns={"final_answer": ["abc"]})
    assert reward(["p"], ["a completion"], final_answer=["abc"]) == [3.0]


def against(completions, final_answer, gold):
    return [float(said == right) for said, right in zip(final_answer, gold, strict=True)]


def test_the_id_in_a_dataset_built_of_runs_is_no_reason_to_refuse_and_can_be_had_by_name():
    built = {"run": ["r1"], "agent": ["a"]}
    (reward,) = prepare([calls_made], prompts=["p"], columns=built)
    assert reward(["p"], ["x"], **built) == [1.0]
    (reward,) = prepare([{"reward": recorded_id, "columns": {"source": "run"}}], prompts=["p"], columns=built)
    assert reward(["p"], ["x"], **built) == [1.0]


# --- scores of steps --------------------------------------------------------------------------------------------------


def test_the_steps_of_a_run_are_summed_and_kept():
    runs = [made_run(n, tools=n) for n in range(4)]
    found, caller = scored([each_call, calls_made], ["a"] * 4, runs=runs)
    assert found == {"each_call": [None, 1.0, 2.0, 3.0], "calls_made": [1.0, 2.0, 3.0, 4.0]}
    assert caller.steps() == {
        "each_call": [[None], [1.0, None], [1.0, 1.0, None], [1.0, 1.0, 1.0, None]],
        "calls_made": [None] * 4,
    }
    counts = caller.counts["each_call"]
    assert (counts.none, counts.failed, counts.samples) == (1, 0, 4)


def test_the_steps_are_those_of_the_last_call():
    caller = Caller([Reward(each_call, "e")], QUICK)
    caller.score(["p"], ["a"], {}, runs=[made_run(tools=1)])
    assert caller.steps() == {"e": [[1.0, None]]}
    caller.score(["p", "q"], ["a", "b"], {})
    assert caller.steps() == {"e": [[None], [None]]}
    caller.close()


@pytest.mark.parametrize(
    ("steps", "kind", "said"),
    [
        ([1.0], "wrong steps", "returned 1 scores for the steps of a run with 2 calls of the model"),
        ([], "wrong steps", "returned 0 scores for the steps of a run with 2 calls of the model"),
        ([1.0, 2.0, 3.0], "wrong steps", "returned 3 scores for the steps of a run with 2 calls of the model"),
        ([1.0, math.nan], "NaN", "returned NaN as a score of a step"),
        ([math.inf, 1.0], "infinite", "returned inf as a score of a step"),
        ([3e38, 3e38], "infinite", "returned 6e+38 as a score"),  # each is a float32, their sum is none
        ([1.0, "x"], "not a number", "returned 'x' as a score of a step"),
        ([1.0, [2.0]], "not a number", "returned [2.0] as a score of a step"),
    ],
)
def test_steps_that_are_not_sound_cost_their_own_run(steps, kind, said):
    def one_odd(completions, run):
        return [steps if len(one.calls) == 2 else [0.5] * len(one.calls) for one in run]

    found, caller = scored([one_odd], ["a"] * 4, runs=[made_run(n, tools=n) for n in range(4)])
    assert found["one_odd"] == [0.5, None, 1.5, 2.0]
    assert caller.steps()["one_odd"] == [[0.5], None, [0.5] * 3, [0.5] * 4]
    assert dict(caller.counts["one_odd"].by_kind) == {kind: 1} and said in caller.counts["one_odd"].first_error


def test_numbers_and_steps_may_be_mixed_and_come_as_tuples_and_arrays():
    np = pytest.importorskip("numpy")
    values = [(1, None), np.array([0.5, 0.25]), 2, None, [None, None]]
    assert read_values(values, 5, [2] * 5) == [
        Stepped(1.0, [1.0, None]),
        Stepped(0.75, [0.5, 0.25]),
        2.0,
        None,
        Stepped(None, [None, None]),
    ]
    assert as_scores(values, "r", 5, [2] * 5) == [1.0, 0.75, 2.0, None, None]
    assert read_values(np.ones((2, 3)), 2, [3, 3]) == [Stepped(3.0, [1.0] * 3)] * 2
    assert read_values([[]], 1, [0]) == [Stepped(None, [])]  # a run without any call


def test_a_wrong_number_of_steps_is_an_error_with_both_numbers_where_a_reward_is_called_alone():
    with pytest.raises(RewardError, match="'r' returned 1 scores for the steps of a run with 2 calls of the model"):
        as_scores([[1.0]], "r", 1, [2])
    with pytest.raises(RewardError, match="returned 'x' among the scores of a run's steps"):
        as_scores([["x", 1.0]], "r", 1, [2])


@pytest.mark.parametrize("shape", [Shape("text", "text"), Shape("messages", "messages")])
def test_a_list_from_a_reward_that_asks_nothing_of_runs_is_no_score(shape):
    def nested(completions):
        return [[1.0] for _ in completions]

    found, caller = scored([Reward(nested, "nested", shape=shape)], ["a", "b"])
    assert found["nested"] == [None, None] and dict(caller.counts["nested"].by_kind) == {"not a number": 2}
    assert isinstance(read_values([[1.0]], 1)[0], Fault)
    with pytest.raises(RewardError, match=r"returned \[1.0\] among its scores"):
        prepare([nested], prompts=["p"], columns={})


def test_a_reward_on_messages_that_asks_for_the_run_may_score_each_message_of_the_assistant():
    def of_messages(completions, run):
        return [[float(bool(m.get("tool_calls"))) for m in said if m["role"] == "assistant"] for said in completions]

    assert find_shape(of_messages, [[QUESTIONS[0]]], {}) == Shape("messages", "messages")
    reward = Reward(of_messages, "of_messages", shape=Shape("messages", "messages"))
    said = [*made_run(tools=1).calls[-1].messages[1:], {"role": "assistant", "content": "done"}]
    found, caller = scored([reward], [said, "text"])
    assert found["of_messages"] == [1.0, 0.0] and caller.steps()["of_messages"] == [[1.0, 0.0], [0.0]]


def test_a_trial_of_a_reward_with_a_wrong_number_of_steps_is_broken_and_says_both_numbers():
    def two(completions, run):
        return [[0.5, float(len(text))] for text in completions]

    with Probe(Reward(two, "two")) as probe:
        reading = probe.read([Sample("p", "a", run=made_run(tools=1)), Sample("p", "b")], timeout=10)
    assert reading.scores == [1.5, None] and reading.outcomes[1].kind == "wrong steps"
    with pytest.raises(RewardError, match="returned 2 scores for the steps of a run with 1 calls"):
        prepare([two], prompts=["p"], columns={})
    (trial,) = try_rewards([two], [{"prompt": "p", "completions": ["a", "bb"]}]).rewards
    assert trial.verdict == "broken" and "2 scores for the steps of a run with 1 calls" in trial.faults[0].text


# --- the cache --------------------------------------------------------------------------------------------------------


def hits(fn, path, completions=("a", "b"), runs=None):
    cache = RewardCache(path)
    found, caller = scored([fn], list(completions), runs=runs, cache=cache)
    (name,) = found
    return found[name], caller.counts[name].hits


@pytest.mark.parametrize("fn", [calls_made, answered, failed, latency])
def test_scores_are_found_again_by_what_is_in_a_run(fn, tmp_path):
    path = tmp_path / "cache.sqlite"
    runs = [made_run(n, tools=n + 1, answer="x" * n) for n in range(2)]
    first, none = hits(fn, path, runs=runs)
    assert none == 0
    later = [made_run(n, tools=n + 1, answer="x" * n, id=f"other{n}", time=999.0) for n in range(2)]
    assert hits(fn, path, runs=later) == (first, 2)
    assert hits(fn, path, runs=[made_run(n, tools=3, seconds=4.5, answer="other") for n in range(2)])[1] == 0


def test_answers_given_at_once_are_found_again_too(tmp_path):
    path = tmp_path / "cache.sqlite"
    assert hits(calls_made, path) == ([1.0, 1.0], 0)
    assert hits(calls_made, path, completions=("a", "c")) == ([1.0, 1.0], 1)


def test_how_long_a_run_took_is_part_of_its_content(tmp_path):
    path = tmp_path / "cache.sqlite"
    assert hits(latency, path, ("a",), [made_run(seconds=2.0)]) == ([-2.0], 0)
    assert hits(latency, path, ("a",), [made_run(seconds=3.0)]) == ([-3.0], 0)
    assert hits(latency, path, ("a",), [made_run(seconds=2.0)]) == ([-2.0], 1)


def test_scores_of_steps_are_not_kept_and_those_of_whole_runs_are(tmp_path):
    path = tmp_path / "cache.sqlite"
    short, long = "x" * 10, "x" * 50
    assert hits(mixed_steps, path, (short, long)) == ([0.1, 0.5], 0)
    cache = RewardCache(path)
    found, caller = scored([mixed_steps], [short, long], cache=cache)
    assert found["mixed_steps"] == [0.1, 0.5] and caller.counts["mixed_steps"].hits == 1
    assert caller.steps() == {"mixed_steps": [None, [0.5]]}


# --- the library and the docs -----------------------------------------------------------------------------------------


def test_the_librarys_rewards_on_tools_read_the_messages_of_a_run():
    from praison_agent_rl.run_views import run_messages

    completions = [run_messages(made_run(tools=n)) for n in range(4)]
    assert few_calls(completions, free=1, most=3) == [1.0, 1.0, 0.5, 0.0]
    assert right_tool(completions, ["add"] * 4) == [0.0, 1.0, 1.0, 1.0]


def test_the_code_of_the_docs_runs():
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    section = page.split("## Rewards on runs")[1].split("\n## ")[0]
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(block, names)
    refused = Call(id="no", time=0.0, messages=[], error="refused")
    runs = [made_run(0, tools=2, answer="It is 7."), made_run(1, tools=0, answer="It is 8.")]
    runs[1] = runs[1].model_copy(update={"calls": [refused, *runs[1].calls]})
    found, caller = scored(
        [names["right_without_failures"], names["uses_tools"]], ["", ""], runs=runs, answer=["7", "9"]
    )
    assert found == {"right_without_failures": [pytest.approx(0.9), 0.0], "uses_tools": [2.0, 0.0]}
    assert caller.steps()["uses_tools"] == [[1.0, 1.0, 0.0], [None, 0.0]]
