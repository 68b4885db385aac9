"""The page of a run that was trained on pairs says what a reward model is worth, and what CPO is judged by."""

import json
import math

import pytest

from praison_agent_rl.data import write_rows
from praison_agent_rl.records import Comparison, Interval, PlannedReward, RewardCard, Verdict
from praison_agent_rl.report import card_verdict
from praison_agent_rl.report.pairs import Pairs, length_of, read_pairs, text_of
from praison_agent_rl.runs import RunFolder, write_record
from tests.unit.test_report import BETTER, UNSURE, a_comparison, a_plan, an_answer, said, written

NAN = float("nan")


def a_pair(place, chosen="Short.", rejected="A much longer answer than that one."):
    return {
        "prompt": [{"role": "user", "content": f"question {place}?"}],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }


def a_card(**changes) -> RewardCard:
    given = {
        "name": "short", "version": "v2", "base": "tiny/model", "created": "2026-11-29T22:18:04+00:00", "train": 80,
        "held_out": 40, "accuracy": 0.925, "accuracy_low": 0.801, "accuracy_high": 0.974, "margin": 2.5,
        "score_mean": 0.4, "score_std": 1.75, "form": "messages", "max_length": 512, "passed": True,
        "score_quantiles": {"5 %": -3.0, "25 %": -1.0, "50 %": 0.5, "75 %": 1.5, "95 %": 3.25},
    }  # fmt: skip
    return RewardCard(**{**given, **changes})


def a_pair_step(step, **changes):
    return {
        "step": step, "of": 30, "loss": 0.7 - step / 60, "grad_norm": 1.0, "learning_rate": 1e-4 * (1 - step / 31),
        "accuracy": min(1.0, 0.5 + step / 40), "margin": step / 10, **changes,
    }  # fmt: skip


def a_reward_run(root, *, card=None, rows=None, scores=None, steps=30) -> RunFolder:
    run = RunFolder.create(root)
    write_record(run.plan_file, a_plan(config={"method": "reward", "seed": 42}, rewards=[], agent=None, notes=[]))
    for step in range(1, steps + 1):
        run.report_event("step", **a_pair_step(step))
    write_rows(run.train_rows, [a_pair(place + 100) for place in range(80)])
    rows = [a_pair(place) for place in range(40)] if rows is None else rows
    write_rows(run.held_out_rows, rows)
    if card:
        write_record(run.card, card)
        scores = [(place / 10, 0.25) for place in range(len(rows))] if scores is None else scores
        write_rows(
            run.pair_scores, [{"pair": n, "chosen": one, "rejected": other} for n, (one, other) in enumerate(scores)]
        )
    return run


def a_cpo_run(root, *, comparison, rewards=(), decided=None) -> RunFolder:
    run = RunFolder.create(root)
    config = {"method": "cpo", "seed": 42, "max_completion_length": 32, "temperature": 0.8, "beta": 0.1}
    write_record(run.plan_file, a_plan(config=config, rewards=list(rewards), notes=[]))
    for step in range(1, 31):
        run.report_event("step", **a_pair_step(step))
    write_rows(run.train_rows, [a_pair(place + 100) for place in range(80)])
    write_rows(run.held_out_rows, [a_pair(place) for place in range(40)])
    for side, gain in (("base", 0.0), ("new", 0.2)):
        answers = [
            an_answer(p, 0, p / 80 + gain, rewards={"preference": 1.0}, judged={"margin": 3.0}) for p in range(40)
        ]
        write_rows(run.answers(side), answers)
    write_record(run.comparison_file, comparison)
    if decided:
        write_record(run.verdict_file, decided)
    return run


# --- a reward model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "sentence"),
    [
        (None, "The reward model was trained; no pair was held out, so nothing is known of its worth."),
        (
            a_card(),
            "The reward model is right on 92% of the pairs of 40 held-out prompts (95 % interval 80% to 97%; a coin is "
            "right on 50 %).",
        ),
        (
            a_card(accuracy=0.55, accuracy_low=0.4, accuracy_high=0.69, passed=False),
            "The reward model is not shown to be better than a coin: right on 55% of the pairs",
        ),
        (
            a_card(accuracy=0.2, accuracy_low=0.1, accuracy_high=0.35, passed=False),
            "The reward model is worse than a coin: right on 20% of the pairs",
        ),
        (
            a_card(accuracy=NAN, accuracy_low=NAN, accuracy_high=NAN, passed=False),
            "The scores of the reward model are not numbers.",
        ),
    ],
)
def test_what_a_reward_model_is_worth_is_one_sentence(card, sentence):
    told = card_verdict(card)
    assert told.startswith(sentence) and told.endswith(".") and told.count(". ") == 0


