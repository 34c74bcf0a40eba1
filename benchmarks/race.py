"""Race: contestants on the same ranks, step by step in turn; what every rank of a benchmark runs."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch import nn

import torch_peers
from autopar.capture.model.batch import named_tensors
from autopar.capture.model.source import load
from autopar.formats.plan import Plan
from autopar.options.profile import ProfileOptions
from autopar.profiler import probe, profile
from autopar.profiler.probe import LinkMeasurements, Probe
from autopar.ranks.context import RankContext
from autopar.runtime.data import split_rows
from autopar.runtime.job import DEFAULTS, Job
from autopar.runtime.messages.staging import connect
from autopar.runtime.messages.transport import Exchange, InProcessTransport, Transport
from autopar.runtime.start.worker import build
from autopar.runtime.start.workspace import Workspace
from autopar.schedules.check import check
from autopar.schedules.expand import expand
from cut import cut
from delayed import DelayedTransport
from sleeping import Pace, SleepingModule, graph_of, modules_of, user_of, weights_of
from turns import turn

__all__ = ["Field", "Lap", "Real", "alone", "apart", "emulated", "real"]

STRIDE = 5
"""Steps of a lap on a device that is behind the host, which is waited for after them."""

BUDGET_S = 5.0
"""Of a profile, in seconds."""

Lap = tuple[float, float, float]
"""Of one rank in one step: start and end on the host's clock, and processor seconds."""


class Contestant(NamedTuple):
    """Someone who trains."""

    name: str
    step: Callable[[int], object]


class Real(TypedDict):
    """What a rank found in a race of models that compute."""

    laps: dict[str, list[Lap]]
    profiles: list[str]
    """Of every round that counts, as JSON texts."""
    links: LinkMeasurements


class Field(TypedDict):
    """Who takes part; plain data."""

    plans: dict[str, str]
    """Plans of autopar as JSON texts, by the contestant's name."""
    peers: list[str]
    """Torch's schedules, or ways to be data-parallel."""
    sides: dict[str, tuple[int, list[int]]]
    """By contestant of torch's that has not a stage for every rank: how many pipelines it trains beside each other, and
    before which layers it cuts."""
    micro_batches: int
    rows: int
    steps: int
    warm_up: int
    paces: list[list[float]]
    """Of the layers that sleep, one per rank."""
    chunks: dict[str, int]
    """By contestant of autopar: into how many parts every layer is cut."""
    split: list[str]
    """Contestants whose layers sleep in halves."""
    delay_s: float
    model: str
    workspace: str
    predicted: bool
    """Whether what predictions need is measured."""


def computing(
    arguments: argparse.Namespace,
    plans: Mapping[str, Plan],
    peers: Sequence[str],
    micro_batches: int,
    rows: int,
    model: Path,
    workspace: str,
) -> Field:
    """Return a race of a model file that computes."""
    return {
        "plans": {name: plan.dumps() for name, plan in plans.items()},
        "peers": list(peers),
        "sides": {},
        "micro_batches": micro_batches,
        "rows": rows,
        "steps": arguments.steps,
        "warm_up": arguments.warm_up,
        "paces": [],
        "chunks": {},
        "split": [],
        "delay_s": 0.0,
        "model": str(model),
        "workspace": workspace,
        "predicted": not arguments.bare,
    }


def emulated(context: RankContext, field: Field) -> dict[str, list[Lap]]:
    """Race with layers that sleep.

    ``sleeps`` and ``split sleeps`` only sleep, in all ranks at once; ``alone`` and ``split alone`` are autopar's
    training of one stage in each of them, without messages.
    """
    torch.set_num_threads(1)
    paces = [Pace(forward_s, backward_s, int(values)) for forward_s, backward_s, values in field["paces"]]
    contestants = [_sleeping_job(context, field, name, paces) for name in field["plans"]]
    contestants += [_sleeping_peer(context, field, name, paces) for name in field["peers"]]
    for split in (False, True) if field["split"] else (False,):
        contestants += [each(field, paces[context.rank % len(paces)], split) for each in (_sleeps, _alone)]
    return _race(context, contestants, field["warm_up"], field["steps"])


