"""Plans of every schedule, any plan, and programs that are edited and halved, train as the plain loop."""

import random

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autopar.formats.plan import Plan, chunks_of, layout_of
from autopar.formats.program import Program
from autopar.schedules import SCHEDULES
from autopar.schedules.check import ProgramError, check_reductions
from autopar.schedules.expand import expand
from drawn_models import equals_plain, model_case, plans
from edits import edited, split


@pytest.mark.some(14)
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_unequal_widths_train_as_the_plain_loop(schedule: str, micro_batches: int) -> None:
    chunks = chunks_of(layout_of(schedule)) or 2
    plan = model_case("everything").plan((1, 3, 2), micro_batches, 3, schedule, chunks=chunks)
    equals_plain("everything", plan)


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


@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
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


@pytest.mark.some(12)
@pytest.mark.parametrize("widths", [(1, 1, 1), (1, 2)])
@pytest.mark.parametrize("recomputed", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("name", ["dropout", "batch_normed", "detached"])
def test_random_numbers_and_batch_statistics_survive_halves_and_recomputation(
    name: str, halved: bool, recomputed: float, widths: tuple[int, ...]
) -> None:
    plan = recomputing(model_case(name).plan(widths, 4, 4), 2, recomputed)
    equals_plain(name, plan, split(expand(plan), 1) if halved else None)


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans("everything"), seed=st.integers(0, 2**16))
def test_actions_moved_about_train_alike(plan: Plan, seed: int) -> None:
    equals_plain("everything", plan, edited(plan, seed))
