"""A trial says what a reward does with answers before anything is trained, and what to do about it."""

import asyncio
import itertools
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import praison_agent_rl as rl
from praison_agent_rl.errors import ConfigError, DataError, RewardError
from praison_agent_rl.records import Call
from praison_agent_rl.reward_trials.short import SHORT, short_trial
from praison_agent_rl.reward_trials.trials import RewardTrial, TrialRules
from praison_agent_rl.reward_trials.trying import Trials, try_rewards
from praison_agent_rl.rewards import prepare
from praison_agent_rl.transcripts import TranscriptWriter, feedback

CAPITALS = {
    "France": "Paris",
    "Spain": "Madrid",
    "Italy": "Rome",
    "Peru": "Lima",
    "Japan": "Tokyo",
    "Chad": "Djamena",
}
PROMPTS = [{"prompt": f"Capital of {land}?", "answer": city} for land, city in CAPITALS.items()]
ANSWERED = [
    {"prompt": "2+2?", "completions": ["4", "four", "I think it is 4", "5"], "answer": "4"},
    {"prompt": "3+3?", "completions": ["6", "six and no more", "7"], "answer": "6"},
]


def words(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(c.split())) for c in completions]


def exact(completions: list[str], answer: list[str]) -> list[float]:
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def tried(reward: Any, *given: Any, **options: Any) -> RewardTrial:
    """The trial of one reward, on the answered rows unless others are given."""
    (trial,) = try_rewards([reward], *(given or (ANSWERED,)), **options).rewards
    return trial


# --- what is measured -------------------------------------------------------------------------------------------------


def test_range_mean_and_spread_are_those_of_the_given_answers() -> None:
    trial = tried(words)
    # 1, 1, 5, 1 words of the first prompt: deviation sqrt(3); 1, 4, 1 of the second: sqrt(2)
    assert (trial.low, trial.high, trial.mean) == (1.0, 5.0, 2.0)
    assert trial.within == pytest.approx((3**0.5 + 2**0.5) / 2)
    assert trial.deviation == pytest.approx((18 / 7) ** 0.5)  # squares of 1, 1, 3, 1, 1, 2, 1: 18
    assert (trial.answers, trial.scored, trial.groups, trial.flat, trial.differing) == (7, 7, 2, 0, 2)
    assert (trial.verdict, trial.advice, trial.faults, trial.warnings) == ("fine", "", (), ())


def test_the_form_that_a_reward_reads_is_said() -> None:
    assert (tried(words).completions, tried(words).prompts) == ("text", "text")
    assert tried(lambda completions: [len(c[-1]["content"]) for c in completions]).completions == "messages"


def test_time_is_taken_for_a_call_an_answer_and_a_step() -> None:
    def waits(completions: list[str]) -> list[float]:
        time.sleep(0.02 * len(completions))
        return words(completions)

    trial = tried(waits)
    assert (
        trial.seconds is not None and trial.seconds >= 0.14 and trial.seconds_each == pytest.approx(trial.seconds / 7)
    )
    assert trial.seconds_step == pytest.approx(8 * trial.seconds / 7)  # 8 answers in a step by default
    slow = tried(waits, slow_after=0.1)
    assert slow.verdict == "too slow" and slow.advice.startswith("It takes ") and "for the 8 answers" in slow.advice


def test_a_step_is_as_large_as_the_configuration_says() -> None:
    config = {"reward_funcs": [words], "num_generations": 4, "per_device_train_batch_size": 32}
    (trial,) = try_rewards(data=ANSWERED, config=config).rewards
    assert trial.seconds_step is not None and trial.seconds_each is not None
    assert trial.seconds_step == pytest.approx(32 * trial.seconds_each)


def test_async_rewards_are_awaited_and_asked_at_once_in_a_step() -> None:
    async def waits(completions: list[str]) -> list[float]:
        await asyncio.sleep(0.02)
        return words(completions)

    trial = tried(waits)
    assert trial.mean == 2.0 and trial.verdict == "fine"
    assert trial.seconds is not None and trial.seconds_step is not None and trial.seconds_step < 8 * trial.seconds

    async def inside() -> RewardTrial:
        return tried(waits)

    assert asyncio.run(inside()).mean == 2.0


