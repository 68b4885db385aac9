"""A share of an agent's runs goes to a candidate, the records say which, and the two are judged by what they say."""

import asyncio
import gc
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import praison_agent_rl as rl
from praison_agent_rl import registry
from praison_agent_rl.canary import candidate_of, compare_recorded
from praison_agent_rl.capture.routes import CANARY, Canary
from praison_agent_rl.cli import app
from praison_agent_rl.errors import ConfigError, DataError, RewardError, ServerFailed
from praison_agent_rl.intervals import unpaired_interval
from praison_agent_rl.publishing import publish_version
from praison_agent_rl.records import PlannedReward, Pointer
from praison_agent_rl.runs import write_record
from praison_agent_rl.swap import Route
from praison_agent_rl.transcripts import TranscriptWriter, feedback, read_runs
from tests.fakes import FakeServer, FakeStart, build_agent
from tests.finished_runs import finished_run, weights_in

KINDS = ("environment", "provider", "dict", "hosted_vllm", "bare", "finished", "subclass", "responses")
NAME = "helper"
WAYS: dict[str, Callable[[Any], Any]] = {
    "chat with a tool": lambda agent: agent.chat("TOOL"),
    "chat streaming": lambda agent: agent.chat("hello", stream=True),
    "start streaming": lambda agent: "".join(agent.start("TOOL", stream=True)),
    "run": lambda agent: agent.run("TOOL"),
    "iter_stream": lambda agent: "".join(agent.iter_stream("TOOL")),
    "achat with a tool": lambda agent: asyncio.run(agent.achat("TOOL")),
    "achat streaming": lambda agent: asyncio.run(agent.achat("hello", stream=True)),
    "astart": lambda agent: asyncio.run(agent.astart("TOOL")),
}


@pytest.fixture(autouse=True)
def environment(agents_around: None) -> Iterator[None]:
    from praison_agent_rl import capture

    yield
    for recording in capture.recordings.open_recordings():
        recording.stop()


@pytest.fixture
def home(in_tmp: Path) -> Path:
    return in_tmp / ".praisonai" / "rl"


@pytest.fixture
def start() -> Iterator[FakeStart]:
    with FakeStart() as starting:
        yield starting


@pytest.fixture
def two(home: Path, in_tmp: Path) -> Path:
    """The home of an agent with v1, which is current, and v2."""
    base = weights_in(in_tmp / "base", b"the base")
    for number in range(2):
        publish_version(home, NAME, finished_run(home / "runs" / str(number), base, agent=NAME))
    registry.promote(home, NAME, "v1")
    return home


def build(kind: str, server: FakeServer, **options: Any) -> Any:
    if kind != "responses":
        return build_agent(kind, server.url, **options)
    return build_agent("provider", server.url, llm="openai/gpt-4o-mini", **options)


def speaker(answer: object) -> str:
    found = re.search(r"\[(\w)\|([^\]]+)\]", str(answer))
    return f"{found[1]} {found[2]}" if found else repr(answer)


def v(number: int) -> str:
    return f"{number} rl-helper-v{number}"


def settings(request: dict[str, Any]) -> dict[str, Any]:
    # litellm reads a Responses stream of a model that it does not know as one whole answer
    apart = ("model", "stream") if "input" in request else ("model",)
    return {key: value for key, value in request.items() if key not in apart}


# --- where the runs go ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_the_canary_is_sent_to_the_candidate_as_it_would_have_been_sent(kind, way, server_a, home, two, start):
    registry.rollback(home, NAME)  # what it was built with is the stable one
    with FakeServer("C"):
        asked = build(kind, server_a)
        WAYS[way](asked)
        expected = list(server_a.requests)
        server_a.requests.clear()
        agent = build(kind, server_a)
        rl.attach(agent, canary=1.0, candidate="v2", start=start)
        assert speaker(WAYS[way](agent)) == v(2)
    assert server_a.requests == []
    got = start.of("v2").fake
    assert [settings(request) for request in got.requests] == [settings(request) for request in expected]
    assert set(got.keys) == {"Bearer key-rl-helper-v2"}
    assert {request["model"] for request in got.requests} == {"rl-helper-v2"}


