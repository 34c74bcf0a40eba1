"""What rank processes of the training tests run: some steps, keeping gradients and parameters."""

import math
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from autopar.capture.cache.store import load_graph
from autopar.capture.graph import LayerGraph
from autopar.capture.model.effects import StorageTracker
from autopar.capture.model.source import UserModel, load
from autopar.formats.plan import Plan
from autopar.options.train import TrainSettings
from autopar.ranks.context import RankContext
from autopar.runtime.checkpoint.saving import write_stages
from autopar.runtime.job import Job
from autopar.runtime.loss import StepRecord, all_finite
from autopar.runtime.stage.parameters import whole
from autopar.runtime.start.worker import build, train
from autopar.runtime.start.workspace import GRAPH, Workspace
from weighed import peak_between, peak_of_second_step


def train_and_keep(context: RankContext, arguments: dict[str, Any]) -> list[float]:
    """Train, and write ``gradients-R``, ``parameters-R`` and ``buffers-R`` files; return this rank's losses."""
    job = _built(context, arguments)
    return [record.loss for record in keep(job, context.rank, arguments["steps"], Path(arguments["folder"]))]


@cache
def _loaded(model: str, workspace: Path) -> tuple[UserModel, LayerGraph]:
    """Load a model and its graph once a process; every job puts its own weights into the layers."""
    return load(model), load_graph(workspace / GRAPH)


def _built(context: RankContext, arguments: dict[str, Any], **functions: Any) -> Job:  # noqa: ANN401
    """Build a rank's job, with some functions of the model replaced."""
    plan, workspace = Plan.parse(arguments["plan"], Path("plan.json")), Path(arguments["workspace"])
    model, graph = _loaded(arguments["model"], workspace)
    model = replace(model, functions={**model.functions, **functions})
    return build(context, plan, model, graph, Workspace(workspace), TrainSettings(**arguments.get("settings", {})))


def train_and_weigh(context: RankContext, arguments: dict[str, Any]) -> int:
    """Train two steps; return the most bytes of tensors that were alive in the second."""
    # A rank also keeps the order of the samples.
    model, _ = _loaded(arguments["model"], Path(arguments["workspace"]))
    rows = Plan.parse(arguments["plan"], Path("plan.json")).batch
    samples = torch.utils.data.Subset(model.dataset(), range(rows))
    return peak_of_second_step(lambda: _built(context, arguments, dataset=lambda: samples))


def train_pipelines_and_weigh(context: RankContext, arguments: dict[str, Any]) -> int:
    """Train from a fill to a drain; return the most bytes of tensors that were alive while the pipelines were full."""
    model, _ = _loaded(arguments["model"], Path(arguments["workspace"]))
    plan = Plan.parse(arguments["plan"], Path("plan.json"))
    samples = torch.utils.data.Subset(model.dataset(), range(plan.step_samples))
    return peak_between(lambda: _built(context, arguments, dataset=lambda: samples), arguments["steps"])


def build_and_save(context: RankContext, arguments: dict[str, Any]) -> list[int]:
    """Build and save; return the most bytes of tensors that were alive in doing either, and those between."""
    _, graph = _loaded(arguments["model"], Path(arguments["workspace"]))
    with StorageTracker() as tracker:
        job = _built(context, arguments)
        peak_bytes, between = int(tracker.peak_bytes), int(tracker.alive_bytes)
        tracker.peak_bytes = tracker.alive_bytes
        write_stages(job, graph, dict, Path(arguments["folder"]), "0")
        job.finish()
    return [peak_bytes, between, int(tracker.peak_bytes)]


def train_and_find_late(context: RankContext, task: dict[str, Any]) -> None:
    """Perform a run's task; rank 0 looks at gradients when the others wait for it, or have saved theirs."""
    waits = Path(task["workspace"]) / f"waits-{context.rank}"

    def barrier(context: RankContext) -> None:
        waits.touch()
        dist.barrier()

    def late(tensors: list[torch.Tensor]) -> bool:
        others = [waits.with_name(f"waits-{rank}") for rank in range(1, context.size)]
        while not (all(each.exists() for each in others) or any(Path(task["options"]["save"]).glob("*.safetensors"))):
            os.sched_yield()
        return all_finite(tensors)

    with (
        patch("autopar.runtime.start.worker._common_origin", lambda context: 0.0),
        patch.object(RankContext, "barrier", barrier),
    ):
        if context.rank:
            train(context, task)
        else:
            with patch("autopar.runtime.update.all_finite", late):
                train(context, task)


def train_without_pickles(context: RankContext, task: object) -> bool:
    """Perform a task where nothing can be unpickled; return whether all losses are numbers."""
    with (
        patch("pickle.load", _refuse),
        patch("pickle.loads", _refuse),
        patch("torch.load", _refuse),
        patch("torch.distributed.distributed_c10d._unpickler", _refuse),
    ):
        result = train(context, task)
    return all(map(math.isfinite, result["loss"]))


def _refuse(*_: object, **__: object) -> None:
    raise AssertionError("a pickle is loaded")


def keep(job: Job, rank: int, steps: int, folder: Path) -> list[StepRecord]:
    records, first = [], job.plan.synchronous_steps
    optimizer, gradients = job.update.optimizer, dict[str, torch.Tensor]()

    def note(*_: object) -> None:
        if not gradients:
            gradients.update({name: whole(p.grad).clone() for name, p in job.parameters.items() if p.grad is not None})

    if optimizer is not None:
        optimizer.register_step_pre_hook(note)
    for start, stop in [*((step, step + 1) for step in range(first)), (first, steps)]:
        for step in range(start - job.plan.lead, stop, job.plan.span):
            record = job.step(step, stop, start)
            if step >= start:
                records += record.every
    job.finish()
    _write(folder / f"gradients-{rank}", gradients)
    _write(folder / f"parameters-{rank}", {name: whole(p) for name, p in job.parameters.items()})
    _write(folder / f"buffers-{rank}", job.buffers)
    return records


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: real(tensor.detach()).contiguous().clone() for name, tensor in tensors.items()}, path)


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as pairs: safetensors knows none of double precision."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
