"""How the rewards of a run were called: what they gave no score, what failed, what was known already, what it cost."""

from typing import Any

from praison_agent_rl.report.numbers import Facts, calls_of
from praison_agent_rl.report.page import count, figure, section, table, text


def calls_section(facts: Facts) -> str:
    """A row for each reward; nothing where no step tells of calls."""
    found = calls_of(facts.steps)
    if not any(sums["samples"] for sums in found.values()):
        return ""
    rows = [
        [
            f'<td class="name">{text(name, 80)}{_first_fault(sums)}</td>',
            f"{sums['samples']:,}",
            f"{sums['none']:,}",
            f'<td class="n{" bad" if sums["failed"] else ""}">{sums["failed"]:,}</td>',
            f"{sums['hits']:,}",
            figure(sums["seconds"]),
        ]
        for name, sums in found.items()
    ]
    head = ["reward", "answers", "no score (None)", "failed", "from the cache", "seconds"]
    used = "".join(_usage(name, sums["usage"]) for name, sums in found.items() if "usage" in sums)
    return section("Rewards as they were called", table(head, rows, numbers=range(1, 6)), used)


def _first_fault(sums: dict[str, Any]) -> str:
    return f'<div class="soft">first fault: {text(sums["error"], 400)}</div>' if "error" in sums else ""


def _usage(name: str, usage: dict[str, Any]) -> str:
    tokens = int(usage.get("prompt_tokens") or 0) + int(usage.get("completion_tokens") or 0)
    cost = usage.get("cost")
    price = f"{cost:.4g} USD" if isinstance(cost, int | float) else "cost unknown"
    said = (
        f"The judge {name} made {count(int(usage.get('calls') or 0), 'call')} with {count(tokens, 'token')}: {price}."
    )
    return f'<p class="soft">{text(said, 300)}</p>'
