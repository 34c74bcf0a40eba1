"""Links: point-to-point and all-reduce times between local ranks, on the backend that training uses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from autopar.formats.cluster import Cluster, Curve, Device, Link
from autopar.formats.profile import DeviceKind
from autopar.ranks.context import RankContext
from autopar.ranks.pool import RankPool

__all__ = ["SIZES", "local_cluster", "measure", "measure_links"]

# Twelve sizes from 1 KiB to 64 MiB, evenly on a logarithmic scale, whole numbers of 64 bytes.
SIZES = tuple(round(2 ** (10 + 16 * index / 11) / 64) * 64 for index in range(12))
WARM_UP, ROUNDS = 2, 25
# Messages from here on take long enough to be measured well in a few rounds.
LARGE_BYTES, LARGE_ROUNDS = 4 * 2**20, 5


def measure_links(ranks: int, device: str, threads: int) -> dict[str, Any]:
    """Start local ranks and return what rank 0 reports: ``sizes``, ``p2p`` and ``all_reduce`` by group size."""
    with RankPool(ranks, threads=threads, device_type=device) as pool:
        results = pool.run("autopar.profiler.links:measure", {"sizes": list(SIZES)})
    return cast("dict[str, Any]", results[0])


def measure(context: RankContext, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Measure, in every rank: one-way times between ranks 0 and 1, all-reduce times among 2, 3 ... all ranks."""
    sizes = [int(size) for size in arguments["sizes"]]
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in range(2, context.size + 1)}
    one_way = _in_rounds(context, sizes, lambda tensor: _ping_pong(context, tensor)) if context.rank < 2 else []
    context.barrier()
    reduced: dict[str, list[float]] = {}
    for ranks, group in groups.items():
        if context.rank < ranks:
            reduced[str(ranks)] = _in_rounds(context, sizes, partial(_all_reduce, group=group))
        context.barrier()
    return {"sizes": sizes, "p2p": [seconds / 2 for seconds in one_way], "all_reduce": reduced}


def _in_rounds(context: RankContext, sizes: Sequence[int], work: Callable[[torch.Tensor], None]) -> list[float]:
    """Return the median time at every size; rounds over all sizes spread the machine's drift evenly."""
    tensors = [torch.zeros(size // 4, device=context.device) for size in sizes]
    times: list[list[float]] = [[] for _ in sizes]
    for number in range(WARM_UP + ROUNDS):
        for tensor, found in zip(tensors, times, strict=True):
            if number < WARM_UP + LARGE_ROUNDS or tensor.nbytes < LARGE_BYTES:
                found.append(_timed(context, work, tensor))
    return [statistics.median(found[WARM_UP:]) for found in times]


def _ping_pong(context: RankContext, tensor: torch.Tensor) -> None:
    """Make a round trip between ranks 0 and 1."""
    if context.rank == 0:
        dist.send(tensor, 1)
        dist.recv(tensor, 1)
    else:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)


def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(tensor, group=group)


def _timed(context: RankContext, work: Callable[[torch.Tensor], None], tensor: torch.Tensor) -> float:
    started = time.perf_counter()
    work(tensor)
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)
    return time.perf_counter() - started


def local_cluster(measured: Mapping[str, Any], kind: DeviceKind, count: int) -> Cluster:
    """Return this machine as a cluster of ``count`` devices with the measured times."""
    sizes, one_way = tuple(measured["sizes"]), _rising(measured["p2p"])
    rate = (sizes[-1] - sizes[0]) / max(one_way[-1] - one_way[0], 1e-12)
    curves = [Curve(kind="p2p", ranks=2, level="node", sizes=sizes, seconds=one_way)]
    for ranks, seconds in measured["all_reduce"].items():
        curves.append(Curve(kind="all_reduce", ranks=int(ranks), level="node", sizes=sizes, seconds=_rising(seconds)))
    largest = max(curve.ranks for curve in curves)
    notes = [f"all-reduce was measured among up to {largest} ranks; times of larger groups are estimated from that"]
    return Cluster(
        name="local",
        backend="nccl" if kind.type == "cuda" else "gloo",
        devices=(Device(type=kind.type, memory_bytes=kind.memory_bytes),) * count,
        links=(Link(level="node", latency_s=one_way[0], bytes_per_s=rate, provenance="measured"),),
        curves=tuple(curves),
        notes=tuple(notes) if largest < count else (),
    )


def _rising(seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the nearest times that never fall as messages grow: neighbours that fall are replaced by their mean.

    >>> _rising([1.0, 4.0, 2.0, 5.0])
    (1.0, 3.0, 3.0, 5.0)
    """
    pools: list[tuple[float, int]] = []
    for value in seconds:
        pools.append((float(value), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (one, many), (other, more) = pools.pop(-2), pools.pop(-1)
            pools.append(((one * many + other * more) / (many + more), many + more))
    return tuple(mean for mean, count in pools for _ in range(count))
