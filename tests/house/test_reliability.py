"""docs/reference/faults.md: every case has its tests, and every test that shows a case is named there."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from paths import ROOT

CASES = range(1, 59)
PAGE = (ROOT / "docs" / "reference" / "faults.md").read_text()
ROWS = {int(number): cells for number, cells in re.findall(r"^\| (\d+) \|(.+)\|$", PAGE, re.MULTILINE)}


def marked() -> dict[int, set[str]]:
    """Return the files of tests that bear a case's number."""
    found = defaultdict(set)
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.reliability":
                for number in node.args:
                    assert isinstance(number, ast.Constant), path
                    found[number.value].add(path.relative_to(ROOT / "tests").as_posix())
    return found


def test_every_case_has_a_row_and_tests() -> None:
    assert list(ROWS) == list(CASES)
    assert sorted(marked()) == list(CASES)


def test_rows_name_the_tests_that_bear_their_numbers() -> None:
    named = {number: set(re.findall(r"`([\w/]+/test_\w+\.py|test_\w+\.py)`", cells)) for number, cells in ROWS.items()}
    assert named == dict(sorted(marked().items()))
