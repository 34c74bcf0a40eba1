"""What faults cost: for `benchmarks/soak.py --faults`.

Every drill draws a plan, a fault and how often checkpoints are saved. The run meets the fault, and what it says is
noted. It is gone on with, without the fault; its last checkpoint is compared, bit for bit, with that of a run of the
same plan that nothing befell.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from autopar.capture import load
from autopar.capture.layers.export import capture
from autopar.errors import AutoparError, TrainingError
from autopar.formats.plan import Plan
from autopar.formats.program import Action, Fault, FaultKind
from autopar.options.train import RunOptions
from autopar.runtime.checkpoint.folder import CheckpointFolder, CheckpointReader, read_verified
from autopar.runtime.start.launch import run
from autopar.schedules.expand import expand
from cut import cut

MODEL = Path(__file__).parent.parent / "examples" / "mlp.py"
STEPS, TIMEOUT_S = 8, 8.0
HARMLESS = {"slow", "disk-full", "fail-write", "fail-fsync", "fail-rename"}
"""Kinds that training goes on with."""
LAYOUTS: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((1, 1), {}),
    ((1, 2), {}),
    ((2, 2), {"shard": "parameters"}),
    ((3,), {"shard": "optimizer"}),
    ((1, 1, 1), {"schedule": "zb-h1"}),
    ((1, 1), {"schedule": "interleaved", "chunks": 2}),
)


class Drill(NamedTuple):
    """How one went."""

    fault: str
    plan: str
    every: int
    said: str
    """The error; empty where training went on."""
    resumed_from: int
    lost_steps: int
    seconds: float
    faults_found: tuple[str, ...]
    """What should not be."""


def drills(count: int, seed: int) -> list[Drill]:
    """Return how so many went; a plan's undisturbed run is made once."""
    user = load(str(MODEL))
    graph = capture(user, user.build(0))
    plans = []
    for widths, options in LAYOUTS:
        chosen = {"schedule": "1f1b", **options}
        plans.append(cut(graph, user, chosen.pop("schedule"), widths, 4, 6, **chosen))
    truths: dict[int, dict[str, torch.Tensor]] = {}
    found = []
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        at = rng.randrange(len(plans))
        if at not in truths:
            truths[at] = _trained(plans[at])
        found.append(_drill(rng, plans[at], truths[at], number))
    return found


def _trained(plan: Plan) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        run(plan, str(MODEL), RunOptions(STEPS, checkpoint=Path(folder), every=STEPS))
        return _tensors(Path(folder))


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    place = CheckpointFolder(folder).folder_of(STEPS)
    manifest = read_verified(place)
    with CheckpointReader(place, manifest) as reader:
        return {each.key: reader.read(each) for each in manifest.tensors if each.kind != "generator"}


def _drill(rng: random.Random, plan: Plan, truth: dict[str, torch.Tensor], number: int) -> Drill:
    kinds: tuple[FaultKind, ...] = get_args(FaultKind)
    rank = rng.randrange(len(plan.devices))
    action = rng.choice(list(expand(plan).ranks[rank]))
    # All kinds in turn; of actions, any.
    fault = Fault(kinds[number % len(kinds)], rank, rng.randrange(STEPS), action.kind, _micro_batch(action))
    every, began_s, wrong, said = rng.randint(1, 4), time.monotonic(), list[str](), ""
    before = len(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = RunOptions(STEPS, checkpoint=folder, every=every, inject_fault=(fault,), timeout_s=TIMEOUT_S)
        failures: tuple[str, ...] = ()
        try:
            outcome = run(plan, str(MODEL), options)
            failures = () if outcome.report.checkpoints is None else outcome.report.checkpoints.failures
        except TrainingError as error:
            said = str(error)
        except AutoparError as error:
            wrong.append(f"another error than of training: {error}")
        steps = CheckpointFolder(folder).steps()
        wrong += _judged(fault, said, failures, steps)
        resumed = STEPS
        if STEPS not in steps:
            again = run(plan, str(MODEL), RunOptions(STEPS, checkpoint=folder, every=every, resume=True))
            resumed = again.report.first_step
            if steps and resumed != steps[-1]:
                wrong.append(f"went on from step {resumed}, of {steps}")
        lost = max(0, fault.step - resumed)
        if lost > 2 * every:
            wrong.append(f"lost {lost} steps")
        mine = _tensors(folder)
        if mine.keys() != truth.keys() or not all(torch.equal(mine[key], truth[key]) for key in truth):
            wrong.append("trained something else than undisturbed")
        left = [each.name for each in folder.iterdir() if each.name.endswith((".new", ".old", ".gone"))]
        if left:
            wrong.append(f"left {left}")
    if len(os.listdir("/proc/self/fd")) > before:
        wrong.append("left descriptors open")
    where = " ".join(f"{stage.replicas}" for stage in plan.stages)
    seconds = round(time.monotonic() - began_s, 2)
    return Drill(str(fault), f"{plan.schedule} {where}", every, said, resumed, lost, seconds, tuple(wrong))


def _micro_batch(action: Action) -> int | None:
    return None if action.micro_batch < 0 else action.micro_batch


def _judged(fault: Fault, said: str, failures: tuple[str, ...], steps: list[int]) -> list[str]:
    """Return what is wrong with what was said of a fault."""
    if fault.kind in HARMLESS:
        wrong = [f"was ended: {said}"] if said else []
        if fault.kind != "slow" and not failures and len(steps) < 1:
            wrong.append("no checkpoint, and nothing said")
        return wrong
    if not said:
        return ["nothing was said"]
    if (
        fault.kind in ("kill", "stop", "segfault", "exit", "exception", "out-of-memory")
        and f"rank {fault.rank}" not in said
    ):
        return [f"names another rank: {said}"]
    return []
