"""An entry of ``reward_funcs`` may carry parameters, columns, a weight and a name; another process makes it again."""

import itertools
import textwrap

import pytest

from praison_agent_rl.errors import RewardError
from praison_agent_rl.planned_rewards import as_rewards, plan_rewards
from praison_agent_rl.rewards import Reward, as_entry, portable, prepare, resolve, resolve_all

PROMPTS = [[{"role": "user", "content": "Capital of France?"}]]
numbered = itertools.count()


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(code):
        name = f"specs{next(numbered)}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
        return name

    return write


SCORERS = """
    def band(completions, answer=None, *, min=1, max=3, **columns):
        return [float(min <= len(c.split()) <= max) for c in completions]

    def same(completions, truth, **columns):
        return [float(c == t) for c, t in zip(completions, truth)]

    class Longer:
        def __init__(self, than, unit="words"):
            if than < 0:
                raise ValueError(f"than is {than}, but must be 0 or more")
            self.than = than

        def __call__(self, completions, **columns):
            return [float(len(c.split()) > self.than) for c in completions]
"""


def refusal(call, *args, **kwargs):
    with pytest.raises(RewardError) as raised:
        call(*args, **kwargs)
    return str(raised.value)


def test_a_mapping_gives_a_function_its_parameters(module):
    name = module(SCORERS)
    fn = resolve({"reward": f"{name}:band", "min": 2, "max": 2})
    assert fn(completions=["one", "one two", "one two three"]) == [0.0, 1.0, 0.0]


def test_a_mapping_makes_an_instance_of_a_class(module):
    name = module(SCORERS)
    assert resolve({"reward": f"{name}:Longer", "than": 1})(["one", "one two"]) == [0.0, 1.0]
    assert "is a class, not a function" in refusal(resolve, f"{name}:Longer")


def test_a_text_in_braces_is_a_mapping(module):
    name = module(SCORERS)
    assert resolve(f"{{reward: '{name}:band', min: 2}}")(["one", "one two"]) == [0.0, 1.0]
    assert "no mapping that YAML can read" in refusal(resolve, "{reward: [")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"reward": 3}, "its 'reward' is 3, but must be a 'module:function' path or a callable"),
        ({"reward": "m:f", "weight": "much"}, "its weight is 'much', but must be a number"),
        ({"reward": "m:f", "weight": True}, "its weight is True, but must be a number"),
        ({"reward": "m:f", "weight": float("nan")}, "its weight is nan, but must be a number"),
        ({"reward": "m:f", "columns": ["answer"]}, "its columns are ['answer'], but must say"),
        ({"reward": "m:f", "name": " "}, "its name is ' ', but must be a text"),
        ({"reward": "m:f", 3: 4}, "its key 3 is no text"),
    ],
)
def test_what_is_wrong_in_a_mapping_is_told(entry, said):
    assert said in refusal(resolve, entry)


def test_everything_wrong_in_a_mapping_is_told_at_once():
    text = refusal(resolve, {"reward": None, "weight": "x", "name": 1})
    assert text.count(";") == 2 and "'reward' is None" in text and "weight is 'x'" in text and "name is 1" in text


def test_a_parameter_that_a_function_does_not_take_is_told_with_those_that_it_takes(module):
    name = module("def f(completions, *, low=0): return [1.0] * len(completions)")
    text = refusal(resolve, {"reward": f"{name}:f", "lo": 1})
    assert text == f"reward function '{name}:f' takes no 'lo' (did you mean 'low'?); it takes: completions, low"


def test_a_class_that_cannot_be_made_is_told_with_the_cause(module):
    name = module(SCORERS)
    assert "cannot be made with {'than': -1}: ValueError: than is -1" in refusal(
        resolve, {"reward": f"{name}:Longer", "than": -1}
    )
    assert "cannot be made: TypeError" in refusal(resolve, {"reward": f"{name}:Longer"})
    assert "whose instances are no rewards" in refusal(resolve, {"reward": "fractions:Fraction", "numerator": 1})


def test_every_faulty_entry_is_told_at_once(module):
    assert len(refusal(resolve_all, [{"reward": 1}, {"reward": "nomodule:f"}, {"a": 1}]).splitlines()) == 3


