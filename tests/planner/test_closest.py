"""The least shortfall of memory, against all plans."""

from __future__ import annotations

import random

import pytest

from autopar.planner.candidate import families
from autopar.planner.closest import closest
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions
from counted_stages import closest_of
from oracles.exhaustive import everything
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile, two_kinds

ASKED = (
    {},
    {"use_all": True},
    {"shard": "auto"},
    {"recompute": "full"},
    {"recompute": "none", "shard": "gradients"},
    {"schedule": "gpipe"},
    {"min_stages": 2},
    {"divisible": True},
)


@pytest.mark.slow
def test_the_least_shortfall_is_that_of_all_plans_for_any_number_of_stages_and_for_each() -> None:
    compared = several = 0
    for seed in range(120):
        rng = random.Random(seed)
        devices = rng.randint(2, 3)
        profile = random_profile(seed, most_layers=4, batches=(1, 2, 3, 4), skips=0.0)
        cluster = random_cluster(seed, devices)
        if seed % 3 == 0:
            profile, cluster = two_kinds(profile, cluster, seed)
        if len(profile.layers) == 1:
            continue
        options = PlanOptions(
            gpus=devices, memory_bytes=1 + seed * 9_000, **{"shard": "none", **ASKED[seed % len(ASKED)]}
        )  # type: ignore[arg-type]
        costs = CostModel(profile, cluster, options)
        every = families(costs.batch, options)
        least: dict[int | None, int] = {}
        for candidate in everything(costs, options):
            short = max(costs.shortfalls(candidate))
            for count in (None, len(candidate.stages)):
                least[count] = min(least.get(count, short), short)
        for count in (None, *range(1, devices + 1)):
            found = closest_of(costs, every, options, count)
            if count is not None and count < options.min_stages:
                continue
            if found is None:
                assert count not in least, f"seed {seed}: {count}"
                continue
            assert found[0] == least[count] == max(costs.shortfalls(found[1])), f"seed {seed}: {count}"
            assert count in (None, len(found[1].stages))
            compared += 1
            several += len(found[1].stages) > 1
    assert compared >= 250
    assert several >= 100


@pytest.mark.parametrize("fits", [True, False])
def test_a_plan_that_fits_is_found_wherever_there_is_one(fits: bool) -> None:
    least = closest(*_gpt(memory_bytes=1))
    assert least is not None
    costs, every, options = _gpt(memory_bytes=1 + least[0] - (not fits))
    found = closest(costs, every, options, any_fits=True)
    assert found is not None
    assert (found[0] <= 0) == fits


def _gpt(**asked: int) -> tuple[CostModel, list, PlanOptions]:  # type: ignore[type-arg]
    options = PlanOptions(gpus=4, **asked)  # type: ignore[arg-type]
    costs = CostModel(gpt_profile(), local_cluster(4), options)
    return costs, families(costs.batch, options), options
