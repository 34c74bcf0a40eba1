"""Files that earlier versions wrote, of every kind: today's code reads them, and writes the same again.

Whatever a file holds, its reader gives an object or one clean line: some cases of benchmarks/broken_files.py.
"""

import importlib
import json
import pkgutil
import random
import shutil
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from pydantic import TypeAdapter

import autopar.formats
import broken_files
from autopar import api
from autopar.formats.checkpoint import Checkpoint
from autopar.formats.cluster import Cluster
from autopar.formats.document import Document
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.formats.program import Program
from autopar.formats.pulls import PullLog
from autopar.formats.references import KINDS, kind_of
from autopar.formats.report import BlackBox, ComparisonRow, Report, Verification
from autopar.formats.timeline import Timeline
from autopar.schedules.check import read_program
from readers.files import READERS, good_files
from readers.mutate import broken

KEPT = Path(__file__).parent / "kept"
good = cache(good_files)


def _document(document: type[Document | Program]) -> Callable[[Path], str]:
    return lambda path: document.load(path).dumps()


def _profile(path: Path) -> str:
    written = json.loads(Profile.load(path).dumps())
    # Layers had ways to run them then, of another planner's files.
    written["layers"] = [{**layer, "options": []} for layer in written["layers"]]
    return json.dumps(written)


def _trace(path: Path) -> str:
    copy = path.with_name("copy.json")
    Timeline.load(path).save(copy)
    written = json.loads(copy.read_text())
    # Arrows from sends to receives were not written then.
    written["traceEvents"] = [event for event in written["traceEvents"] if event["ph"] not in ("s", "f")]
    return json.dumps(written)


def _comparison(path: Path) -> str:
    """Return the rows as a program reads them; ``over`` follows from the others."""
    found = json.loads(path.read_text())
    # HetPipe's row had pipelines then that were flushed.
    others = [(row.pop("virtual_workers"), row.pop("over")) for row in found]
    rows = TypeAdapter(list[ComparisonRow]).validate_python(found)
    names = ("virtual_workers", "over")
    written = (row.as_dict() | dict(zip(names, each, strict=True)) for row, each in zip(rows, others, strict=True))
    return json.dumps(list(written))


def _verification(path: Path) -> str:
    """Return the verification as a program reads it; whether sides are equal follows from the rest."""
    found = json.loads(path.read_text())
    del found["equal"]
    for each in found["differences"]:
        del each["equal"]
    return json.dumps(TypeAdapter(Verification).validate_python(found).as_dict())


AGAIN: dict[str, Callable[[Path], str]] = {
    **{each.KIND: _document(each) for each in (Cluster, Plan, Report, Checkpoint, BlackBox, PullLog)},
    "profile": _profile,
    "program": _document(Program),
    "trace": _trace,
    "comparison": _comparison,
    "verification": _verification,
}
"""By kind, how a file is read and written again. Samples of a kind are called so, or with ``-`` and a word behind."""
BY_KIND = {kind: sorted(path for path in KEPT.iterdir() if path.stem.split("-")[0] == kind) for kind in AGAIN}
SAMPLES = [(kind, path.name) for kind, paths in BY_KIND.items() for path in paths]


def _holds(written: object, kept: object) -> bool:
    """Whether all that was kept is written, in its place; keys that were not known then may be added."""
    if isinstance(kept, dict):
        return isinstance(written, dict) and all(key in written and _holds(written[key], kept[key]) for key in kept)
    if isinstance(kept, list) and isinstance(written, list):
        return len(written) == len(kept) and all(map(_holds, written, kept))
    return type(written) is type(kept) and written == kept


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give a folder with a copy of all samples."""
    return shutil.copytree(KEPT, tmp_path / "kept")


def test_every_kind_has_a_sample_and_a_plan_finds_its_files(folder: Path) -> None:
    """Their digests are those of the samples; the plan's program and timeline have the actions of the samples."""
    for module in pkgutil.iter_modules(autopar.formats.__path__, "autopar.formats."):
        importlib.import_module(module.name)
    assert {document.KIND for document in Document.__subclasses__()} <= set(KINDS) <= set(AGAIN)
    assert [kind for kind, paths in BY_KIND.items() if not paths] == []
    assert {name for _, name in SAMPLES} == {path.name for path in KEPT.iterdir()}
    program = read_program(folder / "program.json", Plan.load(folder / "plan.json"))
    actions = sorted((rank, str(action)) for rank, own in enumerate(program.ranks) for action in own)
    timelines = [api.simulate(folder / "plan.json"), *map(Timeline.load, sorted(folder.glob("trace-*.json")))]
    for timeline in timelines:
        assert sorted((event.rank, str(event.action)) for event in timeline) == actions


@pytest.mark.parametrize(("kind", "name"), SAMPLES)
def test_a_file_of_an_earlier_version_is_read_and_written_again(kind: str, name: str, folder: Path) -> None:
    path = folder / name
    assert path.stat().st_size < 30_000
    assert kind not in KINDS or kind_of(path) == kind
    assert _holds(json.loads(AGAIN[kind](path)), json.loads(path.read_text()))


@pytest.mark.some(1)
@pytest.mark.parametrize("seed", range(7))
def test_broken_files_give_an_object_or_one_clean_line(seed: int, tmp_path: Path) -> None:
    outcomes, bad = Counter[str](), []
    for kind in READERS:
        assert broken_files._read(kind, good()[kind], tmp_path) == ("object", "")
        for case in range(30):
            content = broken(random.Random(f"{seed}/{case}"), good()[kind])
            outcome, said = broken_files._read(kind, content, tmp_path)
            outcomes[outcome] += 1
            bad += [(kind, case, said)] if outcome == "bad" else []
    assert bad == []
    assert min(outcomes["object"], outcomes["refused"]) > len(READERS)
