"""Puzzles of a task set: rows that are the same everywhere, and scores that nothing a model writes can misuse.

A package made here stands for reasoning_gym, so that what its tasks may do is known; the last tests take the real one.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from praison_agent_rl import task_sets
from praison_agent_rl.data import load_rows, split_rows
from praison_agent_rl.errors import DataError, MissingExtra, RewardError
from praison_agent_rl.reward_library.puzzles import reasoning_gym
from praison_agent_rl.task_set_worker import check_parts, packed, unpacked
from praison_agent_rl.task_sets import rows_of_task_set, score_of

FACTORY = """
DATASETS = {}


def create_dataset(name, **options):
    kind, config = DATASETS[name]
    made = config(**options)
    made.validate()
    return kind(made)
"""

TASKS = '''
import random
from dataclasses import dataclass

from sympy.parsing.sympy_parser import parse_expr

from .factory import DATASETS


@dataclass
class Config:
    low: int = 1
    high: int = 9
    size: int = 500
    seed: int = None

    def validate(self):
        assert self.low < self.high, "low must be below high"


class Sum:
    def __init__(self, config):
        self.config = config
        print("made")

    def __getitem__(self, place):
        draw = random.Random(self.config.seed + place)
        a, b = (draw.randint(self.config.low, self.config.high) for _ in range(2))
        return {"question": f"{a} + {b}?", "answer": str(a + b), "metadata": {"parts": (a, b), 3: "three"}}

    def score_answer(self, answer, entry):
        assert entry["metadata"] == {"parts": tuple(entry["metadata"]["parts"]), 3: "three"}
        assert type(entry["metadata"]["parts"]) is tuple
        return 1.0 if int(answer) == sum(entry["metadata"]["parts"]) else self.config.low / 100


class Free(Sum):
    """Draws from Python's own source, and orders letters by their hashes."""

    def __getitem__(self, place):
        letters = "".join(set("abcdefghij"))
        return {"question": f"{letters} {random.random()}", "answer": None, "metadata": {}}

    def score_answer(self, answer, entry):
        return 0.25


class Python(Sum):
    def score_answer(self, answer, entry):
        return 1.0 if answer == entry["answer"] or eval(answer) == [int(entry["answer"])] else 0.0


class Formula(Sum):
    def score_answer(self, answer, entry):
        return 1.0 if parse_expr(answer) == parse_expr(entry["answer"]) else 0.0


class Generous(Sum):
    def score_answer(self, answer, entry):
        return 1.0


class Broken(Sum):
    def score_answer(self, answer, entry):
        if answer == "nonsense":
            return 0.0
        if self.config.size == 1:
            raise RuntimeError("no scorer today")
        return 1.0


for name, kind in {"sum": Sum, "free": Free, "python": Python, "formula": Formula, "generous": Generous,
                   "broken": Broken, "composite": Sum}.items():
    DATASETS[name] = (kind, Config)
