"""Steps of ranks that run several stages, and of backwards in halves, against a naive solution and the bound."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from autopar.formats.cluster import Overlap
from autopar.formats.plan import Plan
from autopar.planner.assemble import assemble
from autopar.planner.bounds import least_s
from autopar.planner.candidate import Candidate
from autopar.planner.costs.durations import durations
from autopar.planner.costs.links import Sharing, Traffic
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions
from autopar.planner.simulator.simulate import Simulator, run
from autopar.schedules.expand import expand, messages, stages_of
from chunked import OTHERS, random_chunked, random_costs


def _naive_s(plan: Plan, costs: CostModel, candidate: Candidate) -> float:
    """Relax the ends of all actions until none moves, with prices asked of the cost model one by one."""
    stages, count = candidate.stages, candidate.micro_batches
    sizes = {
        (producer, consumer): flow
        for producer, consumer, flow in costs.flows.exchanges([stage.stop for stage in stages])
    }
    routes = {}
    for message in messages(plan):
        flow, rows = sizes[message.producer, message.consumer], message.stop - message.start
        ends = (message.sender, message.producer), (message.receiver, message.consumer)
        devices = [stages[stage].devices[_replica(plan, rank)] for rank, stage in ends]
        routes["S", *ends] = costs.message_s(rows * flow.bytes_per_sample, *devices)
        routes["SG", *ends[::-1]] = costs.message_s(rows * flow.gradient_bytes_per_sample, *devices[::-1])
    overhead_s = costs.profile.step_overhead_s
    done: dict[object, float] = defaultdict(float)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(plan_actions(plan)):
            clock, replica, reduced = overhead_s, _replica(plan, rank), 0.0
            queue: dict[int, float] = defaultdict(float)
            for action in actions:
                kind, stage, index, peer, peer_stage, _ = action
                placed = stages[stage]
                if kind in ("F", "B", "I", "W"):
                    halves = costs.halves_s(placed, replica, count) if kind in "IW" else (0.0, 0.0)
                    prices = {"F": costs.forward_s, "B": lambda s, r: costs.backward_s(s, r, count)}
                    clock += prices[kind](placed, replica) if kind in prices else halves[kind == "W"]
                elif kind in ("S", "SG"):
                    queue[peer] = max(queue[peer], clock) + routes[kind, (rank, stage), (peer, peer_stage)]
                    moved |= _put(done, (kind, rank, stage, peer, peer_stage, index), queue[peer])
                    continue
                elif kind in ("R", "RG"):
                    clock = max(clock, done["S" if kind == "R" else "SG", peer, peer_stage, rank, stage, index])
                elif kind == "A":
                    made = [each.kind for each in actions if each.stage == stage and each.kind in "BW"]
                    last = max(done["end", rank, each] for each in actions if each.stage == stage and each.kind in "BW")
                    exposed_s = costs.replica_exposed_s(placed, replica, split=made[-1] == "W")
                    moved |= _put(done, ("ready", stage, rank), last + exposed_s)
                    ends = [done[key] for key in list(done) if key[:2] == ("ready", stage)]  # type: ignore[index]
                    reduced = max(*ends, 0.0, reduced + costs.reduce_s(placed) if reduced else 0.0)
                    clock = max(clock, reduced)
                elif kind == "T":
                    moved |= _put(done, ("tied", index, rank), clock)
                    number, holders = costs.tied_between(stages)[index]
                    devices = list({device: 0 for holder in holders for device in stages[holder].devices})
                    come = max(done[key] for key in list(done) if key[:2] == ("tied", index))  # type: ignore[index]
                    clock = max(clock, come + costs.tied_s(number, devices))
                else:
                    clock += sum(costs.update_s(stages[each]) for each in stages_of(plan, rank)[0])
                moved |= _put(done, ("end", rank, action), clock)
    return max(seconds for key, seconds in done.items() if key[0] == "end")  # type: ignore[index]


def plan_actions(plan: Plan) -> list[list[object]]:
    return [list(rank) for rank in expand(plan).ranks]


def _put(done: dict[object, float], key: object, seconds: float) -> bool:
    moved = key not in done or done[key] != seconds
    done[key] = seconds
    return moved


def _replica(plan: Plan, rank: int) -> int:
    return stages_of(plan, rank)[1]


@pytest.mark.parametrize("schedule", OTHERS)
def test_a_step_is_the_least_solution_of_its_program(schedule: str) -> None:
    tried = 0
    for seed in range(60):
        rng, costs = random.Random(seed), random_costs(seed)
        candidate = random_chunked(rng, costs, schedule)
        if candidate is not None:
            made = assemble(costs, candidate, PlanOptions(), 0.0, (), ())
            step_s = Simulator(costs).step_s(candidate)
            assert step_s == pytest.approx(_naive_s(made, costs, candidate), rel=1e-9), seed
            assert step_s == pytest.approx(made.predicted.step_s, rel=1e-12), seed
            tried += len(candidate.stages) > 2
    assert tried >= 15


@pytest.mark.parametrize("schedule", OTHERS)
def test_no_step_is_shorter_than_its_bound(schedule: str) -> None:
    tight = tried = 0
    for seed in range(300):
        rng, costs = random.Random(seed), random_costs(seed)
        simulator = Simulator(costs)
        for _ in range(5):
            candidate = random_chunked(rng, costs, schedule)
            if candidate is not None:
                step_s, bound_s = simulator.step_s(candidate), least_s(costs, candidate)
                assert bound_s <= step_s * (1 + 1e-9), f"seed {seed}: {candidate}"
                tight += bound_s >= 0.99 * step_s
                tried += 1
    assert tight > 0.2 * tried > 100


@pytest.mark.parametrize("schedule", OTHERS)
def test_contention_slows_these_schedules_by_what_it_says_and_never_shortens_a_step(schedule: str) -> None:
    slowed = 0
    for seed in range(60):
        rng, costs = random.Random(seed), random_costs(seed)
        candidate = random_chunked(rng, costs, schedule)
        if candidate is None:
            continue
        times = durations(costs, candidate)
        devices = tuple(dict.fromkeys(device for stage in candidate.stages for device in stage.devices))
        rows = Simulator(costs).rows_of(candidate)
        alone_s = run(rows, times)
        levels = dict.fromkeys(link.level for link in costs.cluster.links)
        for factor in (1 + 1e-12, 1.5):
            overlaps = tuple(Overlap(level=level, compute=factor, communication=factor) for level in levels)
            cluster = costs.cluster.model_copy(update={"overlaps": overlaps})
            found = run(rows, times, Traffic(Sharing.of(cluster, costs.devices), devices))
            if factor < 1.1:
                # Event by event, with next to nothing slowed: the same rules.
                assert found == pytest.approx(alone_s, rel=1e-9), seed
            assert found >= alone_s * (1 - 1e-9), seed
        slowed += found > alone_s * 1.001
        links = tuple(link.model_copy(update={"shared_by": rng.choice([2, 8])}) for link in costs.cluster.links)
        crowded = Sharing.of(costs.cluster.model_copy(update={"links": links}), costs.devices)
        assert run(rows, times, Traffic(crowded, devices)) >= alone_s * (1 - 1e-9), seed
    assert slowed >= 10
