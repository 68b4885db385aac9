"""By what the scores of a reward are found again: its source and state, and what it was given.

A reward whose source or state cannot be told has no keys, and its scores are not kept.
"""

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import platform
import re
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

from praison_agent_rl.records import Run
from praison_agent_rl.rewards import Reward
from praison_agent_rl.run_views import run_content
from praison_agent_rl.scoring.names import RUNTIME, declared

_OURS = __name__.partition(".")[0]
_MOST_STATE = 100_000  # characters of JSON; it is written out for each call
_MOST_ITEMS = 10_000
_MOST_MODULES = 200


Seen = dict[int, tuple[int, Any]]
"""Objects that were looked at already, by id, with their number."""


class Unkeyed(Exception):
    """Scores of this reward cannot be found again; the text says why."""


def why_not_kept(reward: Reward) -> str | None:
    """Why the scores of ``reward`` are not kept on disk, in plain words; None where they are."""
    try:
        identity(reward)
    except Unkeyed as why:
        return str(why)
    return None


def identity(reward: Reward) -> bytes:
    """A digest of all but the sample that decides the reward's score: source, parameters, state. Raises Unkeyed."""
    cacheable = declared(reward.fn, "cacheable")
    if cacheable is False:
        raise Unkeyed("it says so (cacheable)")
    if not cacheable and not reward.deterministic:
        raise Unkeyed("two calls with the same gave different scores")
    if not (reward.by_sample or declared(reward.fn, "whole_group")):
        raise Unkeyed("a score depends on the other answers of the call")
    try:
        text = json.dumps([_state(reward.fn, {}), list(reward.shape), sorted(reward.renamed.items())])
    except Unkeyed:
        raise
    except Exception as error:  # a user's own objects may fail at anything
        raise Unkeyed(f"its state cannot be told ({type(error).__name__})") from error
    if len(text) > _MOST_STATE:
        raise Unkeyed("it holds much state")
    return _digest(text)


def sample_keys(source: bytes, given: Mapping[str, Sequence[Any]], groups: Sequence[Sequence[int]]) -> list[bytes]:
    """A key for each sample of the ``given`` arguments, one of ``groups`` of samples after the other, in their order.

    The score of a sample hangs on its whole group. Raises Unkeyed for values that JSON cannot hold.
    """
    names = sorted(given.keys() - set(RUNTIME))
    try:
        size = sum(map(len, groups))
        texts = [
            json.dumps([given[name][i] for name in names], sort_keys=True, default=_plain_run) for i in range(size)
        ]
        head = json.dumps(names)
    except (TypeError, ValueError, IndexError, RecursionError) as error:
        raise Unkeyed(f"what it is given cannot be written down ({error})") from error
    keys = [b""] * size
    for group in groups:
        others = sorted(texts[i] for i in group) if len(group) > 1 else []
        for i in group:
            keys[i] = _digest(source.hex(), head, texts[i], *others)
    return keys


def _plain_run(value: Any) -> dict[str, Any]:
    if isinstance(value, Run):
        return run_content(value)
    raise TypeError(f"a {type(value).__name__} has no form in JSON")


def _digest(*texts: str) -> bytes:
    whole = hashlib.blake2b(digest_size=20)
    for text in texts:
        part = text.encode("utf-8", "surrogatepass")
        whole.update(len(part).to_bytes(8, "big") + part)
    return whole.digest()


def _state(value: Any, seen: Seen) -> Any:
    """What ``value`` is, as JSON; raises Unkeyed for an object that cannot be told by it."""
    if value is None or isinstance(value, str | int | float | bool):
        return [type(value).__name__, repr(value)]
    if id(value) in seen:  # functions call each other
        return ["again", seen[id(value)][0]]
    seen[id(value)] = len(seen), value  # kept, so that no other object gets its id
    if isinstance(value, list | tuple | set | frozenset | dict) and len(value) > _MOST_ITEMS:
        raise Unkeyed("it holds much state")
    if isinstance(value, list | tuple):
        return [type(value).__name__, [_state(item, seen) for item in value]]
    if isinstance(value, set | frozenset):
        return ["set", sorted(json.dumps(_state(item, seen)) for item in value)]
    if isinstance(value, dict | MappingProxyType):
        return ["dict", [[_state(key, seen), _state(item, seen)] for key, item in value.items()]]
    if isinstance(value, re.Pattern):
        return ["pattern", repr(value.pattern), value.flags]
    if isinstance(value, functools.partial):
        return ["partial", *(_state(part, seen) for part in (value.func, value.args, value.keywords))]
    if isinstance(value, MethodType):
        return ["method", _state(value.__func__, seen), _state(value.__self__, seen)]
    if isinstance(value, FunctionType):
        return _function(value, seen)
    if isinstance(wrapped := getattr(value, "__wrapped__", None), FunctionType):  # functools.cache
        return _function(wrapped, seen)
    if isinstance(value, ModuleType):
        return ["module", value.__name__, _sources(value.__name__)]
    if isinstance(value, type) or inspect.isbuiltin(value):
        return ["name", value.__module__ or "builtins", value.__qualname__, _sources(value.__module__ or "builtins")]
    return _instance(value, seen)