'''


@pytest.fixture
def gym(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of the name reasoning_gym with known tasks; the folder beside it is the current one."""
    package = tmp_path / "packages" / "reasoning_gym"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from . import tasks\n")
    (package / "factory.py").write_text(FACTORY)
    (package / "tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.chdir(tmp_path)
    scoring = task_sets._process_of(os.getpid())
    scoring.close()
    yield tmp_path
    scoring.close()


def entry_of(row: dict[str, Any]) -> str:
    found: str = row["reasoning_gym"]
    return found


# --- rows -------------------------------------------------------------------------------------------------------------


def test_a_row_has_prompt_answer_and_what_scoring_needs(gym: Path) -> None:
    rows = rows_of_task_set("reasoning_gym:sum", size=3, seed=4, high=20)
    assert len(rows) == 3 and all(list(row) == ["prompt", "answer", "reasoning_gym"] for row in rows)
    a, b = map(int, rows[0]["prompt"].removesuffix("?").split(" + "))
    assert rows[0]["answer"] == str(a + b)
    kept = json.loads(entry_of(rows[0]))
    assert kept["task"] == "sum" and kept["options"] == {"high": 20} and kept["right"] == rows[0]["answer"]
    assert kept["metadata"] == {"#pairs": [["parts", {"#tuple": [a, b]}], [3, "three"]]}


def test_the_seed_decides_the_rows_and_an_instruction_stands_behind(gym: Path) -> None:
    first = rows_of_task_set("reasoning_gym:sum", size=5, seed=1)
    assert first == rows_of_task_set("reasoning_gym:sum", size=5, seed=1)
    assert first[:2] == rows_of_task_set("reasoning_gym:sum", size=2, seed=1)
    assert first != rows_of_task_set("reasoning_gym:sum", size=5, seed=2)
    told = rows_of_task_set("reasoning_gym:sum", size=5, seed=1, instruction="Use <answer>.")
    assert [row["prompt"] for row in told] == [f"{row['prompt']}\n\nUse <answer>." for row in first]
    assert [entry_of(row) for row in told] == [entry_of(row) for row in first]


def test_rows_are_the_same_in_every_process(gym: Path) -> None:
    """Also of a task whose order hangs on hashes and that draws from Python's own random numbers."""
    code = (
        "import json; from praison_agent_rl.task_sets import rows_of_task_set as rows; "
        "print(json.dumps(rows('reasoning_gym:free', size=3, seed=1)))"
    )
    said = []
    for hashes in ("1", "2"):
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        env = {**os.environ, "PYTHONHASHSEED": hashes, "PYTHONPATH": path}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
        said.append(json.loads(done.stdout))
    assert said[0] == said[1] and len({row["prompt"] for row in said[0]}) == 3


def test_datasets_name_task_sets(gym: Path) -> None:
    plain = rows_of_task_set("reasoning_gym:sum", size=4, seed=7, high=30)
    entry = {"name": "reasoning_gym:sum", "size": 4, "seed": 7, "high": 30}
    assert load_rows([entry]) == plain == load_rows(entry)
    assert load_rows([{"name": "reasoning_gym:sum", "options": {"size": 4, "high": 30}, "seed": "7"}]) == plain
    renamed = load_rows([{**entry, "num_samples": 2, "rename": {"answer": "gold"}}])
    assert [row["gold"] for row in renamed] == [row["answer"] for row in plain[:2]]
    both = load_rows([entry, {"name": "reasoning_gym:free", "size": 2}])
    assert both[:4] == plain and [row["answer"] for row in both[4:]] == [None, None]
    assert len(load_rows("reasoning_gym:sum")) == 500
    train, held_out = split_rows(both, 2)
    assert len(train) + len(held_out) == 6
    with pytest.raises(DataError, match=r"dataset entry 1 \('reasoning_gym:sum'\): a task set has no split:"):
        load_rows([{**entry, "split": "test"}])


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        (
            "reasoning_gym:summ",
            {},
            "reasoning_gym has no task 'summ' (did you mean 'sum'?). It has: "
            "broken, formula, free, generous, python, sum",
        ),
        ("reasoning_gym:composite", {}, "reasoning_gym has no task 'composite'. It has: broken,"),
        (
            "reasoning_gym:sum",
            {"hihg": 3, "lo": 2},
            "reasoning_gym:sum takes no 'hihg' (did you mean 'high'?), 'lo' (did you mean 'low'?); it takes: "
            "low, high, size, seed",
        ),
        ("reasoning_gym:sum", {"low": 9}, "reasoning_gym:sum is refused: low must be below high"),
        ("reasoning_gym:generous", {}, "reasoning_gym:generous is refused: its scorer gives nonsense as much as"),
        ("reasoning_gym:sum", {"size": 0}, "reasoning_gym:sum: size must be a whole number of at least 1, not 0"),
        ("reasoning_gym:sum", {"seed": "x"}, "reasoning_gym:sum: seed must be a whole number of at least 0, not 'x'"),
        ("reasoning_gym:sum", {"high": print}, "reasoning_gym:sum: its options"),
        ("reasoning_gym:sum", {"high": "9"}, "reasoning_gym:sum is refused: '<' not supported between"),
    ],
)
def test_what_a_task_cannot_be_asked_for_is_told(gym: Path, name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as caught:
        rows_of_task_set(name, **options)
    assert str(caught.value).startswith(said)


def test_a_missing_package_names_the_extra(gym: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = r'need the package reasoning-gym: pip install "praison-agent-rl\[environments\]"'
    with pytest.raises(MissingExtra, match=said):
        rows_of_task_set("reasoning_gym:sum")
    with pytest.raises(MissingExtra, match=said):
        score_of("{}", "3")


# --- scores -----------------------------------------------------------------------------------------------------------


def test_answers_are_scored_by_the_task_with_its_options(gym: Path) -> None:
    (row,) = rows_of_task_set("reasoning_gym:sum", size=1, low=2)
    right = row["answer"]
    said = [
        right,
        f"<think>1?</think>I think <answer> {right} </answer>.",
        [{"role": "assistant", "content": f"\\boxed{{{right}}}"}],
        "1",
        "no number",
        "<answer>1</answer>",
    ]
    scores = reasoning_gym(completions=said, reasoning_gym=[entry_of(row)] * 6)
    assert scores == [1.0, 1.0, 1.0, 0.02, 0.0, 0.02]  # a wrong one is worth low / 100 by this task


def test_rows_of_other_datasets_have_no_score(gym: Path) -> None:
    (row,) = rows_of_task_set("reasoning_gym:sum", size=1)
    assert reasoning_gym(completions=["1", row["answer"]], reasoning_gym=[None, entry_of(row)]) == [None, 1.0]


def test_a_marked_answer_is_taken_as_it_stands(gym: Path) -> None:
    (row,) = rows_of_task_set("reasoning_gym:python", size=1)
    maze = f"<answer>[{row['answer']}]</answer>"
    assert reasoning_gym(completions=[maze], reasoning_gym=[entry_of(row)]) == [1.0]
    kept = {**json.loads(entry_of(row)), "right": "#### 1\n#### 2"}
    drawn = ["<answer>#### 1\n#### 2</answer>"]
    assert reasoning_gym(completions=drawn, reasoning_gym=[json.dumps(kept)]) == [1.0]


@pytest.mark.parametrize("task", ["python", "formula"])
def test_nothing_that_a_model_writes_is_run(gym: Path, task: str) -> None:
    (row,) = rows_of_task_set(f"reasoning_gym:{task}", size=1)
    trace = gym / "trace"
    opened = f"open({str(trace)!r}, 'w')"
    attempts = [
        opened,
        f"[{opened}]",
        f"sqrt({opened!r})",
        f"(lambda: {opened})()",
        f"[x for x in [{opened}]]",
        f"__import__('pathlib').Path({str(trace)!r}).touch()",
        f"().__class__.__base__.__subclasses__()[{opened}]",
        f"Function('f')({opened})",
        f"preview({opened})",
    ]
    assert [score_of(entry_of(row), attempt) for attempt in attempts] == [0.0] * len(attempts)
    assert not trace.exists()
    right = f"[{row['answer']}]" if task == "python" else f"sqrt(({row['answer']} + 0)**2)"
    assert score_of(entry_of(row), right) == 1.0


def test_an_answer_that_takes_for_ever_is_wrong_and_the_next_is_scored(
    gym: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_sets, "_SECONDS", 0.5)
    (row,) = rows_of_task_set("reasoning_gym:formula", size=1)
    assert score_of(entry_of(row), "9**9**9") == 0.0
    assert score_of(entry_of(row), row["answer"]) == 1.0


def test_a_scorer_that_fails_on_its_own_answer_is_told(gym: Path) -> None:
    (_, row) = rows_of_task_set("reasoning_gym:broken", size=2)
    with pytest.raises(RewardError, match="reasoning_gym:broken cannot score an answer: RuntimeError: no scorer today"):
        score_of(entry_of(row), "3")


def test_a_column_that_is_no_entry_is_told(gym: Path) -> None:
    for odd in ("no JSON", '{"task": "sum"}', "[]", 5):
        with pytest.raises(RewardError, match=r"the column 'reasoning_gym' holds .*, but must be as a dataset named"):
            score_of(odd, "3")  # type: ignore[arg-type]


def test_a_process_that_was_ended_is_started_again(gym: Path) -> None:
    (row,) = rows_of_task_set("reasoning_gym:sum", size=1)
    assert score_of(entry_of(row), row["answer"]) == 1.0
    process = task_sets._process_of(os.getpid())._process
    assert process is not None
    process.kill()
    process.wait()
    assert score_of(entry_of(row), row["answer"]) == 1.0


# --- the worker's parts -----------------------------------------------------------------------------------------------


def test_what_json_would_change_is_packed_and_comes_back() -> None:
    value = {"a": (1, [2, (3,)]), "b": {4: "x", (5, 6): None}, "c": {"#tuple": [1], "d": 1.5}}
    text = json.dumps(packed(value))
    assert unpacked(json.loads(text)) == value
    assert packed({"a": 1, "b": [True]}) == {"a": 1, "b": [True]}


def test_a_formula_may_hold_numbers_names_and_known_functions_only() -> None:
    import ast

    from praison_agent_rl.task_set_worker import _FORMULAS, _VALUES

    check_parts("Integer (2 )*Symbol ('x' )**Integer (2 )+sqrt (Integer (4 ))", _FORMULAS)
    check_parts(" [[1, 2], (3, 4)]", _VALUES)
    for odd in ("a.b", "f(1)", "x[0]", "print", "_x", "sqrt(4, evaluate=False)", "1 if x else 2"):
        with pytest.raises(ValueError, match="this is no plain value or formula"):
            check_parts(odd, _FORMULAS)
    with pytest.raises(ValueError, match="no plain value"):
        check_parts("x", _VALUES)
    assert ast.Attribute not in (*_FORMULAS, *_VALUES)


# --- the real package -------------------------------------------------------------------------------------------------

REAL = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None,
    reason="the package reasoning-gym (extra environments) is not installed",
)


@pytest.fixture
def scoring_anew() -> Iterator[None]:
    task_sets._process_of(os.getpid()).close()
    yield
    task_sets._process_of(os.getpid()).close()


@REAL
@pytest.mark.parametrize(
    "task", ["chain_sum", "countdown", "n_queens", "bitwise_arithmetic", "word_ladder", "arc_agi", "simple_integration"]
)
def test_real_tasks_take_their_own_answers_and_no_nonsense(scoring_anew: None, task: str) -> None:
    rows = rows_of_task_set(f"reasoning_gym:{task}", size=2, seed=3)
    entries = [entry_of(row) for row in rows]
    marked = [f"<answer>{row['answer']}</answer>" for row in rows]
    assert reasoning_gym(completions=marked, reasoning_gym=entries) == [1.0, 1.0]
    assert max(reasoning_gym(completions=["nonsense"] * 2, reasoning_gym=entries)) < 0.1  # type: ignore[type-var]


@REAL
def test_a_real_sum_is_right_by_hand(scoring_anew: None) -> None:
    rows = rows_of_task_set("reasoning_gym:chain_sum", size=5, seed=1, min_terms=2, max_terms=2)
    for row in rows:
        a, sign, b = row["prompt"].split(": ")[1].removesuffix(" =").split()
        assert row["answer"] == str(int(a) + (int(b) if sign == "+" else -int(b)))
