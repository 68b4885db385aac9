"""What an improvement starts from: the agent's name, its current version, and what answers it now."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from praisonaiagents import Agent

from praison_agent_rl import drafting, registry
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.drafting import agent_name, past_of, weights_to_train
from praison_agent_rl.errors import ConfigError, ModelError
from praison_agent_rl.models import find_weights
from praison_agent_rl.past import Rival
from praison_agent_rl.planning import Draft, draft_from_config
from praison_agent_rl.publishing import publish_version
from praison_agent_rl.runs import HOME
from tests.finished_runs import finished_run, weights_in


def helper(**options: Any) -> Agent:
    model = {"model": "openai/m1", "base_url": "http://127.0.0.1:9/v1", "api_key": "k"}
    return Agent(**{"name": "Helper", "instructions": "Be brief.", "llm": model, "output": "silent", **options})


@pytest.fixture
def base(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(
        "praison_agent_rl.models.check_weight_files", lambda folder: None
    )  # a few bytes stand for weights
    return weights_in(in_tmp / "base")


def promoted(base: Path, root: str = "run") -> str:
    """Folder of the model of a version of Helper that answers now."""
    version = publish_version(HOME, "Helper", finished_run(Path(root), base))
    registry.promote(HOME, "Helper", version.name)
    return str(Path(version.folder) / "model")


def test_agents_without_a_name_are_known_by_what_they_were_told() -> None:
    brief, french = helper(name=None), helper(name=None, instructions="Answer in French.")
    assert agent_name(brief) == agent_name(helper(name=None)) != agent_name(french)
    assert agent_name(helper()) == "Helper"


def test_an_agent_is_trained_further_from_the_version_that_answers(base: Path) -> None:
    assert weights_to_train(helper(), str(base), None) == str(base)
    model = promoted(base)
    pointer = registry.current(HOME, "Helper")
    other = weights_in(base.parent / "other")
    assert weights_to_train(helper(), None, pointer) == model
    assert weights_to_train(helper(), str(base), pointer) == model, "what the version itself was trained on"
    assert weights_to_train(helper(), str(other), pointer) == str(other)
    registry.rollback(HOME, "Helper")
    assert weights_to_train(helper(), str(base), registry.current(HOME, "Helper")) == str(base)


def test_what_answers_now_is_to_be_beaten_where_something_else_is_trained(base: Path) -> None:
    model = promoted(base)
    config = TrainConfig.load({"reward_funcs": "x:y"}, need_model=False, need_data=False)
    further = past_of(helper(), Draft(config, model, [], [], []), promote=True)
    assert (further.parent, further.rival) == ("v1", None)
    anew = past_of(helper(), Draft(config, str(base.parent / "other"), [], [], []), promote=True)
    assert (anew.parent, anew.rival) == (None, Rival("v1", model))
    assert any("v1 answers now" in note for note in anew.notes)


def test_a_version_whose_prompts_are_damaged_judges_no_more_and_stops_nothing(base: Path) -> None:
    model = promoted(base)
    (Path(model).parent / "held_out.jsonl").write_text('{"prompt": "tw')
    config = TrainConfig.load({"reward_funcs": "x:y"}, need_model=False, need_data=False)
    past = past_of(helper(), Draft(config, model, [], [], []), promote=True)
    assert past.earlier == [] and any("v1 judges no more" in note for note in past.notes)


def test_a_hub_that_cannot_be_reached_is_a_fault_of_the_name_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise httpx.ConnectError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.model_info", unreachable)
    with pytest.raises(ModelError, match=r"'models/my-model' is not in the local cache.*no folder of that name here"):
        find_weights("models/my-model")


def test_with_a_faulty_key_the_overrides_still_count(in_tmp: Path) -> None:
    (in_tmp / "c.yaml").write_text(
        "model_name: nobody/knows-this\nreward_funcs: json:dumps\ndataset: [{name: a.jsonl}]\n"
    )
    with pytest.raises(ConfigError) as caught:
        draft_from_config(in_tmp / "c.yaml", ["nonsense=3", "model_name=./nowhere", "reward_funcs=no.such:reward"])
    said = str(caught.value)
    for part in ("nonsense", "./nowhere", "no.such", "a.jsonl"):
        assert part in said
    assert "nobody/knows-this" not in said


def test_all_that_improve_was_given_is_looked_at_at_once(in_tmp: Path) -> None:
    given = {"max_stps": 3, "reward_funcs": ["no.such:reward"]}
    with pytest.raises(ConfigError) as caught:
        drafting.draft_improvement(helper(), "nofile.jsonl", "./nowhere", None, given, lambda event: None)
    for part in ("max_stps", "no.such", "nofile.jsonl", "./nowhere"):
        assert part in str(caught.value)