def test_scores_that_are_none_nan_or_infinite_are_counted_apart() -> None:
    def mixed(completions: list[str]) -> list[float | None]:
        odd = {"4": None, "6": float("nan"), "five": 2.0}
        return [odd.get(c, float(len(c))) for c in completions]

    trial = tried(mixed)
    assert (trial.none, trial.nan, trial.infinite, trial.scored, trial.verdict) == (1, 1, 0, 5, "fine")
    assert trial.warnings == (
        "NaN for 1 of 7 answers; each counts as None (no score)",
        "no score (None) for 1 of 7 answers",
    )
    trial = tried(
        lambda completions: [10**400 if "i" in c else float(len(c)) for c in completions]
    )  # "six ...", "I ..."
    assert (trial.infinite, trial.scored, trial.verdict) == (2, 5, "broken")  # 2 of 7 are more than a fifth
    assert "return None there" in trial.advice


def test_each_cause_of_errors_is_told_once_with_the_first_answer_that_met_it() -> None:
    def picky(completions: list[str]) -> list[float]:
        for c in completions:
            if "think" in c:
                raise KeyError(c)
        return [float(int(c)) for c in completions]  # "four" and "six and no more" are none

    trial = tried(picky)
    assert trial.verdict == "broken"
    found = {(fault.kind, fault.count, fault.first) for fault in trial.faults}
    assert found == {("raised", 2, "'four'"), ("raised", 1, "'I think it is 4'")}
    assert "invalid literal for int() with base 10: 'four'" in trial.faults[0].text
    assert (trial.scored, trial.low, trial.high) == (4, 4.0, 7.0)  # the others are scored all the same


def test_a_wrong_length_is_found_at_every_length() -> None:
    def squeezed(completions: list[str]) -> Any:  # as numpy's squeeze of one value
        return words(completions) if len(completions) > 1 else words(completions)[0]

    trial = tried(squeezed)
    assert trial.verdict == "broken" and [(f.kind, f.first) for f in trial.faults] == [("not a list", "'4'")]
    assert "returned a float, 1.0" in trial.faults[0].text

    def pairwise(completions: list[str]) -> list[float]:
        return words(completions)[: 1 if len(completions) == 2 else None]

    trial = tried(pairwise)
    assert [(f.kind, f.count) for f in trial.faults] == [("wrong length", 0)]
    assert "returned 1 values for 2 completions" in trial.faults[0].text


def test_what_is_no_number_is_told_with_the_answer() -> None:
    trial = tried(lambda completions: ["good" if c == "5" else 1.0 for c in completions])
    assert trial.verdict == "broken" and trial.not_numbers == 1
    assert [(f.kind, f.count, f.first) for f in trial.faults] == [("not a number", 1, "'5'")]