@pytest.mark.parametrize("kind", ["environment", "provider"])
def test_the_share_of_runs_without_a_session_is_met(kind, server_a, two, start):
    agent = build(kind, server_a)
    rl.attach(agent, canary=0.3, candidate="v2", start=start)
    answers = []
    for _ in range(200):
        answers.append(speaker(agent.chat("hello")))
        agent.clear_history()
    share = answers.count(v(2)) / 200
    assert set(answers) == {v(1), v(2)}
    assert 0.3 - 4 * 0.0324 < share < 0.3 + 4 * 0.0324  # sqrt(0.3 * 0.7 / 200) is 0.0324


def test_the_share_of_sessions_is_met_and_another_candidate_gets_others():
    routes = [Route(f"rl-helper-v{number}", "http://x/v1", "k") for number in (1, 2, 3)]
    second, third = Canary(routes[0], routes[1], 0.1), Canary(routes[0], routes[2], 0.1)
    sessions = [f"session-{number}" for number in range(20_000)]
    taken = {session for session in sessions if second.takes(session)}
    assert 0.1 - 4 * 0.00212 < len(taken) / 20_000 < 0.1 + 4 * 0.00212
    assert taken == {session for session in sessions if second.takes(session)}
    larger = Canary(routes[0], routes[1], 0.2)
    assert taken <= {session for session in sessions if larger.takes(session)}
    both = sum(third.takes(session) for session in taken) / len(taken)
    assert both < 0.2  # as one in ten, not as all
    assert not Canary(None, routes[1], 0.0).takes("x") and Canary(None, routes[1], 1.0).takes("x")


def test_a_session_stays_where_it_began_and_its_records_say_where(server_a, two, start):
    recording = rl.record(NAME)
    answers: dict[str, set[str]] = {}
    for number in range(12):
        for _ in range(2):  # as if the service had started anew
            agent = build("environment", server_a)
            agent._session_id = f"s{number}"
            rl.attach(agent, canary=0.5, candidate="v2", start=start)
            answers.setdefault(f"s{number}", set()).update(speaker(agent.chat(text)) for text in ("one", "TOOL two"))
    recording.stop()
    assert all(len(said) == 1 for said in answers.values())
    assert {said for both in answers.values() for said in both} == {v(1), v(2)}
    for run in read_runs():
        assert answers[str(run.session)] == {speaker(run.output)}
        assert run.version == speaker(run.output).split()[1]
        assert run.calls and {call.version for call in run.calls} == {run.version}
        assert {str(call.model) for call in run.calls} == {run.version}


def test_concurrent_turns_on_one_agent_are_each_of_one_version(server_a, two, start):
    recording = rl.record(NAME)
    agent = build("provider", server_a)
    rl.attach(agent, canary=0.5, candidate="v2", start=start)
    with ThreadPoolExecutor(8) as pool:
        said = [speaker(answer) for answer in pool.map(lambda n: agent.chat(f"TOOL {n}"), range(64))]

    async def together() -> list[str]:
        return [speaker(answer) for answer in await asyncio.gather(*(agent.achat(f"TOOL {n}") for n in range(32)))]

    said += asyncio.run(together())
    recording.stop()
    assert set(said) == {v(1), v(2)}
    runs = list(read_runs())
    assert len(runs) == 96
    for run in runs:
        assert {call.version for call in run.calls} == {run.version} == {speaker(run.output).split()[1]}
        assert len(run.calls) >= 2


