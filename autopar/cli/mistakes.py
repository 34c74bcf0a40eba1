"""Mistakes: what to type in place of a command line that is wrong, as a whole line."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from autopar.cli.output import version_of
from autopar.errors import AutoparError, UsageError, unknown

_OTHER_WORDS = {
    "train": "run",
    "fit": "run",
    "start": "run",
    "launch": "run",
    "resume": "run",
    "measure": "profile",
    "search": "plan",
    "predict": "simulate",
    "plot": "show",
    "view": "show",
    "doctor": "env",
    "new": "init",
    "ls": "list",
}
"""What other programs call commands."""


class Commands(TyperGroup):
    """Commands that are also asked by ``help`` and ``version``, and that know which one was meant."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401
        """Return the command that is typed.

        Raises:
            UsageError: there is none of this name.
        """
        name, *others = args
        if name == "help" and name not in self.commands:
            return super().resolve_command(ctx, [*others, "--help"]) if others else _help(ctx)
        if name == "version" and ctx.parent is None:
            say_versions(True)
        if name in self.commands or name.startswith("-"):
            return super().resolve_command(ctx, args)
        other = _OTHER_WORDS.get(name, "")
        named = unknown(UsageError, f"no such command: {name!r}", name, self.commands)
        if other in self.commands:
            named = UsageError(f"no such command: {name!r}; it is called {other!r}")
            named.meant = name, other
        raise named


def _help(context: Any) -> Any:  # noqa: ANN401
    typer.echo(context.get_help())
    raise typer.Exit


def say_versions(is_requested: bool) -> None:
    """Say which versions of autopar and torch these are, and end."""
    if is_requested:
        typer.echo(f"autopar {version_of('autopar')}, torch {version_of('torch')}")
        raise typer.Exit


def meant_line(error: AutoparError) -> str:
    """Return what to type in place of the whole line, to end a message with; nothing where that is not known."""
    return "" if error.meant is None else _line(*error.meant)


def hint_of(error: TyperException) -> tuple[str, str]:
    """Return what is wrong with a command line, and what to type in its place, or where help is."""
    context, message = getattr(error, "ctx", None), error.format_message().strip()
    known = [name for each in (context.command.params if context else ()) for name in each.opts if name[:2] == "--"]
    typed = getattr(error, "option_name", None)
    if typed is not None and typed not in known:
        # Without the parser's own list of what is near.
        found = _unknown_option(getattr(error, "message", message), typed, known)
        message, hint = str(found), meant_line(found)
    else:
        # A word without its dashes is an argument, and the word behind it one too many.
        bare = next((each for each in sys.argv[2:] if f"--{each}" in known), None)
        hint = "" if bare is None or "unexpected extra argument" not in message else _line(bare, f"--{bare}")
    # Where the parser names no command, it has found one.
    path = context.command_path if context else f"autopar {sys.argv[1]}"
    return message, hint or f" (try: {path} --help)"


def _unknown_option(message: str, typed: str, known: list[str]) -> UsageError:
    # Of one dash before a word, the parser names the first letter.
    word = next((each for each in sys.argv[1:] if f"-{each.partition('=')[0]}" in known), None)
    if word is None:
        return unknown(UsageError, message, typed, known)
    error = UsageError(message)
    error.meant = word, f"-{word}"
    return error


def _line(wrong: str, right: str) -> str:
    """Return the command line with a word in place of another, or in a part of one."""
    words = sys.argv[1:]
    places = [at for at, word in enumerate(words) if word == wrong] or [
        at for at, word in enumerate(words) if wrong in word
    ]
    if not places:
        return ""
    words[places[0]] = words[places[0]].replace(wrong, right, 1)
    return f" (type: {shlex.join(['autopar', *words])})"
