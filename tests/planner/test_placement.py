"""Placement: every way of taking devices against all of them, and pools against plain bookkeeping."""

from __future__ import annotations

import random

import pytest
from hierarchies import hierarchy
from instances import random_profile, two_kinds

from autopar.formats.cluster import Cluster
from autopar.formats.profile import Profile
from autopar.planner.candidate import families
from autopar.planner.costs import CostModel
from autopar.planner.exhaustive import Exhausted, exhaust
from autopar.planner.judge import Best
from autopar.planner.options import PlanOptions
from autopar.planner.search import Searched, search
from autopar.planner.simulate import Simulator

SIZES = ([1, 2], [2, 2], [1, 1, 2], [3, 1], [2, 2, 2], [3, 2, 1], [1, 1, 1], [4, 2], [2, 1, 1])


def _instance(seed: int) -> tuple[Profile, Cluster, PlanOptions]:
    """Up to three uneven nodes of up to six devices, in up to three racks, some with several links or two kinds."""
    rng = random.Random(seed)
    sizes = SIZES[seed % len(SIZES)]
    devices = sum(sizes)
    cluster = hierarchy(seed, sizes, racks=rng.choice([1, 1, 2, 3]), more_links=seed % 2 == 0)
    layers, batches = (4, (2, 3)) if devices < 5 else (3, (2,))
    profile = random_profile(seed, most_layers=layers, batches=batches)
    if seed % 3 == 0:
        profile, cluster = two_kinds(profile, cluster, seed)
    asked = {"gpus": devices, "gap": 0.0, "recompute": "none", "use_all": rng.random() < 0.2}
    return profile, cluster, PlanOptions(**asked)  # type: ignore[arg-type]


def _uneven(profile: Profile, cluster: Cluster, options: PlanOptions, seed: int) -> Cluster:
    """Give some devices too little memory for the best plan without a limit."""
    best, _ = _search(profile, cluster, options)
    if best.found is None:
        return cluster
    peak = max(CostModel(profile, cluster, options).peak_bytes(best.found.candidate))
    rng = random.Random(seed)
    devices = [
        device.model_copy(update={"memory_bytes": int(peak * rng.choice([0.7, 0.95, 1.0, 2.0]))})
        for device in cluster.devices
    ]
    return cluster.model_copy(update={"devices": tuple(devices)})


def _search(profile: Profile, cluster: Cluster, options: PlanOptions) -> tuple[Best, Searched]:
    costs = CostModel(profile, cluster, options)
    best = Best()
    return best, search(Simulator(costs), families(costs.batch, options), options, best)


def _exhaust(profile: Profile, cluster: Cluster, options: PlanOptions) -> tuple[Best, Exhausted]:
    best = Best()
    return best, exhaust(Simulator(CostModel(profile, cluster, options)), options, best)


def test_an_exact_search_finds_the_fastest_of_all_placements() -> None:
    compared = moved = 0
    for seed in range(300):
        profile, cluster, options = _instance(seed)
        if seed % 4 == 1:
            cluster = _uneven(profile, cluster, options, seed)
        best, searched = _search(profile, cluster, options)
        oracle, exhausted = _exhaust(profile, cluster, options)
        if oracle.found is None:
            assert best.found is None, f"seed {seed}"
            continue
        assert best.step_s == pytest.approx(oracle.step_s, rel=1e-9), f"seed {seed}"
        assert searched.lower_bound_s == pytest.approx(oracle.step_s, rel=1e-9), f"seed {seed}"
        if searched.least_bound_s < best.step_s:
            assert searched.least_bound_s == pytest.approx(exhausted.least_bound_s, rel=1e-9), f"seed {seed}"
        compared += 1
        assert best.found is not None
        devices = [device for stage in best.found.candidate.stages for device in stage.devices]
        moved += devices != list(range(len(devices)))
    assert compared >= 250
    assert moved >= 50
