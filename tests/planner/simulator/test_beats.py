"""Steps run beat by beat against the simulation of the expanded program, action by action."""

from __future__ import annotations

import random

import pytest

from autopar.planner import PlanOptions
from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.costs.durations import durations
from autopar.planner.costs.model import CostModel
from autopar.planner.simulator.beats import action_levels, simulate_levels
from autopar.planner.simulator.rows import rows_of
from autopar.planner.simulator.simulate import Simulator, run, skeleton
from drawn import long_candidate, random_candidate
from random_problems import random_cluster, random_profile


def test_beats_take_as_long_as_the_program() -> None:
    applied = turning = tied = 0
    for seed in range(500):
        rng = random.Random(seed)
        devices = rng.randint(1, 8)
        profile = random_profile(seed, batches=(2, 4, 6, 12), skips=rng.choice([0.0, 0.12, 0.5]))
        costs = CostModel(profile, random_cluster(seed, devices), PlanOptions(gpus=devices))
        candidate = random_candidate(rng, costs)
        times, beats = durations(costs, candidate), action_levels(candidate)
        holders = [stages for _, stages in costs.tied_between(candidate.stages)]
        if beats is not None:
            applied += 1
            turning += bool(times.turns)
            tied += bool(holders)
            expected = run(Simulator(costs).rows_of(candidate), times)
            assert simulate_levels(candidate, times, holders, beats) == pytest.approx(expected, rel=1e-12)
    assert applied > 480
    assert min(turning, tied) > 20


def test_long_programs_of_any_shape_take_as_long_as_one_action_after_the_other() -> None:
    periods, turning = set(), 0
    for seed in range(150):
        candidate, times, flows = long_candidate(seed)
        beats = action_levels(candidate)
        assert beats is not None
        periods.add(beats.period)
        turning += bool(times.turns)
        expected = run(rows_of(skeleton(candidate, flows, ())), times)
        assert simulate_levels(candidate, times, (), beats) == pytest.approx(expected, rel=1e-12)
    assert turning > 50
    assert len(periods) > 10


def test_a_period_is_the_least_one() -> None:
    """By hand: equal depths wait for the last stage's backward, one more than the stage behind does for its own."""
    for stages, depths, period in ((4, (4, 3, 2, 1), 2), (4, (2, 2, 2, 2), 8), (3, (8, 8, 8), 1), (3, (3, 3, 1), 4)):
        placed = tuple(CandidateStage(at, at + 1, (at,), (1,), depths[at]) for at in range(stages))
        beats = action_levels(Candidate(8, 1, "1f1b", placed))
        assert beats is not None
        assert beats.period == period


def test_depths_that_deadlock_have_no_beats() -> None:
    placed = tuple(CandidateStage(at, at + 1, (at,), (1,), depth) for at, depth in enumerate((1, 3)))
    assert action_levels(Candidate(8, 1, "1f1b", placed)) is None
