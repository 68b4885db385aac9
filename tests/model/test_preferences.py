"""Reward models and CPO from end to end on a tiny model: a planted preference is learned, kept and used."""

import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from praisonaiagents import Agent

import praison_agent_rl as rl
from praison_agent_rl import planning
from praison_agent_rl.answering import Manner, answer_rows, load_engine
from praison_agent_rl.data import read_rows
from praison_agent_rl.errors import ConfigError, DataError, ModelError, RewardError
from praison_agent_rl.improvement import Improvement, outcome_of, resume_run
from praison_agent_rl.models import load_scorer, load_tokenizer
from praison_agent_rl.pairs.measuring import PairScore, by_prompt, preferences
from praison_agent_rl.pairs.texts import explicit, render_answer, render_pairs
from praison_agent_rl.planned_rewards import plan_rewards
from praison_agent_rl.records import Plan, RewardCard
from praison_agent_rl.reward_models import ModelReward
from praison_agent_rl.rewards import from_model, prepare
from praison_agent_rl.runs import HOME, RunFolder, read_record
from praison_agent_rl.sequence_scores import score_sequences
from praison_agent_rl.stages import run_stages, stages_of
from praison_agent_rl.trained_rewards import TrainedReward
from tests.fakes import FakeServer

TRUTH = '''
def vowels(completions, **kwargs):
    """What the pairs were chosen by: the share of letters that are the letter a."""
    return [text.count("a") / max(len(text), 1) for text in completions]
'''


