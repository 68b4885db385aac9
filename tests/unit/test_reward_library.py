"""Every reward of the library: documented by what runs, light to import, the same on texts, messages and rollouts."""

import builtins
import doctest
import importlib.util
import inspect
import pickle
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml

from praison_agent_rl import reward_library
from praison_agent_rl.errors import MissingExtra, RewardError
from praison_agent_rl.reward_library import quantities, reading
from praison_agent_rl.rewards import Reward, prepare, resolve, spec_of

NAMES = reward_library.__all__
DOCS = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")

CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "search", "arguments": '{"q": "x"}'}}]}
GIVEN = {
    "accuracy": {"answer": ["4"]},
    "exact": {"answer": ["4"]},
    "contains": {"answer": ["4"]},
    "fuzzy": {"answer": ["4"]},
    "numeric": {"answer": ["4"]},
    "math_equal": {"answer": ["4"]},
    "regex": {"pattern": "4"},
    "json_schema": {"schema": {"type": "object"}},
    "forbidden": {"phrases": "4"},
    "soft_overlong": {"completion_ids": [[1, 2]], "limit": 9},
    "right_tool": {"tool": ["search"]},
    "right_arguments": {"calls": [{"name": "search", "arguments": {"q": "x"}}]},
}
"""What a reward needs besides a completion."""


def scored(name, completion):
    (score,) = getattr(reward_library, name)(completions=[completion], **GIVEN.get(name, {}))
    return score


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_each_reward_runs(name):
    fn = getattr(reward_library, name)
    (test,) = doctest.DocTestFinder(recurse=False).find(fn, name, module=False, globs={name: fn})
    assert test.examples
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


@pytest.mark.parametrize("fn", [quantities.amounts, reading.final_answer, reading.plain])
def test_the_examples_of_the_helpers_run(fn):
    (test,) = doctest.DocTestFinder(recurse=False).find(fn, module=False, globs={fn.__name__: fn})
    assert test.examples and doctest.DocTestRunner(verbose=False).run(test).failed == 0


@pytest.mark.parametrize("name", NAMES)
def test_each_reward_is_in_the_docs_with_its_parameters_and_an_example_in_yaml(name):
    fn = getattr(reward_library, name)
    row = next(line for line in DOCS.splitlines() if line.startswith(f"| `{name}` |"))
    parameters = list(inspect.signature(fn).parameters.values())
    for parameter in parameters:
        if parameter.name not in ("completions", "completion_ids"):
            assert f"`{parameter.name}" in row, f"{parameter.name} is missing in the row of {name}"
    examples = [spec for block in re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL) for spec in specs_in(block)]
    mine = [spec for spec in examples if spec["reward"] == f"praison_agent_rl.reward_library:{name}"]
    assert mine
    for spec in mine:
        given = {key: value for key, value in spec.items() if key not in ("reward", "weight", "columns", "name")}
        assert set(given) <= {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        columns = {key: value for key, value in GIVEN.get(name, {}).items() if key not in given}
        assert (
            len(partial(fn, **given)(completions=["4"], **{key: columns[key] for key in columns if key in fn.takes}))
            == 1
        )


def specs_in(block):
    loaded = yaml.safe_load(block)
    specs = loaded.get("reward_funcs") if isinstance(loaded, dict) else None
    return [spec for spec in specs or [] if str(spec.get("reward", "")).startswith("praison_agent_rl.reward_library")]


@pytest.mark.parametrize("name", NAMES)
def test_each_reward_is_found_by_name_and_can_be_sent_to_another_process(name):
    fn = getattr(reward_library, name)
    assert resolve(f"praison_agent_rl.reward_library:{name}") is fn
    assert resolve(spec_of(fn)) is fn and pickle.loads(pickle.dumps(fn)) is fn
    assert fn.__name__ == name


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_keyword_only_with_defaults_and_columns_are_declared(name):
    fn = getattr(reward_library, name)
    first, *others = inspect.signature(fn).parameters.values()
    assert first.name == "completions"
    columns = [p.name for p in others if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert fn.takes == tuple(columns)
    assert all(p.default is not p.empty for p in others if p.kind is p.KEYWORD_ONLY)
    assert fn.reads == ("messages", "messages") and fn.reads.completions == "messages"


@pytest.mark.parametrize("name", NAMES)
def test_a_text_and_messages_that_say_the_same_have_the_same_score(name):
    text = "The answer is 4, as I think."
    parts = [{"type": "text", "text": "The answer is 4, "}, {"type": "image"}, {"type": "text", "text": "as I think."}]
    score = scored(name, text)
    assert scored(name, [{"role": "assistant", "content": text}]) == score
    assert scored(name, [{"content": text}]) == score
    assert scored(name, [{"role": "assistant", "content": parts}]) == score


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("few_calls", "right_tool", "right_arguments")])
def test_in_a_rollout_the_last_assistant_message_counts(name):
    text = "The answer is 4, as I think."
    rollout = [
        {"role": "assistant", "content": "Let me see, 5 or as an AI [1]. " * 9},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": text},
        {"role": "tool", "content": "6"},
    ]
    assert scored(name, rollout) == scored(name, text)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "completion", ["", None, [], [{"role": "assistant", "content": None}], [{"role": "tool", "content": "4"}], [None]]
)
def test_nothing_said_is_scored_like_an_empty_text(name, completion):
    assert scored(name, completion) == scored(name, "")


