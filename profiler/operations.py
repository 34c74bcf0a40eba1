"""Operations: how long ranks take to communicate, in the manner of nccl-tests.

Sizes are of the whole vector that is reduced, gathered or scattered. A point-to-point time is half of a round trip, as
who begins it sees it. Between CPUs it begins after a pause: in training, who is sent a message sleeps until it comes,
and to wake takes longer than to send a small one.
What ranks on CPUs gather and scatter is a layer that they divide, as in training (:mod:`autopar.profiler.divided`):
after computing about as long, for ranks that compute arrive one after the other. Of each time the mean over the ranks
counts, since whoever comes late has not waited.
Five rounds warm up, twenty iterations are timed; rounds go over all sizes, so that the machine's drift meets every
size alike, and a time is the median over rounds. Slow links get fewer rounds, at least five.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from autopar.formats.cluster import CurveKind
from autopar.profiler.divided import Computing, gathering, scattering
from autopar.ranks.channel import Channel
from autopar.ranks.context import RankContext

PAUSE_S = 2e-3
"""Long enough for a processor to idle."""
LONGEST_S = 0.02
"""Of computing before what is divided is gathered or scattered."""

Work = Callable[[], object]

# Renamed in torch 2.13, which warns of the names that torch 2.11 has.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Pace:
    """How many times to measure."""

    warm_up: int = 5
    iterations: int = 20
    budget_s: float = 2.0
    """Seconds for the warm-up and for the timed rounds of one operation, about, beyond the least number."""
    least: int = 5
    """Rounds that are made whatever they take."""


class Operation(NamedTuple):
    """What some ranks do together."""

    context: RankContext
    kind: CurveKind
    ranks: Sequence[int]
    group: dist.ProcessGroup
    """Of exactly these ranks."""
    channel: Channel | None = None
    """Between the two ranks of a host that send each other messages, as in training."""

    @property
    def begins(self) -> bool:
        """Whether this rank begins round trips."""
        return self.kind == "p2p" and self.context.rank == self.ranks[0]

    @property
    def pause_s(self) -> float:
        """How long this rank does nothing before it communicates."""
        return PAUSE_S if self.begins and self.context.device.type == "cpu" else 0.0


def time_operation(operation: Operation, sizes: Sequence[int], pace: Pace) -> list[float] | None:
    """Return this rank's seconds at every size; all ranks of the operation call this together.

    Nothing, if it only answers.
    """
    if operation.context.device.type == "cpu" and operation.kind in ("all_gather", "reduce_scatter"):
        return _time_divided(operation, sizes, pace)
    works = [_work(operation, size) for size in sizes]
    # A round trip is two messages.
    trips = 2 if operation.kind == "p2p" else 1
    repeats = 4 if operation.context.device.type == "cuda" else 1
    rounds = max(1, pace.iterations // repeats)
    _rounds(operation, works, 1, pace.warm_up, pace)
    times = _rounds(operation, works, repeats, rounds, pace)
    if operation.kind == "p2p" and not operation.begins:
        return None
    return [statistics.median(found) / trips for found in times]


def _time_divided(operation: Operation, sizes: Sequence[int], pace: Pace) -> list[float]:
    made = gathering if operation.kind == "all_gather" else scattering
    works = [made(size, operation.group) for size in sizes]
    computing = Computing()
    # The first call of each makes what later ones find, and the quickest tells what another process did not hold up.
    alone = [min([work() for _ in range(1 + pace.warm_up)][1:]) for work in works]
    counts = [_agreed(computing.count(min(seconds, LONGEST_S)), operation.group) for seconds in alone]
    times: list[list[float]] = [[] for _ in sizes]
    started = time.perf_counter()
    for number in range(pace.iterations):
        for work, count, found in zip(works, counts, times, strict=True):
            dist.barrier(operation.group)
            computing(count)
            found.append(work())
        if number + 1 >= pace.least and _longest(time.perf_counter() - started, operation.group) > pace.budget_s:
            break
    every = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(every, group=operation.group)
    return [statistics.median(each) / len(operation.ranks) for each in every.tolist()]


def _agreed(count: int, group: dist.ProcessGroup) -> int:
    least = torch.tensor([count])
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    return int(least)


def _rounds(operation: Operation, works: Sequence[Work], repeats: int, most: int, pace: Pace) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in works]
    started = time.perf_counter()
    for number in range(most):
        for work, found in zip(works, times, strict=True):
            time.sleep(operation.pause_s)
            found.append(_timed(operation.context, work, repeats))
        if number + 1 >= pace.least and _longest(time.perf_counter() - started, operation.group) > pace.budget_s:
            break
    return times


def _longest(seconds: float, group: dist.ProcessGroup) -> float:
    """Return the most that a rank of the group has spent, so that all of them stop together."""
    spent = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX, group=group)
    return float(spent)


def _timed(context: RankContext, work: Work, repeats: int) -> float:
    if context.device.type != "cuda":
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - started) / repeats
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    for _ in range(repeats):
        work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e-3 / repeats


def _work(operation: Operation, size: int) -> Work:
    context, kind, ranks, group, channel = operation
    # Parts are equal: a vector that does not divide is rounded up to one that does.
    part = torch.zeros(-(-size // (4 * len(ranks))), device=context.device)
    whole = torch.zeros(part.numel() * len(ranks), device=context.device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "all_gather":
        return lambda: _GATHER(whole, part, group=group)
    if kind == "reduce_scatter":
        return lambda: _SCATTER(part, whole, group=group)
    first, second = ranks
    peer = second if operation.begins else first
    send: Work = partial(dist.send, whole, peer)
    receive: Work = partial(dist.recv, whole, peer)
    if channel is not None:
        send, receive = partial(channel.send, whole), partial(_receive, channel, whole)
    return _round_trip(send, receive) if operation.begins else _round_trip(receive, send)


def _receive(channel: Channel, tensor: torch.Tensor) -> None:
    channel.receive(tensor).wait()


def _round_trip(there: Work, back: Work) -> Work:
    def make() -> None:
        there()
        back()

    return make
