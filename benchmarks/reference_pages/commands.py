"""Commands: every command of the command line with all its options, and the arguments of Python that they stand for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from typer import Typer
from typer.models import ArgumentInfo, OptionInfo

import autopar
from autopar import cli
from autopar.cli.arguments import ARGUMENTS
from reference_pages.text import body, inline, markdown, page, table

FUNCTIONS = {
    "profile": ("profile",),
    "plan": ("plan",),
    "simulate": ("simulate",),
    "compare": ("compare", "compare_runs"),
    "rehearse": ("rehearse",),
    "verify": ("verify",),
    "run": ("train",),
    "worker": ("train",),
    "show": ("show",),
    "env": ("environment",),
    "export": ("export",),
    "import": ("import_pipedream", "import_layout", "import_torchtitan", "import_profiles"),
    "checkpoint list": ("checkpoints",),
    "checkpoint verify": ("checkpoints",),
    "checkpoint export": ("export_checkpoint",),
    "cluster probe": ("probe",),
}
"""By command, the functions of `autopar` that do the same; others have none."""
_NAMES = {flag: name for name, flag in ARGUMENTS.items()}
_TYPES = {str: "text", int: "integer", float: "number", bool: "flag", Path: "path"}
_INTRODUCTION = """
Every command prints tables and progress to standard error. With `--json` its result goes to standard output, and with
`--quiet` there is nothing else but errors. `autopar COMMAND --help` says the same as this page.

An option without a default need not be given. The last column names the argument of the Python function that does the
same ([Python](python.md)); options without one are the command line's own.

| exit code | meaning |
|---|---|
| 0 | done |
| 2 | the command line contradicts itself or the machine |
| 3 | nothing fits the memory or the constraints |
| 4 | a file is missing, malformed, or does not fit another; or the model cannot be taken as it is |
| 5 | training failed, or what was compared differs |
| 130 | interrupted (128 + signal, if ended by another) |
"""


class Option(NamedTuple):
    """An option or a positional argument of a command."""

    name: str
    """Of the parameter in Python."""
    flags: tuple[str, ...]
    """Empty of a positional argument."""
    type: str
    default: str
    help: str
    group: str = ""
    """Of the help; none: the first."""


def commands_page() -> str:
    """Return the page of the command line."""
    every = list(_commands(cli.app, "autopar"))
    lines = [f"- [{name}](#{name.replace(' ', '-')}): {_first(act.__doc__)}" for name, act, _ in every]
    shared = _section("All commands", _options(cli.app.registered_callback.callback), {})  # type: ignore[union-attr]
    parts = (_command(*each) for each in every)
    settings = f"## Settings\n\n{body(cli.settings.__doc__)}"
    return page(
        "Commands", "the options of the command line", _INTRODUCTION, "\n".join(lines), shared, settings, *parts
    )


def _commands(app: Typer, before: str) -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Yield the name, the function and the examples of every command."""
    for command in app.registered_commands:
        assert command.callback is not None
        yield f"{before} {command.name}", command.callback, command.epilog or ""
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from _commands(group.typer_instance, f"{before} {group.name}")


def _command(name: str, act: Callable[..., Any], epilog: str) -> str:
    known = _arguments(name.removeprefix("autopar "))
    examples = "\n".join(line for line in epilog.split("\n\n") if line.startswith("autopar"))
    said = "\n\n".join((markdown(act.__doc__), f"```bash\n{examples}\n```"))
    return _section(name, _options(act), known, said)


def _section(name: str, options: list[Option], known: Mapping[str, str], said: str = "") -> str:
    header = ["option", "type", "default", "meaning", "in Python"]
    parts = [f"## {name}", said]
    for group in dict.fromkeys(each.group for each in sorted(options, key=lambda each: each.group != "")):
        of_group = [each for each in options if each.group == group]
        rows = (
            [_spelling(each), each.type, each.default, inline(each.help), _argument(each, known)] for each in of_group
        )
        parts += [f"**{group}**" if group else "", table(header, rows)]
    return "\n\n".join(filter(None, parts))


def _spelling(option: Option) -> str:
    return ", ".join(f"`{flag}`" for flag in option.flags) or f"`{option.name.upper()}`"


def _options(act: Callable[..., Any] | None) -> list[Option]:
    assert act is not None
    hints = get_type_hints(act, include_extras=True) if not hasattr(act, "__signature__") else {}
    parameters = inspect.signature(act).parameters.values()
    found = (_option(each, hints.get(each.name, each.annotation)) for each in parameters if each.name != "context")
    return list(found)


def _option(parameter: inspect.Parameter, hint: object) -> Option:
    kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    info = next((each for each in extras if isinstance(each, OptionInfo | ArgumentInfo)), None)
    assert info is not None, parameter
    flags: tuple[str, ...] = ()
    name = parameter.name
    if isinstance(info, OptionInfo):
        # In annotations, the first of them stands where a default would.
        written = (info.default, *(info.param_decls or ()))
        flags = tuple(each for each in written if isinstance(each, str)) or (f"--{name.replace('_', '-')}",)
    elif info.metavar:
        name = info.metavar
    choices = (info.metavar or "").split("|") if isinstance(info, OptionInfo) else []
    shown = ", ".join(f"`{each}`" for each in choices) if len(choices) > 1 else _type(kind)
    return Option(name, flags, shown, _default(parameter.default), info.help or "", info.rich_help_panel or "")


def _type(kind: Any) -> str:  # noqa: ANN401
    """Return a type in words; what may be repeated, and what a literal may be.

    >>> _type(int | None), _type(list[str] | None), _type(Literal["a", "b"])
    ('integer', 'text, repeatable', '`a`, `b`')
    """
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{each}`" for each in get_args(kind))
    if get_origin(kind) is list:
        return f"{_TYPES[get_args(kind)[0]]}, repeatable"
    return _TYPES[kind]


def _default(value: object) -> str:
    if value is inspect.Parameter.empty:
        return "required"
    return "" if value is None or value is False else f"`{value}`"


def _argument(option: Option, known: Mapping[str, str]) -> str:
    """Return the argument in Python that an option stands for; empty where there is none."""
    flag = option.flags[0] if option.flags else option.name.lower()
    name = _NAMES.get(flag, flag.removeprefix("--").replace("-", "_"))
    return f"`{known[name]}({name}=)`" if name in known else ""


def _arguments(command: str) -> dict[str, str]:
    """Return the arguments of the functions that do what a command does, each with its function's name."""
    found: dict[str, str] = {}
    for function in FUNCTIONS.get(command, ()):
        names = inspect.signature(getattr(autopar, function)).parameters
        found |= {each: function for each in names if each not in found}
    return found


def _first(docstring: str | None) -> str:
    return inline(" ".join(inspect.cleandoc(docstring or "").split("\n\n")[0].split()))
