"""Backwards in two halves, the second whenever the program has it, train as whole ones do."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autopar.formats.plan import Plan
from autopar.formats.program import Program
from autopar.schedules.check import ProgramError, check_reductions
from autopar.schedules.expand import expand
from dictated import dictate
from drawn_models import captured, equals_plain, plans
from split_programs import split


def keeps_one_order(program: Program) -> bool:
    """Tell whether replicas of several stages begin their reductions alike, as is asked of programs from files."""
    try:
        check_reductions(program)
    except ProgramError:
        return False
    return True


def recomputing(plan: Plan, seed: int, share: float) -> Plan:
    """Have some layers of a plan recomputed."""
    draw = random.Random(seed)
    stages = []
    for stage in plan.stages:
        chosen = tuple(name for name in stage.layers if draw.random() < share)
        stages.append(stage.model_copy(update={"recompute": chosen}))
    return plan.model_copy(update={"stages": tuple(stages)})


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(
    plan=plans("everything"),
    seed=st.integers(0, 2**20),
    halved=st.sampled_from([0.0, 0.5, 1.0]),
    recomputed=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_skips_ties_integers_and_counts_survive_halves_and_recomputation(
    plan: Plan, seed: int, halved: float, recomputed: float
) -> None:
    plan, program = recomputing(plan, seed, recomputed), split(expand(plan), seed, halved)
    assume(keeps_one_order(program))
    equals_plain("everything", plan, program)


@pytest.mark.parametrize("widths", [(1, 1, 1), (1, 2)])
@pytest.mark.parametrize("recomputed", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("name", ["dropout", "normed", "detached"])
def test_random_numbers_and_batch_statistics_survive_halves_and_recomputation(
    name: str, halved: bool, recomputed: float, widths: tuple[int, ...]
) -> None:
    model, graph, _ = captured(name)
    plan = recomputing(dictate(graph, model, widths, micro_batches=4, rows=4), 2, recomputed)
    equals_plain(name, plan, split(expand(plan), 1) if halved else None)