def test_a_reward_that_changes_its_arguments_is_told() -> None:
    def vandal(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
        scores = words(completions)
        completions.clear()
        answer[0] = "mine"
        return scores

    trial = tried(vandal)
    assert trial.changed == ("answer", "completions") and trial.verdict == "fine"
    assert trial.warnings == ("it changes what it is given (answer, completions); in training these are copies",)


def test_what_scores_depend_on_besides_the_answer_is_found() -> None:
    counter = itertools.count()

    def noisy(completions: list[str]) -> list[float]:
        return [float(next(counter)) for _ in completions]

    def by_place(completions: list[str]) -> list[float]:
        return [float(place) for place in range(len(completions))]

    def by_rank(completions: list[str]) -> list[float]:
        return [float(sorted(completions).index(c)) for c in completions]

    found = {fn.__name__: tried(fn) for fn in (words, noisy, by_place, by_rank)}
    depends = {name: (t.deterministic, t.by_order, t.by_sample) for name, t in found.items()}
    assert depends == {
        "words": (True, False, True),
        "noisy": (False, None, None),
        "by_place": (True, True, False),
        "by_rank": (True, False, False),
    }
    assert "its scores are not cached" in found["noisy"].warnings[0]
    assert "depends on the place of its answer" in found["by_place"].warnings[0]
    assert "set whole_group = True" in found["by_rank"].warnings[0]
    by_rank.whole_group = True  # type: ignore[attr-defined]
    assert tried(by_rank).warnings == ()


def test_columns_that_a_reward_needs_and_the_data_lacks_are_named() -> None:
    def needy(completions: list[str], gold: list[str], level: list[int], soft: int = 1) -> list[float]:
        return words(completions)

    trial = tried(needy)
    assert (trial.verdict, trial.needs, trial.lacking) == ("broken", ("gold", "level"), ("gold", "level"))
    assert trial.faults[0].text == "needs the columns 'gold', 'level'; the data has: prompt, answer"
    mapped = {"reward": needy, "columns": {"gold": "answer"}, "level": [1]}
    assert tried(mapped).lacking == () and tried(mapped).verdict == "fine"
    assert "TRL passes it as 'prompts'" in tried(lambda prompt, completions: []).faults[0].text


def test_a_column_that_is_empty_for_some_prompts_is_told() -> None:
    rows = [ANSWERED[0], {**ANSWERED[1], "answer": None}]
    assert try_rewards([exact], rows).notes == [
        "the column 'answer' is empty for 1 of 2 prompts; a reward is given None there"
    ]


# --- verdicts ---------------------------------------------------------------------------------------------------------


def test_a_reward_that_says_the_same_of_everything_gives_no_signal() -> None:
    trials = try_rewards(
        [lambda completions: [0.5] * len(completions), lambda completions: [None] * len(completions)], ANSWERED
    )
    constant, silent = trials.rewards
    assert (constant.name, silent.name) == ("lambda_1", "lambda_2")
    assert constant.verdict == silent.verdict == "no signal" and trials.ok
    assert (
        constant.advice
        == "It gives 0.5 to every answer: nothing is learned from it; mend it, or leave it out unless it is a guard."
    )
    assert silent.advice.startswith("It scores no answer") and silent.none == 7


def test_on_made_up_answers_it_is_said_that_real_ones_tell_more() -> None:
    trials = try_rewards([lambda completions: [1.0] * len(completions), words, words], PROMPTS)
    assert trials.rewards[0].verdict == "no signal"
    assert trials.rewards[0].advice.endswith("These answers are made up: see what it says of real ones.")
    assert trials.correlations[1][2] == 1.0 and len(trials.notes) == 1, "and nothing of how rewards go together"


def test_a_reward_that_only_tells_prompts_apart_gives_no_signal() -> None:
    rows = [{"prompt": f"{'x' * n}?", "completions": ["a", "b"]} for n in range(1, 4)]
    trial = tried(lambda prompts, completions: [float(len(p)) for p in prompts], rows)
    assert trial.verdict == "no signal" and (trial.groups, trial.flat, trial.within) == (3, 3, 0.0)
    assert "all answers to one prompt the same score" in trial.advice
    same = [{**row, "completions": ["a", "a"]} for row in rows]  # the same answers have the same score, of course
    assert tried(lambda prompts, completions: [float(len(p)) for p in prompts], same).verdict == "fine"


def test_one_answer_in_twenty_that_differs_is_enough_and_one_in_twenty_five_is_not() -> None:
    def rare(completions: list[str]) -> list[float]:
        return [float(c == "a0") for c in completions]

    def rows(count: int) -> list[dict[str, Any]]:
        return [{"prompt": f"p{n}", "completion": f"a{n}"} for n in range(count)]

    assert tried(rare, rows(20), prompts=100).verdict == "fine"
    trial = tried(rare, rows(25), prompts=100)
    assert trial.verdict == "too sparse" and trial.advice.startswith("Only 1 of 25 answers get another score")


def test_a_reward_that_scores_less_than_half_of_the_answers_is_sparse() -> None:
    trial = tried(lambda completions: [float(c) if c in ("4", "5", "6") else None for c in completions])
    assert trial.verdict == "too sparse" and trial.advice.startswith("It gives 4 of 7 answers no score")


def test_prompts_whose_answers_are_all_alike_are_counted() -> None:
    trial = tried(lambda completions: [float(c == "6") for c in completions])
    assert trial.verdict == "fine" and (trial.groups, trial.flat) == (2, 1)
    assert trial.warnings == ("for 1 of 2 prompts all answers have the same score: no signal there",)


def test_a_reward_that_hangs_ends_the_trial_in_time_and_names_the_answer() -> None:
    def hangs(completions: list[str]) -> list[float]:
        if "four" in completions:
            time.sleep(600)
        return words(completions)

    def loops(completions: list[str]) -> list[float]:
        while True:
            pass

    start = time.monotonic()
    trial, endless = try_rewards([hangs, loops], ANSWERED, timeout=0.5).rewards
    assert time.monotonic() - start < 60
    assert trial.verdict == endless.verdict == "broken"
    assert [(f.kind, f.first) for f in trial.faults] == [("timed out", "'four'")]
    assert endless.faults[0].kind == "timed out" and "time limit" in endless.advice


def test_a_reward_that_is_too_slow_for_all_answers_at_once_is_slow_and_not_broken() -> None:
    def slow(completions: list[str]) -> list[float]:
        time.sleep(0.15 * len(completions))
        return words(completions)

    slow.reads = ("text", "text")  # type: ignore[attr-defined]
    trial = tried(slow, timeout=0.9)  # 7 answers take 1.05 s
    assert trial.verdict == "too slow" and "each alone is scored" in trial.advice


def test_a_text_reward_that_fails_on_one_answer_is_not_taken_for_one_that_reads_messages() -> None:
    def inverse(completions: list[str]) -> list[float]:  # len() of every message list is 1
        return [1 / (len(c) - 4) for c in completions]

    trial = tried(inverse, PROMPTS)
    assert (trial.verdict, trial.completions) == ("broken", "text")
    assert [(f.kind, f.first) for f in trial.faults] == [("raised", "'Yes.'")]
    assert "ZeroDivisionError" in trial.faults[0].text


def test_what_training_would_refuse_is_broken_although_the_given_answers_are_scored() -> None:
    def strict(completions: list[str]) -> list[float]:
        if not all(len(c) < 20 for c in completions):
            raise ValueError("too long for me")
        return words(completions)

    trial = tried(strict)  # the made-up answers, with which training finds the form, are longer
    assert trial.verdict == "broken" and trial.faults[0].kind == "cannot be used"
    assert "too long for me" in trial.faults[0].text and trial.mean == 2.0


# --- judges -----------------------------------------------------------------------------------------------------------


class Judge:
    """Counts what it is asked, as a judge whose calls cost money."""

    cacheable = True
    reads = ("text", "text")

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, prompts: list[str], completions: list[str]) -> list[float]:
        self.asked += len(completions)
        return words(completions)


