"""Bugs that are kept are as they say: each still applies, and names a test that there is."""

import ast
from collections import Counter
from functools import cache

import pytest

from bugs import BUGS, Bug, read_bugs
from paths import ROOT

KEPT = read_bugs()


@cache
def functions_of(file: str) -> frozenset[str]:
    """Return the functions of a file of tests."""
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_there_are_ten_of_every_room_and_each_has_its_own_name() -> None:
    assert {file.stem: len(read_bugs([file])) for file in BUGS} == dict.fromkeys(
        ("planner", "runtime", "capture", "formats"), 10
    )
    assert [name for name, count in Counter(bug.name for bug in KEPT).items() if count > 1] == []
    assert sum(bug.fuzzed is not None for bug in KEPT) == 6


@pytest.mark.parametrize("bug", KEPT, ids=lambda bug: bug.name)
def test_a_bug_applies_and_names_a_test(bug: Bug) -> None:
    text = (ROOT / bug.file).read_text()
    assert text.count(bug.old) == 1, f"{bug.file} has the old words {text.count(bug.old)} times"
    ast.parse(text.replace(bug.old, bug.new))
    assert bug.says.endswith(".")
    file, _, test = (bug.found_by or "").partition("::")
    assert test.partition("[")[0] in functions_of(file)
