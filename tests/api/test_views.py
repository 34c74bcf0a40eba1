"""What is seen of any of autopar's files: its content again, its tables, and two timelines in either order."""

import json
from pathlib import Path

import pytest

from autopar.api.views import show
from autopar.errors import UsageError
from autopar.formats.checkpoint import Checkpoint
from autopar.formats.document import Document
from autopar.formats.plan import Plan
from autopar.formats.program import Program
from autopar.formats.pulls import PullLog
from autopar.formats.references import KINDS
from autopar.formats.report import BlackBox, Report
from autopar.formats.timeline import Timeline
from autopar.schedules.expand import expand
from played import play, small_plan
from random_problems import gpt_profile, local_cluster


def _files(folder: Path) -> dict[str, tuple[Path, Document | Program]]:
    """Write a file of every kind but a trace; return it with what is in it."""
    plan, found = small_plan((1, 1), 4), dict[str, tuple[Path, Document | Program]]()
    contents = {"profile": gpt_profile(blocks=2), "cluster": local_cluster(2), "plan": plan, "program": expand(plan)}
    for kept in (Report, Checkpoint, BlackBox, PullLog):
        kind = kept.KIND
        contents[kind] = kept.load(Path(__file__).parents[1] / f"formats/kept/{kind}.json")
    for kind, content in contents.items():
        found[kind] = folder / f"{kind}-file.json", content
        content.save(found[kind][0])
    return found


def test_timelines_are_compared_alike_in_either_order_and_refused_where_they_cannot_be(tmp_path: Path) -> None:
    plan = small_plan((1, 1), 4)
    slow, quick = play(plan, "measured", unit_s=0.02), play(plan, "simulated", unit_s=0.01)
    slow.save(tmp_path / "measured.json")
    quick.save(tmp_path / "simulated.json")
    alone = json.loads(show(tmp_path / "measured.json").json)
    assert alone["step_s"] == pytest.approx(slow.end_s)
    # Of every rank, what its forwards and backwards take: one unit each and two.
    assert alone["busy_s"] == pytest.approx([4 * 0.02 * 3] * 2, rel=0.2)
    for first, second in (("measured", "simulated"), ("simulated", "measured")):
        view = show(tmp_path / f"{first}.json", tmp_path / f"{second}.json")
        figures = json.loads(view.json)
        assert figures["error"] == pytest.approx(0.5 - 1)
        assert figures["measured"] == alone
        assert list(view.pictures) == ["over"]
    files = {kind: path for kind, (path, _) in _files(tmp_path).items()}
    play(small_plan((1, 1), 4), "measured").save(tmp_path / "a.json")
    play(small_plan((1, 1), 5), "simulated").save(tmp_path / "b.json")
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    with pytest.raises(UsageError, match=r"a\.json and .*a\.json are both measured; `over` needs"):
        show(a, a)
    with pytest.raises(UsageError, match="do not hold the same computations"):
        show(a, b)
    for kind in ("profile", "cluster", "report", "program"):
        with pytest.raises(UsageError, match=rf"{kind}-file\.json is a {kind}, which has no timeline to draw"):
            show(a, files[kind])
    empty = tmp_path / "empty.json"
    Timeline("measured").save(empty)
    Timeline("simulated").save(b)
    assert json.loads(show(empty, b).json)["error"] is None


def test_every_kind_of_document_is_seen_as_what_it_is(tmp_path: Path) -> None:
    texts = set()
    for kind, (path, content) in _files(tmp_path).items():
        view = show(path)
        assert view.kind == kind
        assert view.json == content.dumps() == path.read_text()
        assert bool(view.pictures) == (kind in ("profile", "cluster", "plan", "report"))
        texts.add(str(view))
        if isinstance(content, Program):
            assert all(str(action) in str(view) for action in content.ranks[0])
        if isinstance(content, Plan):
            assert all(layer in str(view) for stage in content.stages for layer in stage.layers)
    assert len(texts) == len(KINDS) - 1
