"""The best of what is judged against a list of everything that was."""

from __future__ import annotations

import random

import pytest

from autopar.planner.candidate import Candidate
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions
from autopar.planner.search.judge import NEAR, Best, SimulatedPlan, equal_widths, traits_of
from autopar.planner.simulator.simulate import Simulator
from drawn import random_candidate
from random_problems import random_cluster, random_profile

FEW_BYTES = 6_000_000


def _drawn(seed: int, memory_bytes: int | None) -> tuple[Simulator, list[Candidate]]:
    rng = random.Random(seed)
    profile = random_profile(seed, most_layers=5, batches=(2, 4, 6))
    costs = CostModel(profile, random_cluster(seed, 4), PlanOptions(gpus=4, memory_bytes=memory_bytes))
    return Simulator(costs), [random_candidate(rng, costs) for _ in range(40)]


def test_the_best_at_large_and_in_every_respect_is_the_first_of_the_quickest_that_fit() -> None:
    missed = compared = 0
    for seed in range(24):
        simulator, candidates = _drawn(seed, FEW_BYTES if seed % 2 else None)
        best = Best()
        fitting: list[tuple[float, Candidate]] = []
        for candidate in candidates:
            judged_s = best.judge(simulator, candidate)
            short, step_s = max(simulator.costs.shortfalls(candidate)), simulator.step_s(candidate)
            assert (judged_s is None) == (short > 0)
            if judged_s is None:
                missed += 1
                continue
            assert judged_s <= step_s * (1 + 1e-12)
            fitting.append((step_s, candidate))
        found = {("stages", count): each for count, each in best.by_stages.items()}
        for count, each in found.items():
            own = [pair for pair in fitting if len(pair[1].stages) == count[1]]
            assert each == min(own, key=lambda pair: pair[0]), f"seed {seed}: {count}"
            compared += 1
        assert {len(candidate.stages) for _, candidate in fitting} == set(best.by_stages)
        assert best.step_s == min((step_s for step_s, _ in fitting), default=float("inf"))
        lacking = {max(simulator.costs.shortfalls(candidate)): candidate for candidate in reversed(candidates)}
        shorts = [short for short in lacking if short > 0]
        assert best.closest == ((min(shorts), lacking[min(shorts)]) if shorts else None)
    assert missed > 60
    assert compared > 30


def test_what_is_considered_is_kept_for_its_traits_and_while_it_is_about_as_fast_as_the_best() -> None:
    near = equal = 0
    for seed in range(60):
        rng = random.Random(seed)
        _, candidates = _drawn(seed, None)
        every = [SimulatedPlan(rng.choice([1.0, 1.005, 1.02, 2.0]), each) for each in dict.fromkeys(candidates)]
        best = Best(cap_s=1.03)
        for each in every:
            best.consider(each)
        for trait in {trait for each in every for trait in traits_of(each.candidate)}:
            own = [each for each in every if trait in traits_of(each.candidate)]
            assert best.by_trait[trait] is min(own, key=lambda each: each.step_s), f"seed {seed}: {trait}"
        alike = [each for each in every if equal_widths(each.candidate.stages)]
        assert best.equal == min(alike, key=lambda each: each.step_s, default=None)
        limit_s = min(each.step_s for each in every) * (1 + NEAR)
        assert {each.candidate for each in every if each.step_s <= limit_s} <= set(best.near)
        near += len(best.near)
        equal += best.equal is not None
    assert near > 200
    assert equal > 30


def test_nothing_slower_than_the_cap_is_the_fastest() -> None:
    _, (candidate, *_) = _drawn(1, None)
    best = Best(cap_s=1.0)
    best.consider(SimulatedPlan(1.5, candidate))
    assert (best.fastest, best.step_s) == (None, 1.0)
    best.consider(SimulatedPlan(0.5, candidate))
    assert best.step_s == pytest.approx(0.5)
