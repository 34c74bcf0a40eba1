"""Operations: how long ranks take to communicate, in the manner of nccl-tests, and how that slows computing.

Sizes are of the whole vector that is reduced, gathered or scattered. A point-to-point time is half of a round trip, as
who begins it sees it. Between CPUs it begins after a pause: in training, who is sent a message sleeps until it comes,
and to wake takes longer than to send a small one.

Collectives between CPUs begin after ranks have computed about as long, for ranks that compute arrive one after the
other, and threads that communicate are asleep. Of each time the mean over the ranks counts, since whoever comes late
has not waited; and over rounds, since a team's layers wait for every one of hundreds of sums a step, a quarter of which
take three times the median. What they gather and scatter is a layer that they divide, as in training, by
``fully_shard`` itself: it copies what it gathers out of one buffer and what it scatters into another, in memory that is
fresh every time, and waits for both; on GPUs that goes on beside computing.

Five rounds warm up, twenty iterations are timed; rounds go over all sizes, so that the machine's drift meets every
size alike. Of messages, and on GPUs, a time is the median over rounds. Slow links get fewer rounds, at least five.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from autopar.formats.cluster import CurveKind
from autopar.ranks.channel import Channel
from autopar.ranks.context import RankContext

PARAMETERS = 4
"""Of a layer: weights and biases of two modules."""
WIDTH = {"cpu": 256, "cuda": 4096}


class Computing:
    """Products of matrices, which are bound by arithmetic and last longer than starting them takes."""

    def __init__(self, device: torch.device) -> None:
        self._matrix = torch.full((WIDTH[device.type],) * 2, 0.5, device=device)
        self._product = torch.empty_like(self._matrix)

    def __call__(self, count: int) -> None:
        """Compute so many."""
        for _ in range(count):
            torch.mm(self._matrix, self._matrix, out=self._product)

    def counts(self, seconds: Sequence[float]) -> list[int]:
        """Return how many last so long on this host."""
        self(2)
        started = time.perf_counter()
        self(4)
        each_s = (time.perf_counter() - started) / 4
        return [round(each / each_s) for each in seconds]


def reducing(size_bytes: int, group: dist.ProcessGroup) -> Callable[[], float]:
    """Return what sums a vector of so many bytes over all ranks, and returns its seconds."""
    vector = torch.zeros(-(-size_bytes // 4))

    def reduce() -> float:
        started = time.perf_counter()
        dist.all_reduce(vector, group=group)
        return time.perf_counter() - started

    return reduce


def gathering(size_bytes: int, group: dist.ProcessGroup) -> Callable[[], float]:
    """Return what gathers the parameters of a layer of so many bytes, lets go of them, and returns its seconds."""
    layer = _sharded_layer(size_bytes, group)

    def gather() -> float:
        started = time.perf_counter()
        layer.unshard()
        layer.reshard()
        return time.perf_counter() - started

    return gather


def scattering(size_bytes: int, group: dist.ProcessGroup) -> Callable[[], float]:
    """Return what reduces a layer's gradients, each rank to its part, and returns its seconds.

    They are those of a forward and a backward of a layer that computes nothing, less the making of the gradients: what
    ``fully_shard`` does around either is theirs, too.
    """
    layer = _sharded_layer(size_bytes, group)
    # Gathered once, the parameters stay.
    layer.set_reshard_after_backward(False)

    def scatter() -> float:
        made: list[float] = []
        started = time.perf_counter()
        layer(made).backward()
        seconds = time.perf_counter() - started - sum(made)
        for part in layer.parameters():
            part.grad = None
        return seconds

    return scatter


def _sharded_layer(size_bytes: int, group: dist.ProcessGroup) -> Any:  # noqa: ANN401
    # It takes most of a second to import, and GPUs need none of it.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(group.group_name,))
    layer = fully_shard(_ParameterLayer(size_bytes, group.size()), mesh=mesh)
    layer.set_gradient_divide_factor(1.0)
    layer.set_force_sum_reduction_for_comms(True)
    return layer


class _ParameterLayer(nn.Module):
    """Some parameters that computing takes no time with."""

    def __init__(self, size_bytes: int, ranks: int) -> None:
        super().__init__()
        part = -(-size_bytes // (4 * PARAMETERS * ranks))
        self.weights = nn.ParameterList(torch.zeros(ranks, part) for _ in range(PARAMETERS))

    def forward(self, gradient_seconds: list[float]) -> torch.Tensor:
        return _LayerGradients.apply(gradient_seconds, *self.weights)  # type: ignore[no-untyped-call, no-any-return]


class _LayerGradients(torch.autograd.Function):
    """Makes gradients of parameters, and notes its seconds."""

    @staticmethod
    def forward(ctx: Any, gradient_seconds: list[float], *weights: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        ctx.made, ctx.shapes = gradient_seconds, [weight.shape for weight in weights]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # noqa: ANN401
        started = time.perf_counter()
        gradients = tuple(torch.ones(shape) for shape in ctx.shapes)
        ctx.made.append(time.perf_counter() - started)
        return None, *gradients


PAUSE_S = 2e-3
"""Long enough for a processor to idle."""
LONGEST_S = 0.02
"""Of computing before a collective."""
UNUSUAL = 10.0
"""Medians, beyond which it was something else that took a processor."""

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
    if operation.context.device.type == "cpu" and operation.kind != "p2p":
        return _time_behind_computing(operation, sizes, pace)
    works = [_work(operation, size) for size in sizes]
    # A round trip is two messages.
    messages = 2 if operation.kind == "p2p" else 1
    repeats = 4 if operation.context.device.type == "cuda" else 1
    rounds = max(1, pace.iterations // repeats)

    def time_work(work: Work, calls: int) -> float:
        time.sleep(operation.pause_s)
        return _mean_seconds(operation.context, work, calls)

    _rounds(operation.group, [partial(time_work, work, 1) for work in works], pace.warm_up, pace)
    times = _rounds(operation.group, [partial(time_work, work, repeats) for work in works], rounds, pace)
    if operation.kind == "p2p" and not operation.begins:
        return None
    return [statistics.median(each) / messages for each in times]


def _time_behind_computing(operation: Operation, sizes: Sequence[int], pace: Pace) -> list[float]:
    made = {"all_reduce": reducing, "all_gather": gathering, "reduce_scatter": scattering}[operation.kind]
    works = [made(size, operation.group) for size in sizes]
    computing = Computing(operation.context.device)
    # The first call of each makes what later ones find, and the quickest tells what another process did not hold up.
    quickest_s = [min([work() for _ in range(1 + pace.warm_up)][1:]) for work in works]
    lasting = computing.counts([min(seconds, LONGEST_S) for seconds in quickest_s])
    counts = [int(_agree(each, dist.ReduceOp.MIN, operation.group)) for each in lasting]

    def time_work(work: Callable[[], float], count: int) -> float:
        dist.barrier(operation.group)
        computing(count)
        return work()

    turns = [partial(time_work, work, count) for work, count in zip(works, counts, strict=True)]
    every = torch.tensor(_rounds(operation.group, turns, pace.iterations, pace), dtype=torch.float64)
    dist.all_reduce(every, group=operation.group)
    return [_mean_of_usual(each) / len(operation.ranks) for each in every.tolist()]


def _mean_of_usual(seconds: Sequence[float]) -> float:
    """Return the mean, where none counts as more than ``UNUSUAL`` medians.

    >>> _mean_of_usual([1.0, 1.0, 4.0]), _mean_of_usual([1.0, 1.0, 1000.0])
    (2.0, 4.0)
    """
    most = UNUSUAL * statistics.median(seconds)
    return statistics.fmean(min(each, most) for each in seconds)


def _rounds(group: dist.ProcessGroup, turns: Sequence[Callable[[], float]], most: int, pace: Pace) -> list[list[float]]:
    """Take all turns, round by round, until the ranks have spent the budget; return the seconds of each."""
    times: list[list[float]] = [[] for _ in turns]
    started = time.perf_counter()
    for number in range(most):
        for turn, seconds in zip(turns, times, strict=True):
            seconds.append(turn())
        spent = time.perf_counter() - started
        if number + 1 >= pace.least and _agree(spent, dist.ReduceOp.MAX, group) > pace.budget_s:
            break
    return times


def _agree(value: float, how: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> float:
    """Return the least or the largest of the group's values, so that all ranks of it go on alike."""
    shared = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(shared, how, group=group)
    return float(shared)


