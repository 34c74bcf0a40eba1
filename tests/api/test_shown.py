"""Objects show themselves: in a line, in a notebook within its bytes and inert, and in pictures by name."""

import io
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.api.objects import Shown, shown_as
from equal_plans import equal_plan, llama_profile
from hostile import HOSTILE, NAMES
from played import play, small_plan
from random_problems import gpt_profile, local_cluster


class _Tags(HTMLParser):
    """What a part of a page is made of, and the text in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.words = set[str](), set[tuple[str, str]](), list[str]()
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {(name, (value or "")[:22]) for name, value in attrs}
        self.open += [tag] * (tag != "img")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        assert "style" not in self.open or "<" not in data
        self.words.append(data)


@pytest.mark.some(8)
@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
@pytest.mark.parametrize("kind", HOSTILE)
def test_an_object_is_a_line_and_a_page_of_bounded_size_whatever_its_names(kind: str, name: str) -> None:
    found = HOSTILE[kind](name)
    assert len(repr(found)) <= 200
    assert repr(found).isprintable()
    page = found._repr_html_()
    assert len(page.encode()) <= 100_000
    tags = _Tags(page)
    assert tags.open == []
    assert tags.tags <= {"p", "img", "style", "table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert {value for attribute, value in tags.attributes if attribute == "src"} <= {"data:image/png;base64,"}
    assert {attribute for attribute, _ in tags.attributes} <= {"src", "alt", "style", "type", "id", "class", "colspan"}
    if kind != "timeline":
        assert any(name[:20] in words for words in tags.words)


def _large() -> dict[str, Shown]:
    plan, _ = equal_plan(llama_profile(1024), "1f1b", 256)
    return {
        "plan": shown_as(autopar.Plan, plan),
        "cluster": autopar.Cluster.of("512x8xH100:400Gbps"),
        "profile": shown_as(autopar.Profile, gpt_profile(blocks=600)),
        "timeline": autopar.Timeline.of(play(small_plan((1,) * 64, 64))),
    }


@pytest.mark.slow
def test_large_objects_are_shown_within_the_same_bytes() -> None:
    for found in _large().values():
        assert len(found._repr_html_().encode()) <= 100_000
        assert len(repr(found)) <= 200


def test_pictures_are_drawn_by_name_and_a_wrong_one_is_answered_with_those_that_there_are(tmp_path: Path) -> None:
    made = autopar.plan(gpt_profile(blocks=2), local_cluster(2), gpus=2, stages="0-1:1,2-3:1")
    for kind in made.view().pictures:
        made.plot(kind, tmp_path / f"{kind}.png")
        assert (tmp_path / f"{kind}.png").read_bytes().startswith(b"\x89PNG")
    names = ["stages", "placement", "timeline", "messages", "memory", "layers", "search"]
    assert [*made.view().pictures] == names
    said = rf"plot\('stage'\): there are pictures of the kinds {', '.join(map(repr, names))}; did you mean 'stages'\?"
    with pytest.raises(autopar.UsageError, match=said):
        made.plot("stage")
    with pytest.raises(autopar.UsageError, match=r"'messages'; plot\(path='a\.png'\) writes a file"):
        made.timeline().plot("a.png")
    assert made._repr_html_() == made._repr_html_()
    read = autopar.Plan.parse(made.dumps(), Path("plan.json"))
    read.plot().savefig(io.BytesIO())
    with pytest.raises(autopar.UsageError, match="pass `profile` and `cluster`"):
        read.plot("placement")
    origin = made.origin
    assert origin is not None
    assert all(isinstance(each, Shown) for each in (*origin, made.timeline(), autopar.compare(*origin, gpus=2)))
    found = autopar.compare(*origin, gpus=2)
    assert "Planners" in str(found)
    rows = json.loads(found.view().json)["rows"]
    assert [row["name"] for row in rows] == [*found.to_frame().index] == [row.name for row in found.rows]


def test_errors_are_at_hand_and_are_those_that_functions_raise() -> None:
    for name in ("AutoparError", "UsageError", "InfeasibleError", "FileError", "ModelError", "CaptureError"):
        assert getattr(autopar, name) is getattr(autopar.errors, name)
    kinds: list[Any] = [getattr(autopar, name) for name in autopar.__all__ if name.endswith("Error")]
    assert all(issubclass(each, autopar.AutoparError) for each in kinds)
    every = {each.__name__ for each in vars(autopar.errors).values() if isinstance(each, type)}
    assert {each.__name__ for each in kinds} == {name for name in every if name.endswith("Error")} | {"ProgramError"}
