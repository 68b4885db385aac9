"""Render the part of Go's template language that our Ollama templates are written in, as Go does.

So it is proved, before a Modelfile is written, that its template renders what the tokenizer's does. Known are fields,
variables, ``if``, ``range``, ``and or not eq ne lt le gt ge len index slice json`` and trimming; all else is refused.
The language: https://pkg.go.dev/text/template; ``json`` is Ollama's (template/template.go). Compared with Go 1.27.3,
all that the tests render, and every family of ``go_families`` for every conversation of ``probes``, came out alike.
"""

import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_ACTION = re.compile(r"\{\{(?P<left>- )?\s*(?P<code>(?:\"(?:\\.|[^\"\\])*\"|.)*?)\s*(?P<right> -)?\}\}", re.DOTALL)
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|-?\d+|\$?\w*(?:\.\w+)+|\$\w*|\w+|:=|[=.,()]')
_SPACE = " \t\r\n"


class GoTemplateError(ValueError):
    """A template that this renderer does not know, or that Go would refuse."""


def render(template: str, values: Mapping[str, Any]) -> str:
    """What Go makes of ``template`` with the root ``values``.

    >>> render('{{ range $i, $m := .Messages }}{{ if $i }}, {{ end }}{{ $m.Role }}{{ end }}',
    ...        {"Messages": [{"Role": "user"}, {"Role": "assistant"}]})
    'user, assistant'

    Raises:
        GoTemplateError: it holds something unknown, or a field that is not there.
    """
    parser = _Parser(template)
    body = parser.body(until=())
    return "".join(_run(body, _Scope(root=values, dot=values)))


# --- parsing --------------------------------------------------------------------------------------------------------


@dataclass
class _Branch:
    """A body with the condition, or what is ranged over, before it; None for ``else``."""

    code: list[str] | None
    body: list[Any]


@dataclass
class _Block:
    """``if`` with its branches, or ``range`` with one."""

    kind: str
    branches: list[_Branch]


class _Parser:
    """Texts and actions, in order, become a tree: a text is ``str``, an action its tokens."""

    def __init__(self, template: str) -> None:
        self._pieces = list(_pieces(template))
        self._place = 0

    def body(self, until: tuple[str, ...]) -> list[Any]:
        """All up to an action that begins with a word of ``until``, which is left for the caller."""
        found: list[Any] = []
        while self._place < len(self._pieces):
            piece = self._pieces[self._place]
            if isinstance(piece, str):
                found.append(piece)
            elif piece[0] in until:
                return found
            elif piece[0] in ("if", "range"):
                found.append(self._block())
                continue
            else:
                found.append(piece)
            self._place += 1
        if until:
            raise GoTemplateError("an if or range has no end")
        return found

    def _block(self) -> _Block:
        kind, *code = self._take()
        branches = [_Branch(code, self.body(until=("else", "end")))]
        while (words := self._take())[0] == "else":
            condition = words[2:] if words[1:2] == ["if"] else None
            branches.append(_Branch(condition, self.body(until=("else", "end"))))
        if kind == "range" and len(branches) > 1:
            raise GoTemplateError("range with else is not known here")
        return _Block(kind, branches)

    def _take(self) -> list[str]:
        piece = self._pieces[self._place]
        self._place += 1
        return list(piece)


def _pieces(template: str) -> Iterator[str | list[str]]:
    """Texts and the tokens of actions; the whitespace that an action trims is gone."""
    place, trim = 0, False
    for action in _ACTION.finditer(template):
        text = template[place : action.start()]
        text = text.lstrip(_SPACE) if trim else text
        yield text.rstrip(_SPACE) if action["left"] else text
        yield _tokens(action["code"])
        place, trim = action.end(), bool(action["right"])
    rest = template[place:]
    yield rest.lstrip(_SPACE) if trim else rest


def _tokens(code: str) -> list[str]:
    found = _TOKEN.findall(code)
    if not found or "".join(found) != re.sub(r'("(?:\\.|[^"\\])*")|\s+', lambda match: match[1] or "", code):
        raise GoTemplateError(f"the action {code!r} is not known here")
    return list(found)


# --- running --------------------------------------------------------------------------------------------------------


@dataclass
class _Scope:
    """The dot, and the variables that are declared so far, of an inner block after those around it."""

    root: Any
    dot: Any
    variables: dict[str, Any] = field(default_factory=dict)
    outer: "_Scope | None" = None

    def inner(self, dot: Any) -> "_Scope":
        return _Scope(self.root, dot, {}, self)

    def holder(self, name: str) -> dict[str, Any]:
        if name in self.variables:
            return self.variables
        if self.outer is None:
            raise GoTemplateError(f"the variable {name} is not declared")
        return self.outer.holder(name)