def test_weights_names_and_columns_come_from_the_entry(module):
    name = module(SCORERS)
    found = prepare(
        [
            {"reward": f"{name}:band", "min": 2, "weight": 0.5},
            {"reward": f"{name}:band", "min": 1, "max": 9},
            {"reward": f"{name}:same", "columns": {"truth": "gold"}, "name": "correct"},
        ],
        prompts=PROMPTS,
        columns={"gold": ["Paris"], "min": [7]},
    )
    assert [(reward.name, reward.weight) for reward in found] == [("band", 0.5), ("band_2", 1.0), ("correct", 1.0)]
    assert found[2](PROMPTS * 2, ["Paris", "Rome"], gold=["Paris", "Paris"], min=[7, 7]) == [1.0, 0.0]


def test_a_parameter_that_was_given_a_value_is_not_filled_by_a_column_of_its_name(module):
    name = module(SCORERS)
    (reward,) = prepare([{"reward": f"{name}:band", "min": 2}], prompts=PROMPTS, columns={"min": [7]})
    assert reward(PROMPTS * 2, ["one", "one two"], min=[7, 7]) == [0.0, 1.0]


def test_a_column_that_the_entry_names_and_the_data_lack_is_told(module):
    name = module(SCORERS)
    entry = {"reward": f"{name}:same", "columns": {"truth": "gold"}}
    text = refusal(prepare, [entry], prompts=PROMPTS, columns={"answer": ["Paris"]})
    assert text == "reward 'same' needs the column 'gold'; the dataset has: prompt, answer"


def test_weights_in_two_places_are_refused(module):
    name = module(SCORERS)
    entries = [{"reward": f"{name}:band", "weight": 2}, f"{name}:band"]
    text = refusal(prepare, entries, weights=[1.0, 1.0], prompts=PROMPTS, columns={})
    assert text.startswith("reward_weights is given, and the entry of ") and "has a weight too" in text


def test_a_function_may_say_which_columns_it_wants_and_which_form_it_reads():
    seen = []

    def fn(completions, **columns):
        seen.append((completions, columns))
        return [float(len(completion)) for completion in completions]

    fn.takes, fn.reads = ("gold",), ("text", "messages")
    (reward,) = prepare([fn], prompts=PROMPTS, columns={"gold": ["a"], "other": ["b"]})
    assert reward.shape == ("text", "messages") and list(seen[0][1]) == ["gold"]
    assert seen[0][0][0] == [{"role": "assistant", "content": "Yes."}]
    assert len(seen) == 1  # what it says is believed: nothing else is tried


def test_the_scores_of_a_group_may_depend_on_each_other():
    def ranked(completions):
        return [float(number) for number in range(len(completions))]

    ranked.whole_group = True
    assert not prepare([ranked], prompts=PROMPTS, columns={})[0].by_sample
    assert Reward(ranked, "ranked").by_sample  # unless it was tried it is taken for a plain one


def test_another_process_makes_the_same_reward_from_the_plan(module):
    name = module(SCORERS)
    entries = [
        f"{name}:band",
        {"reward": f"{name}:band", "min": 2, "weight": 3, "name": "two"},
        {"reward": f"{name}:Longer", "than": 2},
        {"reward": f"{name}:same", "columns": {"truth": "gold"}},
    ]
    rewards = prepare(entries, prompts=PROMPTS, columns={"gold": ["Paris"]})
    planned = plan_rewards(entries, rewards)
    again = as_rewards(planned)
    answers = ["one", "one two", "one two three"]
    gold = ["one"] * 3
    for first, second in zip(rewards, again, strict=True):
        assert (first.name, first.weight, first.shape) == (second.name, second.weight, second.shape)
        assert first(PROMPTS * 3, answers, gold=gold) == second(PROMPTS * 3, answers, gold=gold)
    assert [plan.parameters for plan in planned] == [{}, {"min": 2}, {"than": 2}, {}]
    assert as_entry(planned[3]) == {"reward": f"{name}:same", "columns": {"truth": "gold"}}


def test_an_object_may_say_how_it_is_made_again_and_what_json_cannot_hold_has_no_name(module):
    class Judge:
        def __init__(self):
            self.reward_spec = {"reward": "mine:Judge", "model": "small"}

        def __call__(self, completions):
            return [1.0] * len(completions)

    assert portable(Judge()) == ("mine:Judge", {"model": "small"})
    assert portable({"reward": "mine:f", "tolerance": object()})[0] is None
    assert portable({"reward": " mine:f ", "words": ["a", None, {"b": 1.5}]}) == (
        "mine:f",
        {"words": ["a", None, {"b": 1.5}]},
    )
    assert portable(lambda completions: [1.0]) == (None, {})
