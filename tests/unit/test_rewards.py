"""Reward functions are found, told apart when broken, tried and called as their authors meant; nothing is loaded."""

import asyncio
import functools
import itertools
import logging
import os
import signal
import subprocess
import sys
import textwrap
from fractions import Fraction

import pytest

from praison_agent_rl import rewards
from praison_agent_rl.rewards import (
    Reward,
    RewardError,
    Shape,
    as_scores,
    check_signature,
    find_shape,
    name_of,
    needed_columns,
    prepare,
    require,
    resolve,
    resolve_all,
    spec_of,
    total,
    unique_names,
)

TEXT, MESSAGES = Shape("text", "text"), Shape("messages", "messages")
CHAT = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital of France?"}]]
PLAIN = ["Capital of France?"]
numbered = itertools.count()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module that no other test has imported, in the current folder; returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(source: str, name: str = "") -> str:
        name = name or f"made_up_{next(numbered)}"
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return name

    return write


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(RewardError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


SEED = """
    def length_penalty(prompts, completions, **kwargs) -> list[float]:
        return [max(0.0, 1.0 - len(c.split()) / 20) for c in completions]
    def contains_answer(completions, answer, **kwargs):
        return [float(a in c) for c, a in zip(completions, answer)]
    some_int = 3
"""


def length_penalty(prompts, completions, **kwargs):
    return [max(0.0, 1.0 - len(c.split()) / 20) for c in completions]


def of_content(completions, **kwargs):
    return [float(len(c[0]["content"])) for c in completions]


# --- the texts of the seed document -----------------------------------------------------------------------------------


def test_a_missing_reward_for_grpo_is_told_with_an_example():
    assert refusal(require, "grpo", []) == (
        "method 'grpo' needs reward_funcs: a list of 'module:function' import paths\n"
        "that score completions. Example:\n"
        "  reward_funcs:\n"
        "    - myproject.rewards:length_penalty"
    )


def test_other_methods_and_a_grpo_with_rewards_require_nothing():
    require("grpo", [length_penalty])
    require("reward", [])
    require("cpo", [])


def test_a_module_that_does_not_exist_is_told_to_be_put_on_the_path():
    assert refusal(resolve, "nomodule:f") == (
        "cannot import 'nomodule' for reward function 'nomodule:f': No module named 'nomodule'. Is it on PYTHONPATH?"
    )


def test_a_missing_function_lists_the_callables_that_are_there(module):
    name = module(SEED)
    assert refusal(resolve, f"{name}:no_such") == (
        f"'{name}' has no 'no_such'. Callables there: contains_answer, length_penalty"
    )


def test_a_dot_for_a_colon_is_told_with_an_example():
    assert refusal(resolve, "mymod.func") == (
        "reward function 'mymod.func' is not a 'module:function' path. Example: myproject.rewards:length_penalty"
    )


def test_something_not_callable_is_told_by_its_type(module):
    name = module(SEED)
    assert refusal(resolve, f"{name}:some_int") == f"'{name}:some_int' is a int, not a function"


def test_a_function_without_completions_is_a_warning_and_not_a_failure(caplog):
    def my_reward(prompts, answers):
        return [0.0]

    text = "my_reward does not take 'completions'; TRL calls reward functions as (prompts, completions, **kwargs)"
    assert check_signature(my_reward) == f"WARNING: {text}"
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(logging.WARNING, text)]


def test_no_more_than_eight_callables_are_listed_and_they_are_sorted(module):
    name = module("\n".join(f"def f{i}(): ..." for i in (9, 3, 1, 2, 4, 5, 6, 7, 8)) + "\ndef _hidden(): ...")
    assert refusal(resolve, f"{name}:x").endswith("Callables there: f1, f2, f3, f4, f5, f6, f7, f8")


def test_a_module_without_callables_says_none(module):
    assert refusal(resolve, f"{module('x = 1')}:f").endswith("has no 'f'. Callables there: none")


def test_every_broken_path_is_told_at_once(module):
    name = module(SEED)
    assert refusal(resolve_all, ["nomodule:f", f"{name}:length_penalty", "mymod.func", f"{name}:some_int"]) == (
        "cannot import 'nomodule' for reward function 'nomodule:f': No module named 'nomodule'. Is it on PYTHONPATH?\n"
        "reward function 'mymod.func' is not a 'module:function' path. Example: myproject.rewards:length_penalty\n"
        f"'{name}:some_int' is a int, not a function"
    )


def test_a_reward_error_is_a_value_error():
    assert issubclass(RewardError, ValueError)


# --- resolving --------------------------------------------------------------------------------------------------------