def _run(body: Sequence[Any], scope: _Scope) -> Iterator[str]:
    for node in body:
        if isinstance(node, str):
            yield node
        elif isinstance(node, _Block):
            yield from (_ranged(node.branches[0], scope) if node.kind == "range" else _chosen(node, scope))
        elif node[1:2] in ([":="], ["="]):
            _assign(node, scope)
        else:
            yield _printed(_Expression(node, scope).value())


def _chosen(block: _Block, scope: _Scope) -> Iterator[str]:
    for branch in block.branches:
        if branch.code is None or _truth(_Expression(branch.code, scope).value()):
            yield from _run(branch.body, scope.inner(scope.dot))
            return


def _ranged(branch: _Branch, scope: _Scope) -> Iterator[str]:
    code = branch.code or []
    names: list[str] = []
    if ":=" in code:
        place = code.index(":=")
        names, code = [name for name in code[:place] if name != ","], code[place + 1 :]
    items = _Expression(code, scope).value() or []
    if not isinstance(items, list):
        raise GoTemplateError(f"range over {items!r} is not known here")
    for index, item in enumerate(items):
        inner = scope.inner(item)
        inner.variables |= dict(zip(names, [index, item] if len(names) == 2 else [item], strict=False))
        yield from _run(branch.body, inner)


def _assign(node: Sequence[str], scope: _Scope) -> None:
    name, sign, *code = node
    value = _Expression(code, scope).value()
    holder = scope.variables if sign == ":=" else scope.holder(name)
    holder[name] = value


class _Expression:
    """The value of tokens: a function with its arguments, or one operand."""

    def __init__(self, tokens: Sequence[str], scope: _Scope) -> None:
        self._tokens = list(tokens)
        self._scope = scope

    def value(self) -> Any:
        """All tokens are one command."""
        found = self._command()
        if self._tokens:
            raise GoTemplateError(f"{self._tokens[0]!r} is not expected there")
        return found

    def _command(self) -> Any:
        if not self._tokens:
            raise GoTemplateError("an action is empty")
        if not re.fullmatch(r"[a-z]+", self._tokens[0]) or self._tokens[0] in ("true", "false"):
            return self._operand()
        name = self._tokens.pop(0)
        if name not in _FUNCTIONS:
            raise GoTemplateError(f"the function {name!r} is not known here")
        arguments = []
        while self._tokens and self._tokens[0] != ")":
            arguments.append(self._operand())
        try:
            return _FUNCTIONS[name](*arguments)
        except (TypeError, IndexError, KeyError) as error:
            raise GoTemplateError(f"{name} takes no such arguments: {error}") from error

    def _operand(self) -> Any:
        token = self._tokens.pop(0)
        if token == "(":
            found = self._command()
            if not self._tokens or self._tokens.pop(0) != ")":
                raise GoTemplateError("a parenthesis is not closed")
            if self._tokens and re.fullmatch(r"(?:\.\w+)+", self._tokens[0]):
                return _field(found, self._tokens.pop(0))
            return found
        if token.startswith('"'):
            return json.loads(token)
        if token in ("true", "false"):
            return token == "true"
        if re.fullmatch(r"-?\d+", token):
            return int(token)
        start, dot, fields = token.partition(".")
        if not start:
            return _field(self._scope.dot, dot + fields)
        if start == "$":
            return _field(self._scope.root, dot + fields)
        if start.startswith("$"):
            return _field(self._scope.holder(start)[start], dot + fields)
        raise GoTemplateError(f"{token!r} is not known here")


def _field(value: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        if not isinstance(value, Mapping) or name not in value:
            raise GoTemplateError(f"there is no field {name} in {value!r:.80}")
        value = value[name]
    return value


def _truth(value: Any) -> bool:
    """Go's: false, 0, nil and what is empty are false."""
    return bool(value)


def _printed(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int):
        return str(value)
    raise GoTemplateError(f"printing {type(value).__name__} is not known here; use json")


def _json(value: Any) -> str:
    """As ``json.Marshal``: no spaces, keys of mappings sorted, and what HTML minds escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):  # of texts, Go counts and takes bytes
        raise TypeError(f"{value!r:.40} is no list")
    return value


def _and(*values: Any) -> Any:
    return next((value for value in values if not _truth(value)), values[-1])


def _or(*values: Any) -> Any:
    return next((value for value in values if _truth(value)), values[-1])


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "and": _and,
    "or": _or,
    "not": lambda value: not _truth(value),
    "eq": lambda first, *others: any(first == other for other in others),
    **{name: getattr(operator, name) for name in ("ne", "lt", "le", "gt", "ge")},
    "len": lambda value: len(_list(value)),
    "index": lambda value, place: _list(value)[place],
    "slice": lambda value, start=0, end=None: _list(value)[start:end],
    "json": _json,
}
"""``and`` and ``or`` look at all their arguments here, and Go at no more than it needs: the value is the same."""
