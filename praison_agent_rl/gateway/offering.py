"""Which server answers under which name now: follows what is promoted and rolled back, and swaps without a gap.

A name goes over to other weights once their server answers. The former server ends when its last request has ended
(`server_pool`): each request holds its address.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from praison_agent_rl.backoff import Backoff
from praison_agent_rl.errors import PraisonRLError
from praison_agent_rl.gateway.lines import Line, Open
from praison_agent_rl.gateway.names import Target, Weights, wanted
from praison_agent_rl.records import Pointer
from praison_agent_rl.registry import current

EVERY = 0.5
"""Seconds between two looks at which versions are current."""


class _Name:
    """What answers under a name that stays, and what is to answer."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.line: Line | None = None
        self.next: Weights | None = None
        """What is to answer; it does not yet where that is not the line's."""
        self.fault: str | None = None
        """Why it is not known what is to answer."""
        self._seen: tuple[Pointer | None] | None = None

    def look(self) -> None:
        """See what is to answer."""
        target = self.target
        try:
            seen = (None if target.pinned else current(target.home, target.agent),)
            if seen != self._seen:
                self.next, self._seen = wanted(target, *seen), seen
            self.fault = None
        except (PraisonRLError, OSError) as error:
            self.fault = str(error)

    @property
    def pending(self) -> Weights | None:
        """What is to answer and does not yet."""
        return None if self.line is None or self.next is None or self.next == self.line.weights else self.next


class Offering:
    """Names and the servers behind them; lives in one event loop, which alone changes it."""

    def __init__(
        self,
        targets: Sequence[Target],
        open_: Open,
        *,
        tell: Callable[[str], None] = lambda text: None,
        new_backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        self._names = [_Name(target) for target in targets]
        self._open = open_
        self._tell = tell
        self._new_backoff = new_backoff
        self._lines: dict[str, Line] = {}
        """By the model that they serve."""

    async def follow(self, *, every: float = EVERY) -> None:
        """Swap as it is decided, until this is cancelled."""
        try:
            while True:
                for name in self._names:
                    await asyncio.to_thread(name.look)
                    self._go_over(name)
                self._close_unused()
                await asyncio.sleep(every)
        finally:
            for line in self._lines.values():
                line.close()

    def line(self, name: str) -> Line | None:
        """What answers under ``name``: one that stays, or that of weights which answer under such a one."""
        listed = self.models()
        if name not in listed:  # an agent's own name may be the folder of another
            return next((known.line for known in self._names if name in known.target.names), None)
        return listed[name]

    def knows(self, name: str) -> bool:
        """Whether ``name`` can be asked for, be it that nothing answers under it yet."""
        return self.line(name) is not None or any(name in known.target.names for known in self._names)

    def models(self) -> dict[str, Line]:
        """Each name that can be asked for, with what answers under it."""
        lines = {known.target.name: known.line for known in self._names if known.line}
        return lines | {line.weights.model: line for line in lines.values()}

    @property
    def names(self) -> list[str]:
        """Those that stay."""
        return [known.target.name for known in self._names]

    @property
    def tried(self) -> bool:
        """Whether each name was answered, or a server for it has failed to come up."""
        return all(known.line and (known.line.was_up or known.line.fault) for known in self._names)

    def stillborn(self) -> list[str]:
        """Why no name was ever answered, where each has been tried; empty where some was, or may yet be."""
        lines = [known.line for known in self._names if known.line]
        if not self.tried or any(line.was_up for line in lines):
            return []
        return list(dict.fromkeys(str(line.fault) for line in lines))

    @property
    def healthy(self) -> bool:
        """Whether every name can be answered now."""
        return all(known.line and known.line.address for known in self._names)

    def state(self) -> dict[str, dict[str, Any]]:
        """What answers under each name, and what is wrong."""
        return {known.target.name: _state_of(known, self._lines) for known in self._names}

    def lines(self) -> list[Line]:
        """All that are kept up, those too that are to answer and do not yet."""
        return list(self._lines.values())

    def _go_over(self, name: _Name) -> None:
        if name.next is None or (name.line is not None and name.pending is None):
            return
        model = name.next.model
        if model not in self._lines:
            backoff = self._new_backoff()
            self._lines[model] = Line(name.next, self._open, tell=self._tell, backoff=backoff)
        line = self._lines[model]
        if name.line is None or line.address is not None:
            if name.line is not None:
                self._tell(f"{name.target.name}: {line.weights.label} answers, after {name.line.weights.label}")
            name.line = line

    def _close_unused(self) -> None:
        used = {name.line.weights.model for name in self._names if name.line}
        used |= {name.next.model for name in self._names if name.next}
        for model in self._lines.keys() - used:
            self._lines.pop(model).close()


def _state_of(name: _Name, lines: dict[str, Line]) -> dict[str, Any]:
    line, pending = name.line, name.pending
    said: dict[str, Any] = {"version": line.weights.label if line else None, "up": bool(line and line.address)}
    if line is not None and line.fault:
        said["fault"] = line.fault
    if pending is not None:
        behind = lines.get(pending.model)
        said["next"] = {"version": pending.label, "fault": behind.fault if behind else None}
    if name.fault:
        said["registry"] = name.fault
    return said
