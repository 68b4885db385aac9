"""The page of a run says what its folder holds, whatever it holds, and says the same as JSON."""

import doctest
import html
import json
import math
import re
import subprocess
from html.parser import HTMLParser

import pytest

from praison_agent_rl.data import write_rows
from praison_agent_rl.records import (
    Comparison,
    Finding,
    GateRules,
    Guard,
    Interval,
    MergeProof,
    Plan,
    PlannedReward,
    Verdict,
)
from praison_agent_rl.report import page as page_module
from praison_agent_rl.report import verdict, write_report
from praison_agent_rl.report.answers import gains_of, pick, read_side
from praison_agent_rl.report.page import clean, figure
from praison_agent_rl.runs import RunFolder, write_record

NAN = float("nan")
BETTER = Interval(base=0.41, new=0.78, difference=0.37, low=0.29, high=0.45)
UNSURE = Interval(base=0.40, new=0.46, difference=0.06, low=-0.02, high=0.14)
WORSE = Interval(base=0.40, new=0.30, difference=-0.10, low=-0.15, high=-0.05)
KEPT = Guard(
    name="control", base=0.95, new=0.925, limit="no loss that the interval shows", broken=False,
    text="general prompts: 0.950 to 0.925, interval -0.075 to +0.025",
)  # fmt: skip
BROKEN = Guard(
    name="length", base=31.0, new=78.2, limit="at most 2.0 times as long", broken=True,
    text="answers are 2.52 times as long as the base's (31.0 to 78.2 tokens)",
)  # fmt: skip
FINDING = Finding(name="judged", text="the reward rose by +0.370, and correctness, which was not trained on, did not")
HOSTILE = (
    "</script><script>document.title='taken'</script><img src=http://x.invalid/a.png onerror=alert(1)>\u202e\x00\ud800&"
)
"""Markup, an address, text turned round, a NUL, half an emoji."""


def a_plan(**changes) -> Plan:
    given = {
        "base": "tiny/model",
        "config": {"method": "grpo", "seed": 42, "max_completion_length": 32, "temperature": 0.8, "beta": 0.0},
        "rewards": [
            PlannedReward(spec=f"mine:{name}", name=name, weight=weight, prompts="text", completions="text")
            for name, weight in (("brevity", 1.0), ("format", 0.5))
        ],
        "samples": 2,
        "device": "cpu",
        "notes": ["the reward brevity reads answers as plain text"],
        "libraries": {"python": "3.11.7", "torch": "2.13.0+cpu"},
        "created": "2026-11-29T22:18:04+00:00",
        "agent": "Support Bot",
    }
    return Plan(**{**given, **changes})


def a_comparison(total=BETTER, **changes) -> Comparison:
    given = {
        "total": total, "rewards": {"brevity": total, "format": UNSURE}, "judged": {"correctness": WORSE},
        "prompts": 40, "samples": 2, "wins": 29, "ties": 1, "losses": 10, "unscored": 0,
    }  # fmt: skip
    return Comparison(**{**given, **changes})


def a_step(step, **changes):
    wave = 0.3 + 0.4 * (1 - math.exp(-step / 30)) + 0.08 * math.sin(step * 1.7)
    return {
        "step": step, "of": 100, "reward": wave, "reward_std": 0.2, "kl": None, "entropy": 2.5 - wave,
        "grad_norm": 0.4 + 0.1 * math.cos(step), "loss": 0.0, "learning_rate": 1e-4, "frac_reward_zero_std": 0.125,
        "rewards": {"brevity": wave, "format": wave / 2}, "rewards_std": {"brevity": 0.2, "format": 0.1},
        "mean_length": 30 - 8 * wave, "clipped": 0.3, "seconds": 2.0, **changes,
    }  # fmt: skip


def an_answer(prompt, sample, total, text=None, **changes):
    return {
        "prompt": prompt, "sample": sample, "text": text if text is not None else f"answer {prompt}.{sample}",
        "tokens": 10, "rewards": {"brevity": total, "format": 1.0}, "total": total, "judged": {"correctness": 0.5},
        "likelihood": -1.2, "error": None, **changes,
    }  # fmt: skip


def a_row(place, text=None):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text or f"question {place}?"}]
    return {"prompt": messages, "answer": f"reference {place}"}