def test_a_canary_that_nobody_records_is_said_and_one_that_is_recorded_is_not(server_a, two, start, caplog):
    agent = build("environment", server_a)
    with caplog.at_level(logging.WARNING):
        rl.attach(agent, canary=0.5, candidate="v2", start=start)
    assert "agent 'helper' is not recorded" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING), rl.record(agent):
        rl.attach(agent, canary=0.5, candidate="v2", start=start)
    assert caplog.text == ""


# --- which version is tried, and until when -------------------------------------------------------------------------


def pointer(version: str | None, changed: str, *previous: str | None) -> Pointer:
    return Pointer(version=version, previous=list(previous), changed=changed, by="promote")


def test_the_newest_version_made_since_the_last_decision_is_tried(two):
    made = registry.read_version(two, NAME, "v2").created
    before, after = "2000-01-01T00:00:00+00:00", "2100-01-01T00:00:00+00:00"
    assert before < made < after
    assert candidate_of(two, NAME, None, wanted=None).name == "v2"
    assert candidate_of(two, NAME, pointer("v1", before), wanted=None).name == "v2"
    assert candidate_of(two, NAME, pointer("v2", before), wanted=None) is None  # it answers already
    assert candidate_of(two, NAME, pointer("v1", after, "v2"), wanted=None) is None  # it was there and was taken back
    assert candidate_of(two, NAME, pointer("v2", after), wanted="v1").name == "v1"
    assert candidate_of(two, NAME, pointer("v1", after), wanted="v1") is None
    assert candidate_of(two, "nobody", None, wanted=None) is None


@pytest.mark.parametrize("decision", ["promote", "rollback"])
def test_a_decision_ends_the_canary_also_for_a_service_that_starts_afterwards(decision, server_a, two, start):
    agent = build("environment", server_a)
    attached = rl.attach(agent, canary=1.0, candidate="v2", watch=0.02, start=start)
    assert speaker(agent.chat("hello")) == v(2) and attached.candidate == "v2"
    if decision == "promote":
        registry.promote(two, NAME, "v2")
    else:
        registry.rollback(two, NAME)
    deadline = time.monotonic() + 20
    while attached.candidate and time.monotonic() < deadline:
        time.sleep(0.01)
    expected = v(2) if decision == "promote" else "A m1"
    assert attached.candidate is None and CANARY not in vars(agent)
    assert {speaker(agent.chat("hello")) for _ in range(5)} == {expected}
    attached.stop()
    later = build("environment", server_a)
    rl.attach(later, canary=1.0, start=start)
    assert {speaker(later.chat("hello")) for _ in range(5)} == {expected}


def test_the_first_promotion_of_all_ends_a_canary(server_a, home, in_tmp, start):
    base = weights_in(in_tmp / "base", b"the base")
    for number in range(2):
        publish_version(home, NAME, finished_run(home / "runs" / str(number), base, agent=NAME))
    agent = build("environment", server_a)
    attached = rl.attach(agent, canary=1.0, candidate="v1", start=start)
    attached.refresh()
    assert speaker(agent.chat("hello")) == v(1)  # neither the first look nor one that sees nothing new ends it
    registry.promote(home, NAME, "v2")
    attached.refresh()
    assert attached.candidate is None and {speaker(agent.chat("hello")) for _ in range(5)} == {v(2)}


def test_only_a_version_that_passed_the_gate_is_tried_by_itself(server_a, two, in_tmp, start):
    write_record(registry.pointer_file(two, NAME), pointer("v1", "2000-01-01T00:00:00+00:00"))
    run = finished_run(two / "runs" / "no better", in_tmp / "base", agent=NAME, difference=0.0)
    assert publish_version(two, NAME, run).name == "v3"
    attached = rl.attach(build("environment", server_a), canary=1.0, start=start)
    assert attached.candidate == "v2"
    named = rl.attach(build("environment", server_a), canary=1.0, candidate="v3", start=start)
    assert named.candidate == "v3"


