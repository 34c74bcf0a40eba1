"""Option: what is said of a field of options once: in help, in the reference, and where a value is refused.

A class of options is a frozen dataclass below :class:`Options`, whose fields are made by :func:`option`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from numbers import Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from autopar.errors import UsageError, unknown
from autopar.formats.document import parse_bandwidth, parse_bytes, parse_count

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
READERS: dict[str, Callable[[str, str], float]] = {
    "bytes": parse_bytes,
    "bytes/s": parse_bandwidth,
    "tokens": parse_count,
    "samples": parse_count,
}
"""By unit, what reads the text of a number."""


@dataclass(frozen=True)
class Option:
    """What is said of a field, beside its type and its default."""

    help: str
    """What it does, in a sentence or two; other options stand in backquotes, as Python has them."""
    group: str = ""
    """Under which help shows it; none: among those that most people need first."""
    unit: str = ""
    """``seconds``, or one of :data:`READERS`, of which text such as ``16GiB`` is taken, too."""
    least: float | None = None
    above: float | None = None
    """What the value must be larger than."""
    most: float | None = None
    flag: str = ""
    """What is typed, where that is not the field's name without its unit."""
    bare: str = ""
    """What a flag without a value stands for; none: it takes one."""
    is_typed: bool = True
    """Whether commands have it; else it is Python's alone."""

    def requirement(self, value: Any) -> str | None:  # noqa: ANN401
        """Return what a number must be where a value is not; None where it is."""
        least = "" if self.least is None else "0 or more" if self.least == 0 else f"at least {self.least}"
        least += "" if self.above is None else "positive" if self.above == 0 else f"above {self.above}"
        most = "" if self.most is None else f"at most {self.most}"
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            return ", and ".join(filter(None, (least, most))) or "a finite number"
        if (self.least is not None and value < self.least) or (self.above is not None and value <= self.above):
            return least
        return most if self.most is not None and value > self.most else None


def option(default: T, help: str, group: str = "", **more: Any) -> T:  # noqa: A002, ANN401
    """Return a field of a dataclass with a default; what is said of it are the arguments of :class:`Option`."""
    return field(default=default, metadata={"option": Option(help, group, **more)})


def again(kind: type[Any], name: str) -> Any:  # noqa: ANN401
    """Return a field like that of another class of options."""
    known = next(each for each in fields(kind) if each.name == name)
    return field(default=known.default, metadata=known.metadata)


class OptionField(NamedTuple):
    """An option of a class."""

    name: str
    kind: Any
    """Its type; None is left out."""
    default: Any
    option: Option

    @property
    def flag(self) -> str:
        """What is typed on the command line, such as ``--memory``."""
        name = self.option.flag or self.name.removesuffix("_bytes").removesuffix("_s")
        return f"--{name.replace('_', '-')}"

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts that it may be; none: any, or it is no text."""
        return tuple(each for kind in self._kinds if get_origin(kind) is Literal for each in get_args(kind))

    @property
    def is_number(self) -> bool:
        """Whether it is a number, or may be one."""
        return any(kind in (int, float) for kind in self._kinds)

    @property
    def _kinds(self) -> tuple[Any, ...]:
        return get_args(self.kind) if get_origin(self.kind) in (Union, UnionType) else (self.kind,)

    def check(self, value: object) -> None:
        """Refuse a value that it may not be.

        Raises:
            UsageError: says what it must be.
        """
        if value is None or value in self.choices:
            return
        needed = self.option.requirement(value) if self.is_number else None
        if needed is not None:
            unit = f" {self.option.unit}" if self.option.unit in ("seconds", "bytes") else ""
            number = "a number, " if self.choices else ""
            others = "".join(f", or {each!r}; " for each in self.choices)
            raise UsageError(f"`{self.name}` must be {number}{needed}{unit}{others or ', '}found {value!r}")
        if self.choices and not self.is_number:
            message = f"`{self.name}` must be one of {', '.join(self.choices)}; found {value!r}"
            raise unknown(UsageError, message, str(value), self.choices)

    def read(self, value: Any) -> object:  # noqa: ANN401
        """Return a value that may be text, or a list, as what the option is.

        Raises:
            UsageError: the text means no such value.
        """
        parse = READERS.get(self.option.unit)
        if get_origin(self.kind) is tuple:
            several = [value] if isinstance(value, str) else value
            each_of = getattr(get_args(self.kind)[0], "parse", None)
            return tuple(each_of(each) if each_of and isinstance(each, str) else each for each in several or ())
        if not isinstance(value, str):
            return value
        if parse is not None:
            return parse(value, f"`{self.name}`")
        if self.kind is Path:
            return Path(value)
        return int(value) if self.is_number and value.isascii() and value.isdecimal() else value


def _read_options(kind: Any) -> dict[str, OptionField]:  # noqa: ANN401
    hints, found = get_type_hints(kind), dict[str, OptionField]()
    for each in fields(kind):
        if "option" in each.metadata:
            hint = hints[each.name]
            kinds = tuple(one for one in get_args(hint) if one is not NoneType)
            bare = Union[kinds] if get_origin(hint) in (Union, UnionType) else hint  # noqa: UP007
            found[each.name] = OptionField(each.name, bare, each.default, each.metadata["option"])
    return found


options_of: Callable[[Any], dict[str, OptionField]] = cache(_read_options)
"""Returns the options of a class by name."""


@dataclass(frozen=True)
class Options:
    """What the user asks.

    Raises:
        UsageError: a value is out of range, or none of the choices.
    """

    def __post_init__(self) -> None:
        for name, each in options_of(type(self)).items():
            each.check(getattr(self, name))

    def non_defaults(self, names: Iterable[str]) -> list[str]:
        """Return those of some options that are other than by default."""
        return [name for name in names if getattr(self, name) != getattr(type(self), name)]

    @classmethod
    def of(cls, function: str, values: Mapping[str, object], before: Self | None = None) -> Self:
        """Return options with values by name, and else those ``before``; text stands for paths, numbers and sizes.

        Raises:
            UsageError: ``function`` has no such option, or a value is not what the option may be.
        """
        known = options_of(cls)
        for name in values:
            if name not in known:
                message = f"{function}() has no option {name!r}; its options are {', '.join(known)}"
                raise unknown(UsageError, message, name, known)
        changes = {name: known[name].read(value) for name, value in values.items()}
        return cls(**changes) if before is None else replace(before, **changes)


OPTIONS_HEAD = "\n    Options:"


def takes(kind: type[Options]) -> Callable[[F], F]:
    """Return what shows the options of a class among the parameters of a function, in place of its ``**named``.

    What they do stands behind the words of the function.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        names = {each.name for each in own}
        more = (
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.kind)
            for each in options_of(kind).values()
            if each.name not in names
        )
        function.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        meanings = (f"\n        {each.name}: {each.option.help}" for each in options_of(kind).values())
        function.__doc__ = f"{function.__doc__}{OPTIONS_HEAD}{''.join(meanings)}\n    "
        return function

    return decorate
