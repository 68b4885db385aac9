"""Finds reward functions, learns which form of text they read, and calls them; it never lets one end the process."""

import asyncio
import copy
import functools
import importlib
import inspect
import logging
import numbers
import os
import re
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, Literal, NamedTuple

from .errors import RewardError as RewardError  # "as": praisonai_train.rewards offers it, so this module does

Function = Callable[..., Any]
Text = str | list[dict[str, Any]]
Texts = Sequence[Text]
Score = float | None
Columns = Mapping[str, Sequence[Any]]
Form = Literal["text", "messages"]


class Shape(NamedTuple):
    """The form in which a reward function reads prompts and completions."""

    prompts: Form
    completions: Form


logger = logging.getLogger(__name__)
_warn_once = functools.cache(logger.warning)  # cached by its text: said once and not at every step

_RUNTIME = ("trainer_state", "log_extra", "log_metric", "environments")  # live objects: never copied
_OWN = ("prompts", "completions", "completion_ids", *_RUNTIME)  # what TRL itself passes, trl/trainer/grpo_trainer.py
_RENAMED = {"prompt": "prompts", "completion": "completions"}  # columns that TRL holds back and passes in the plural
_WANTED = "wanted: a list with one number or None per completion"
_EXAMPLE = "Example: myproject.rewards:length_penalty"
_PLAIN = Shape("text", "text")


@contextmanager
def importing_from(folder: str | os.PathLike[str] | None) -> Iterator[None]:
    """Let modules in ``folder`` (the current one by default) be found during the block."""
    # A script finds the modules beside it; an installed command has its own bin folder first on the path instead, so
    # the same config would work one way and not the other. Taken off again: nothing else may start to find them.
    here = os.path.abspath(folder or os.getcwd())
    absent = here not in [os.path.abspath(entry) for entry in sys.path]
    if absent:
        sys.path.insert(0, here)
    importlib.invalidate_caches()  # the file may be younger than the folder listing that Python remembers
    try:
        yield
    finally:
        if absent and here in sys.path:  # the imported module may have cleaned the path itself
            sys.path.remove(here)


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a user's own class may fail even here
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _cause(error: BaseException) -> str:
    with suppress(Exception):  # a user's own exception may fail even here
        return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return type(error).__name__


def _collect(do: Callable[[Any], Any], given: object) -> tuple[list[Any], list[str]]:
    """What ``do`` makes of each item (or the only one), and the errors of those it refuses, to report at once."""
    made, failures = [], []
    for item in given if isinstance(given, list | tuple) else [] if given is None else [given]:
        try:
            made.append(do(item))
        except RewardError as error:
            failures.append(str(error))
    return made, failures


def _split(spec: object) -> tuple[str, str]:
    """The module and the attribute path of ``spec``; blanks around either are forgiven."""
    text = spec if isinstance(spec, str) else ""
    module, _, path = (part.strip() for part in text.rpartition(":"))
    several = [part.strip() for part in text.split(",") if part.strip()]
    hint = ""
    if len(several) > 1:
        hint = f". It names {len(several)}; write them as a list: {several}"
    elif file := re.fullmatch(r"(?:\.[/\\])?(.*)\.py", module or path):
        parts = re.split(r"[/\\]+", file[1])
        dotted = ".".join(parts) if all(part.isidentifier() for part in parts) else parts[-1]
        hint = f". It names a file; write the module instead: {dotted}:{path if module else 'function'}"
    # import_module takes more than identifiers ("my-rewards"), an attribute path does not
    elif re.fullmatch(r"[\w-]+(\.[\w-]+)*", module) and all(part.isidentifier() for part in path.split(".")):
        return module, path
    raise RewardError(f"reward function {_short(spec)} is not a 'module:function' path. {_EXAMPLE}{hint}")


def _import(module: str, spec: str) -> object:
    failed = f"{module!r} for reward function {spec!r} could not be imported:"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            text = f"cannot import {module!r} for reward function {spec!r}: {error}. Is it on PYTHONPATH?"
            raise RewardError(text) from error
        why = f"it needs {error.name!r}, which is not installed ({error})" if error.name else _cause(error)
        raise RewardError(f"{failed} {why}") from error
    except SyntaxError as error:
        raise RewardError(f"{failed} SyntaxError: {error.msg} ({error.filename}, line {error.lineno})") from error
    except (Exception, SystemExit) as error:  # a user's module may raise anything, and its sys.exit may not end us
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise RewardError(f"{failed} {_cause(error)} ({where.filename}, line {where.lineno})") from error


