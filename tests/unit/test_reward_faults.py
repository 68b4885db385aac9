"""Every fault of reward functions that is known from the field has one outcome, before training: told, never silent.

The numbers are those of the project's list of faults (facts on the field, section 5a). A fault is either refused by the
checks of ``train`` (`planned`), or shown by a trial (`rewards check`); what happens to it in training itself is in
``test_reward_calls.py``.
"""

import asyncio
import contextlib
import itertools
import math
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from praison_agent_rl import rewards
from praison_agent_rl.answering import RawAnswer
from praison_agent_rl.errors import RewardError
from praison_agent_rl.evaluation import score_answers
from praison_agent_rl.reward_trials.short import short_trial
from praison_agent_rl.reward_trials.trials import RewardTrial
from praison_agent_rl.reward_trials.trying import try_rewards
from praison_agent_rl.rewards import prepare

COLUMNS = {"answer": ["Paris", "Madrid", "Rome"]}
CHAT = [[{"role": "user", "content": f"Capital of {land}?"}] for land in ("France", "Spain", "Italy")]
ROWS = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(CHAT, COLUMNS["answer"], strict=True)]
numbered = itertools.count()


def tried(reward: Any) -> RewardTrial:
    """What `rewards check` says of it."""
    (trial,) = try_rewards([reward], ROWS, timeout=5).rewards
    return trial


def planned(reward: Any) -> list[str]:
    """What `train` says of it before it begins: notes, or the error that is raised."""
    try:
        return short_trial(prepare([reward], prompts=CHAT, columns=COLUMNS), CHAT, COLUMNS).notes
    except RewardError as error:
        return [f"error: {error}"]


def refused(reward: Any, said: str) -> None:
    """Both say it, and no training begins."""
    trial = tried(reward)
    assert trial.verdict == "broken" and trial.advice
    assert any(said in fault.text for fault in trial.faults), trial.faults
    (error,) = planned(reward)
    assert error.startswith("error: ") and said in error


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    monkeypatch.chdir(tmp_path)

    def write(source: str) -> str:
        name = f"faulty_{next(numbered)}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        return name

    return write


def length(completions: list[str]) -> list[float]:
    return [float(len(c)) for c in completions]


# --- 1: no **kwargs ---------------------------------------------------------------------------------------------------


def only_completions(completions):
    return length(completions)


def both(prompts, completions):
    return length(completions)


def keyword_only(*, completions):
    return length(completions)


def with_a_default(completions, weight=2.0):
    return [weight * score for score in length(completions)]


class Caller:
    def __call__(self, completions):
        return length(completions)


@pytest.mark.parametrize(
    "fn", [only_completions, both, keyword_only, with_a_default, Caller(), lambda completions: length(completions)]
)
def test_1_a_reward_without_kwargs_is_given_only_what_it_takes(fn: Any) -> None:
    trial = tried(fn)
    assert (trial.verdict, trial.faults, trial.warnings) == ("fine", (), ())
    assert planned(fn) == []


# --- 3: wrong numbers of scores ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "returned",
    [
        lambda scores: [1.0],
        lambda scores: scores[:-1],
        lambda scores: [*scores, 0.0],
        lambda scores: [],
        lambda scores: [1.0] * 8,
        lambda scores: [sum(scores) / len(scores)],
        lambda scores: scores * 2,
        lambda scores: tuple(scores[1:]),
    ],
)
def test_3_a_wrong_number_of_scores_is_refused_and_never_broadcast(returned: Any) -> None:
    def fn(completions):
        return returned(length(completions))

    trial = tried(fn)
    assert trial.verdict == "broken" and {fault.kind for fault in trial.faults} == {"wrong length"}
    assert trial.scored == 0, "nothing of it is believed"
    (error,) = planned(fn)
    assert "for 12 completions" in error and error.count("returned") == 1, "the cause is said once, not for each form"


# --- 4: no list, or no numbers in it ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "kind"),
    [
        (lambda scores: 0.5, "float"),
        (lambda scores: None, "NoneType"),
        (lambda scores: "good", "str"),
        (lambda scores: True, "bool"),
        (lambda scores: dict(enumerate(scores)), "dict"),  # its keys are numbers, and as many as the answers
        (lambda scores: dict.fromkeys(range(len(scores)), 1.0), "dict"),
        (lambda scores: set(scores), "set"),
        (lambda scores: iter(scores), "list_iterator"),
        (lambda scores: (score for score in scores), "generator"),
        (lambda scores: b"\x01" * len(scores), "bytes"),
        (lambda scores: range(len(scores)), "range"),
    ],
)
def test_4_what_is_no_list_is_refused_with_what_came(returned: Any, kind: str) -> None:
    refused(lambda completions: returned(length(completions)), f"returned a {kind}")


