"""What another trainer can express: a reason, in a line, for everything that it cannot."""

import pytest

from autopar.formats.expressible import Expressible, Grid, first_blocks, grid_of, recomputation_of
from autopar.formats.plan import Plan
from autopar.formats.stage import Crossing
from autopar.interop.target import parts_of, usual_depths
from equal_plans import equal_plan, llama_profile

PROFILE = llama_profile()
PARTS = parts_of(PROFILE)
assert PARTS is not None
BLOCKS = PARTS.names(PROFILE)
TRAINER = Expressible("a trainer", ("1f1b", "interleaved"), shards=("none", "optimizer"), recompute=("none", "blocks"))


def plan_of(*arguments: object, **options: object) -> Plan:
    return equal_plan(PROFILE, *arguments, **options)[0]  # type: ignore[arg-type]


def refusal(plan: Plan, trainer: Expressible = TRAINER) -> str | None:
    return trainer.refusal(plan, BLOCKS, usual_depths(plan))


def test_plans_that_are_alike_are_expressible_and_recomputation_is_all_or_the_first_blocks() -> None:
    assert grid_of(plan_of("1f1b", 3, 2, 4)) == Grid(3, 2, 4, 2, "none")
    assert grid_of(plan_of("1f1b", 3, 2, 4, division="round-robin")) == Grid(3, 2, 2, 4, "none")
    assert grid_of(plan_of("interleaved", 2, 1, 4, chunks=3)) == Grid(2, 1, 4, 4, "none")
    for schedule, replicas in (("1f1b", 1), ("1f1b", 2), ("interleaved", 2)):
        assert refusal(plan_of(schedule, 2, replicas)) is None
    assert refusal(plan_of("1f1b", 2, 2, shard="optimizer")) is None
    assert refusal(plan_of("1f1b", 2, 2, division="round-robin")) is None
    assert refusal(plan_of("1f1b", 2, recompute=range(1, 13))) is None
    alone = TRAINER._replace(schedules=(), single_stage_shards=("parameters",), most_stages=1)
    assert refusal(plan_of("1f1b", 1, 2, shard="parameters"), alone) is None
    assert "no pipelines, and the plan has 2 stages" in str(refusal(plan_of("1f1b", 2), alone))
    assert recomputation_of(plan_of("1f1b", 2), BLOCKS) == "none"
    assert recomputation_of(plan_of("1f1b", 2, recompute=range(1, 13)), BLOCKS) == "blocks"
    assert recomputation_of(plan_of("1f1b", 2, recompute=range(14)), BLOCKS) == "all"
    first = plan_of("1f1b", 2, recompute=(1, 2, 7, 8))
    assert recomputation_of(first, BLOCKS) == "first"
    assert first_blocks(first, BLOCKS) == 2
    for others in ((1, 8), (1, 2, 7)):
        assert recomputation_of(plan_of("1f1b", 2, recompute=others), BLOCKS) is None


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (plan_of("gpipe", 2), "a trainer has no schedule gpipe, only 1f1b, interleaved"),
        (plan_of("1f1b", 2, 2, shard="gradients"), "no replicas of a pipeline's stages that divide gradients"),
        (plan_of("1f1b", 1, 2, 2, shard="optimizer"), "no replicas that divide optimizer"),
        (plan_of("1f1b", 2, depths=(3, 1)), "stage 0 keeps 3 micro-batches in flight, and 2 by a trainer's 1f1b"),
        (plan_of("interleaved", 2, 1, 1), "1 micro-batches are no multiple of 2 devices"),
        (plan_of("1f1b", 2, recompute=(1,)), "stage 0 recomputes 1 of 7 layers"),
        (plan_of("1f1b", 2, recompute=range(14)), "the plan recomputes all layers, and a trainer recomputes no"),
    ],
)
def test_what_is_refused_says_why(plan: Plan, words: str) -> None:
    found = refusal(plan)
    assert found is not None
    assert words in found
    assert "\n" not in found


def test_unequal_stages_turns_and_skips_are_refused() -> None:
    plan = plan_of("1f1b", 2, 2, 4)
    one, two = plan.stages
    uneven = two.model_copy(update={"devices": (2, 3, 4, 5), "shares": (1,) * 4})
    teams = {"devices": (2, 3, 4, 5), "tensor_parallel": 2, "cuts": ("some",)}
    turning = two.model_copy(update={"division": "round-robin", "shares": (4, 4)})
    shares = [stage.model_copy(update={"shares": (3, 1)}) for stage in (one, two)]
    for stages, words in (
        ((one, uneven), "stage 0 has 2 replicas and stage 1 has 4"),
        ((one, two.model_copy(update={"shard": "optimizer"})), "stage 1 divide optimizer, those of stage 0 none"),
        ((one, two.model_copy(update=teams)), "2 devices run each replica of stage 1"),
        ((one, turning), "divide micro-batches differently"),
        (shares, "replicas take 3, 1 rows"),
    ):
        assert words in str(refusal(plan.model_copy(update={"stages": tuple(stages)})))
    odd = plan_of("1f1b", 2, 3, 4, division="round-robin")
    assert "3 replicas take turns at 4 micro-batches" in str(refusal(odd))
    skipping = Crossing(name="x", producer=0, consumers=(1, 2), bytes_per_sample=4, dtype="f32", gradient=True)
    long = plan_of("1f1b", 3)
    assert "tensor x passes from stage 0 to stage 2" in str(refusal(long.model_copy(update={"tensors": (skipping,)})))
    assert "never flushed" in str(refusal(plan.model_copy(update={"weight_policy": "stash"})))
