"""Recalibrate: a profile and a cluster with the times that a run measured.

In come what a plan was made of, and every action's measured and predicted seconds; out come layers whose times are
multiplied by what their stages took longer, links and curves whose messages take as long as those of the run, and
curves of gathers and scatters where ranks divided what they trained.

- A stage's forwards, backwards, halves and updates over the predicted ones correct the layers of the stage. In steps 2
  to 5 every layer is timed inside its stage, so that each gets its own part of that: a backward of a layer lasts from
  the gradients of its outputs to those of the next layer's. Stages whose backwards go in halves, and runs too short for
  it, correct all layers of a stage alike.
- Layers that were measured as one stay alike: they have the median of their corrections.
- Every micro-batch size of a layer is corrected by the same factor; the size that ran is then ``measured``, others are
  as they were.
- Stages on several kinds of devices tell nothing of any. Nor do those that divide gradients or parameters: they gather
  and scatter while they compute, and the seconds beyond the profile's computing are taken for that. They correct the
  curves of all-gathers and reduce-scatters, unless computing is predicted to hide them. Updates of stages that divide
  anything correct none: a gather is predicted behind them, which runs do in the next forward.
- Messages of at least two sizes, the largest twice the smallest, give a link's latency and bandwidth. Messages of one
  size, curves, and levels with several links are multiplied by measured over predicted. All-reduces stay as they are:
  a run hides most of them behind backwards.
- ``step_overhead_s`` is the time of a step before its first action.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from autopar.formats.cluster import LEVELS, Cluster, Curve, CurveKind, Level, Link
from autopar.formats.document import Record
from autopar.formats.plan import Plan
from autopar.formats.profile import Cost, Layer, Line, Profile
from autopar.formats.program import (
    BACKWARD,
    BACKWARDS,
    FORWARD,
    INPUT_BACKWARD,
    SEND,
    SEND_GRADIENT,
    UPDATE,
    WEIGHT_BACKWARD,
)
from autopar.formats.stage import Stage
from autopar.formats.timeline import OwnTimes
from autopar.hardware.topology import Topology
from autopar.ownership import SCATTERING
from autopar.profiler.measure import fit_line
from autopar.schedules.expand import messages

LayerSeconds = Sequence[Mapping[str, tuple[float, float]]]
"""By rank, the median seconds of its layers forward and backward; empty where they were not timed."""
NOTE = "times of layers are those of a run, where it computed with them"


class _Factors(NamedTuple):
    """What a layer's times are multiplied by."""

    forward: float = 1.0
    backward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    update: float = 1.0


def correct_profile(
    profile: Profile,
    plan: Plan,
    measured_times: OwnTimes,
    predicted_times: OwnTimes,
    layers_s: LayerSeconds,
    overhead_s: float,
) -> Profile:
    """Return a profile from which the plan's program is predicted to take what it took.

    A stage's measured times over the predicted ones are its layers' together; where layers were timed, each has its own
    part of that. Layers that were measured as one stay alike. Stages tell nothing that are on several kinds of devices,
    or that gather or scatter while they compute: what that takes is not the layers'.

    Args:
        profile: what the plan was made of.
        plan: what was run.
        measured_times: every action's seconds.
        predicted_times: what the profile has of them.
        layers_s: what the layers took inside them.
        overhead_s: what a step takes before its first action.
    """
    found = _factors_of_layers(profile, plan, _ratios(measured_times, predicted_times), layers_s)
    rows = frozenset(row for stage in plan.stages for row in stage.rows)
    others = tuple(
        other.model_copy(update={"layers": _scale_layers(other.layers, found.get(other.device.name, {}), rows)})
        for other in profile.others
    )
    layers = _scale_layers(profile.layers, found.get(profile.device.name, {}), rows)
    notes = (*(note for note in profile.notes if note != NOTE), NOTE) if any(found.values()) else profile.notes
    update = {"layers": layers, "others": others, "step_overhead_s": overhead_s, "notes": notes}
    return profile.model_copy(update=update)


def _ratios(measured_times: OwnTimes, predicted_times: OwnTimes) -> OwnTimes:
    """Return measured over predicted seconds of the actions that have both."""
    return {
        key: measured_times[key] / seconds
        for key, seconds in predicted_times.items()
        if seconds > 0 and key in measured_times
    }


