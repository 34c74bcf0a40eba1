"""The quickest asynchronous pipeline against all of them, and against the pipeline played through."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from instances import random_cluster, random_profile, two_kinds

from autopar.formats.cluster import Cluster
from autopar.formats.plan import Division
from autopar.formats.profile import Profile
from autopar.planner.candidate import Candidate, Placed
from autopar.planner.costs import CostModel
from autopar.planner.objectives.stash import StashCosts, depths
from autopar.planner.objectives.throughput import quickest
from autopar.planner.options import PlanOptions


def _everything(
    costs: CostModel, options: PlanOptions, first: int, free: tuple[int, ...]
) -> Iterator[tuple[Placed, ...]]:
    """All ways to place the layers from the first one on; of a kind, devices in cluster order."""
    if first == costs.layer_count:
        if not options.use_all or not free:
            yield ()
        return
    for kind in sorted({costs.kind_of[device] for device in free}):
        own = [device for device in free if costs.kind_of[device] == kind]
        for width in range(1, len(own) + 1):
            devices = tuple(own[:width])
            divisions: list[Division] = ["split"] if costs.divisible or width <= costs.batch else []
            divisions += ["round-robin"] if width > 1 and not costs.divisible else []
            levels = costs.recompute_levels(costs.batch, kind)
            asked = {"none": levels[:1], "full": levels[-1:], "auto": [levels[0], levels[-1]]}[options.recompute]
            rest = tuple(device for device in free if device not in devices)
            for stop in range(first + 1, costs.layer_count + 1):
                for behind in _everything(costs, options, stop, rest):
                    for division in divisions:
                        for level in asked:
                            shares = costs.shares(costs.batch, width, division)
                            recompute = tuple(sorted(layer for layer in level if first <= layer < stop))
                            stage = Placed(first, stop, devices, shares, 1, recompute, division=division)
                            yield (stage, *behind)


def _lanes(stage: Placed) -> int:
    return len(stage.devices) if stage.division == "round-robin" else 1


def _least(costs: CostModel, options: PlanOptions) -> float:
    """The least seconds per mini-batch of all pipelines that fit; infinite if none does."""
    prices, least = StashCosts(costs), float("inf")
    for stages in _everything(costs, options, 0, tuple(range(len(costs.devices)))):
        deep = depths([_lanes(stage) for stage in stages])
        placed = tuple(stage._replace(warmup=depth) for stage, depth in zip(stages, deep, strict=True))
        if all(prices.peak_bytes(stage) <= costs.limit_bytes(stage.devices) for stage in placed):
            least = min(least, max(prices.busy(Candidate(1, costs.batch, "1f1b", placed)).values()))
    return least


def _instance(seed: int) -> tuple[Profile, Cluster, PlanOptions]:
    """One in three on two kinds of device; reductions of tied parameters are not what the tables count."""
    rng = random.Random(seed)
    layers, devices = rng.choice([(4, 3), (3, 4), (5, 2), (6, 2)])
    profile, cluster = random_profile(seed, most_layers=layers), random_cluster(seed, devices)
    profile = profile.model_copy(update={"tied": ()})
    if seed % 3 == 0:
        profile, cluster = two_kinds(profile, cluster, seed)
    asked = rng.choice([{}, {}, {"use_all": True}, {"recompute": "full"}, {"recompute": "none"}, {"divisible": True}])
    return profile, cluster, PlanOptions(gpus=devices, objective="throughput", **asked)


def test_no_pipeline_that_fits_is_quicker() -> None:
    compared = bound = deep = turns = recomputing = 0
    for seed in range(250):
        profile, cluster, options = _instance(seed)
        free = quickest(StashCosts(CostModel(profile, cluster, options)), options)
        if free is None:
            assert options.use_all
            continue
        if seed % 4:
            prices = StashCosts(CostModel(profile, cluster, options))
            peak = max(map(prices.peak_bytes, free.candidate.stages))
            options = replace(options, memory_bytes=max(1, int(peak * (1.0, 0.99, 0.9, 0.75)[seed % 4])))
        costs = CostModel(profile, cluster, options)
        prices, least = StashCosts(costs), _least(costs, options)
        found = quickest(prices, options)
        if found is None:
            assert least == float("inf"), seed
            continue
        stages = found.candidate.stages
        assert found.least_s == pytest.approx(least, rel=1e-9), seed
        assert max(prices.busy(found.candidate).values()) == pytest.approx(least, rel=1e-9), seed
        assert all(prices.peak_bytes(stage) <= costs.limit_bytes(stage.devices) for stage in stages), seed
        assert [stage.warmup for stage in stages] == depths([_lanes(stage) for stage in stages])
        compared += 1
        bound += found.least_s > free.least_s * (1 + 1e-9)
        deep += max(stage.warmup for stage in stages) > 1
        turns += any(stage.division == "round-robin" for stage in stages)
        recomputing += any(stage.recompute for stage in stages)
    assert compared >= 150
    assert min(bound, deep, turns) >= 25
    assert recomputing >= 10