def test_a_canary_can_be_ended_alone(server_a, two, start):
    agent = build("environment", server_a)
    attached = rl.attach(agent, canary=1.0, candidate="v2", start=start)
    attached.end_canary()
    assert speaker(agent.chat("hello")) == v(1)
    attached.refresh()
    assert speaker(agent.chat("hello")) == v(1)


def test_a_version_made_later_is_tried_by_a_watching_agent(server_a, two, start, in_tmp):
    write_record(registry.pointer_file(two, NAME), pointer("v1", "2000-01-01T00:00:00+00:00"))
    agent = build("environment", server_a)
    attached = rl.attach(agent, canary=1.0, watch=0.02, start=start)
    assert attached.candidate == "v2"
    publish_version(two, NAME, finished_run(two / "runs" / "later", in_tmp / "base", agent=NAME))
    deadline = time.monotonic() + 20
    while attached.candidate != "v3" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert speaker(agent.chat("hello")) == v(3)
    attached.stop()


def test_a_candidate_that_cannot_be_served_leaves_the_current_version_alone(server_a, two, start, caplog):
    start.failing = {"rl-helper-v2"}
    agent = build("environment", server_a)
    with pytest.raises(ServerFailed):
        rl.attach(agent, canary=0.5, candidate="v2", start=start)
    assert speaker(agent.chat("hello")) == "A m1"
    with caplog.at_level(logging.WARNING):
        attached = rl.attach(agent, start=start)
        attached.share, attached._wanted = 0.5, "v2"
        attached.watch(0.02)
        deadline = time.monotonic() + 20
        while "told not to come up" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    assert speaker(agent.chat("hello")) == v(1) and attached.watching
    attached.stop()


def test_nothing_to_try_is_said(server_a, two, start, caplog):
    registry.promote(two, NAME, "v2")
    agent = build("environment", server_a)
    with caplog.at_level(logging.WARNING):
        attached = rl.attach(agent, canary=0.5, start=start)
    assert "no version to try" in caplog.text and attached.candidate is None


def test_a_candidate_whose_server_died_is_started_again(server_a, two, start):
    agent = build("environment", server_a)
    attached = rl.attach(agent, canary=1.0, candidate="v2", start=start)
    start.of("v2").stop()
    attached.refresh()
    assert speaker(agent.chat("hello")) == v(2) and start.names == ["v1", "v2", "v2"]


def test_an_agent_is_let_go_with_its_canary(server_a, two, start):
    import weakref

    agent = build("environment", server_a)
    rl.attach(agent, canary=0.5, candidate="v2", start=start)
    agent.chat("hello")
    gone = weakref.ref(agent)
    del agent
    gc.collect()
    assert gone() is None


# --- what the records say -------------------------------------------------------------------------------------------


class Told:
    """Writes runs into a store as if they had been recorded."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self._writer = TranscriptWriter(store, redact=None)
        self._count = 0

    def run(
        self, version: str | None, output: Any, *, session: str | None = None, error: str | None = None,
        score: float | None = None, agent: str = NAME, prompt: Any = "How many?",
    ) -> None:  # fmt: skip
        self._count += 1
        run = f"{self._count:016x}"
        begun = {"run": run, "agent": agent, "parent": None, "session": session, "tags": [], "style": "chat"}
        self._writer.begin({**begun, "prompt": prompt, "time": 1000.0 + self._count, "version": version})
        self._writer.end(run, output=output, error=error, seconds=0.1)
        if score is not None:
            feedback(run, score=score, store=self.store)

    def close(self) -> Path:
        self._writer.close()
        return self.store


def words(completions, **_):
    """As many points as words."""
    return [float(len(completion.split())) for completion in completions]


def asked_for_it(prompts, completions, **_):
    """A point where the answer repeats the question's last word."""
    last = [prompt.split()[-1] for prompt in prompts]
    return [float(word in completion) for word, completion in zip(last, completions, strict=True)]


def needs_answer(completions, answer, **_):
    return [1.0 for _ in completions]


@pytest.fixture
def told(in_tmp: Path) -> Told:
    return Told(in_tmp / "store")


