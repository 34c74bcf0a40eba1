"""PiperPlan: the plan that Piper's objective calls best: the least time per sample of the slowest stage."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from autopar.errors import InfeasibleError
from autopar.formats.cluster import Cluster
from autopar.hardware.topology import Topology
from autopar.planner.infeasible import nothing_fits
from reproductions.piper_files import PiperProfile
from reproductions.piper_moves import PiperMoves, in_flight
from reproductions.piper_options import Task
from reproductions.piper_stages import PiperStages, Stage

__all__ = ["PiperPlan", "PiperStage", "piper_plan"]

MOST_TRIED = 16
"""Numbers of devices, and doublings of the memory, where no plan fits."""
_NEAR = 0.02
"""Where bisection has come so near, what is left is proved plan by plan."""
_STEP, _STEPS = 1.06, 16


class PiperStage(NamedTuple):
    """Layers ``first`` to before ``stop`` on ``replicas`` groups of ``tensor_parallel`` devices."""

    first: int
    stop: int
    replicas: int
    tensor_parallel: int
    options: tuple[str, ...]
    """Name of each layer's option."""
    recompute: tuple[bool, ...]
    """Whether each layer's is one that recomputes."""
    in_flight: int
    seconds: float
    """Per micro-batch."""
    memory_bytes: int
    """Of each device, by Piper's rule."""


class PiperPlan(NamedTuple):
    """Stages in order, and what the slowest takes per micro-batch."""

    stages: tuple[PiperStage, ...]
    bottleneck_s: float

    @property
    def devices(self) -> int:
        """How many are used."""
        return sum(stage.replicas * stage.tensor_parallel for stage in self.stages)


class _Suffix(NamedTuple):
    """Stages from some layer on: what they take of the devices, and the way back to the last one."""

    devices: int
    replicas: int
    bottleneck_s: float
    stage: Stage | None
    in_flight: int
    behind: _Suffix | None


def piper_plan(
    profile: PiperProfile,
    cluster: Cluster,
    gpus: int | None = None,
    *,
    memory_bytes: int | None = None,
    bytes_per_s: float | None = None,
    batch: int | None = None,
) -> PiperPlan:
    """Return the plan with the least time per sample of its slowest stage, by Piper's objective and memory rule.

    Exact over stages of consecutive layers, replicas that divide the micro-batches of a batch, and every layer's
    options. With d replicas of its own and s of itself and all stages behind, a stage has ceil(s / d) micro-batches in
    flight; s is at most the number of micro-batches.

    Args:
        profile: its batch counts micro-batches.
        cluster: devices; the least of their memory, and the bandwidth between nodes if there are several.
        gpus: at most this many devices, the first of the cluster; none: all.
        memory_bytes: of a device, in place of the cluster's.
        bytes_per_s: in place of the cluster's.
        batch: micro-batches per batch in place of the profile's.

    >>> from pathlib import Path
    >>> from autopar.formats.cluster import Device, Link
    >>> from reproductions.piper_files import piper_profile
    >>> way = '"timePerSample": 0.5, "parameterSize": 0, "memoryUsageB": 0, "syncTimeFw": {}, "syncTimeBw": {}'
    >>> ways = f'"TMPCs": {{"1": [{{"id": "vanilla", "memoryUsageA": 100, {way}}}]}}'
    >>> limits = '"maxMemoryPerDevice": 100, "maxDevices": 8, "mbsInBatch": 12, "bandwidth": 1e9'
    >>> profile = piper_profile(f'{{{limits}, "nodes": [{{"id": 0, {ways}}}], "edges": []}}', Path("one.json"))
    >>> node = Link(level="node", latency_s=0.0, bytes_per_s=1e9)
    >>> cluster = Cluster(devices=(Device(type="cuda", memory_bytes=100),) * 5, links=(node,))
    >>> plan = piper_plan(profile, cluster)
    >>> [(stage.replicas, stage.options, stage.memory_bytes) for stage in plan.stages], plan.bottleneck_s
    ([(4, ('vanilla',), 100)], 0.125)

    Raises:
        InfeasibleError: no plan fits the memory, or the cluster has fewer devices.
    """
    task = _task(profile, cluster, gpus, memory_bytes, bytes_per_s, batch)
    stages = PiperStages(profile, task)
    best = _least(stages)
    if best is None:
        text = f"no plan of Piper's fits {task.devices} devices of {task.memory_bytes} bytes"
        raise nothing_fits(text, [f"with {each}" for each in _remedies(profile, cluster, task)])
    return _written(profile, stages, best)


