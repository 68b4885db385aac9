"""Both sides of a comparison answer the same prompts by one engine; ``evaluate`` says what came of it."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from praisonaiagents import Agent

import praison_agent_rl as rl
from praison_agent_rl import measuring
from praison_agent_rl.answering import Manner, RawAnswer, answer_rows, likelihoods, load_engine, same_vocabulary
from praison_agent_rl.data import read_rows, write_rows
from praison_agent_rl.errors import ConfigError, DataError, ModelError, PraisonRLError, RewardError, VersionError
from praison_agent_rl.evaluating import side_of
from praison_agent_rl.measuring import judge_run, measure, read_answers, results_of
from praison_agent_rl.models import render_prompts
from praison_agent_rl.records import Interval, MergeProof, Plan, PlannedReward, Verdict, Version
from praison_agent_rl.rewards import Reward
from praison_agent_rl.runs import RunFolder, now, read_record, write_record
from praison_agent_rl.stages import planned_rewards, run_stages
from tests.conftest import make_tiny_model

CONFIG = {"max_completion_length": 12, "max_seq_length": 2000}
PROMPTS = [f"Say something about the number {n}." for n in range(10)]
REWARDS = """
def letters(completions, **kwargs):
    return [sum(c.islower() for c in text) / max(len(text), 1) for text in completions]

def brief(completions, **kwargs):
    return [1 / (1 + len(text)) for text in completions]