def test_a_judge_is_not_asked_twice_unless_told_to() -> None:
    judge = Judge()
    trial = tried(judge)
    assert trial.deterministic is None and trial.verdict == "fine"
    assert trial.notes == ("called once only, since its calls may cost money: see --judges-twice",)
    assert judge.asked == 7 + 1 + 2  # all, one and two
    assert tried(judge, judges_twice=True).deterministic is True


def test_verdicts_that_a_judge_failed_to_give_are_told_from_none() -> None:
    class Verdicts(list[Any]):
        failed: dict[int, str]

    class Unsure(Judge):
        def __init__(self, *failing: str) -> None:
            super().__init__()
            self.failing = failing

        def __call__(self, prompts: list[str], completions: list[str]) -> Verdicts:
            verdicts = Verdicts(None if c in self.failing else float(len(c)) for c in completions)
            verdicts.failed = {place: "HTTP 500" for place, value in enumerate(verdicts) if value is None}
            return verdicts

    trial = tried(Unsure("5"))
    assert (trial.verdict, trial.unanswered, trial.none) == ("fine", 1, 0)
    assert trial.warnings == ("no verdict of the judge for 1 of 7 answers",)
    trial = tried(Unsure("5", "7"))
    assert (trial.verdict, trial.unanswered) == ("broken", 2)  # 2 of 7 are more than a fifth
    assert trial.advice == "See that the judge can be reached and answers as it is told to."
    assert "HTTP 500" in trial.faults[0].text
    everything = [completion for row in ANSWERED for completion in row["completions"]]
    trial = tried(Unsure(*everything))
    assert (trial.verdict, trial.unanswered, len(trial.faults)) == ("broken", 7, 1)


def test_no_more_answers_are_scored_than_asked_for() -> None:
    rows = [{"prompt": f"p{n}", "completions": [f"a{n}{k}" for k in range(9)]} for n in range(40)]
    trials = try_rewards([words], rows)
    assert (trials.prompts, trials.answers) == (16, 64)
    trials = try_rewards([words], rows, prompts=2, answers_each=3)
    assert (trials.prompts, trials.answers) == (2, 6)


# --- known pairs and ratings ------------------------------------------------------------------------------------------