def test_two_versions_are_compared_by_rewards_and_by_feedback_over_sessions(told):
    outputs = {"rl-helper-v1": [1, 2, 2, 3, 1, 2, 2, 1, 3, 2], "rl-helper-v2": [4, 5, 4, 6, 5, 4, 5, 4, 6, 5]}
    for version, lengths in outputs.items():
        for number, length in enumerate(lengths):
            told.run(version, "w " * length, session=f"{version}-{number // 2}" if number < 4 else None, score=length)
    told.run("rl-helper-v2", None, error="RuntimeError: down", score=-9.0)
    told.run("rl-helper-v3", "other version")
    told.run("rl-helper-v2", "other agent", agent="helper-2")
    result = compare_recorded(told.close(), NAME, "v1", "v2", reward_funcs=[words])
    # v1: 2 sessions of two runs and 6 runs alone; its words are 19 in 10 runs, v2's 48
    assert (result.a.runs, result.a.clusters, result.a.errors, result.a.rated) == (10, 8, 0, 10)
    assert (result.b.runs, result.b.clusters, result.b.errors, result.b.rated) == (11, 9, 1, 11)
    by_words = result.rewards["words"]
    assert (by_words.base, by_words.new) == (pytest.approx(1.9), pytest.approx(4.8))
    clusters = [0, 0, 1, 1, *range(2, 8)]
    expected = unpaired_interval(
        np.array(outputs["rl-helper-v1"], float),
        np.array(outputs["rl-helper-v2"], float),
        clusters_a=clusters,
        clusters_b=clusters,
    )
    assert by_words == expected and result.total == expected and by_words.low > 0
    assert result.feedback is not None and result.feedback.new == pytest.approx((48 - 9) / 11)
    assert result.better is (result.feedback.high >= 0)
    text = str(result)
    assert "v2 against v1" in text and "11 runs in 9 sessions, 1 of them failed, 11 rated" in text
    assert "reward words: 1.9 -> 4.8" in text


def test_few_sessions_or_no_difference_show_nothing(told):
    for version in ("rl-helper-v1", "rl-helper-v2"):
        for number in range(20):
            told.run(version, "w " * (1 + number % 2 + (version[-1] == "2")), session=f"{version}{number % 3}")
    few = compare_recorded(told.close(), NAME, "v1", "v2", reward_funcs=[words])
    assert few.b.clusters == 3 and few.rewards["words"].difference == pytest.approx(1.0)
    assert not few.better and "v2 is not shown to be better" in str(few)
    told.run("rl-helper-v4", "w", score=1)
    told.run("rl-helper-v5", "w")
    alone = compare_recorded(told.close(), NAME, "v4", "v5", reward_funcs=[words])
    assert alone.feedback is None and not alone.better


def tell_pair(told: Told, number: int, *, scores: tuple[float | None, float | None] = (None, None), **new: Any) -> None:
    """A run of each version, of one word and of three."""
    told.run("rl-helper-v1", "w", score=scores[0])
    told.run("rl-helper-v2", **{"output": "w w w", "score": scores[1], **new})


def test_a_number_that_few_sessions_have_shows_nothing_however_many_there_are(told):
    for number in range(12):
        tell_pair(told, number, scores=(0, 1) if number < 2 else (None, None))
    by_few = compare_recorded(told.close(), NAME, "v1", "v2")
    assert by_few.b.clusters == 12 and by_few.b.rated_clusters == 2 and by_few.feedback.low > 0
    assert not by_few.better and "feedback is known of 2 sessions of one side, and 8 are needed" in str(by_few)
    by_many = compare_recorded(told.store, NAME, "v1", "v2", reward_funcs=[words])
    assert by_many.better and str(by_many).endswith("v2 is better")  # few ratings are nothing against it


