"""Whatever a reward does when it is called costs only the samples that it concerns, and all of it is counted."""

import asyncio
import functools
import re
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.deadlines import TimedOut, within
from praison_agent_rl.rewards import Reward, Shape
from praison_agent_rl.scoring.calls import Caller, CallRules, caller_for, told_of
from praison_agent_rl.scoring.readings import Unsound, read_values

PROMPTS = ["p"] * 8
ANSWERS = [f"c{i}" for i in range(8)]
QUICK = CallRules(timeout=20, pause=0.001)
SHORT = CallRules(timeout=1.0, retries=0)  # a part of a batch has a quarter of it; a busy machine must not need more


class Called:
    """A caller of some functions, what it warned of, and what came of one call with the eight answers."""

    def __init__(self, *fns, rules=QUICK, prompts=PROMPTS, answers=ANSWERS, columns=None, **reward):
        self.warned = []
        self.caller = Caller(
            [Reward(fn, f"r{i}", **reward) for i, fn in enumerate(fns)], rules, warn=self.warned.append
        )
        self.prompts, self.answers, self.columns = prompts, answers, columns or {}
        self.all = self.again()

    def again(self):
        return self.caller.score(self.prompts, self.answers, self.columns)

    @property
    def scores(self):
        return self.all["r0"]

    @property
    def counts(self):
        return self.caller.counts["r0"]


@pytest.fixture
def called():
    made = []

    def make(*fns, **options):
        made.append(Called(*fns, **options))
        return made[-1]

    yield make
    for one in made:
        one.caller.close()


def numbers(completions):
    """The digit of each answer."""
    return [float(text[1:]) for text in completions]


def all_but(*places):
    return [None if i in places else float(i) for i in range(8)]


# --- what comes back --------------------------------------------------------------------------------------------------


def test_sound_scores_come_back_as_they_are_in_one_call(called):
    seen = []

    def reward(prompts, completions, gold):
        seen.append((prompts, completions, gold))
        return numbers(completions)

    one = called(reward, columns={"gold": list("abcdefgh"), "other": [0] * 8})
    assert one.scores == all_but() and seen == [(PROMPTS, ANSWERS, list("abcdefgh"))]
    assert (one.counts.samples, one.counts.failed, one.counts.none, one.counts.calls) == (8, 0, 0, 1)
    assert one.warned == [] and one.caller.summary() == [] and one.caller.too_many_failed(at_the_end=True) is None


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (float("nan"), "NaN"),
        (float("inf"), "infinite"),
        (-float("inf"), "infinite"),
        (10**400, "infinite"),
        (1e39, "infinite"),  # beyond float32, in which TRL keeps it
        ("0.5", "not a number"),
        ({"score": 1.0}, "not a number"),
        ([1.0], "not a number"),
        (1j, "not a number"),
        (Decimal(1), "not a number"),
        (object(), "not a number"),
        (np.float32("nan"), "NaN"),
        (np.str_("1"), "not a number"),
    ],
)
def test_one_value_that_is_no_score_costs_its_own_sample(value, kind, called):
    one = called(lambda completions: [*numbers(completions)[:3], value, *numbers(completions)[4:]])
    assert one.scores == all_but(3) and one.counts.calls == 1
    assert dict(one.counts.by_kind) == {kind: 1} and one.counts.failed == 1 and one.counts.none == 0
    assert (one.counts.nan, one.counts.infinite) == (kind == "NaN", kind == "infinite")
    assert len(one.warned) == 1 and "(completion: 'c3'); 1 of 8 completions" in one.warned[0]


def test_none_is_a_legitimate_answer_and_no_failure(called):
    one = called(lambda completions: [None] * 8, rules=CallRules(most_failed=0.0))
    assert one.scores == [None] * 8 and (one.counts.none, one.counts.failed) == (8, 0)
    assert one.warned == [] and one.caller.too_many_failed(at_the_end=True) is None


def test_numbers_of_other_kinds_are_scores():
    values = [True, 2, np.float32(0.5), np.int64(3), Fraction(1, 4)]
    assert read_values(values, 5) == [1.0, 2.0, 0.5, 3.0, 0.25]
    assert all(type(score) is float for score in read_values(values, 5))
    assert read_values(np.array([1.0, 2.0]), 2) == read_values((1, 2), 2) == [1.0, 2.0]