def real(context: RankContext, field: Field) -> Real:
    """Race with a model that computes; one thread per rank.

    What predictions need is measured in the same processes: links before the first round, and the model in every
    round, by all ranks at once.
    """
    torch.set_num_threads(1)
    user = load(field["model"])
    workspace = Workspace(Path(field["workspace"]))
    profiles: list[str] = []

    def measure(number: int) -> None:
        with apart(context):
            profiles.append(profile(user, ProfileOptions(batch=field["rows"], budget_s=BUDGET_S, threads=1)).dumps())

    contestants = [Contestant("profile", measure)] if field["predicted"] else []
    for name, text in field["plans"].items():
        plan = Plan.parse(text, Path("plan.json"))
        job = build(context, plan, user, workspace.graph(user, plan), workspace)
        contestants.append(Contestant(name, job.step))
    samples = user.dataset()
    count = field["micro_batches"] * field["rows"]
    batch = torch.utils.data.default_collate([samples[index] for index in range(count)])
    pair = batch[0], batch[1]
    contestants += [_computing_peer(context, field, name, user.build, pair) for name in field["peers"]]
    links = probe.measure(context, asdict(Probe(quick=True)))
    laps = _race(context, contestants, field["warm_up"], field["steps"])
    return {"laps": laps, "profiles": profiles[field["warm_up"] :], "links": links}


@contextlib.contextmanager
def apart(context: RankContext) -> Iterator[None]:
    """Keep the ranks of a block on different cores, where profilers that begin at once may choose the same."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < context.size:
        yield
        return
    os.sched_setaffinity(0, {cores[context.rank]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def alone(context: RankContext, field: Field) -> dict[str, list[Lap]]:
    """Race with a model that computes on one device; laps are those of single steps, many of which run in one go."""
    user, device = load(field["model"]), context.device
    plan = Plan.parse(field["plans"]["autopar"], Path("plan.json"))
    workspace = Workspace(Path(field["workspace"]))
    given, loading = (build(context, plan, user, workspace.graph(user, plan), workspace) for _ in range(2))
    samples = user.dataset()
    x, y, *_ = torch.utils.data.default_collate([samples[index] for index in range(plan.batch)])
    batch = x.to(device), y.to(device)
    inputs = split_rows(plan, 0, named_tensors(batch), given.inputs, device)
    loop = torch_peers.plain(user.build(0).to(device), plan.micro_batches, nn.functional.mse_loss, batch)
    contestants = [
        Contestant("autopar", _striding(device, lambda number: given.train(number, {number: inputs}, number + 1, 0))),
        Contestant("autopar, loading", _striding(device, lambda number: loading.step(number, number + 2))),
        Contestant("plain", _striding(device, lambda number: loop())),
    ]
    laps = _race(context, contestants, field["warm_up"], field["steps"])
    return {
        name: [(start_s, start_s + (end_s - start_s) / STRIDE, cpu_s / STRIDE) for start_s, end_s, cpu_s in each]
        for name, each in laps.items()
    }


def _striding(device: torch.device, step: Callable[[int], object]) -> Callable[[int], object]:
    def stride(number: int) -> None:
        for each in range(number * STRIDE, (number + 1) * STRIDE):
            step(each)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return stride


def _race(context: RankContext, contestants: Sequence[Contestant], warm_up: int, steps: int) -> dict[str, list[Lap]]:
    """Let everyone make a step in turn, and again; who begins changes with the round."""
    laps: dict[str, list[Lap]] = {contestant.name: [] for contestant in contestants}
    for number in range(warm_up + steps):
        first = number % len(contestants)
        for contestant in (*contestants[first:], *contestants[:first]):
            gc.collect()
            with turn(context):
                context.barrier()
                start_s, cpu_s = time.perf_counter(), time.process_time()
                contestant.step(number)
                lap = start_s, time.perf_counter(), time.process_time() - cpu_s
            if number >= warm_up:
                laps[contestant.name].append(lap)
        if context.rank == 0:
            context.report({"round": number - warm_up + 1})
    context.barrier()
    return laps


def _sleeping_job(context: RankContext, field: Field, name: str, paces: Sequence[Pace]) -> Contestant:
    plan = Plan.parse(field["plans"][name], Path("plan.json"))
    chunks = field["chunks"][name]
    graph = graph_of([pace.times(1 / chunks) for _ in range(chunks) for pace in paces], name in field["split"])
    program = expand(plan)
    check(program, plan)
    transport: Transport = connect(context, plan, DEFAULTS)
    if field["delay_s"]:
        transport = DelayedTransport(transport, field["delay_s"])

    if context.rank >= len(plan.devices):
        return Contestant(name, lambda number: None)
    assert context.board is not None
    note = context.note
    user = user_of(plan.batch)
    job = Job(plan, program, context.rank, graph, user, weights_of, transport, context.device, note)
    return Contestant(name, job.step)


def _sleeping_peer(context: RankContext, field: Field, name: str, paces: Sequence[Pace]) -> Contestant:
    schedule = name.split()[1]
    _, chunks, split = torch_peers.SCHEDULES[schedule]
    layers = modules_of([pace.times(1 / chunks) for _ in range(chunks) for pace in paces], split)
    copies, cuts = field["sides"].get(name, (1, list(range(1, len(layers)))))
    ranks = copies * (len(cuts) + 1) // chunks
    # Replicas of a stage are neighbours, as autopar's are.
    # A group that nobody needs disturbs all contestants: a thread of it wakes up a hundred times a second.
    whole = ranks == context.size and copies == 1
    pipelines = [None if whole else dist.new_group(list(range(copy, ranks, copies))) for copy in range(copies)]
    replicas = [dist.new_group(list(range(rank, rank + copies))) for rank in range(0, ranks, copies) if copies > 1]
    if context.rank >= ranks:
        return Contestant(name, lambda number: None)
    stages = [nn.Sequential(*layers[start:stop]) for start, stop in pairwise([0, *cuts, len(layers)])]
    place = context.rank // copies
    mine: list[nn.Module] = [stages[index] for index in torch_peers.stages_of(schedule, place, ranks // copies)]
    count = field["micro_batches"] * field["rows"] // copies
    batch = torch.zeros(count, 1), torch.zeros(count, 1)
    step = torch_peers.pipeline(
        schedule,
        mine,
        field["micro_batches"],
        lambda output, target: output.mean(),
        batch,
        pipelines[context.rank % copies],
        replicas[place] if replicas else None,
    )
    return Contestant(name, lambda number: step())


def _sleeps(field: Field, pace: Pace, split: bool) -> Contestant:
    """Forwards and backwards of one layer without messages: a step's worth of them."""
    layer = SleepingModule(pace, split)
    x = torch.zeros(field["rows"], pace.values, requires_grad=True)
    gradient = torch.ones(field["rows"], pace.values)

    def step(number: int) -> None:
        for _ in range(field["micro_batches"]):
            layer(x).backward(gradient)
            x.grad = layer.weight.grad = None

    return Contestant("split sleeps" if split else "sleeps", step)


