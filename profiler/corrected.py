"""Corrected: a profile whose times are those that a run measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from autopar.formats.own_times import OwnTimes
from autopar.formats.plan import SCATTERING, Plan, Stage
from autopar.formats.profile import Cost, Layer, Line, Profile
from autopar.formats.program import BACKWARD, BACKWARDS, FORWARD, INPUT_BACKWARD, UPDATE, WEIGHT_BACKWARD
from autopar.schedules.expand import stages_of

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


def corrected(
    profile: Profile, plan: Plan, measured: OwnTimes, predicted: OwnTimes, layers_s: LayerSeconds, overhead_s: float
) -> Profile:
    """Return a profile from which the plan's program is predicted to take what it took.

    A stage's measured times over the predicted ones are its layers' together; where layers were timed, each has its own
    part of that. Layers that were measured as one stay alike. Stages tell nothing that are on several kinds of devices,
    or that gather or scatter while they compute: what that takes is not the layers'.

    Args:
        profile: what the plan was made of.
        plan: what was run.
        measured: every action's seconds.
        predicted: what the profile has of them.
        layers_s: what the layers took inside them.
        overhead_s: what a step takes before its first action.
    """
    found: dict[str, dict[str, list[_Factors]]] = defaultdict(lambda: defaultdict(list))
    for rank in range(len(plan.devices)):
        for index in stages_of(plan, rank)[0]:
            kind = _kind_of(plan.stages[index], profile)
            if kind is not None and plan.stages[index].shard not in SCATTERING:
                ratios = _ratios(index, rank, measured, predicted)
                if plan.stages[index].shard != "none":
                    # Predicted with the gathering behind it, which a run does in the next step's first forward.
                    ratios = ratios._replace(update=1.0)
                for name, factors in _parted(profile, plan, rank, index, kind, ratios, layers_s).items():
                    found[kind][name].append(factors)
    rows = frozenset(row for stage in plan.stages for row in stage.rows)
    layers = _scaled(profile.layers, found[profile.device.name], rows)
    others = tuple(
        other.model_copy(update={"layers": _scaled(other.layers, found[other.device.name], rows)})
        for other in profile.others
    )
    notes = (*(note for note in profile.notes if note != NOTE), NOTE) if any(found.values()) else profile.notes
    update = {"layers": layers, "others": others, "step_overhead_s": overhead_s, "notes": notes}
    return profile.model_copy(update=update)


def _kind_of(stage: Stage, profile: Profile) -> str | None:
    """Return the kind of a stage's devices; none where there are several."""
    if len(stage.types) > 1:
        return None
    return stage.types[0] if stage.types else profile.device.name


def _ratios(stage: int, rank: int, measured: OwnTimes, predicted: OwnTimes) -> _Factors:
    """Return a stage's measured over predicted times on one rank."""
    found: dict[str, list[float]] = defaultdict(list)
    for (other, action), seconds in predicted.items():
        if other == rank and action.stage == stage and seconds > 0 and (other, action) in measured:
            found[action.kind].append(measured[other, action] / seconds)
    # Of a rank's stages, an update names one.
    updates = [
        measured[key] / seconds
        for key, seconds in predicted.items()
        if key[0] == rank and key[1].kind == UPDATE and seconds > 0 and key in measured
    ]
    backward = _middle(ratio for kind in BACKWARDS for ratio in found[kind])
    by_input, by_weight = (
        _middle(found[kind]) if found[kind] else backward for kind in (INPUT_BACKWARD, WEIGHT_BACKWARD)
    )
    whole = _middle(found[BACKWARD]) if found[BACKWARD] else backward
    return _Factors(_middle(found[FORWARD]), whole, by_input, by_weight, _middle(updates))


def _middle(ratios: Iterable[float]) -> float:
    known = list(ratios)
    return median(known) if known else 1.0


