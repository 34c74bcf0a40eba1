"""Run every rank of a plan as a thread of this process."""

import copy
import dataclasses
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch

from autopar.capture.graph import Layer, LayerGraph
from autopar.capture.model.source import UserModel
from autopar.formats.plan import Plan
from autopar.formats.program import Program
from autopar.options.train import TrainSettings
from autopar.runtime.data import ShareLoader
from autopar.runtime.job import DEFAULTS, Job
from autopar.runtime.loss import StepRecord
from autopar.runtime.messages.transport import Exchange, InProcessTransport, Transport
from autopar.runtime.stage.parameters import Team
from autopar.runtime.stage.stage import Segment
from autopar.runtime.update import Update
from autopar.schedules.check import check
from autopar.schedules.expand import expand
from rank_jobs import keep


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
    carry: Callable[[Transport], Transport] | None = None,
    begin: Callable[[Job], object] = lambda job: None,
) -> list[float]:
    """Train, and keep files as ``rank_jobs`` does; return the losses' parts summed over ranks, step by step.

    Where the loss counts, parts are plain sums. Records are put into ``records`` by rank, if it is given. ``program``
    is run in place of the plan's own; ``carry`` makes of a rank's transport another, and ``begin`` is given its job.
    """
    losses: dict[int, list[float]] = {}

    def act(job: Job, transport: Transport) -> None:
        begin(job)
        kept = keep(job, job.rank, steps, folder)
        losses[job.rank] = [record.loss for record in kept]
        if records is not None:
            records[job.rank] = kept

    act_in_threads(plan, graph, model, state, act, settings, program, carry)
    return [sum(parts) for parts in zip(*losses.values(), strict=True)]


def act_in_threads(
    plan: Plan,
    graph: LayerGraph,
    model: UserModel,
    state: Mapping[str, torch.Tensor],
    act: Callable[[Job, Transport], None],
    settings: TrainSettings = DEFAULTS,
    program: Program | None = None,
    carry: Callable[[Transport], Transport] | None = None,
) -> None:
    """Build every rank's job, and do something with it, all at the same time."""
    program = program or expand(plan)
    check(program, plan)
    drawing = threading.RLock()

    def read(names: Iterable[str]) -> dict[str, torch.Tensor]:
        return {name: state[name].detach().clone() for name in names}

    def work(rank: int, transport: Transport) -> None:
        if carry is not None:
            transport = carry(transport)
        stages = [plan.stages[index] for index in plan.ownership.ranks[rank].stages]
        names = {name for stage in stages for name in stage.layers}
        place = (rank, own(graph, names), model, read, transport, torch.device("cpu"))
        with drawing:
            job = Job(plan, program, *place, lambda step, position: None, settings)
        act(job, transport)

    # Layers that draw nothing may meet in a reduction.
    random = any(layer.random for layer in graph.layers)
    alone = [(ShareLoader, "load"), (Update, "_apply"), *([(Segment, "run")] if random else [])]
    with ExitStack() as stack:
        for name in ("sum", "gather", "reduce_scatter"):
            stack.enter_context(patch.object(Team, name, _leaving(getattr(Team, name), drawing)))
        for kind, name in alone:
            stack.enter_context(patch.object(kind, name, _one_at_a_time(getattr(kind, name), drawing)))
        in_ranks(len(plan.devices), work)


def _leaving(meet: Callable[..., torch.Tensor], lock: threading.RLock) -> Callable[..., torch.Tensor]:
    """Let others draw while a thread waits for them, and go on with the generator as it was."""

    def alone(*arguments: object) -> torch.Tensor:
        if not lock._is_owned():  # type: ignore[attr-defined]
            return meet(*arguments)
        state = torch.get_rng_state()
        lock.release()
        try:
            return meet(*arguments)
        finally:
            lock.acquire()
            torch.set_rng_state(state)

    return alone


def _one_at_a_time(run: Callable[..., object], lock: threading.RLock) -> Callable[..., object]:
    """Let no two threads seed and use the one generator of random numbers that they share at once."""

    def alone(*arguments: object, **options: object) -> object:
        with lock:
            return run(*arguments, **options)

    return alone


def own(graph: LayerGraph, names: Collection[str] | None = None) -> LayerGraph:
    """Copy a graph, so that a rank may put its own weights into it: into the layers that are named, or all."""

    def copied(layer: Layer) -> Layer:
        return dataclasses.replace(layer, module=copy.deepcopy(layer.module))

    layers = [copied(each) if names is None or each.name in names else each for each in graph.layers]
    return dataclasses.replace(graph, layers=tuple(layers))


def in_ranks(count: int, act: Callable[[int, Transport], None]) -> None:
    """Have ranks that are threads do something at the same time; raise what the first of them raises."""
    exchange, errors = Exchange(), list[BaseException]()

    def run(rank: int) -> None:
        try:
            act(rank, InProcessTransport(exchange, rank))
        except BaseException as error:
            errors.append(error)
            exchange.break_off()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
