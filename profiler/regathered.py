"""Regathered: a cluster whose gathers and scatters take as long as those of a run that divided what it trained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from autopar.formats.cluster import LEVELS, Cluster, Level
from autopar.formats.own_times import OwnTimes
from autopar.formats.plan import SCATTERING, Plan
from autopar.formats.program import BACKWARDS, FORWARD, Action
from autopar.hardware.topology import Topology
from autopar.profiler.relinked import slowed

_KINDS = ("all_gather", "reduce_scatter")
_LEAST = 0.01
"""Of what actions take: gathers that are predicted to be less of it are hidden, and not told from noise."""


class _Added(NamedTuple):
    """Seconds that gathers and scatters add to computing."""

    measured_s: float
    predicted_s: float


def ungathered(cluster: Cluster) -> Cluster:
    """Return a cluster where nothing that has a curve takes time to be gathered or scattered."""
    return _times(cluster, dict.fromkeys(LEVELS, 0.0))


def regathered(cluster: Cluster, plan: Plan, measured: OwnTimes, predicted: OwnTimes, computing: OwnTimes) -> Cluster:
    """Return a cluster with curves of gathers and scatters as a run found them; as it is, where it does not tell.

    What stages that divide gradients or parameters took beyond computing is taken for these, of a level together.

    Args:
        cluster: what the plan was made for.
        plan: what was run.
        measured: every action's seconds.
        predicted: what the cluster has of them.
        computing: what they take where the cluster is :func:`ungathered`.
    """
    added: dict[Level, list[_Added]] = defaultdict(list)
    for level, key in _actions(cluster, plan, predicted):
        more_s = predicted[key] - computing[key]
        if key in measured and more_s > _LEAST * predicted[key]:
            added[level].append(_Added(measured[key] - computing[key], more_s))
    factors = {
        level: sum(each.measured_s for each in found) / sum(each.predicted_s for each in found)
        for level, found in added.items()
    }
    return _times(cluster, {level: factor for level, factor in factors.items() if factor > 0})


def _actions(cluster: Cluster, plan: Plan, times: OwnTimes) -> Iterator[tuple[Level, tuple[int, Action]]]:
    """Yield what computes and communicates at once, and at which level."""
    topology = Topology.of(cluster, plan)
    for rank, action in times:
        stage = plan.stages[action.stage]
        if action.kind in (FORWARD, *BACKWARDS) and stage.shard in SCATTERING:
            yield topology.level(stage.devices), (rank, action)


def _times(cluster: Cluster, factors: Mapping[Level, float]) -> Cluster:
    """Multiply the seconds of gathers and scatters, by level."""
    curves = tuple(
        slowed(curve, factors[curve.level]) if curve.kind in _KINDS and curve.level in factors else curve
        for curve in cluster.curves
    )
    return cluster.model_copy(update={"curves": curves})