def test_chosen_answers_are_to_be_preferred() -> None:
    rows = [{"prompt": f"p{n}", "chosen": "short", "rejected": "a long answer", "answer": "x"} for n in range(6)]
    trials = try_rewards([words, lambda completions: [-len(c) for c in completions]], rows)
    bad, good = trials.rewards
    assert trials.pairs == 6
    assert (good.better, good.worse, good.tied) == (6, 0, 0) and good.warnings == ()
    assert (bad.better, bad.worse) == (0, 6)
    assert bad.warnings == ("it prefers the worse answer in 6 of 6 known pairs",)
    assert bad.completions == "text"


def test_a_few_wrong_pairs_may_be_chance_and_are_not_called_a_preference() -> None:
    rows = [{"prompt": f"p{n}", "chosen": "short", "rejected": "a long answer"} for n in range(4)]
    assert tried(words, rows).worse == 4 and tried(words, rows).warnings == ()  # 1 in 16 by guessing


def test_the_right_answer_of_a_row_is_preferred_to_that_of_another() -> None:
    trials = try_rewards([exact], PROMPTS)
    assert trials.made_up and trials.pairs == 6 and trials.rewards[0].better == 6
    assert "real ones (recorded, or a column 'completion') tell more" in trials.notes[0]


def test_agreement_with_ratings_is_measured() -> None:
    rows = [{"prompt": f"p{n}", "completion": "x " * n, "rating": n} for n in range(1, 5)]
    trials = try_rewards([words, lambda completions: [-float(len(c)) for c in completions]], rows)
    with_, against = trials.rewards
    assert (with_.rated, with_.agreement) == (4, 1.0) and (against.rated, against.agreement) == (4, -1.0)
    assert against.warnings == ("it goes against the ratings of people (tau -1.00 on 4 answers)",)
    assert "each prompt has one answer" in trials.notes[0]


def test_rewards_that_say_the_same_or_the_opposite_are_told() -> None:
    def letters(completions: list[str]) -> list[float]:
        return [float(len(c.split())) * 2 for c in completions]

    def fewer(completions: list[str]) -> list[float]:
        return [-float(len(c.split())) for c in completions]

    trials = try_rewards([words, letters, fewer, lambda completions: [1.0] * len(completions)], ANSWERED)
    assert trials.correlations == [
        [1.0, 1.0, -1.0, None],
        [1.0, 1.0, -1.0, None],
        [-1.0, -1.0, 1.0, None],
        [None, None, None, None],
    ]
    assert trials.notes == [
        "words and letters say nearly the same, so it counts twice (tau +1.00)",
        "words and fewer pull against each other (tau -1.00)",
        "letters and fewer pull against each other (tau -1.00)",
    ]


# --- where answers are from -------------------------------------------------------------------------------------------


@pytest.fixture
def store(in_tmp: Path) -> Path:
    """The default store: agent "calc" was asked two questions, one twice; two answers were rated, one was corrected."""
    store = in_tmp / ".praisonai" / "rl" / "transcripts"
    writer = TranscriptWriter(store)
    system = {"role": "system", "content": "Be brief."}
    said = [("r1", "calc", "2+2?", "4"), ("r2", "calc", "2+2?", "It is five"), ("r3", "calc", "3+3?", "7 of course")]
    for run, agent, prompt, answer in [*said, ("r4", "poet", "A rhyme?", "Time")]:
        messages = [{**system, "content": f"Be brief. {run}"}, {"role": "user", "content": prompt}]
        call = Call(id=f"c-{run}", run=run, agent=agent, time=1.0, messages=messages)
        reply = {"role": "assistant", "content": answer}
        writer.begin({"run": run, "agent": agent, "parent": None, "session": None, "tags": [], "style": "chat",
                      "time": 1.0, "prompt": prompt, "version": None})  # fmt: skip
        writer.call({**call.model_dump(), "reply": reply})
        writer.end(run, output=answer, error=None, seconds=0.1)
    writer.close()
    feedback("r1", score=1, store=store)
    feedback("r2", score=0, store=store)
    feedback("r3", correction="6", store=store)
    return store