def _mean_seconds(context: RankContext, work: Work, repeats: int) -> float:
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
        send, receive = partial(channel.send, whole), lambda: channel.receive(whole).wait()
    both = (send, receive) if operation.begins else (receive, send)
    return lambda: [each() for each in both]


ROUNDS, WARM_UP = 8, 2
_MESSAGE_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
"""Bound by bandwidth."""


def measure_overlap(context: RankContext, group: dist.ProcessGroup) -> tuple[float, float]:
    """Return how many times as long computing and communicating take at once; all ranks of the group call this.

    A round times matrix products alone, an all-reduce alone, and both at once; medians over rounds are compared.
    """
    message = torch.zeros(_MESSAGE_BYTES[context.device.type] // 4, device=context.device)
    both = _ComputingAndReducing(context.device, group, Computing(context.device))
    for _ in range(WARM_UP):
        reduced_s = both.seconds(message, 0)[1]
        product_s = both.seconds(None, 4)[0] / 4
    # Products that last as long as the all-reduce, on the slowest rank.
    count = int(_agree(max(1, round(reduced_s / product_s)), dist.ReduceOp.MAX, group))
    found: list[tuple[float, float, float, float]] = []
    for _ in range(WARM_UP + ROUNDS):
        computed_s, reduced_s = both.seconds(None, count)[0], both.seconds(message, 0)[1]
        found.append((computed_s, reduced_s, *both.seconds(message, count)))
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
    for single_s, both_s in ((compute_s, both_compute_s), (communicate_s, both_communicate_s)):
        done_meanwhile = single_s - (both_s - overlapped)
        factors.append(max(1.0, overlapped / done_meanwhile if done_meanwhile > 0 else both_s / single_s))
    return factors[0], factors[1]


class _ComputingAndReducing(NamedTuple):
    """Products of matrices and an all-reduce that begin together."""

    device: torch.device
    group: dist.ProcessGroup
    compute: Callable[[int], None]

    def seconds(self, message: torch.Tensor | None, count: int) -> tuple[float, float]:
        """Return the seconds until so many products, and until the message's reduction are done."""
        dist.barrier(self.group)
        if self.device.type == "cuda":
            return self._on_streams(message, count)
        started = time.perf_counter()
        work = None if message is None else dist.all_reduce(message, group=self.group, async_op=True)
        ended: list[float] = []
        if work is not None:
            # Noted when it ends, which may be while this thread computes.
            work.get_future().add_done_callback(lambda future: ended.append(time.perf_counter()))
        self.compute(count)
        computed = time.perf_counter()
        if work is not None:
            work.wait()
        communicated = ended[0] if ended else time.perf_counter()
        return computed - started, communicated - started

    def _on_streams(self, message: torch.Tensor | None, count: int) -> tuple[float, float]:
        torch.cuda.synchronize(self.device)
        started, computed, communicated = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(3)
        )
        side_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        started.record()
        side_stream.wait_event(started)
        with torch.cuda.stream(side_stream):
            if message is not None:
                # Waiting makes this stream, and not the host, wait for NCCL's own.
                work = dist.all_reduce(message, group=self.group, async_op=True)
                assert work is not None
                work.wait()
            communicated.record()
        self.compute(count)
        computed.record()
        torch.cuda.synchronize(self.device)
        return started.elapsed_time(computed) * 1e-3, started.elapsed_time(communicated) * 1e-3