def test_one_spec_a_list_a_tuple_or_nothing_are_all_taken(module):
    name = module(SEED)
    one = resolve(f"{name}:length_penalty")
    assert one([], ["a b"]) == [0.9]
    assert resolve_all(f"{name}:length_penalty") == [one]
    assert resolve_all((f"{name}:length_penalty", one)) == [one, one]
    assert resolve_all(length_penalty) == [length_penalty]
    assert resolve_all([]) == resolve_all(None) == []


def test_callables_are_returned_unchanged():
    part = functools.partial(length_penalty, extra=1)
    assert resolve(length_penalty) is length_penalty
    assert resolve(part) is part
    assert resolve(len) is len


def test_blanks_around_the_parts_are_forgiven(module):
    name = module(SEED)
    fn = resolve(f"{name}:length_penalty")
    assert (
        resolve(f" {name}:length_penalty ")
        is resolve(f"{name}: length_penalty\n")
        is resolve(f"{name} :length_penalty")
    )
    assert resolve(f" {name}:length_penalty ") is fn


@pytest.mark.parametrize(
    "spec", ["", "   ", ":", ":f", "mod:", "a b:c", "mod:f g", "a:b:c", ".mod:f", "a..b:f", "m:f.", "m:1"]
)
def test_malformed_paths_get_the_text_of_the_document(spec):
    assert refusal(resolve, spec) == (
        f"reward function {spec!r} is not a 'module:function' path. Example: myproject.rewards:length_penalty"
    )


@pytest.mark.parametrize("spec", [3, None, {"a": 1}, 0.5, ["m:f"], b"m:f"])
def test_things_that_are_neither_text_nor_callable_get_the_text_of_the_document(spec):
    assert refusal(resolve, spec) == (
        f"reward function {spec!r} is not a 'module:function' path. Example: myproject.rewards:length_penalty"
    )


def test_a_number_or_a_mapping_in_a_list_of_specs_is_refused_with_the_rest():
    assert len(refusal(resolve_all, [3, None, {"a": 1}]).splitlines()) == 3
    assert refusal(resolve_all, {"m:f": 1.0}).startswith("reward function {'m:f': 1.0} is not")


def test_two_paths_in_one_text_are_told_to_be_a_list():
    assert refusal(resolve, "mod:f, mod:g") == (
        "reward function 'mod:f, mod:g' is not a 'module:function' path. Example: myproject.rewards:length_penalty. "
        "It names 2; write them as a list: ['mod:f', 'mod:g']"
    )


@pytest.mark.parametrize(
    ("spec", "instead"),
    [
        ("./m.py:f", "m:f"),
        ("m.py:f", "m:f"),
        ("pkg/m.py:f", "pkg.m:f"),
        ("/home/me/m.py:f", "m:f"),
        ("../m.py : f", "m:f"),
        (r"C:\me\m.py:f", "m:f"),
        ("m.py", "m:function"),
    ],
)
def test_a_file_path_is_told_what_to_write_instead(spec, instead):
    text = refusal(resolve, spec)
    assert text.startswith(f"reward function {spec!r} is not a 'module:function' path. Example: myproject.rewards:")
    assert text.endswith(f". It names a file; write the module instead: {instead}")


def test_a_missing_submodule_does_not_exist_either(module):
    module("", "pack_a.__init__")
    name = module("x = 1")
    assert refusal(resolve, "pack_a.nope:f") == (
        "cannot import 'pack_a.nope' for reward function 'pack_a.nope:f': No module named 'pack_a.nope'. "
        "Is it on PYTHONPATH?"
    )
    assert refusal(resolve, "nopack.m:f") == (
        "cannot import 'nopack.m' for reward function 'nopack.m:f': No module named 'nopack'. Is it on PYTHONPATH?"
    )
    assert refusal(resolve, f"{name}.m:f") == (
        f"cannot import '{name}.m' for reward function '{name}.m:f': No module named '{name}.m'; "
        f"'{name}' is not a package. Is it on PYTHONPATH?"
    )


def test_a_missing_import_inside_a_module_is_told_from_a_missing_module(module):
    name = module("import missing_dep.deep\ndef f(completions): ...")
    assert refusal(resolve, f"{name}:f") == (
        f"'{name}' for reward function '{name}:f' could not be imported: "
        "it needs 'missing_dep', which is not installed (No module named 'missing_dep')"
    )


def test_a_missing_sibling_inside_a_package_is_told_from_a_missing_module(module):
    module("", "pack_b.__init__")
    module("from . import nothere\nimport pack_b.gone", "pack_b.r")
    module("import pack_b.gone", "pack_b.s")
    assert "could not be imported: ImportError: cannot import name 'nothere'" in refusal(resolve, "pack_b.r:f")
    assert "it needs 'pack_b.gone', which is not installed" in refusal(resolve, "pack_b.s:f")


