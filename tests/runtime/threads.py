"""Run every rank of a plan as a thread of this process."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from unittest.mock import patch

import torch
from rank_jobs import keep

from autopar.capture.graph import LayerGraph
from autopar.capture.source import UserModel
from autopar.formats.plan import Plan
from autopar.formats.program import Program
from autopar.runtime.data import ShareLoader
from autopar.runtime.execute import StepRecord
from autopar.runtime.in_process import Exchange, InProcessTransport
from autopar.runtime.job import DEFAULTS, Job
from autopar.runtime.segment import Segment
from autopar.runtime.settings import TrainSettings
from autopar.schedules.check import check
from autopar.schedules.expand import expand


def train_in_threads(
    plan: Plan,
    graph: LayerGraph,
    model: UserModel,
    state: Mapping[str, torch.Tensor],
    folder: Path,
    steps: int,
    settings: TrainSettings = DEFAULTS,
    records: dict[int, list[StepRecord]] | None = None,
    program: Program | None = None,
) -> list[float]:
    """Train, and keep files as ``rank_jobs`` does; return the losses' parts summed over ranks, step by step.

    Where the loss counts, parts are plain sums. Records are put into ``records`` by rank, if it is given. ``program``
    is run in place of the plan's own.
    """
    program = program or expand(plan)
    check(program, plan)
    exchange, drawing = Exchange(), threading.Lock()
    losses: dict[int, list[float]] = {}
    errors: list[BaseException] = []

    def read(names: Iterable[str]) -> dict[str, torch.Tensor]:
        return {name: state[name].detach().clone() for name in names}

    def work(rank: int) -> None:
        try:
            transport = InProcessTransport(exchange, rank)
            device = torch.device("cpu")
            place = (rank, _own(graph), model, read, transport, device)
            with drawing:
                job = Job(plan, program, *place, lambda step, position: None, settings)
            kept = keep(job, rank, steps, folder)
            losses[rank] = [record.loss for record in kept]
            if records is not None:
                records[rank] = kept
        except BaseException as error:
            errors.append(error)
            exchange.break_off()

    alone = [_one_at_a_time(function, drawing) for function in (Segment.run, ShareLoader.load)]
    with patch.object(Segment, "run", alone[0]), patch.object(ShareLoader, "load", alone[1]):
        _together(len(plan.devices), work)
    if errors:
        raise errors[0]
    return [sum(parts) for parts in zip(*losses.values(), strict=True)]


def _one_at_a_time(run: Callable[..., object], lock: threading.Lock) -> Callable[..., object]:
    """Let no two threads seed and use the one generator of random numbers that they share at once."""

    def alone(*arguments: object, **options: object) -> object:
        with lock:
            return run(*arguments, **options)

    return alone


def _own(graph: LayerGraph) -> LayerGraph:
    """Copy a graph, so that a rank may put its own weights into it."""
    layers = [dataclasses.replace(layer, module=copy.deepcopy(layer.module)) for layer in graph.layers]
    return dataclasses.replace(graph, layers=tuple(layers))


def _together(count: int, work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
