"""Plans of every schedule, any plan, and programs that are edited and halved, train as the plain loop."""

import random

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autopar.formats.plan import Plan
from autopar.formats.program import Program
from autopar.formats.stage import chunks_of, layout_of
from autopar.schedules import SCHEDULES
from autopar.schedules.check import ProgramError, check_reductions
from autopar.schedules.expand import expand
from drawn_models import equals_plain, model_case, plans
from edits import edited, split


@pytest.mark.some(9)
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


# Two rows or more for batch statistics; blocks draw random numbers, by a generator that threads take in turn.
NARROW = {"most_ranks": 6, "most_rows": 7, "least_share": 2}


@pytest.mark.parametrize(
    ("name", "examples", "limits"), [("everything", 8, {}), ("narrow_gpt", 3, NARROW), ("narrow_resnet", 3, NARROW)]
)
@pytest.mark.reliability(38, 39, 40, 41, 42)
def test_any_plan_survives_halves_and_recomputation(name: str, examples: int, limits: dict[str, int]) -> None:
    """With skips, ties, masks, integers and token counts; with dropout and batch statistics."""
    share = st.sampled_from([0.0, 0.5, 1.0])

    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @given(plan=plans(name, **limits), seed=st.integers(0, 2**20), halved=share, recomputed=share)
    def trains_alike(plan: Plan, seed: int, halved: float, recomputed: float) -> None:
        plan, program = recomputing(plan, seed, recomputed), split(expand(plan), seed, halved)
        assume(keeps_one_order(program))
        equals_plain(name, plan, program)

    trains_alike()


@pytest.mark.parametrize("widths", [(2,), (3, 1)])
def test_a_parameter_of_several_recomputed_layers_is_reduced_when_all_of_them_have_run(widths: tuple[int, ...]) -> None:
    case = model_case("everything")
    cuts = [len(case.graph.layers) - 1] if len(widths) > 1 else None
    equals_plain("everything", case.plan(widths, 2, 5, cuts=cuts, recompute=True))


@pytest.mark.some(5)
@pytest.mark.parametrize(("widths", "turns"), [((1, 1, 1), ()), ((1, 2), ()), ((2, 1), (0,)), ((2, 3), (0, 1))])
@pytest.mark.parametrize("recomputed", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("name", ["dropout", "batch_normed", "detached"])
@pytest.mark.reliability(38, 42)
def test_random_numbers_and_batch_statistics_survive_halves_and_recomputation(
    name: str, halved: bool, recomputed: float, widths: tuple[int, ...], turns: tuple[int, ...]
) -> None:
    depths = (2, 1) if turns == (0, 1) else None
    plan = recomputing(model_case(name).plan(widths, 5, 4, warmup=depths, turns=turns), 2, recomputed)
    equals_plain(name, plan, split(expand(plan), 1) if halved else None)


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans("everything"), seed=st.integers(0, 2**16))
def test_actions_moved_about_train_alike(plan: Plan, seed: int) -> None:
    equals_plain("everything", plan, edited(plan, seed))