def test_recorded_answers_are_tried_with_what_was_said_of_them(store: Path) -> None:
    trials = try_rewards([lambda completions: [-float(len(c)) for c in completions]], agent="calc")
    (trial,) = trials.rewards
    # 2+2? twice, one answer rated better; 3+3? with the answer and its correction
    assert (trials.prompts, trials.answers, trials.pairs, trials.made_up) == (2, 4, 2, False)
    assert (trial.better, trial.worse, trial.rated, trial.agreement) == (2, 0, 2, 1.0)
    assert trials.source.startswith("recorded answers of agent 'calc' in ")
    assert try_rewards([words], agent=SimpleNamespace(name="poet")).answers == 1
    assert try_rewards([words]).answers == 5, "all agents of the default store"
    assert try_rewards([words], agent="c*", store=store).answers == 4


def test_columns_of_recorded_runs_are_those_that_a_dataset_of_them_has(store: Path) -> None:
    (trial,) = try_rewards([exact], agent="poet").rewards
    assert trial.faults[0].text == "needs the column 'answer'; the data has: prompt, run, agent"
    trials = try_rewards([exact], agent="calc")
    assert trials.rewards[0].verdict == "fine" and trials.rewards[0].high == 1.0  # the correction itself
    assert trials.notes[0].startswith("the column 'answer' is empty for 1 of 2 prompts")


def test_a_store_without_answers_of_the_agent_says_what_to_do(store: Path) -> None:
    with pytest.raises(
        DataError, match=r"no answered run of agent 'nobody' is recorded in .*; give data= \(or --data\)"
    ):
        try_rewards([words], agent="nobody")


def test_a_rollout_with_tools_is_given_as_messages(in_tmp: Path) -> None:
    store = in_tmp / "store"
    writer = TranscriptWriter(store)
    asked = [{"role": "user", "content": "2+2?"}]
    called = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    round_ = [
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ]  # fmt: skip
    final = {"role": "assistant", "content": "It is 4"}
    writer.begin({"run": "r1", "agent": "calc", "parent": None, "session": None, "tags": [], "style": "chat",
                  "time": 1.0, "prompt": "2+2?", "version": None})  # fmt: skip
    for number, (messages, reply) in enumerate([(asked, round_[0]), ([*asked, *round_], final)]):
        call = Call(id=f"c{number}", run="r1", agent="calc", time=1.0 + number, messages=messages, reply=reply)
        writer.call(call.model_dump())
    writer.end("r1", output="It is 4", error=None, seconds=0.1)
    writer.close()
    seen = []

    def roles(completions: list[Any]) -> list[float]:
        seen.append([m["role"] for m in completions[0]])
        return [float(len(c)) for c in completions]

    roles.reads = ("messages", "messages")  # type: ignore[attr-defined]
    try_rewards([roles], store=store)
    assert seen[-1] == ["assistant", "tool", "assistant"]
    last = []
    try_rewards([lambda completions: [last.append(c) or 1.0 for c in completions]], store=store)
    assert last[-1] == "It is 4"


