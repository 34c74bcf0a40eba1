"""The recipes of CONTRIBUTING.md: one more of each, added as they say, is planned, simulated, listed and priced."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import library

from autopar import policies, schedules
from autopar.api import exports
from autopar.formats import plan as formats_plan
from autopar.formats.expressible import Expressible
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.formats.program import BACKWARD, FORWARD
from autopar.formats.timeline import Timeline
from autopar.hardware import gpus
from autopar.hardware.clusters import cluster_named
from autopar.interop import accelerate
from autopar.interop.target import ExportFile, ExportSubject, Target, heading
from autopar.planner import PlanOptions, peers, plan
from autopar.planner.peers import PeerPlanner
from autopar.planner.peers.prices import Prices, Proposal, in_cluster_order
from autopar.profiler import kernels
from autopar.schedules import SCHEDULES, Schedule
from autopar.schedules.check import read_program
from autopar.schedules.order import Computation, RankPlace
from autopar.schedules.timetable import draw
from calls import Run
from oracles import unflushed
from paths import HARNESS, ROOT
from random_problems import gpt_profile, local_cluster

MODEL = """
import torch
from labelled import loss, samples, sgd as optimizer

def model():
    return torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 3))

def dataset():
    return samples(8, 64, dtype=torch.float32)
"""
RECIPES = (ROOT / "CONTRIBUTING.md").read_text().split("## Where things go")[1].split("\n## ")[0]


@pytest.fixture
def run(run: Run) -> Run:
    """Run autopar in a folder that holds a profile and a cluster; return (exit code, stdout, stderr)."""
    gpt_profile().save("profile.json")
    local_cluster(2).save("cluster.json")
    return run


def test_recipes_name_files_and_tables_that_are_there() -> None:
    files = re.findall(r"`([\w/]+\.(?:py|md))`", RECIPES)
    assert len(files) > 8
    assert [file for file in files if not (ROOT / file).is_file()] == []
    tables = re.findall(r"`([A-Z_]{3,})`", RECIPES)
    places = [schedules, formats_plan, policies, unflushed, gpus, peers, kernels, exports, accelerate]
    assert {"SCHEDULES", "LAYOUTS", "POLICIES", "GPUS", "PLANNERS", "PRODUCTS", "GATHERS", "FREE"} <= set(tables)
    assert [table for table in tables if not any(hasattr(place, table) for place in places)] == []


def _order(place: RankPlace) -> Iterator[Computation]:
    """Yield forwards of two micro-batches and then their backwards, in turn."""
    (stage,) = place.stages
    for first in range(0, place.micro_batches, 2):
        pair = range(first, min(first + 2, place.micro_batches))
        for kind in (FORWARD, BACKWARD):
            for micro_batch in pair:
                yield kind, stage, micro_batch


def _warmups(groups: int, chunks: int, micro_batches: int) -> dict[str, tuple[int, ...]]:
    return {"two": (min(2, micro_batches),) * (groups * chunks)}


def test_a_new_schedule_is_planned_checked_simulated_and_compared(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, "two-by-two", Schedule(_order, _warmups))
    monkeypatch.setitem(formats_plan.LAYOUTS, "two-by-two", "line")
    assert draw("two-by-two", stages=2, micro_batches=3).splitlines()[1] == "stage 1: .  F0 F1 B0 B1 .  .  F2 B2 ."
    asked = ("--gpus", "2", "--stages", "0-6:1,7-13:1", "--micro-batches", "4")
    assert run("plan", *asked, "--schedule", "Two By Two")[0] == 0
    made = Plan.load("plan.json")
    assert (made.schedule, [stage.warmup for stage in made.stages]) == ("two-by-two", [2, 2])
    assert run("simulate", "--write-program", "program.json", "--trace", "trace.json")[0] == 0
    program = read_program(Path("program.json"), made)
    own = " ".join(str(action) for action in program.ranks[1] if action.kind in (FORWARD, BACKWARD))
    assert own == "F0@1 F1@1 B0@1 B1@1 F2@1 F3@1 B2@1 B3@1"
    assert Timeline.load("trace.json").end_s == pytest.approx(made.predicted.step_s, abs=1e-5)
    assert made.predicted.lower_bound_s <= made.predicted.step_s
    code, out, _ = run("compare", "--gpus", "2", "--micro-batches", "8", "--memory", "60MiB", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert rows["autopar, as two-by-two"]["step_s"] > rows["autopar"]["step_s"]


@pytest.mark.parametrize("stages", ["0-6:1,7-13:1", "0-6:2,7-13:1"])
def test_an_order_costs_the_same_under_a_new_name(monkeypatch: pytest.MonkeyPatch, stages: str) -> None:
    """What is found by trying, for an order of which nothing is known, is what tables find for GPipe."""
    monkeypatch.setitem(SCHEDULES, "all-then-all", SCHEDULES["gpipe"])
    monkeypatch.setitem(formats_plan.LAYOUTS, "all-then-all", "line")
    asked = PlanOptions(gpus=3, stages=stages, micro_batches=4, schedule="gpipe")
    known = plan(gpt_profile(), local_cluster(3), asked)
    new = plan(gpt_profile(), local_cluster(3), replace(asked, schedule="all-then-all"))
    assert (known.schedule, new.schedule) == ("gpipe", "all-then-all")
    assert new.stages == known.stages
    for name in ("step_s", "lower_bound_s", "peak_bytes"):
        assert getattr(new.predicted, name) == getattr(known.predicted, name)


LATE = '''class TwoLate(OneVersion):
    """All micro-batches of a mini-batch see the weights before the two newest updates of all."""

    name = "two-late"

    def forward_version(self, stage: StageDepths, micro_batch: int) -> int:
        """See :class:`Policy`."""
        return micro_batch // stage.micro_batches - 2

    def least_micro_batches(self, first_depth: int) -> int:
        """See :class:`Policy`."""
        return max(1, first_depth // 2)


'''


@pytest.mark.slow
def test_a_new_weight_policy_is_planned_simulated_and_trained_by_its_rule(tmp_path: Path) -> None:
    """In a copy of the tree: every process that it takes is to know it, and its name is one of a plan's."""
    for folder in ("autopar", "planner", "profiler", "runtime"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    rules = tmp_path / "autopar" / "policies" / "__init__.py"
    *before, registered = rules.read_text().partition("POLICIES: dict")
    rules.write_text("".join([before[0], LATE, before[1], registered.replace("Waves())", "Waves(), TwoLate())")]))
    (tmp_path / "model.py").write_text(MODEL)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(HARNESS)])}

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "autopar", *words]
        ran = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
        return ran.stdout

    run("profile", "model.py", "--batch", "8", "--tensor", "1", "--quiet")
    run("plan", "--policy", "two-late", "--stages", "0:1,1:1", "--micro-batches", "2", "--quiet")
    made = json.loads((tmp_path / "plan.json").read_text())
    assert made["weight_policy"] == "two-late"
    assert made["stages"][0]["warmup"] > 1
    assert json.loads(run("simulate", "--json"))["step_s"] == pytest.approx(made["predicted"]["step_s"])
    # It fails where ranks and plain loop differ.
    run("verify", "--steps", "8")


