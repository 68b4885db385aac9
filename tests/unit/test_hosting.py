"""What is wrong with an agent that is to make rollouts is said at once; a run that is gone on with finds its agent."""

from pathlib import Path
from typing import Any

import pytest
from praisonaiagents import Agent

from praison_agent_rl.agent_rollouts.tools import pure
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import AgentError, ConfigError
from praison_agent_rl.hosting import hosting_of, named_agent
from praison_agent_rl.improvement import resume_run
from praison_agent_rl.problems import Problems
from tests.finished_runs import finished_run, weights_in

pytestmark = pytest.mark.usefixtures("agents_around")


@pure
def size_of(thing: str) -> str:
    """How big a thing is."""
    return thing


def book(room: str) -> str:
    """Book a room."""
    return room


def an_agent(name: str = "Front", model: str = "m1", **options: Any) -> Agent:
    given = {"model": f"openai/{model}", "base_url": "http://127.0.0.1:9/v1", "api_key": "k"}
    return Agent(name=name, instructions="Help.", llm=given, rules=False, **options)


def config(**keys: Any) -> TrainConfig:
    return TrainConfig(rollout="agent", **keys)


def test_one_problem_stays_of_its_kind_however_often_it_is_found_and_several_are_told_once_each() -> None:
    problems, first = Problems(), AgentError("no agent")
    problems.raise_all()
    problems.found += [first, AgentError("no agent")]
    with pytest.raises(AgentError) as told:
        problems.raise_all()
    assert told.value is first
    problems.found += [ConfigError("no key"), AgentError("no agent")]
    with pytest.raises(ConfigError, match=r"^no agent\nno key$"):
        problems.raise_all()


def test_an_agent_on_another_model_cannot_be_trained_and_that_is_said_beforehand() -> None:
    front = an_agent(handoffs=[an_agent("Same"), an_agent("Other", model="m2")])
    assert hosting_of(front, config(train_agents=["Front", "Same"])).agent is front
    with pytest.raises(AgentError, match=r"train_agents names 'Other'.*model answers are 'Front', 'Same'"):
        hosting_of(front, config(train_agents=["Same", "Other"]))


def test_what_is_wrong_with_agents_and_with_tools_is_said_at_once() -> None:
    agent = an_agent(tools=[book, size_of])
    with pytest.raises(ConfigError) as told:
        hosting_of(agent, config(train_agents=["Nobody"]))
    first, second = str(told.value).splitlines()
    assert "'Nobody'" in first and "the tools 'book' would really run in training" in second
    vars(agent)["_runtime_config"] = {"any": 1}
    with pytest.raises(ConfigError) as told:
        hosting_of(agent, config(tools_for_training={"cook": "x:y"}, run_tools=["look"]))
    first, second, third = str(told.value).splitlines()
    assert "'Front' has runtime=" in first and "no tool is called 'cook'" in second and "'look'" in third


def a_run(folder: Path, **keys: Any) -> Path:
    facts = {"rollout": "agent", "learning_rate": 1e-5, "dataset": "q.jsonl", **keys}
    return finished_run(folder / "run", weights_in(folder / "base"), agent="Front", config=facts).root


def test_a_run_without_its_agent_says_how_to_name_it(in_tmp: Path) -> None:
    with pytest.raises(ConfigError, match=r"--resume RUN --set rollout_agent=module:name"):
        resume_run(a_run(in_tmp), quiet=True)
    with pytest.raises(ConfigError, match="rollout_agent: module:name"):
        named_agent(config())


def test_a_run_goes_on_with_its_own_agent_only(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agents = {"x:front": an_agent(tools=[book]), "x:other": an_agent("Other")}
    monkeypatch.setattr("praison_agent_rl.hosting.find_agent", agents.__getitem__)
    root = a_run(in_tmp, rollout_agent="x:other")
    with pytest.raises(ConfigError, match="the run is of the agent 'Front', and rollout_agent names 'Other'"):
        resume_run(root, quiet=True)
    with pytest.raises(ConfigError, match="'book' would really run"):  # this one is the run's, and is looked at
        resume_run(root, quiet=True, rollout_agent="x:front")
