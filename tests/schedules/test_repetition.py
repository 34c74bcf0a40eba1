"""Pipelines that are never flushed, written out, against a plain loop over their backwards."""

import random
from collections.abc import Iterator, Sequence

import pytest

from autopar.formats.plan import Plan
from autopar.formats.program import BACKWARD, FORWARD, UPDATE, Action
from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.simulator.simulate import skeleton
from autopar.policies import POLICIES
from autopar.schedules.expand import expand
from autopar.schedules.repetition import Repetition, repetition_positions, written_out
from oracles.unflushed import RULES


def _plan(policy: str, depths: Sequence[int], micro_batches: int) -> Plan:
    stages = tuple(CandidateStage(at, at + 1, (at,), (1,), depth) for at, depth in enumerate(depths))
    plan = skeleton(Candidate(micro_batches, 1, "1f1b", stages), (), ())
    return plan.model_copy(update={"weight_policy": policy})


def _plain(depth: int, lag: int, micro_batches: int, count: int) -> Iterator[tuple[str, int]]:
    """Yield a stage's forwards, backwards and updates: a forward ``depth`` micro-batches ahead of every backward."""
    for micro_batch in range(min(depth, count)):
        yield FORWARD, micro_batch
    for micro_batch in range(count + lag):
        if micro_batch < count:
            yield BACKWARD, micro_batch
        if micro_batch >= lag and (micro_batch - lag + 1) % micro_batches == 0:
            yield UPDATE, -1
        if micro_batch + depth < count:
            yield FORWARD, micro_batch + depth


@pytest.mark.parametrize("policy", RULES)
@pytest.mark.parametrize("seed", range(12))
def test_what_is_written_out_fills_goes_on_and_drains_as_a_plain_loop(policy: str, seed: int) -> None:
    draw = random.Random(seed)
    depths = sorted((draw.randint(1, 6) for _ in range(draw.randint(1, 4))), reverse=True)
    micro_batches = max(draw.randint(1, 5), POLICIES[policy].least_micro_batches(depths[0]))
    plan, mini_batches = _plan(policy, depths, micro_batches), draw.randint(1, 6)
    whole = written_out(expand(plan), plan, mini_batches)
    for stage, actions in enumerate(whole.ranks):
        found = [(each.kind, each.micro_batch) for each in actions if each.kind in (FORWARD, BACKWARD, UPDATE)]
        lag = plan.depths[stage].lag
        assert found == list(_plain(depths[stage], lag, micro_batches, micro_batches * mini_batches))


def test_positions_are_those_of_mini_batches_and_none_lead_with_flushes() -> None:
    assert _plan("sync", (3, 2, 1), 4).lead == 0
    # Three micro-batches in flight of two each: the first backward comes in the second repetition behind.
    assert _plan("stash", (3, 2, 1), 2).lead == 2
    here = Repetition(4, 1, stop=6, span=4)
    assert here.ending == range(4, 6)
    assert here.mini_batches_of(Action(UPDATE, 0, 0), 4) == range(4, 6)
    assert here.mini_batches_of(Action(UPDATE, 0, 0), 1) == range(4, 5)
    assert here.place(3) == (7, 0)
    plan = _plan("stash", (2, 1), 1)
    program = expand(plan)
    first = -plan.lead
    for rank, order in enumerate(repetition_positions(program, plan, 3)):
        actions = list(program.ranks[rank])
        for number in range(first, 3):
            here = Repetition(number, 1, 3)
            own = [position for at, position in order if at == number]
            assert own == sorted(set(range(len(actions))) - here.absent(actions))
            assert all(0 <= here.step_of(actions[position]) < 3 for position in own)