def a_run(root, *, plan=None, comparison=None, decided=None, steps=100, base=None, new=None, rows=None) -> RunFolder:
    """The folder of a finished run; without ``base`` answers prompt i has totals i/20 before, rising by (i - 10)/40."""
    run = RunFolder.create(root)
    write_record(run.plan_file, plan or a_plan())
    for step in range(1, steps + 1) if isinstance(steps, int) else steps:
        run.report_event("step", **(a_step(step) if isinstance(step, int) else step))
    write_rows(run.train_rows, [a_row(place, f"trained on {place}") for place in range(60)])
    if comparison is None:
        write_rows(run.held_out_rows, [])
        return run
    write_rows(run.held_out_rows, rows or [a_row(place) for place in range(40)])
    samples = [(place, sample) for place in range(40) for sample in (0, 1)]
    write_rows(run.answers("base"), base or [an_answer(p, s, p / 40) for p, s in samples])
    write_rows(run.answers("new"), new or [an_answer(p, s, p / 40 + (p - 10) / 40) for p, s in samples])
    write_record(run.comparison_file, comparison)
    write_record(run.merge_file, MergeProof(tokens=900, merge_error=1e-5, saved_error=2e-5, tolerance=1e-3, change=1.0))
    if decided:
        write_record(run.verdict_file, decided)
    return run


def written(run: RunFolder) -> tuple[str, dict]:
    """The page and the numbers of a run; numbers must be JSON as all readers understand it."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    write_report(run)
    assert run.report.stat().st_size < 2_000_000
    return run.report.read_text(encoding="utf-8"), json.loads(run.numbers.read_text("ascii"), parse_constant=refuse)


def said(page: str) -> str:
    """What a reader sees, without style and plots."""
    page = re.sub(r"<(style|svg)\b.*?</\1>", " ", page, flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


class Elements(HTMLParser):
    """The elements of a page and the names of their attributes."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.addresses = set(), set(), set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.addresses |= {value for name, value in attrs if name in ("src", "href", "xlink:href", "action")}


# --- the sentence -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("comparison", "decided", "sentence"),
    [
        (None, None, "The model was trained; nothing was held out, so nothing was proved."),
        (
            a_comparison(),
            None,
            "The new model is better: mean reward 0.410 → 0.780 on 40 held-out prompts (difference +0.370, "
            "95 % interval +0.290 to +0.450).",
        ),
        (a_comparison(WORSE), None, "The new model is worse: mean reward 0.400 → 0.300 on"),
        (a_comparison(UNSURE), None, "The new model is not shown to be better: mean reward 0.400 → 0.460 on"),
        (a_comparison(prompts=7), None, "The new model is not shown to be better: mean reward 0.410 → 0.780 on 7"),
        (a_comparison(), Verdict(status="promoted", text=""), "The new model is better and passes the gate: mean"),
        (
            a_comparison(),
            Verdict(status="guard broken", text=""),
            "The new model does not pass the gate, since a guard",
        ),
        (a_comparison(), Verdict(status="not better", text=""), "The new model is not shown to be better: mean"),
        (a_comparison(WORSE), Verdict(status="worse", text=""), "The new model is worse: mean"),
        (
            a_comparison(UNSURE),
            Verdict(status="undecided", text=""),
            "It is not decided whether the new model is better",
        ),
        (
            a_comparison(UNSURE),
            Verdict(status="undecided", text="", forced=True),
            "The new model was promoted by force against the verdict 'undecided': mean reward",
        ),
        (
            a_comparison(Interval(base=NAN, new=0.5, difference=NAN, low=NAN, high=NAN)),
            None,
            "The new model is not shown to be better: the mean reward on 40 held-out prompts is not a number.",
        ),
        (
            a_comparison(Interval(base=NAN, new=NAN, difference=NAN, low=NAN, high=NAN), prompts=0),
            Verdict(status="not better", text=""),
            "The new model is not shown to be better: no held-out prompt has a score of both models.",
        ),
    ],
)
def test_the_outcome_is_one_sentence(comparison, decided, sentence):
    told = verdict(comparison, decided)
    assert told.startswith(sentence) and told.endswith(".") and told.count(". ") == 0


def test_a_run_that_passed_by_itself_is_not_called_forced(tmp_path):
    page, numbers = written(a_run(tmp_path / "run", comparison=a_comparison(), decided=_promoted(forced=True)))
    assert "by force" not in said(page) and numbers["verdict"]["forced"] is True


