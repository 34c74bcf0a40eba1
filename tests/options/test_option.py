"""Options: what is said of a field is what help shows, what is refused, and how text is read."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from autopar.errors import UsageError
from autopar.formats.program import Fault
from autopar.options.option import Options, option, options_of, takes


@dataclass(frozen=True, kw_only=True)
class Base(Options):
    share: float = option(0.5, "A share.", "Group", least=0, most=1)
    any_number: float | None = option(None, "Any number.")


@dataclass(frozen=True)
class Some(Base):
    limit_bytes: int | None = option(None, "A limit.", unit="bytes", above=10)
    kind: Literal["a", "b"] | None = option(None, "A kind.")
    names: tuple[str, ...] = option((), "Names.")
    faults: tuple[Fault, ...] = option((), "Faults.", flag="fault")
    file: Path | None = option(None, "A file.", is_typed=False)
    rest: int = 3


def test_options_are_those_of_the_fields_also_of_the_class_above() -> None:
    found = options_of(Some)
    assert list(found) == ["share", "any_number", "limit_bytes", "kind", "names", "faults", "file"]
    flags = ["--share", "--any-number", "--limit", "--kind", "--names", "--fault", "--file"]
    assert [each.flag for each in found.values()] == flags
    assert [each.choices for each in found.values()] == [(), (), (), ("a", "b"), (), (), ()]
    assert (found["share"].option.group, found["kind"].option.group) == ("Group", "")


def test_text_and_lists_are_read_as_what_an_option_is() -> None:
    asked = {"limit_bytes": "2KiB", "names": "a,b", "faults": ["kill@1:7"], "file": "x.json", "share": 1}
    made = Some.of("use", asked)
    assert made == Some(2048, None, ("a,b",), (Fault.parse("kill@1:7"),), Path("x.json"), share=1)
    again = Some.of("use", {"kind": "b"}, made)
    assert (again.kind, again.share, again.names) == ("b", 1, ("a,b",))
    assert again.non_defaults(("kind", "rest", "file")) == ["kind", "file"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"kind": "c"}, "`kind` must be one of a, b; found 'c'"),
        ({"limit_bytes": 10}, "`limit_bytes` must be above 10 bytes, found 10"),
        ({"limit_bytes": "lots"}, "`limit_bytes` 'lots': write a number and a unit"),
        ({"share": 2}, "`share` must be at most 1, found 2"),
        ({"share": float("nan")}, "`share` must be 0 or more, and at most 1, found nan"),
        ({"any_number": float("inf")}, "`any_number` must be a finite number, found inf"),
        ({"share": True}, "found True"),
        (
            {"rest": 4},
            r"use\(\) has no option 'rest'; its options are share, any_number, limit_bytes, kind, names, faults, file",
        ),
    ],
    ids=str,
)
def test_other_values_and_names_are_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Some.of("use", asked)


def test_a_function_shows_the_options_that_it_takes_by_name() -> None:
    @takes(Some)
    def use(file: str, **named: object) -> None: ...

    named = ["share", "any_number", "limit_bytes", "kind", "names", "faults"]
    assert list(inspect.signature(use).parameters) == ["file", *named]
