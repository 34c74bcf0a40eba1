"""Overlap: how computing and communicating slow each other while a device does both."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from autopar.ranks.context import RankContext

ROUNDS, WARM_UP = 8, 2
# Large enough to be bound by bandwidth and by arithmetic, and to last longer than starting them takes.
_MESSAGE_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
_WIDTH = {"cpu": 256, "cuda": 4096}


def measure_overlap(context: RankContext, group: dist.ProcessGroup) -> tuple[float, float]:
    """Return how many times as long computing and communicating take at once; all ranks of the group call this.

    A round times matrix products alone, an all-reduce alone, and both at once; medians over rounds are compared.
    """
    kind = context.device.type
    message = torch.zeros(_MESSAGE_BYTES[kind] // 4, device=context.device)
    matrix = torch.full((_WIDTH[kind], _WIDTH[kind]), 0.5, device=context.device)
    product = torch.empty_like(matrix)
    count = _products_as_long(context, group, message, matrix, product)
    found: list[tuple[float, float, float, float]] = []
    for _ in range(WARM_UP + ROUNDS):
        alone = _both(context, group, None, matrix, product, count)[0]
        sent = _both(context, group, message, matrix, product, 0)[1]
        found.append((alone, sent, *_both(context, group, message, matrix, product, count)))
    medians = [statistics.median(column) for column in zip(*found[WARM_UP:], strict=True)]
    return slowdowns(*medians)


def slowdowns(
    compute_s: float, communicate_s: float, both_compute_s: float, both_communicate_s: float
) -> tuple[float, float]:
    """Return how many times as long each takes while the other runs, from the times alone and when begun together.

    Whichever ends first was overlapped all the time. The other one did the rest of its work undisturbed, which is taken
    off before comparing. Never below 1.

    >>> slowdowns(1.0, 1.0, 1.5, 1.5)
    (1.5, 1.5)
    >>> slowdowns(2.0, 1.0, 2.5, 1.5)
    (1.5, 1.5)
    """
    overlapped = min(both_compute_s, both_communicate_s)
    factors = []
    for alone, both in ((compute_s, both_compute_s), (communicate_s, both_communicate_s)):
        done_meanwhile = alone - (both - overlapped)
        factors.append(max(1.0, overlapped / done_meanwhile if done_meanwhile > 0 else both / alone))
    return factors[0], factors[1]


def _products_as_long(
    context: RankContext, group: dist.ProcessGroup, message: torch.Tensor, matrix: torch.Tensor, product: torch.Tensor
) -> int:
    """Return how many products last as long as the all-reduce, on the slowest rank."""
    for _ in range(WARM_UP):
        sent = _both(context, group, message, matrix, product, 0)[1]
        computed = _both(context, group, None, matrix, product, 4)[0] / 4
    count = torch.tensor([max(1, round(sent / computed))])
    dist.all_reduce(count, dist.ReduceOp.MAX, group=group)
    return int(count)


def _both(
    context: RankContext,
    group: dist.ProcessGroup,
    message: torch.Tensor | None,
    matrix: torch.Tensor,
    product: torch.Tensor,
    count: int,
) -> tuple[float, float]:
    """Return the seconds until ``count`` products, and until the message's reduction are done, begun together."""
    dist.barrier(group)
    if context.device.type == "cuda":
        return _both_on_streams(context, group, message, matrix, product, count)
    started = time.perf_counter()
    work = None if message is None else dist.all_reduce(message, group=group, async_op=True)
    ended: list[float] = []
    if work is not None:
        # Noted when it ends, which may be while this thread computes.
        work.get_future().add_done_callback(lambda future: ended.append(time.perf_counter()))
    for _ in range(count):
        torch.mm(matrix, matrix, out=product)
    computed = time.perf_counter()
    if work is not None:
        work.wait()
    communicated = ended[0] if ended else time.perf_counter()
    return computed - started, communicated - started


def _both_on_streams(
    context: RankContext,
    group: dist.ProcessGroup,
    message: torch.Tensor | None,
    matrix: torch.Tensor,
    product: torch.Tensor,
    count: int,
) -> tuple[float, float]:
    torch.cuda.synchronize(context.device)
    started, computed, communicated = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(3)
    )
    beside = torch.cuda.Stream(context.device)  # type: ignore[no-untyped-call]
    started.record()
    beside.wait_event(started)
    with torch.cuda.stream(beside):
        if message is not None:
            # Waiting makes this stream, and not the host, wait for NCCL's own.
            work = dist.all_reduce(message, group=group, async_op=True)
            assert work is not None
            work.wait()
        communicated.record()
    for _ in range(count):
        torch.mm(matrix, matrix, out=product)
    computed.record()
    torch.cuda.synchronize(context.device)
    return started.elapsed_time(computed) * 1e-3, started.elapsed_time(communicated) * 1e-3