@pytest.mark.parametrize(
    "value",
    ["0.5", "good", [0.5], {"score": 1.0}, 1j, object(), float],
    ids=["text", "word", "list", "dict", "complex", "object", "class"],
)
def test_4_what_is_no_number_in_the_list_is_refused(value: Any) -> None:
    def fn(completions):
        return [value for _ in completions]

    def once(completions):
        return [value if c == "Yes." else float(len(c)) for c in completions]

    for reward in (fn, once):
        trial = tried(reward)
        assert trial.verdict == "broken" and [f.kind for f in trial.faults] == ["not a number"]
        assert trial.faults[0].first == "'Yes.'"
        assert planned(reward)[0].startswith("error: ")
    assert tried(fn).not_numbers == tried(fn).answers


# --- 6: None and NaN --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nothing", [None, math.nan], ids=["None", "NaN"])
def test_6_a_reward_that_scores_nothing_is_warned_of(nothing: Any) -> None:
    def fn(completions):
        return [nothing] * len(completions)

    trial = tried(fn)
    said = planned(fn)
    if nothing is None:  # a reward may well have nothing to say of a sample, but not of every one
        assert trial.verdict == "no signal" and trial.none == trial.answers
        assert said[0].startswith("WARNING: ") and "scores no answer" in said[0]
    else:
        assert trial.verdict == "broken" and trial.nan == trial.answers
        assert said[0].startswith("error: ") and "NaN" in said[0]


def test_6_a_few_none_or_nan_cost_only_their_samples_and_are_counted() -> None:
    def none(completions):
        return [None if c == "Yes." else float(len(c)) for c in completions]

    def nan(completions):
        return [math.nan if c == "Rome" else float(len(c)) for c in completions]

    trial = tried(none)
    assert (trial.verdict, trial.none, trial.scored) == ("fine", 3, 12)
    trial = tried(nan)
    assert trial.verdict == "fine" and trial.nan == trial.answers - trial.scored > 0
    assert "no score (None) for 3 of 15 answers" in planned(none)[0]
    assert "NaN for" in planned(nan)[0]


# --- 7: infinite and constant -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.inf, -math.inf, 10**400, 1e300])
def test_7_infinite_scores_are_no_scores_and_are_said(value: Any) -> None:
    def once(completions):
        return [value if c == "Yes." else float(len(c)) for c in completions]

    trial = tried(once)
    assert (trial.verdict, trial.infinite, trial.scored) == ("fine", 3, 12)
    assert trial.high is not None and math.isfinite(trial.high) and trial.warnings[0].startswith("infinity for 3 of 15")
    assert "infinity for 3 of 15 answers" in planned(once)[0]

    def always(completions):
        return [value] * len(completions)

    assert tried(always).verdict == "broken" and planned(always)[0].startswith("error: ")


@pytest.mark.parametrize("value", [0, 0.0, 1.0, -3, True, 1e30])
def test_7_a_constant_reward_is_warned_of(value: Any) -> None:
    def fn(completions):
        return [value] * len(completions)

    assert tried(fn).verdict == "no signal"
    (note,) = planned(fn)
    assert note.startswith("WARNING: the reward 'fn', tried on 15 made-up answers: no signal.")
    assert "to every answer: nothing is learned from it" in note


def test_7_a_constant_reward_is_warned_of_also_where_it_reads_messages() -> None:
    def fn(completions):
        return [float(c[0]["role"] == "assistant") for c in completions]

    assert tried(fn).verdict == "no signal" and tried(fn).completions == "messages"
    assert planned(fn)[0].startswith("WARNING: ")


# --- 9: columns -------------------------------------------------------------------------------------------------------


def test_9_a_column_that_the_data_lacks_is_named_before_training() -> None:
    def one(completions, gold):
        return length(completions)

    def two(completions, gold, answer, level):
        return length(completions)

    assert tried(one).lacking == ("gold",) and tried(two).lacking == ("gold", "level")
    assert planned(one) == ["error: reward 'one' needs the column 'gold'; the dataset has: prompt, answer"]
    assert planned(two) == ["error: reward 'two' needs the columns 'gold', 'level'; the dataset has: prompt, answer"]


def test_9_a_column_with_a_default_may_be_missing() -> None:
    def fn(completions, gold=None, **kwargs):
        return length(completions)

    assert tried(fn).verdict == "fine" and planned(fn) == []


# --- 10: text or messages ---------------------------------------------------------------------------------------------


def by_text(completions, **kwargs):
    return [float(len(c.split())) for c in completions]


