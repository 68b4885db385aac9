"""Scores are kept where a reward gives the same to the same, found again by other runs, and never end one."""

import functools
import importlib
import json
import multiprocessing
import os
import re
import sqlite3
import stat
import sys
import time

import pytest

from praison_agent_rl.reward_library import contains, exact
from praison_agent_rl.rewards import Reward, Shape
from praison_agent_rl.scoring import keys as reward_keys
from praison_agent_rl.scoring.cache import RewardCache
from praison_agent_rl.scoring.calls import Caller
from praison_agent_rl.scoring.keys import identity, why_not_kept

CALLS = []


def length(completions):
    return [float(len(text)) for text in completions]


@pytest.fixture(autouse=True)
def no_calls_yet():
    CALLS.clear()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "home" / "cache.sqlite"


def score(reward, path, answers=("a", "bb", "ccc"), prompts=None, **columns):
    """The scores, and how many of them were known, of a caller of its own."""
    reward = reward if isinstance(reward, Reward) else Reward(reward, "r")
    caller = Caller([reward], cache=RewardCache(path))
    found = caller.score(prompts or ["p"] * len(answers), list(answers), columns)
    caller.close()
    return found[reward.name], caller.counts[reward.name].hits


# --- the file ---------------------------------------------------------------------------------------------------------


def test_what_was_written_is_read_by_another(path):
    first = RewardCache(path)
    scores = {b"a": 0.1, b"b": None, b"c": -0.0, b"d": 1e300}
    first.write(scores)
    assert first.read([b"a", b"b", b"c", b"d", b"e"]) == scores
    second = RewardCache(path)
    assert second.read([b"d", b"a", b"a", b"x"]) == {b"a": 0.1, b"d": 1e300}
    assert second.read([]) == {}
    for cache in (first, second):
        cache.close()


def test_more_keys_than_one_statement_takes_are_read(path):
    cache = RewardCache(path)
    scores = {number.to_bytes(4, "big"): float(number) for number in range(2500)}
    cache.write(scores)
    assert cache.read(list(scores)) == scores
    cache.close()


def test_the_newest_stay_when_it_is_full(path):
    cache = RewardCache(path, most=3)
    for number in range(5):
        cache.write({bytes([number]): float(number)})
    cache.write({bytes([2]): 22.0})  # written again, it is new
    cache.close()
    again = RewardCache(path, most=3)
    assert again.read([bytes([number]) for number in range(5)]) == {b"\x02": 22.0, b"\x03": 3.0, b"\x04": 4.0}
    again.close()


def garbage(path):
    path.write_bytes(b"this is no database, but long enough to be taken for one by its first page" * 99)


def another_make(path):
    base = sqlite3.connect(path)
    base.execute("CREATE TABLE scores (one TEXT, two TEXT)")
    base.commit()
    base.close()


def torn(path):
    cache = RewardCache(path)
    cache.write({number.to_bytes(20, "big"): 1.0 for number in range(5000)})
    cache.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + os.urandom(len(whole) - 4096))


@pytest.mark.parametrize("damage", [garbage, another_make, torn])
def test_a_damaged_file_is_moved_aside_and_said_once(damage, path):
    path.parent.mkdir()
    damage(path)
    said = []
    cache = RewardCache(path, warn=said.append)
    assert cache.read([number.to_bytes(20, "big") for number in range(500)]) == {}
    cache.write({b"a": 1.0})
    assert cache.read([b"a"]) == {b"a": 1.0}
    assert len(said) == 1 and "is damaged" in said[0]
    assert len([other for other in path.parent.iterdir() if ".damaged-" in other.name]) >= 1
    cache.close()


def test_a_file_that_is_damaged_while_it_is_used_is_moved_aside(path):
    said = []
    cache = RewardCache(path, warn=said.append)
    cache.write({number.to_bytes(20, "big"): 1.0 for number in range(3000)})
    cache.close()
    cache.read([b"a"])
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))
    for number in range(3000):
        cache.read([number.to_bytes(20, "big")])
    cache.write({b"new": 2.0})
    assert cache.read([b"new"]) == {b"new": 2.0} and len(said) == 1
    cache.close()