def _parted(
    profile: Profile, plan: Plan, rank: int, stage: int, kind: str, ratios: _Factors, layers_s: LayerSeconds
) -> dict[str, _Factors]:
    """Return the factors of a stage's layers on one rank."""
    placed, replica = plan.stages[stage], stages_of(plan, rank)[1]
    layers = profile.layers
    for other in profile.others:
        layers = other.layers if other.device.name == kind else layers
    mine = [layer for layer in layers if layer.name in placed.layers]
    timed = layers_s[rank] if layers_s else {}
    parts = []
    for place in (0, 1):
        planned = {layer.name: _seconds(layer, placed, placed.rows[replica], place) for layer in mine}
        parts.append(_own_parts(planned, {name: times[place] for name, times in timed.items()}))
    forward, backward = parts
    found = {}
    for layer in mine:
        own = backward[layer.name]
        halves = ratios.backward * own, ratios.input * own, ratios.weight * own
        found[layer.name] = _Factors(ratios.forward * forward[layer.name], *halves, update=ratios.update)
    return found


def _seconds(layer: Layer, stage: Stage, rows: int, place: int) -> float:
    """Return what a profile has of a layer's forward (0) or backward (1) in a stage."""
    sizes = [cost.micro_batch for cost in layer.costs]
    if place == 0:
        return float(np.interp(rows, sizes, [cost.forward_s for cost in layer.costs]))
    again = layer.name in stage.recompute
    known = [cost.backward_s + (_again_s(cost) if again else 0.0) for cost in layer.costs]
    return float(np.interp(rows, sizes, known)) + layer.accumulate_s


def _again_s(cost: Cost) -> float:
    return cost.forward_s if cost.recompute_s is None else cost.recompute_s


def _own_parts(planned: Mapping[str, float], timed: Mapping[str, float]) -> dict[str, float]:
    """Return each layer's part of what was measured over its part of what was planned; 1 where that is not known."""
    known = [name for name, seconds in planned.items() if seconds > 0 and timed.get(name, 0.0) > 0]
    if len(known) < sum(seconds > 0 for seconds in planned.values()):
        return dict.fromkeys(planned, 1.0)
    longer = sum(planned[name] for name in known) / (sum(timed[name] for name in known) or 1.0)
    return {name: timed[name] / planned[name] * longer if name in known else 1.0 for name in planned}


def _scaled(
    layers: Sequence[Layer], found: Mapping[str, Sequence[_Factors]], rows: frozenset[int]
) -> tuple[Layer, ...]:
    """Multiply the times of layers; those that were measured as one have the median of all their factors."""
    alike: dict[str, list[_Factors]] = defaultdict(list)
    for layer in layers:
        alike[layer.measured_as or layer.name] += found.get(layer.name, ())
    return tuple(_corrected(layer, alike[layer.measured_as or layer.name], rows) for layer in layers)


def _corrected(layer: Layer, found: Sequence[_Factors], rows: frozenset[int]) -> Layer:
    if not found:
        return layer
    factors = _Factors(*(median(column) for column in zip(*found, strict=True)))
    return layer.model_copy(
        update={
            "costs": tuple(_cost(cost, factors, cost.micro_batch in rows) for cost in layer.costs),
            "forward_fit": _line(layer.forward_fit, factors.forward),
            "backward_fit": _line(layer.backward_fit, factors.backward),
            "update_s": layer.update_s * factors.update,
            "accumulate_s": layer.accumulate_s * factors.backward,
            "input_s": layer.input_s * factors.forward,
        }
    )


def _cost(cost: Cost, factors: _Factors, run: bool) -> Cost:
    """Return a cost's times multiplied; those of the size that was run are measured."""
    by = {
        "forward_s": factors.forward,
        "backward_s": factors.backward,
        "backward_input_s": factors.input,
        "backward_weight_s": factors.weight,
        "recompute_s": factors.backward,
    }
    known = {name: getattr(cost, name) for name in by}
    update = {name: seconds * by[name] for name, seconds in known.items() if seconds is not None}
    return cost.model_copy(update={**update, **({"provenance": "measured"} if run else {})})


def _line(line: Line | None, factor: float) -> Line | None:
    if line is None:
        return None
    return line.model_copy(update={"fixed_s": line.fixed_s * factor, "per_sample_s": line.per_sample_s * factor})