def by_len(completions, **kwargs):  # len() works on messages too
    return [float(len(c)) for c in completions]


def by_word(completions, answer, **kwargs):  # so does `in`
    return [float(a in c) for c, a in zip(completions, answer, strict=True)]


def by_content(completions, **kwargs):
    return [float(len(c[-1]["content"])) for c in completions]


def by_role(completions, **kwargs):
    return [float(len(next(m for m in c if m["role"] == "assistant")["content"])) for c in completions]


@pytest.mark.parametrize(
    ("fn", "form"),
    [(by_text, "text"), (by_len, "text"), (by_word, "text"), (by_content, "messages"), (by_role, "messages")],
)
def test_10_a_reward_gets_the_form_that_it_reads_on_chat_data(fn: Any, form: str) -> None:
    trial = tried(fn)
    assert (trial.verdict, trial.completions) == ("fine", form)
    assert planned(fn) == []


# --- 11, 12, 14: what cannot be found ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("{m}:f,{m}:g", "write them as a list"),
        (":f", "is not a 'module:function' path"),
        ("{m}:", "is not a 'module:function' path"),
        ("{m}", "is not a 'module:function' path"),
        ("./{m}.py:f", "It names a file; write the module instead: {m}:f"),
        ("{m}.f", "is not a 'module:function' path"),
        ("", "is not a 'module:function' path"),
        (3, "is not a 'module:function' path"),
        ("{m}:nope", "has no 'nope'. Callables there: Grader, f, g"),
        ("nomodule:f", "Is it on PYTHONPATH?"),
        ("{m}:Grader.score", "is a method that needs an instance ('self')"),
        ("{m}:Grader", "is a class, not a function"),  # 14
        ("{m}:number", "is a int, not a function"),
    ],
)
def test_11_and_14_a_reward_that_cannot_be_found_is_told_how_it_should_be_named(
    module: Callable[[str], str], spec: Any, said: str
) -> None:
    name = module(
        """
        def f(completions): return [float(len(c)) for c in completions]
        g = f
        number = 3
        class Grader:
            def score(self, completions): return [1.0] * len(completions)
        """
    )
    spec = spec.format(m=name) if isinstance(spec, str) else spec
    refused(spec, said.format(m=name))


@pytest.mark.parametrize("spec", [" {m}:f ", "{m}: f", "{m} :f", "{m}:Grader.fixed", "{m}:grader", "{m}:grader.score"])
def test_11_what_can_be_understood_is_taken(module: Callable[[str], str], spec: str) -> None:
    name = module(
        """
        def f(completions): return [float(len(c)) for c in completions]
        class Grader:
            def score(self, completions): return f(completions)
            __call__ = score
            @staticmethod
            def fixed(completions): return f(completions)
        grader = Grader()
        """
    )
    assert tried(spec.format(m=name)).verdict == "fine"
    assert planned(spec.format(m=name)) == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f(:", "SyntaxError"),
        ("x = 1\ny = undefined", "NameError: name 'undefined' is not defined"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        ("raise SystemExit", "SystemExit"),
        ("import surely_missing", "it needs 'surely_missing', which is not installed"),
        ("raise ValueError('no key')", "ValueError: no key"),
        ("1 / 0", "ZeroDivisionError"),
        ("raise ImportError", "ImportError"),
    ],
)
def test_12_a_module_that_cannot_be_imported_is_told_with_its_cause(
    module: Callable[[str], str], source: str, said: str
) -> None:
    refused(f"{module(source)}:f", said)


def test_14_a_class_is_made_where_its_parameters_are_given(module: Callable[[str], str]) -> None:
    name = module(
        """
        class Band:
            def __init__(self, most): self.most = most
            def __call__(self, completions): return [float(len(c) < self.most) for c in completions]
        """
    )
    assert tried({"reward": f"{name}:Band", "most": 10}).verdict == "fine"
    refused({"reward": f"{name}:Band", "mots": 10}, "cannot be made with")
    refused({"reward": f"{name}:Band"}, "cannot be made: TypeError")


# --- 16: changed arguments, and errors on one row ---------------------------------------------------------------------


def clears(prompts, completions, answer):
    scores = length(completions)
    completions.clear()
    return scores


def rewrites(prompts, completions, answer):
    scores = length(completions)
    completions[:] = ["good"] * len(completions)
    return scores


def reorders(prompts, completions, answer):
    scores = length(completions)
    answer.reverse()
    return scores


def edits_a_message(prompts, completions):
    scores = [float(len(c[-1]["content"])) for c in completions]
    for prompt in prompts:
        prompt.append({"role": "user", "content": "more"})
    return scores