def _attribute(owner: object, name: str, at: str) -> object:
    try:
        target = getattr(owner, name)
    except AttributeError:
        names = [key for key in (vars(owner) if isinstance(owner, ModuleType) else dir(owner)) if key[0] != "_"]
        kinds = {key: inspect.getattr_static(owner, key, None) for key in names}  # static: runs no property
        there = sorted(key for key, kind in kinds.items() if callable(kind) or isinstance(kind, classmethod))
        raise RewardError(f"{at!r} has no {name!r}. Callables there: {', '.join(there[:8]) or 'none'}") from None
    except Exception as error:  # a property or a lazy module may raise anything
        raise RewardError(f"{name!r} of {at!r} cannot be read: {_cause(error)}") from error
    plain = inspect.isclass(owner) and isinstance(inspect.getattr_static(owner, name), FunctionType)
    if plain and [p.name for p in _parameters(target) or []][:1] == ["self"]:
        what = f"{name!r} of the class {at!r} is a method that needs an instance ('self')"
        raise RewardError(f"{what}. Point at the method of an instance, or make it a @staticmethod")
    return target


def _usable(fn: object, label: str) -> Function:
    if inspect.isclass(fn):
        raise RewardError(f"{label} is a class, not a function. Point at an instance of it or at one of its methods")
    if not callable(fn):
        raise RewardError(f"{label} is a {type(fn).__name__}, not a function")
    return fn


def resolve(spec: object, *, base: str | os.PathLike[str] | None = None) -> Function:
    """The callable that ``'module:function'`` names, sought in folder ``base`` too, or ``spec`` itself if it is one."""
    if callable(spec):
        return _usable(spec, _short(spec))
    module, path = _split(spec)
    spec = f"{module}:{path}"
    with importing_from(base):
        target, at = _import(module, spec), module
        for name in path.split("."):
            target, at = _attribute(target, name, at), f"{at}{'.' if ':' in at else ':'}{name}"
    return _usable(target, repr(spec))


def resolve_all(specs: object) -> list[Function]:
    """Resolve one spec or a list of them; raises RewardError once, with every failure on a line of its own."""
    found, failures = _collect(resolve, specs)
    if failures:
        raise RewardError("\n".join(failures))
    return found


def require(method: str, resolved: Sequence[Function]) -> None:
    """Raise RewardError if ``method`` is GRPO, the one that learns from scores, and there is nothing to score with."""
    if method == "grpo" and not resolved:
        raise RewardError(
            f"method {method!r} needs reward_funcs: a list of 'module:function' import paths\n"
            "that score completions. Example:\n  reward_funcs:\n    - myproject.rewards:length_penalty"
        )


def _parameters(fn: Any) -> list[inspect.Parameter] | None:
    """None where the signature cannot be read (builtins, C callables): such a function is not guessed at."""
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return None


def _takes(fn: Function, name: str) -> bool:
    taken = _parameters(fn)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return taken is None or any(p.kind is p.VAR_KEYWORD or (p.name == name and p.kind in named) for p in taken)


def check_signature(fn: Function, spec: str = "") -> str | None:
    """Log, and return, a warning if ``fn`` does not take ``completions``; refusing could block code that works."""
    if _takes(fn, "completions"):
        return None
    name = getattr(fn, "__name__", "") or spec or name_of(fn)
    text = f"{name} does not take 'completions'; TRL calls reward functions as (prompts, completions, **kwargs)"
    logger.warning(text)
    return f"WARNING: {text}"


def needed_columns(fn: Function) -> list[str]:
    """The dataset columns that ``fn`` cannot be called without."""
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = (p.name for p in _parameters(fn) or [] if p.default is p.empty and p.kind not in starred)
    return [name for name in needed if name not in _OWN]


def name_of(fn: Function) -> str:
    """The name to log ``fn`` under: its own, that of the function inside a partial, or its class's."""
    own = getattr(fn, "__name__", None)
    if isinstance(own, str):
        return own
    return name_of(fn.func) if isinstance(fn, functools.partial) else type(fn).__name__


def unique_names(fns: Sequence[Function]) -> list[str]:
    """One name per function: TRL would log two functions of one name under one metric."""
    names: list[str] = []
    for fn in fns:
        stem, count = name_of(fn).replace("<lambda>", "lambda"), 1
        name = "lambda_1" if stem == "lambda" else stem
        while name in names:
            count += 1
            name = f"{stem}_{count}"
        names.append(name)
    return names


