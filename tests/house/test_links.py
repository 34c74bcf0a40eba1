"""Links between pages lead to what is there, and so do decisions that code names; entries of decisions are short."""

import re
from pathlib import Path

import pytest

from paths import ROOT

_CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)]*))?\)")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "notebooks" / "README.md"])
NAMED = re.compile(r'docs/design/decisions\.md, "([^":]+): ([^"]+)"')
DECISIONS = (ROOT / "docs" / "design" / "decisions.md").read_text()
ROOMS = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", DECISIONS, re.MULTILINE))


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", _CODE.sub("", page.read_text()), re.MULTILINE):
        text = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        found.append(text if text not in found else f"{text}-{sum(each.startswith(text) for each in found)}")
    return set(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in _LINK.findall(_CODE.sub("", page.read_text())):
        target = (page.parent / path).resolve() if path else page
        is_there = target.exists() and (not anchor or target.suffix != ".md" or anchor in _anchors(target))
        assert is_there or path.startswith("http"), f"{path}#{anchor}"


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