@pytest.mark.parametrize("name", NAMES)
def test_odd_letters_are_scored_too(name):
    for text in ("\ud800 half an emoji", "\x00", "漢字かな", "🙂🙂", "\u202e", "a\r\nb"):
        score = scored(name, text)
        assert score is None or -1.0 <= score <= 1.0


@pytest.mark.parametrize("name", NAMES)
def test_the_arguments_of_a_call_stay_as_they_are(name):
    given = {"completions": [[CALL, {"role": "assistant", "content": "<think>a</think>4"}]], **GIVEN.get(name, {})}
    before = repr(given)
    getattr(reward_library, name)(**given)
    assert repr(given) == before


@pytest.mark.parametrize("name", NAMES)
def test_what_trl_passes_besides_is_dropped(name):
    extra = {"prompts": ["?"], "trainer_state": object(), "log_extra": print, "log_metric": print, "gold": ["x"]}
    given = {"completion_ids": [[1]], **GIVEN.get(name, {})}
    assert len(getattr(reward_library, name)(completions=["4"], **extra, **given)) == 1


@pytest.mark.parametrize("name", ["exact", "contains", "fuzzy", "numeric", "math_equal", "accuracy"])
@pytest.mark.parametrize("answer", [None, "", "  ", [], [None], [""], float("nan"), float("inf"), {"a": 1}])
def test_a_row_without_a_ground_truth_has_no_score(name, answer):
    fn = getattr(reward_library, name)
    assert fn(["4", "4"], [answer, "4"])[0] is None


@pytest.mark.parametrize("name", ["exact", "contains", "fuzzy", "numeric", "math_equal"])
@pytest.mark.parametrize("answer", ["4", 4, 4.0, ["4"], ["5", 4], [None, "4"], ("3", "4"), "2+2\n#### 4"])
def test_a_ground_truth_is_a_text_a_number_or_a_list_of_accepted_answers(name, answer):
    fn = getattr(reward_library, name)
    assert fn(["4", "6"], [answer, answer]) == [1.0, 0.0]


def test_one_ground_truth_for_all_rows_may_be_given_as_a_parameter():
    assert partial(reward_library.exact, answer="Paris")(["Paris", "Rome"]) == [1.0, 0.0]