def test_answers_may_be_given_in_every_usual_way() -> None:
    rows = [{"prompt": "p", "completion": "a b"}, {"prompt": "q", "completions": ["c", "d e f"]}]
    assert try_rewards([words], answers=rows).rewards[0].mean == 2.0
    prompts = [{"prompt": "p"}, {"prompt": "q"}]
    assert try_rewards([words], prompts, answers=["a b", ["c", "d e f"]]).rewards[0].mean == 2.0
    message = [{"role": "assistant", "content": "a b"}]
    assert try_rewards([words], ["p", "q"], answers=[message, [message]]).rewards[0].mean == 2.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"answers": ["a"]}, "answers need their prompts"),
        ({"answers": "a"}, "answers='a' must be a list"),
        ({"answers": [{"prompt": "p"}]}, "row 1 of answers has no 'completion'"),
        ({"data": ["p", "q"], "answers": ["a"]}, "1 answers were given for 2 prompts"),
        ({"data": [{"prompt": "p", "completion": 3}]}, "row 1 of the dataset has the answer 3, which is neither"),
        ({"data": []}, "has no rows"),
        ({"data": [{"question": "p"}]}, "needs the column prompt"),
        ({"data": "nothere.jsonl"}, "nothere.jsonl does not exist"),
    ],
)
def test_what_cannot_be_tried_on_is_told(given: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as caught:
        try_rewards([words], **given)
    assert said in str(caught.value)


def test_a_trial_without_a_reward_or_with_a_wrong_option_is_refused() -> None:
    with pytest.raises(RewardError, match="no reward is named"):
        try_rewards(None, ANSWERED)
    with pytest.raises(ConfigError, match="prompts is 0"):
        try_rewards([words], ANSWERED, prompts=0)
    with pytest.raises(ConfigError, match="give either it or data="):
        try_rewards([words], ANSWERED, agent="calc")


def test_rewards_and_judges_of_a_configuration_are_tried() -> None:
    config = {"reward_funcs": [words], "judge_funcs": [exact], "dataset": ANSWERED}
    trials = try_rewards(config=config)
    assert [(t.name, t.judge, t.mean) for t in trials.rewards] == [("words", False, 2.0), ("exact", True, 2 / 7)]


def test_trials_are_printed_and_given_as_json() -> None:
    trials = rl.try_rewards([words, "nomodule:f"], ANSWERED)
    assert isinstance(trials, Trials) and not trials.ok
    text = str(trials)
    assert text.startswith("tried on 7 answers of the dataset (2 prompts)\nwords: fine\nnomodule:f: broken\n")
    assert "Is it on PYTHONPATH?" in text
    known = json.loads(trials.as_json())
    assert known["rewards"][0]["mean"] == 2.0 and known["rewards"][1]["faults"][0]["kind"] == "cannot be used"


# --- the short trial of training --------------------------------------------------------------------------------------

COLUMNS = {"answer": list(CAPITALS.values())[:3]}
QUESTIONS = [[{"role": "user", "content": f"Capital of {land}?"}] for land in list(CAPITALS)[:3]]


def shortly(*specs: Any, rules: TrialRules = SHORT) -> Any:
    return short_trial(prepare(list(specs), prompts=QUESTIONS, columns=COLUMNS), QUESTIONS, COLUMNS, rules=rules)


def test_a_short_trial_warns_of_a_constant_and_says_nothing_of_good_rewards() -> None:
    def constant(completions: list[str]) -> list[float]:
        return [1.0] * len(completions)

    assert shortly(words, exact).notes == []
    assert shortly(words, constant).notes == [
        "WARNING: the reward 'constant', tried on 15 made-up answers: no signal. It gives 1 to every answer: nothing "
        "is learned from it; mend it, or leave it out unless it is a guard."
    ]


def test_a_short_trial_knows_of_each_reward_what_its_scores_depend_on() -> None:
    counter = itertools.count()
    noisy = lambda completions: [float(next(counter)) for _ in completions]  # noqa: E731
    by_rank = lambda completions: [float(sorted(completions).index(c)) for c in completions]  # noqa: E731
    found = shortly(words, noisy, by_rank)
    assert [(r.name, r.deterministic, r.by_sample) for r in found.rewards] == [
        ("words", True, True),
        ("lambda_1", False, True),
        ("lambda_2", True, False),
    ]


def test_a_short_trial_refuses_what_is_broken_all_at_once() -> None:
    def squeezed(completions: list[str]) -> Any:
        return words(completions) if len(completions) > 1 else words(completions)[0]

    def undefined(completions: list[str]) -> list[float]:
        return [float("nan") if len(c) > 10 else 1.0 for c in completions]

    with pytest.raises(RewardError) as caught:
        shortly(squeezed, words, undefined)
    first, second = str(caught.value).splitlines()
    assert first.startswith("the reward 'squeezed' is broken, tried on 15 made-up answers: returned a float")
    assert second.startswith("the reward 'undefined' is broken") and "NaN for" in second


def test_a_short_trial_spares_a_reward_that_takes_long() -> None:
    asked = []

    def slow(completions: list[str]) -> list[float]:
        asked.append(len(completions))
        time.sleep(0.02 * len(completions))
        return words(completions)

    prepared = prepare([slow], prompts=QUESTIONS, columns=COLUMNS)
    asked.clear()
    short_trial(prepared, QUESTIONS, COLUMNS, rules=TrialRules(few=4, spare_after=0.01))
    assert asked == [15, 1, 2, 2, 2]


def test_a_short_trial_refuses_a_text_reward_that_only_seems_to_read_messages() -> None:
    def inverse(completions: list[str]) -> list[float]:  # fails on "Yes."; len() of every message list is 1
        return [1 / (len(c) - 4) for c in completions]

    with pytest.raises(RewardError, match=r"'inverse' is broken.*ZeroDivisionError.*\(first: 'Yes.'\)"):
        shortly(inverse)


# --- verdicts that were wrong -----------------------------------------------------------------------------------------


def answered(prompts: int = 4, each: int = 4) -> list[dict[str, Any]]:
    """Prompts with different answers."""
    return [{"prompt": f"q{n}", "completions": ["w" * (1 + n + 3 * k) for k in range(each)]} for n in range(prompts)]


def test_a_reward_that_outlasts_the_trial_is_slow_and_not_one_that_hangs() -> None:
    def slow(completions):
        time.sleep(0.1 * len(completions))
        return [float(len(str(c))) for c in completions]

    # alone each takes a third of its limit, all of them more than the trial may
    trial = try_rewards([slow], answered(10), timeout=1.2).rewards[0]
    assert trial.verdict == "too slow", trial.faults
    assert not [fault for fault in trial.faults if fault.first is not None]


@pytest.mark.parametrize(
    ("score", "said"),
    [(lambda n: 1e12 + n, "cannot tell apart"), (lambda n: 1e-15 * n, "cannot tell apart"), (lambda n: 2.0, "gives 2")],
    ids=["lost in float32", "too small", "constant"],
)
def test_scores_that_training_cannot_tell_apart_carry_no_signal(score: Any, said: str) -> None:
    def close(completions):
        return [score(len(str(c))) for c in completions]

    trial = try_rewards([close], answered()).rewards[0]
    assert trial.verdict == "no signal" and said in trial.advice


def _hidden(fn):
    def call(*args, **kwargs):
        return fn(*args, **kwargs)

    return call


def _raises(error):
    def fails(completions, **kwargs):
        raise error

    return fails


def _by_place(completions, /, **kwargs):
    return [1.0] * len(completions)


@pytest.mark.parametrize(
    ("reward", "advice"),
    [
        (_hidden(lambda completions: [1.0] * len(completions)), "called by name"),
        (_by_place, "called by name"),
        (_raises(TypeError("unhashable type: 'list'")), "Mend what is said"),
        (_raises(RewardError("min must be a number")), "Mend what is said"),
        (_raises(SystemExit(3)), "Mend what is said"),
    ],
)
def test_what_fails_with_every_answer_is_not_told_to_leave_some_out(reward: Any, advice: str) -> None:
    trial = try_rewards([reward], answered()).rewards[0]
    assert trial.verdict == "broken" and advice in trial.advice and "None for an answer" not in trial.advice


def test_an_error_as_long_as_a_book_is_cut_and_a_wrong_length_is_said_once() -> None:
    trial = try_rewards([_raises(ValueError("x" * 100_000))], answered()).rewards[0]
    assert all(len(fault.text) < 1100 for fault in trial.faults)
    trial = try_rewards([lambda completions: [0.5] * (len(completions) + 1)], answered()).rewards[0]
    assert [fault.kind for fault in trial.faults] == ["wrong length"]


def test_two_ratings_against_a_reward_are_no_reason_to_warn_and_a_dozen_are() -> None:
    def letters(completions):
        return [float(len(str(c))) for c in completions]

    def rated(count: int) -> list[dict[str, Any]]:
        return [{"prompt": f"q{n}", "completion": "w" * (n + 1), "rating": -n} for n in range(count)]

    few, many = (try_rewards([letters], rated(count)).rewards[0] for count in (2, 12))
    assert few.agreement == many.agreement == -1.0
    assert not any("ratings of people" in warning for warning in few.warnings)
    assert any("ratings of people" in warning for warning in many.warnings)


def test_made_up_wrong_answers_favour_no_length() -> None:
    rows = [{"prompt": f"q{n}", "answer": str(10**n)} for n in range(16)]

    def long(completions):
        return [float(len(str(c))) for c in completions]

    def brief(completions):
        return [-float(len(str(c))) for c in completions]

    for trial in try_rewards([long, brief], rows).rewards:
        assert trial.better == trial.worse == 8 and not any("worse answer" in warning for warning in trial.warnings)


def test_the_current_folder_is_the_same_after_a_trial(in_tmp: Path) -> None:
    def moves(completions):
        os.chdir("/")
        return [float(len(str(c))) for c in completions]

    try_rewards([moves], answered())
    assert Path.cwd() == in_tmp