def test_the_page_of_a_reward_model_says_how_often_it_is_right_and_how_to_use_it(tmp_path):
    page, numbers = written(a_reward_run(tmp_path / "run", card=a_card()))
    text = said(page)
    assert 'tone-good"><span class="badge">better than a coin</span>' in page
    assert "right on 92% of the pairs" in text and "nothing was proved" not in text
    assert "right on held-out pairs, 95 % interval 80% to 97%" in text
    assert "mean standard deviation 5 % 25 % 50 % 75 % 95 % 0.400 1.750 -3.000 -1.000 0.500 1.500 3.250" in text
    assert "reward: rewards/short/v2, scale: zscore, clip: 3" in text and 'from_model("rewards/short/v2")' in text
    assert "The shorter answer is the chosen one of 100% of these pairs" in text
    # scores 0.0, 0.1, 0.2 are below 0.25: three pairs wrong, none equal
    assert "Pair by pair: 37 right, 0 equal, 3 wrong" in page and "Scores of the held-out answers" in page
    assert "pairs trained on 80" in text and "pairs held out 40" in text
    model = numbers["reward_model"]
    assert model["accuracy"] == 0.925 and model["pairs_scored"] == 40 and model["version"] == "v2"
    assert model["by_length"] == {"rule": "the shorter answer", "accuracy": 1.0}
    assert numbers["verdict"]["sentence"] in text and numbers["method"] == "reward"


def test_a_reward_model_that_is_no_better_than_length_is_warned_of(tmp_path):
    warned = (
        "the shorter answer is the chosen one of 100% of the held-out pairs, which lies in this model's interval or"
    )
    assert any(w.startswith(warned) for w in written(a_reward_run(tmp_path / "a", card=a_card()))[1]["warnings"])
    # chosen is the longer one of 30 and the shorter one of 10: 75 %, below the interval
    rows = [a_pair(n, *(("longer answer", "short") if n < 30 else ("short", "longer answer"))) for n in range(40)]
    page, numbers = written(a_reward_run(tmp_path / "b", card=a_card(), rows=rows))
    assert numbers["warnings"] == [] and "The longer answer is the chosen one of 75% of these pairs" in said(page)


def test_the_steps_of_pairs_are_drawn_and_called_no_rewards(tmp_path):
    page, numbers = written(a_reward_run(tmp_path / "run", card=a_card()))
    text = said(page)
    assert not any("without a reward" in warning for warning in numbers["warnings"])
    for title in ("loss", "share of the batch's pairs told apart rightly", "margin of chosen over rejected"):
        assert f'aria-label="{title.replace(chr(39), "&#x27;")}"' in page
    assert "These are rewards" not in text and "Not measured" not in text
    assert numbers["training"]["steps"][0]["accuracy"] == pytest.approx(0.525)


def test_a_loss_that_is_no_number_is_warned_of(tmp_path):
    run = a_reward_run(tmp_path / "run", card=a_card(), steps=2)
    run.report_event("step", **a_pair_step(3, loss=None))
    assert "1 training step of 3 without a loss that is a number" in written(run)[1]["warnings"]


def test_pairs_that_it_gets_wrong_and_right_are_shown_with_their_scores(tmp_path):
    rows = [a_pair(place, f"chosen {place}", f"rejected {place}") for place in range(40)]
    text = said(written(a_reward_run(tmp_path / "run", card=a_card(), rows=rows))[0])
    wrong = text.partition("What it gets most wrong")[2]
    assert wrong.lstrip().startswith("pair 1 · margin -0.250 question 0? chosen · 0.000 chosen 0 rejected · 0.250")
    assert "What it tells apart most surely pair 40 · margin +3.650 question 39? chosen · 3.900" in wrong


def test_a_reward_model_without_held_out_pairs_has_a_page(tmp_path):
    page, numbers = written(a_reward_run(tmp_path / "run", rows=[]))
    assert "no pair was held out, so nothing is known of its worth" in said(page)
    assert numbers["reward_model"] is None and 'class="badge">not measured<' in page


def test_texts_without_a_prompt_are_not_taken_for_one_prompt(tmp_path):
    run = a_reward_run(tmp_path / "run", rows=[])
    write_rows(run.train_rows, [{"chosen": f"a {n}", "rejected": "b"} for n in range(9)])
    write_rows(run.held_out_rows, [{"chosen": f"c {n}", "rejected": "d"} for n in range(9)])
    assert written(run)[1]["data"]["shared"] == 0
    write_rows(run.held_out_rows, [{"chosen": "a 0", "rejected": "b"}])
    assert written(run)[1]["data"]["shared"] == 1


