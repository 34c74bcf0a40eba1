"""Steps simulated level by level, against the simulation of the expanded program, action by action."""

from __future__ import annotations

import random

import pytest

from autopar.planner import PlanOptions
from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.costs.model import CostModel, Durations, durations
from autopar.planner.simulator.levels import action_levels, simulate_levels
from autopar.planner.simulator.rows import rows_of
from autopar.planner.simulator.simulate import Simulator, run, skeleton
from drawn import long_candidate, random_candidate
from random_problems import random_cluster, random_profile


def test_levels_take_as_long_as_the_program() -> None:
    applied = turning = tied = 0
    for seed in range(500):
        rng = random.Random(seed)
        devices = rng.randint(1, 8)
        profile = random_profile(seed, batches=(2, 4, 6, 12), skips=rng.choice([0.0, 0.12, 0.5]))
        costs = CostModel(profile, random_cluster(seed, devices), PlanOptions(gpus=devices))
        candidate = random_candidate(rng, costs)
        times, levels = durations(costs, candidate), action_levels(candidate)
        holders = [stages for _, stages in costs.tied_between(candidate.stages)]
        if levels is not None:
            applied += 1
            turning += bool(times.turns)
            tied += bool(holders)
            expected = run(Simulator(costs).rows_of(candidate), times)
            assert simulate_levels(candidate, times, holders, levels) == pytest.approx(expected, rel=1e-12)
    assert applied > 480
    assert min(turning, tied) > 20


def test_long_programs_of_any_shape_take_as_long_as_one_action_after_the_other() -> None:
    periods, turning = set(), 0
    for seed in range(150):
        candidate, times, flows = long_candidate(seed)
        levels = action_levels(candidate)
        assert levels is not None
        periods.add(levels.period)
        turning += bool(times.turns)
        expected = run(rows_of(skeleton(candidate, flows, ())), times)
        assert simulate_levels(candidate, times, (), levels) == pytest.approx(expected, rel=1e-12)
    assert turning > 50
    assert len(periods) > 10


def test_an_even_chain_without_messages_takes_the_textbook_time_at_any_length() -> None:
    stages, count = 300, 64
    free = {(at, at + step): 0.0 for at in range(stages) for step in (-1, 1) if 0 <= at + step < stages}
    ones, none = [1.0] * stages, [0.0] * stages
    times = Durations(0.0, list(range(stages)), ones, [2.0] * stages, none, none, none, message_s=free)
    for depths in ([count] * stages, [min(stages - at, count) for at in range(stages)]):
        placed = tuple(CandidateStage(at, at + 1, (at,), (1,), depth) for at, depth in enumerate(depths))
        candidate = Candidate(count, 1, "1f1b", placed)
        levels = action_levels(candidate)
        assert levels is not None
        assert simulate_levels(candidate, times, (), levels) == pytest.approx((count + stages - 1) * 3.0, rel=1e-12)


def test_a_step_of_too_many_late_arrivals_is_not_simulated_by_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate, times, _ = long_candidate(3)
    levels = action_levels(candidate)
    assert levels is not None
    assert simulate_levels(candidate, times, (), levels) is not None
    monkeypatch.setattr("autopar.planner.simulator.levels.MOST_LATE", 1)
    assert simulate_levels(candidate, times, (), levels) is None


def test_a_period_is_the_least_one() -> None:
    """By hand: equal depths wait for the last stage's backward, one more than the stage behind does for its own."""
    for stages, depths, period in ((4, (4, 3, 2, 1), 2), (4, (2, 2, 2, 2), 8), (3, (8, 8, 8), 1), (3, (3, 3, 1), 4)):
        placed = tuple(CandidateStage(at, at + 1, (at,), (1,), depths[at]) for at in range(stages))
        levels = action_levels(Candidate(8, 1, "1f1b", placed))
        assert levels is not None
        assert levels.period == period


def test_depths_that_deadlock_have_no_levels() -> None:
    placed = tuple(CandidateStage(at, at + 1, (at,), (1,), depth) for at, depth in enumerate((1, 3)))
    assert action_levels(Candidate(8, 1, "1f1b", placed)) is None