def _promoted(**changes):
    return Verdict(status="promoted", text="promoted", guards=[KEPT], **changes)


# --- the page and its numbers -----------------------------------------------------------------------------------------


def test_the_page_and_the_json_say_the_same(tmp_path):
    page, numbers = written(a_run(tmp_path / "run", comparison=a_comparison(needed=12), decided=_promoted()))
    text = said(page)
    assert "mean reward 0.410 → 0.780 on 40 held-out prompts" in text and "Prompt by prompt: 29 better" in text
    assert "brevity weight 1 0.410 0.780 +0.370 +0.290 to +0.450" in text
    assert "correctness not trained on 0.400 0.300 -0.100 -0.150 to -0.050" in text
    assert "✓ kept control general prompts: 0.950 to 0.925" in text and "guards kept" in text
    assert numbers["verdict"]["sentence"] in text and numbers["verdict"]["status"] == "promoted"
    assert numbers["comparison"]["total"] == BETTER.model_dump() and numbers["comparison"]["better"] is True
    assert numbers["comparison"]["judged"]["correctness"]["difference"] == -0.10
    assert numbers["verdict"]["guards"] == [KEPT.model_dump()]
    steps = numbers["training"]["steps"]
    assert [step["step"] for step in steps] == list(range(1, 101))
    assert steps[4]["rewards"]["format"] == a_step(5)["rewards"]["format"]
    assert numbers["data"] == {
        "train": 60, "held_out": 40, "control": None, "earlier": None, "shared": 0, "manifest": None,
    }  # fmt: skip


def test_a_broken_guard_and_a_finding_are_told_and_shown_before_what_was_kept(tmp_path):
    decided = Verdict(
        status="guard broken", text=f"guard broken: {BROKEN.text}", guards=[KEPT, BROKEN], findings=[FINDING]
    )
    page, numbers = written(a_run(tmp_path / "run", comparison=a_comparison(), decided=decided))
    text = said(page)
    assert f"Gate: guard broken: {BROKEN.text}" in text and FINDING.text in text
    assert text.index("✗ broken length") < text.index("✓ kept control") and "1 of 2 guards kept" in text
    assert [finding["text"] for finding in numbers["verdict"]["findings"]] == [FINDING.text]


def test_a_forced_promotion_says_what_the_gate_said(tmp_path):
    decided = Verdict(status="undecided", text="undecided (50 more prompts needed)", forced=True)
    page, numbers = written(a_run(tmp_path / "run", comparison=a_comparison(UNSURE), decided=decided))
    assert '<p class="forced">Promoted by force. The gate said: undecided (50 more prompts needed)</p>' in page
    assert numbers["verdict"]["forced"] and any("by force" in warning for warning in numbers["warnings"])


def test_data_too_small_to_decide_says_how_much_more_is_needed(tmp_path):
    page, _ = written(a_run(tmp_path / "run", comparison=a_comparison(UNSURE, needed=90)))
    told = "To show a difference of the size seen here (+0.060), about 90 held-out prompts are needed; compared: 40."
    assert told in said(page)
    for name, total in (("sure", BETTER), ("fell", Interval(base=0.5, new=0.4, difference=-0.1, low=-0.3, high=0.1))):
        page, _ = written(a_run(tmp_path / name, comparison=a_comparison(total, needed=90)))
        assert "are needed" not in said(page)


def test_the_incumbent_is_a_row_of_the_comparison(tmp_path):
    decided = _promoted(incumbent=UNSURE)
    run = a_run(tmp_path / "run", plan=a_plan(incumbent="gpt-x"), comparison=a_comparison(), decided=decided)
    assert "against what answers now gpt-x 0.400 0.460 +0.060" in said(written(run)[0])


def test_the_json_has_the_same_keys_whatever_the_run_holds(tmp_path):
    _, whole = written(a_run(tmp_path / "a", comparison=a_comparison(), decided=_promoted()))
    _, bare = written(a_run(tmp_path / "b", steps=0))
    assert list(whole) == list(bare)
    for part in ("verdict", "answers", "training", "data", "rules"):
        assert list(whole[part]) == list(bare[part])
    assert bare["verdict"]["forced"] is False and bare["comparison"] is bare["merge"] is None


