"""The report of a run opens in a real browser: readable, in light and dark, wide and narrow, and asks for nothing."""

import os
from pathlib import Path

import pytest

from praison_agent_rl.records import Verdict
from praison_agent_rl.report import write_report
from tests.docs.chromium import CHROMIUM, open_page
from tests.unit.test_report import (
    BROKEN,
    FINDING,
    HOSTILE,
    KEPT,
    UNSURE,
    a_comparison,
    a_plan,
    a_row,
    a_run,
    an_answer,
)
from tests.unit.test_report_pairs import a_card, a_pair, a_reward_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")

SAMPLES = [(prompt, sample) for prompt in range(40) for sample in (0, 1)]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """Of a run whose texts are hostile, with everything in it that a page can hold."""
    whole = HOSTILE.replace("\ud800", "")  # a record has no form for half an emoji
    plan = a_plan(agent=whole, notes=[whole])
    decided = Verdict(
        status="guard broken", text=f"guard broken: {BROKEN.text}", guards=[KEPT, BROKEN], findings=[FINDING]
    )
    run = a_run(
        tmp_path_factory.mktemp("runs") / "run",
        plan=plan,
        comparison=a_comparison(),
        decided=decided,
        rows=[a_row(place, HOSTILE) for place in range(40)],
        new=[an_answer(p, s, p / 40 + (p - 10) / 40, text=HOSTILE * 40) for p, s in SAMPLES],
    )
    write_report(run)
    return run.report


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_is_whole_asks_for_nothing_and_says_nothing_on_the_console(page, dark, width):
    pictures = os.environ.get("REPORT_PICTURES")  # a folder, for whoever wants to look at them
    picture = Path(pictures) / f"report-{'dark' if dark else 'light'}-{width}.png" if pictures else None
    opened = open_page(page, dark=dark, width=width, picture=picture)
    assert opened.console == []
    assert set(opened.requests) == {"/report.html"}
    seen = opened.measured
    assert seen["fetched"] == []
    assert seen["width"] == width and seen["needed"] == width  # nothing sticks out to the side
    assert (seen["scripts"], seen["images"], seen["title"]) == (0, 0, "Training run run")
    # a forest plot, a histogram, a total, two rewards, length, entropy, shares, gradient norm
    assert seen["plots"] == 9 and seen["drawn"]
    light, dark_ = sorted((_brightness(seen["ink"]), _brightness(seen["paper"])), reverse=True)
    assert light - dark_ > 180 and (_brightness(seen["paper"]) < 60) == dark


def test_the_verdict_stands_first_and_the_broken_guard_before_the_kept_one(page):
    dom = open_page(page).dom.partition("<main>")[2]
    texts = ["does not pass the gate, since a guard is broken", "Held-out comparison", "✗ broken", "✓ kept"]
    texts += ["Signs of reward hacking", "Answers side by side", "Training", "how to repeat it"]
    places = [dom.index(text) for text in texts]
    assert places == sorted(places)


def test_a_forced_promotion_is_red(tmp_path):
    decided = Verdict(status="undecided", text="undecided (50 more prompts needed)", forced=True)
    run = a_run(tmp_path / "run", comparison=a_comparison(UNSURE), decided=decided)
    write_report(run)
    opened = open_page(run.report)
    assert '<p class="forced">Promoted by force. The gate said: undecided (50 more prompts needed)</p>' in opened.dom
    assert "tone-bad" in opened.dom and opened.console == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_of_a_reward_model_is_whole_too(tmp_path, dark, width):
    whole = HOSTILE.replace("\ud800", "")
    rows = [a_pair(place, HOSTILE * 9, HOSTILE) for place in range(40)]
    run = a_reward_run(tmp_path / "run", card=a_card(name=whole, base=whole), rows=rows)
    write_report(run)
    pictures = os.environ.get("REPORT_PICTURES")
    picture = Path(pictures) / f"reward-{'dark' if dark else 'light'}-{width}.png" if pictures else None
    opened = open_page(run.report, dark=dark, width=width, picture=picture)
    seen = opened.measured
    assert opened.console == [] and seen["fetched"] == [] and set(opened.requests) == {"/report.html"}
    assert seen["width"] == width and seen["needed"] == width
    # how often it is right, margins, scores; loss, share, margin, gradient norm, learning rate
    assert (seen["scripts"], seen["images"], seen["plots"]) == (0, 0, 8) and seen["drawn"]


def _brightness(colour: str) -> float:
    """Of ``rgb(r, g, b)``, 0 to 255, as ITU-R BT.601 weighs it."""
    red, green, blue = (int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
    return 0.299 * red + 0.587 * green + 0.114 * blue