def test_a_syntax_error_is_told_with_file_and_line(module, tmp_path):
    name = module("x = 1\ndef f(:\n    ...\n")
    text = refusal(resolve, f"{name}:f")
    assert text.startswith(f"'{name}' for reward function '{name}:f' could not be imported: SyntaxError: ")
    assert text.endswith(f" ({tmp_path / name}.py, line 2)")


def test_a_module_that_raises_is_told_with_cause_and_line(module, tmp_path):
    name = module("x = 1\n\ny = undefined\n")
    assert refusal(resolve, f"{name}:f") == (
        f"'{name}' for reward function '{name}:f' could not be imported: "
        f"NameError: name 'undefined' is not defined ({tmp_path / name}.py, line 3)"
    )
    nameless = module("raise ModuleNotFoundError('buy the full version')")
    assert refusal(resolve, f"{nameless}:f").endswith("ModuleNotFoundError: buy the full version")


def test_a_module_that_exits_does_not_end_the_process(module, tmp_path):
    name = module("import sys\nsys.exit(3)\n")
    assert refusal(resolve, f"{name}:f") == (
        f"'{name}' for reward function '{name}:f' could not be imported: SystemExit: 3 ({tmp_path / name}.py, line 2)"
    )


def test_an_interrupt_while_importing_still_passes(module):
    name = module("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        resolve(f"{name}:f")


def test_the_import_path_is_as_it_was_afterwards(module, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = list(sys.path)
    resolve(f"{module(SEED)}:length_penalty")
    assert sys.path == before
    refusal(resolve, f"{module('1 / 0')}:f")
    assert sys.path == before
    name = module(f"import sys\nsys.path.remove({str(tmp_path)!r})\ndef f(completions): ...")
    assert resolve(f"{name}:f") is not None
    assert sys.path == before


def test_a_module_in_the_current_folder_is_found_by_an_installed_command(module, tmp_path):
    name = module(SEED)
    program = tmp_path / "elsewhere" / "command.py"  # its own folder is first on the path, as for a console script
    program.parent.mkdir()
    program.write_text(f"from praison_agent_rl.rewards import resolve; assert resolve('{name}:length_penalty')")
    root = os.path.dirname(os.path.dirname(rewards.__file__))
    done = subprocess.run([sys.executable, program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, timeout=60)
    assert done.returncode == 0


def test_a_base_folder_is_searched_instead_of_the_current_one(module, tmp_path):
    module("def f(completions): ...", "folder.only_here")
    assert refusal(resolve, "only_here:f").startswith("cannot import 'only_here'")
    assert resolve("only_here:f", base=tmp_path / "folder").__name__ == "f"


OBJECTS = """
    import functools
    class Judge:
        def __call__(self, completions, **kw): return [1.0] * len(completions)
        def score(self, completions, **kw): return [2.0] * len(completions)
        @staticmethod
        def fixed(completions, **kw): return [3.0] * len(completions)
        @classmethod
        def made(cls, completions, **kw): return [4.0] * len(completions)
        @property
        def broken(self): raise OSError("no disk")
        def plain(completions, **kw): return [5.0] * len(completions)
        label = "x"
    judge = Judge()
    part = functools.partial(Judge.fixed, extra=1)
"""


@pytest.mark.parametrize(
    ("path", "score"),
    [
        ("judge", 1.0),
        ("judge.score", 2.0),
        ("Judge.fixed", 3.0),
        ("Judge.made", 4.0),
        ("Judge.plain", 5.0),
        ("part", 3.0),
    ],
)
def test_instances_methods_and_partials_are_found_by_path(module, path, score):
    assert resolve(f"{module(OBJECTS)}:{path}")(["a", "b"]) == [score, score]


def test_a_class_is_told_to_be_one_however_it_is_given(module):
    name = module(OBJECTS)
    tail = "is a class, not a function. Point at an instance of it or at one of its methods"
    assert refusal(resolve, f"{name}:Judge") == f"'{name}:Judge' {tail}"
    assert refusal(resolve, Reward) == f"<class 'praison_agent_rl.rewards.Reward'> {tail}"


def test_a_method_without_its_instance_is_told_what_is_wrong(module):
    name = module(OBJECTS)
    assert refusal(resolve, f"{name}:Judge.score") == (
        f"'score' of the class '{name}:Judge' is a method that needs an instance ('self'). "
        "Point at the method of an instance, or make it a @staticmethod"
    )


def test_a_missing_attribute_further_down_lists_what_is_there(module):
    name = module(OBJECTS)
    expected = "has no 'nope'. Callables there: fixed, made, plain, score"
    assert refusal(resolve, f"{name}:Judge.nope") == f"'{name}:Judge' {expected}"
    assert refusal(resolve, f"{name}:judge.nope") == f"'{name}:judge' {expected}"
    assert refusal(resolve, f"{name}:judge.label.nope").startswith(f"'{name}:judge.label' has no 'nope'.")
    assert refusal(resolve, f"{name}:judge.label") == f"'{name}:judge.label' is a str, not a function"


def test_an_attribute_that_raises_is_an_error_like_the_others(module):
    name = module(OBJECTS)
    assert refusal(resolve, f"{name}:judge.broken") == f"'broken' of '{name}:judge' cannot be read: OSError: no disk"


# --- signatures and names ---------------------------------------------------------------------------------------------


def test_functions_that_can_be_given_completions_are_not_warned_about(caplog):
    def keywords(**kwargs): ...

    def keyword_only(*, completions): ...

    for fn in (length_penalty, keywords, keyword_only, functools.partial(length_penalty, []), max):
        assert check_signature(fn) is None
    assert not caplog.records


def test_functions_that_cannot_be_given_completions_by_name_are_warned_about():
    def starred(*args): ...

    def named_star(*completions): ...

    def positional(prompts, completions, /): ...

    for fn in (starred, named_star, positional):
        assert check_signature(fn).startswith(f"WARNING: {fn.__name__} does not take 'completions'; TRL calls")


def test_a_warning_about_a_nameless_object_names_its_spec():
    class Judge:
        def __call__(self, texts): ...

    assert check_signature(Judge(), "mod:judge").startswith("WARNING: mod:judge does not take")
    assert check_signature(Judge()).startswith("WARNING: Judge does not take")


def test_needed_columns_are_what_trl_does_not_pass_by_itself():
    def fn(prompts, completions, gold, completion_ids, *args, level, soft=1, **kwargs): ...

    def live(trainer_state, log_extra, log_metric, environments): ...

    assert needed_columns(fn) == ["gold", "level"]
    assert needed_columns(functools.partial(fn, level=2)) == ["gold"]
    assert needed_columns(length_penalty) == needed_columns(live) == needed_columns(max) == []


def test_names_are_those_of_the_function_its_partial_or_its_class():
    class Judge:
        def __call__(self, completions): ...

    part = functools.partial(functools.partial(length_penalty, a=1), b=2)
    assert name_of(length_penalty) == name_of(part) == "length_penalty"
    assert name_of(Judge()) == "Judge"
    assert name_of(functools.partial(Judge())) == "Judge"
    part.__name__ = "mine"
    assert name_of(part) == "mine"


def test_names_are_unique_and_lambdas_are_numbered():
    def other(completions): ...

    other.__name__ = "length_penalty_2"
    fns = [lambda c: c, length_penalty, lambda c: c, length_penalty, other, length_penalty]
    assert unique_names(fns) == [
        "lambda_1",
        "length_penalty",
        "lambda_2",
        "length_penalty_2",
        "length_penalty_2_2",
        "length_penalty_3",
    ]
    assert unique_names([]) == []


def test_a_spec_is_given_only_where_another_process_finds_the_same_object(module):
    name = module(
        OBJECTS + "\n    def f(completions): ...\n    g = lambda completions: []\n    def out(): return lambda: 1"
    )
    found = resolve(f"{name}:f")
    judge = resolve(f"{name}:judge")
    assert spec_of(found) == f"{name}:f"
    assert spec_of(resolve(f"{name}:Judge.made")) == f"{name}:Judge.made"
    assert spec_of(resolve(f"{name}:Judge.fixed")) == f"{name}:Judge.fixed"
    for lost in (judge, judge.score, resolve(f"{name}:g"), resolve(f"{name}:out")(), resolve(f"{name}:part")):
        assert spec_of(lost) is None


def test_main_shadowed_and_hand_made_functions_have_no_spec(module):
    name = module("import functools\ndef f(completions): ...\nold = f\ndef f(completions): ...")
    assert spec_of(resolve(f"{name}:old")) is None  # its name now belongs to another function

    def from_main(completions): ...

    from_main.__module__, from_main.__qualname__ = "__main__", "from_main"
    assert spec_of(from_main) is None
    made = type(sys)("made_by_hand")
    exec("def f(completions): ...", vars(made))
    sys.modules["made_by_hand"] = made
    try:
        assert resolve("made_by_hand:f") is made.f
        assert spec_of(made.f) is None  # only this process has the module
    finally:
        del sys.modules["made_by_hand"]


# --- what a reward returns --------------------------------------------------------------------------------------------


class Tensor:
    """Stands in for numpy and torch, which this module may not import."""

    def __init__(self, inner):
        self.inner = inner

    def tolist(self):
        return self.inner


@pytest.mark.parametrize(
    ("values", "scores"),
    [
        ([1, 0.5, None], [1.0, 0.5, None]),
        ((True, False, float("nan")), [1.0, 0.0, None]),
        (Tensor([0.25, 1, 2]), [0.25, 1.0, 2.0]),
        ([Tensor(0.25), Tensor(None), Fraction(1, 2)], [0.25, None, 0.5]),
    ],
)
def test_numbers_of_any_kind_become_floats_and_nan_becomes_none(values, scores):
    found = as_scores(values, "r", 3)
    assert found == scores
    assert {type(score) for score in found} <= {float, type(None)}


def test_numpy_and_torch_values_are_taken():
    np = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    assert as_scores(np.array([1, 2]), "r", 2) == [1.0, 2.0]
    assert as_scores([np.float32(0.5), np.bool_(True)], "r", 2) == [0.5, 1.0]
    assert as_scores(torch.tensor([0.5, float("nan")], dtype=torch.bfloat16), "r", 2) == [0.5, None]
    assert as_scores([torch.tensor(1.5, requires_grad=True)], "r", 1) == [1.5]


def test_an_infinite_score_is_no_score_and_is_said_once(caplog):
    assert as_scores([float("inf"), 1.0, -float("inf")], "to the sky", 3) == [None, 1.0, None]
    assert as_scores([10**400], "to the sky", 1) == [None]
    assert [r.getMessage() for r in caplog.records] == [
        "reward 'to the sky' returned an infinite value; it counts as None (no score)"
    ]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1.0], "reward 'r' returned 1 for 2 completions, [1.0]"),
        ([1.0] * 3, "reward 'r' returned 3 for 2 completions, [1.0, 1.0, 1.0]"),
        (0.5, "reward 'r' returned a float, 0.5"),
        (None, "reward 'r' returned a NoneType, None"),
        ("ok", "reward 'r' returned a str, 'ok'"),
        ({0: 1.0, 1: 0.0}, "reward 'r' returned a dict, {0: 1.0, 1: 0.0}"),
        (Tensor(1.0), "reward 'r' returned a Tensor, "),
        ([1.0, "0.5"], "reward 'r' returned '0.5' among its scores"),
        ([1.0, [0.5]], "reward 'r' returned [0.5] among its scores"),
        ([1.0, 1j], "reward 'r' returned 1j among its scores"),
    ],
)
def test_anything_else_is_refused_with_what_came_and_what_is_wanted(values, said):
    text = refusal(as_scores, values, "r", 2)
    assert text.startswith(said)
    assert text.endswith("; wanted: a list with one number or None per completion")