def test_scores_that_are_no_numbers_make_a_page(tmp_path):
    card = a_card(margin=NAN, score_mean=NAN, accuracy=0.5, accuracy_low=0.35, accuracy_high=0.65, passed=False)
    page, numbers = written(a_reward_run(tmp_path / "run", card=card, scores=[(NAN, math.inf)] * 40))
    assert numbers["reward_model"]["margin"] is None and "not a number" in said(page)


def test_the_lengths_are_averaged_over_prompts(tmp_path):
    rows = [a_pair(0, "longer", "l"), a_pair(0, "s", "longer"), a_pair(1, "same", "SAME"), a_pair(2, "longer", "l")]
    write_rows(tmp_path / "rows", rows)
    write_rows(tmp_path / "scores", [{"pair": n, "chosen": 1.0, "rejected": 0.5} for n in range(4)])
    found = read_pairs(tmp_path / "scores", tmp_path / "rows")
    # prompt 0: (1 + 0) / 2, prompt 1: 0.5, prompt 2: 1
    assert found is not None and found.longer == pytest.approx(2 / 3)
    assert found.by_length == ("the longer answer", pytest.approx(2 / 3))
    assert read_pairs(tmp_path / "none", tmp_path / "rows") is None
    assert Pairs([1.0, 0.0, 2.0], [0.0, 1.0, 2.0], 0.5).shown() == {"wrong": [1], "right": [0]}


def test_an_answer_of_messages_is_read_with_its_tool_calls():
    call = {"function": {"name": "add", "arguments": "{}"}}
    answer = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "assistant", "content": "Five."}]
    assert text_of(answer) == f"{call}\nFive." and length_of("four") == 4 and text_of(None) == ""
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert text_of(parts) == "a b"


# --- CPO --------------------------------------------------------------------------------------------------------------


def test_cpo_without_rewards_is_judged_by_the_pairs_and_says_so(tmp_path):
    comparison = a_comparison(rewards={"preference": BETTER}, judged={"margin": UNSURE})
    decided = Verdict(status="promoted", text="promoted")
    page, numbers = written(a_cpo_run(tmp_path / "run", comparison=comparison, decided=decided))
    text = said(page)
    assert (
        "The new model is better and passes the gate: share of pairs whose chosen answer is the likelier one 0.410 → "
        "0.780 on 40 held-out prompts" in text
    )
    assert "right on held-out pairs, base → new" in text and "mean reward" not in text
    assert "preference share of held-out pairs 0.410 0.780 +0.370" in text
    assert "margin of held-out pairs, nats 0.400 0.460 +0.060" in text
    assert "preference: the share of held-out pairs whose chosen answer the model finds likelier" in text
    assert "weighted total" not in text and "trained on 0.4" not in text
    assert numbers["reward_model"] is None and numbers["warnings"] == []


def test_cpo_with_rewards_is_judged_by_them_and_they_are_not_called_trained_on(tmp_path):
    rewards = [PlannedReward(spec="m:vowels", name="vowels", weight=1, prompts="text", completions="text")]
    comparison = a_comparison(rewards={"vowels": BETTER}, judged={"preference": BETTER, "margin": UNSURE})
    text = said(written(a_cpo_run(tmp_path / "run", comparison=comparison, rewards=rewards))[0])
    assert "The new model is better: mean reward 0.410 → 0.780" in text
    assert "weighted total not trained on 0.410" in text and "vowels weight 1 0.410" in text
    assert "preference share of held-out pairs 0.410" in text
    assert "the margin is the difference of the two log-probabilities times beta" in text


def test_the_json_of_pairs_has_the_keys_of_all_runs(tmp_path):
    empty = Interval(base=0.5, new=0.5, difference=0.0, low=0.0, high=0.0)
    cpo = written(a_cpo_run(tmp_path / "a", comparison=Comparison(**_counts(empty))))[1]
    reward = written(a_reward_run(tmp_path / "b", card=a_card()))[1]
    assert list(cpo) == list(reward) and json.dumps(cpo)


def _counts(total):
    counts = {"prompts": 40, "samples": 1, "wins": 0, "ties": 40, "losses": 0, "unscored": 0}
    return {"total": total, "rewards": {"preference": total}, "judged": {"margin": total}, **counts}