@pytest.mark.parametrize(
    ("fn", "changed"),
    [(clears, "completions"), (rewrites, "completions"), (reorders, "answer"), (edits_a_message, "prompts")],
)
def test_16_a_reward_cannot_change_what_others_see_and_is_told_that_it_tries(fn: Any, changed: str) -> None:
    trials = try_rewards([fn, length], ROWS)
    assert trials.rewards[0].changed == (changed,) and "in training these are copies" in trials.rewards[0].warnings[0]
    assert trials.rewards[0].mean == trials.rewards[1].mean, "what comes after sees the same"
    assert f"it changes what it is given ({changed})" in planned(fn)[0]
    assert ROWS[0]["prompt"] == CHAT[0] == [{"role": "user", "content": "Capital of France?"}]


@pytest.mark.parametrize(
    "error",
    [ValueError("row 7"), KeyError("gold"), SystemExit(3), GeneratorExit(), MemoryError(), RecursionError()],
    ids=repr,
)
def test_16_an_error_on_one_answer_is_told_with_that_answer_and_its_cause_once(error: BaseException) -> None:
    def fn(completions):
        for c in completions:
            if c == "Madrid":
                raise error
        return [float(len(c.split())) for c in completions]

    trial = tried(fn)
    assert trial.verdict == "broken"
    raised = [fault for fault in trial.faults if fault.kind == "raised"]
    assert [(fault.first, fault.count >= 1) for fault in raised] == [("'Madrid'", True)]
    assert type(error).__name__ in raised[0].text
    assert trial.scored == trial.answers - raised[0].count, "only the answers concerned have no score"
    assert planned(fn)[0].startswith("error: ")


def test_16_an_error_on_every_answer_is_told_once_and_not_for_each_form() -> None:
    def fn(completions):
        raise ValueError("no network")

    trial = tried(fn)
    assert [(fault.kind, fault.count) for fault in trial.faults] == [("raised", 15)]
    (error,) = planned(fn)
    assert error.count("no network") == 1


# --- a reward that hangs: of the same kind as one that raises ---------------------------------------------------------


def test_a_reward_that_hangs_is_refused_in_time_by_the_checks_and_by_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "LONGEST_SEARCH", 0.3)

    def sleeps(completions):
        time.sleep(600)

    def loops(completions):
        while True:
            pass

    def catches(completions):
        while True:
            with contextlib.suppress(Exception):
                time.sleep(600)

    async def waits(completions):
        await asyncio.sleep(600)

    start = time.monotonic()
    for fn in (sleeps, loops, catches, waits):
        assert f"reward '{fn.__name__}' did not end within 0.3 s" in planned(fn)[0]
        (trial,) = try_rewards([fn], ROWS, timeout=0.4).rewards
        assert trial.verdict == "broken" and {fault.kind for fault in trial.faults} == {"timed out"}
        assert trial.faults[0].first == "'Yes.'"
    assert time.monotonic() - start < 120


# --- 17: judges -------------------------------------------------------------------------------------------------------


def test_17_seven_scores_for_eight_answers_are_refused() -> None:
    def judge(prompts, completions):
        return length(completions)[: 7 if len(completions) == 8 else len(completions) - 1 or 1]

    trial = tried(judge)
    assert trial.verdict == "broken" and {fault.kind for fault in trial.faults} == {"wrong length"}
    assert planned(judge)[0].startswith("error: ") and "completions" in planned(judge)[0]


def test_17_a_judge_that_is_noisy_is_told_and_not_cached() -> None:
    draws = itertools.cycle([0.2, 0.9, 0.4])

    def judge(prompts, completions):
        return [next(draws) for _ in completions]

    trial = tried(judge)
    assert trial.deterministic is False and "two calls with the same answers gave different scores" in trial.warnings[0]
    found = short_trial(prepare([judge], prompts=CHAT, columns=COLUMNS), CHAT, COLUMNS)
    assert [reward.deterministic for reward in found.rewards] == [False]


def test_17_an_answer_that_failed_or_has_no_score_is_neither_zero_nor_counted() -> None:
    """A failed scenario that counts as a failure fakes a gain; NaN passes a comparison with ``<``."""
    (reward,) = prepare(
        [lambda completions: [math.nan if c == "b" else 1.0 for c in completions]], prompts=CHAT, columns={}
    )
    texts = ["a", "b", "c", "d", "e", "f"]
    raw = [RawAnswer(place, 0, text, 1) for place, text in enumerate(texts)]
    raw.append(RawAnswer(6, 0, "", 0, (), "the server went away"))
    scored = score_answers(raw, [ROWS[0]] * 7, [reward])
    assert [answer.total for answer in scored] == [1.0, None, 1.0, 1.0, 1.0, 1.0, None]