def _instance(value: Any, seen: Seen) -> Any:
    made_of = ["instance", _state(type(value), seen)]
    if isinstance(key := getattr(value, "cache_key", None), str):
        return [*made_of, key]
    if isinstance(value, Path):
        return ["path", str(value)]
    held = getattr(value, "__dict__", None)
    if held is None or hasattr(value, "__next__") or isinstance(value, BaseException):
        raise Unkeyed(f"it holds a {type(value).__name__}, whose state cannot be told")
    call = inspect.getattr_static(type(value), "__call__", None)
    own = [_function(call, seen)] if isinstance(call, FunctionType) else []
    if not own and _is_fixed(type(value).__module__):  # a client, a model: more than its attributes say
        raise Unkeyed(f"it holds a {type(value).__name__}, whose state cannot be told")
    return [*made_of, *own, _state(dict(held), seen)]


def _function(fn: FunctionType, seen: Seen) -> Any:
    """Its module's source, its own code (two lambdas of a module have one name), and what it closes over and reads."""
    codes = list(_codes(fn.__code__))
    names = {name for code in codes for name in (*code.co_names, *code.co_varnames, *code.co_freevars)}
    names |= {const for code in codes for const in code.co_consts if isinstance(const, str)}
    # a score that hangs on the trainer is not that of the sample, and what is logged is not kept
    if live := [name for name in RUNTIME if name in names]:
        raise Unkeyed(f"it reads {live[0]}")
    if any(_writes(code) for code in codes):
        raise Unkeyed("it keeps a count or other state between its calls")
    module = fn.__module__ or "__main__"
    fixed = _is_fixed(module)
    # what a decorator of a library closes over is in the library's source
    closed = () if fixed and getattr(sys.modules.get(module), fn.__name__, None) is fn else fn.__closure__ or ()
    cells = [(name, _cell(cell)) for name, cell in zip(fn.__code__.co_freevars, closed, strict=False)]
    known = {} if fixed else fn.__globals__
    read = [(name, known[name]) for name in sorted(names) if name in known]
    shape = [[code.co_code.hex(), repr([c for c in code.co_consts if not isinstance(c, CodeType)])] for code in codes]
    defaults = [fn.__defaults__, fn.__kwdefaults__]
    parts = [_state(list(pair), seen) for pair in [*cells, *read]]
    return ["function", module, fn.__qualname__, shape, _sources(module), _state(defaults, seen), parts]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


def _writes(code: CodeType) -> bool:
    import dis

    return any(
        step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
        or (step.opname == "STORE_DEREF" and step.argval in code.co_freevars)
        for step in dis.get_instructions(code)
    )


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is not bound yet
        return None


@functools.cache
def _is_fixed(module: str) -> bool:
    """Whether ``module`` is Python's, an installed package's or ours, and so not what somebody edits between runs."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top == _OURS:
        return module != "__main__"
    file = _file_of(module)
    return file is not None and any(Path(file).is_relative_to(folder) for folder in _installed_folders())


@functools.cache
def _installed_folders() -> tuple[Path, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    places = [*(sysconfig.get_path(name) for name in names), *site.getsitepackages(), site.getusersitepackages()]
    return tuple(Path(place) for place in dict.fromkeys(places) if place)


@functools.cache  # as it was when it was imported, or soon after: what is edited later is not what runs
def _sources(module: str) -> str:
    """A digest of the source of ``module`` and of what it imports, of packages by their version. Raises Unkeyed."""
    found: dict[str, str] = {}
    waiting = [module]
    while waiting and len(found) < _MOST_MODULES:
        name = waiting.pop()
        top = name.partition(".")[0]
        if name in found or top in found:
            continue
        if _is_fixed(name):
            found[top] = _version(top)
            continue
        source = _source_of(name)
        if source is not None:
            found[name] = _digest(source).hex()
            waiting += _imported(source, name)
        elif name == module:
            raise Unkeyed(f"the source of {name!r} cannot be read")
    return _digest(json.dumps(sorted(found.items()))).hex()


@functools.cache
def _version(package: str) -> str:
    if package == _OURS:  # it may run from a checkout, whose version stays the same for long
        return _digest(*(path.read_text("utf-8") for path in sorted(Path(__file__).parents[1].rglob("*.py")))).hex()
    if package in sys.stdlib_module_names:
        return platform.python_version()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return _digest(_source_of(package) or "").hex()


def _source_of(module: str) -> str | None:
    file = _file_of(module)
    if file is None or not file.endswith(".py"):
        return None
    try:
        return Path(file).read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return None


def _file_of(module: str) -> str | None:
    """Of a module that may be imported only later, inside a function; None for what is no module."""
    if module in sys.modules:
        file = getattr(sys.modules[module], "__file__", None)
        return file if isinstance(file, str) else None
    above = module.rpartition(".")[0]
    if above and not hasattr(sys.modules.get(above), "__path__"):
        return None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None
    return spec.origin if spec else None


def _imported(source: str, module: str) -> set[str]:
    """Names that ``source`` imports anywhere; not each is a module."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return set()
    is_package = hasattr(sys.modules.get(module), "__path__")
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            above = parts[: len(parts) - node.level + is_package] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found - {""}