def test_values_that_fail_when_they_are_looked_at_cost_their_sample():
    class Odd:
        def __float__(self):
            raise RuntimeError

        def __repr__(self):
            raise RuntimeError

        @property
        def tolist(self):
            raise RuntimeError

    (outcome,) = read_values([Odd()], 1)
    assert outcome.kind == "not a number" and "<Odd>" in outcome.text


@pytest.mark.parametrize(
    "values", [{"c0": 1.0}, dict.fromkeys(range(8), 1.0), 0.5, None, "12345678", iter([1.0]), {1.0}]
)
def test_what_is_no_list_is_no_list_of_scores(values):
    with pytest.raises(Unsound) as refused:
        read_values(values, len(values) if isinstance(values, dict | str | set) else 1)
    assert refused.value.fault.kind == "not a list" and "instead of a list of numbers" in refused.value.fault.text


def test_a_dicts_keys_are_never_scores(called):
    one = called(lambda completions: dict.fromkeys(numbers(completions), 1.0))
    assert one.scores == [None] * 8 and dict(one.counts.by_kind) == {"not a list": 8}


def test_a_judges_none_with_a_reason_is_a_failure_and_one_without_is_not(called):
    class Judged(list):
        failed = {1: "unreadable reply: 'so so'", 99: "of no sample"}  # noqa: RUF012

    one = called(lambda completions: Judged([1.0, None, None, *[0.5] * 5]))
    assert one.scores == [1.0, None, None, *[0.5] * 5]
    assert (one.counts.failed, one.counts.none) == (1, 1)
    assert one.counts.first_error == "gave no score: unreadable reply: 'so so' (completion: 'c1')"


# --- failed calls -----------------------------------------------------------------------------------------------------


def with_fault(fault, *bad):
    def reward(completions):
        if set(bad) & set(completions):
            fault()
        return numbers(completions)

    return reward


def raises():
    raise ValueError("row 7")


class Shy(Exception):
    def __str__(self):
        raise RuntimeError

    __repr__ = __str__


def raises_something_shy():
    raise Shy


def exits():
    sys.exit(3)


def leaves():
    raise GeneratorExit


def fills_the_memory():
    raise MemoryError


def recurses():
    recurses()


@pytest.mark.parametrize("fault", [raises, raises_something_shy, exits, leaves, fills_the_memory, recurses])
def test_a_reward_that_raises_on_two_answers_scores_the_others(fault, called):
    one = called(with_fault(fault, "c2", "c7"))
    assert one.scores == all_but(2, 7) and dict(one.counts.by_kind) == {"raised": 2}
    assert len(one.warned) == 1 and "'r0' failed: " in one.warned[0] and "2 of 8" in one.warned[0]


def sleeps():
    time.sleep(600)


def loops():
    while True:
        pass


def loops_and_catches_errors():
    while True:
        try:
            while True:
                time.sleep(0.001)
        except Exception:  # noqa: BLE001 - what such rewards do
            pass


def loops_and_catches_everything_once():
    try:
        while True:
            time.sleep(0.001)
    except BaseException:  # noqa: BLE001 - what such rewards do
        while True:
            time.sleep(0.001)


def backtracks():
    re.match(r"(a+)+$", "a" * 50 + "b")


def waits_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def waits_for_a_process():
    subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"], check=True)


HANGS = [sleeps, loops, loops_and_catches_errors, loops_and_catches_everything_once, waits_for_a_lock]


@pytest.mark.parametrize("fault", [*HANGS, backtracks, waits_for_a_process])
def test_a_reward_that_hangs_on_one_answer_scores_the_others(fault, called):
    one = called(with_fault(fault, "c5"), rules=SHORT)
    assert one.scores == all_but(5) and dict(one.counts.by_kind) == {"timed out": 1}
    assert "did not end within" in one.warned[0]


@pytest.mark.parametrize("fault", HANGS)
def test_a_reward_that_hangs_is_left_off_the_main_thread_too(fault):
    found = []

    def work():
        one = Called(with_fault(fault, "c5"), rules=SHORT)
        found.append((one.scores, dict(one.counts.by_kind)))
        one.caller.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(all_but(5), {"timed out": 1})]


def test_an_endless_loop_left_in_a_thread_does_not_eat_the_processor():
    ended = threading.Event()

    def endless():
        try:
            while True:
                pass
        finally:
            ended.set()

    outcome = []

    def work():
        with pytest.raises(TimedOut):
            within(0.2, endless)
        outcome.append("timed out")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert outcome == ["timed out"] and ended.wait(30)


