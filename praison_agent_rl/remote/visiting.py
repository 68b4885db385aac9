"""Looks at another machine before a run: what is there, what would go there, and all that is missing at once.

Nothing is sent and nothing is left there.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from praison_agent_rl.config_fields.remote import Remote
from praison_agent_rl.estimate import Estimate, in_words
from praison_agent_rl.problems import Problems
from praison_agent_rl.remote.checks import Load, check_there, device_of, look_there
from praison_agent_rl.remote.connection import Link, patiently
from praison_agent_rl.remote.luggage import Project, Weights, on_the_hub, project_of, weights_of

_NAMES_SHOWN = 8


class Visit(NamedTuple):
    """What another machine said of itself, and what a run brings it."""

    found: Mapping[str, Any]
    """See `probe.look`."""
    project: Project
    weights: dict[str, Weights]
    """By what the plan calls them."""
    sent: int
    """Bytes of weights that are not there yet."""
    cost: Estimate

    @property
    def device(self) -> str:
        """What the run would compute on."""
        return device_of(self.found)

    @property
    def files_in_words(self) -> str:
        """What goes along of the user's project; empty where nothing does."""
        names = sorted(self.project.files)
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        return ", ".join(names[:_NAMES_SHOWN]) + more


def visit(remote: Remote, load: Load, *, folder: str | None = None) -> Visit:
    """Look whether a run can happen there; ``folder`` is the one that it has there already.

    Raises:
        Unreachable: the machine cannot be reached.
        ConfigError: the run cannot happen there; all that keeps it from it is said at once.
    """
    link, problems, plan = Link(remote), Problems(), load.plan
    project = problems.attempt(partial(project_of, plan, remote))
    weights = weights_of(plan)
    found = problems.attempt(partial(look_there, link, remote, plan.config, hub=on_the_hub(plan), folder=folder))
    if found is None:
        problems.raise_all()
    assert found is not None
    sent = sum(map(partial(_bytes_lacking, link, found), weights.values()))
    problems.attempt(partial(check_there, found, remote, load, sent=sent))
    problems.raise_all()
    assert project is not None
    return Visit(found, project, weights, sent, load.cost(found))


def in_words_of(visited: Visit, remote: Remote) -> dict[str, str]:
    """What was found there, for a table."""
    found = visited.found
    versions = {"praison-agent-rl": found["package"], **found["libraries"]}
    shown = [name for name in ("praison-agent-rl", "torch", "transformers", "trl", "peft") if name in versions]
    files = visited.files_in_words
    weights = "loaded there, from its cache or the hub"
    if visited.weights:
        sent = f"{in_words(visited.sent)} of weights would be sent" if visited.sent else "its weights are there already"
        weights = f"{sent}, to {found['workdir']}"
    return {
        "machine": f"{remote.host}: {', '.join(found['gpus']) or 'no GPU, so its CPU computes'}",
        "python there": f"{found['python']} with {', '.join(f'{name} {versions[name]}' for name in shown)}",
        "disk there": f"{in_words(found['free'])} free in {found['workdir']}",
        "model there": weights,
        **({"goes along": files} if files else {}),
    }


def _bytes_lacking(link: Link, found: Mapping[str, Any], weights: Weights) -> int:
    """Bytes of weights that are not there yet: all of them where the package there cannot be asked."""
    names = list(weights.files)
    if "script" in found:
        request = {"folder": weights.folder(found["workdir"]), "sums": weights.sums}
        names = patiently(lambda: link.ask([found["script"], "lacking"], request), lambda text: None)
    return sum(weights.files[name].stat().st_size for name in names)
