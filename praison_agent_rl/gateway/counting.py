"""Count requests by name, version and status, and put what servers count beside it, as Prometheus reads it.

The format: https://prometheus.io/docs/instrumenting/exposition_formats/ (text, version 0.0.4).
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

KIND = "text/plain; version=0.0.4; charset=utf-8"
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (.+)")

Labels = Mapping[str, str]


class Counts:
    """What was asked and how it went."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._seconds: dict[tuple[str, str], float] = {}
        self.under_way: Counter[str] = Counter()
        """Requests by the name that they asked for."""

    def add(self, name: str, version: str, status: int, seconds: float) -> None:
        """Count a request that has ended; ``seconds`` until its last byte."""
        self._requests[name, version, status] += 1
        self._seconds[name, version] = self._seconds.get((name, version), 0.0) + seconds

    def lines(self) -> list[str]:
        """The counts; requests with an error are those with a code from 400 on."""
        done: Counter[tuple[str, str]] = Counter()
        for (name, version, _), count in self._requests.items():
            done[name, version] += count
        requests = [
            ({"model": name, "version": version, "code": str(status)}, count)
            for (name, version, status), count in self._requests.items()
        ]
        seconds = [({"model": name, "version": version}, value) for (name, version), value in self._seconds.items()]
        counted = [({"model": name, "version": version}, count) for (name, version), count in done.items()]
        under_way = [({"model": name}, count) for name, count in self.under_way.items()]
        took = "praison_agent_rl_request_seconds"
        return [
            *family("praison_agent_rl_requests_total", "counter", "Requests that have ended.", requests),
            *family(took, "summary", "Seconds of the requests that have ended."),
            *samples(f"{took}_sum", seconds),
            *samples(f"{took}_count", counted),
            *family("praison_agent_rl_requests_under_way", "gauge", "Requests under way.", under_way),
        ]


def family(name: str, kind: str, help_: str, values: Iterable[tuple[Labels, float]] = ()) -> list[str]:
    """Lines of one metric with its samples."""
    return [f"# HELP {name} {help_}", f"# TYPE {name} {kind}", *samples(name, values)]


def samples(name: str, values: Iterable[tuple[Labels, float]]) -> list[str]:
    """Lines of one metric.

    >>> samples("up", [({"model": "a"}, 1)])
    ['up{model="a"} 1']
    """
    return [f"{name}{{{','.join(map(_label, labels.items()))}}} {value:.15g}" for labels, value in values]


def merged(texts: Mapping[str, str]) -> list[str]:
    """What several servers count, each sample with a label that says which one: a name may be described only once."""
    described: dict[str, list[str]] = {}
    counted: dict[str, list[str]] = {}
    for server, text in texts.items():
        name = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                name = line.split(" ", 3)[2]
                lines = described.setdefault(name, [])
                if line not in lines:
                    lines.append(line)
            elif found := _SAMPLE.fullmatch(line):
                labels = ",".join(filter(None, [_label(("server", server)), (found[2] or "").rstrip(",")]))
                counted.setdefault(name, []).append(f"{found[1]}{{{labels}}} {found[3]}")
    names = dict.fromkeys([*described, *counted])
    return [line for name in names for line in [*described.get(name, []), *counted.get(name, [])]]


def _label(pair: tuple[str, str]) -> str:
    value = pair[1].replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return f'{pair[0]}="{value}"'
