"""What a watched run has to say is shown in plain lines."""

import io

from rich.console import Console

from praison_agent_rl.progress import RunProgress


def shown(*events):
    out = io.StringIO()
    with RunProgress(Console(file=out, width=300)) as progress:
        for event in events:
            progress(event)
    return [line.strip() for line in out.getvalue().splitlines() if line.strip()]


def test_a_symptom_is_shown_with_what_to_change():
    facts = {"event": "diagnosis", "step": 9, "text": "all got [0.5]", "advice": "raise num_generations (4)"}
    assert shown({**facts, "name": "no signal", "severity": "stop"}) == [
        "! step 9, no signal (training ends): all got [0.5]",
        "what to change: raise num_generations (4)",
    ]
    assert shown({**facts, "name": "truncated", "severity": "warning"})[0] == "! step 9, truncated: all got [0.5]"


def test_looks_at_the_watched_prompts_are_shown_with_their_gain():
    first = {"event": "watched", "step": 0, "total": 0.25, "gain": 0.0, "gain_error": 0.0, "best": False}
    later = {"event": "watched", "step": 25, "total": 0.5, "gain": 0.25, "gain_error": 0.06, "best": True}
    alone = {**later, "gain_error": None, "best": False}
    assert shown(first, later, alone) == [
        "step 0: reward 0.250 on the watched prompts, before training",
        "step 25: reward 0.500 on the watched prompts (+0.250 ±0.060), the best so far",
        "step 25: reward 0.500 on the watched prompts (+0.250)",
    ]