def test_the_same_folder_gives_the_same_page(tmp_path):
    run = a_run(tmp_path / "run", comparison=a_comparison(), decided=_promoted())
    assert written(run) == written(run)


def test_the_report_can_be_written_of_a_version_that_has_no_training_rows(tmp_path):
    run = a_run(tmp_path / "v3", comparison=a_comparison(), decided=_promoted())
    run.train_rows.unlink()
    (run.root / "version.json").write_text(json.dumps({"name": "v3", "base_hash": "ab12", "template_hash": None}))
    page, numbers = written(run)
    assert numbers["version"] == "v3" and numbers["data"]["shared"] is None and numbers["repeat"] == []
    assert "ab12 base_hash" in said(page) and "stayed in the folder of the run" in said(page)


# --- runs that lack something -----------------------------------------------------------------------------------------


def test_a_run_without_held_out_prompts_and_steps_has_a_page(tmp_path):
    page, numbers = written(a_run(tmp_path / "run", steps=0))
    assert "nothing was proved" in said(page) and "No training step is recorded" in said(page)
    assert numbers["comparison"] is None and numbers["verdict"]["status"] is None and numbers["training"]["steps"] == []


def test_metrics_that_are_no_numbers_leave_gaps_and_become_null(tmp_path):
    broken = {"reward": NAN, "rewards": {"brevity": None, "format": math.inf}, "rewards_std": {}, "entropy": None}
    steps = [a_step(1), a_step(2, **broken), a_step(3)]
    nothing = Interval(base=NAN, new=0.5, difference=NAN, low=NAN, high=NAN)
    page, numbers = written(a_run(tmp_path / "run", comparison=a_comparison(nothing), steps=steps))
    assert numbers["training"]["steps"][1]["reward"] is None
    assert numbers["comparison"]["total"] == {"base": None, "new": 0.5, "difference": None, "low": None, "high": None}
    assert numbers["comparison"]["better"] is False and "not a number" in said(page)
    assert "1 training step of 3 without a reward that is a number" in numbers["warnings"]


def test_steps_of_which_no_metric_is_known_have_a_page(tmp_path):
    step = {"step": 1, **{name: None for name in a_step(1) if name != "step"}, "rewards": {}, "rewards_std": {}}
    page, _ = written(a_run(tmp_path / "run", steps=[step]))
    assert "Not measured: completion length; entropy; KL to the base model, since beta is 0; " in said(page)


def test_an_answer_that_failed_is_shown_as_failed(tmp_path):
    new = [an_answer(p, s, p / 40) for p in range(40) for s in (0, 1)]
    new[0] = an_answer(0, 0, None, "", tokens=0, rewards={}, judged={}, error="TimeoutError: no answer within 30 s")
    page, numbers = written(a_run(tmp_path / "run", comparison=a_comparison(errors_new=1), new=new, rows=[a_row(0)]))
    assert numbers["answers"]["new"]["errors"] == 1 and numbers["answers"]["new"]["mean_tokens"] == 10
    told = "answers failed: 0 of the base's, 1 of the new model's; they are counted here and have no score"
    assert told in said(page) and "1 answer failed (0 of the base, 1 of the new model)" in said(page)


def test_one_prompt_and_one_step_are_enough_for_a_page(tmp_path):
    sides = {"base": [an_answer(0, 0, 0.5)], "new": [an_answer(0, 0, 0.5)]}
    only = Interval(base=0.5, new=0.5, difference=0.0, low=0.0, high=0.0)
    comparison = a_comparison(only, prompts=1, wins=0, ties=1, losses=0)
    page, _ = written(a_run(tmp_path / "run", comparison=comparison, steps=1, **sides))
    assert "With fewer than 8 prompts nothing is called better; compared: 1." in said(page)


# --- what is shown of the answers -------------------------------------------------------------------------------------


def test_gains_are_differences_of_means_over_the_scored_answers(tmp_path):
    write_rows(
        tmp_path / "a", [an_answer(0, 0, 0.2), an_answer(0, 1, 0.4), an_answer(1, 0, None), an_answer(2, 0, 1.0)]
    )
    write_rows(
        tmp_path / "b", [an_answer(0, 0, 0.9), an_answer(0, 1, None), an_answer(1, 0, 1.0), an_answer(2, 0, NAN)]
    )
    base, new = read_side(tmp_path / "a", 10), read_side(tmp_path / "b", None)
    assert gains_of(base, new) == {0: pytest.approx(0.9 - 0.3)}  # 1 and 2 have no score of both
    assert (base.answers, base.cut, new.cut) == (4, 4, 0)