def _remedies(profile: PiperProfile, cluster: Cluster, task: Task) -> Iterator[str]:
    """Yield with how many of the cluster's devices, and with how many times the memory, a plan fits."""

    def fits(other: Task) -> bool:
        return _least(PiperStages(profile, other)) is not None

    more = range(task.devices + 1, min(len(cluster.devices), task.devices + MOST_TRIED) + 1)
    yield from islice((f"`gpus={count}`" for count in more if fits(task._replace(devices=count))), 1)
    sizes = (task.memory_bytes << step for step in range(1, MOST_TRIED))
    sizes = (size for size in sizes if fits(task._replace(memory_bytes=size)))
    yield from islice((f"`memory_bytes={size!r}`" for size in sizes), 1)


def _task(
    profile: PiperProfile,
    cluster: Cluster,
    gpus: int | None,
    memory_bytes: int | None,
    bytes_per_s: float | None,
    batch: int | None,
) -> Task:
    used = cluster.devices[:gpus]
    if gpus is not None and len(used) < gpus:
        raise InfeasibleError(
            f"`gpus={gpus}`: cluster {cluster.name!r} has {len(used)} devices; use `gpus={len(used)}`"
        )
    level = Topology(cluster, used).level(range(len(used)))
    rate = max(link.bytes_per_s for link in cluster.links if link.level == level)
    least = min(device.memory_bytes for device in used)
    return Task(len(used), memory_bytes or least, bytes_per_s or rate, batch or profile.batch)


def _least(stages: PiperStages) -> _Suffix | None:
    """Return the best of all plans; none if nothing fits.

    Goes up from a bound of work to a first plan, then by bisection to one that no plan is proved to be better than.
    """
    low, best = float(stages.work_s[-1]) / stages.task.devices, None
    for _ in range(_STEPS):
        best = best or _pack(stages, low * _STEP)
        low = low * _STEP if best is None else low
    best = best or _pack(stages, sys.float_info.max)
    while best is not None and best.bottleneck_s > 0:
        near = best.bottleneck_s - low <= _NEAR * best.bottleneck_s
        limit = float(np.nextafter(best.bottleneck_s, 0.0)) if near else (low + best.bottleneck_s) / 2
        found = _pack(stages, limit)
        if found is None and near:
            break
        low, best = (limit, best) if found is None else (low, found)
    return best


def _pack(stages: PiperStages, most_s: float) -> _Suffix | None:
    """Return a plan of which no stage takes longer; none if there is none.

    Goes from the last layer to the first. Of the suffixes from a layer on only those are kept of which none is beaten
    in both devices and replicas: whatever can be put before a suffix can be put before one that uses fewer. For the
    same reason only the fewest replicas are tried that make a stage quick and small enough.
    """
    moves = PiperMoves(stages, most_s)
    found: list[list[_Suffix]] = [[] for _ in range(stages.layers)]
    found.append([_Suffix(0, 0, 0.0, None, 0, None)])
    for stop in range(stages.layers, 0, -1):
        for suffix in _front(found[stop]):
            for stage, seconds in moves.before(stop, suffix.devices, suffix.replicas):
                found[stage.first].append(_joined(suffix, stage, seconds))
    return min(found[0], key=lambda each: (each.bottleneck_s, each.devices, each.replicas), default=None)


def _front(suffixes: list[_Suffix]) -> list[_Suffix]:
    kept: list[_Suffix] = []
    for suffix in sorted(suffixes, key=lambda each: each[:3]):
        if not kept or suffix.replicas < kept[-1].replicas:
            kept.append(suffix)
    return kept


def _joined(behind: _Suffix, stage: Stage, seconds: float) -> _Suffix:
    return _Suffix(
        devices=behind.devices + stage.group * stage.replicas,
        replicas=behind.replicas + stage.replicas,
        bottleneck_s=max(behind.bottleneck_s, seconds),
        stage=stage,
        in_flight=in_flight(behind.replicas, stage.replicas),
        behind=behind,
    )


def _written(profile: PiperProfile, stages: PiperStages, plan: _Suffix) -> PiperPlan:
    written, suffix = [], plan
    while suffix.stage is not None and suffix.behind is not None:
        written.append(_stage(profile, stages, suffix.stage, suffix.in_flight))
        suffix = suffix.behind
    return PiperPlan(tuple(written), max(stage.seconds for stage in written))


def _stage(profile: PiperProfile, stages: PiperStages, stage: Stage, flights: int) -> PiperStage:
    choice, seconds = stages.choice(stage, flights)
    layers = profile.layers[stage.first : stage.stop]
    ways = [[each for each in layer.ways if each.tensor_parallel == stage.group] for layer in layers]
    options = [each[index] for each, index in zip(ways, choice.options, strict=True)]
    return PiperStage(
        first=stage.first,
        stop=stage.stop,
        replicas=stage.replicas,
        tensor_parallel=stage.group,
        options=tuple(option.name for option in options),
        recompute=tuple(option.recompute for option in options),
        in_flight=flights,
        seconds=seconds,
        memory_bytes=choice.bytes,
    )
