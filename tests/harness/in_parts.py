"""Profiles that say what parts of their layers cost, and plans of teams that a user may dictate of them; by seeds."""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from autopar.errors import AutoparError
from autopar.formats.cluster import Cluster
from autopar.formats.cuts import ParameterCut, SequenceCut
from autopar.formats.plan import Plan
from autopar.formats.profile import Cost, Layer, LayerSplit, PartCosts, PartSum, Profile
from autopar.formats.stage import group_of, layout_of
from autopar.planner import PlanOptions, plan
from autopar.schedules import SCHEDULES
from chunked import halved
from random_problems import random_cluster, random_profile, two_kinds

COUNTS = (2, 4)
_SIZES = ("parameters_bytes", "trainable_bytes", "gradient_bytes", "optimizer_bytes", "update_bytes")
_POINTS = ("forward", "backward_input", "backward_weight")


def in_parts(profile: Profile, seed: int) -> Profile:
    """Return a profile most of whose layers split, with anything that parts may cost, sum and hold."""
    draw = random.Random(seed + 13_000_000)
    made = [tensor for tensor in profile.tensors if tensor.producer is not None]
    sliced = [tensor for tensor in made if draw.random() < 0.6]
    whole = {layer.name for layer in profile.layers if draw.random() < 0.2}
    # Layers that share a parameter cut it alike, or not at all.
    tied = [each for each in profile.tied if not whole.intersection(each.layers)]

    def split(layer: Layer) -> Layer:
        if layer.name in whole:
            return layer
        own = [tensor.name for tensor in sliced if layer.name in (tensor.producer, *tensor.consumers)]
        shared = [each.parameter for each in tied if layer.name in each.layers]
        return layer.model_copy(update={"splits": tuple(_split(draw, layer, count, own, shared) for count in COUNTS)})

    others = tuple(other.model_copy(update={"layers": tuple(map(split, other.layers))}) for other in profile.others)
    return profile.model_copy(update={"layers": tuple(map(split, profile.layers)), "others": others})


def _split(draw: random.Random, layer: Layer, count: int, sliced: Sequence[str], shared: Sequence[str]) -> LayerSplit:
    # As a vocabulary that does not divide: the first part has more.
    parts = tuple(((part + (part > 0), part + 2),) for part in range(count))
    return LayerSplit(
        count=count,
        cuts=tuple(ParameterCut(parameter=name, dim=0, parts=parts) for name in (f"{layer.name}.w", *shared)),
        sequence=tuple(SequenceCut(tensor=name, dim=1) for name in sliced),
        part=_part(draw, layer, count, ("all_reduce",), ()),
        sliced=_part(draw, layer, count, ("all_gather", "reduce_scatter"), sliced) if sliced else None,
    )


def _part(draw: random.Random, layer: Layer, count: int, kinds: Sequence[str], sliced: Sequence[str]) -> PartCosts:
    share = draw.uniform(1 / count, 1)
    # Pairs of four may sum by themselves.
    ranks = (count,) if sliced else (2, count)
    sums = [
        (draw.choice(kinds), at, draw.choice(ranks), draw.choice([1000, 40_000]))
        for at in _POINTS
        for _ in range(draw.randint(0, 2))
    ]

    def cost(whole: Cost) -> Cost:
        halves = ("backward_input_s", "backward_weight_s") if whole.backward_input_s is not None else ()
        seconds = {name: share * getattr(whole, name) for name in ("forward_s", "backward_s", *halves)}
        # Tensors between layers are whole, or slices.
        saved = [
            each.model_copy(update={"bytes": int(each.bytes * share)})
            if "/" in each.storage
            else each.model_copy(update={"bytes": each.bytes // count})
            if each.storage in sliced
            else each
            for each in whole.saved
        ]
        exchanged = [
            PartSum(kind=kind, at=at, ranks=own, bytes=size * whole.micro_batch)  # type: ignore[arg-type]
            for kind, at, own, size in sums
        ]
        return whole.model_copy(update={**seconds, "saved": tuple(saved), "sums": tuple(exchanged)})

    return PartCosts(
        **{name: int(getattr(layer, name) * share) for name in _SIZES},
        summand_bytes=draw.choice([0, 0, 1000]),
        update_s=share * layer.update_s,
        costs=tuple(map(cost, layer.costs)),
    )


def dictated_teams(seed: int) -> tuple[Plan, Profile, Cluster] | None:
    """Return a plan with teams, its profile and cluster; None where what is drawn cannot be planned."""
    draw = random.Random(seed)
    profile, cluster = random_profile(seed, most_layers=10, batches=(2, 4, 6, 12)), random_cluster(seed, 8)
    if seed % 4 == 0:
        profile, cluster = two_kinds(profile, cluster, seed)
    profile = in_parts(halved(profile, seed), seed)
    try:
        made = plan(profile, cluster, PlanOptions(**_asked(draw, profile)))
    except AutoparError:
        return None
    return (made, profile, cluster) if any(stage.tensor_parallel > 1 for stage in made.stages) else None


def _asked(draw: random.Random, profile: Profile) -> dict[str, Any]:
    schedule, count = draw.choice(sorted(SCHEDULES)), len(profile.layers)
    layout = layout_of(schedule)
    chunks = {"line": 1, "vee": 2, "loop": draw.randint(2, 3)}[layout]
    groups = draw.randint(1, max(1, min(4, count // chunks)))
    edges = [0, *sorted(draw.sample(range(1, count), min(count, groups * chunks) - 1)), count]
    group = [group_of(layout, at, groups) for at in range(len(edges) - 1)]
    # Of every stage with a team, some layer splits.
    whole = {
        own
        for own, ends in zip(group, pairwise(edges), strict=True)
        if not any(each.splits for each in profile.layers[slice(*ends)])
    }
    micro_batches = draw.choice([each for each in range(1, profile.batch + 1) if profile.batch % each == 0])
    most = min(2, profile.batch // micro_batches)
    teams = [f"{draw.randint(1, most)}x{1 if at in whole else draw.choice((1, *COUNTS))}" for at in range(groups)]
    stages = [f"{first}-{stop - 1}:{teams[own]}" for own, (first, stop) in zip(group, pairwise(edges), strict=True)]
    return {
        "schedule": schedule,
        "stages": ",".join(stages),
        "micro_batches": micro_batches,
        "recompute": draw.choice(["none", "full", "auto"]),
        "shard": draw.choice(["none", "none", "optimizer", "gradients", "parameters"]),
        "division": draw.choice(["split", "split", "round-robin"]),
        "sequence_parallel": draw.random() < 0.4,
        "across_nodes": any(not team.endswith("x1") for team in teams),
    }