def test_a_failed_call_is_made_again_as_often_as_configured_and_then_in_halves(called):
    sizes = []

    def reward(completions):
        sizes.append(len(completions))
        if "c6" in completions:
            raise ValueError
        return numbers(completions)

    one = called(reward, rules=CallRules(timeout=5, retries=2, pause=0.001))
    assert one.scores == all_but(6)
    assert sizes == [8, 8, 8, 4, 4, 2, 2, 1, 1] and one.counts.calls == 9


def test_a_call_that_fails_once_is_made_again_and_nothing_is_lost(called):
    tries = []

    def reward(completions):
        tries.append(1)
        if len(tries) == 1:
            raise ConnectionError("reset")
        return numbers(completions)

    one = called(reward)
    assert one.scores == all_but() and one.counts.failed == 0 and one.warned == [] and len(tries) == 2


def test_without_retries_the_first_failure_is_split(called):
    sizes = []

    def reward(completions):
        sizes.append(len(completions))
        raise ValueError

    assert called(reward, rules=CallRules(retries=0), answers=["c0", "c1"], prompts=["p"] * 2).scores == [None, None]
    assert sizes == [2, 1, 1]


@pytest.mark.parametrize("fewer", [1, 7])
def test_values_that_are_left_out_cost_the_answers_that_have_none(fewer, called):
    def reward(completions):
        return [float(text[1:]) for text in completions if int(text[1:]) >= fewer]

    one = called(reward)
    # of 7 left out one value remains for 8: that looks like a value for the whole call, so none is believed
    assert one.scores == (all_but(0) if fewer == 1 else [None] * 8)
    assert set(one.counts.by_kind) == {"wrong length"}


@pytest.mark.parametrize("length", [0, 1, 4, 7, 9])
def test_a_list_of_fixed_length_is_not_believed_for_the_part_that_has_its_length(length, called):
    one = called(lambda completions: [1.0] * length)
    assert one.scores == [None] * 8 and dict(one.counts.by_kind) == {"wrong length": 8}
    assert one.warned[0].startswith(f"reward 'r0' returned {length} values for ")


def test_a_reward_whose_scores_depend_on_each_other_is_not_asked_in_parts(called):
    sizes = []

    def reward(completions):
        sizes.append(len(completions))
        raise ValueError

    assert called(reward, by_sample=False).scores == [None] * 8 and sizes == [8, 8]


def test_a_reward_of_whole_groups_is_asked_again_by_prompt(called):
    seen = []

    def ranks(prompts, completions):
        seen.append("".join(prompts))
        if "b" in prompts:
            raise ValueError
        return [float(sorted(completions).index(text)) for text in completions]

    ranks.whole_group = True
    one = called(ranks, prompts=list("aabbccaa"), by_sample=False)
    assert seen == ["aabbccaa", "aabbccaa", "aaaa", "bbcc", "bb", "cc"]
    assert one.scores == [0.0, 1.0, None, None, 0.0, 1.0, 2.0, 3.0]


def test_all_calls_of_a_reward_together_take_a_few_timeouts_and_no_longer(called):
    def hangs(completions):
        time.sleep(600)

    begun = time.monotonic()
    one = called(hangs, rules=CallRules(timeout=0.1, pause=0.001), prompts=["p"] * 64, answers=["c1"] * 64)
    # two whole calls and four timeouts of parts; a busy machine may take its time, but 64 halvings would take 12 s
    assert one.scores == [None] * 64 and time.monotonic() - begun < 6
    assert one.counts.by_kind["out of time"] > 0


def test_a_large_batch_has_more_time(called):
    def slow(completions):
        time.sleep(0.6)
        return [1.0] * len(completions)

    one = called(slow, rules=CallRules(timeout=0.3, retries=0), prompts=["p"] * 256, answers=["c1"] * 256)
    assert one.scores == [1.0] * 256 and one.counts.calls == 1  # 256 / 64 times 0.3 s


# --- arguments --------------------------------------------------------------------------------------------------------


def test_a_reward_cannot_change_what_it_is_given_not_even_before_it_fails(called):
    given = []

    def vandal(prompts, completions, tags):
        given.append((str(prompts), str(completions), str(tags)))
        prompts[0].clear()
        completions[0][0]["content"] = "good"
        tags[0].append("x")
        raise ValueError

    message = [{"role": "user", "content": "p"}]
    answer = [{"role": "assistant", "content": "c"}]
    columns = {"tags": [["t"]]}
    shape = Shape("messages", "messages")
    called(vandal, prompts=[message], answers=[answer], columns=columns, shape=shape)
    assert len(given) == 2 and len(set(given)) == 1
    assert (message, answer) == ([{"role": "user", "content": "p"}], [{"role": "assistant", "content": "c"}])
    assert columns == {"tags": [["t"]]}