def test_a_long_return_value_is_shortened():
    text = refusal(as_scores, "x" * 500, "r", 2)
    assert "'" + "x" * 76 + "..." in text and len(text) < 200


# --- calling ----------------------------------------------------------------------------------------------------------


def seen(shape, prompts, completions):
    """What a reward of ``shape`` is given."""
    kept = {}

    def fn(prompts, completions):
        kept.update(prompts=prompts, completions=completions)
        return [0.0] * len(completions)

    Reward(fn, "fn", shape=shape)(prompts, completions)
    return kept["prompts"], kept["completions"]


PARTS = [{"type": "text", "text": "It is "}, {"type": "image"}, {"type": "text", "text": "Paris"}]
ANSWER = [
    {"role": "assistant", "content": "Let me look."},
    {"role": "tool", "content": "Paris"},
    {"role": "assistant", "content": PARTS},
]


def test_messages_are_read_as_the_last_user_and_the_last_assistant_text():
    assert seen(TEXT, CHAT, [ANSWER]) == (["Capital of France?"], ["It is Paris"])
    empty = [{"role": "assistant", "content": None, "tool_calls": [{}]}]
    assert seen(TEXT, [[]], [empty]) == ([""], [""])
    assert seen(TEXT, ["p"], ["c"]) == (["p"], ["c"])


