"""Settings: options that stand in ``[tool.autopar]`` of the working folder's ``pyproject.toml``.

A key is an option without its dashes. It is of every command that has the option; under ``[tool.autopar.plan]`` of that
command alone. What is typed wins. A file that came with somebody else's code is no one who may say what to run or
trust: it names no file or folder, accepts nothing, and replaces nothing.

    [tool.autopar]
    gpus = 8
    memory = "16GiB"

    [tool.autopar.run]
    steps = 1000
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import typer

from autopar.cli.output import say, screen
from autopar.errors import FileError, UsageError, unknown
from autopar.formats.document import parse_toml, read_text, value_text

SETTINGS = Path("pyproject.toml")
_TABLE = "tool.autopar"
_NEVER = ("--overwrite", "--trust-paths", "--accept-changes", "--accept-loss", "--debug", "--version", "--help")
_SCALARS = (bool, int, float, str)
_MOST_BITS = 4096
"""Of a number."""


class _Setting(NamedTuple):
    """A key of a table and its value."""

    table: str
    key: str
    value: Any


def read_settings(context: typer.Context) -> None:
    """Let the options of commands have the values of the working folder's settings, where nothing else is typed.

    Raises:
        FileError: the file is not TOML, or has something else than tables in their place.
        UsageError: a key is no option, may not stand there, or has a value that no option has; names file and line.
    """
    if not SETTINGS.is_file():
        return
    text = read_text(SETTINGS, "settings")
    content: Any = parse_toml(text, SETTINGS)
    for name in _TABLE.split("."):
        content = content.get(name, {})
        if not isinstance(content, dict):
            raise FileError(f"{SETTINGS}: {name} is a table; found {value_text(content)}")
    if content:
        context.default_map = _values(context.command, _TABLE, content, (), text)


def _values(group: Any, table: str, content: Any, above: tuple[_Setting, ...], text: str) -> dict[str, Any]:  # noqa: ANN401
    """Return the values of a group's commands by their names, and of each its parameters' by theirs."""
    commands: Mapping[str, Any] = group.commands
    tables = {name: value for name, value in content.items() if name in commands and isinstance(value, dict)}
    own = [_Setting(table, key, value) for key, value in content.items() if key not in tables]
    _check_known(own, {name for command in _leaves(group) for name in _options(command)}, commands, text)
    found = {}
    for name, command in commands.items():
        inside, inner = f"{table}.{name}", tables.get(name, {})
        if hasattr(command, "commands"):
            found[name] = _values(command, inside, inner, (*above, *own), text)
            continue
        options, mine = _options(command), [_Setting(inside, key, value) for key, value in inner.items()]
        _check_known(mine, options, (), text)
        named = {each.key: each for each in (*above, *own, *mine) if each.key in options}
        for key, setting in named.items():
            _check(setting, options[key], text)
        found[name] = {options[key].name: _as_taken(options[key], setting.value) for key, setting in named.items()}
    return found


def _as_taken(option: Any, value: Any) -> Any:  # noqa: ANN401
    """Return a value as the option takes it: a list, where it may be repeated."""
    return [value] if option.multiple and not isinstance(value, list) else value


def _leaves(group: Any) -> Iterator[Any]:  # noqa: ANN401
    for command in group.commands.values():
        yield from _leaves(command) if hasattr(command, "commands") else (command,)


def _options(command: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the options of a command, by what is typed behind the dashes."""
    return {name[2:]: each for each in command.params for name in each.opts if name.startswith("--")}


def _check_known(settings: Iterable[_Setting], options: Iterable[str], commands: Iterable[str], text: str) -> None:
    """Refuse keys that are no options."""
    for setting in settings:
        key = setting.key
        if key in options:
            continue
        where = _at(text, setting.table, key)
        if key in commands:
            raise UsageError(f"{where}: {key} is a command; write its options below [{setting.table}.{key}]")
        raise unknown(UsageError, f"{where}: no option is called {key[:80]!r}", key, (*options, *commands))


def _check(setting: _Setting, option: Any, text: str) -> None:  # noqa: ANN401
    """Refuse an option that nobody but the user may give, and a value that is none."""
    flag, value = f"--{setting.key}", setting.value
    if flag in _NEVER or option.type_descriptor.annotation is Path:
        where = _at(text, setting.table, setting.key)
        raise UsageError(f"{where}: {flag} is not taken from a file, which may be somebody else's; type it")
    values = value if option.multiple and isinstance(value, list) else [value]
    if not all(isinstance(each, bool if option.is_flag else _SCALARS) and _is_short(each) for each in values):
        needed = "true or false" if option.is_flag else "text or a number"
        where = _at(text, setting.table, setting.key)
        raise UsageError(f"{where}: {flag} is {needed}; found {value_text(value)}")


def _is_short(value: object) -> bool:
    """Whether Python writes it, which it does not do with a number of thousands of digits."""
    return not isinstance(value, int) or value.bit_length() < _MOST_BITS


def _at(text: str, table: str, key: str) -> str:
    """Return the file and the line of a key."""
    header = ""
    for number, line in enumerate(text.splitlines(), 1):
        found = re.match(r"\s*\[([^\]]+)\]", line)
        if found:
            header = re.sub(r"[\s\"']", "", found[1])
        if header in (f"{table}.{key}", table) and (header != table or re.match(rf"\s*[\"']?{re.escape(key)}\b", line)):
            return f"{SETTINGS}:{number}"
    return f"{SETTINGS}: [{table}]"


def is_setting(error: object) -> bool:
    """Whether a mistake of the command line is one of the settings: nobody has typed the option."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    source = getattr(context, "get_parameter_source", lambda name: None)(getattr(parameter, "name", ""))
    return getattr(source, "name", "") == "DEFAULT_MAP"


def echo_settings(context: typer.Context) -> None:
    """Say in a line which options a command has from the settings."""
    found: list[str] = []
    for flag, option in _options(context.command).items():
        source, value = context.get_parameter_source(option.name), context.params.get(option.name)
        if getattr(source, "name", "") == "DEFAULT_MAP" and value not in (None, False):
            values = value if isinstance(value, list | tuple) else [value]
            found += [f"--{flag}"] if option.is_flag else [f"--{flag} {shlex.quote(str(each))}" for each in values]
    if found:
        say(screen(), f"{SETTINGS}: {' '.join(found)}")