def test_a_model_that_repeats_itself_is_counted(tmp_path):
    texts = ["same", "same", " same\n", "other", "", ""]
    write_rows(tmp_path / "a", [an_answer(p, 0, 1.0, text) for p, text in enumerate(texts)])
    side = read_side(tmp_path / "a", None)
    assert (side.repeated, side.empty) == (2, 2)


def test_the_best_the_worst_and_some_at_random_are_shown():
    gains = {prompt: (prompt - 10) / 10 for prompt in range(40)}
    shown = pick(gains, range(50), seed=1)
    assert shown["best"] == [39, 38, 37, 36, 35] and shown["worst"] == [0, 1, 2, 3, 4]
    assert len(set(shown["random"])) == 5 and set(shown["random"]) <= set(range(50))
    assert shown == pick(gains, range(50), seed=1) and shown["random"] != pick(gains, range(50), seed=2)["random"]
    assert pick({0: 0.0}, [0], seed=1) == {"best": [], "worst": [], "random": [0]}


def test_the_largest_gain_stands_with_its_question_and_both_answers(tmp_path):
    page, _ = written(a_run(tmp_path / "run", comparison=a_comparison()))
    first = said(page).partition("What got better")[2]
    assert (
        first.index("prompt 40 · +0.725 question 39?")
        < first.index("base answer 39.0")
        < first.index("new answer 39.0")
    )
    assert (
        "expected: reference 39" in first
        and "brevity 0.975 · format 1.000 · correctness (not trained on) 0.500" in first
    )


def test_a_long_answer_is_folded_and_a_very_long_one_cut(tmp_path):
    new = [an_answer(p, s, 1.0 + p, "word " * 20_000) for p in range(40) for s in (0, 1)]
    page, _ = written(a_run(tmp_path / "run", comparison=a_comparison(), new=new))
    assert "the rest: 99,500 characters" in said(page)
    assert "cut here; 97,000 characters more are in the run's folder" in said(page)


def test_answers_that_differ_only_in_what_was_sampled_are_unfolded(tmp_path):
    same = [an_answer(p, s, p / 40 if s else 0.5, f"answer {p}.{s}") for p in range(40) for s in (0, 1)]
    page, _ = written(a_run(tmp_path / "run", comparison=a_comparison(), new=same))
    assert "<details open><summary>1 sampled answer</summary>" in page


# --- hostile and huge -------------------------------------------------------------------------------------------------


def test_hostile_texts_are_shown_and_do_nothing(tmp_path):
    whole = HOSTILE.replace("\ud800", "")  # a record has no form for half an emoji
    name = "$\\frac{1}{" + whole  # also a formula that cannot be read
    plan = a_plan(
        agent=whole, notes=[whole], base=whole, config={"method": "grpo", whole: [whole]}, libraries={whole: whole},
        rewards=[PlannedReward(spec="m:f", name=name, weight=1, prompts="text", completions="text")],
        rules=GateRules(guards={whole: 0.1}),
    )  # fmt: skip
    decided = Verdict(
        status="guard broken", text=whole, findings=[Finding(name=whole, text=whole)],
        guards=[BROKEN.model_copy(update={"name": whole, "text": whole, "limit": whole})],
    )  # fmt: skip
    run = a_run(
        tmp_path / "run",
        plan=plan,
        comparison=a_comparison(rewards={name: UNSURE}, judged={whole: WORSE}),
        decided=decided,
        steps=[a_step(1, rewards={name: 0.5}, rewards_std={name: 0.1}), a_step(2, rewards={name: 0.5}, rewards_std={})],
        rows=[{"prompt": HOSTILE, "answer": HOSTILE} for _ in range(40)],
        new=[an_answer(p, 0, p, HOSTILE, rewards={HOSTILE: p}, error=HOSTILE if p == 3 else None) for p in range(40)],
    )
    run.report_event("note", text=HOSTILE)
    run.manifest.write_text(json.dumps({"left_out": {HOSTILE: 3}, "malformed_example": HOSTILE}))
    page, numbers = written(run)
    found = Elements(page)
    assert not found.tags & {"script", "img", "iframe", "object", "embed", "base", "form"}
    assert not [name for name in found.attributes if name.startswith("on")]
    assert found.addresses <= {"data:,", *re.findall(r'xlink:href="(#[^"]+)"', page)}
    assert not set(page) & {"\x00", "\u202e", "\ud800"}
    assert "</script><script>document.title='taken'</script>" in said(page) and "[U+202E][U+0000]" in page
    assert numbers["agent"] == whole and numbers["notes"][-1] == HOSTILE


