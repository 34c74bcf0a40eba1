"""The simulator against closed forms and against a naive solution of the program's dependencies."""

from __future__ import annotations

import random
import sys
import time
from itertools import pairwise

import pytest

from autopar.formats.cluster import Cluster, Device, Link
from autopar.formats.plan import Plan
from autopar.formats.profile import Layer, Profile, Tensor
from autopar.formats.program import Program
from autopar.formats.timeline import Timeline
from autopar.planner import PlanOptions, plan, simulate
from autopar.planner.assemble import assemble
from autopar.planner.candidate import Family, place, with_depths
from autopar.planner.costs.model import CostModel, Durations, durations
from autopar.planner.simulator.simulate import Simulator, compile_rows, run, trace
from autopar.schedules import SCHEDULES
from autopar.schedules.expand import expand
from drawn import random_candidate
from random_problems import cost, gpt_profile, local_cluster, profile_of, random_cluster, random_profile

Times = dict[tuple[int, int], float]
# The package's function of the same name hides the module.
simulating = sys.modules["autopar.planner.simulator.simulate"]


def _naive_ends(program: Program, times: Durations) -> list[float]:
    """Relax every action's end until nothing moves: the least solution of the program's constraints."""
    rows = [[tuple(action)[:5] for action in rank] for rank in program.ranks]
    ends = [[0.0] * len(row) for row in rows]
    sends = {
        (kind, rank, peer, index): (rank, at)
        for rank, row in enumerate(rows)
        for at, (kind, _, index, peer, _) in enumerate(row)
        if kind in ("S", "SG")
    }
    groups: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for rank, row in enumerate(rows):
        for at, (kind, stage, index, _, _) in enumerate(row):
            if kind in ("A", "T"):
                groups.setdefault((kind, stage if kind == "A" else index), []).append((rank, at))
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            clock = times.overhead_s
            queue: dict[int, float] = {}
            for at, (kind, stage, index, peer, _) in enumerate(row):
                if kind in ("S", "SG"):
                    end = queue[peer] = max(clock, queue.get(peer, 0.0)) + times.message_s[rank, peer]
                else:
                    if kind in ("R", "RG"):
                        sender = sends["S" if kind == "R" else "SG", peer, rank, index]
                        clock = max(clock, ends[sender[0]][sender[1]])
                    elif kind in ("A", "T"):
                        for other, place_of in groups[kind, stage if kind == "A" else index]:
                            before = max(
                                (ends[other][p] for p in range(place_of) if rows[other][p][0] not in "SG"), default=0.0
                            )
                            more = times.exposed_s[other] if kind == "A" else times.tied_s[index]
                            clock = max(clock, max(before, times.overhead_s) + more)
                    else:
                        each = {"F": times.forward_s, "B": times.backward_s, "U": times.update_s}[kind]
                        clock += each[rank]
                    end = clock
                moved |= end != ends[rank][at]
                ends[rank][at] = end
    return [max(row) for row in ends]


def test_the_simulator_solves_the_programs_dependencies() -> None:
    for seed in range(120):
        rng = random.Random(seed)
        devices = rng.randint(1, 6)
        profile = random_profile(seed, batches=(2, 4, 6))
        costs = CostModel(profile, random_cluster(seed, devices), PlanOptions(gpus=devices))
        candidate = random_candidate(rng, costs)
        made = assemble(costs, candidate, PlanOptions(), 0.0, (), ())
        program, times = expand(made), durations(costs, candidate)
        step_s = run(compile_rows(program, times), times)
        assert step_s == pytest.approx(max(_naive_ends(program, times)), rel=1e-12)
        assert step_s == pytest.approx(Simulator(costs).step_s(candidate), rel=1e-12)
        assert step_s == trace(program, times).end_s == made.predicted.step_s


def test_whichever_simulator_is_asked_a_step_takes_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(200):
        rng = random.Random(seed)
        devices = rng.randint(1, 8)
        profile = random_profile(seed, batches=(2, 6, 12), skips=rng.choice([0.0, 0.12, 0.5]))
        costs = CostModel(profile, random_cluster(seed, devices), PlanOptions(gpus=devices))
        candidate = random_candidate(rng, costs)
        simulator = Simulator(costs)
        expected = run(simulator.rows_of(candidate), durations(costs, candidate))
        for action, level in ((0.0, 1.0), (1e6, 0.0)):
            monkeypatch.setattr(simulating, "COST_ACTION", action)
            monkeypatch.setattr(simulating, "COST_LEVEL", level)
            assert simulator.step_s(candidate) == pytest.approx(expected, rel=1e-12)


def test_candidates_that_differ_in_depths_are_told_apart() -> None:
    costs = CostModel(_chain(4, 32, 1.0, 2.0), _free_cluster(4), PlanOptions())
    family = Family(32, 1, "1f1b")
    frame = place(family, range(1, 5), (1,) * 4)
    simulator = Simulator(costs)
    steps = [simulator.step_s(with_depths(family, frame, depths)) for depths in ((4, 3, 2, 1), (1,) * 4, (4, 3, 2, 1))]
    assert steps == [pytest.approx(105.0), pytest.approx(32 * 12.0), pytest.approx(105.0)]


