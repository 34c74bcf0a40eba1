"""docs/design/decisions.md: entries that code names are there, and entries are short."""

import re

import pytest

from paths import ROOT

PAGE = (ROOT / "docs" / "design" / "decisions.md").read_text()
NAMED = re.compile(r'docs/design/decisions\.md, "([^":]+): ([^"]+)"')
ROOMS = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", PAGE, re.MULTILINE))


def entries(text: str) -> dict[str, str]:
    """Return the text of every entry of a room, by its name."""
    found = re.findall(r"\*\*(.+?)[.,]?\*\*(.*?)(?=\n\n|\Z)", text, re.DOTALL)
    return {" ".join(name.split()): " ".join(said.split()) for name, said in found}


def test_entries_that_code_names_are_there() -> None:
    files = [file for room in ("autopar", "planner", "profiler", "runtime") for file in (ROOT / room).rglob("*.py")]
    named = {found for file in files for found in NAMED.findall(file.read_text())}
    assert len(named) > 10
    assert [(room, entry) for room, entry in sorted(named) if entry not in entries(ROOMS.get(room, ""))] == []


@pytest.mark.parametrize("room", ROOMS)
def test_entries_are_a_few_sentences(room: str) -> None:
    found = entries(ROOMS[room])
    assert found
    for name, said in found.items():
        assert 1 <= len(re.findall(r"[.!?](?= [A-Z`\"(]|$)", said)) <= 4, name