def test_a_text_of_the_other_direction_is_kept_and_does_not_turn_its_neighbours(tmp_path):
    new = [an_answer(p, 0, float(p), "القاهرة هي العاصمة") for p in range(40)]
    page, _ = written(a_run(tmp_path / "run", comparison=a_comparison(), new=new))
    assert '<p class="words" dir="auto">القاهرة هي العاصمة</p>' in page


def test_a_hundred_thousand_answers_make_a_small_page(tmp_path):
    prompts = range(25_000)
    run = a_run(
        tmp_path / "run",
        comparison=a_comparison(prompts=25_000),
        rows=[a_row(prompt) for prompt in prompts],
        base=[an_answer(p, s, (p * 7 % 101) / 101) for p in prompts for s in (0, 1)],
        new=[an_answer(p, s, (p * 11 % 103) / 103) for p in prompts for s in (0, 1)],
    )
    page, numbers = written(run)
    assert numbers["answers"]["new"]["answers"] == 50_000 and numbers["data"]["held_out"] == 25_000
    assert len(page) < 400_000


def test_everything_at_once_stays_under_two_megabytes(tmp_path):
    worst = "\u202e" * 9000  # each takes eight bytes on the page
    names = [f"{number}{worst}"[:300] for number in range(60)]
    rewards, values = {name: BETTER for name in names}, {name: 0.5 for name in names}
    decided = Verdict(
        status="guard broken", text=worst, findings=[Finding(name="f", text=worst)] * 500,
        guards=[BROKEN.model_copy(update={"name": worst, "text": worst, "limit": worst})] * 500,
    )  # fmt: skip
    config = {"method": "grpo", "k": [worst[:50]] * 9000}
    run = a_run(
        tmp_path / "run",
        plan=a_plan(notes=[f"{number}{worst}" for number in range(500)], config=config, libraries={worst: worst}),
        comparison=a_comparison(rewards=rewards, judged=rewards),
        decided=decided,
        steps=[a_step(step, rewards=values, rewards_std=values, reward=0.1 * (step % 7)) for step in range(1, 402)],
        rows=[a_row(place, worst * 5) for place in range(40)],
        base=[an_answer(p, s, p, worst * 2, rewards=values) for p in range(40) for s in range(8)],
        new=[an_answer(p, s, 20, worst * 3, rewards=values) for p in range(40) for s in range(8)],
    )
    page, _ = written(run)  # which holds the limit
    assert "in report.json" in said(page)


# --- data, warnings, and how to do it again ---------------------------------------------------------------------------


def test_the_runs_that_were_left_out_are_told_by_reason(tmp_path):
    run = a_run(tmp_path / "run", comparison=a_comparison())
    told = {"runs": 1234, "calls": 5678, "left_out": {"failed": 31, "no call": 12, "new reason": 2}, "largest_group": 4}
    run.manifest.write_text(json.dumps({**told, "dropped": 0, "unreadable": 2, "malformed_example": "run x: no role"}))
    write_rows(run.guard_rows("control"), [a_row(0)] * 7)
    page, numbers = written(run)
    text = said(page)
    assert "called no model (teams, flows, and runs that failed before) 12 ended with an error 31 new reason 2" in text
    assert "Built from 1,234 recorded runs (5,678 calls); the largest group" in text and "2 lines that are torn" in text
    assert "The first malformed prompt: run x: no role" in text and "prompts of the control set 7" in text
    assert numbers["data"]["manifest"]["left_out"]["failed"] == 31 and numbers["data"]["control"] == 7


def test_held_out_prompts_that_were_trained_on_are_found(tmp_path):
    rows = [a_row(place) for place in range(38)] + [a_row(0, "trained on 3"), a_row(0, "trained on 4")]
    page, numbers = written(a_run(tmp_path / "run", comparison=a_comparison(), rows=rows))
    assert numbers["data"]["shared"] == 2
    assert "2 held-out prompts of 40 were trained on too, word for word" in said(page)