def test_parts_are_given_their_own_columns_and_live_objects_as_they_are(called):
    seen, state, live = {}, object(), [object() for _ in range(8)]

    def reward(completions, gold, environments, trainer_state):
        if len(completions) > 1:
            raise ValueError
        seen[completions[0]] = gold[0], environments[0], trainer_state
        return [1.0]

    columns = {"gold": list(range(8)), "environments": live, "trainer_state": state}
    assert called(reward, columns=columns).scores == [1.0] * 8
    assert seen == {text: (i, live[i], state) for i, text in enumerate(ANSWERS)}


def test_what_is_logged_by_a_call_that_failed_is_not_passed_on(called):
    logged, metrics = [], []

    def reward(completions, log_extra, log_metric):
        log_extra("size", [len(completions)] * len(completions))
        log_extra("odd", [1, 2, 3])
        log_metric("size", len(completions))
        if "c7" in completions:
            raise ValueError
        return numbers(completions)

    columns = {
        "log_extra": lambda name, values: logged.append((name, values)),
        "log_metric": lambda name, value: metrics.append((name, value)),
    }
    assert called(reward, columns=columns).scores == all_but(7)
    assert logged == [("size", [4, 4, 4, 4, 2, 2, 1, None])]  # TRL's table needs one entry for each completion
    assert metrics == [("size", 4.0), ("size", 2.0), ("size", 1.0)]


# --- async rewards ----------------------------------------------------------------------------------------------------


def test_async_rewards_are_asked_sample_by_sample_at_once_but_not_more_than_the_limit(called):
    running, most, sizes = [0], [0], []

    async def wait(completions):
        sizes.append(len(completions))
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0.02)
        running[0] -= 1
        return numbers(completions)

    async def other(completions):
        return await wait(completions)

    one = called(wait, other, rules=CallRules(timeout=20, at_once=3))
    assert one.all == {"r0": all_but(), "r1": all_but()}
    assert most == [3] and sizes == [1] * 16


def test_async_rewards_run_while_a_plain_one_does(called):
    during = []
    begun, ended = threading.Event(), threading.Event()

    async def wait(completions):
        begun.set()
        while not ended.is_set():
            await asyncio.sleep(0.001)
        return numbers(completions)

    def plain(completions):
        during.append(begun.wait(20))
        ended.set()
        return numbers(completions)

    one = called(wait, plain, rules=CallRules(timeout=30))
    assert during == [True] and one.all == {"r0": all_but(), "r1": all_but()}


class Judge:
    async def __call__(self, completions):
        await asyncio.sleep(0)
        return numbers(completions)


async def awaited(completions, add):
    await asyncio.sleep(0)
    return [number + add for number in numbers(completions)]


def test_every_form_of_async_reward_is_awaited(called):
    one = called(
        Judge(), functools.partial(awaited, add=1), lambda completions: awaited(completions, 2), Judge().__call__
    )
    assert one.scores == all_but() == one.all["r3"]
    assert one.all["r1"] == [i + 1.0 for i in range(8)] and one.all["r2"] == [i + 2.0 for i in range(8)]


@pytest.mark.parametrize("fault", [raises, raises_something_shy, exits, leaves, fills_the_memory])
def test_an_async_reward_that_raises_on_one_answer_scores_the_others_after_a_second_try(fault, called):
    tries = []

    async def reward(completions):
        tries.append(completions[0])
        await asyncio.sleep(0)
        if "c4" in completions:
            fault()
        return numbers(completions)

    one = called(reward)
    assert one.scores == all_but(4) and sorted(tries) == sorted([*ANSWERS, "c4"])
    assert one.again()["r0"] == all_but(4), "the loop lives on"


def test_an_async_reward_that_never_answers_costs_its_sample(called):
    async def hangs(completions):
        if "c4" in completions:
            await asyncio.sleep(600)
        return numbers(completions)

    async def hangs_and_heeds_no_cancelling(completions):
        while "c4" in completions:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                if len(heeded) > 20:
                    raise
                heeded.append(1)
        return numbers(completions)

    heeded = []
    one = called(hangs, hangs_and_heeds_no_cancelling, rules=CallRules(timeout=1.0, retries=0, at_once=16))
    assert one.all == {"r0": all_but(4), "r1": all_but(4)} and dict(one.counts.by_kind) == {"timed out": 1}


