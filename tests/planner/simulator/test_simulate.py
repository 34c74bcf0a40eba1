"""Simulations against closed forms and each other; against the executor, tests/runtime/rehearsal/test_steps.py."""

import random
import sys
from collections.abc import Sequence
from itertools import pairwise

import pytest

from autopar.formats.cluster import Cluster, Device, Link
from autopar.formats.plan import Plan
from autopar.formats.profile import Layer, Profile, Tensor
from autopar.formats.timeline import Timeline
from autopar.ownership import Replicas
from autopar.planner import PlanOptions, plan, simulate
from autopar.planner.candidate import Candidate, CandidateStage, Family, place, with_depths
from autopar.planner.costs.durations import durations
from autopar.planner.costs.model import CostModel
from autopar.planner.simulator.rows import rows_of
from autopar.planner.simulator.simulate import Simulator, run
from autopar.schedules import SCHEDULES
from autopar.schedules.expand import expand
from drawn import long_candidate, random_candidate
from random_problems import cost, gpt_profile, local_cluster, profile_of, random_cluster, random_profile

# The package's function of the same name hides the module.
simulating = sys.modules["autopar.planner.simulator.simulate"]


def test_simulators_agree_and_too_many_late_arrivals_are_left_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    turning = tied = 0
    for seed in range(140):
        rng = random.Random(seed)
        devices = rng.randint(1, 8)
        profile = random_profile(seed, batches=(2, 6, 12), skips=rng.choice([0.0, 0.12, 0.5]))
        costs = CostModel(profile, random_cluster(seed, devices), PlanOptions(gpus=devices))
        candidate, simulator = random_candidate(rng, costs), Simulator(costs)
        times = durations(costs, candidate)
        expected = run(simulator.rows_of(candidate), times)
        for action, level in ((0.0, 1.0), (1e6, 0.0)):
            monkeypatch.setattr(simulating, "COST_ACTION", action)
            monkeypatch.setattr(simulating, "COST_LEVEL", level)
            assert simulator.step_s(candidate) == pytest.approx(expected, rel=1e-12)
        if simulating.action_levels(candidate) is not None:
            turning, tied = turning + bool(times.turns), tied + bool(times.tied_s)
    assert min(turning, tied) >= 3
    candidate, times, _ = long_candidate(3)
    levels = simulating.action_levels(candidate)
    assert simulating.simulate_levels(candidate, times, (), levels) is not None
    monkeypatch.setattr("autopar.planner.simulator.simulate.MOST_LATE", 1)
    assert simulating.simulate_levels(candidate, times, (), levels) is None


def test_depths_reductions_and_other_profiles_are_told_apart() -> None:
    """By hand: equal depths wait for the last stage's backward, one more than the stage behind does for its own.

    Depths that deadlock have none.
    """
    costs = CostModel(_chain(4, 32, 1.0, 2.0), _free_cluster(4), PlanOptions())
    family = Family(32, 1, "1f1b")
    frame = place(family, range(1, 5), [Replicas()] * 4)
    simulator = Simulator(costs)
    steps = [simulator.step_s(with_depths(family, frame, depths)) for depths in ((4, 3, 2, 1), (1,) * 4, (4, 3, 2, 1))]
    assert steps == [pytest.approx(105.0), pytest.approx(32 * 12.0), pytest.approx(105.0)]
    for depths, period in (((4, 3, 2, 1), 2), ((2, 2, 2, 2), 8), ((8, 8, 8), 1), ((3, 3, 1), 4), ((1, 3), None)):
        levels = simulating.action_levels(_line(8, depths))
        assert (levels and levels.period) == period
    profile = gpt_profile(blocks=24)
    made = plan(profile, local_cluster(2), PlanOptions(stages="0-25:2"))
    timeline = simulate(made, profile, local_cluster(2))
    last = max(event.end_s for event in timeline if event.action.kind == "B")
    begun = max(event.start_s for event in timeline if event.action.kind == "B")
    reduced = [event for event in timeline if event.action.kind == "A"]
    assert len(reduced) == 2
    for event in reduced:
        assert begun <= event.start_s < last < event.end_s
    made: Plan = plan(gpt_profile(), local_cluster(2), PlanOptions(gpus=2))
    with pytest.raises(Exception, match=r"not of this profile: layer 3 is 'h.2' in the plan and 'head'"):
        simulate(made, gpt_profile(blocks=2), local_cluster(2))
    assert isinstance(simulate(made, gpt_profile(), local_cluster(2)), Timeline)


