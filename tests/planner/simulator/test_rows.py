"""Rows, and who meets in them, against the expanded program that they stand for."""

from __future__ import annotations

import random

import pytest

from autopar.formats.plan import Plan
from autopar.formats.program import KINDS, REDUCE, REDUCE_TIED, Program
from autopar.planner import PlanOptions
from autopar.planner.assemble import assemble
from autopar.planner.candidate import Candidate
from autopar.planner.costs.communication import Sharing
from autopar.planner.costs.model import CostModel, Durations, durations
from autopar.planner.simulator.rows import Lanes, compile_rows, joint_reductions, rows_of, views
from autopar.schedules.expand import expand
from chunked import OTHERS, random_chunked, random_costs
from drawn import random_candidate


def _case(seed: int) -> tuple[CostModel, Candidate, Plan, Durations] | None:
    rng, costs = random.Random(seed), random_costs(2 * seed)
    candidate = random_candidate(rng, costs) if seed % 3 == 0 else random_chunked(rng, costs, rng.choice(OTHERS))
    if candidate is None:
        return None
    made = assemble(costs, candidate, PlanOptions(), 0.0, (), ())
    return costs, candidate, made, durations(costs, candidate)


def _replicas(plan: Plan) -> dict[tuple[int, int], int]:
    """The number of every (stage, rank)'s replica; ranks count devices in the order in which stages first name them."""
    order = list(dict.fromkeys(device for stage in plan.stages for device in stage.devices))
    every = [(index, order.index(device)) for index, stage in enumerate(plan.stages) for device in stage.devices]
    return {each: number for number, each in enumerate(every)}


def _expected(program: Program, replicas: dict[tuple[int, int], int]) -> list[list[tuple[int, int, int, int]]]:
    return [
        [
            (
                KINDS.index(each.kind),
                each.micro_batch,
                -1 if each.peer < 0 else replicas[each.peer_stage, each.peer],
                replicas[each.stage, rank],
            )
            for each in actions
        ]
        for rank, actions in enumerate(program.ranks)
    ]


def test_rows_made_with_and_without_the_program_number_the_replicas_of_its_actions() -> None:
    chunked = 0
    for seed in range(120):
        case = _case(seed)
        if case is None:
            continue
        _, _, plan, times = case
        program = expand(plan)
        assert rows_of(plan) == compile_rows(program, times) == _expected(program, _replicas(plan)), f"seed {seed}"
        chunked += bool(times.rank)
    assert chunked > 20


def test_all_ranks_that_reduce_a_stage_or_a_shared_parameter_meet_once() -> None:
    met = 0
    for seed in range(120):
        case = _case(seed)
        if case is None:
            continue
        _, _, plan, times = case
        program, groups = expand(plan), dict[tuple[str, int], list[int]]()
        for rank, actions in enumerate(program.ranks):
            for each in actions:
                if each.kind in (REDUCE, REDUCE_TIED):
                    key = each.stage if each.kind == REDUCE else each.micro_batch
                    groups.setdefault((each.kind, key), []).append(rank)
        found = joint_reductions(rows_of(plan), times.stage)
        members = {(KINDS[code], key): sorted(each.members) for (code, key), each in found.items()}
        assert members == groups, f"seed {seed}"
        assert all(each.missing == len(each.members) for each in found.values())
        met += len(groups)
    assert met > 60


def test_a_view_has_the_seconds_of_what_a_rank_computes_and_sends_and_lanes_only_where_links_are_shared() -> None:
    shared = 0
    for seed in range(90):
        case = _case(seed)
        if case is None:
            continue
        costs, candidate, plan, times = case
        devices = tuple(dict.fromkeys(candidate.devices))
        rows, program = rows_of(plan), expand(plan)
        tied = [[] for _ in times.tied_s]
        links = tuple(link.model_copy(update={"shared_by": 2}) for link in costs.cluster.links)
        for cluster in (costs.cluster, costs.cluster.model_copy(update={"links": links})):
            wiring = Lanes(times, Sharing.of(cluster, costs.devices).among(devices), tied)
            assert cluster is not costs.cluster or not wiring.lanes
            shared += bool(wiring.lanes)
            seconds = {"F": times.forward_s, "B": times.backward_s, "I": times.input_s, "W": times.weight_s}
            for view, row, actions in zip(views(rows, times, wiring), rows, program.ranks, strict=True):
                for at, (each, (_, _, peer, own)) in enumerate(zip(actions, row, strict=True)):
                    if each.kind in seconds:
                        assert view.seconds[at] == seconds[each.kind][own]
                    if each.kind in ("S", "SG"):
                        assert view.seconds[at] == pytest.approx(times.message_s[own, peer])
                    assert (view.queues[at] is not None) == (each.kind in ("S", "SG", "R", "RG"))
    assert shared > 20