def test_where_no_async_call_comes_to_an_end_the_rest_is_not_asked(called):
    asked = []

    async def hangs(completions):
        asked.append(completions[0])
        await asyncio.sleep(600)

    one = called(hangs, rules=CallRules(timeout=0.2, retries=0, at_once=2))
    assert one.scores == [None] * 8 and len(asked) == 2 and dict(one.counts.by_kind) == {"timed out": 8}


def test_an_async_reward_that_does_not_await_stops_no_other_one(called):
    async def blocks(completions):
        await asyncio.sleep(0)
        if completions[0] in ("c2", "c5"):
            time.sleep(6)
        return numbers(completions)

    async def steady(completions):
        await asyncio.sleep(0.01)
        return numbers(completions)

    one = called(blocks, steady, rules=CallRules(timeout=1.5, retries=0))
    assert one.all == {"r0": all_but(2, 5), "r1": all_but()}
    assert "keeps the event loop to itself" in one.warned[0]
    assert one.caller.score(["p"] * 2, ["c0", "c1"], {}) == {"r0": [0.0, 1.0], "r1": [0.0, 1.0]}


def test_an_async_reward_of_whole_groups_is_asked_group_by_group(called):
    seen = []

    async def ranks(prompts, completions):
        await asyncio.sleep(0)
        seen.append("".join(prompts))
        return [float(sorted(completions).index(text)) for text in completions]

    ranks.whole_group = True
    one = called(ranks, prompts=list("aabbccaa"), by_sample=False)
    assert sorted(seen) == ["aaaa", "bb", "cc"] and one.scores == [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 2.0, 3.0]


def test_async_rewards_keep_one_loop_from_call_to_call(called):
    loops = []

    async def reward(completions):
        loops.append(asyncio.get_running_loop())
        return numbers(completions)

    one = called(reward)
    one.again()
    assert len(loops) == 16 and len(set(loops)) == 1


def test_a_caller_works_inside_a_running_loop():
    async def reward(completions):
        await asyncio.sleep(0)
        return numbers(completions)

    async def main():
        one = Called(reward, numbers)
        one.caller.close()
        return one.all

    assert asyncio.run(main()) == {"r0": all_but(), "r1": all_but()}


# --- the main thread --------------------------------------------------------------------------------------------------


def test_a_reward_in_the_main_thread_stays_there(called):
    base = sqlite3.connect(":memory:")  # it may be used in the thread alone that made it

    def reward(completions):
        assert threading.current_thread() is threading.main_thread()
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))  # as math-verify's time limit does
        return [base.execute("SELECT ?", (number,)).fetchone()[0] for number in numbers(completions)]

    assert called(reward).scores == all_but()
    base.close()


def test_the_signal_that_ends_a_call_is_given_back_and_cannot_end_the_process():
    heard = []
    before = signal.signal(signal.SIGVTALRM, lambda *_: heard.append(1))
    try:
        with pytest.raises(TimedOut):
            within(0.1, functools.partial(time.sleep, 600))
        signal.raise_signal(signal.SIGVTALRM)
        assert heard == [1] and signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
        assert within(5, lambda: 1) == 1
        signal.raise_signal(signal.SIGVTALRM)  # the system's own answer would end this process
    finally:
        signal.signal(signal.SIGVTALRM, before if callable(before) else lambda *_: None)


def test_one_time_limit_within_another():
    def inner():
        with pytest.raises(TimedOut):
            within(0.1, loops)
        loops()

    with pytest.raises(TimedOut):
        within(0.5, inner)