def spec_of(fn: Function) -> str | None:
    """The ``module:name`` under which another process finds this very object again, or None."""
    module, name = getattr(fn, "__module__", None) or "__main__", getattr(fn, "__qualname__", "<instance>")
    with importing_from(None):
        # a module made or loaded by hand sits in sys.modules, where only this process finds it
        finders = [getattr(finder, "find_spec", lambda *_: None) for finder in sys.meta_path]
        importable = any(find(module.partition(".")[0], None) for find in finders)
    if module == "__main__" or not importable:
        return None
    found, _ = _collect(resolve, f"{module}:{name}")
    return f"{module}:{name}" if any(f is fn or (inspect.ismethod(f) and f == fn) for f in found) else None


def _in_form(form: Form, value: Text, role: str) -> Text:
    """``value`` as messages of ``role``, or as the content of its last one; always a copy."""
    if isinstance(value, str):
        return value if form == "text" else [{"role": role, "content": value}]
    if form == "messages":
        return copy.deepcopy(value)
    content = next((m.get("content") for m in reversed(value) if m.get("role") == role), None) or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def _wait(result: Awaitable[Any]) -> Any:
    async def outcome() -> Any:
        return await result

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(outcome())
    # where a loop runs (a notebook, a service) a second one cannot; a daemon, so that Ctrl-C need not wait for it
    done: Future[Any] = Future()
    threading.Thread(target=_settle, args=(done, outcome), daemon=True).start()
    return done.result()


def _settle(done: "Future[Any]", outcome: Callable[[], Any]) -> None:
    try:
        done.set_result(asyncio.run(outcome()))
    except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
        done.set_exception(error)