def test_scores_of_a_wrong_type_are_not_believed(path):
    cache = RewardCache(path)
    cache.write({b"a": 1.0})
    base = sqlite3.connect(path)
    base.execute("UPDATE scores SET score = 'good'")
    base.commit()
    base.close()
    assert cache.read([b"a"]) == {}
    cache.close()


@pytest.mark.parametrize("obstacle", ["file for folder", "folder for file", "read-only folder", "read-only file"])
def test_where_nothing_can_be_kept_it_is_said_once_and_nothing_fails(obstacle, path):
    if obstacle == "file for folder":
        path.parent.write_text("")
    elif obstacle == "folder for file":
        path.mkdir(parents=True)
    else:
        RewardCache(path).write({b"old": 1.0})
        target = path if obstacle == "read-only file" else path.parent
        if os.geteuid() == 0:
            pytest.skip("root may write anywhere")
        target.chmod(stat.S_IRUSR | stat.S_IXUSR)
    said = []
    cache = RewardCache(path, warn=said.append)
    for _ in range(3):
        cache.write({b"a": 1.0})
        cache.read([b"a"])
    assert len(said) == 1 and "scores are not kept from here on" in said[0] and "reward_cache" in said[0]
    cache.close()


@pytest.mark.parametrize(
    "error", ["database or disk is full", "attempt to write a readonly database", "disk I/O error"]
)
def test_a_full_or_failing_disk_is_said_once_and_costs_the_cache_only(error, path, monkeypatch):
    said = []
    cache = RewardCache(path, warn=said.append)
    cache.write({b"a": 1.0})

    def fails(*_):
        raise sqlite3.OperationalError(error)

    monkeypatch.setattr(cache, "_write", fails)
    for _ in range(3):
        cache.write({b"b": 2.0})
    assert len(said) == 1 and error in said[0] and cache.read([b"a"]) == {}
    cache.close()


def test_a_file_that_another_process_holds_for_long_is_passed_over(path, monkeypatch):
    monkeypatch.setattr("praison_agent_rl.scoring.cache._WAIT_SECONDS", 0.05)
    said = []
    cache = RewardCache(path, warn=said.append)
    cache.write({b"a": 1.0})
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    cache.write({b"b": 2.0})
    assert cache.read([b"a", b"b"]) == {b"a": 1.0}
    holder.execute("ROLLBACK")
    cache.write({b"c": 3.0})
    assert cache.read([b"c"]) == {b"c": 3.0} and said == []
    holder.close()
    cache.close()


def write_many(path, mark):
    cache = RewardCache(path, warn=lambda text: os._exit(3))
    for number in range(100):
        cache.write({f"{mark} {number}".encode(): float(number)})
    cache.close()


def test_several_processes_write_at_once_and_nothing_is_lost(path):
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=write_many, args=(path, mark)) for mark in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    cache = RewardCache(path)
    keys = [f"{mark} {number}".encode() for mark in "abc" for number in range(100)]
    assert len(cache.read(keys)) == 300
    cache.close()


def write_for_ever(path, begun):
    cache = RewardCache(path)
    number = 0
    while True:
        number += 1
        cache.write({f"{number} {i}".encode(): 1.0 for i in range(50)})
        begun.set()


def test_a_process_that_is_killed_while_it_writes_leaves_a_sound_file(path):
    spawn = multiprocessing.get_context("spawn")
    for _ in range(3):
        begun = spawn.Event()
        process = spawn.Process(target=write_for_ever, args=(path, begun))
        process.start()
        assert begun.wait(60)
        process.kill()
        process.join()
        said = []
        cache = RewardCache(path, warn=said.append)
        assert len(cache.read([f"1 {i}".encode() for i in range(50)])) == 50 and said == []
        cache.write({b"after": 1.0})
        assert cache.read([b"after"]) == {b"after": 1.0}
        cache.close()


# --- what is found again ----------------------------------------------------------------------------------------------


