"""What is said of a run before a tokenizer is looked at: rewards without an episode, guardrails that ask a model."""

from typing import Any

import pytest
from praisonaiagents import Agent

from praison_agent_rl.agent_rollouts.toolboxes import environment_of, tools_of
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.environments import episode_reward
from praison_agent_rl.errors import ConfigError
from praison_agent_rl.rollout_choice import choose_rollout

pytestmark = pytest.mark.usefixtures("agents_around")

HERE = __name__
EPISODES = "praison_agent_rl.environments:episode_reward"


def longer(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


@pytest.mark.parametrize(
    "given",
    [
        {"reward_funcs": EPISODES},
        {"reward_funcs": [longer, episode_reward]},
        {"reward_funcs": [{"reward": EPISODES, "weight": 2.0}], "rollout": "tools", "tools": f"{HERE}:longer"},
        {"reward_funcs": [longer], "judge_funcs": [EPISODES]},
        {"reward_funcs": [EPISODES], "environment": f"{HERE}:Game", "rollout": "direct"},
        {"reward_funcs": [EPISODES], "environment": f"{HERE}:Game", "rollout": "agent"},
    ],
    ids=["text", "callable", "mapping", "judge", "direct", "agent"],
)
def test_a_reward_of_episodes_where_none_is_acted_in_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"_funcs name praison_agent_rl\.environments:episode_reward.*module:Class"):
        choose_rollout(TrainConfig(**given), "nothing is looked at")


def test_other_rewards_and_those_that_cannot_be_found_are_no_concern_of_it() -> None:
    given = [longer, "nowhere:gone", {"reward": f"{HERE}:longer"}, "rewards/short/v1", 7]
    assert choose_rollout(TrainConfig(reward_funcs=given), "nothing is looked at").mode == "direct"


class Game:
    """A game."""

    def reset(self, **row: Any) -> None:
        """Begin."""

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: The number.
        """
        return "wrong"


def test_an_environment_is_no_reason_to_refuse_its_reward() -> None:
    config = TrainConfig(reward_funcs=[EPISODES], environment=f"{HERE}:Game", rollout="tools")
    with pytest.raises(Exception, match="nowhere") as told:
        choose_rollout(config, "nowhere")
    assert "episode_reward" not in str(told.value)


def test_a_guardrail_in_words_is_said_to_ask_another_model_than_the_trained_one() -> None:
    given = {"model": "openai/m1", "base_url": "http://127.0.0.1:9/v1", "api_key": "k"}
    strict = Agent(name="Strict", instructions="x", llm=given, rules=False, guardrails="Be polite.")
    plain = Agent(name="Plain", instructions="x", llm=given, rules=False, guardrails=lambda said: (True, said))
    notes = choose_rollout(TrainConfig(rollout="agent"), "nothing is looked at", strict).notes
    assert "the guardrail of 'Strict' asks the model that the agent was built with" in "\n".join(notes)
    assert "guardrail" not in "\n".join(choose_rollout(TrainConfig(rollout="agent"), "x", plain).notes)


# --- tools that are named ---------------------------------------------------------------------------------------------


def add(a: int, b: int) -> dict[str, int]:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return {"sum": a + b}


def hangs(a: int) -> int:
    """Hang.

    Args:
        a: Any.
    """
    while True:
        pass


class Numbers:
    """Numbers that something can be done with."""

    async def half(self, a: int) -> list[float]:
        """Halve a number.

        Args:
            a: It.
        """
        return [a / 2]


NUMBERS = Numbers()
half = NUMBERS.half


def test_named_tools_give_what_the_framework_would_tell_and_end_in_time() -> None:
    import asyncio

    pytest.importorskip("transformers", reason="TRL's form of a tool is transformers' own: needs the extra train")
    config = TrainConfig(tools=[f"{HERE}:add", f"{HERE}:hangs", f"{HERE}:half"], rollout_timeout=0.2)
    first, second, third = tools_of(config)
    assert first(a=2, b=3) == '{"sum": 5}' and asyncio.run(third(a=5)) == "[2.5]"
    with pytest.raises(TimeoutError, match=r"Tool timed out after 0\.2s"):
        second(a=1)
    assert [tool.__name__ for tool in (first, second, third)] == ["add", "hangs", "half"]


class Guarded(type):
    """Makes classes that no other is made of."""

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
        if any(isinstance(base, Guarded) for base in bases):
            raise TypeError("this class is final")
        return super().__new__(cls, name, bases, body)


class Final(Numbers, metaclass=Guarded):
    """One of them."""

    def reset(self, **row: Any) -> None:
        """Begin."""


def test_an_environment_whose_time_cannot_be_kept_is_refused() -> None:
    config = TrainConfig.load({"environment": f"{__name__}:Final"}, need_model=False, need_data=False)
    with pytest.raises(ConfigError, match=r"Final lets no class be made of it, .* TypeError: this class is final$"):
        environment_of(config)


def test_an_environment_is_named_with_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="TRL's form of a tool is transformers' own: needs the extra train")
    found = environment_of(TrainConfig(environment=f"{HERE}:Game", rollout_timeout=0.2))
    assert found is not None and issubclass(found, Game) and found().guess(3) == "wrong"
    monkeypatch.setattr(Game, "guess", hangs)
    found = environment_of(TrainConfig(environment=f"{HERE}:Game", rollout_timeout=0.2))
    assert found is not None
    with pytest.raises(TimeoutError, match=r"Tool timed out after 0\.2s"):
        found().guess()