def _plain(value: Any) -> Any:
    """A numpy or torch value as Python's own, without importing either."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def as_scores(values: object, name: str, n: int) -> list[Score]:
    """What reward ``name`` returned for ``n`` completions, as plain numbers; NaN and infinity become None."""
    given = _plain(values)
    if not isinstance(given, list | tuple):
        raise RewardError(f"reward {name!r} returned a {type(values).__name__}, {_short(values)}; {_WANTED}")
    scores = [_plain(value) for value in given]
    if odd := [score for score in scores if score is not None and not isinstance(score, numbers.Real)]:
        raise RewardError(f"reward {name!r} returned {_short(odd[0])} among its scores; {_WANTED}")
    if len(scores) != n:
        raise RewardError(f"reward {name!r} returned {len(scores)} for {n} completions, {_short(values)}; {_WANTED}")
    largest = sys.float_info.max  # also stops an integer too large for a float; no comparison holds for NaN
    if any(score is not None and abs(score) > largest for score in scores):
        # TRL would turn the gradient of the whole group into 0 without a word
        _warn_once(f"reward {name!r} returned an infinite value; it counts as None (no score)")
    return [float(score) if score is not None and abs(score) <= largest else None for score in scores]


@dataclass(frozen=True)
class Reward:
    """A reward function that is called in the form it reads, with only what it takes, and believed only if sound."""

    fn: Function
    name: str
    """Unique among the rewards of a run; TRL logs ``rewards/<name>/mean``."""
    weight: float = 1.0
    shape: Shape = _PLAIN

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, /, prompts: Texts, completions: Texts, **columns: Any) -> list[Score]:
        """One score per completion; raises RewardError if the function fails or returns something else."""
        takes = functools.partial(_takes, self.fn)
        try:
            given = {k: v if k in _RUNTIME else copy.deepcopy(v) for k, v in columns.items() if takes(k)}
            if takes("prompts"):
                given["prompts"] = [_in_form(self.shape.prompts, p, "user") for p in prompts]
            if takes("completions"):
                given["completions"] = [_in_form(self.shape.completions, c, "assistant") for c in completions]
            values = self.fn(**given)
            if inspect.isawaitable(values):
                values = _wait(values)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the reward boundary: user code may raise anything
            first = f" (first completion: {_short(completions[0])})" if completions else ""
            raise RewardError(f"reward {self.name!r} failed: {_cause(error)}{first}") from error
        return as_scores(values, self.name, len(completions))


def total(scores_by_reward: Sequence[Sequence[Score]], weights: Sequence[float]) -> list[Score]:
    """The weighted sum per sample; a None is left out, and a sample with nothing else is None (as in TRL)."""
    sums: list[Score] = []
    for scores in zip(*scores_by_reward, strict=True):
        parts = [weight * score for weight, score in zip(weights, scores, strict=True) if score is not None]
        sums.append(sum(parts) if parts else None)
    return sums


def _answers(hints: Sequence[str]) -> list[str]:
    """Answers that differ in length and markup and hold what the row knows, so that most rewards tell them apart."""
    known = ", ".join(hints) or "42"
    steps = "First I read the question twice. Then I look at each part of it in turn and compare. "
    marked = f"<think>\n{steps * 3}\n</think>\n<answer>{known}</answer>\n**\\boxed{{{known}}}**"
    fenced = f'```json\n{{"answer": "{known}"}}\n```\n#### {known}'
    return ["Yes.", f"I would say that the answer is {known}.", f"{marked}\n{fenced}", *hints]


def _sample(fn: Function, prompts: Texts, columns: Columns) -> dict[str, Any]:
    """The arguments of one trial call, as TRL would make it."""
    passed = [name for name in columns if name not in (*_OWN, *_RENAMED)]
    asked = {p.name for p in _parameters(fn) or []}
    telling = sorted(passed, key=lambda name: name not in asked)[:3]  # those it names first; a judge's calls cost money
    sample: dict[str, Any] = {name: [] for name in ("prompts", "completions", *passed)}
    for i, prompt in enumerate(prompts):
        row = {name: columns[name][i] for name in passed}
        for answer in _answers([str(row[name]) for name in telling if isinstance(row[name], str | int | float)]):
            for name, value in {"prompts": prompt, "completions": answer, **row}.items():
                sample[name].append(value)
    sample["completion_ids"] = [list(range(1, len(answer.split()) + 1)) for answer in sample["completions"]]
    sample["trainer_state"] = SimpleNamespace(global_step=0, max_steps=1, epoch=0.0)
    sample["log_extra"] = sample["log_metric"] = lambda *_: None
    return sample


def find_shape(fn: Function, prompts: Texts, columns: Columns, *, name: str = "") -> Shape:
    """The form that ``fn`` reads, found by trying; raises RewardError with every attempt if none works."""
    name = name or name_of(fn)
    if not prompts:
        raise RewardError(f"reward {name!r} cannot be tried: there is no sample prompt")
    forms: tuple[Form, Form] = ("text", "messages") if isinstance(prompts[0], str) else ("messages", "text")
    pure, mixed = [Shape(f, f) for f in forms], [Shape(*forms), Shape(*reversed(forms))]
    sample = _sample(fn, prompts, columns)
    works: list[Shape] = []
    failures = [f"reward {name!r} fails on sample answers in every form:"]
    for shape in [*pure, *mixed]:
        try:
            scores = Reward(fn, name, shape=shape)(**sample)
        except RewardError as error:
            failures.append(f"  {shape.prompts} prompts, {shape.completions} completions: {error}")
            continue
        # len(c) works on both forms but is 1 on every message list: the form that tells answers apart is the one meant
        if len(set(scores)) > 1:
            return shape
        works.append(shape)
    if not works:
        raise RewardError("\n".join(failures))
    # On a tie text: `"sorry" in c` works on both forms but means text, and what means messages fails on text.
    return _PLAIN if _PLAIN in works else works[0]


def _fit(named: tuple[Function, str], prompts: Texts, columns: Columns) -> Reward:
    fn, name = named
    check_signature(fn)
    needed = needed_columns(fn)
    if held := [column for column in needed if column in _RENAMED]:
        raise RewardError(f"reward {name!r} takes {held[0]!r}; TRL passes it as {_RENAMED[held[0]]!r} (a list)")
    if missing := [column for column in needed if column not in columns]:
        what = f"the column{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))}"
        there = ", ".join(dict.fromkeys(["prompt", *columns]))
        raise RewardError(f"reward {name!r} needs {what}; the dataset has: {there}")
    return Reward(fn, name, shape=find_shape(fn, prompts, columns, name=name))


def prepare(specs: object, *, weights: Sequence[float] | None = None, prompts: Texts, columns: Columns) -> list[Reward]:
    """Resolve and try every reward on a few sample ``prompts``; raises RewardError once, with every failure."""
    fns, failures = _collect(resolve, specs)
    asked = len(fns) + len(failures)
    if weights is not None and len(weights) != asked:
        failures.append(f"{asked} reward_funcs but {len(weights)} reward_weights")
    named = list(zip(fns, unique_names(fns), strict=True))
    with importing_from(None):  # a reward may import a helper beside it when it is called
        rewards, unfit = _collect(lambda pair: _fit(pair, prompts, columns), named)
    if failures or unfit:
        raise RewardError("\n".join([*failures, *unfit]))
    return [replace(r, weight=float(w)) for r, w in zip(rewards, weights or [1.0] * asked, strict=True)]