def test_a_column_of_the_wrong_length_is_told():
    with pytest.raises(RewardError, match="exact: answer has 1 values for 2 completions; it needs one for each"):
        reward_library.exact(["a", "b"], ["a"])


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("length_band", {"min": "5"}, "min must be a whole number, not '5'"),
        ("length_band", {"min": [5, 5]}, r"min must be a whole number, not \[5, 5\] \(has the dataset a column 'min'"),
        ("length_band", {"min": True}, "min must be a whole number, not True"),
        ("length_band", {"min": -1}, "min must be at least 0, not -1"),
        ("length_band", {"min": 5, "max": 3}, r"max must be at least min \(5\), not 3"),
        ("length_band", {"unit": "lines"}, "unit must be one of words, characters, tokens; not 'lines'"),
        ("length_band", {"fall": float("nan")}, "fall must be a number, not nan"),
        ("length_band", {"unit": "tokens"}, "tokens can be counted where completion_ids are given"),
        ("length_band", {"mn": 5}, "length_band has no parameter 'mn'; it takes: min, max, unit, fall"),
        ("think_format", {"strict": True}, "think_format has no parameter 'strict'; it takes none"),
        ("length_penalty", {"limit": 0}, "limit must be more than 0"),
        ("length_penalty", {"limit": -3}, "limit must be at least 0, not -3"),
        ("soft_overlong", {"completion_ids": [[1]]}, "limit must be at least 1, not 0"),
        ("soft_overlong", {"completion_ids": [[1]], "limit": 5, "margin": 9}, r"margin must be at most limit \(5\)"),
        ("soft_overlong", {"completion_ids": None, "limit": 5}, "tokens can be counted where completion_ids"),
        ("exact", {"answer": ["a"], "case": "yes"}, "case must be true or false, not 'yes'"),
        ("exact", {"answer": ["a"], "tag": "a b"}, "tag must be the name of a tag"),
        ("fuzzy", {"answer": ["a"], "method": "best"}, "method must be one of ratio, partial_ratio"),
        ("fuzzy", {"answer": ["a"], "least": 2}, "least must be from 0 to 1, not 2"),
        ("numeric", {"answer": ["1"], "tolerance": "1%"}, "tolerance must be a number, not '1%'"),
        ("numeric", {"answer": ["1"], "units": "some"}, "units must be one of optional, required"),
        ("math_equal", {"answer": ["1"], "seconds": 0}, "seconds must be at least 0.01, not 0"),
        ("regex", {}, "pattern must be a text, for example"),
        ("regex", {"pattern": "("}, r"pattern '\(' is no regular expression: missing \)"),
        ("regex", {"pattern": "a", "mode": "find"}, "mode must be one of search, match, fullmatch"),
        ("tags", {"names": []}, r"names of tags must be a text or a list of texts.*not \[\]"),
        ("tags", {"names": ["<a>"]}, "a tag's name has letters, digits"),
        ("tags", {"names": ["a", "A"]}, "names of tags must differ"),
        ("think_answer", {"thinking": ""}, "names of tags must be a text or a list"),
        ("json_valid", {"kind": "list"}, "kind must be one of object, array, any; not 'list'"),
        ("json_schema", {}, "schema must be a mapping"),
        ("json_schema", {"schema": {"type": "thing"}}, "schema is no JSON Schema: 'thing' is not valid"),
        ("language", {"language": "english"}, "language 'english' is not known; write one of: .*en, "),
        ("language", {"language": []}, "language must be a text or a list of texts"),
        ("forbidden", {}, "phrases must be a text or a list of texts"),
        ("citations", {"least": 0}, "least must be at least 1, not 0"),
        ("repetition", {"n": 0}, "n must be at least 1, not 0"),
        ("few_calls", {"free": 5, "most": 5}, r"most must be more than free \(5\), not 5"),
        ("right_arguments", {"calls": ["{oops"]}, "calls must be JSON where it is a text, not '{oops'"),
        ("right_arguments", {"calls": [{"arguments": {}}]}, r"calls must be {name: ..., arguments"),
    ],
)
def test_a_wrong_parameter_is_told_with_its_value(name, wrong, said):
    with pytest.raises(RewardError, match=f"^{name}.*{said}" if not said.startswith(name) else said):
        getattr(reward_library, name)(completions=["4"], **wrong)