def _factors_of_layers(
    profile: Profile, plan: Plan, ratios: OwnTimes, layers_s: LayerSeconds
) -> Mapping[str, Mapping[str, Sequence[_Factors]]]:
    """Return, by kind of device and name of a layer, what every rank found; ``ratios`` are measured over predicted."""
    found: dict[str, dict[str, list[_Factors]]] = defaultdict(lambda: defaultdict(list))
    for rank in range(len(plan.devices)):
        for index in plan.ownership.ranks[rank].stages:
            kind, stage = _kind_of(plan.stages[index], profile), plan.stages[index]
            if kind is not None and stage.shard not in SCATTERING:
                whole = _stage_factors(plan, index, rank, ratios)
                for name, factors in _layer_factors(profile, plan, rank, index, kind, whole, layers_s).items():
                    found[kind][name].append(factors)
    return found


def _kind_of(stage: Stage, profile: Profile) -> str | None:
    """Return the kind of a stage's devices; none where there are several."""
    if len(stage.types) > 1:
        return None
    return stage.types[0] if stage.types else profile.device.name


def _stage_factors(plan: Plan, stage: int, rank: int, ratios: OwnTimes) -> _Factors:
    """Return a stage's measured over predicted times on one rank."""
    found: dict[str, list[float]] = defaultdict(list)
    for (other, action), ratio in ratios.items():
        # Of a rank's stages, an update names one.
        if other == rank and (action.stage == stage or action.kind == UPDATE):
            found[action.kind].append(ratio)
    backwards = [ratio for kind in BACKWARDS for ratio in found[kind]]
    whole, by_input, by_weight = (
        _middle(found[kind] or backwards) for kind in (BACKWARD, INPUT_BACKWARD, WEIGHT_BACKWARD)
    )
    # Where replicas divide what they hold, an update is predicted with the gathering behind it, which a run does in the
    # next step's first forward.
    update = _middle(found[UPDATE]) if plan.stages[stage].shard == "none" else 1.0
    return _Factors(_middle(found[FORWARD]), whole, by_input, by_weight, update)


def _middle(ratios: Sequence[float]) -> float:
    return median(ratios) if ratios else 1.0


def _layer_factors(
    profile: Profile, plan: Plan, rank: int, stage: int, kind: str, ratios: _Factors, layers_s: LayerSeconds
) -> dict[str, _Factors]:
    """Return the factors of a stage's layers on one rank."""
    placed, own_rows = plan.stages[stage], plan.ownership.ranks[rank].rows
    layers = next((each.layers for each in profile.kinds if each.device.name == kind), profile.layers)
    mine = [layer for layer in layers if layer.name in placed.layers]
    timed = layers_s[rank] if layers_s else {}
    parts, rows = [], len(own_rows)
    kernels, launches = (
        sum(_seconds(layer, placed, rows, at, each) for layer in mine for at in (0, 1)) for each in _QUEUES
    )
    fields = _QUEUES[launches > kernels]
    for place in (0, 1):
        planned = {layer.name: _seconds(layer, placed, rows, place, fields) for layer in mine}
        parts.append(_own_parts(planned, {name: times[place] for name, times in timed.items()}))
    forward, backward = parts
    found = {}
    for layer in mine:
        own = backward[layer.name]
        halves = ratios.backward * own, ratios.input * own, ratios.weight * own
        found[layer.name] = _Factors(ratios.forward * forward[layer.name], *halves, update=ratios.update)
    return found


_QUEUES = ("forward_s", "backward_s"), ("forward_launch_s", "backward_launch_s")
"""Fields of :class:`Cost`: of a device's kernels, and of the host that launches them."""


def _seconds(layer: Layer, stage: Stage, rows: int, place: int, queue: tuple[str, str]) -> float:
    """Return what a profile has of a layer's forward (0) or backward (1) in a stage, in one of the queues."""
    sizes = [cost.micro_batch for cost in layer.costs]
    known = [getattr(cost, queue[place]) or 0.0 for cost in layer.costs]
    if place == 0:
        return float(np.interp(rows, sizes, known))
    if layer.name in stage.recompute:
        forwards = [getattr(cost, queue[0]) or 0.0 for cost in layer.costs]
        if queue is _QUEUES[0]:
            costs = zip(layer.costs, forwards, strict=True)
            forwards = [once_s if cost.recompute_s is None else cost.recompute_s for cost, once_s in costs]
        known = [once_s + more_s for once_s, more_s in zip(known, forwards, strict=True)]
    return float(np.interp(rows, sizes, known)) + layer.accumulate_s


