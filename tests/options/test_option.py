"""Options: what is said of a field is what help shows, what is refused, and how text is read."""

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from autopar.errors import UsageError
from autopar.formats.program import Fault
from autopar.options.option import changed, check_values, named_options, option, options_of, takes, with_values


@dataclass(frozen=True)
class Inner:
    share: float = option(0.5, "A share.", "Group", least=0, most=1)

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True)
class Outer:
    limit_bytes: int | None = option(None, "A limit.", unit="bytes", above=10)
    kind: Literal["a", "b"] | None = option(None, "A kind.")
    names: tuple[str, ...] = option((), "Names.")
    faults: tuple[Fault, ...] = option((), "Faults.", flag="fault")
    file: Path | None = option(None, "A file.", is_typed=False)
    inner: Inner = field(default_factory=Inner)
    rest: int = 3

    def __post_init__(self) -> None:
        check_values(self)


def test_options_are_those_of_the_fields_and_of_what_these_are_of() -> None:
    found = options_of(Outer)
    assert list(found) == ["limit_bytes", "kind", "names", "faults", "file", "share"]
    assert [each.flag for each in found.values()] == ["--limit", "--kind", "--names", "--fault", "--file", "--share"]
    assert [each.choices for each in found.values()] == [(), ("a", "b"), (), (), (), ()]
    assert found["share"].said.group == "Group"
    assert found["kind"].said.group == ""


def test_text_and_lists_are_read_as_what_an_option_is() -> None:
    asked = {"limit_bytes": "2KiB", "names": "a,b", "faults": ["kill@1:7"], "file": "x.json", "share": 1}
    made = with_values(Outer, asked)
    assert (made.limit_bytes, made.names, made.file) == (2048, ("a,b",), Path("x.json"))
    assert made.faults == (Fault.parse("kill@1:7"),)
    assert made.inner == Inner(1)
    again = with_values(Outer, {"kind": "b"}, made)
    assert (again.kind, again.inner, again.names) == ("b", Inner(1), ("a,b",))
    assert changed(again, ("kind", "rest", "file")) == ["kind", "file"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"kind": "c"}, "`kind` must be one of a, b; found 'c'"),
        ({"limit_bytes": 10}, "`limit_bytes` must be above 10, found 10"),
        ({"limit_bytes": "lots"}, "`limit_bytes` 'lots': write a number and a unit"),
        ({"share": 2}, "`share` must be at most 1, found 2"),
        ({"share": float("nan")}, "`share` must be 0 or more, and at most 1, found nan"),
        ({"share": True}, "found True"),
        ({"rest": 4}, r"use\(\) has no option 'rest'; its options are limit_bytes, kind, names, faults, file, share"),
    ],
    ids=str,
)
def test_other_values_and_names_are_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        named_options("use", Outer, asked)


def test_a_function_shows_the_options_that_it_takes_by_name() -> None:
    @takes(Outer)
    def use(file: str, **named: object) -> None: ...

    assert list(inspect.signature(use).parameters) == ["file", "limit_bytes", "kind", "names", "faults", "share"]
