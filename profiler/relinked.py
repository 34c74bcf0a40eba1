"""Relinked: a cluster whose messages take as long as those of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from autopar.formats.cluster import Cluster, Curve, Level, Link
from autopar.formats.own_times import OwnTimes
from autopar.formats.plan import Plan
from autopar.formats.program import SEND, SEND_GRADIENT
from autopar.hardware.topology import Topology
from autopar.profiler.fit import fitted
from autopar.schedules.expand import messages

LEAST_SPREAD = 2
"""Times as large as the smallest message the largest must be for latency and bandwidth to be told apart."""


class _Sample(NamedTuple):
    bytes: int
    measured_s: float
    predicted_s: float


def relinked(cluster: Cluster, plan: Plan, measured: OwnTimes, predicted: OwnTimes) -> Cluster:
    """Return a cluster with links, and curves of messages, as a run found them; as it is, where it measured none.

    Messages of several sizes give a link's latency and bandwidth. Those of one size, and of levels with a curve or with
    several links, give a factor for all of the level's numbers. Collectives are left as they are: a run hides most of
    all-reduces behind backwards, and of others :mod:`autopar.profiler.regathered` knows more.
    """
    samples = _samples(cluster, plan, measured, predicted)
    links = tuple(
        _relinked(link, samples[link.level], _alone(cluster, link)) if samples.get(link.level) else link
        for link in cluster.links
    )
    curves = tuple(
        slowed(curve, _factor(samples[curve.level])) if curve.kind == "p2p" and samples.get(curve.level) else curve
        for curve in cluster.curves
    )
    return cluster.model_copy(update={"links": links, "curves": curves})


def _samples(cluster: Cluster, plan: Plan, measured: OwnTimes, predicted: OwnTimes) -> dict[Level, list[_Sample]]:
    sizes: dict[tuple[str, int, int, int, int], int] = {}
    for each in messages(plan):
        rows = each.stop - each.start
        forth, back = (
            rows * sum(plan.tensors[index].bytes_per_sample for index in indices)
            for indices in (each.tensors, each.gradients)
        )
        sizes[SEND, each.sender, each.producer, each.receiver, each.consumer] = forth
        sizes[SEND_GRADIENT, each.receiver, each.consumer, each.sender, each.producer] = back
    topology = Topology.of(cluster, plan)
    found: dict[Level, list[_Sample]] = defaultdict(list)
    for (rank, action), seconds in measured.items():
        if action.kind in (SEND, SEND_GRADIENT) and predicted.get((rank, action), 0.0) > 0:
            size = sizes[action.kind, rank, action.stage, action.peer, action.peer_stage]
            level = topology.pair(plan.devices[rank], plan.devices[action.peer])
            found[level].append(_Sample(size, seconds, predicted[rank, action]))
    return found


def _alone(cluster: Cluster, link: Link) -> bool:
    """Whether nothing but a link says what messages of its level take."""
    beside = sum(other.level == link.level for other in cluster.links)
    return beside == 1 and not any(curve.kind == "p2p" and curve.level == link.level for curve in cluster.curves)


def _factor(samples: Sequence[_Sample]) -> float:
    return median(sample.measured_s / sample.predicted_s for sample in samples)


def _relinked(link: Link, samples: Sequence[_Sample], alone: bool) -> Link:
    by_size: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        by_size[sample.bytes].append(sample.measured_s)
    sizes = sorted(size for size in by_size if size > 0)
    if alone and sizes and sizes[-1] >= LEAST_SPREAD * sizes[0]:
        line = fitted(sizes, [median(by_size[size]) for size in sizes])
        if line is not None and line.per_sample_s > 0:
            # A price assumes that all who share a link send at once.
            shared = link.shared_by * (2 if link.duplex == "half" else 1)
            update = {"latency_s": line.fixed_s, "bytes_per_s": max(1.0, shared / line.per_sample_s)}
            return link.model_copy(update={**update, "provenance": "measured"})
    factor = _factor(samples)
    bytes_per_s = max(1.0, link.bytes_per_s / factor) if factor > 0 else link.bytes_per_s
    update = {"latency_s": link.latency_s * factor, "bytes_per_s": bytes_per_s}
    return link.model_copy(update={**update, "provenance": "measured"})


def slowed(curve: Curve, factor: float) -> Curve:
    """Return a curve whose seconds are multiplied, as a run measured them."""
    seconds = tuple(seconds * factor for seconds in curve.seconds)
    return curve.model_copy(update={"seconds": seconds, "provenance": "measured"})
