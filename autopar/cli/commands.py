"""Commands: how each becomes part of the command line, with `--quiet` and examples in its help."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, get_type_hints

import typer

from autopar.cli.output import quietly

Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="No progress, tables and notes; only errors, and the result with --json.")
]


def examples(*lines: str) -> str:
    """Return what the help of a command ends with."""
    return "\n\n".join((f"Example{'s' if len(lines) > 1 else ''}:", *lines))


def add(app: typer.Typer, name: str, act: Callable[..., None], *example_lines: str) -> None:
    """Let ``app`` have a command that does what ``act`` does, with ``example_lines`` as the examples in its help."""
    app.command(name, epilog=examples(*example_lines))(_with_quiet_option(act))


def _with_quiet_option(act: Callable[..., None]) -> Callable[..., None]:
    """Return a command with `--quiet` behind the parameters of ``act``."""

    def command(quiet: bool, **options: object) -> None:
        if not quiet:
            act(**options)
            return
        with quietly():
            act(**options)

    signature = inspect.signature(act)
    hints = get_type_hints(act, include_extras=True)
    parameters = [
        each.replace(annotation=hints.get(each.name, each.annotation)) for each in signature.parameters.values()
    ]
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    own = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet)
    command.__signature__ = signature.replace(parameters=[*parameters, own], return_annotation=None)  # type: ignore[attr-defined]
    command.__doc__ = act.__doc__
    return command
