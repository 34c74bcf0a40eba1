"""Worker: what every rank does in a training run, however it was started."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch

from autopar.capture.graph import LayerGraph
from autopar.capture.source import UserModel, load
from autopar.formats.plan import Plan
from autopar.formats.program import Program
from autopar.ranks.context import RankContext
from autopar.runtime.clock import clock_of
from autopar.runtime.connect import connect
from autopar.runtime.execute import StepRecord
from autopar.runtime.job import DEFAULTS, Job
from autopar.runtime.laps import Laps
from autopar.runtime.memory import PeakMemory
from autopar.runtime.saving import write_stages
from autopar.runtime.settings import TrainSettings
from autopar.runtime.watches import Watches
from autopar.runtime.workspace import Workspace
from autopar.schedules.check import check
from autopar.schedules.expand import expand

__all__ = ["RankResult", "TrainArguments", "build", "train"]

RECORDED_STEPS = 32
"""Of how many last steps the times of all actions are kept."""


class TrainArguments(TypedDict):
    """What a rank needs to know; plain data."""

    plan: str
    """The plan's JSON text."""
    program: str | None
    """The program's JSON text, where it is another than the plan expands to."""
    model: str
    """MODEL, as :func:`autopar.capture.source.load` reads it."""
    data: str | None
    """The file that feeds an ``hf:`` model, if it has one."""
    workspace: str
    steps: int
    save: str | None
    """Folder for the trained weights."""
    settings: dict[str, Any]
    """Of :class:`TrainSettings`."""


class RankResult(TypedDict):
    """What a rank brings back; plain data."""

    rank: int
    stages: list[int]
    replica: int
    loss: list[float]
    count: list[float]
    starts_s: list[float]
    ends_s: list[float]
    times_s: dict[str, list[tuple[float, float]]]
    """Step -> start and end of every action, for the last steps."""
    backend: str
    """What carried tensors between the ranks."""
    peak_bytes: int
    peak_kind: str
    gradient_norm: list[float | None]
    overflowed: list[bool]
    samples: int
    """In the dataset; 0 where this rank does not read it."""
    notes: list[str]
    """What whoever reads the report should know."""
    layers_s: dict[str, tuple[float, float]]
    """Layer -> median seconds forward and backward, where layers were timed."""
    forward_flops: int
    """Of all forwards of a step, where the device's peak is known."""
    peak_flops_per_s: float | None
    saved: dict[str, list[str]]
    """Stage -> names of the tensors that this rank wrote of it."""


def train(context: RankContext, arguments: TrainArguments) -> RankResult:
    """Train for some steps as one rank of the plan, and say how it went.

    Raises:
        AutoparError: an action failed; names it.
    """
    plan = Plan.parse(arguments["plan"], Path("plan.json"))
    peak = PeakMemory(context.device)
    model = load(arguments["model"], arguments["data"])
    workspace = Workspace(Path(arguments["workspace"]))
    graph = workspace.graph(model, plan)
    edited = arguments["program"]
    program = None if edited is None else Program.parse(edited, Path("program.json"))
    settings = TrainSettings(**arguments["settings"])
    job = build(context, plan, model, graph, workspace, settings, program)
    notes = _warmed_up(job) if settings.compile else []
    watches = Watches(job, context.device, arguments["steps"], settings.time_layers)
    origin_s, last = _common_origin(context), arguments["steps"] - 1
    laps = Laps(origin_s, lags=clock_of(context.device).lags)
    records: list[StepRecord] = []
    for step in range(arguments["steps"]):
        watches.begin_step(step)
        laps.begin()
        record = job.step(step, more=step < last)
        laps.end(record)
        watches.end_step(step, record)
        records.append(record)
        if step >= RECORDED_STEPS:
            records[step - RECORDED_STEPS].times_s.clear()
        if any(stage.loss for stage in job.stages.values()):
            context.report({"step": step, "loss": record.loss, "count": record.count})
    job.finish()
    laps.finish()
    return RankResult(
        rank=context.rank,
        stages=list(job.stages),
        replica=job.replica,
        loss=[record.loss for record in records],
        count=[record.count for record in records],
        starts_s=laps.starts_s,
        ends_s=laps.ends_s,
        times_s={
            str(step): [(start - origin_s, end - origin_s) for start, end in record.times_s]
            for step, record in enumerate(records)
            if record.times_s
        },
        gradient_norm=[record.gradient_norm for record in records],
        overflowed=[record.overflowed for record in records],
        notes=notes + _of_staging(context),
        backend=context.backend,
        peak_bytes=peak.peak_bytes(),
        peak_kind=peak.kind,
        samples=job.samples,
        layers_s=watches.layers_s(),
        forward_flops=watches.forward_flops(),
        peak_flops_per_s=watches.peak_flops_per_s,
        saved=_save(job, graph, workspace, arguments["save"]),
    )


def build(
    context: RankContext,
    plan: Plan,
    model: UserModel,
    graph: LayerGraph,
    workspace: Workspace,
    settings: TrainSettings = DEFAULTS,
    program: Program | None = None,
) -> Job:
    """Build this rank's job from what was prepared on its host; ``program`` is by default what the plan expands to."""
    torch.set_num_threads(plan.threads)
    program = program or expand(plan)
    check(program, plan)
    transport = connect(context, plan, settings)
    note = (lambda step, position: None) if context.board is None else context.board.stepping(context.rank)
    return Job(plan, program, context.rank, graph, model, workspace.read, transport, context.device, note, settings)


def _warmed_up(job: Job) -> list[str]:
    """Compile a rank's layers, saying so on standard error; return notes for the report."""
    began_s = time.perf_counter()
    sys.stderr.write(f"rank {job.rank}: compiling\n")
    notes = job.warm_up()
    for note in notes:
        sys.stderr.write(f"rank {job.rank}: {note}\n")
    sys.stderr.write(f"rank {job.rank}: compiled in {time.perf_counter() - began_s:.1f} s\n")
    return notes


def _of_staging(context: RankContext) -> list[str]:
    if context.device.type == "cpu" or context.nccl or context.size == 1:
        return []
    return ["ranks share GPUs, or have no NCCL: what they sent each other went through the hosts' memory"]


def _common_origin(context: RankContext) -> float:
    """Return a moment that all ranks agree on, on this rank's clock.

    Ranks of one host share a clock; those of several agree to within the time that leaving a barrier takes.
    """
    context.barrier()
    origin = torch.tensor([time.perf_counter()], dtype=torch.float64)
    if context.local_size == context.size:
        context.broadcast(origin)
    return float(origin)


def _save(job: Job, graph: LayerGraph, workspace: Workspace, folder: str | None) -> dict[str, list[str]]:
    if folder is None:
        return {}

    def unread(read: Iterable[str]) -> Mapping[str, torch.Tensor]:
        return workspace.read(workspace.names().difference(read))

    return write_stages(job, graph, unread, Path(folder))