@pytest.fixture
def here(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (in_tmp / "pairtruth.py").write_text(TRUTH)
    monkeypatch.syspath_prepend(in_tmp)
    for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE"):
        monkeypatch.delenv(name, raising=False)
    yield in_tmp
    sys.modules.pop("pairtruth", None)


def says(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def asks(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def pairs(count: int = 60, *, seed: int = 0) -> list[dict[str, Any]]:
    """Answers full of the letter a are chosen over ones without it, of the same lengths."""
    draw = random.Random(seed)

    def word(letters: str) -> str:
        return "".join(draw.choice(letters) for _ in range(8))

    return [
        {"prompt": asks(f"Say {n}."), "chosen": says(word("aaaxyz")), "rejected": says(word("bcdefg"))}
        for n in range(count)
    ]


def settings(method: str, model: Path, **changes: Any) -> dict[str, Any]:
    rate = 3e-3 if method == "cpo" else 1e-2
    # with this seed an untrained score head is right on about half of the pairs
    usual = {"max_steps": 24, "learning_rate": rate, "held_out": 20, "max_completion_length": 12, "seed": 8}
    return {"method": method, "model_name": str(model), **usual, **changes}


def trained(method: str, model: Path, rows: list[dict[str, Any]], **changes: Any) -> Any:
    draft = planning.draft_from_config({**settings(method, model, **changes), "dataset": rows})
    run = planning.write_run(draft, planning.new_run_root(method))
    run_stages(run, stages_of(run), draft.rewards, judges=draft.judges)
    return outcome_of(run)


def train(run: RunFolder, *, resume: bool = False) -> None:
    run_stages(run, ["train"], [], resume=resume)


@pytest.fixture(scope="module")
def scorer(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedReward:
    """A reward model that was trained on the planted preference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("scorer"))
        found = trained("reward", tiny_model, pairs())
        assert isinstance(found, TrainedReward)
        return TrainedReward(found.card, found.folder.resolve(), found.run.resolve(), found.report.resolve())


# --- a reward model ---------------------------------------------------------------------------------------------------


def test_a_reward_model_learns_the_planted_preference(scorer: TrainedReward, tiny_model: Path) -> None:
    card = scorer.card
    assert card.accuracy > 0.9 and card.held_out == 20 and card.train == 40 and card.passed
    assert card.accuracy_low > 0.5 and card.margin > 0
    rows = read_rows(RunFolder(scorer.run).held_out_rows)
    tokenizer = load_tokenizer(
        str(tiny_model), planning.TrainConfig.load(settings("reward", tiny_model), need_data=False)
    )
    config = planning.TrainConfig.load(settings("reward", tiny_model), need_data=False)
    untrained = load_scorer(str(tiny_model), config, device="cpu", new_head=True).eval()
    sides = [side.ids for pair in render_pairs(tokenizer, rows) for side in pair]
    scores = score_sequences(untrained, sides, limit=512)
    before = sum(one > other for one, other in zip(scores[::2], scores[1::2], strict=True)) / len(rows)
    assert before == 0.55  # an untrained one is as good as a coin


def test_the_score_head_is_trained(scorer: TrainedReward, tiny_model: Path) -> None:
    from safetensors.torch import load_file

    config = planning.TrainConfig.load(settings("reward", tiny_model), need_data=False)
    start = load_scorer(str(tiny_model), config, device="cpu", new_head=True).score.weight
    kept = load_file(scorer.folder / "adapter" / "adapter_model.safetensors")
    (head,) = [tensor for name, tensor in kept.items() if "score" in name]
    assert head.shape == start.shape and not torch.allclose(head, start, atol=1e-4)
    merged = load_file(scorer.folder / "model" / "model.safetensors")
    assert torch.equal(merged["score.weight"], head)


def test_adapter_and_merged_model_load_back_with_the_same_scores(scorer: TrainedReward) -> None:
    from peft import AutoPeftModelForSequenceClassification
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    rows = read_rows(RunFolder(scorer.run).held_out_rows)
    tokenizer = AutoTokenizer.from_pretrained(scorer.folder / "model")
    sides = [side.ids for pair in render_pairs(tokenizer, rows) for side in pair]
    recorded = [
        score for row in read_rows(scorer.folder / "pair_scores.jsonl") for score in (row["chosen"], row["rejected"])
    ]
    merged = AutoModelForSequenceClassification.from_pretrained(scorer.folder / "model").eval()  # no num_labels needed
    assert merged.config.num_labels == 1
    assert score_sequences(merged, sides, limit=512) == pytest.approx(recorded, abs=1e-5)
    adapter = AutoPeftModelForSequenceClassification.from_pretrained(scorer.folder / "adapter", num_labels=1).eval()
    adapter.config.pad_token_id = tokenizer.pad_token_id
    assert score_sequences(adapter, sides, limit=512) == pytest.approx(recorded, abs=1e-3)


def test_padding_and_batches_do_not_change_a_score(scorer: TrainedReward) -> None:
    reward = ModelReward(str(scorer.folder))
    prompts = [asks("Say 1."), asks("Say something very much longer than that."), asks("?")]
    answers = [says("aaxaaxaa"), says("b"), says("cdefg" * 9)]
    together = reward(prompts, answers)
    alone = [reward([prompt], [answer])[0] for prompt, answer in zip(prompts, answers, strict=True)]
    assert together == pytest.approx(alone, abs=1e-4)


def test_the_card_says_where_the_model_comes_from_and_how_to_use_it(scorer: TrainedReward, tiny_model: Path) -> None:
    card = read_record(scorer.folder / "card.json", RewardCard)
    assert card.base == str(tiny_model) and card.base_hash and card.run == str(scorer.run)
    assert list(card.score_quantiles) == ["5 %", "25 %", "50 %", "75 %", "95 %"]
    page = (scorer.folder / "README.md").read_text()
    assert f"Right on {card.accuracy:.1%}" in page and f"[{scorer.name}]" in page and str(tiny_model) in page
    assert str(scorer).startswith(f"{scorer.name}: right on {card.accuracy:.0%} of the pairs of 20 held-out prompts")


def test_z_score_and_clip_are_those_of_the_card(scorer: TrainedReward) -> None:
    prompts, answers = [asks("Say 1.")] * 2, [says("aaaaaaaa"), says("bcdefgbc")]
    raw = from_model(str(scorer.folder))(prompts, answers)
    scaled = from_model(str(scorer.folder), scale="zscore")(prompts, answers)
    card = scorer.card
    assert scaled == pytest.approx([(score - card.score_mean) / card.score_std for score in raw])
    clipped = from_model(str(scorer.folder), scale="zscore", clip=0.25)(prompts, answers)
    assert clipped == [0.25, -0.25]


def test_a_reward_model_stands_beside_functions_and_is_made_again_by_its_pinned_name(
    scorer: TrainedReward, here: Path
) -> None:
    published = here / HOME / "rewards" / "judge"
    published.parent.mkdir(parents=True)
    (published).mkdir()
    (published / "v1").symlink_to(scorer.folder)
    entries = ["pairtruth:vowels", {"reward": "rewards/judge", "scale": "zscore", "weight": 0.5}]
    rewards = prepare(entries, prompts=[asks("Say 1.")], columns={})
    assert [(reward.weight, reward.shape) for reward in rewards] == [
        (1.0, ("text", "text")),
        (0.5, ("messages", "messages")),
    ]
    planned = plan_rewards(entries, rewards)
    assert planned[1].spec == f"rewards/{scorer.card.name}/v1" and planned[1].parameters == {"scale": "zscore"}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("rewards/none", "there is no reward model rewards/none"),
        ("rewards/a/b/c", "a reward model of ours is named rewards/<name>"),
        ({"reward": "rewards/none", "scale": "x"}, "there is no reward model"),
    ],
)
def test_a_reward_model_that_is_not_there_is_told_before_anything_loads(here: Path, entry: Any, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        prepare([entry], prompts=[asks("?")], columns={})


def test_a_language_model_is_no_reward_model(here: Path, tiny_model: Path) -> None:
    with pytest.raises(ModelError, match=r"is no reward model: it has no weights for score\.weight"):
        ModelReward(str(tiny_model))([asks("?")], [says("a")])
    with pytest.raises(RewardError, match="needs the card of a model that was trained here"):
        ModelReward(str(tiny_model), scale="zscore")


def test_text_pairs_without_a_prompt_are_taken_too(here: Path, tiny_model: Path) -> None:
    rows = [{"chosen": row["chosen"][0]["content"], "rejected": row["rejected"][0]["content"]} for row in pairs()]
    found = trained("reward", tiny_model, rows)
    assert found.card.form == "text" and found.card.accuracy > 0.9
    score = found.reward()
    assert score(["", ""], ["aaaxaaxa", "bcdefgbc"])[0] > score(["", ""], ["aaaxaaxa", "bcdefgbc"])[1]


def test_an_interrupted_reward_model_is_gone_on_with(here: Path, tiny_model: Path) -> None:
    draft = planning.draft_from_config({**settings("reward", tiny_model, save_steps=8), "dataset": pairs()})
    run = planning.write_run(draft, planning.new_run_root("reward"))
    train(run)
    whole = (run.adapter / "adapter_model.safetensors").read_bytes()
    shutil.rmtree(run.adapter)
    shutil.rmtree(run.checkpoints / "checkpoint-24")
    result = resume_run(run.root, quiet=True)
    assert isinstance(result, TrainedReward) and result.card.passed
    assert (result.folder / "adapter" / "adapter_model.safetensors").read_bytes() == whole
    again = resume_run(run.root, quiet=True)
    assert isinstance(again, TrainedReward) and again.folder == result.folder  # published once


def test_a_preference_that_is_none_does_not_pass(here: Path, tiny_model: Path) -> None:
    draw = random.Random(1)
    rows = pairs(48)
    for row in rows:
        if draw.random() < 0.5:
            row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    found = trained("reward", tiny_model, rows, max_steps=4, held_out=24)
    assert not found.card.passed and "not shown to be better than a coin" in str(found)
    with pytest.raises(RewardError, match=r"no version of rewards/.* is known to be right more often than not"):
        from_model(f"rewards/{found.card.name}")
    assert from_model(found.name).card.version == "v1"


# --- CPO --------------------------------------------------------------------------------------------------------------


def helper(server: FakeServer) -> Agent:
    model = {"model": "openai/m1", "base_url": server.url, "api_key": "old-key", "temperature": 0, "max_tokens": 12}
    return Agent(name="Helper", instructions="Be brief.", llm=model, output="silent", rules=False)


def test_cpo_improves_an_agent_by_its_pairs_and_swaps_it_in(here: Path, tiny_model: Path, server_a: FakeServer) -> None:
    agent = helper(server_a)
    rows = [{name: value[0]["content"] for name, value in row.items()} for row in pairs()]
    given = settings("cpo", tiny_model, quiet=True)
    given.pop("model_name")
    result = agent.improve(data=rows, base_model=str(tiny_model), **given)
    assert isinstance(result, Improvement)
    comparison = result.comparison
    assert list(comparison.rewards) == ["preference"] and comparison.total.new > 0.9 > comparison.total.base
    assert comparison.judged["margin"].low > 0  # held-out chosen answers rise above rejected ones
    assert result.verdict.passed and result.swapped_in and result.version == "v1", result.verdict.text
    result.rollback()


def test_cpo_is_judged_by_rewards_where_they_are_given(here: Path, tiny_model: Path) -> None:
    found = trained("cpo", tiny_model, pairs(), reward_funcs=["pairtruth:vowels"])
    assert list(found.comparison.rewards) == ["vowels"] and found.comparison.total.low > 0
    assert set(found.comparison.judged) == {"preference", "margin"}


@pytest.mark.parametrize("loss", ["hinge", "ipo", "simpo", "alphapo"])
def test_every_loss_of_cpo_trains(here: Path, tiny_model: Path, loss: str) -> None:
    draft = planning.draft_from_config(
        {**settings("cpo", tiny_model, max_steps=3, loss_type=loss), "dataset": pairs(32)}
    )
    run = planning.write_run(draft, planning.new_run_root(loss))
    train(run)
    assert len(run.steps()) == 3 and all(step["grad_norm"] > 0 for step in run.steps())


def test_pairs_that_are_too_long_are_counted_and_none_left_is_an_error(here: Path, tiny_model: Path) -> None:
    rows = pairs(40)
    for row in rows[:7]:
        row["rejected"] = says("b" * 300)
    given = {**settings("cpo", tiny_model, max_steps=2, max_length=128, held_out=0), "dataset": rows}
    draft = planning.draft_from_config(given)
    run = planning.write_run(draft, planning.new_run_root("long"))
    train(run)
    notes = [event["text"] for _, event in run.events() if event["event"] == "note"]
    assert any(note.startswith("7 of 40 training pairs are longer than 128 tokens (max_length)") for note in notes)
    assert "7 of 40 pairs are longer than 128 tokens (max_length) and are left out" in " ".join(draft.notes)
    with pytest.raises(DataError, match=r"40 of 40 pairs are longer than 16 tokens .* none is left to train on"):
        planning.draft_from_config({**given, "max_length": 16})


def test_a_cpo_run_goes_on_to_the_same_adapter(here: Path, tiny_model: Path) -> None:
    draft = planning.draft_from_config({**settings("cpo", tiny_model, max_steps=6, save_steps=3), "dataset": pairs()})
    run = planning.write_run(draft, planning.new_run_root("cpo"))
    train(run)
    whole = (run.adapter / "adapter_model.safetensors").read_bytes()
    shutil.rmtree(run.adapter)
    shutil.rmtree(run.checkpoints / "checkpoint-6")
    train(run, resume=True)
    assert (run.adapter / "adapter_model.safetensors").read_bytes() == whole


# --- a reward model, then GRPO against it ----------------------------------------------------------------------------


def sampled_pairs(model: Path, count: int) -> list[dict[str, Any]]:
    """The best and the worst of four answers of the model itself, by the share of lower-case letters."""
    plan = Plan(
        base=str(model), config=settings("cpo", model), rewards=[], device="cpu", notes=[], libraries={}, created=""
    )
    rows = [{"prompt": asks(f"Say {n}.")} for n in range(count)]
    texts: dict[int, list[str]] = {}
    for answer in answer_rows(load_engine(str(model), plan), rows, Manner(samples=5)):
        if answer.sample and answer.text.strip():
            texts.setdefault(answer.prompt, []).append(answer.text)
    ranked = {place: sorted(found, key=share_of_letters) for place, found in texts.items()}
    return [
        {**rows[place], "chosen": says(found[-1]), "rejected": says(found[0])}
        for place, found in ranked.items()
        if share_of_letters(found[-1]) > share_of_letters(found[0])
    ]


def share_of_letters(text: str) -> float:
    return sum(letter.islower() for letter in text) / max(len(text), 1)


def test_grpo_against_a_trained_reward_model_raises_the_true_reward(here: Path, tiny_model: Path) -> None:
    def letters(completions: list[str], **columns: Any) -> list[float]:
        """The truth that the pairs were chosen by; GRPO never sees it."""
        return [share_of_letters(text) for text in completions]

    rows = sampled_pairs(tiny_model, 200)
    scorer = trained("reward", tiny_model, rows, max_steps=60, held_out=40, per_device_train_batch_size=16)
    prompts = [{"prompt": asks(f"Say {n}.")} for n in range(1000, 1040)]
    result = trained(
        "grpo",
        tiny_model,
        prompts,
        reward_funcs=[{"reward": str(scorer.folder), "scale": "zscore"}],
        judge_funcs=[letters],
        max_steps=20,
        per_device_train_batch_size=32,
        held_out=12,
    )
    assert result.comparison.total.low > 0
    assert result.comparison.judged["letters"].low > 0


# --- what is rendered -------------------------------------------------------------------------------------------------


def tokenizer_of(tiny_model: Path) -> Any:
    return load_tokenizer(str(tiny_model), planning.TrainConfig.load(settings("cpo", tiny_model), need_data=False))


def test_an_answer_ends_with_one_end_token(tiny_model: Path) -> None:
    tokenizer = tokenizer_of(tiny_model)
    rendered = render_answer(tokenizer, asks("Hi"), says("Yes"))
    assert tokenizer.decode(rendered.ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>"
    assert tokenizer.decode(rendered.answer) == "Yes<|im_end|>"
    plain = render_answer(tokenizer, "Hi ", "Yes")
    assert tokenizer.decode(plain.ids) == "Hi Yes<|im_end|>" and tokenizer.decode(plain.answer) == "Yes<|im_end|>"
    ended = render_answer(tokenizer, "Hi ", "Yes<|im_end|>")
    assert ended.ids == plain.ids


def test_tool_results_are_read_and_not_learned(tiny_model: Path) -> None:
    tokenizer = tokenizer_of(tiny_model)
    answer = [
        {"role": "assistant", "content": "call add"},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "It is 5."},
    ]
    rendered = render_answer(tokenizer, asks("2+3?"), answer)
    assert tokenizer.decode(rendered.answer) == "call add<|im_end|>It is 5.<|im_end|>"
    assert "tool\n5" in tokenizer.decode(rendered.ids)


def test_an_implicit_prompt_is_what_both_answers_begin_with() -> None:
    turn, first, second = asks("Hi")[0], says("A")[0], says("B")[0]
    assert explicit({"chosen": [turn, first], "rejected": [turn, second]}) == {
        "prompt": [turn], "chosen": [first], "rejected": [second],
    }  # fmt: skip
    longer = [turn, first, asks("And?")[0]]
    assert explicit({"chosen": [*longer, second], "rejected": [*longer, first]})["prompt"] == longer
    # an answer that both begin with belongs to the answers: the prompt ends with what was asked
    shared = explicit({"chosen": [turn, first, second], "rejected": [turn, first, first]})
    assert shared["prompt"] == [turn] and shared["chosen"] == [first, second]
    assert explicit({"chosen": "a", "rejected": "b"}) == {"chosen": "a", "rejected": "b"}


def test_the_preference_of_a_model_is_the_log_probability_of_what_it_would_write(tiny_model: Path) -> None:
    plan = Plan(
        base=str(tiny_model),
        config=settings("cpo", tiny_model),
        rewards=[],
        device="cpu",
        notes=[],
        libraries={},
        created="",
    )
    engine = load_engine(str(tiny_model), plan)
    rendered = render_pairs(
        engine.tokenizer, [*pairs(2), {"prompt": asks("?"), "chosen": says("a"), "rejected": says("bb" * 9)}]
    )
    for pair, seen in zip(rendered, preferences(engine, rendered), strict=True):
        for side, value in zip(pair, seen, strict=True):
            with torch.no_grad():
                odds = engine.model(input_ids=torch.tensor([side.ids])).logits[0].double().log_softmax(-1)
            expected = sum(
                odds[place - 1, token].item()
                for place, (token, own) in enumerate(zip(side.ids, side.learned, strict=True)) if own
            )  # fmt: skip
            assert value == pytest.approx(expected, abs=1e-3)


def test_pairs_of_one_prompt_count_as_one() -> None:
    one, other = {"prompt": "a", "chosen": "x", "rejected": "y"}, {"prompt": "b", "chosen": "x", "rejected": "y"}
    scores = [PairScore(2, 1), PairScore(1, 2), PairScore(1, 1), PairScore(4, 0)]
    # prompt a: (1 + 0 + 0.5) / 3 right, margins 1, -1, 0; prompt b: right, margin 4
    assert by_prompt([one, one, one, other], scores) == (pytest.approx(0.75), pytest.approx(2.0), 2)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["reward", "cpo"])
def test_bad_pairs_are_told_before_a_model_loads(here: Path, tiny_model: Path, method: str) -> None:
    rows = [*pairs(3), {**pairs(1)[0], "rejected": pairs(1)[0]["chosen"]}]
    with pytest.raises(DataError, match="row 4: chosen and rejected are equal"):
        planning.draft_from_config({**settings(method, tiny_model), "dataset": rows})
    with pytest.raises(DataError, match=r"needs the columns .*rejected; missing in the dataset: rejected"):
        planning.draft_from_config({**settings(method, tiny_model), "dataset": [{"prompt": "a", "chosen": "b"}]})


def test_a_wrong_loss_is_told(here: Path, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="loss_type"):
        planning.draft_from_config({**settings("cpo", tiny_model, loss_type="dpo"), "dataset": pairs()})


# --- from what was recorded -------------------------------------------------------------------------------------------


def test_a_reward_model_is_trained_on_the_corrections_that_an_agent_was_given(
    here: Path, tiny_model: Path, server_a: FakeServer
) -> None:
    agent = helper(server_a)
    draw = random.Random(0)
    with agent.record():
        for number in range(48):
            agent.clear_history()
            agent.chat(f"Say {number} of {draw.random():.6f}.")  # near duplicates are left out
            rl.feedback(agent.last_run, correction="a" * draw.randint(6, 9))
    result = agent.improve(
        method="reward", base_model=str(tiny_model), max_steps=24, learning_rate=1e-2, seed=8, quiet=True
    )
    assert isinstance(result, TrainedReward)
    assert result.name == "rewards/helper/v1" and result.folder.parent == (HOME / "rewards" / "helper").resolve()
    assert result.card.passed and result.card.accuracy > 0.9
    assert result.card.train + result.card.held_out == 48
    (reward,) = prepare(["rewards/helper"], prompts=[asks("?")], columns={})
    assert reward.name == "helper_v1"