@pytest.mark.parametrize(("runs", "failing"), [(12, 10), (120, 100)])
def test_a_version_that_fails_more_often_is_not_better_by_the_rest(told, runs, failing):
    for number in range(runs):
        tell_pair(told, number, **({"output": None, "error": "RuntimeError: down"} if number < failing else {}))
    result = compare_recorded(told.close(), NAME, "v1", "v2", reward_funcs=[words])
    assert result.total.low > 0 and result.failed.low > 0 and not result.better
    assert f"v2 fails more often: {failing} of {runs} runs, where v1 fails in 0 of {runs} runs" in str(result)


def test_a_gain_that_a_few_failures_could_undo_is_not_believed_and_a_larger_one_is(told):
    for number in range(30):
        failed = {"output": None, "error": "RuntimeError: down"} if number < 2 else {}
        told.run("rl-helper-v1", "w " * (19 + number % 3))
        told.run("rl-helper-v2", **{"output": "w " * (20 + number % 3), **failed})
    told.run("rl-helper-v1", "w")  # the worst that is seen
    told.run("rl-helper-v3", None, error="RuntimeError: down")
    for number in range(30):
        told.run("rl-helper-v3", "w " * (40 + number % 3))
    small = compare_recorded(told.close(), NAME, "v1", "v2", reward_funcs=[words])
    # 28 runs of 21 words on average (597 in all, less the two that failed), and 2 that count as one word
    assert small.failed.low <= 0 and small.total_at_worst.new == pytest.approx((28 * small.total.new + 2) / 30)
    assert not small.better
    large = compare_recorded(told.store, NAME, "v1", "v3", reward_funcs=[words])
    assert large.b.errors == 1 and large.total_at_worst.low > 0 and large.better


def only_of_good_ones(completions, **_):
    """NaN for an answer of three words; else as many points as words."""
    counts = [len(completion.split()) for completion in completions]
    return [float("nan") if count == 3 else float(count) for count in counts]


def test_missing_scores_are_shown_and_are_no_way_to_be_better(told):
    for number in range(24):
        tell_pair(told, number, output="w w w" if number < 14 else "w w")
    result = compare_recorded(told.close(), NAME, "v1", "v2", reward_funcs=[only_of_good_ones])
    assert (result.a.unscored, result.b.unscored, result.b.scored_clusters) == (0, 14, 10)
    assert result.total.low > 0 and not result.better
    assert "v2: 24 runs in 24 sessions, 14 without a score, 0 rated" in str(result)
    assert "v2 has no score more often: in 14 of 24 runs" in str(result)


def test_the_number_that_one_of_two_rewards_lacks_counts_as_its_worst(told):
    for number in range(20):
        tell_pair(told, number, output="w w w" if number < 3 else "w w")
    result = compare_recorded(told.close(), NAME, "v1", "v2", reward_funcs=[words, only_of_good_ones])
    # v2: 3 runs of 3 words, whose second number counts as 1; 17 runs of 2 words
    assert result.total_at_worst.new == pytest.approx((3 * (3 + 1) + 17 * (2 + 2)) / 20)
    assert result.total.new == pytest.approx((3 * 3 + 17 * 4) / 20) and result.b.unscored == 3 and result.better


def test_a_failed_run_that_nobody_rated_counts_as_the_worst_rating(told):
    for number in range(20):
        failed = {"output": None, "error": "RuntimeError: down", "score": None} if number < 2 else {}
        tell_pair(told, number, scores=(0.8 + number % 2 / 10, 0.9 + number % 2 / 10), **failed)
    told.run("rl-helper-v1", "w", score=0.0)
    result = compare_recorded(told.close(), NAME, "v1", "v2")
    assert result.feedback_at_worst.new == pytest.approx(18 * result.feedback.new / 20)
    assert not result.better