def test_groups_without_signal_and_cut_answers_are_warned_of(tmp_path):
    steps = [a_step(step, frac_reward_zero_std=0.75, clipped=0.1 if step <= 6 else 0.9) for step in range(1, 9)]
    warnings = written(a_run(tmp_path / "run", steps=steps))[1]["warnings"]
    assert "75% of the groups had the same reward for every answer, and so taught nothing" in warnings
    assert "90% of the answers of the last steps were cut off at max_completion_length=32" in warnings


def test_prompts_that_taught_nothing_are_counted_by_pass(tmp_path):
    groups = [[[0, 0.0, 1.0, 0], [1, 0.5, 0.5, 0]], [[1, 0.4, 0.6, 1], [1, 0.0, 1.0, 1]]]
    steps = [a_step(step, signal=signal) for step, signal in enumerate(groups, 1)]
    page, numbers = written(a_run(tmp_path / "run", steps=steps))
    assert "Groups of answers without a signal, by pass over the prompts: 50%, 50%." in said(page)
    assert "2 of 2 prompts carried no signal in their last group: 2 all right; curriculum is off" in said(page)
    assert numbers["curriculum"]["draws"] == {"silent": 0.0, "signal": 2.0}
    assert written(a_run(tmp_path / "none"))[1]["curriculum"] is None


def test_the_commands_that_repeat_a_run_copy_all_that_it_was_made_from(tmp_path):
    run = a_run(tmp_path / "a run with a space", comparison=a_comparison())
    write_rows(run.guard_rows("control"), [a_row(0)])
    write_rows(run.recorded, [{"answer": "recorded"}])
    write_rows(run.answered, [{"texts": ["one", "two"]}])
    page, numbers = written(run)
    make, copy, train = numbers["repeat"]
    assert said(page).count(copy) == 1 and train == "praison-agent-rl train --resume repeated"
    subprocess.run(f"{make} && {copy}", shell=True, check=True, cwd=tmp_path)
    again = RunFolder.open(tmp_path / "repeated")
    assert again.plan == run.plan
    kept = {"plan.json", "train.jsonl", "held_out.jsonl", "control.jsonl", "recorded.jsonl", "answered.jsonl"}
    assert {path.name for path in again.root.iterdir()} == kept


def test_a_comparison_without_training_is_repeated_by_its_two_measurements(tmp_path):
    run = a_run(tmp_path / "run", plan=a_plan(candidate="helper/v3"), comparison=a_comparison(), steps=0)
    page, numbers = written(run)
    assert numbers["repeat"][-1] == "python -m praison_agent_rl.stages repeated measure_base measure_new"
    assert "new helper/v3" in said(page) and "No training step" not in said(page)


def test_a_run_whose_reward_has_no_name_says_that_it_cannot_be_repeated(tmp_path):
    reward = PlannedReward(spec=None, name="<lambda>", weight=1, prompts="text", completions="text")
    page, numbers = written(a_run(tmp_path / "run", plan=a_plan(rewards=[reward])))
    assert numbers["repeat"] == [] and "<lambda> existed only in the process that planned the run" in said(page)


def test_hashes_are_those_of_sha256sum(tmp_path):
    run = a_run(tmp_path / "run", comparison=a_comparison())
    _, numbers = written(run)
    listed = subprocess.run(["sha256sum", *numbers["hashes"]], cwd=run.root, capture_output=True, text=True, check=True)
    assert dict(reversed(line.split("  ")) for line in listed.stdout.splitlines()) == numbers["hashes"]
    assert "plan.json" in numbers["hashes"] and "answers_new.jsonl" in numbers["hashes"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.4375, "0.438"), (0.0, "0.000"), (1e-5, "1e-05"), (12345.6, "12,346"), (999.9, "999.900"),
        (NAN, "not a number"), (math.inf, "not a number"), (None, "none"), (-2, "-2.000"), (1e12, "1e+12"),
    ],
)  # fmt: skip
def test_numbers_are_written_for_people(value, shown):
    assert figure(value) == shown


def test_what_cannot_be_seen_is_written_out():
    assert clean("a\u202eb\x00c\r\nd\re\ud800") == "a[U+202E]b[U+0000]c\nd[U+000D]e\ufffd"
    assert clean("x" * 300, 10) == "x" * 10 + "…"


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(page_module).failed == 0


