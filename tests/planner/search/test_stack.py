"""The stack of bounds, against the oracle that simulates every plan."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autopar.planner import PlanOptions, plan
from autopar.planner.bounds import candidate_bound_s
from autopar.planner.candidate import families
from autopar.planner.costs.model import CostModel
from autopar.planner.search.best_first import bounds_of_families, least_bound_s
from autopar.planner.search.judge import Best
from autopar.planner.simulator.simulate import Simulator
from drawn import random_candidate
from oracles.exhaustive import everything, exhaust
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile, two_kinds

ASKED = ({}, {"use_all": True}, {"shard": "auto"}, {"recompute": "full"}, {"divisible": True}, {"schedule": "gpipe"})


@pytest.mark.slow
def test_every_bound_of_the_stack_is_below_every_plan_that_fits_and_none_is_below_the_one_before() -> None:
    rising = 0
    for seed in range(150):
        rng = random.Random(seed)
        devices = rng.randint(1, 3)
        profile, cluster = random_profile(seed, most_layers=4, batches=(1, 2, 4)), random_cluster(seed, devices)
        if seed % 3 == 0:
            profile, cluster = two_kinds(profile, cluster, seed)
        options = PlanOptions(gpus=devices, gap=0.0, **ASKED[seed % len(ASKED)])  # type: ignore[arg-type]
        costs = CostModel(profile, cluster, options)
        every = families(costs.batch, options)
        bounds = bounds_of_families(costs, every, least_bound_s(costs, options), float("inf"))
        best = Best()
        step_s = exhaust(Simulator(costs), options, best).step_s
        assert bounds.work_s <= bounds.contiguous_s <= bounds.linked_s <= step_s * (1 + 1e-9), f"seed {seed}"
        rising += bounds.work_s * 1.001 < bounds.contiguous_s * 1.0001 < bounds.linked_s
        if best.fastest is not None:
            clipped = bounds_of_families(costs, every, least_bound_s(costs, options), step_s / 2)
            assert max(clipped.work_s, clipped.contiguous_s, clipped.linked_s) <= step_s / 2
    assert rising >= 30


def test_each_bound_of_the_stack_is_below_the_bounds_of_all_plans_without_what_it_leaves_out() -> None:
    for seed in range(60):
        profile, cluster = random_profile(seed, most_layers=4, batches=(2, 4)), random_cluster(seed, 2)
        options = PlanOptions(gpus=2, shard="auto" if seed % 2 else "none")
        costs = CostModel(profile, cluster, options)
        bounds = bounds_of_families(costs, families(costs.batch, options), least_bound_s(costs, options), float("inf"))
        plans = list(everything(costs, replace(options, recompute="none")))
        for expected, model in (
            (bounds.contiguous_s, costs.without(links=True, memory=True)),
            (bounds.linked_s, costs.without(memory=True)),
        ):
            assert expected <= min(candidate_bound_s(model, candidate) for candidate in plans) * (1 + 1e-9), (
                f"seed {seed}"
            )


def test_without_links_nothing_that_is_communicated_takes_time_and_all_else_stays() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        profile, cluster = random_profile(seed), random_cluster(seed, 4)
        costs = CostModel(profile, cluster, PlanOptions(gpus=4))
        free = costs.without(links=True)
        for candidate in (random_candidate(rng, costs) for _ in range(5)):
            for stage in candidate.stages:
                assert free.reduce_s(stage) == free.replica_exposed_s(stage, 0) == 0
                assert free.forward_s(stage, 0) <= costs.forward_s(stage, 0)
                if stage.shard == "none":
                    assert free.forward_s(stage, 0) == costs.forward_s(stage, 0)
            assert free.peak_bytes(candidate) == costs.peak_bytes(candidate)
            assert candidate_bound_s(free, candidate) <= candidate_bound_s(costs, candidate) * (1 + 1e-12)
            assert max(costs.without(memory=True).shortfalls(candidate)) < 0


def test_a_plan_carries_its_stack_what_binds_it_and_shares_that_sum_to_one() -> None:
    for options in (
        PlanOptions(gpus=4, bytes_per_s=3e7),
        PlanOptions(gpus=2, stages="0-5:1,6-13:1"),
        PlanOptions(gpus=2, memory_bytes=60 * 2**20),
    ):
        predicted = plan(gpt_profile(), local_cluster(4), options).predicted
        bounds, shares = predicted.bounds, predicted.shares
        assert bounds is not None
        assert shares is not None
        ascending = [bounds.work_s, bounds.contiguous_s, bounds.linked_s, predicted.lower_bound_s, predicted.step_s]
        assert ascending == sorted(ascending)
        assert 0 < bounds.work_s < bounds.linked_s
        total = shares.computing + shares.messages + shares.reduction + shares.idle
        assert total == pytest.approx(1, rel=1e-9)
        assert shares.computing == pytest.approx(1 - predicted.bubble, rel=1e-9)
        own_s = sum(part.seconds for part in predicted.binding)
        assert own_s <= predicted.step_s * (1 + 1e-9)