def _own_parts(predicted_s: Mapping[str, float], measured_s: Mapping[str, float]) -> dict[str, float]:
    """Return each layer's part of what was measured over its part of what was planned; 1 where that is not known."""
    known = [name for name, seconds in predicted_s.items() if seconds > 0 and measured_s.get(name, 0.0) > 0]
    if len(known) < sum(seconds > 0 for seconds in predicted_s.values()):
        return dict.fromkeys(predicted_s, 1.0)
    longer = sum(predicted_s[name] for name in known) / (sum(measured_s[name] for name in known) or 1.0)
    return {name: measured_s[name] / predicted_s[name] * longer if name in known else 1.0 for name in predicted_s}


def _scale_layers(
    layers: Sequence[Layer], factors_by_name: Mapping[str, Sequence[_Factors]], rows: frozenset[int]
) -> tuple[Layer, ...]:
    """Multiply the times of layers; those that were measured as one have the median of all their factors."""
    alike: dict[str, list[_Factors]] = defaultdict(list)
    for layer in layers:
        alike[layer.measured_as or layer.name] += factors_by_name.get(layer.name, ())
    return tuple(_scale_layer(layer, alike[layer.measured_as or layer.name], rows) for layer in layers)


def _scale_layer(layer: Layer, all_factors: Sequence[_Factors], rows: frozenset[int]) -> Layer:
    if not all_factors:
        return layer
    factors = _Factors(*(median(column) for column in zip(*all_factors, strict=True)))
    fits = {"forward_fit": factors.forward, "backward_fit": factors.backward}
    lines = {name: _line(getattr(layer, name), factor) for name, factor in fits.items()}
    costs = tuple(_cost(cost, factors, cost.micro_batch in rows) for cost in layer.costs)
    return layer.model_copy(update={"costs": costs, **lines, **_times_of(layer, factors)})


_FACTORS = {
    "forward_s": "forward",
    "backward_s": "backward",
    "backward_input_s": "input",
    "backward_weight_s": "weight",
    "recompute_s": "backward",
    "forward_launch_s": "forward",
    "backward_launch_s": "backward",
    "update_s": "update",
    "accumulate_s": "backward",
    "input_s": "forward",
}
"""What the seconds of layers and of costs are multiplied by."""


def _times_of(record: Record, factors: _Factors) -> dict[str, float]:
    """Return the seconds that a record has, multiplied."""
    known = {name: getattr(record, name, None) for name in _FACTORS}
    return {name: each * getattr(factors, _FACTORS[name]) for name, each in known.items() if each is not None}


def _line(line: Line | None, factor: float) -> Line | None:
    return line and line.model_copy(
        update={"fixed_s": line.fixed_s * factor, "per_sample_s": line.per_sample_s * factor}
    )


def _cost(cost: Cost, factors: _Factors, run: bool) -> Cost:
    """Return a cost's times multiplied; those of the size that was run are measured."""
    return cost.model_copy(update={**_times_of(cost, factors), **({"provenance": "measured"} if run else {})})


LEAST_SPREAD = 2
"""Times as large as the smallest message the largest must be for latency and bandwidth to be told apart."""


class _Sample(NamedTuple):
    bytes: int
    measured_s: float
    predicted_s: float


def correct_links(cluster: Cluster, plan: Plan, measured_times: OwnTimes, predicted_times: OwnTimes) -> Cluster:
    """Return a cluster with links, and curves of messages, as a run found them; as it is, where it measured none.

    Messages of several sizes give a link's latency and bandwidth. Those of one size, and of levels with a curve or with
    several links, give a factor for all of the level's numbers. Collectives are left as they are: a run hides most of
    all-reduces behind backwards, and of others :mod:`autopar.profiler.recalibrate` knows more.
    """
    samples = _samples(cluster, plan, measured_times, predicted_times)
    links = tuple(
        _correct_link(link, samples[link.level], _is_only_price(cluster, link)) if samples.get(link.level) else link
        for link in cluster.links
    )
    factors = {level: _factor(found) for level, found in samples.items()}
    return _scale_curves(cluster, ("p2p",), factors).model_copy(update={"links": links})


