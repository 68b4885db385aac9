"""An agent that is asked for structured output is asked so in its rollouts too, or it is said that it is not."""

import json
from typing import Any

import pytest
from praisonaiagents import Agent
from praisonaiagents.llm.openai_client import OpenAIClient
from pydantic import BaseModel

from praison_agent_rl.agent_rollouts.asking import AgentAsker
from praison_agent_rl.agent_rollouts.copies import RolloutPlace, check_copyable, rollout_copy
from praison_agent_rl.agent_rollouts.host import RolloutHost
from praison_agent_rl.agent_rollouts.jobs import Rollout, RolloutJob, RolloutOutcome, TokenCall
from praison_agent_rl.agent_rollouts.prompts import rows_to_ask
from praison_agent_rl.agent_rollouts.structured import WANTED, check_structured
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import AgentError, ConfigError
from praison_agent_rl.hosting import hosting_of
from praison_agent_rl.records import Call, Run
from praison_agent_rl.rollouts import Sampling
from praison_agent_rl.transcripts import read_runs
from tests.fakes import FakeServer, build_agent
from tests.rollout_stand_in import KEY, ScriptedEndpoint, job, says

PATHS = ("environment", "provider")  # one kind for each of the framework's two clients

pytestmark = pytest.mark.usefixtures("agents_around")


class Place(BaseModel):
    """Where something is."""

    answer: str
    score: int


class Placing(Agent):  # type: ignore[misc]
    """An agent that is asked for places, whoever asks."""

    def chat(self, prompt: str, **options: Any) -> Any:
        return super().chat(prompt, **{"output_pydantic": Place, **options})


def placing(kind: str, url: str) -> Any:
    agent = build_agent(kind, url, name="placing", tools=[])
    agent.__class__ = Placing
    return agent


def requests_of(agent: Any, server: FakeServer, **options: Any) -> list[dict[str, Any]]:
    """What an agent sends."""
    before = len(server.requests)
    agent.chat("STRUCT", **options)
    return server.requests[before:]


@pytest.mark.parametrize("kind", PATHS)
def test_a_class_that_asks_for_it_is_copied_and_its_answer_is_json(kind: str, server_a: FakeServer) -> None:
    said = {"answer": "here", "score": 7}
    (production,) = requests_of(
        build_agent(kind, server_a.url, name="placing", tools=[]), server_a, output_pydantic=Place
    )
    with ScriptedEndpoint(lambda asked: says(f"```json\n{json.dumps(said)}\n```"), [job("j1", "STRUCT")]) as endpoint:
        host = RolloutHost(placing(kind, server_a.url))
        host.follow(endpoint.address, KEY)
        outcome = endpoint.ended(1)["j1"]
        host.close()
    assert json.loads(outcome["output"]) == said and outcome["error"] is None
    assert [asked.body["messages"] for asked in endpoint.asked] == [production["messages"]]
    assert WANTED in str(production["messages"][-1]["content"]) and "answer" in production["messages"][0]["content"]


@pytest.mark.parametrize("kind", PATHS)
def test_an_answer_that_is_no_such_object_is_given_as_it_is(kind: str, server_a: FakeServer) -> None:
    with ScriptedEndpoint(lambda asked: says("nowhere"), [job("j1", "STRUCT")]) as endpoint:
        host = RolloutHost(placing(kind, server_a.url))
        host.follow(endpoint.address, KEY)
        outcome = endpoint.ended(1)["j1"]
        host.close()
    assert (outcome["output"], outcome["error"]) == ("nowhere", None)


def test_a_method_that_was_set_on_the_object_alone_is_refused(server_a: FakeServer) -> None:
    agent = build_agent("environment", server_a.url)
    agent.chat = lambda prompt: "mine"
    with pytest.raises(AgentError, match="'helper' has chat=: it was set on this object"):
        check_copyable(agent)


# --- recorded runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("given", ["output_pydantic", "output_json"])
def test_recorded_runs_show_that_it_was_asked_for(kind: str, given: str, server_a: FakeServer) -> None:
    agent = build_agent(kind, server_a.url, tools=[])
    with agent.record():
        agent.chat("STRUCT", **{given: Place})
        agent.chat("plain")
    runs = list(read_runs())
    with pytest.raises(ConfigError, match=r"1 of 2 recorded runs of agent 'helper' .*docs/agents.md.*parity: allow"):
        check_structured(agent, runs)
    check_structured(agent, runs, allowed=True)
    check_structured(build_agent(kind, server_a.url, name="another", tools=[]), runs)
    agent.__class__ = Placing
    check_structured(agent, runs)


def test_it_is_said_with_all_else_that_is_wrong_and_can_be_allowed(server_a: FakeServer) -> None:
    agent = build_agent("environment", server_a.url)
    with agent.record():
        agent.chat("STRUCT", output_json=Place)
    with pytest.raises(ConfigError) as told:
        hosting_of(agent, TrainConfig(rollout="agent"))
    first, second = str(told.value).splitlines()
    assert "'add' would really run" in first and "1 of 1 recorded runs of agent 'helper'" in second
    assert hosting_of(agent, TrainConfig(rollout="agent", run_tools=True, parity="allow")).agent is agent