def test_texts_are_read_as_one_message():
    assert seen(MESSAGES, ["p"], ["c"]) == (
        [[{"role": "user", "content": "p"}]],
        [[{"role": "assistant", "content": "c"}]],
    )
    assert seen(MESSAGES, CHAT, [ANSWER]) == (CHAT, [ANSWER])
    assert seen(Shape("messages", "text"), CHAT, [ANSWER]) == (CHAT, ["It is Paris"])


def test_a_reward_cannot_change_what_it_is_given():
    def vandal(prompts, completions, tags):
        prompts[0].clear()
        completions[0][0]["content"] = "good"
        completions.append("more")
        tags[0].append("x")
        return [1.0]

    prompts, completions, tags = (
        [[{"role": "user", "content": "p"}]],
        [[{"role": "assistant", "content": "c"}]],
        [["t"]],
    )
    assert Reward(vandal, "vandal", shape=MESSAGES)(prompts, completions, tags=tags) == [1.0]
    assert prompts == [[{"role": "user", "content": "p"}]]
    assert completions == [[{"role": "assistant", "content": "c"}]]
    assert tags == [["t"]]


def test_a_reward_is_given_only_what_it_takes():
    class Live:
        def __deepcopy__(self, memo):
            raise AssertionError("a live object is not copied")

    state = Live()
    everything = {"completion_ids": [[1]], "gold": ["g"], "trainer_state": state, "log_metric": state}
    given = {}

    def keywords(**kwargs):
        given.update(kwargs)
        return [1.0]

    assert Reward(lambda completions: [len(completions[0])], "a")(["p"], ["four"], **everything) == [4.0]
    assert Reward(lambda prompts, gold: [gold[0] == "g"], "b")(["p"], ["c"], **everything) == [1.0]
    assert Reward(keywords, "c")(["p"], ["c"], **everything) == [1.0]
    assert given == {"prompts": ["p"], "completions": ["c"], **everything} and given["trainer_state"] is state