def test_a_loss_by_feedback_is_not_made_up_for_by_a_reward(told):
    for version in ("rl-helper-v1", "rl-helper-v2"):
        for number in range(12):
            new = version[-1] == "2"
            told.run(version, "w " * (1 + number % 2 + 3 * new), score=number % 2 - 3 * new)
    result = compare_recorded(told.close(), NAME, "v1", "v2", reward_funcs=[words])
    assert result.rewards["words"].low > 0 and result.feedback is not None and result.feedback.high < 0
    assert not result.better


def test_the_model_that_the_agent_was_built_with_can_be_one_of_the_two(told):
    for version in (None, "rl-helper-v1"):
        for number in range(10):
            told.run(version, f"I say x{number}", prompt=f"Say x{number if version else number + 1}")
    result = compare_recorded(told.close(), NAME, "base", "v1", reward_funcs=[asked_for_it])
    assert (result.rewards["asked_for_it"].base, result.rewards["asked_for_it"].new) == (0.0, 1.0)
    assert result.better


def test_by_default_the_rewards_are_those_that_the_version_was_trained_by(told, two, in_tmp):
    here = __name__
    planned = [
        PlannedReward(spec=f"{here}:words", name="words", weight=0.5, prompts="text", completions="text"),
        PlannedReward(spec=f"{here}:needs_answer", name="needs_answer", weight=1, prompts="text", completions="text"),
    ]
    run = finished_run(two / "runs" / "rewarded", in_tmp / "base", agent=NAME, rewards=planned)
    assert publish_version(two, NAME, run).name == "v3"
    for version in ("rl-helper-v2", "rl-helper-v3"):
        for number in range(9):
            told.run(version, "w " * (number + int(version[-1])))
    result = compare_recorded(told.close(), NAME, "v2", "v3", home=two)
    assert list(result.rewards) == ["words"] and result.rewards["words"].difference == pytest.approx(1.0)
    assert result.total is not None and result.total.difference == pytest.approx(0.5)
    assert any("needs_answer is left out" in note and "'answer'" in note for note in result.notes)
    shown = CliRunner().invoke(
        app, ["versions", "compare", NAME, "v2", "v3", "--from-transcripts", "--store", str(told.store)]
    )
    assert shown.exit_code == 0 and "reward words: 6 -> 7" in shown.output


def test_what_cannot_be_compared_is_said(told, in_tmp):
    told.run("rl-helper-v1", "one")
    store = told.close()
    with pytest.raises(DataError, match="was answered by 'v2'"):
        compare_recorded(store, NAME, "v1", "v2")
    with pytest.raises(ConfigError, match="with itself"):
        compare_recorded(store, NAME, "v1", "v1")
    told.run("rl-helper-v2", "one")
    with pytest.raises(RewardError, match="needs the column 'answer'"):
        compare_recorded(told.close(), NAME, "v1", "v2", reward_funcs=[needs_answer])
    with pytest.raises(DataError):
        compare_recorded(in_tmp / "nowhere", NAME, "v1", "v2")


def test_a_whole_canary_from_the_first_run_to_the_decision(server_a, two, start):
    agent = build("provider", server_a)
    recording = rl.record(agent)
    attached = rl.attach(agent, canary=0.5, candidate="v2", watch=0.02, start=start)
    lock = threading.Lock()

    def ask(number: int) -> None:
        answer = agent.chat(f"question {number}")
        with lock:
            run = next(run for run in read_runs() if run.output == answer)
        feedback(run, score=1.0 if speaker(answer) == v(2) else 0.0)

    for number in range(40):
        ask(number)
        agent.clear_history()
    recording.stop()
    result = compare_recorded(recording.store, NAME, "v1", "v2")
    assert result.a.runs + result.b.runs == 40 and min(result.a.runs, result.b.runs) > 5
    assert result.feedback is not None and (result.feedback.base, result.feedback.new) == (0.0, 1.0)
    assert result.better
    registry.promote(two, NAME, "v2")
    deadline = time.monotonic() + 20
    while attached.version != "v2" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert speaker(agent.chat("hello")) == v(2)
    attached.stop()
