"""The rewards of the guides give the numbers that their guides' formulas give, on texts and on message lists."""

import importlib.util
from pathlib import Path

import pytest

from praison_agent_rl.rewards import prepare

PATH = Path(__file__).parents[2] / "examples" / "rewards.py"
spec = importlib.util.spec_from_file_location("example_rewards", PATH)
examples = importlib.util.module_from_spec(spec)
spec.loader.exec_module(examples)

FULL = "<reasoning>2+2</reasoning>\n<answer>4</answer>"
THOUGHT = "<think>2+2</think><answer>4</answer>"

CASES = [
    ("length_penalty", ["", "one two three four five", "word " * 20, "word " * 90], {}, [1.0, 0.75, 0.0, 0.0]),
    ("contains_answer", ["It is Paris.", "Rome"], {"answer": ["paris", "paris"]}, [1.0, 0.0]),
    ("correctness_reward", [FULL, "so #### 4", "5", "4"], {"answer": ["4"] * 4}, [2.0, 2.0, 0.0, 2.0]),
    ("format_reward", [FULL, f"Well: {FULL} ok", "<answer>4</answer>", "4"], {}, [1.0, 1.0, 0.0, 0.0]),
    ("incremental_format_reward", [FULL, "<answer>4</answer>", "<reasoning>", ""], {}, [1.0, 0.5, 0.25, 0.0]),
    ("reward_function_name", ["AB", "Ab", ""], {}, [1.0, 0.5, 0.0]),
    ("reward_fn", [" <answer>4", "4 <answer>"], {}, [1.0, -0.5]),
    ("think_format_reward", [THOUGHT, f"{THOUGHT}.", f"Hm {THOUGHT}", "4"], {}, [1.0, -1.0, -1.0, -1.0]),
    ("accuracy_reward", [THOUGHT, "5"], {"ground_truth": ["4", "4"]}, [1.0, 0.0]),
    ("length_penalty_reward", ["", "x" * 500, "x" * 9000], {}, [1.0, 0.75, 0.0]),
]


@pytest.mark.parametrize(("name", "texts", "columns", "expected"), CASES)
def test_a_guides_reward_gives_the_guides_numbers_on_texts_and_messages(name, texts, columns, expected):
    fn, prompts = getattr(examples, name), ["?"] * len(texts)
    as_messages = [[{"role": "assistant", "content": text}] for text in texts]
    without_role = [[{"content": text}] for text in texts]
    for completions in (texts, as_messages, without_role):
        assert fn(prompts=prompts, completions=completions, completion_ids=[[1]] * len(texts), **columns) == expected


def test_a_repeated_tag_is_not_paid_twice():
    assert examples.incremental_format_reward(["<answer>" * 50]) == [0.25]


def test_every_reward_of_the_guides_is_tested_here():
    own = {name for name, value in vars(examples).items() if getattr(value, "__module__", "") == "example_rewards"}
    assert own - {"text_of", "extract_answer"} == {case[0] for case in CASES}


def test_the_last_message_of_the_assistant_counts_and_one_without_content_is_empty():
    rollout = [
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "<answer>"},
        {"role": "assistant", "content": "one two three four five"},
    ]
    assert examples.length_penalty(["?"], [rollout]) == [0.75]
    assert examples.length_penalty(["?"], [rollout[:1]]) == [1.0]
    assert examples.length_penalty(["?"], [[]]) == [1.0]


@pytest.mark.parametrize("form", ["text", "messages"])
def test_all_of_them_can_be_tried_before_training(form):
    prompt = "What is 2+2?" if form == "text" else [{"role": "user", "content": "What is 2+2?"}]
    fns = [getattr(examples, name) for name, *_ in CASES]
    prepared = prepare(fns, prompts=[prompt], columns={"answer": ["4"], "ground_truth": ["4"]})
    assert [reward.name for reward in prepared] == [case[0] for case in CASES]
    assert [fn.__name__ for fn in examples.combined_rewards] == ["think_format_reward", "accuracy_reward"]


def test_content_in_parts_is_read_as_text():
    parts = [{"type": "text", "text": "one two"}, {"type": "image"}, {"type": "text", "text": " three"}]
    assert examples.text_of([{"role": "assistant", "content": parts}]) == "one two three"
