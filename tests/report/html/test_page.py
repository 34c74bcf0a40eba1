"""A page: whole and inert, alike for the same content, within its bytes; its tables have every row."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import autopar
from autopar.report.html.page import MOST_BYTES, Commands, Fold, Folds, page, sort_key
from autopar.report.table import Table, duration, fill, size
from hostile import HOSTILE, NAMES
from played import small_plan


class Outline(HTMLParser):
    """What a page is made of, what it would fetch, and its rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.fetched, self.words = list[str](), set[str](), list[str](), list[str]()
        self.specs = list[str]()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in ("meta", "rect"):
            self.open.append("json" if ("type", "application/json") in attrs else tag)
        names = ("src", "href", "xlink:href", "data", "action")
        self.fetched += [value for name, value in attrs if name in names and value]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() in (tag, "json")

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["json"]:
            self.specs.append(data)
        elif self.open[-1:] not in (["script"], ["style"]):
            self.words.append(data)


@pytest.mark.some(8)
@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_page_is_whole_and_inert_whatever_its_names(kind: str, name: str) -> None:
    text = HOSTILE[kind](name).to_html()
    assert text == HOSTILE[kind](name).to_html()
    assert len(text.encode()) <= MOST_BYTES
    outline = Outline(text)
    assert outline.open == []
    assert outline.fetched == []
    assert not outline.tags & {"img", "iframe", "link", "object", "a", "form"}
    if kind != "timeline":
        assert any(name[:20] in words for words in outline.words)
    for spec in outline.specs:
        json.loads(spec)
    assert "default-src 'none'" in text


def test_rows_of_ranks_that_say_the_same_are_one_and_all_others_are_there() -> None:
    table = Table("Ranks", (">rank", ">busy"))
    fill(table, [(str(rank), duration(1.0 if rank % 64 else 0.5)) for rank in range(1024)])
    other = Table("Layers", (">index", "name"))
    fill(other, [(str(index), f"layer {index}") for index in range(1024)])
    words = Outline(page("title", [table, other])).words
    assert "1-63, 65-127, 129-191, 819 more (x 1,008)" in words
    assert words.count("500 ms") == words.count("1 s") == 1
    assert [word for word in words if word.startswith("layer ")] == [f"layer {index}" for index in range(1024)]


def test_what_there_is_no_room_for_is_left_out_and_said() -> None:
    long = [Folds("stages", [Fold(f"stage {at}", ("x" * 100_000,)) for at in range(20)]) for _ in range(10)]
    text = page("title", [*long, Commands("In the folder of plan.json:", ["autopar run <plan.json>"])])
    assert len(text.encode()) <= MOST_BYTES
    outline = Outline(text)
    assert outline.open == []
    assert "there is more" in "".join(outline.words)
    assert "autopar run &lt;plan.json&gt;" in page("title", [Commands("", ["autopar run <plan.json>"])])


def test_quantities_are_sorted_as_they_are_large() -> None:
    for shown, values in ((duration, (1e-9, 3e-6, 2e-5, 0.4, 7.0, 300.0)), (size, (3, 2000, 2**21, 2**33, 2**45))):
        keys = [sort_key(shown(value)) for value in values]
        assert keys == pytest.approx(values, rel=0.01)


def test_a_plan_whose_files_are_gone_is_a_page_that_says_so(tmp_path: Path) -> None:
    small_plan((2, 1), 4).save(tmp_path / "plan.json")
    text = autopar.show(tmp_path / "plan.json").to_html(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text() == text
    assert "no timeline is drawn: " in text
    (commands,) = re.findall(r"<pre tabindex.*?</pre>", text, re.DOTALL)
    assert "autopar show plan.json --html plan.html" in commands