"""


@pytest.fixture
def project(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (in_tmp / "evalrewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(in_tmp)
    for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE"):
        monkeypatch.delenv(name, raising=False)
    yield in_tmp
    sys.modules.pop("evalrewards", None)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The tiny model with its weights disturbed."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(tiny_model, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    for weights in model.parameters():
        weights.data += 0.1 * torch.randn_like(weights)
    model.save_pretrained(folder)
    return folder


def planned(name: str = "letters", weight: float = 1.0) -> PlannedReward:
    spec = f"evalrewards:{name}"
    return PlannedReward(spec=spec, name=name, weight=weight, prompts="text", completions="text")


def plan_for(base: Path, **changes: Any) -> Plan:
    facts = {"base": str(base), "config": CONFIG, "rewards": [planned()], "device": "cpu", "notes": []}
    return Plan(**{**facts, "libraries": {}, "created": now(), **changes})


def run_of(root: Path, plan: Plan, prompts: list[Any] = PROMPTS) -> RunFolder:
    run = RunFolder.create(root)
    write_rows(run.held_out_rows, [{"prompt": prompt} for prompt in prompts])
    write_record(run.plan_file, plan)
    return run


# --- the engine -------------------------------------------------------------------------------------------------------


def by_hand(engine: Any, prompt: list[int], ids: tuple[int, ...]) -> float:
    """The mean log-probability from one plain forward pass over prompt and answer."""
    whole = torch.tensor([[*prompt, *ids]])
    with torch.no_grad():
        probabilities = engine.model(input_ids=whole).logits[0].double().softmax(-1)
    places = range(len(prompt) - 1, len(prompt) + len(ids) - 1)
    return sum(probabilities[place, token].log().item() for place, token in zip(places, ids, strict=True)) / len(ids)


@pytest.mark.parametrize("shared", [True, False])
def test_the_likelihood_of_an_answer_is_that_of_its_tokens(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    if not shared:
        monkeypatch.setattr("praison_agent_rl.answering.why_not_shareable", lambda model, **_: "for this test")
    engine = load_engine(str(tiny_model), plan_for(tiny_model))
    prompts = [[{"role": "user", "content": text}] for text in PROMPTS[:4]]
    answers = answer_rows(engine, [{"prompt": prompt} for prompt in prompts], Manner())
    answers[2] = answers[2]._replace(ids=answers[2].ids[:3])  # of another length
    answers[3] = RawAnswer(3, 0, "plain text", 10)  # whose ids are found by the tokenizer
    expected = [
        by_hand(engine, prompt, answer.ids or tuple(engine.tokenizer(answer.text)["input_ids"]))
        for prompt, answer in zip(render_prompts(engine.tokenizer, prompts), answers, strict=True)
    ]
    assert likelihoods(engine, prompts, answers) == pytest.approx(expected, abs=1e-4)
    assert likelihoods(engine, prompts[:1], [RawAnswer(0, 0, "", 0)]) == [None]


def test_a_prompt_without_room_is_an_error_or_an_answer_that_failed(tiny_model: Path) -> None:
    engine = load_engine(str(tiny_model), plan_for(tiny_model))
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("Hi", "x" * 2000)]
    with pytest.raises(DataError, match=r"1 of 2 held-out prompts are longer than 1988 tokens .* being number 2"):
        answer_rows(engine, rows, Manner())
    short, long = answer_rows(engine, rows, Manner(at_most=3, strict=False))
    assert short.error is None and 0 < short.tokens <= 3 and len(short.ids) == short.tokens
    assert (long.text, long.error) == ("", "the prompt is longer than 1988 tokens")


# --- the stages -------------------------------------------------------------------------------------------------------


def with_all_there_is(root: Path, base: Path, new: Path) -> RunFolder:
    earlier = {"v1": [planned("brief", 2.0)], "v2": [planned().model_copy(update={"spec": "gone:f"})]}
    plan = plan_for(base, candidate=str(new), judges=[planned("brief")], earlier=earlier, incumbent="gpt")
    run = run_of(root, plan)
    write_rows(run.guard_rows("control"), [{"prompt": "What is 1 plus 1?", "answer": ["2"]}] * 3)
    write_rows(run.guard_rows("earlier"), [{"prompt": f"Old {n}", "_version": f"v{n % 2 + 1}"} for n in range(6)])
    write_rows(run.recorded, [{"prompt": place, "text": "abcd"} for place in range(9)])
    return run


def test_one_load_of_each_model_answers_all_and_the_verdict_is_written(
    project: Path, tiny_model: Path, other_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = with_all_there_is(project / "run", tiny_model, other_model)
    loaded = []

    def load(source: str, plan: Plan) -> Any:
        loaded.append(source)
        return load_engine(source, plan)

    monkeypatch.setattr(measuring, "load_engine", load)
    rewards = planned_rewards(run)
    run_stages(run, ["measure_base", "measure_new"], rewards)
    assert loaded == [str(tiny_model), str(other_model), str(tiny_model)], "the last for the likelihood of the answers"

    for side in ("base", "new"):
        assert [(a.prompt, a.sample) for a in read_answers(run, side)] == [(p, s) for p in range(10) for s in (0, 1)]
        assert [a.likelihood is not None for a in read_answers(run, side)] == [True, False] * 10
        assert {tuple(row["rewards"]) for row in read_rows(run.guard_answers("control", side))} == {("control",)}
        earlier = read_rows(run.guard_answers("earlier", side))
        assert [list(row["rewards"]) for row in earlier] == [["brief"], ["letters"]] * 3, "v2's rewards are gone"
        assert all(row["total"] == pytest.approx(2 / (1 + len(row["text"]))) for row in earlier[::2])
    # a model that answers greedily says what it finds likely; disturbed weights say what the base does not expect
    base, new = (
        [a.likelihood for a in read_answers(run, side) if a.likelihood is not None] for side in ("base", "new")
    )
    assert sum(new) / len(new) < sum(base) / len(base)
    assert [a.total for a in read_answers(run, "incumbent")] == [1.0] * 9
    verdict = read_record(run.verdict_file, Verdict)
    assert verdict.incumbent is not None and verdict.incumbent.base == 1.0 and verdict.status != "promoted"
    assert {"control", "earlier v1", "earlier v2"} <= {guard.name for guard in verdict.guards}
    done = [event for _, event in run.events() if event["event"] == "answered" and event["side"] == "new"]
    assert (done[-1]["done"], done[-1]["of"]) == (29, 29), "3 control, 6 earlier and 2 x 10 held-out answers"
    notes = [event["text"] for _, event in run.events() if event["event"] == "note"]
    assert any("the rewards of v2 cannot be found any more" in note for note in notes)


def test_what_was_answered_before_a_kill_is_not_asked_again(
    project: Path, tiny_model: Path, other_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = with_all_there_is(project / "run", tiny_model, other_model)
    rewards = planned_rewards(run)
    run_stages(run, ["measure_base", "measure_new"], rewards)
    verdict = read_record(run.verdict_file, Verdict)
    whole = {path.name: path.read_bytes() for path in results_of(run, "new")}
    monkeypatch.setattr(measuring, "load_engine", lambda *_: pytest.fail("a model was loaded for nothing"))
    run_stages(run, ["measure_base", "measure_new"], rewards, resume=True)
    monkeypatch.undo()

    for left in ("answers_new.jsonl", "earlier_new.jsonl"):
        (run.root / left).unlink()
        before = run.guard_answers("control", "new").stat().st_mtime_ns
        run_stages(run, ["measure_base", "measure_new"], rewards, resume=True)
        assert run.guard_answers("control", "new").stat().st_mtime_ns == before
        again = {path.name: path.read_bytes() for path in results_of(run, "new")}
        assert {name: again[name] for name in again if name != left} == {n: whole[n] for n in whole if n != left}
        if left == "earlier_new.jsonl":
            assert again[left] == whole[left]
    assert read_record(run.verdict_file, Verdict).status == verdict.status


def test_prompts_of_earlier_versions_that_cannot_be_scored_do_not_end_the_run(
    project: Path, tiny_model: Path, other_model: Path
) -> None:
    def needs_a_column(completions, wanted, **_):
        return [0.0] * len(completions)

    run = run_of(project / "run", plan_for(tiny_model, candidate=str(other_model), earlier={"v1": []}))
    write_rows(run.guard_rows("earlier"), [{"prompt": "Old", "_version": "v1"}])
    write_rows(run.held_out_rows, [{"prompt": prompt, "wanted": 1} for prompt in PROMPTS])
    for side in ("base", "new"):
        measure(run, side, [Reward(needs_a_column, "needy")])
    judge_run(run)
    assert [row["total"] for row in read_rows(run.guard_answers("earlier", "base"))] == [None]
    notes = [event["text"] for _, event in run.events() if event["event"] == "note"]
    assert any("the held-out prompts of v1 cannot be scored and do not judge" in note for note in notes)


# --- evaluate ---------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {"data": PROMPTS, "reward_funcs": "evalrewards:letters", "quiet": True, **CONFIG}


def test_a_model_against_itself_is_a_tie_on_every_prompt(project: Path, tiny_model: Path) -> None:
    result = rl.evaluate(tiny_model, against=str(tiny_model), **OPTIONS)
    comparison = result.comparison
    assert (comparison.ties, comparison.wins, comparison.losses, comparison.samples) == (10, 0, 0, 2)
    assert comparison.total.difference == 0 and not result.better
    base, new = read_answers(RunFolder(result.run), "base"), read_answers(RunFolder(result.run), "new")
    assert base == new
    assert result.report.exists() and "\n" not in str(result) and "on 10 prompts" in str(result)


def test_an_agent_is_asked_as_it_asks_and_its_tools_are_shown(
    project: Path, tiny_model: Path, other_model: Path
) -> None:
    result = rl.evaluate(agent_of(), against=tiny_model, base_model=str(other_model), samples=1, **OPTIONS)
    run = RunFolder(result.run)
    assert run.plan.samples == 1 and run.plan.candidate == str(other_model)
    assert [tool["function"]["name"] for tool in run.plan.tools] == ["add"]
    assert any("shown to the model but not run; run_tools=True runs them" in note for note in run.plan.notes)
    asked = read_rows(run.held_out_rows)[3]["prompt"]
    assert asked[0]["role"] == "system" and "Be brief." in asked[0]["content"]
    assert asked[-1] == {"role": "user", "content": PROMPTS[3]}
    assert str(result).startswith(f"Helper against {tiny_model}: ")


def test_with_run_tools_the_agent_itself_answers_on_both_models(
    project: Path, tiny_model: Path, other_model: Path
) -> None:
    agent = agent_of()
    history = list(agent.chat_history)
    options = {**OPTIONS, "data": PROMPTS[:2]}
    result = rl.evaluate(agent, against=tiny_model, base_model=str(other_model), run_tools=True, **options)
    base, new = (read_answers(RunFolder(result.run), side) for side in ("base", "new"))
    assert [len(side) for side in (base, new)] == [2, 2] and base != new
    assert all(answer.error is None and answer.tokens for answer in [*base, *new])
    assert agent.chat_history == history and agent.llm == "openai/m1", "the agent itself stays as it was"


def agent_of() -> Agent:
    model = {"model": "openai/m1", "base_url": "http://127.0.0.1:9/v1", "api_key": "k", "max_tokens": 8}
    return Agent(name="Helper", instructions="Be brief.", llm=model, output="silent", rules=False, tools=[add])


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture
def version(project: Path, tiny_model: Path, other_model: Path) -> Path:
    """Version v1 of agent ``helper`` as it lies on disk."""
    folder = project / ".praisonai" / "rl" / "versions" / "helper" / "v1"
    shutil.copytree(other_model, folder / "model")
    plan = plan_for(tiny_model, judges=[planned("brief")], rewards=[planned("letters", 3.0)])
    write_record(folder / "plan.json", plan)
    write_rows(folder / "held_out.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    nothing = Interval(base=0, new=0, difference=0, low=0, high=0)
    comparison = {"total": nothing, "rewards": {}, "prompts": 0, "samples": 0, "wins": 0, "ties": 0, "losses": 0}
    facts: dict[str, Any] = {"name": "v1", "agent": "helper", "folder": "", "base": str(tiny_model), "parent": None}
    proof = MergeProof(tokens=1, merge_error=0, saved_error=0, tolerance=1, change=1)
    record = Version(**facts, created=now(), comparison={**comparison, "unscored": 0}, merge=proof)
    write_record(folder / "version.json", record)
    return folder


def test_a_version_is_asked_and_scored_again_as_it_was_judged(version: Path, tiny_model: Path) -> None:
    result = rl.evaluate("helper/v1", quiet=True)
    plan = RunFolder(result.run).plan
    assert (plan.base, plan.candidate) == (str(tiny_model), str(version / "model"))
    assert plan.rewards == [planned("letters", 3.0)] and [judge.name for judge in plan.judges] == ["brief"]
    assert {name: plan.config[name] for name in CONFIG} == CONFIG
    assert result.comparison.prompts == 10 and list(result.comparison.judged) == ["brief"]
    assert str(result).startswith("helper/v1 against the base of v1: ")


def test_of_a_dataset_with_a_split_only_what_is_held_out_is_asked(
    project: Path, tiny_model: Path, other_model: Path
) -> None:
    rows = [{"prompt": p, "split": "held_out" if n < 8 else "train"} for n, p in enumerate(PROMPTS)]
    (project / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = rl.evaluate(other_model, against=tiny_model, **{**OPTIONS, "data": "rows.jsonl"})
    assert read_rows(RunFolder(result.run).held_out_rows) == [{"prompt": prompt} for prompt in PROMPTS[:8]]


# --- what is wrong is said before a model loads -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"against": None}, ConfigError, "was not told what to compare .* with; give against="),
        ({"against": "./nothing"}, ModelError, "no such folder or file"),
        ({"against": 5}, ModelError, "5 is nothing that can be evaluated"),
        ({"against": "helper/v7"}, VersionError, "helper"),
        ({"data": None}, DataError, "evaluate got no data="),
        ({"data": [""]}, DataError, "row 1"),
        ({"reward_funcs": None}, RewardError, "needs reward_funcs"),
        ({"reward_funcs": "evalrewards:nope"}, RewardError, "has no 'nope'"),
        ({"guards": {"other": 0}}, ConfigError, "guards names 'other'"),
        ({"samples": 0}, ConfigError, "eval_samples is 0"),
        ({"run_tools": True}, ConfigError, "neither subject nor against is one"),
    ],
)
def test_wrong_input_is_told_and_nothing_is_written(
    project: Path, tiny_model: Path, change: dict[str, Any], kind: type[PraisonRLError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        rl.evaluate(tiny_model, **{"against": tiny_model, **OPTIONS, **change})
    assert not (project / ".praisonai").exists()


def test_prompts_that_are_messages_cannot_be_asked_through_an_agent(project: Path, tiny_model: Path) -> None:
    data = [{"prompt": [{"role": "user", "content": "Hi"}]}, {"prompt": [{"role": "user", "content": "Ho"}]}]
    with pytest.raises(DataError, match=r"2 of 2 prompts are lists of messages, the first being number 1"):
        rl.evaluate(
            agent_of(), against=tiny_model, base_model=str(tiny_model), run_tools=True, **{**OPTIONS, "data": data}
        )


def test_a_version_is_known_by_its_record_and_by_the_server_that_an_agent_runs_on(
    version: Path, tiny_model: Path
) -> None:
    by_name = side_of("helper/v1")
    assert side_of("helper@v1").version == by_name.version
    assert by_name.version is not None and by_name.weights == str((version / "model").resolve())
    assert side_of(by_name.version).label == "helper/v1"
    assert side_of(str(tiny_model)).version is None


def test_tiny_models_of_other_vocabularies_are_compared_too(project: Path, tiny_model: Path, tmp_path: Path) -> None:
    """Ids of one vocabulary mean nothing to the other model: the text is read anew for its likelihood."""
    other = make_tiny_model(tmp_path / "other", tied=True)
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    (other / "tokenizer.json").write_text(text.replace('"a": ', '"a_": ').replace('"b": ', '"a": ').replace(
        '"a_": ', '"b": '
    ), encoding="utf-8")  # fmt: skip
    result = rl.evaluate(other, against=tiny_model, **OPTIONS)
    run = RunFolder(result.run)
    base_engine = load_engine(str(tiny_model), run.plan)
    assert not same_vocabulary(base_engine.tokenizer, load_engine(str(other), run.plan).tokenizer)
    for answer in [a for a in read_answers(run, "new") if a.sample == 0][:3]:
        prompt = [{"role": "user", "content": PROMPTS[answer.prompt]}]
        (expected,) = likelihoods(base_engine, [prompt], [RawAnswer(0, 0, answer.text, 0)])
        assert answer.likelihood == pytest.approx(expected, abs=1e-4)