def test_a_reward_can_be_given_to_trl_as_it_is():
    reward = Reward(length_penalty, "short")
    assert reward.__name__ == name_of(reward) == "short"
    assert (reward.weight, reward.shape) == (1.0, TEXT)
    assert reward(prompts=["p"], completions=["a b"], completion_ids=[[1, 2]], trainer_state=None) == [0.9]
    assert check_signature(reward) is None


async def slow(completions, **kwargs):
    await asyncio.sleep(0)
    return [float(len(c)) for c in completions]


def test_async_rewards_work_with_and_without_a_running_loop():
    reward = Reward(slow, "slow")

    async def inside():
        return reward(["p"], ["four"])

    assert reward(["p"], ["four"]) == [4.0]
    assert asyncio.run(inside()) == [4.0]


def test_a_reward_that_raises_or_exits_is_told_with_cause_and_completion():
    def broken(completions):
        raise ValueError("row 7")

    async def late(completions):
        raise KeyError("gold")

    text = "reward 'r' failed: ValueError: row 7 (first completion: 'good')"
    assert refusal(Reward(broken, "r"), ["p"], ["good"]) == text
    assert (
        refusal(Reward(late, "r"), ["p"], ["good"]) == "reward 'r' failed: KeyError: 'gold' (first completion: 'good')"
    )
    assert refusal(Reward(lambda completions: sys.exit(3), "r"), ["p"], ["good"]).startswith(
        "reward 'r' failed: SystemExit"
    )
    long = refusal(Reward(broken, "r"), ["p"], ["x" * 500])
    assert long.endswith("x...)") and len(long) < 150
    assert refusal(Reward(broken, "r"), [], []) == "reward 'r' failed: ValueError: row 7"