def a_run(**settings: Any) -> Run:
    call = Call(id="c", time=0.0, messages=[{"role": "user", "content": "Where?"}], settings=settings)
    return Run(id="r", agent="helper", time=0.0, calls=[call])


def test_a_response_format_of_the_model_itself_is_sent_by_copies_too(server_a: FakeServer) -> None:
    form = {"type": "json_object"}
    with pytest.raises(ConfigError, match="structured output"):
        check_structured(build_agent("dict", server_a.url), [a_run(response_format=form)])
    model = {"model": "openai/m1", "base_url": server_a.url, "api_key": "k", "response_format": form}
    agent = Agent(name="helper", instructions="x", llm=model, rules=False)
    check_structured(agent, [a_run(response_format=form)])
    with ScriptedEndpoint(lambda asked: says("{}")) as endpoint:
        rollout_copy(agent, RolloutPlace(endpoint.address, KEY, "j1")).chat("hello")
    assert endpoint.asked[0].body["response_format"] == form


@pytest.mark.parametrize("form", [None, {}, {"type": "text"}])
def test_a_response_format_that_asks_for_nothing_is_no_structured_output(form: Any, server_a: FakeServer) -> None:
    check_structured(build_agent("dict", server_a.url), [a_run(response_format=form), a_run()])


def test_what_the_framework_puts_behind_a_prompt_is_not_asked_twice() -> None:
    messages = [{"role": "user", "content": f"Where?{WANTED}"}]
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi."}]
    twice = [{"role": "user", "content": "Where?"}, *messages]
    rows = rows_to_ask([{"prompt": messages}, {"prompt": [*history, *twice]}, {"prompt": f"Where?{WANTED}"}]).rows
    assert [row["prompt"] for row in rows] == ["Where?", "Where?", f"Where?{WANTED}"]
    assert rows[1]["history"] == history


def texts(*parts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in parts]


@pytest.mark.parametrize("wanted", range(3), ids=["first part", "second part", "third part"])
def test_it_is_seen_and_taken_away_behind_any_part_of_a_prompt(wanted: int, server_a: FakeServer) -> None:
    """The framework puts it behind the first part of text, and writes it into the part that both turns share."""
    said = ["Where?", " Here", " or there?"]
    content = texts(*(text + WANTED * (place == wanted) for place, text in enumerate(said)))
    twice = [{"role": "user", "content": content}] * 2
    (row,) = rows_to_ask([{"prompt": twice}]).rows
    assert row == {"prompt": "Where? Here or there?"}
    call = Call(id="c", time=0.0, messages=twice)
    with pytest.raises(ConfigError, match="structured output"):
        check_structured(build_agent("dict", server_a.url), [Run(id="r", agent="helper", time=0.0, calls=[call])])


def test_the_framework_puts_it_behind_the_first_part_of_a_prompt() -> None:
    client = OpenAIClient(api_key="k", base_url="http://127.0.0.1:9/v1")
    messages, _ = client.build_messages(texts("Where?", "Here?"), output_pydantic=Place)
    assert messages[-1] == {"role": "user", "content": texts(f"Where?{WANTED}", "Here?")}


# --- what is asked of the policy --------------------------------------------------------------------------------------


class Endpoint:
    """Has rollouts, whoever asks."""

    def __init__(self, *settings: dict[str, Any]) -> None:
        self.settings = settings

    def run(self, jobs: Any, draw: Any, sampling: Any, **_: Any) -> list[Rollout]:
        outcome = RolloutOutcome(id="j", output="x")
        calls = [
            TokenCall(call=Call(id="c", time=0.0, messages=[], settings=sent), agent="solo", prompt_ids=[1])
            for sent in self.settings
        ]
        return [Rollout(job=RolloutJob(id="j", prompt="q", seconds=1.0), outcome=outcome, calls=calls)]


def test_what_is_asked_for_and_not_done_is_said_once() -> None:
    told: list[str] = []
    asked: Any = Endpoint(
        {"tool_choice": "auto", "temperature": 0.3},
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        {"response_format": {"type": "json_schema"}, "tool_choice": "required"},
    )
    asker = AgentAsker(asked, "solo", 1.0, tell=told.append)
    for _ in range(2):
        asker.ask([{"prompt": "q"}], lambda prompts, sampling: None, Sampling(8))  # type: ignore[arg-type,return-value]
    assert sorted(text.partition(":")[0] for text in told) == [
        "the agent asks for response_format json_schema",
        "the agent asks for tool_choice 'required'",
    ]


def test_agents_that_ask_for_nothing_special_are_told_nothing() -> None:
    asked: Any = Endpoint(
        {},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"response_format": None},
        {"response_format": {"type": "text"}},
    )
    told: list[str] = []
    AgentAsker(asked, "solo", 1.0, tell=told.append).ask([{"prompt": "q"}], None, Sampling(8))  # type: ignore[arg-type]
    assert told == []
