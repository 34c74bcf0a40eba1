"""What rank processes of the training tests run: some steps, keeping gradients and parameters."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from fake_copies import FakeCopies
from safetensors.torch import save_file

from autopar.capture.graph import LayerGraph
from autopar.capture.source import UserModel, load
from autopar.capture.storages import StorageTracker
from autopar.capture.store import load_graph
from autopar.formats.plan import Plan
from autopar.ranks.context import RankContext
from autopar.runtime.connect import connect
from autopar.runtime.execute import StepRecord
from autopar.runtime.job import Job
from autopar.runtime.settings import TrainSettings
from autopar.runtime.sharded import whole
from autopar.runtime.staged import StagedTransport
from autopar.runtime.worker import build
from autopar.runtime.workspace import GRAPH, Workspace


def train_and_keep(context: RankContext, arguments: dict[str, Any]) -> list[float]:
    """Train, and write ``gradients-R``, ``parameters-R`` and ``buffers-R`` files; return this rank's losses."""
    plan = Plan.parse(arguments["plan"], Path("plan.json"))
    model, graph = _loaded(arguments["model"], arguments["workspace"])
    job = build(context, plan, model, graph, Workspace(Path(arguments["workspace"])))
    return [record.loss for record in keep(job, context.rank, arguments["steps"], Path(arguments["folder"]))]


def train_and_stage(context: RankContext, arguments: dict[str, Any]) -> list[float]:
    """Do as :func:`train_and_keep`, with messages that are copied once more at both ends."""
    with patch("autopar.runtime.worker.connect", _staged):
        return train_and_keep(context, arguments)


def _staged(context: RankContext, plan: Plan, settings: TrainSettings) -> StagedTransport:
    return StagedTransport(connect(context, plan, settings), FakeCopies())


def train_and_weigh(context: RankContext, arguments: dict[str, Any]) -> int:
    """Train two steps; return the most bytes of tensors that were alive in the second."""
    plan = Plan.parse(arguments["plan"], Path("plan.json"))
    model, graph = _loaded(arguments["model"], arguments["workspace"])
    # A rank also keeps the order of the samples, eight bytes each.
    samples = torch.utils.data.Subset(model.dataset(), range(plan.batch))
    model = replace(model, functions={**model.functions, "dataset": lambda: samples})
    with StorageTracker() as tracker:
        job = build(context, plan, model, graph, Workspace(Path(arguments["workspace"])))
        job.step(0)
        tracker.peak_bytes = tracker.alive_bytes
        job.step(1)
        job.finish()
    return int(tracker.peak_bytes)


def train_and_clip(context: RankContext, arguments: dict[str, Any]) -> float:
    """Train one step; return the norm of all gradients."""
    plan = Plan.parse(arguments["plan"], Path("plan.json"))
    model, graph = _loaded(arguments["model"], arguments["workspace"])
    settings = TrainSettings(clip_norm=arguments["clip_norm"])
    job = build(context, plan, model, graph, Workspace(Path(arguments["workspace"])), settings)
    record = job.step(0)
    job.finish()
    return float(record.gradient_norm or 0.0)


@cache
def _loaded(model: str, workspace: str) -> tuple[UserModel, LayerGraph]:
    """Load a model and its graph once a process; every job puts its own weights into the layers."""
    loaded = load(model)
    return loaded, load_graph(Path(workspace) / GRAPH)


def keep(job: Job, rank: int, steps: int, folder: Path) -> list[StepRecord]:
    records = []
    for step in range(steps):
        record = job.step(step)
        records.append(record)
        if step == 0:
            gradients = {name: whole(p.grad) for name, p in job.parameters.items() if p.grad is not None}
            _write(folder / f"gradients-{rank}", gradients)
    job.finish()
    _write(folder / f"parameters-{rank}", {name: whole(p) for name, p in job.parameters.items()})
    _write(folder / f"buffers-{rank}", job.buffers)
    return records


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}, path)