def _alone(field: Field, pace: Pace, split: bool) -> Contestant:
    """Autopar's forwards and backwards of one layer on one rank: a step of them."""
    graph, user = graph_of([pace], split), user_of(field["micro_batches"] * field["rows"])
    plan = cut(graph, user, "zb-h1" if split else "1f1b", (1,), field["micro_batches"], field["rows"])
    place = (0, graph, user, weights_of, InProcessTransport(Exchange(), 0), torch.device("cpu"))
    job = Job(plan, expand(plan), *place, lambda step, position: None)
    return Contestant("split alone" if split else "alone", job.step)


def _computing_peer(
    context: RankContext,
    field: Field,
    name: str,
    model: Callable[[], nn.Module],
    batch: tuple[torch.Tensor, torch.Tensor],
) -> Contestant:
    module = model()
    assert isinstance(module, nn.Sequential)
    schedule = name.removeprefix("torch ")
    count, loss = field["micro_batches"], nn.functional.mse_loss
    if schedule in torch_peers.SCHEDULES:
        stages = context.size * torch_peers.SCHEDULES[schedule][1]
        size = len(module) // stages
        mine = [
            module[index * size : (index + 1) * size]
            for index in torch_peers.stages_of(schedule, context.rank, context.size)
        ]
        step = torch_peers.pipeline(schedule, mine, count, loss, batch)
        return Contestant(name, lambda number: step())
    if name in ("plain", "copies"):
        step = torch_peers.plain(module, count, loss, batch)
        return Contestant(name, lambda number: step() if name == "copies" or context.rank == 0 else None)
    mine_x, mine_y = (tensor.chunk(context.size)[context.rank] for tensor in batch)
    way = torch_peers.data_parallel if name == "torch DDP" else torch_peers.sharded
    step = way(module, count // context.size, loss, (mine_x, mine_y))
    return Contestant(name, lambda number: step())
