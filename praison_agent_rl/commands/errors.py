"""How the command line ends: each error is one plain message and an exit code, and never a traceback unasked."""

import contextlib
import errno
import functools
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from praison_agent_rl.errors import PraisonRLError
from praison_agent_rl.stop_requests import Terminated

errors = Console(stderr=True, soft_wrap=True, emoji=False)

_USAGE_ERROR: Any = typer.BadParameter.__base__
"""click's, of the copy of click that typer brings along or of the installed one, by release."""


class _Interrupted(Exception):
    """Ctrl-C or SIGTERM, with what there is to say of the run that it ended."""

    def __init__(self, words: str, code: int) -> None:
        super().__init__(words)
        self.code = code


@contextlib.contextmanager
def naming(root: Path) -> Iterator[None]:
    """Say where a run is that Ctrl-C or SIGTERM ended, if it was begun."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if not (root / "plan.json").exists():
            raise
        words = (
            f"what was written stays in {root} (go on with: praison-agent-rl train --resume {shlex.quote(str(root))})"
        )
        raise _Interrupted(words, 143 if isinstance(interrupt, Terminated) else 130) from None


def guard(debug: bool, work: Callable[[], Any]) -> None:
    """Run ``work``; an error of the package becomes one message and an exit code."""
    try:
        work()
    except (typer.Exit, typer.Abort, _USAGE_ERROR):
        raise  # help, and words that are no option: the command line's own affair
    except PraisonRLError as error:
        if debug:
            traceback.print_exc()
        errors.print(f"error: {error}", markup=False, highlight=False, style="red")
        raise typer.Exit(1 if isinstance(error, RuntimeError) else 2) from error
    except _Interrupted as error:
        errors.print(f"interrupted; {error}", markup=False, highlight=False)
        raise typer.Exit(error.code) from None
    except KeyboardInterrupt:
        errors.print("interrupted; nothing was written")
        raise typer.Exit(130) from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            errors.print(f"error: the disk is full ({error}); make room there", markup=False, highlight=False)
            raise typer.Exit(1) from error
        if debug:
            raise
        errors.print(
            f"error: {type(error).__name__}: {error} (this is a fault of praison-agent-rl; --debug shows where)",
            markup=False,
            highlight=False,
            style="red",
        )
        raise typer.Exit(1) from error


def guarded(verb: Callable[..., Any]) -> Callable[..., Any]:
    """A verb whose errors are told as those of the others."""

    @functools.wraps(verb)
    def run(*words: Any, **options: Any) -> None:
        guard(False, lambda: verb(*words, **options))

    return run


class Guarded(TyperGroup):
    """A group of verbs whose errors are told as those of the others."""

    def invoke(self, ctx: Any) -> Any:
        """Run the verb that was named."""
        guard(False, lambda: stop_on_closed_pipe(lambda: super(Guarded, self).invoke(ctx)))


def stop_on_closed_pipe(run: Callable[[], Any]) -> None:
    """End without a word where whoever reads what is printed has gone."""
    try:
        run()
    except BrokenPipeError:
        sys.exit(1)
