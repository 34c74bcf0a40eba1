"""What an optimizer is told of its stage, what of it is refused, and where a user's code prints."""

import random
import re
import sys
from pathlib import Path

import pytest

from autopar.capture.model.source import StageTraits, stage_traits, user_code
from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.formats.program import FORWARD, UPDATE
from autopar.formats.stage import SharedParameter
from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.simulator.simulate import skeleton
from autopar.policies import POLICIES
from autopar.schedules.repetition import Repetition
from oracles.unflushed import RULES

BOTH = ("delay", "replicas")


def planned(depths: list[int], widths: list[int], micro_batches: int, policy: str) -> Plan:
    edges = [sum(widths[:at]) for at in range(len(widths) + 1)]
    stages = tuple(
        CandidateStage(at, at + 1, tuple(range(edges[at], edges[at + 1])), (1,) * widths[at], depth)
        for at, depth in enumerate(depths)
    )
    plan = skeleton(Candidate(micro_batches, 1, "1f1b", stages), (), ())
    return plan.model_copy(update={"weight_policy": policy})


def counted_delay(plan: Plan, stage: int) -> float:
    """Count the updates between the forwards of a mini-batch in the midst of a run and its own update."""
    count, ends = plan.micro_batches, 30
    updates, begun, found = 0, dict[tuple[int, int], int](), list[int]()
    for number in range(-plan.lead, ends):
        here = Repetition(number, count, ends)
        own = plan.ownership.holders(stage)[0]
        for kind, _, micro_batch, _ in plan.policy.repetition(own, plan.depths[stage], plan.span, ()):
            if kind == UPDATE and number >= 0:
                found += [updates - begun[number, index] for index in range(count)] if number == ends // 2 else []
                updates += 1
            elif kind == FORWARD and 0 <= here.place(micro_batch)[0] < ends:
                begun[here.place(micro_batch)] = updates
    return sum(found) / count


@pytest.mark.parametrize("policy", RULES)
@pytest.mark.parametrize("seed", range(6))
def test_delays_are_the_updates_between_a_forward_and_its_own(seed: int, policy: str) -> None:
    draw = random.Random(seed)
    depths = sorted((draw.randint(1, 6) for _ in range(draw.randint(1, 4))), reverse=True)
    widths = [draw.randint(1, 3) for _ in depths]
    micro_batches = max(draw.randint(1, 5), POLICIES[policy].least_micro_batches(depths[0]))
    plan = planned(depths, widths, micro_batches, policy)
    told = stage_traits(plan, BOTH)
    assert [each.replicas for each in told] == widths
    assert [each.delay for each in told] == pytest.approx([counted_delay(plan, at) for at in range(len(depths))])


def test_delays_are_told_alike_of_shared_parameters_and_none_with_flushes() -> None:
    flushed, stash = (planned([3, 2, 1], [2, 1, 3], 2, policy) for policy in ("sync", "stash"))
    assert stage_traits(flushed, BOTH) == [StageTraits(0.0, 2), StageTraits(0.0, 1), StageTraits(0.0, 3)]
    assert stage_traits(stash, ()) == [StageTraits()] * 3
    assert stage_traits(stash, ("delay",)) == [StageTraits(1.0), StageTraits(0.5), StageTraits(0.0)]
    tied = {"tied": (SharedParameter(parameter="wte.weight", stages=(0, 2), bytes=8),)}
    for policy, options, said in (
        ("stash", ("delay",), "asks for delay, which is 1 and 0.5 on stages that share wte.weight"),
        ("sync", BOTH, "asks for replicas, which is 2 and 3 on stages that share wte.weight"),
        ("stash", (), None),
        ("sync", ("delay",), None),
    ):
        plan = planned([3, 2, 1], [2, 1, 3], 2, policy).model_copy(update=tied)
        if said is None:
            assert len(set(stage_traits(plan, options))) == 1
            continue
        with pytest.raises(UsageError, match=f"{re.escape(said)}, .*; leave .* out of its parameters, or plan with"):
            stage_traits(plan, options)


def test_threads_that_run_a_users_code_at_once_leave_standard_output_as_it_was() -> None:
    before, (one, other) = sys.stdout, (user_code(Path("model.py"), "model()") for _ in range(2))
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert sys.stdout is sys.stderr
    other.__exit__(None, None, None)
    assert sys.stdout is before
