"""torch: a plan as a schedule file of torch.distributed.pipelining, and the stages that run it.

``schedule.csv`` is what ``_PipelineScheduleRuntime._load_csv(file, format="compute_comms")`` reads. Of every device of
a pipeline it has a line of actions in the plan's order and with the plan's depths: stage, kind and micro-batch, such as
``0F3`` or ``1SEND_B3`` (`torch.distributed.pipelining.schedules`, ``_Action``). Sends and receives stand in one order
for all, so that no two ranks wait for each other, whatever a send waits for. All schedules of autopar can be written
so, also those that torch has no class for.

``stages.py`` builds ``PipelineStage`` objects of the layers that autopar captures from your model file, cut as planned;
it needs autopar beside torch. The head of the file says how it is called. Its ``reduce`` adds up what torch's
pipelining does not: the gradients of parameters that stages share, and those of replicas. Nothing is sharded and
nothing recomputed. Teams are refused: torch's ``parallelize_module`` wants a style for every module by its name, and
autopar's splits are of operators, of which reshapes and fused projections have no style. ``--nearest`` writes the
fastest plan with one device a replica, and ``autopar run`` trains the plan itself.

Schedules that torch has, too, are not all the same ones: autopar's ``gpipe``, ``1f1b`` and ``interleaved`` compute in
the order of torch's ``GPipe``, ``1F1B`` and ``Interleaved1F1B``; ``zb-v`` and ``dualpipe-v`` have orders of their own.

Tried: ``_load_csv`` reads every schedule's file; ``stages.py`` trains a step of the GPT example on four processes, by
every schedule and with replicas, to the gradients of the plain loop (float64).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from autopar.formats.expressible import Expressible, grid_of
from autopar.formats.plan import Plan
from autopar.formats.profile import TRANSFORMERS, path_of
from autopar.formats.program import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD
from autopar.interop.target import ExportFile, ExportSubject, Target, comment, heading
from autopar.schedules import SCHEDULES
from autopar.schedules.order import RankPlace

_COMPUTATIONS = {FORWARD: "F", BACKWARD: "B", INPUT_BACKWARD: "I", WEIGHT_BACKWARD: "W"}
_ENDS = (BACKWARD, WEIGHT_BACKWARD)
"""What leaves a micro-batch's gradients with the parameters."""
Orders = Sequence[Sequence[tuple[str, int, int]]]
"""Of every group of devices: kind, stage and micro-batch of what it computes, in order."""


def orders_of(plan: Plan) -> Orders:
    """Return what the devices of a pipeline compute, with micro-batches counted among those of a pipeline."""
    count, order, found = grid_of(plan).micro_batches, SCHEDULES[plan.schedule].order, []
    for group, chunks in enumerate(plan.groups):
        depths = tuple(min(plan.stages[stage].warmup, count) for stage in chunks)
        found.append(list(order(RankPlace(group, len(plan.groups), chunks, count, depths))))
    return found


def computations(orders: Orders) -> str:
    """Return the file of `compute_only`: computations alone, to which torch adds what they exchange."""
    return _lines([[f"{stage}{_COMPUTATIONS[kind]}{each}" for kind, stage, each in own] for own in orders])


def with_messages(orders: Orders) -> str:
    """Return the file of `compute_comms`: computations, what they exchange, and where gradients are whole."""
    return _lines(_Lowering(orders).run())


def _lines(rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"{','.join(row)}\n" for row in rows)


class _ArrivedMessage(NamedTuple):
    stage: int
    kind: str
    micro_batch: int


class _Lowering:
    """Goes through all devices' computations in an order in which they can run, and puts messages behind them.

    A send and its receive are put down at once, so that all devices have them in the order of one sequence.
    """

    def __init__(self, orders: Orders) -> None:
        self._left = [list(reversed(own)) for own in orders]
        self._rank_of = {stage: rank for rank, own in enumerate(orders) for _, stage, _ in own}
        self._last = max(self._rank_of)
        self._rows: list[list[str]] = [[] for _ in orders]
        self._arrived: set[_ArrivedMessage] = set()
        self._backwards = Counter(stage for own in orders for kind, stage, _ in own if kind in _ENDS)

    def run(self) -> list[list[str]]:
        """Return every device's actions."""
        while any(self._left):
            before = sum(map(len, self._left))
            for rank in range(len(self._left)):
                if self._left[rank] and self._ready(*self._left[rank][-1]):
                    self._compute(rank, *self._left[rank].pop())
            assert sum(map(len, self._left)) < before, "a checked program does not stand still"
        return self._rows

    def _ready(self, kind: str, stage: int, micro_batch: int) -> bool:
        first = stage == (0 if kind == FORWARD else self._last)
        return first or kind == WEIGHT_BACKWARD or _ArrivedMessage(stage, _way(kind), micro_batch) in self._arrived

    def _compute(self, rank: int, kind: str, stage: int, micro_batch: int) -> None:
        row = self._rows[rank]
        row.append(f"{stage}{_COMPUTATIONS[kind]}{micro_batch}")
        peer = stage + (1 if kind == FORWARD else -1)
        if kind != WEIGHT_BACKWARD and 0 <= peer <= self._last:
            self._arrived.add(_ArrivedMessage(peer, _way(kind), micro_batch))
            if self._rank_of[peer] != rank:
                row.append(f"{stage}SEND_{_way(kind)}{micro_batch}")
                self._rows[self._rank_of[peer]].append(f"{peer}RECV_{_way(kind)}{micro_batch}")
        if kind in _ENDS:
            self._backwards[stage] -= 1
            if not self._backwards[stage]:
                row.append(f"{stage}REDUCE_GRAD")