# --- what the run showed ----------------------------------------------------------------------------------------------


def watched_plan(**config):
    return a_plan(config={**a_plan().config, "watch": True, **config})


def a_watched_run(root):
    run = a_run(root, plan=watched_plan(), steps=60)
    told = {"text": f"answers grew {HOSTILE}".replace("\ud800", ""), "advice": "lower learning_rate"}
    run.report_event("diagnosis", name="length explosion", step=40, severity="warning", **told)
    run.report_event("diagnosis", name="plateau", step=60, severity="stop", text="it stays", advice="raise patience")
    for step, total in ((0, 0.3), (30, 0.6), (30, 0.61), (60, 0.5)):  # the look at step 30 was made twice
        facts = {"gain": total - 0.3, "gain_error": None if step == 0 else 0.05, "best": step == 30}
        run.report_event("watched", step=step, of=100, total=total, totals=[total] * 9, **facts)
    run.report_event("note", text="the adapter is that of step 30, the best one on the watched prompts")
    return run


def test_what_the_run_showed_is_on_the_page_and_in_the_numbers(tmp_path):
    page, numbers = written(a_watched_run(tmp_path / "run"))
    part = said(page).partition("What the run showed")[2]
    assert "▲ warning step 40 length explosion : answers grew </script>" in part.replace("explosion:", "explosion :")
    assert "■ ended the run step 60" in part and "What to change: raise patience" in part
    assert "9 prompts of the training data were put aside" in part
    assert "The adapter is that of step 30, the best one on the watched prompts." in part
    assert "0 0.300 before training 30 0.610 +0.310 ±0.050 ★ best so far 60 0.500 +0.200 ±0.050" in part
    assert Elements(page).tags.isdisjoint({"script", "img"})
    assert [symptom["name"] for symptom in numbers["diagnosis"]] == ["length explosion", "plateau"]
    assert numbers["diagnosis"][1] == {
        "name": "plateau", "step": 60, "severity": "stop", "text": "it stays", "advice": "raise patience",
    }  # fmt: skip
    assert [(look["step"], look["total"]) for look in numbers["watched"]] == [(0, 0.3), (30, 0.61), (60, 0.5)]


def test_a_run_without_symptoms_says_what_was_looked_for(tmp_path):
    page, numbers = written(a_run(tmp_path / "run", plan=watched_plan(), steps=12))
    assert "Nothing out of the ordinary was seen in 12 steps." in said(page)
    assert "No prompts were put aside to watch with" in said(page)
    assert numbers["diagnosis"] == numbers["watched"] == []


def test_a_run_that_was_not_watched_says_so_and_an_older_one_says_nothing(tmp_path):
    page, _ = written(a_run(tmp_path / "run", plan=watched_plan(watch=False), steps=12))
    assert "This run was not watched (watch: false)." in said(page)
    page, _ = written(a_run(tmp_path / "older", steps=12))
    assert "What the run showed" not in said(page)


def test_the_page_tells_how_the_rewards_were_called(tmp_path):
    first = {"format": {"samples": 8, "none": 0.25, "failed": 0.0, "nan": 0, "hits": 3, "seconds": 0.5}}
    usage = {"calls": 4, "prompt_tokens": 90, "completion_tokens": 10, "cost": 0.002}
    failed = {"samples": 8, "none": 0.0, "failed": 0.125, "nan": 1, "hits": 5, "seconds": 1.0, "error": "<b>NaN</b>"}
    steps = [a_step(1, calls=first), a_step(2, calls={"format": {**failed, "usage": usage}})]
    page, numbers = written(a_run(tmp_path / "run", steps=steps))
    assert numbers["calls"]["format"] == {
        "samples": 16, "none": 2, "failed": 1, "nan": 1, "hits": 8, "seconds": 1.5, "error": "<b>NaN</b>",
        "usage": usage,
    }  # fmt: skip
    assert "Rewards as they were called" in page and "first fault: &lt;b&gt;NaN&lt;/b&gt;" in page
    assert "The judge format made 4 calls with 100 tokens: 0.002 USD." in page
    assert written(a_run(tmp_path / "old", steps=[a_step(1)]))[1]["calls"] == {}