def test_importing_the_library_loads_nothing_heavy():
    heavy = ["numpy", "torch", "trl", "rapidfuzz", "math_verify", "sympy", "pint", "jsonschema", "regex", "py3langid"]
    code = f"import sys, praison_agent_rl.reward_library; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("fuzzy", "rapidfuzz", "rewards"),
        ("regex", "regex", "rewards"),
        ("json_schema", "jsonschema", "rewards"),
        ("language", "py3langid", "rewards"),
        ("think_format", "trl", "train"),
        ("soft_overlong", "trl", "train"),
    ],
)
def test_a_missing_package_is_told_with_its_extra(name, package, extra, monkeypatch):
    for cached in (reward_library.style._teller, reward_library.patterns.compiled):
        cached.cache_clear()
    real = builtins.__import__

    def without(module, *args, **kwargs):
        if module.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return real(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=rf"needs {package}.*: pip install \"praison-agent-rl\[{extra}\]\""):
        scored(name, "The answer is 4, as I think it is in all.")


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("math_equal", "math_verify", "rewards"), ("accuracy", "math_verify", "rewards"), ("accuracy", "trl", "train")],
)
def test_a_missing_package_of_the_process_for_formulas_is_told_before_it_starts(name, package, extra, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == package else real(module))
    with pytest.raises(MissingExtra, match=rf"{name} needs {package.replace('_', '-')}: .*\[{extra}\]"):
        scored(name, "4")


def test_numbers_without_units_need_no_pint(monkeypatch):
    quantities._unit.cache_clear()
    quantities._registry.cache_clear()
    monkeypatch.setitem(sys.modules, "pint", None)
    assert reward_library.numeric(["It is 42.", "$5"], [42, "5 dollars"]) == [1.0, 1.0]
    with pytest.raises(MissingExtra, match=r"a number with a unit needs pint: .*\[rewards\]"):
        reward_library.numeric(["5 km"], ["5000 m"])


def test_a_reward_of_the_library_works_through_the_checked_call():
    reward = Reward(reward_library.exact, "exact", shape=reward_library.exact.reads)
    assert reward(["?", "?"], ["Paris.", "Rome"], answer=["Paris", None], rating=[1, 2]) == [1.0, None]


def test_a_column_of_the_dataset_changes_no_parameter_of_the_same_name():
    band = {"reward": "praison_agent_rl.reward_library:length_band", "min": 2, "max": 4, "weight": 0.5}
    english = "praison_agent_rl.reward_library:language"
    gold = {"reward": "praison_agent_rl.reward_library:exact", "columns": {"answer": "gold"}}
    columns = {"min": [100], "unit": ["tokens"], "language": ["de"], "tag": ["x"], "gold": ["a b"], "answer": ["no"]}
    rewards = prepare([band, english, gold], prompts=["?"], columns=columns)
    text = "The capital of France is Paris, and it lies on the river Seine."
    assert [reward.weight for reward in rewards] == [0.5, 1.0, 1.0]
    assert rewards[0](["?"], ["a b"], **columns) == [1.0]
    assert rewards[1](["?"], [text], **columns) == [1.0]
    assert rewards[2](["?"], ["a b"], **columns) == [1.0]


def test_a_missing_column_and_a_wrong_parameter_are_told_before_training():
    with pytest.raises(RewardError, match="reward 'exact' needs the column 'answer'; the dataset has: prompt"):
        prepare("praison_agent_rl.reward_library:exact", prompts=["?"], columns={})
    wrong = {"reward": "praison_agent_rl.reward_library:length_band", "min": 5, "max": 3}
    with pytest.raises(RewardError, match=r"max must be at least min \(5\), not 3"):
        prepare([wrong], prompts=["?"], columns={})
    with pytest.raises(RewardError, match=r"takes no 'mn' \(did you mean 'min'\?\); it takes: .*min, max"):
        prepare([{"reward": "praison_agent_rl.reward_library:length_band", "mn": 5}], prompts=["?"], columns={})


@pytest.mark.parametrize("name", NAMES)
def test_each_reward_can_be_prepared_from_its_name_and_tells_answers_apart_or_not(name):
    fn = getattr(reward_library, name)
    given = GIVEN.get(name, {})
    parameters = {key: value for key, value in given.items() if key not in fn.takes}
    columns = {key: given[key] for key in given if key in fn.takes and key != "completion_ids"}
    spec = {"reward": f"praison_agent_rl.reward_library:{name}", **parameters}
    (reward,) = prepare([spec], prompts=[[{"role": "user", "content": "?"}]], columns=columns)
    assert reward.name == name and reward.shape == ("messages", "messages")
