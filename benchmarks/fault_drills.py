"""What faults cost: for `benchmarks/soak.py --faults`.

Every drill draws a plan, a fault and how often checkpoints are saved. The run meets the fault, and what it says is
noted, and judged: a fault that ends a run must be blamed on the rank that it befell, numbers that are not finite on one
of its stages, and a lost network on none. It is gone on with, without the fault; its last checkpoint is compared, bit
for bit, with that of a run of the same plan that nothing befell. Of plans that are never flushed, that one is drained
as often: what is trained depends on it.
"""

from __future__ import annotations

import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import torch

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "harness")]

from autopar.capture import load  # noqa: E402
from autopar.capture.graph import LayerGraph  # noqa: E402
from autopar.capture.layers.export import capture  # noqa: E402
from autopar.capture.model.source import UserModel  # noqa: E402
from autopar.errors import AutoparError, TrainingError  # noqa: E402
from autopar.formats.plan import Plan  # noqa: E402
from autopar.formats.program import Action, Fault, FaultKind  # noqa: E402
from autopar.options.train import RunOptions  # noqa: E402
from autopar.ranks.pool import RankPool  # noqa: E402
from autopar.runtime.checkpoint.folder import CheckpointFolder, CheckpointReader, read_verified  # noqa: E402
from autopar.runtime.start.launch import run  # noqa: E402
from autopar.schedules.expand import expand  # noqa: E402
from dictated import dictate  # noqa: E402
from in_teams import in_teams  # noqa: E402

MODEL = Path(__file__).parent.parent / "examples" / "mlp.py"
STEPS, TIMEOUT_S = 8, 8.0
HARMLESS = {"slow", "disk-full", "fail-write", "fail-fsync", "fail-rename"}
"""Kinds that training goes on with."""


class Layout(NamedTuple):
    """How a drill's plan is made; by default, a stage has a replica, of one rank."""

    widths: tuple[int, ...]
    more: Mapping[str, Any] = MappingProxyType({})
    """Beside: what :func:`dictated.dictate` takes."""
    sizes: tuple[int, ...] = ()
    """Ranks of every replica, by stage."""
    policy: str = "sync"


LAYOUTS = (
    Layout((1, 1)),
    Layout((1, 2)),
    Layout((2, 2), {"shard": "parameters"}),
    Layout((3,), {"shard": "optimizer"}),
    Layout((1, 1, 1), {"schedule": "zb-h1"}),
    Layout((1, 1), {"schedule": "interleaved", "chunks": 2}),
    Layout((2, 1), {"turns": (0,)}),
    Layout((1, 1), sizes=(2, 1)),
    Layout((1, 2), sizes=(2, 1)),
    Layout((1, 1, 1), policy="stash"),
    Layout((2, 1), policy="2bw"),
    Layout((1, 1), policy="predict"),
    Layout((1, 1), policy="pipemare"),
    Layout((1, 1), sizes=(1, 2), policy="stash"),
)


class Drill(NamedTuple):
    """How one went."""

    fault: str
    plan: str
    every: int
    said: str
    """The error; empty where training went on."""
    blamed: bool
    """Whether it says whose fault it was, where it says something."""
    resumed_from: int
    lost_steps: int
    seconds: float
    faults_found: tuple[str, ...]
    """What should not be."""


def drills(count: int, seed: int) -> list[Drill]:
    """Return how so many went; a plan's undisturbed run is made once.

    What is to fail has processes of its own, and all the rest the same ones.
    """
    user = load(str(MODEL))
    graph = capture(user, user.build(0))
    plans = [_plan(graph, user, layout) for layout in LAYOUTS]
    truths: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    found = []
    with RankPool(max(len(plan.devices) for plan in plans), imports=["autopar.runtime.start.worker"]) as pool:
        for number in range(count):
            rng = random.Random(f"{seed}/{number}")
            # Kinds follow each other, and so do plans, at another pace.
            at, every = (number + number // len(plans)) % len(plans), rng.randint(1, 4)
            key = at, STEPS if plans[at].weight_policy == "sync" else every
            if key not in truths:
                truths[key] = _trained(pool, plans[at], key[1])
            found.append(_drill(rng, pool, plans[at], truths[key], number, every))
            sys.stderr.write(f"{number + 1}: {found[-1]}\n")
    return found


def _plan(graph: LayerGraph, user: UserModel, layout: Layout) -> Plan:
    """Return a layout's plan; under a policy, stages are as deep as the pipeline behind them."""
    if layout.policy == "sync":
        plan = dictate(graph, user, layout.widths, 4, 6, **layout.more)
    else:
        depths = range(len(layout.widths), 0, -1)
        plan = dictate(graph, user, layout.widths, 4, 6, warmup=list(depths), **layout.more)
    plan = in_teams(graph, plan, layout.sizes) if layout.sizes else plan
    more: dict[str, Any] = {"anneal_steps": 3, "synchronous_steps": 1} if layout.policy == "pipemare" else {}
    return plan.model_copy(update={"precision": "fp32", "weight_policy": layout.policy, **more})


def _trained(pool: RankPool, plan: Plan, every: int) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        run(plan, str(MODEL), RunOptions(STEPS, checkpoint=Path(folder), every=every), pool=pool)
        return _tensors(Path(folder))


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    place = CheckpointFolder(folder).folder_of(STEPS)
    manifest = read_verified(place)
    with CheckpointReader(place, manifest) as reader:
        return {each.key: reader.read(each) for each in manifest.tensors if each.kind != "generator"}


def _drill(
    rng: random.Random, pool: RankPool, plan: Plan, truth: dict[str, torch.Tensor], number: int, every: int
) -> Drill:
    kinds: tuple[FaultKind, ...] = get_args(FaultKind)
    rank = rng.randrange(len(plan.devices))
    action = rng.choice(list(expand(plan).ranks[rank]))
    # All kinds in turn; of actions, any.
    fault = Fault(kinds[number % len(kinds)], rank, rng.randrange(STEPS), action.kind, _micro_batch(action))
    began_s, wrong, said = time.monotonic(), list[str](), ""
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
        blamed = fault.kind in HARMLESS or _is_blamed(fault, said, plan)
        resumed = STEPS
        if STEPS not in steps:
            again = run(plan, str(MODEL), RunOptions(STEPS, checkpoint=folder, every=every, resume=True), pool=pool)
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
    seconds = round(time.monotonic() - began_s, 2)
    return Drill(str(fault), _words_of(plan), every, said, blamed, resumed, lost, seconds, tuple(wrong))


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
    return []


def _is_blamed(fault: Fault, said: str, plan: Plan) -> bool:
    """Tell whether what was said blames what was at fault: the rank, a stage of it, or the network."""
    if fault.kind == "disconnect":
        return "network between them is lost" in said
    if fault.kind == "nan":
        named = re.search(r"stage (\d+)", said)
        return named is not None and int(named[1]) in plan.ownership.ranks[fault.rank].stages
    return said.startswith(f"rank {fault.rank} ")


def _words_of(plan: Plan) -> str:
    stages = [
        f"{stage.replicas}{' in turn' * (stage.division == 'round-robin')} x {stage.tensor_parallel}"
        for stage in plan.stages
    ]
    return f"{plan.schedule}, {plan.weight_policy}: {', '.join(stages)}"
