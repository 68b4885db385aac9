"""How answers come about is chosen before anything is loaded, and all that is wrong then is said at once."""

from pathlib import Path
from typing import Any

import pytest
from praisonaiagents import Agent

from praison_agent_rl.agent_rollouts.tool_texts import why_no_loop
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.drafting import draft_improvement
from praison_agent_rl.errors import ConfigError
from praison_agent_rl.models import load_tokenizer
from praison_agent_rl.rollout_choice import choose_rollout
from tests.model.speaking import make_speaking_model

pytestmark = pytest.mark.usefixtures("agents_around")

ASKED = [f"question {number}" for number in range(24)]


def book(room: str) -> str:
    """Book a room."""
    return room


def an_agent() -> Agent:
    given = {"model": "openai/m1", "base_url": "http://127.0.0.1:9/v1", "api_key": "k"}
    return Agent(name="Front", instructions="Help.", llm=given, rules=False, tools=[book])


def longer(completions: list[str], **_: Any) -> list[float]:
    return [float(len(str(text))) for text in completions]


def drafted(model: Path, data: Any = ASKED, **settings: Any) -> Any:
    given = {"reward_funcs": [longer], "rollout": "agent", "held_out": 8, "num_generations": 2, **settings}
    return draft_improvement(an_agent(), data, str(model), None, given, lambda event: None)


def test_tools_and_a_template_without_them_are_told_at_once(tiny_model: Path) -> None:
    with pytest.raises(ConfigError) as told:
        choose_rollout(TrainConfig(rollout="agent"), str(tiny_model), an_agent())
    first, second = str(told.value).splitlines()
    assert "'book' would really run" in first and "the chat template leaves out the tools" in second


def test_what_an_improvement_lacks_for_rollouts_is_told_with_all_the_rest(tiny_model: Path) -> None:
    with pytest.raises(ConfigError) as told:
        drafted(tiny_model, held_out=500, guards={"odd": 1.0}, warm_start=3)
    text = str(told.value)
    wanted = ("'book' would really run", "leaves out the tools", "no good runs", "held_out=500", "guards names 'odd'")
    assert [part for part in wanted if part not in text] == []


def test_prompts_that_nobody_can_ask_are_told_with_the_rest(tiny_model: Path) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "book", "arguments": "{}"}}
    turn = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "r"},
    ]
    rows = [{"prompt": [{"role": "user", "content": text}, *turn]} for text in ASKED]
    with pytest.raises(ConfigError) as told:
        drafted(tiny_model, rows)
    text = str(told.value)
    assert "'book' would really run" in text and "none of 24 prompts can be asked of an agent" in text
    allowed = {"run_tools": ["book"], "chat_template": "chatml_tools", "per_device_train_batch_size": 2}
    draft = drafted(tiny_model, [*rows, *ASKED], **allowed)
    assert "24 of 48 prompts end within a turn and are left out" in draft.notes
    assert (len(draft.train) + len(draft.held_out) + len(draft.watch), draft.config.rollout) == (24, "agent")


@pytest.mark.parametrize("given", [{"run_tools": ["boook"]}, {"tools_for_training": {"boook": "os:getcwd"}}])
def test_a_choice_by_itself_does_not_pass_over_what_was_said_of_tools(tiny_model: Path, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="boook"):
        choose_rollout(TrainConfig(**given), str(tiny_model), an_agent())
    choice = choose_rollout(TrainConfig(), str(tiny_model), an_agent())
    assert choice.mode == "direct" and "'book' would really run" in choice.notes[0]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def test_a_tokenizer_that_loses_white_space_is_no_base_for_the_loop_of_trl(tiny_model: Path, tmp_path: Path) -> None:
    given = {"rollout": "tools", "tools": f"{__name__}:add", "chat_template": "chatml_tools"}
    assert choose_rollout(TrainConfig(**given), str(tiny_model)).mode == "tools"
    words = load_tokenizer(str(make_speaking_model(tmp_path / "words")), TrainConfig(chat_template="chatml_tools"))
    assert words.decode(words("one  two").input_ids) != "one  two"
    assert "TRL's loop would find no call" in (why_no_loop(words) or "")