def _way(kind: str) -> str:
    return "F" if kind == FORWARD else "B"


_STAGES = """\
from collections import deque
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from autopar.capture import capture, load

FOLDER = Path(__file__).parent
MODEL = load({load})
CUTS = {cuts}  # the layers before which stages begin and end
STAGES = {stages}  # of every rank of a pipeline
MICRO_BATCHES = {micro_batches}  # of a pipeline in a step


class Stage(nn.Module):
    def __init__(self, graph, first, stop):
        super().__init__()
        self.layers, self.counts = graph.layers[first:stop], deque(maxlen=MICRO_BATCHES)
        self.modules_of_layers = nn.ModuleList(layer.module for layer in self.layers)
        place = {{layer.name: at for at, layer in enumerate(graph.layers)}}
        made = [(each.name, place[each.producer], place[each.consumers[-1]]) for each in graph.tensors if each.producer]
        self.received, self.sent = ([n for n, a, b in made if a < cut <= b] for cut in (first, stop))

    def forward(self, *received, **batch):
        tensors, rows = {{**batch, **dict(zip(self.received, received))}}, len(next(iter(batch.values())))
        for layer in self.layers:
            tensors.update(zip(layer.outputs, layer.module(rows, *(tensors[name] for name in layer.inputs))))
        if self.sent:
            return tuple(tensors[name] for name in self.sent)
        self.counts.append(tensors.get("loss_count", torch.ones(())))
        return tensors["loss_sum" if "loss_sum" in tensors else "loss"].reshape(1)


def build(model, device, group=None, schedule=FOLDER / {schedule}):
    graph, edges = capture(MODEL, model), list(pairwise(CUTS))
    modules = {{index: Stage(graph, *edges[index]).to(device) for index in STAGES[dist.get_rank(group)]}}
    stages = [PipelineStage(each, index, len(edges), device, group=group) for index, each in modules.items()]
    runtime = _PipelineScheduleRuntime(stages, MICRO_BATCHES, loss_fn=lambda loss, _: loss.sum(), scale_grads=False)
    runtime._load_csv(schedule, format="compute_comms")
    return graph, stages, runtime


def reduce(graph, stages, group=None, replicas=None):
    count = sum((each.sum() for stage in stages for each in stage.submod.counts), torch.zeros(()))
    own = {{name: each for stage in stages for layer in stage.submod.layers for name, each in layer.named_parameters()}}
    total = count.to(stages[0].device, torch.float64)
    dist.all_reduce(total, group=group)
    for name in graph.tied_parameters():
        gradient = own[name].grad if name in own else torch.zeros_like(graph.parameter(name), device=stages[0].device)
        dist.all_reduce(gradient, group=group)
    for tensor in [total, *(each.grad for each in own.values() if each.grad is not None)] if replicas else ():
        dist.all_reduce(tensor, group=replicas)
    for each in own.values():
        if each.grad is not None:
            each.grad /= total.to(each.grad.dtype)
"""
_USE = (
    "On every rank: model = MODEL.build(seed), or yours; graph, stages, runtime = build(model, device).",
    "A step: runtime.step(**batch, target=any tensor of the batch), with the batch of the rank's pipeline by the names "
    "{names}; then reduce(graph, stages): it adds up gradients of parameters that stages share and of replicas (the "
    "ranks of the same stages: a process group), and divides them by what the loss counts.",
)


def write(subject: ExportSubject, target: Target) -> Iterator[ExportFile]:
    """Yield the schedule file, and the stages."""
    yield ExportFile(target.file, with_messages(orders_of(subject.plan)))
    yield ExportFile("stages.py", _head(subject, target) + _stages(subject, target))


def _head(subject: ExportSubject, target: Target) -> str:
    inputs = ", ".join(tensor.name for tensor in subject.profile.tensors if tensor.producer is None)
    use = [each.replace("{names}", inputs) for each in _USE]
    return comment([*heading(subject, target), *_autocast(subject), *use])


def _stages(subject: ExportSubject, target: Target) -> str:
    plan = subject.plan
    return _STAGES.format(
        load=_source(subject),
        cuts=[0, *accumulate(len(stage.layers) for stage in plan.stages)],
        stages=[list(chunks) for chunks in plan.groups],
        micro_batches=grid_of(plan).micro_batches,
        schedule=json.dumps(target.file),
    )


def _source(subject: ExportSubject) -> str:
    """Return the arguments that load the model, as Python has them."""
    model = subject.plan.model
    path = path_of(model.source)
    if path is None:
        return json.dumps(model.source)
    where = f"str(FOLDER / {json.dumps(path)})"
    if not model.source.startswith(TRANSFORMERS):
        return where
    data = "" if model.data is None else f", str(FOLDER / {json.dumps(model.data)})"
    return f"{json.dumps(TRANSFORMERS)} + {where}{data}" + (
        "" if model.sequence is None else f", sequence={model.sequence}"
    )


def _autocast(subject: ExportSubject) -> Iterator[str]:
    precision = {"bf16": "bfloat16", "fp16": "float16"}.get(subject.plan.precision)
    if precision is not None:
        call = f"torch.autocast({subject.plan.device_type!r}, torch.{precision})"
        yield f"planned for {subject.plan.precision}: step under {call}"


TARGET = Target(
    version="torch 2.13.0",
    trial="it trained as planned",
    file="schedule.csv",
    write=write,
    expressible=Expressible("torch", tuple(SCHEDULES), any_depth=True, any_count=True, tied=True),
    cuts_layers=True,
)