def test_a_score_that_is_known_is_not_asked_for_again(path):
    assert score(length, path) == ([1.0, 2.0, 3.0], 0)
    caller = Caller([Reward(length, "r")], cache=RewardCache(path))
    assert caller.score(["p"] * 3, ["a", "dddd", "ccc"], {}) == {"r": [1.0, 4.0, 3.0]}
    assert (caller.counts["r"].hits, caller.counts["r"].calls, caller.counts["r"].samples) == (2, 1, 3)
    assert caller.score(["p"] * 2, ["dddd", "bb"], {}) == {"r": [4.0, 2.0]}
    assert (caller.counts["r"].hits, caller.counts["r"].calls, caller.counts["r"].samples) == (4, 1, 5)
    caller.close()


def test_a_score_belongs_to_prompt_answer_columns_and_form(path):
    def judge(prompts, completions, gold):
        CALLS.append(1)
        return [1.0] * len(completions)

    def asked(prompt="p", answer="a", gold=1, **reward):
        CALLS.clear()
        score(Reward(judge, "r", **reward), path, [answer], [prompt], gold=[gold], other=[object()])
        return len(CALLS)

    assert [asked(), asked()] == [1, 0]
    assert [asked("q"), asked(answer="b"), asked(gold=2), asked(gold="1"), asked(gold=1.0)] == [1] * 5
    assert asked(shape=Shape("messages", "messages")) == 1
    assert asked(renamed={"gold": "other"}) == 1  # an object, which has no key


def test_a_reward_under_another_name_or_weight_has_the_same_scores(path):
    assert score(Reward(length, "one"), path) == ([1.0, 2.0, 3.0], 0)
    assert score(Reward(length, "two", 3.0), path) == ([1.0, 2.0, 3.0], 3)


def test_none_is_kept_and_failures_are_not(path):
    def some(completions):
        CALLS.append(list(completions))
        return [None, float("nan"), "x"][: len(completions)]

    assert score(some, path) == ([None, None, None], 0)
    CALLS.clear()
    score(some, path)
    assert CALLS == [["bb", "ccc"]]


def test_a_judges_failed_call_is_not_kept(path):
    class Judged(list):
        failed = {0: "the line is down"}  # noqa: RUF012

    def judge(completions):
        return Judged([None, *[0.5] * (len(completions) - 1)])

    judge.cacheable = True
    assert score(judge, path) == ([None, 0.5, 0.5], 0)
    assert score(judge, path)[1] == 2


def test_a_group_that_is_ranked_is_known_as_a_whole_only(path):
    def ranks(prompts, completions):
        pairs = list(zip(prompts, completions, strict=True))
        return [float(sum(p == prompt and c < text for p, c in pairs)) for prompt, text in pairs]

    ranks.whole_group = True
    reward = Reward(ranks, "r", by_sample=False)
    assert score(reward, path, ["b", "a", "x", "y"], list("ppqq")) == ([1.0, 0.0, 0.0, 1.0], 0)
    assert score(reward, path, ["a", "b", "x", "z"], list("ppqq")) == ([0.0, 1.0, 0.0, 1.0], 2)
    assert score(reward, path, ["y", "x", "a", "b"], list("qqpp")) == ([1.0, 0.0, 0.0, 1.0], 4)


def test_two_lambdas_of_one_line_are_two_rewards(path):
    one, two = lambda completions: [1.0] * len(completions), lambda completions: [2.0] * len(completions)
    assert score(one, path)[0] == [1.0] * 3 and score(two, path) == ([2.0] * 3, 0)
    assert score(one, path) == ([1.0] * 3, 3)


def test_parameters_belong_to_the_key(path):
    def below(completions, limit=5):
        return [float(len(text) < limit) for text in completions]

    two, three = functools.partial(below, limit=2), functools.partial(below, limit=3)
    assert score(two, path)[0] == [1.0, 0.0, 0.0]
    assert score(three, path) == ([1.0, 1.0, 0.0], 0) and score(functools.partial(below, limit=2), path)[1] == 3


