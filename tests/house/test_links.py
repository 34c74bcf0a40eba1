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


def _broken(page: Path) -> list[str]:
    """Return the links of a page that lead nowhere."""
    found = []
    for path, anchor in _LINK.findall(_CODE.sub("", page.read_text())):
        target = (page.parent / path).resolve() if path else page
        if path.startswith("http"):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in _anchors(target)):
            found.append(f"{path}#{anchor}" if anchor else path)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert _broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# A `b`, c: D\n\n[x](b.md) [y](#a-b-c-d) [z](#e) [w](a.md#a-b-c-d)\n")
    assert _broken(tmp_path / "a.md") == ["b.md", "#e"]
