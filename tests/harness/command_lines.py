"""Command lines, parsed as autopar parses them and not run."""

from collections.abc import Iterator
from typing import Any, TypeAlias

import typer

from autopar.cli import app

Command: TypeAlias = Any  # typer's own, whose classes it does not export
GROUP: Command = typer.main.get_command(app)


def commands(group: Command = GROUP, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Command]]:
    """Yield every command and group of commands behind its words."""
    yield words, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*words, name))


def parse(words: list[str]) -> str:
    """Parse a command line, and return the path of the command that would run.

    >>> parse(["plan", "--gpus", "8"])
    'plan'

    Raises:
        typer.exceptions.TyperException: as autopar would.
    """
    context, command, path = GROUP.make_context("autopar", words), GROUP, list[str]()
    while hasattr(command, "commands"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        path.append(name)
        context = command.make_context(name, rest, parent=context)
    return " ".join(path)
