"""The files that a model is made of are hashed before any of them runs; what an optimizer is told of its stage."""

import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopar.capture.source import StageTraits, code_of_file, code_of_module, load, stage_traits
from autopar.errors import FileError, ModelError, UsageError
from autopar.formats.plan import Plan, SharedParameter
from autopar.formats.profile import ModelSource
from autopar.formats.program import FORWARD, UPDATE
from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.simulator.simulate import skeleton
from autopar.policies import POLICIES
from autopar.schedules.continuing import Repetition, lead, repetition

MARK = "import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\n"
FILES = {
    "model.py": f"{MARK}import json, torch, helper\nfrom zoo import layers as l\nfrom zoo.deep.inner import f\n"
    "def model():\n    import lazy\n    return lazy.made()\n",
    "helper.py": f"{MARK}from json import loads\n",
    "lazy.py": "import torch\ndef made():\n    return torch.nn.Linear(1, 1)\n",
    "unused.py": MARK,
    "zoo/__init__.py": MARK,
    "zoo/layers.py": f"{MARK}from . import other\nfrom .deep import inner\n",
    "zoo/other.py": MARK,
    "zoo/unused.py": MARK,
    "zoo/deep/__init__.py": MARK,
    "zoo/deep/inner.py": f"{MARK}from ..other import __name__ as name\nimport helper\ndef f():\n    pass\n"
    "def small():\n    import torch\n    return torch.nn.Linear(1, 1)\n",
}
COVERED = ["helper.py", "lazy.py", "zoo/__init__.py", "zoo/deep/__init__.py", "zoo/deep/inner.py"]
COVERED += ["zoo/layers.py", "zoo/other.py"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("helper", "lazy", "zoo"):
            del sys.modules[name]


def _ran(here: Path) -> list[str]:
    return sorted(path.name for path in here.rglob("*.ran"))


def test_all_that_a_file_imports_below_its_folder_is_covered_and_nothing_runs(here: Path) -> None:
    assert list(code_of_file(Path("model.py")).imports) == COVERED
    with pytest.raises(FileError, match=r"model\.py has changed since it was profiled"):
        load("model.py", expected_source=ModelSource(source="model.py", sha256="0" * 64))
    assert not _ran(here)


def test_of_a_factory_the_packages_above_are_covered(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(here)
    found = code_of_module("zoo.deep.inner", "zoo.deep.inner:small")
    assert list(found.imports) == ["helper.py", "zoo/__init__.py", "zoo/deep/__init__.py", "zoo/other.py"]
    (here / "bare").mkdir()
    for name, said in (
        ("zoo.deep.none", r"no module is called zoo\.deep\.none"),
        ("zoo.other.inner", r"zoo\.other is a module, and no package"),
        ("bare", "has no file of its own"),
    ):
        with pytest.raises(ModelError, match=said):
            code_of_module(name, f"{name}:small")
    assert not _ran(here)


@pytest.mark.parametrize("spec", ["model.py", "zoo.deep.inner:small"])
@pytest.mark.parametrize("change", ["changed", "gone", "new"])
def test_what_has_changed_is_named_before_anything_runs(spec: str, change: str, here: Path) -> None:
    recorded = load(spec).model_source
    for path in here.rglob("*.ran"):
        path.unlink()
    for name in [name for name in sys.modules if name.split(".")[0] in ("helper", "zoo")]:
        del sys.modules[name]
    assert recorded.imports is not None
    load(spec, expected_source=recorded)
    for path in here.rglob("*.ran"):
        path.unlink()
    if change == "gone":
        (here / "zoo" / "other.py").unlink()
    elif change == "new":
        recorded = recorded.model_copy(update={"imports": {**recorded.imports}})
        del recorded.imports["zoo/other.py"]  # type: ignore[attr-defined]
    else:
        (here / "zoo" / "other.py").write_text("import os")
    said = {"changed": "has changed", "gone": "is gone", "new": "is new"}[change]
    with pytest.raises(FileError, match=rf"zoo/other\.py, which .* is made of, {said} since it was profiled"):
        load(spec, expected_source=recorded)
    assert not _ran(here)


def test_what_an_older_profile_does_not_cover_runs(here: Path) -> None:
    recorded = load("model.py").model_source.model_copy(update={"imports": None})
    (here / "helper.py").write_text("changed = True")
    assert load("model.py", expected_source=recorded).imports.keys() == set(COVERED)


def test_a_file_that_cannot_be_parsed_is_told_where_it_runs(here: Path) -> None:
    (here / "model.py").write_text("def model(:\n")
    assert code_of_file(Path("model.py")).imports == {}
    with pytest.raises(ModelError, match=r"model\.py:1"):
        load("model.py")


BOTH = ("delay", "replicas")


def planned(depths: list[int], widths: list[int], micro_batches: int, policy: str) -> Plan:
    edges = [sum(widths[:at]) for at in range(len(widths) + 1)]
    stages = tuple(
        CandidateStage(at, at + 1, tuple(range(edges[at], edges[at + 1])), (1,) * widths[at], depth)
        for at, depth in enumerate(depths)
    )
    plan = skeleton(Candidate(micro_batches, 1, "1f1b", stages), (), ())
    return plan.model_copy(update={"weight_policy": policy})


def counted_delay(plan: Plan, stage: int) -> float:
    """Count the updates between the forwards of a mini-batch in the midst of a run and its own update."""
    count, ends = plan.micro_batches, 30
    updates, begun, found = 0, dict[tuple[int, int], int](), list[int]()
    for number in range(-lead(plan), ends):
        here = Repetition(number, count, ends)
        for kind, micro_batch, _ in repetition(plan, stage):
            if kind == UPDATE and number >= 0:
                found += [updates - begun[number, index] for index in range(count)] if number == ends // 2 else []
                updates += 1
            elif kind == FORWARD and 0 <= here.place(micro_batch)[0] < ends:
                begun[here.place(micro_batch)] = updates
    return sum(found) / count


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_delays_are_the_updates_between_a_forward_and_its_own(seed: int, policy: str) -> None:
    draw = random.Random(seed)
    depths = sorted((draw.randint(1, 6) for _ in range(draw.randint(1, 4))), reverse=True)
    widths = [draw.randint(1, 3) for _ in depths]
    micro_batches = max(draw.randint(1, 5), POLICIES[policy].least_micro_batches(depths[0]))
    plan = planned(depths, widths, micro_batches, policy)
    told = stage_traits(plan, BOTH)
    assert [each.replicas for each in told] == widths
    assert [each.delay for each in told] == pytest.approx([counted_delay(plan, at) for at in range(len(depths))])


def test_with_flushes_there_is_no_delay_and_what_is_not_asked_for_is_as_if_alone() -> None:
    flushed, stash = (planned([3, 2, 1], [2, 1, 3], 2, policy) for policy in ("sync", "stash"))
    assert stage_traits(flushed, BOTH) == [StageTraits(0.0, 2), StageTraits(0.0, 1), StageTraits(0.0, 3)]
    assert stage_traits(stash, ()) == [StageTraits()] * 3
    assert stage_traits(stash, ("delay",)) == [StageTraits(1.0), StageTraits(0.5), StageTraits(0.0)]


def test_stages_that_share_a_parameter_and_would_be_told_different_things_are_refused_by_name() -> None:
    tied = {"tied": (SharedParameter(parameter="wte.weight", stages=(0, 2), bytes=8),)}
    for policy, options, said in (
        ("stash", ("delay",), "asks for delay, which is 1 and 0.5 on stages that share wte.weight"),
        ("sync", BOTH, "asks for replicas, which is 2 and 3 on stages that share wte.weight"),
        ("stash", (), None),
        ("sync", ("delay",), None),
    ):
        plan = planned([3, 2, 1], [2, 1, 3], 2, policy).model_copy(update=tied)
        if said is None:
            assert len(set(stage_traits(plan, options))) == 1
            continue
        with pytest.raises(UsageError, match=f"{re.escape(said)}, .*; leave .* out of its parameters, or plan with"):
            stage_traits(plan, options)
