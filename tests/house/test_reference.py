"""docs/reference/: every page is what `benchmarks/reference.py` writes, with every public name and promised test."""

import ast
import doctest
import re
from functools import cache

import pytest

import autopar
import command_lines
import reference
from autopar.formats import cluster, plan, prediction, profile, report
from reference_pages import commands, python_api
from reference_pages.faults import CASES, TESTS, named_tests, numbers_of
from reference_pages.text import field_docstrings

FUNCTIONS = [name for name in autopar.__all__ if name.islower() and name != "errors"]


@pytest.mark.slow
@pytest.mark.parametrize("name", reference.PAGES)
def test_a_page_is_what_the_code_says(name: str) -> None:
    page = reference.FOLDER / name
    assert page.exists(), "run `python benchmarks/reference.py`"
    assert page.read_text() == reference.PAGES[name](), f"{name} is out of date; run `python benchmarks/reference.py`"


def test_every_option_function_key_and_case_is_on_its_page() -> None:
    """Every fault and bad input that is promised to be tried has tests that bear its number; no test bears another."""
    text = reference.PAGES["commands.md"]()
    for words, command in [each for each in command_lines.commands() if not hasattr(each[1], "commands")]:
        section = text.split(f"\n## autopar {' '.join(words)}\n")[1].split("\n## ")[0]
        for parameter in command.params:
            missing = [each for each in parameter.opts if each.startswith("-") and f"`{each}`" not in section]
            assert not missing, words
    undocumented = [
        f"{kind.__name__}.{name}"
        for module in (cluster, plan, prediction, profile, report)
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__
        for name, (_, said) in field_docstrings(kind).items()
        if not said and name not in ("format", "version", "LEFT_OUT")
    ]
    assert undocumented == []
    named = [name for names in python_api.TOPICS.values() for name in names]
    assert sorted(named) == FUNCTIONS
    rows = [line for line in reference.PAGES["files.md"]().split("\n") if line.startswith("| `")]
    assert len(rows) > 300
    assert [row for row in rows if row.endswith("|  |")] == []
    assert {page.name for page in reference.FOLDER.iterdir()} == set(reference.PAGES)
    found = commands._arguments("plan")
    assert found["memory_bytes"] == found["profile"] == "plan"
    assert "`train(timeout_s=)`" in text
    assert list(CASES) == list(range(1, 60))
    assert list(named_tests()) == list(CASES)


def test_every_row_of_the_page_of_faults_names_tests_that_are_there() -> None:
    rows = re.findall(r"^\| (\d+) \|.* \| ([^|]*) \|$", (reference.FOLDER / "faults.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(CASES)
    functions = cache(
        lambda file: [each for each in ast.parse((TESTS / file).read_text()).body if isinstance(each, ast.FunctionDef)]
    )
    for number, named in rows:
        ids = re.findall(r"`([\w/]+\.py)::(test_\w+)`", named)
        assert ids, f"row {number} names no test"
        assert len(ids) == named.count("`") / 2, named
        for file, test in ids:
            found = [each for each in functions(file) if each.name == test]
            # Of two of a name, pytest would collect the last alone.
            assert len(found) == 1, f"row {number}: {file}::{test}"
            assert int(number) in numbers_of(found[0]), f"row {number}: {file}::{test} does not bear it"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_has_an_example_that_compiles(name: str) -> None:
    # Examples run as doctests, but for those that take minutes or several hosts.
    examples = doctest.DocTestParser().get_examples(getattr(autopar, name).__doc__)
    assert examples
    for each in examples:
        compile(each.source, name, "single")
