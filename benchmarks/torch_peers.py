"""Torch's own ways to train a model on several ranks: pipelining, DDP, FSDP2; and the plain loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

__all__ = ["SCHEDULES", "Loss", "Step", "data_parallel", "pipeline", "plain", "sharded", "stages_of"]

Step = Callable[[], None]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LEARNING_RATE = 1e-3
SCHEDULES: dict[str, tuple[Any, int, bool]] = {
    "ScheduleGPipe": (pipelining.ScheduleGPipe, 1, False),
    "Schedule1F1B": (pipelining.Schedule1F1B, 1, False),
    "ScheduleInterleaved1F1B": (pipelining.ScheduleInterleaved1F1B, 2, False),
    "ScheduleInterleavedZeroBubble": (pipelining.ScheduleInterleavedZeroBubble, 2, True),
    "ScheduleZBVZeroBubble": (pipelining.ScheduleZBVZeroBubble, 2, True),
    "ScheduleDualPipeV": (pipelining.ScheduleDualPipeV, 2, True),
}
"""Class, stages per rank, and whether it splits the backward."""


def stages_of(name: str, rank: int, ranks: int) -> list[int]:
    """Return the stages that a schedule has on a rank."""
    _, chunks, _ = SCHEDULES[name]
    if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        return [rank, 2 * ranks - 1 - rank]
    return [rank + chunk * ranks for chunk in range(chunks)]


def pipeline(
    name: str,
    modules: Sequence[nn.Module],
    micro_batches: int,
    loss: Loss,
    batch: tuple[torch.Tensor, torch.Tensor],
    group: dist.ProcessGroup | None = None,
    replicas: dist.ProcessGroup | None = None,
) -> Step:
    """Return a step of a schedule of ``torch.distributed.pipelining``.

    Args:
        name: the schedule's.
        modules: the stages of this rank.
        micro_batches: how many.
        loss: of an output and a target.
        batch: inputs and targets of this pipeline.
        group: its ranks.
        replicas: ranks that have the same stages in pipelines beside this one, and add up gradients.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    made, chunks, _ = SCHEDULES[name]
    indices = stages_of(name, rank, ranks)
    stages = [
        pipelining.PipelineStage(module, index, ranks * chunks, torch.device("cpu"), group=group)
        for module, index in zip(modules, indices, strict=True)
    ]
    schedule = made(stages if chunks > 1 else stages[0], micro_batches, loss_fn=loss)
    trained = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
    inputs = (batch[0],) if 0 in indices else ()
    targets = {"target": batch[1]} if ranks * chunks - 1 in indices else {}

    def step() -> None:
        schedule.step(*inputs, **targets, return_outputs=False)
        for parameter in trained if replicas is not None else ():
            dist.all_reduce(parameter.grad, group=replicas)
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain(module: nn.Module, micro_batches: int, loss: Loss, batch: tuple[torch.Tensor, torch.Tensor]) -> Step:
    """Return a step of one process that adds gradients up."""
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    parts = list(zip(*(tensor.chunk(micro_batches) for tensor in batch), strict=True))

    def step() -> None:
        for x, y in parts:
            (loss(module(x), y) / micro_batches).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def data_parallel(module: nn.Module, micro_batches: int, loss: Loss, batch: tuple[torch.Tensor, torch.Tensor]) -> Step:
    """Return a step of DDP, which synchronises in the last micro-batch; every rank is given its part of ``batch``."""
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True, static_graph=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    *first, last = zip(*(tensor.chunk(micro_batches) for tensor in batch), strict=True)

    def step() -> None:
        with wrapped.no_sync():
            for x, y in first:
                (loss(wrapped(x), y) / micro_batches).backward()  # type: ignore[no-untyped-call]
        (loss(wrapped(last[0]), last[1]) / micro_batches).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def sharded(module: nn.Sequential, micro_batches: int, loss: Loss, batch: tuple[torch.Tensor, torch.Tensor]) -> Step:
    """Return a step of FSDP2, every block sharded; gradients are reduced in every micro-batch, as its memory asks."""
    for block in module:
        fully_shard(block)
    whole = fully_shard(module)
    assert isinstance(whole, FSDPModule)
    return plain(module, micro_batches, loss, batch)