def test_an_interrupt_inside_a_reward_still_passes():
    def stop(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Reward(stop, "r")(["p"], ["c"])


def test_the_scores_of_a_call_are_checked():
    assert refusal(Reward(lambda completions: [1.0], "r"), ["p"] * 8, ["c"] * 8).startswith(
        "reward 'r' returned 1 for 8 completions, [1.0]"
    )


def test_a_total_is_the_weighted_sum_of_the_scores_there_are():
    assert total([[1.0, None, None], [0.5, 0.25, None]], [2.0, -1.0]) == [1.5, -0.25, None]
    assert total([[1.0]], [0.5]) == [0.5]
    assert total([], []) == []


# --- trying -----------------------------------------------------------------------------------------------------------


def test_the_form_is_found_for_text_and_for_message_rewards_on_both_kinds_of_prompt():
    for prompts in (PLAIN, CHAT):
        assert find_shape(length_penalty, prompts, {}) == TEXT
        assert find_shape(of_content, prompts, {}) == MESSAGES


def test_a_form_that_works_but_cannot_tell_answers_apart_gives_way_to_one_that_can():
    def by_length(prompts, completions, **kwargs):  # seed 004: len() is 1 on every message list
        return [max(0, 1.0 - len(c) / 2000) for c in completions]

    def by_answer(completions, answer):  # never true of a message list
        return [float(a in c) for c, a in zip(completions, answer, strict=True)]

    def by_format(completions):
        return [float("<answer>" in c and "</think>" in c) for c in completions]

    def exact(completions, answer):
        return [c == a for c, a in zip(completions, answer, strict=True)]

    for fn in (by_length, by_answer, by_format, exact):
        assert find_shape(fn, CHAT, {"topic": ["x"], "answer": ["Lyon"]}) == TEXT


def test_a_reward_that_works_on_both_forms_without_telling_answers_apart_reads_text():
    def constant(completions):
        return [0.5] * len(completions)

    def no_apology(completions):  # no sample answer apologises, and `in` works on a list too
        return [0.0 if "sorry" in c else 1.0 for c in completions]

    def begs(completions):
        return [float(c.count("please")) for c in completions]

    for reward in (constant, no_apology, begs, lambda completions: [None] * len(completions)):
        assert find_shape(reward, CHAT, {}) == TEXT
        assert find_shape(reward, PLAIN, {}) == TEXT


def test_a_constant_reward_written_for_messages_still_gets_messages():
    assert find_shape(lambda completions: [0.0 * len(c[0]["content"]) for c in completions], CHAT, {}) == MESSAGES


def test_a_reward_whose_own_errors_and_values_cannot_be_shown_is_still_named():
    class Odd(Exception):
        def __str__(self):
            raise ValueError("no text")

        __repr__ = __str__

    class Value:
        def __repr__(self):
            raise ValueError("no text")

    def raises(completions):
        raise Odd

    def returns(completions):
        return [Value()] * len(completions)

    def leaves(completions):
        raise GeneratorExit

    for reward, said in ((raises, "failed: Odd"), (returns, "returned <Value>"), (leaves, "failed: GeneratorExit")):
        with pytest.raises(RewardError, match=said):
            Reward(reward, "r")(["p"], ["c"])


def test_an_async_reward_that_hangs_inside_a_running_loop_can_be_interrupted(tmp_path):
    script = tmp_path / "hang.py"
    script.write_text(
        "import asyncio, time\n"
        "from praison_agent_rl.rewards import Reward\n"
        "async def slow(completions):\n"
        "    print('begun', flush=True)\n"
        "    time.sleep(600)\n"
        "async def main():\n"
        "    Reward(slow, 'slow')(['p'], ['c'])\n"
        "try:\n"
        "    asyncio.run(main())\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    for patience in (2, 20):  # the first cancels asyncio's own task, the second ends the waiting
        process.send_signal(signal.SIGINT)
        try:
            process.wait(patience)
            break
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    assert process.stdout.read() == "interrupted\n"


def test_a_reward_may_import_a_module_beside_it_when_it_is_called(tmp_path, monkeypatch):
    (tmp_path / "late_helper.py").write_text("VALUE = 0.25\n")
    (tmp_path / "late_reward.py").write_text(
        "def f(completions):\n    import late_helper\n    return [late_helper.VALUE] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    (reward,) = prepare("late_reward:f", prompts=CHAT, columns={})
    assert reward.name == "f"


def test_mixed_forms_are_found_too():
    def chat_in_text_out(prompts, completions):
        return [len(c.split()) / len(p[-1]["content"]) for p, c in zip(prompts, completions, strict=True)]

    def text_in_chat_out(prompts, completions):
        return [len(c[0]["content"]) / len(p.split()) for p, c in zip(prompts, completions, strict=True)]

    for prompts in (PLAIN, CHAT):
        assert find_shape(chat_in_text_out, prompts, {}) == Shape("messages", "text")
        assert find_shape(text_in_chat_out, prompts, {}) == Shape("text", "messages")


def test_a_trial_call_is_made_as_trl_makes_it():
    calls = []

    def fn(prompts, completions, gold, completion_ids, trainer_state, log_extra, log_metric, **kwargs):
        log_extra("col", gold)
        log_metric("m", 1.0)
        calls.append((prompts, completions, gold, completion_ids, trainer_state, kwargs))
        return [len(c) / (1 + trainer_state.global_step) for c in completions]

    assert find_shape(fn, ["a", "b"], {"gold": ["g", "h"], "n": [1, None], "prompt": ["a", "b"]}) == TEXT
    [(prompts, completions, gold, ids, state, rest)] = calls
    # per row: three answers, then one for each column that is a text or a number
    assert prompts == ["a"] * 5 + ["b"] * 4 and gold == ["g"] * 5 + ["h"] * 4
    assert completions[3:5] == ["g", "1"] and completions[8] == "h"
    assert len(completions[0]) < len(completions[1]) < len(completions[2])
    assert [len(row) for row in ids] == [len(c.split()) for c in completions] and ids[0] == [1]
    assert (state.global_step, state.max_steps, state.epoch) == (0, 1, 0.0)
    assert rest == {"n": [1] * 5 + [None] * 4}  # TRL does not pass 'prompt'


def test_a_reward_that_works_in_no_form_is_told_with_every_attempt():
    def fn(completions):
        raise ValueError(type(completions[0]).__name__)

    first, *attempts = refusal(find_shape, fn, CHAT, {}).splitlines()
    assert first == "reward 'fn' fails on sample answers in every form:"
    assert [line.split(": ")[0] for line in attempts] == [
        "  messages prompts, messages completions",
        "  text prompts, text completions",
        "  messages prompts, text completions",
        "  text prompts, messages completions",
    ]
    assert [line.split(": ")[2].split(" ")[0] for line in attempts] == ["list", "str", "str", "list"]


def test_a_cause_that_is_the_same_in_every_form_is_told_once():
    def fn(completions):
        return 1 / 0

    assert refusal(find_shape, fn, CHAT, {}) == (
        "reward 'fn' fails on sample answers in every form: ZeroDivisionError: division by zero "
        "(first completion: 'Yes.')"
    )


def test_a_reward_without_a_sample_prompt_cannot_be_tried():
    assert refusal(find_shape, of_content, [], {}) == "reward 'of_content' cannot be tried: there is no sample prompt"


# --- preparing --------------------------------------------------------------------------------------------------------


def test_rewards_are_prepared_with_names_weights_and_forms(module):
    name = module(SEED)
    found = prepare(
        [f"{name}:length_penalty", f"{name}:contains_answer", of_content, lambda completions: [0.0] * len(completions)],
        weights=[1, 0.5, 2, -1],
        prompts=CHAT,
        columns={"answer": ["Paris"]},
    )
    assert [(r.name, r.weight, r.shape) for r in found] == [
        ("length_penalty", 1.0, TEXT),
        ("contains_answer", 0.5, TEXT),
        ("of_content", 2.0, MESSAGES),
        ("lambda_1", -1.0, TEXT),
    ]
    assert found[0].fn is resolve(f"{name}:length_penalty")
    assert found[1](CHAT, [ANSWER], answer=["Paris"]) == [1.0]


def test_weights_are_one_unless_given():
    assert [r.weight for r in prepare([length_penalty, length_penalty], prompts=PLAIN, columns={})] == [1.0, 1.0]
    assert prepare(None, prompts=PLAIN, columns={}) == []


def test_a_reward_that_needs_a_column_is_told_which_columns_there_are():
    def x(completions, gold):
        return [1.0] * len(completions)

    def y(completions, gold, level):
        return [1.0] * len(completions)

    columns = {"answer": ["Paris"]}
    expected = "reward 'x' needs the column 'gold'; the dataset has: prompt, answer"
    assert refusal(prepare, x, prompts=PLAIN, columns=columns) == expected
    assert refusal(prepare, [x], prompts=PLAIN, columns={"prompt": PLAIN, **columns}) == expected
    assert refusal(prepare, [y], prompts=PLAIN, columns={}) == (
        "reward 'y' needs the columns 'gold', 'level'; the dataset has: prompt"
    )


def test_a_reward_that_wants_the_prompt_in_the_singular_is_told_the_plural():
    def x(prompt, completions):
        return [1.0] * len(completions)

    assert refusal(prepare, x, prompts=PLAIN, columns={"prompt": PLAIN}) == (
        "reward 'x' takes 'prompt'; TRL passes it as 'prompts' (a list)"
    )


def test_every_failure_of_every_reward_is_told_at_once():
    def broken(completions):
        raise ValueError("no")

    def gold(completions, gold):
        return [1.0] * len(completions)

    lines = refusal(
        prepare, ["nomodule:f", broken, gold, length_penalty], weights=[1.0], prompts=PLAIN, columns={}
    ).splitlines()
    assert lines[0].startswith("cannot import 'nomodule'")
    assert lines[1] == "4 reward_funcs but 1 reward_weights"
    assert lines[2].startswith("reward 'broken' fails on sample answers in every form: ValueError: no")
    assert lines[3:] == ["reward 'gold' needs the column 'gold'; the dataset has: prompt"]


def test_a_wrong_number_of_weights_is_refused():
    two = [length_penalty, of_content]
    text = refusal(prepare, two, weights=[1.0, 1.0, 1.0], prompts=PLAIN, columns={})
    assert text == "2 reward_funcs but 3 reward_weights"
    assert refusal(prepare, two, weights=[], prompts=PLAIN, columns={}) == "2 reward_funcs but 0 reward_weights"


def test_preparing_warns_about_a_signature_and_then_tries(caplog):
    def texts_only(texts=None, **kw):
        return [1.0] * len(kw["completions"])

    def no_completions(prompts):
        return [1.0] * len(prompts)

    prepare([texts_only, no_completions], prompts=PLAIN, columns={})
    assert [r.getMessage().split(";")[0] for r in caplog.records] == ["no_completions does not take 'completions'"]


def test_the_module_loads_neither_torch_nor_numpy():
    code = "import sys, praison_agent_rl.rewards; assert not {'torch', 'numpy', 'trl'} & set(sys.modules)"
    root = os.path.dirname(os.path.dirname(rewards.__file__))
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0
