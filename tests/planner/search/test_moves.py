"""Moves against all shapes beside one, and balanced shapes against all cuts."""

import random
from itertools import combinations, pairwise

import pytest

from autopar.formats.stage import group_of, layout_of
from autopar.ownership import SHARDS, Replicas
from autopar.planner import PlanOptions
from autopar.planner.candidate import Family
from autopar.planner.costs.model import CostModel
from autopar.planner.search import moves
from drawn import random_shape
from random_problems import random_cluster, random_profile


def test_moves_lead_to_other_layouts_and_cuts_to_every_edge() -> None:
    seen = 0
    for seed in range(80):
        rng = random.Random(seed)
        layers, devices = rng.randint(2, 9), rng.randint(2, 9)
        shape = random_shape(rng, layers, devices)
        idle, stages = devices - sum(shape.widths), range(len(shape.cuts))
        sums = [float(at) for at in range(layers + 1)]
        near = [shape._replace(cuts=cuts) for cuts in moves.cuts_moved(shape.cuts, range(layers + 1), stages[:-1], 2)]
        near += [shape._replace(cuts=cuts) for cuts in moves.layers_passed(shape.cuts, range(layers + 1), stages)]
        near += moves.stages_joined(shape, stages[:-1])
        near += moves.stages_divided(shape, stages, lambda _, own=sums: own, idle, SHARDS)  # type: ignore[misc]
        for devices_of in moves.devices_moved(shape.devices, idle, stages, all_used=False):
            moved = shape.with_devices(devices_of)
            assert moved is not None
            near.append(moved)
        for other in near:
            assert other != shape
            assert sum(other.widths) <= devices, f"seed {seed}"
            assert other.cuts[-1] == layers
            assert all(first < stop for first, stop in pairwise((0, *other.cuts))), f"seed {seed}"
            assert len(other.cuts) == len(other.replicas)
            seen += 1
    assert seen > 400
    for seed in range(100):
        rng = random.Random(seed)
        layers, reach = rng.randint(2, 9), rng.randint(1, 3)
        edges = (0, *sorted(rng.sample(range(1, layers), rng.randint(1, layers - 1))), layers)
        stages = rng.randint(1, len(edges) - 1)
        cuts = (*sorted(rng.sample(edges[1:-1], stages - 1)), layers)
        beside = set()
        for other in combinations(edges[1:-1], stages - 1):
            pairs = zip(cuts, (*other, layers), strict=True)
            moved = [abs(edges.index(a) - edges.index(b)) for a, b in pairs if a != b]
            if len(moved) == 1 and moved[0] <= reach:
                beside.add((*other, layers))
        found = list(moves.cuts_moved(cuts, edges, range(stages - 1), reach))
        assert sorted(found) == sorted(beside), f"seed {seed}"


def _slowest_s(costs: CostModel, family: Family, widths: list[int], cuts: tuple[int, ...]) -> float:
    seconds = []
    for index, (first, stop) in enumerate(pairwise((0, *cuts))):
        width = widths[group_of(layout_of(family.schedule), index, len(widths))]
        rows = max(costs.shares(family.micro_batch_size, Replicas(width)))
        both = costs.sums.forward(rows), costs.sums.backward(rows, 1.0)
        seconds.append(sum(each[stop] - each[first] for each in both))
    return max(seconds)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
def test_no_cuts_make_the_slowest_stage_quicker_than_a_balanced_shapes(schedule: str) -> None:
    """Of groups of unequal widths, hardly any do: a narrow one may be left with a long layer."""
    compared = quickest = 0
    chunks = 1 if layout_of(schedule) == "line" else 2
    for seed in range(100):
        rng = random.Random(seed)
        profile = random_profile(seed, most_layers=9, batches=(4, 8))
        costs = CostModel(profile, random_cluster(seed, 6), PlanOptions(gpus=6))
        widths = [rng.randint(1, 2) for _ in range(rng.randint(1, 3))]
        edges = range(costs.layer_count + 1)
        count, family = len(widths) * chunks, Family(2, costs.batch // 2, schedule)
        if not 1 < count <= costs.layer_count:
            continue
        shape = moves.balanced_shape(costs, family, [*map(Replicas, widths)], chunks, edges)
        every = ((*cuts, edges[-1]) for cuts in combinations(edges[1:-1], count - 1))
        least_s = min(_slowest_s(costs, family, widths, cuts) for cuts in every)
        close = _slowest_s(costs, family, widths, shape.cuts) <= least_s * (1 + 1e-9) + 1e-12
        assert close or len(set(widths)) > 1, f"seed {seed}"
        compared += 1
        quickest += close
        placed = moves.place_shape(costs, family, shape, range(6))
        assert tuple(stage.stop for stage in placed) == shape.cuts
        groups = {stage.devices for stage in placed}
        assert sorted(map(len, groups)) == sorted(widths)
        assert sorted(device for group in groups for device in group) == list(range(sum(widths)))
    assert quickest > 0.9 * compared > 18
