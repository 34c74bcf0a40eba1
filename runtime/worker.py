"""Worker: what every rank does in a training run, however it was started."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import torch

from autopar.capture.doubled import doubled
from autopar.capture.graph import LayerGraph
from autopar.capture.source import UserModel, load
from autopar.formats.plan import Plan
from autopar.formats.program import Program
from autopar.ranks.board import FINISHED
from autopar.ranks.context import RankContext
from autopar.runtime.connect import connect
from autopar.runtime.job import DEFAULTS, Job
from autopar.runtime.kept import Kept
from autopar.runtime.memory import PeakMemory
from autopar.runtime.result import RankResult
from autopar.runtime.run import Run
from autopar.runtime.saving import holders, write_stages
from autopar.runtime.settings import TrainSettings
from autopar.runtime.weights import StoredFile
from autopar.runtime.workspace import Workspace
from autopar.schedules.check import check
from autopar.schedules.expand import expand

__all__ = ["TrainArguments", "build", "load_for", "train"]


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
    save_as: str
    """Name of the set that they are in the folder."""
    settings: dict[str, Any]
    """Of :class:`TrainSettings`."""
    keep: str | None
    """Folder for what is compared with another training; see :class:`autopar.runtime.kept.Kept`."""


def train(context: RankContext, arguments: TrainArguments) -> RankResult:
    """Train for some steps as one rank of the plan, and say how it went.

    Raises:
        AutoparError: an action failed; names it.
    """
    plan = Plan.parse(arguments["plan"], Path("plan.json"))
    peak = PeakMemory(context.device)
    settings = TrainSettings(**arguments["settings"])
    model = load_for(settings, arguments["model"], None if arguments["data"] is None else Path(arguments["data"]), plan)
    workspace = Workspace(Path(arguments["workspace"]))
    graph = workspace.graph(model, plan)
    edited = arguments["program"]
    program = None if edited is None else Program.parse(edited, Path("program.json"))
    job = build(context, plan, model, graph, workspace, settings, program)
    notes = [*workspace.notes(), *(_warmed_up(job) if settings.compile else [])]
    run = Run(job, context, arguments["steps"], time_layers=settings.time_layers)
    kept = None if arguments["keep"] is None else Kept(job, Path(arguments["keep"]))
    run.perform()
    _await_all(context)
    if kept is not None:
        kept.write(_unread(workspace, holders(plan, graph)))
    return RankResult(
        **run.results(),
        rank=context.rank,
        stages=list(job.stages),
        replica=job.replica,
        backend=context.backend,
        peak_bytes=peak.peak_bytes(),
        peak_kind=peak.kind,
        samples=job.samples,
        notes=[*notes, *job.notes, *_of_staging(context), *_of_settings(workspace)],
        saved=_save(job, graph, workspace, arguments["save"], arguments["save_as"]),
    )


def load_for(settings: TrainSettings, model: str, data: Path | None, plan: Plan) -> UserModel:
    """Load MODEL as it is trained: in the types that its file makes, or in float64.

    Raises:
        AutoparError: as :func:`autopar.capture.source.load`; it is not the model that was planned for.
    """
    found = load(model, data, plan.model)
    return doubled(found) if settings.double else found


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
    place = (context.rank, graph, model, workspace.read, transport, context.device)
    job = Job(plan, program, *place, note, settings, workspace.settings())
    job.try_optimizer()
    return job


def _warmed_up(job: Job) -> list[str]:
    """Compile a rank's layers, saying so on standard error; return notes for the report."""
    began_s = time.perf_counter()
    sys.stderr.write(f"rank {job.rank}: compiling\n")
    notes = job.warm_up()
    for note in notes:
        sys.stderr.write(f"rank {job.rank}: {note}\n")
    sys.stderr.write(f"rank {job.rank}: compiled in {time.perf_counter() - began_s:.1f} s\n")
    return notes


def _await_all(context: RankContext) -> None:
    """Keep nothing before all ranks are done: one of them may yet find that its last gradients are not finite."""
    if context.board is not None:
        context.board.write(context.rank, FINISHED)
    context.barrier()


def _of_settings(workspace: Workspace) -> list[str]:
    if workspace.settings() is not None:
        return []
    return ["optimizer() was not held against one for the whole model: it takes no parameters without values"]


def _of_staging(context: RankContext) -> list[str]:
    if context.device.type == "cpu" or context.nccl or context.size == 1:
        return []
    return ["ranks share GPUs, or have no NCCL: what they sent each other went through the hosts' memory"]


def _save(job: Job, graph: LayerGraph, workspace: Workspace, folder: str | None, name: str) -> list[StoredFile]:
    if folder is None:
        return []
    return write_stages(job, graph, partial(_unread, workspace), Path(folder), name)


def _unread(workspace: Workspace, read: Iterable[str]) -> Mapping[str, torch.Tensor]:
    """Return what no layer reads, given what some layer does."""
    return workspace.read(workspace.names().difference(read))