def test_an_interrupt_inside_a_reward_still_passes(called):
    def stop(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        called(stop)


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_hanging_call_can_be_interrupted_from_the_keyboard(kind, tmp_path):
    script = tmp_path / "hang.py"
    script.write_text(
        "import time\n"
        "from praison_agent_rl.scoring.calls import Caller\n"
        "from praison_agent_rl.rewards import Reward\n"
        f"{kind} slow(completions):\n"
        "    print('begun', flush=True)\n"
        "    time.sleep(600)\n"
        "try:\n"
        "    Caller([Reward(slow, 'slow')]).score(['p'], ['c'], {})\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0 and process.stdout.read() == "interrupted\n"
    finally:
        process.kill()


# --- counting ---------------------------------------------------------------------------------------------------------


def test_each_kind_of_failure_is_said_once_and_counted_on(called):
    one = called(lambda completions: [float("nan"), "x", *numbers(completions)[2:]])
    for _ in range(3):
        one.again()
    assert len(one.warned) == 2 and one.counts.failed == 8 and one.counts.samples == 32 and one.counts.nan == 4
    (line,) = one.caller.summary()
    assert line == (
        "reward 'r0' gave no sound score for 8 of 32 completions (NaN 4, not a number 4); they counted as None. "
        "The first: it returned NaN as a score (completion: 'c0')"
    )


def test_the_share_that_failed_is_that_of_the_last_five_calls_of_a_reward_and_of_two_at_least(called):
    bad = [2]

    def reward(completions):
        return [None if i >= bad[0] else "x" for i in range(len(completions))]

    one = called(reward, numbers, rules=CallRules(most_failed=0.2, pause=0))
    assert one.caller.too_many_failed() is None and one.caller.too_many_failed(at_the_end=True)
    one.again()  # 4 of 16
    assert one.caller.too_many_failed().startswith(
        "reward 'r0' gave no sound score for 4 of the last 16 completions (25%; reward_failures allows 20%). "
        "The first: it returned 'x' as a score (completion: 'c0')"
    )
    bad[0] = 0
    one.again()  # 4 of 24
    assert one.caller.too_many_failed() is None
    for _ in range(3):
        one.again()
    bad[0] = 8
    one.again()  # the last five: 8 of 40, which is not above a fifth
    assert one.caller.too_many_failed() is None
    one.again()
    assert "16 of the last 40 completions (40%" in one.caller.too_many_failed()


def test_a_step_is_told_apart_from_what_was_counted_before(called):
    one = called(lambda completions: [None, "x", *numbers(completions)[2:]])
    first = told_of(one.caller.take_step())["r0"]
    assert (first["none"], first["failed"], first["nan"], first["hits"]) == (1 / 8, 1 / 8, 0, 0)
    assert first["error"] == "returned 'x' as a score (completion: 'c1')" and first["seconds"] >= 0
    empty = told_of(one.caller.take_step())["r0"]
    assert (empty["none"], empty["failed"]) == (0, 0) and "error" not in empty
    assert one.counts.samples == 8


def test_long_completions_are_shortened_in_what_is_said(called):
    one = called(lambda completions: ["x"], prompts=["p"], answers=["y" * 5000])
    assert len(one.warned[0]) < 300 and "yyy..." in one.warned[0]


def test_no_completions_are_no_call(called):
    def never(completions):
        raise AssertionError

    one = called(never, prompts=[], answers=[])
    assert one.scores == [] and one.counts.calls == 0 and one.caller.too_many_failed(at_the_end=True) is None


# --- the configuration ------------------------------------------------------------------------------------------------


def test_the_keys_of_the_configuration_are_the_rules():
    keys = {"reward_timeout": 3, "reward_retries": 0, "reward_failures": 0.5, "reward_concurrency": 2}
    config = TrainConfig.load({**keys, "reward_cache": False}, need_model=False, need_data=False)
    assert caller_for(config, []).rules == CallRules(timeout=3, retries=0, most_failed=0.5, at_once=2)
    default = TrainConfig.load({}, need_model=False, need_data=False)
    assert caller_for(default, []).rules == CallRules() == CallRules(60.0, 1, 0.2, 8)
    assert default.reward_cache is True


def test_a_deadline_that_passes_before_its_call_began_stops_only_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the thread that watches may take longer to start than the call has."""
    start = threading.Thread.start

    def slowly(thread: threading.Thread) -> None:
        start(thread)
        stop = time.monotonic() + 0.3
        while time.monotonic() < stop:  # in Python, where a signal would be met
            pass

    monkeypatch.setattr(threading.Thread, "start", slowly)
    with pytest.raises(TimedOut):
        within(0.05, functools.partial(time.sleep, 5))
    monkeypatch.undo()
    stop = time.monotonic() + 0.6
    while time.monotonic() < stop:  # nobody is told to stop any more
        pass
    assert within(5, lambda: 1) == 1


def test_a_reward_that_forks_leaves_one_process_that_goes_on(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import os, sys, time
        from praison_agent_rl.scoring.calls import Caller
        from praison_agent_rl.rewards import Reward

        def forks(completions):
            if os.fork() == 0 and completions[0] == "leave":
                sys.exit(3)
            return [1.0] * len(completions)

        caller = Caller([Reward(forks, "forks")])
        for word in ("stay", "leave"):
            print(word, caller.score(["?"], [word], {})["forks"], flush=True)
        time.sleep(0.5)
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["stay [1.0]", "leave [1.0]"] and done.returncode == 0, done.stderr