def made(limit):
    def closes_over(completions):
        return [float(len(text) < limit) for text in completions]

    return closes_over


def test_what_a_function_closes_over_belongs_to_the_key(path):
    assert score(made(2), path)[0] == [1.0, 0.0, 0.0]
    assert score(made(3), path) == ([1.0, 1.0, 0.0], 0) and score(made(2), path)[1] == 3


class Band:
    def __init__(self, low):
        self.low = low

    def __call__(self, completions):
        return [float(len(text) > self.low) for text in completions]

    def turned(self, completions):
        return [float(len(text) <= self.low) for text in completions]


def test_the_state_of_an_object_belongs_to_the_key(path):
    assert score(Band(1), path)[0] == [0.0, 1.0, 1.0]
    assert score(Band(2), path) == ([0.0, 0.0, 1.0], 0) and score(Band(1), path)[1] == 3
    assert score(Band(1).turned, path) == ([1.0, 0.0, 0.0], 0)


def test_rewards_of_the_library_are_kept_with_their_parameters(path):
    assert why_not_kept(Reward(exact, "exact")) is None
    low, high = functools.partial(contains, ignore_case=True), functools.partial(contains, ignore_case=False)
    assert why_not_kept(Reward(low, "contains")) is None
    assert identity(Reward(low, "c")) != identity(Reward(high, "c")) != identity(Reward(exact, "e"))


# --- the source -------------------------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write modules and import them afresh."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = set()

    def write(**sources):
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
        made.update(sources)
        for name in made:
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        for cached in (reward_keys._sources, reward_keys._is_fixed, reward_keys._version):
            cached.cache_clear()  # as in a new process
        return {name: importlib.import_module(name) for name in sources}

    yield write
    for name in made:
        sys.modules.pop(name, None)


REWARD = (
    "from keyhelper import add\nLIMIT = {limit}\ndef f(completions):\n    return [add(LIMIT) for _ in completions]\n"
)
LATE = "def f(completions):\n    from keyhelper import add\n    return [add(1) for _ in completions]\n"


def test_a_change_of_the_source_or_of_a_module_that_it_imports_asks_again(module):
    def key(**sources):
        return identity(Reward(module(**sources)["keyreward"].f, "r"))

    helper, other = "def add(n):\n    return n + 1.0\n", "def add(n):\n    return n + 2.0\n"
    first = key(keyhelper=helper, keyreward=REWARD.format(limit=1))
    assert key(keyhelper=helper, keyreward=REWARD.format(limit=1)) == first
    assert key(keyhelper=helper, keyreward=REWARD.format(limit=2)) != first
    assert key(keyhelper=other, keyreward=REWARD.format(limit=1)) != first
    late = key(keyhelper=helper, keyreward=LATE)
    assert key(keyhelper=other, keyreward=LATE) != late


def test_the_values_that_a_function_reads_from_its_module_belong_to_the_key(module):
    found = module(keystate="LIMITS = {'n': 1}\ndef f(completions):\n    return [LIMITS['n']] * len(completions)\n")
    reward = Reward(found["keystate"].f, "r")
    first = identity(reward)
    found["keystate"].LIMITS["n"] = 2
    assert identity(reward) != first


COUNTS = """
import itertools, random
NUMBERS = itertools.count()
total = 0
seen = []

def counts(completions):
    global total
    total += 1
    return [float(total)] * len(completions)

def numbered(completions):
    return [float(next(NUMBERS)) for _ in completions]

def helped(completions):
    return counts(completions)

def from_file(completions):
    with open("limit.txt") as file:
        return [float(file.read())] * len(completions)
"""


@pytest.mark.parametrize("name", ["counts", "numbered", "helped"])
def test_a_reward_that_counts_is_not_kept(name, module):
    fn = getattr(module(keycounts=COUNTS)["keycounts"], name)
    assert why_not_kept(Reward(fn, "r")) is not None


def in_a_closure():
    total = 0

    def counts(completions):
        nonlocal total
        total += 1
        return [float(total)] * len(completions)

    return counts


def with_a_client():
    client = object()

    def asks(completions):
        return [float(bool(client))] * len(completions)

    return asks