def _chain(layers: int, batch: int, forward_s: float, backward_s: float) -> Profile:
    names = [f"l{index}" for index in range(layers)]
    none = dict.fromkeys(("parameters_bytes", "trainable_bytes", "gradient_bytes", "optimizer_bytes"), 0)
    costs = (cost(1, forward_s, backward_s, {}, 0, 0),)
    made = [Layer(name=name, modules=(name,), costs=costs, **none) for name in names]
    tensors = [
        Tensor(name=f"t{one}", producer=one, consumers=(two,), bytes_per_sample=0, dtype="f32", gradient=True)
        for one, two in pairwise(names)
    ]
    return profile_of(made, tensors, batch)


def _free_cluster(devices: int) -> Cluster:
    link = Link(level="node", latency_s=0.0, bytes_per_s=1e9)
    return Cluster(devices=(Device(type="cpu", memory_bytes=2**40),) * devices, links=(link,))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 5), (3, 1), (4, 8), (8, 3)])
def test_an_even_pipeline_without_transfers_takes_textbook_time(schedule: str, stages: int, micro_batches: int) -> None:
    costs = CostModel(_chain(stages, micro_batches, 1.0, 2.0), _free_cluster(stages), PlanOptions())
    for depths in SCHEDULES[schedule].warmups(stages, 1, micro_batches).values():
        family = Family(micro_batches, 1, schedule)
        candidate = with_depths(family, place(family, range(1, stages + 1), [Replicas()] * stages), depths)
        assert Simulator(costs).step_s(candidate) == pytest.approx((micro_batches + stages - 1) * 3.0)


def test_a_timeline_holds_every_action_once_and_no_rank_computes_two_things_at_once() -> None:
    profile = gpt_profile(blocks=4)
    made = plan(profile, local_cluster(2), PlanOptions(stages="0-1:2,2-3:1,4-5:2"))
    timeline = simulate(made, profile, local_cluster(2))
    program = expand(made)
    assert timeline.origin == "simulated"
    assert timeline.end_s == made.predicted.step_s
    for rank, actions in enumerate(program.ranks):
        events = [event for event in timeline if event.rank == rank]
        assert sorted(event.action for event in events) == sorted(actions)
        computing = sorted((e.start_s, e.end_s) for e in events if e.action.kind in "FBU")
        assert all(before[1] <= after[0] + 1e-12 for before, after in pairwise(computing))
        assert all(event.start_s <= event.end_s for event in events)
    # Messages of one pair of ranks do not overlap either.
    made = plan(gpt_profile(), local_cluster(2), PlanOptions(stages="0-6:1,7-13:1", bytes_per_s=2e7))
    timeline = simulate(made, gpt_profile(), local_cluster(2))
    for kind in ("S", "SG"):
        sent = sorted((e.start_s, e.end_s) for e in timeline if e.action.kind == kind)
        assert all(before[1] <= after[0] + 1e-12 for before, after in pairwise(sent))


def _line(micro_batches: int, depths: Sequence[int]) -> Candidate:
    """A stage for each depth, of a layer on a device each."""
    stages = tuple(CandidateStage(at, at + 1, (at,), (1,), depth) for at, depth in enumerate(depths))
    return Candidate(micro_batches, 1, "1f1b", stages)


def test_long_programs_and_queues_take_as_long_as_one_action_after_the_other() -> None:
    periods, turning, passing = set(), 0, 0
    for seed in range(120):
        candidate, times, flows = long_candidate(seed, turns=(0.3, 0.0)[seed % 2], skips=0.15 if seed % 3 else 0.05)
        levels = simulating.action_levels(candidate)
        periods.add(levels.period)
        turning += bool(times.turns)
        expected = pytest.approx(run(rows_of(simulating.skeleton(candidate, flows, ())), times), rel=1e-12)
        assert simulating.simulate_levels(candidate, times, (), levels) == expected
        passing += any(abs(times.stage[sender] - times.stage[receiver]) > 1 for sender, receiver in times.message_s)
    assert min(turning, passing) > 20
    assert len(periods) > 10