def _samples(
    cluster: Cluster, plan: Plan, measured_times: OwnTimes, predicted_times: OwnTimes
) -> dict[Level, list[_Sample]]:
    sizes: dict[tuple[str, int, int, int, int], int] = {}
    for each in messages(plan):
        rows = int(each.samples.rows)
        forth, back = (
            rows * sum(plan.tensors[index].bytes_per_sample for index in indices)
            for indices in (each.tensors, each.gradients)
        )
        sizes[SEND, each.sender, each.producer, each.receiver, each.consumer] = forth
        sizes[SEND_GRADIENT, each.receiver, each.consumer, each.sender, each.producer] = back
    topology = Topology.of(cluster, plan)
    found: dict[Level, list[_Sample]] = defaultdict(list)
    for (rank, action), seconds in measured_times.items():
        if action.kind in (SEND, SEND_GRADIENT) and predicted_times.get((rank, action), 0.0) > 0:
            size = sizes[action.kind, rank, action.stage, action.peer, action.peer_stage]
            level = topology.pair(plan.devices[rank], plan.devices[action.peer])
            found[level].append(_Sample(size, seconds, predicted_times[rank, action]))
    return found


def _is_only_price(cluster: Cluster, link: Link) -> bool:
    """Whether nothing but a link says what messages of its level take."""
    links = sum(other.level == link.level for other in cluster.links)
    return links == 1 and not any(curve.kind == "p2p" and curve.level == link.level for curve in cluster.curves)


def _factor(samples: Sequence[_Sample]) -> float:
    return median(sample.measured_s / sample.predicted_s for sample in samples)


def _correct_link(link: Link, samples: Sequence[_Sample], is_only_price: bool) -> Link:
    by_size: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        by_size[sample.bytes].append(sample.measured_s)
    sizes = sorted(size for size in by_size if size > 0)
    if is_only_price and sizes and sizes[-1] >= LEAST_SPREAD * sizes[0]:
        line = fit_line(sizes, [median(by_size[size]) for size in sizes])
        if line is not None and line.per_sample_s > 0:
            # A price assumes that all who share a link send at once.
            shared = link.shared_by * (2 if link.duplex == "half" else 1)
            update = {"latency_s": line.fixed_s, "bytes_per_s": max(1.0, shared / line.per_sample_s)}
            return link.model_copy(update={**update, "provenance": "measured"})
    factor = _factor(samples)
    bytes_per_s = max(1.0, link.bytes_per_s / factor) if factor > 0 else link.bytes_per_s
    update = {"latency_s": link.latency_s * factor, "bytes_per_s": bytes_per_s}
    return link.model_copy(update={**update, "provenance": "measured"})


def _scale_curves(cluster: Cluster, kinds: Sequence[CurveKind], factors: Mapping[Level, float]) -> Cluster:
    """Return a cluster of whose curves some have their seconds multiplied, by level, as a run measured them."""

    def scale(curve: Curve) -> Curve:
        if curve.kind not in kinds or curve.level not in factors:
            return curve
        seconds = tuple(seconds * factors[curve.level] for seconds in curve.seconds)
        return curve.model_copy(update={"seconds": seconds, "provenance": "measured"})

    return cluster.model_copy(update={"curves": tuple(map(scale, cluster.curves))})


_KINDS: tuple[CurveKind, ...] = ("all_gather", "reduce_scatter")
_LEAST = 0.01
"""Of what actions take: gathers that are predicted to be less of it are hidden, and not told from noise."""


def without_gathering(cluster: Cluster) -> Cluster:
    """Return a cluster where nothing that has a curve takes time to be gathered or scattered."""
    return _scale_curves(cluster, _KINDS, dict.fromkeys(LEVELS, 0.0))


def correct_gathering(
    cluster: Cluster, plan: Plan, measured_times: OwnTimes, predicted_times: OwnTimes, computing: OwnTimes
) -> Cluster:
    """Return a cluster with curves of gathers and scatters as a run found them; as it is, where it does not tell.

    What stages that divide gradients or parameters took beyond computing is taken for these, of a level together.

    Args:
        cluster: what the plan was made for.
        plan: what was run.
        measured_times: every action's seconds.
        predicted_times: what the cluster has of them.
        computing: what they take where the cluster is :func:`without_gathering`.
    """
    topology = Topology.of(cluster, plan)
    added: dict[Level, list[tuple[float, float]]] = defaultdict(list)
    for key, predicted_s in predicted_times.items():
        stage, kind = plan.stages[key[1].stage], key[1].kind
        if kind in (FORWARD, *BACKWARDS) and stage.shard in SCATTERING and key in measured_times:
            more_s = predicted_s - computing[key]
            if more_s > _LEAST * predicted_s:
                added[topology.level(stage.devices)].append((measured_times[key] - computing[key], more_s))
    sums = {level: [sum(column) for column in zip(*found, strict=True)] for level, found in added.items()}
    factors = {level: measured / more for level, (measured, more) in sums.items() if measured > 0}
    return _scale_curves(cluster, _KINDS, factors)