def with_the_trainer(completions, trainer_state):
    return [float(trainer_state.global_step)] * len(completions)


def with_the_trainer_by_keyword(completions, **kwargs):
    return [float(kwargs["trainer_state"].global_step)] * len(completions)


def that_logs(completions, log_metric):
    log_metric("n", 1.0)
    return [1.0] * len(completions)


@pytest.mark.parametrize(
    ("reward", "why"),
    [
        (Reward(in_a_closure(), "r"), "a count or other state"),
        (Reward(with_a_client(), "r"), "it holds a object"),
        (Reward(with_the_trainer, "r"), "it reads trainer_state"),
        (Reward(with_the_trainer_by_keyword, "r"), "it reads trainer_state"),
        (Reward(that_logs, "r"), "it reads log_metric"),
        (Reward(length, "r", deterministic=False), "two calls with the same"),
        (Reward(length, "r", by_sample=False), "depends on the other answers"),
        (
            Reward(eval("lambda completions: [1.0] * len(completions)", {"__name__": "nowhere"}), "r"),
            "source of 'nowhere'",
        ),
        (Reward(Band(open(os.devnull)), "r"), "it holds a TextIOWrapper"),  # noqa: SIM115
        (Reward(functools.partial(length, object()), "r"), "it holds a object"),
    ],
)
def test_what_cannot_be_found_again_for_sure_is_not_kept(reward, why, path):
    assert why in why_not_kept(reward)
    score(reward, path, trainer_state=type("State", (), {"global_step": 1}), log_metric=lambda *_: None)
    assert score(reward, path, trainer_state=type("State", (), {"global_step": 1}), log_metric=lambda *_: None)[1] == 0


def test_a_reward_says_itself_whether_it_is_kept(path):
    def never(completions):
        return [1.0] * len(completions)

    class Judge:
        cacheable = True

        def __init__(self, model):
            self.client, self.cache_key = object(), f"judge {model}"

        async def __call__(self, completions):
            CALLS.append(list(completions))
            return [1.0] * len(completions)

    never.cacheable = False
    assert why_not_kept(Reward(never, "r")) == "it says so (cacheable)"
    assert score(Reward(Judge("m"), "r", deterministic=False), path) == ([1.0] * 3, 0)
    assert score(Reward(Judge("m"), "r", deterministic=False), path) == ([1.0] * 3, 3)
    assert score(Reward(Judge("n"), "r", deterministic=False), path) == ([1.0] * 3, 0)
    assert len(CALLS) == 6


@pytest.mark.parametrize(
    "value", [re.compile("a+"), frozenset({1, 2}), (1, "a"), {"a": [None, True]}, re, len, json.dumps]
)
def test_plain_values_patterns_modules_and_functions_can_be_told(value, path):
    reward = functools.partial(lambda completions, given: [1.0] * len(completions), given=value)
    assert why_not_kept(Reward(reward, "r")) is None
    assert identity(Reward(reward, "r")) == identity(Reward(reward, "r"))


def test_much_state_is_not_written_out_for_each_call():
    reward = functools.partial(lambda completions, given: [1.0] * len(completions), given=list(range(100_000)))
    assert why_not_kept(Reward(reward, "r")) == "it holds much state"


def test_a_key_is_made_quickly(path):
    score(length, path)
    begun = time.perf_counter()
    for _ in range(100):
        identity(Reward(length, "r"))
    assert time.perf_counter() - begun < 5  # about 0.03 s on an idle machine; it is made at every step


def test_functions_that_call_each_other_are_looked_at_once(module):
    names = [f"f{number}" for number in range(40)]
    source = "".join(
        f"def {name}(completions):\n    return {' or '.join(f'{n}([])' for n in names)}\n" for name in names
    )
    found = module(keyweb=source)["keyweb"]
    begun = time.perf_counter()
    assert why_not_kept(Reward(found.f0, "r")) in (None, "it holds much state")
    assert time.perf_counter() - begun < 20  # each way from one to another would take longer than the universe lasts