def _write(subject: ExportSubject, target: Target) -> Iterator[ExportFile]:
    yield ExportFile(target.file, "\n".join([*heading(subject, target), *(str(each) for each in subject.plan.stages)]))


def test_a_new_trainer_is_exported_to_within_what_it_can_express(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    can = Expressible("Y", ("gpipe",), tied=True)
    own = Target("Y 1", "it read such files", "y.txt", _write, can, cuts_layers=True)
    monkeypatch.setitem(exports.TARGETS, "y", own)
    assert run("plan", "--stages", "0-6:1,7-13:1", "--micro-batches", "4", "--schedule", "1f1b")[0] == 0
    code, _, err = run("export", "y")
    assert (code, "Y has no schedule 1f1b, only gpipe" in err) == (2, True)
    assert run("export", "y", "--nearest")[0] == 0
    assert "schedule: gpipe" in Path("y.txt").read_text()


def test_a_new_gpu_is_listed_estimated_and_planned_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    known = gpus.find("H100")
    doubled = {name: 2 * getattr(known, name) for name in ("fp32_flops_per_s", "memory_bytes", "memory_bytes_per_s")}
    quicker = replace(known, name="X1", aliases=("X1-160G",), **doubled)
    monkeypatch.setattr(gpus, "GPUS", (*gpus.GPUS, quicker))
    assert "X1" in [gpu["name"] for gpu in json.loads(run("cluster", "list", "--json")[1])]
    Path("model.py").write_text(MODEL)
    assert (
        run("profile", "model.py", "--device", "H100,x1-160g", "--batch", "8", "--tensor", "1", "--overwrite")[0] == 0
    )
    profile = Profile.load("profile.json")
    assert [profile.device.name, *(other.device.name for other in profile.others)] == ["H100-SXM", "X1"]
    assert sum(layer.update_s for layer in profile.others[0].layers) < sum(layer.update_s for layer in profile.layers)
    assert run("plan", "--cluster", "4xX1")[0] == 0
    limits = Plan.load("plan.json").predicted.limit_bytes
    assert {device.memory_bytes for device in cluster_named("4xX1").devices} == {quicker.memory_bytes}
    assert known.memory_bytes < min(limits) <= quicker.memory_bytes


def _propose(prices: Prices) -> list[Proposal]:
    return [in_cluster_order((prices.layer_count,), (1,))]


def test_a_new_peer_stands_in_comparisons(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = PeerPlanner("one device", "gpipe", _propose, lambda prices: prices.layer_count)
    monkeypatch.setattr(peers, "PLANNERS", (*peers.PLANNERS, peer))
    code, out, err = run("compare", "--gpus", "2", "--json")
    found = next(row for row in json.loads(out) if row["name"] == "one device")
    assert code == 0
    assert (found["stages"], found["infeasible"]) == ("0-13:1", None)
    assert "one device" in err


@library.custom_op("recipes::rows_of_products", mutates_args=())
def rows_of_products(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return a product of matrices, of which torch does not know that it is one."""
    return rows @ matrix


@rows_of_products.register_fake
def _(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], matrix.shape[1])


def _seconds() -> float:
    with torch.device("meta"), kernels.KernelLog() as log:
        rows_of_products(torch.empty(4096, 4096), torch.empty(4096, 4096))
    gpu = gpus.find("H100")
    table = kernels.KernelTable.of([[each for each in log.kernels if each.op == "rows_of_products"]], gpu)
    return float(kernels.seconds(table, gpu, kernels.default_constants(gpu))[0])


def test_a_new_operator_has_the_price_of_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = gpus.find("H100")
    by_bytes = _seconds()
    monkeypatch.setitem(kernels.PRODUCTS, "rows_of_products", lambda args: (4096 * 4096, args[0].shape[1]))
    as_product = _seconds()
    assert as_product > 2 * 4096**3 / gpu.flops_per_s("fp32") > by_bytes
    monkeypatch.delitem(kernels.PRODUCTS, "rows_of_products")
    monkeypatch.setattr(kernels, "GATHERS", kernels.GATHERS | {"rows_of_products"})
    assert _seconds() == by_bytes
    monkeypatch.setattr(kernels, "FREE", kernels.FREE | {"rows_of_products"})
    assert _seconds() == 0