def _chain(layers: int, batch: int, forward_s: float, backward_s: float) -> Profile:
    names = [f"l{index}" for index in range(layers)]
    made = [
        Layer(
            name=name,
            modules=(name,),
            parameters_bytes=0,
            trainable_bytes=0,
            gradient_bytes=0,
            optimizer_bytes=0,
            costs=(cost(1, forward_s, backward_s, {}, 0, 0),),
        )
        for name in names
    ]
    tensors = [
        Tensor(
            name=f"t{index}",
            producer=names[index],
            consumers=(names[index + 1],),
            bytes_per_sample=0,
            dtype="f32",
            gradient=True,
        )
        for index in range(layers - 1)
    ]
    return profile_of(made, tensors, batch)


def _free_cluster(devices: int) -> Cluster:
    link = Link(level="node", latency_s=0.0, bytes_per_s=1e9)
    return Cluster(devices=(Device(type="cpu", memory_bytes=2**40),) * devices, links=(link,))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 5), (3, 1), (4, 8), (8, 3)])
def test_an_even_pipeline_without_transfers_takes_the_textbook_time(
    schedule: str, stages: int, micro_batches: int
) -> None:
    costs = CostModel(_chain(stages, micro_batches, 1.0, 2.0), _free_cluster(stages), PlanOptions())
    for depths in SCHEDULES[schedule].warmups(stages, 1, micro_batches).values():
        family = Family(micro_batches, 1, schedule)
        candidate = with_depths(family, place(family, range(1, stages + 1), (1,) * stages), depths)
        assert Simulator(costs).step_s(candidate) == pytest.approx((micro_batches + stages - 1) * 3.0)


def test_a_timeline_holds_every_action_once_and_no_rank_computes_two_things_at_once() -> None:
    made = plan(gpt_profile(), local_cluster(2), PlanOptions(stages="0-4:2,5-9:1,10-13:2"))
    timeline = simulate(made, gpt_profile(), local_cluster(2))
    program = expand(made)
    assert timeline.origin == "simulated"
    assert timeline.end_s == made.predicted.step_s
    for rank, actions in enumerate(program.ranks):
        events = [event for event in timeline if event.rank == rank]
        assert sorted(event.action for event in events) == sorted(actions)
        computing = sorted((e.start_s, e.end_s) for e in events if e.action.kind in "FBU")
        assert all(before[1] <= after[0] + 1e-12 for before, after in pairwise(computing))
        assert all(event.start_s <= event.end_s for event in events)


def test_messages_of_one_pair_of_ranks_never_overlap() -> None:
    made = plan(gpt_profile(), local_cluster(2), PlanOptions(stages="0-6:1,7-13:1", bytes_per_s=2e7))
    timeline = simulate(made, gpt_profile(), local_cluster(2))
    for kind in ("S", "SG"):
        sent = sorted((e.start_s, e.end_s) for e in timeline if e.action.kind == kind)
        assert all(before[1] <= after[0] + 1e-12 for before, after in pairwise(sent))


def test_gradients_are_reduced_behind_the_last_backward_only_where_they_are_late() -> None:
    profile = gpt_profile(blocks=24)
    made = plan(profile, local_cluster(2), PlanOptions(stages="0-25:2"))
    timeline = simulate(made, profile, local_cluster(2))
    last = max(event.end_s for event in timeline if event.action.kind == "B")
    begun = max(event.start_s for event in timeline if event.action.kind == "B")
    reduced = [event for event in timeline if event.action.kind == "A"]
    assert len(reduced) == 2
    for event in reduced:
        assert begun <= event.start_s < last < event.end_s


def test_eight_ranks_and_sixty_four_micro_batches_simulate_in_milliseconds() -> None:
    costs = CostModel(_chain(8, 64, 1.0, 2.0), _free_cluster(8), PlanOptions())
    family = Family(64, 1, "1f1b")
    candidate = with_depths(family, place(family, range(1, 9), (1,) * 8), range(8, 0, -1))
    simulator = Simulator(costs)
    simulator.step_s(candidate)
    began_s = time.process_time()
    for _ in range(5):
        simulator.step_s(candidate)
    assert (time.process_time() - began_s) / 5 < 0.1


def test_a_plan_of_another_profile_is_refused() -> None:
    made: Plan = plan(gpt_profile(), local_cluster(2), PlanOptions(gpus=2))
    with pytest.raises(Exception, match=r"not of this profile: layer 3 is 'h.2' in the plan and 'head'"):
        simulate(made, gpt_profile(blocks=2), local_cluster(2))
    assert isinstance(simulate(made, gpt_profile(), local_cluster(2)), Timeline)
