"""Links: what ranks measure of them becomes a cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import cast

from autopar.errors import UsageError
from autopar.formats.cluster import Cluster, Curve, Device, Level, Link, Overlap
from autopar.formats.profile import DeviceKind, DeviceType
from autopar.profiler.device import choose, count, describe
from autopar.profiler.probe import LinkMeasurements, MeasuredCurve, Probe, measure
from autopar.progress import Progress, no_progress
from autopar.ranks.board import STEPPING, Note
from autopar.ranks.context import join_from_environment
from autopar.ranks.environment import rank_from_environment
from autopar.ranks.monitor import Doing
from autopar.ranks.pool import RankPool

_TIMEOUT_S = 300.0
_PROBE = "autopar.profiler.probe"


def measure_links(
    ranks: int,
    device: str,
    threads: int,
    probe: Probe | None = None,
    progress: Progress = no_progress,
) -> LinkMeasurements:
    """Start local ranks, and return what they measure on the backend that training uses; by default what is quick.

    Raises:
        TrainingError: a rank failed, was lost, or stood still; names it.
    """
    with RankPool(ranks, threads=threads, device_type=device, timeout_s=_TIMEOUT_S, imports=[_PROBE]) as pool:
        results = pool.run(
            f"{_PROBE}:measure",
            asdict(probe or Probe(quick=True)),
            describe=_describe,
            on_message=lambda rank, message: progress(str(message["doing"]), float(str(message["share"]))),
        )
    return cast("LinkMeasurements", results[0])


def cluster_here(
    ranks: int | None, device: str, threads: int, probe: Probe | None, name: str, progress: Progress
) -> Cluster:
    """Return this machine's devices and links, measured between some ranks; None: as many as GPUs, or 2.

    Raises:
        UsageError: it has no such devices, or too few.
    """
    chosen = choose(device)
    started = ranks or (count(chosen) if chosen.type == "cuda" else 2)
    if chosen.type == "cuda" and not 2 <= started <= count(chosen):
        raise UsageError(f"{started} ranks: this machine has {count(chosen)} GPUs, and links connect at least 2 ranks")
    progress("starting ranks", 0.0)
    measured = measure_links(started, chosen.type, threads, probe, progress)
    return local_cluster(measured, describe(chosen, threads), max(started, count(chosen)), name)


def measure_from_environment(
    device: str, threads: int, probe: Probe, progress: Progress = no_progress
) -> LinkMeasurements | None:
    """Measure as one of the ranks that torchrun has started; rank 0 returns what all found.

    Raises:
        UsageError: the environment is incomplete.
        TrainingError: a rank failed, or was lost.
    """
    import torch

    torch.set_num_threads(threads)
    launch = rank_from_environment(os.environ)
    with join_from_environment(launch, device, _TIMEOUT_S, launch.size) as context:
        told = replace(context, report=lambda message: progress(str(message["doing"]), float(str(message["share"]))))
        measured = measure(told, asdict(probe))
        return measured if context.rank == 0 else None


def _describe(rank: int, note: Note) -> Doing:
    return Doing("measuring links" if note.phase == STEPPING else "setting up", waiting=False)


def local_cluster(measurements: LinkMeasurements, kind: DeviceKind, count: int, name: str = "local") -> Cluster:
    """Return this machine as a cluster of ``count`` devices with the measured times."""
    largest = max(curve["ranks"] for curve in measurements["curves"])
    notes = [f"collectives were measured among up to {largest} ranks; times of larger groups are estimated from that"]
    cluster = measured_cluster(measurements, kind.type, name)
    return cluster.model_copy(
        update={
            "devices": (Device(type=kind.type, memory_bytes=kind.memory_bytes),) * count,
            "notes": (*(notes if largest < count else ()), *cluster.notes),
        }
    )


def measured_cluster(measurements: LinkMeasurements, device: DeviceType, name: str) -> Cluster:
    """Return what was measured as a cluster with a device per rank, in rank order; GPUs that differ by their names."""
    several = device == "cuda" and len(set(measurements["names"])) > 1
    types = [name if several else device for name in measurements["names"]]
    places = zip(types, measurements["nodes"], measurements["memory_bytes"], strict=True)
    return Cluster(
        name=name,
        backend="nccl" if device == "cuda" else "gloo",
        devices=tuple(Device(type=kind, memory_bytes=memory, node=node) for kind, node, memory in places),
        links=_links(measurements["curves"]),
        curves=tuple(map(_curve, measurements["curves"])),
        overlaps=tuple(Overlap(**each) for each in measurements["overlaps"]),
        notes=tuple(measurements["notes"]),
    )


def _curve(curve: MeasuredCurve) -> Curve:
    return Curve(
        kind=curve["kind"],
        ranks=curve["ranks"],
        level=curve["level"],
        sizes=tuple(curve["sizes"]),
        seconds=_rising(curve["seconds"]),
    )


def _links(curves: Sequence[MeasuredCurve]) -> tuple[Link, ...]:
    """Return a link per level that was measured; where every node has one rank, nodes have no links of their own."""
    found = {curve["level"]: _link(curve["level"], curve) for curve in curves if curve["kind"] == "p2p"}
    if "node" not in found:
        # A cluster states one, although no two of its devices are in a node.
        found["node"] = found["network"].model_copy(update={"level": "node", "provenance": "estimated"})
    return tuple(found[level] for level in sorted(found, key=("node", "network").index))


def _link(level: Level, curve: MeasuredCurve) -> Link:
    sizes, seconds = curve["sizes"], _rising(curve["seconds"])
    # Times that do not rise at all tell of the largest message alone how fast it went.
    whole_s = seconds[-1] - seconds[0] if seconds[-1] > seconds[0] else seconds[-1]
    rate = (sizes[-1] - sizes[0]) / max(whole_s, 1e-12)
    return Link(level=level, latency_s=seconds[0], bytes_per_s=rate, provenance="measured")


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
