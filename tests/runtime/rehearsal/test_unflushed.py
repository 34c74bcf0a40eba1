"""Pipelines that are never flushed take, performed by the executor in virtual time, what was simulated."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autopar.errors import AutoparError, UsageError
from autopar.formats.plan import Plan
from autopar.formats.program import FORWARD, RECEIVE, SEND, Fault, Program, RankProgram
from autopar.formats.timeline import Timeline
from autopar.planner import PlanOptions, action_prices, plan, simulate
from autopar.planner.simulator.simulate import mini_batches
from autopar.runtime.rehearsal.steps import rehearse_steps
from autopar.schedules.check import check, check_bounds
from autopar.schedules.continuing import lead
from autopar.schedules.expand import expand
from edits import edited
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile

POLICIES = ("stash", "vertical-sync", "2bw", "predict", "pipemare")


def ends(timeline: Timeline) -> list[tuple[int, str, float]]:
    """Return when what ranks compute and reduce ended, in their order."""
    found = [(each.rank, each.end_s, str(each.action)) for each in timeline if each.action.kind in "FBUPCATN"]
    return [(rank, text, end_s) for rank, end_s, text in sorted(found)]


def drawn(seed: int) -> tuple[Plan, object, object] | None:
    """Return a plan of some policy with depths of its own, its profile and cluster; none where no plan obeys."""
    draw = random.Random(seed)
    profile, cluster = random_profile(seed, batches=(2, 4, 6)), random_cluster(seed, 4)
    policy = POLICIES[seed % len(POLICIES)]
    more: dict[str, object] = {"anneal_steps": 5} if policy == "pipemare" else {}
    if policy == "predict":
        more = {"ahead": ("counted", "xpipe")[seed // len(POLICIES) % 2]}
    if policy == "stash" and seed % 2:
        # Replicas may take turns.
        more["micro_batches"] = 1
    options = PlanOptions(policy=policy, min_stages=draw.choice([1, 2]), **more)  # type: ignore[arg-type]
    try:
        made = plan(profile, cluster, options)
    except AutoparError:
        return None
    extra = draw.choice([0, 1, 2]) if policy != "2bw" else 0
    stages = tuple(each.model_copy(update={"warmup": each.warmup + extra}) for each in made.stages)
    return made.model_copy(update={"stages": stages}), profile, cluster


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_what_is_rehearsed_is_what_was_simulated(first: int) -> None:
    cases = 0
    for seed in range(first, first + 10):
        found = drawn(seed)
        if found is None:
            continue
        made, *inputs = found
        simulated = simulate(made, *inputs)  # type: ignore[arg-type]
        prices = action_prices(made, *inputs)  # type: ignore[arg-type]
        rehearsed = rehearse_steps(made, inputs[0], prices, mini_batches(made), threads=True)  # type: ignore[arg-type]
        assert len(rehearsed.steps_s) == mini_batches(made)
        for one, two in zip(ends(rehearsed.timeline), ends(simulated), strict=True):
            assert one[:2] == two[:2]
            assert one[2] == pytest.approx(two[2], rel=1e-9, abs=1e-9 * simulated.end_s)
        cases += 1
    assert cases >= 3


@pytest.mark.slow
def test_rehearsed_replicas_in_turn_take_what_was_simulated() -> None:
    spans = set()
    for seed in range(40):
        profile, cluster = random_profile(seed, batches=(1, 2, 4)), random_cluster(seed, 5)
        try:
            made = plan(profile, cluster, PlanOptions(policy="stash", micro_batches=1))
        except AutoparError:
            continue
        if made.span == 1:
            continue
        spans.add(made.span)
        simulated, prices = simulate(made, profile, cluster), action_prices(made, profile, cluster)
        rehearsed = rehearse_steps(made, profile, prices, mini_batches(made), threads=True)
        assert ends(rehearsed.timeline) == [
            (rank, text, pytest.approx(end_s, rel=1e-9, abs=1e-9 * simulated.end_s))
            for rank, text, end_s in ends(simulated)
        ]
        # A mini-batch ends with the last update that has it.
        assert sum(rehearsed.steps_s) == pytest.approx(simulated.end_s, rel=1e-9)
    assert len(spans) >= 3


def swapped(program: Program) -> Program:
    """Return a program that takes the second of every two micro-batches forward before the first, on all ranks."""
    ranks = []
    for actions in program.ranks:
        forth = (FORWARD, SEND, RECEIVE)
        other = [each._replace(micro_batch=each.micro_batch ^ 1) if each.kind in forth else each for each in actions]
        ranks.append(RankProgram.of(other))
    return replace(program, ranks=tuple(ranks))


@pytest.mark.parametrize("policy", ["stash", "vertical-sync", "2bw", "pipemare"])
def test_another_order_of_forwards_changes_what_is_rehearsed_and_simulated_alike(policy: str) -> None:
    profile, cluster = gpt_profile(blocks=6), local_cluster(3)
    profile = profile.model_copy(update={"tied": ()})
    more: dict[str, int] = {"anneal_steps": 5} if policy == "pipemare" else {}
    micro_batches = 4 if policy == "2bw" else 2
    options = PlanOptions(policy=policy, stages="0-3:1,4-6:1,7-7:1", micro_batches=micro_batches, **more)  # type: ignore[arg-type]
    made = plan(profile, cluster, options)
    depths = zip(made.stages, (5, 3, 3), strict=True)
    stages = tuple(stage.model_copy(update={"warmup": depth}) for stage, depth in depths)
    made = made.model_copy(update={"stages": stages})
    program = swapped(expand(made))
    check(program, made)
    check_bounds(program, made)
    steps = mini_batches(made)
    prices = action_prices(made, profile, cluster, program)
    rehearsed = rehearse_steps(made, profile, prices, steps, program=program, threads=True)
    simulated, usual = simulate(made, profile, cluster, program), simulate(made, profile, cluster)
    for one, two in zip(ends(rehearsed.timeline), ends(simulated), strict=True):
        assert one[:2] == two[:2]
        assert one[2] == pytest.approx(two[2], rel=1e-9, abs=1e-9 * simulated.end_s)
    assert ends(simulated) != ends(usual)


@pytest.mark.slow
def test_programs_edited_at_random_take_as_long_as_simulated() -> None:
    moved = 0
    for seed in range(60):
        found = drawn(seed)
        if found is None:
            continue
        made, *inputs = found
        program = edited(made, seed)
        moved += program != expand(made)
        prices = action_prices(made, *inputs, program)  # type: ignore[arg-type]
        rehearsed = rehearse_steps(made, inputs[0], prices, mini_batches(made), program=program, threads=True)  # type: ignore[arg-type]
        for one, two in zip(ends(rehearsed.timeline), ends(simulate(made, *inputs, program)), strict=True):  # type: ignore[arg-type]
            assert one[:2] == two[:2]
            assert one[2] == pytest.approx(two[2], rel=1e-9, abs=1e-12), seed
    assert moved >= 15


def test_an_action_of_another_price_is_found() -> None:
    found = drawn(5)
    assert found is not None
    made, *inputs = found
    prices = action_prices(made, *inputs)  # type: ignore[arg-type]
    key = "F@0"
    prices.ranks[0].seconds[key] *= 1.5
    rehearsed = rehearse_steps(made, inputs[0], prices, mini_batches(made), threads=True)  # type: ignore[arg-type]
    assert ends(rehearsed.timeline) != ends(simulate(made, *inputs))  # type: ignore[arg-type]


@pytest.mark.slow
def test_processes_perform_it_too_and_steps_are_as_long_as_the_period() -> None:
    found = next(each for each in map(drawn, range(0, 60, 5)) if each is not None and len(each[0].devices) <= 3)
    made, *inputs = found
    prices = action_prices(made, *inputs)  # type: ignore[arg-type]
    rehearsed = rehearse_steps(made, inputs[0], prices, 2 * lead(made) + 8, threads=False)  # type: ignore[arg-type]
    middle = rehearsed.steps_s[lead(made) + 2 : -lead(made) - 1]
    assert max(middle) == pytest.approx(made.predicted.step_s, rel=0.2)


def test_what_is_lost_is_counted_with_flushes_alone() -> None:
    found = drawn(0)
    assert found is not None
    made, *inputs = found
    prices = action_prices(made, *inputs)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="`inject_fault`: what is lost is counted for `policy='sync'` alone"):
        rehearse_steps(made, inputs[0], prices, 3, threads=True, faults=[Fault.parse("kill@0:1")])  # type: ignore[arg-type]
