"""Links: point-to-point and all-reduce times between local ranks, on the backend that training uses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
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
WARM_UP = 2


def measure_links(ranks: int, device: str, threads: int) -> dict[str, Any]:
    """Start local ranks and return what rank 0 reports: ``sizes``, ``p2p`` and ``all_reduce`` by group size."""
    with RankPool(ranks, threads=threads, device_type=device) as pool:
        results = pool.run("autopar.profiler.links:measure", {"sizes": list(SIZES)})
    return cast("dict[str, Any]", results[0])


def measure(context: RankContext, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Measure, in every rank: one-way times between ranks 0 and 1, all-reduce times among 2, 3 ... all ranks."""
    sizes = [int(size) for size in arguments["sizes"]]
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in range(2, context.size + 1)}
    one_way = [_ping_pong(context, size) for size in sizes]
    reduced: dict[str, list[float]] = {}
    for ranks, group in groups.items():
        if context.rank < ranks:
            reduced[str(ranks)] = [_all_reduce(context, size, group) for size in sizes]
        context.barrier()
    return {"sizes": sizes, "p2p": one_way, "all_reduce": reduced}


def _repeats(size: int) -> int:
    return 5 if size >= 8 * 2**20 else 15


def _ping_pong(context: RankContext, size: int) -> float:
    """Return half of a round trip between ranks 0 and 1; other ranks wait."""
    tensor = torch.zeros(size // 4, device=context.device)
    times = []
    context.barrier()
    for _ in range(WARM_UP + _repeats(size)):
        if context.rank == 0:
            times.append(_timed(context, lambda: (dist.send(tensor, 1), dist.recv(tensor, 1))))
        elif context.rank == 1:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)
    return statistics.median(times[WARM_UP:]) / 2 if times else 0.0


def _all_reduce(context: RankContext, size: int, group: dist.ProcessGroup) -> float:
    tensor = torch.zeros(size // 4, device=context.device)
    times = []
    for _ in range(WARM_UP + _repeats(size)):
        dist.barrier(group)
        times.append(_timed(context, lambda: dist.all_reduce(tensor, group=group)))
    return statistics.median(times[WARM_UP:])


def _timed(context: RankContext, work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
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


def _rising(seconds: list[float]) -> tuple[float, ...]:
    """Return the times without falls: a larger message is never faster."""
    highest, rising = 0.0, []
    for value in seconds:
        highest = max(highest, float(value))
        rising.append(highest)
    return tuple(rising)
