"""The tree of errors is as its picture says, and a message is one line that any terminal shows."""

import importlib
import pkgutil
import re
import unicodedata
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar import errors
from autopar.errors import AutoparError, printable

ROW = re.compile(r"^ {4}([ │├└─]*)(\w+Error) +(\d)", re.MULTILINE)


def _classes(error: type[AutoparError]) -> Iterator[type[AutoparError]]:
    yield error
    for each in error.__subclasses__():
        yield from _classes(each)


def test_errors_and_their_exit_codes_are_those_of_the_picture() -> None:
    for module in pkgutil.walk_packages(autopar.__path__, "autopar."):
        if not module.name.endswith("__main__") and not module.name.startswith("autopar.examples"):
            importlib.import_module(module.name)
    by_name = {each.__name__: each for each in _classes(AutoparError)}
    above: list[str] = []
    rows = ROW.findall(errors.__doc__ or "")
    for indent, name, code in rows:
        depth = len(indent) // 4
        above[depth:] = [name]
        assert by_name[name].exit_code == int(code)
        if depth:
            assert by_name[name].__base__ is by_name[above[depth - 1]]
    assert {name for name, each in by_name.items() if each.__module__ == errors.__name__} <= {
        name for _, name, _ in rows
    }
    # What is not in the picture is a kind of what is, and ends autopar alike.
    codes = {int(code) for _, _, code in rows}
    assert {each.exit_code for each in by_name.values()} == codes


@settings(max_examples=50)
@given(st.text())
@pytest.mark.reliability(56)
def test_any_message_becomes_one_line_and_what_a_terminal_shows_anyway_is_left_alone(text: str) -> None:
    line = printable(text)
    assert line.isprintable()
    assert printable(line) == line
    kept = [each for each in text if each.isprintable() and not each.isspace()]
    rest = iter(line)
    assert all(each in rest for each in kept)
    shown = "".join(each for each in text if unicodedata.category(each)[0] in "LNP")
    assert printable(shown) == shown
