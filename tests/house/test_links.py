"""Links between pages lead to pages and headings that are there."""

import re
from pathlib import Path

import pytest

from paths import ROOT

_CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)]*))?\)")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


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
