"""Continuing: pipelines that are never flushed repeat one list of actions, each time some micro-batches further on.

With K_s micro-batches in flight on stage s, T of them for an update, and updates that come L_s micro-batches late,
repetition i has the backwards of micro-batches iT + L_s to iT + L_s + T - 1, each followed by the forward K_s
micro-batches ahead, and behind the last backward the update of mini-batch i. Repetitions begin before the first
mini-batch: an action of a micro-batch that there is none of is left out, which fills the pipeline, and drains it in the
end. A drained pipeline is filled again the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autopar.formats.plan import Plan
from autopar.formats.program import (
    BACKWARD,
    BEGIN_SUM,
    CORRECT,
    FORWARD,
    PREDICT,
    REDUCTIONS,
    UPDATE,
    Action,
    Program,
    RankProgram,
)
from autopar.policies import POLICIES, distances
from autopar.policies.policy import StageDepths
from autopar.policies.two_buffers import sum_lag


class RepetitionEntry(NamedTuple):
    """One entry of a stage's repetition, without messages."""

    kind: str
    micro_batch: int
    """Counted from the repetition's first backward."""
    version: int
    """How many updates behind the newest weights it sees them."""


def depths_of(plan: Plan, stage: int) -> StageDepths:
    """Return how deep a stage is, for the weight policy."""
    return plan.depths[stage]


def repetition(plan: Plan, stage: int) -> Iterator[RepetitionEntry]:
    """Yield what a stage of a plan with a weight policy computes in one repetition, its update included."""
    depths = depths_of(plan, stage)
    depth, micro_batches, policy = depths.depth, depths.micro_batches, POLICIES[plan.weight_policy]
    behind = [distances(policy, depths, index) for index in range(micro_batches)]
    last = micro_batches - 1
    for index in range(depths.lag, depths.lag + micro_batches):
        yield RepetitionEntry(BACKWARD, index, behind[index % micro_batches].backward)
        if policy.sums_gradients and (index - sum_lag(depths)) % micro_batches == last:
            yield RepetitionEntry(BEGIN_SUM, index - sum_lag(depths), 0)
        if index == last + depths.lag:
            yield RepetitionEntry(UPDATE, -1, 0)
            if policy.prepares_backwards(depths):
                yield RepetitionEntry(CORRECT, -1, 0)
        if policy.prepares_forwards(depths) and (depth + index) % micro_batches == 0:
            yield RepetitionEntry(PREDICT, depth + index, 0)
        yield RepetitionEntry(FORWARD, depth + index, behind[(depth + index) % micro_batches].forward)
        if not policy.sums_gradients and (depth + index) % micro_batches == last:
            # Nothing but losses and what they counted, which is known once the forwards are done.
            yield RepetitionEntry(BEGIN_SUM, depth + index, 0)


def lead(plan: Plan) -> int:
    """Return how many repetitions the first forward of a plan is before the first backward; 0 of one with flushes."""
    if plan.weight_policy == "sync":
        return 0
    return -(-max(stage.depth + stage.lag for stage in plan.depths) // plan.micro_batches)


class Repetition(NamedTuple):
    """One repetition of a program, or one step with a flush, and which mini-batches there are."""

    number: int
    """From the first mini-batch's backwards on; the pipeline is filled in negative ones."""
    micro_batches: int
    """Of a mini-batch."""
    stop: int
    """The first mini-batch that there is none of."""
    start: int = 0
    """The first that there is."""

    def place(self, micro_batch: int) -> tuple[int, int]:
        """Return mini-batch and micro-batch within it of an action's ``micro_batch``."""
        ahead, index = divmod(micro_batch, self.micro_batches)
        return self.number + ahead, index

    def absent(self, actions: Sequence[Action]) -> frozenset[int]:
        """Return the positions of actions of mini-batches that there are none of."""
        return frozenset(position for position, action in enumerate(actions) if not self.has(action))

    def has(self, action: Action) -> bool:
        """Whether an action is of a mini-batch that there is."""
        return self.start <= self.step_of(action) < self.stop

    def step_of(self, action: Action) -> int:
        """Return the mini-batch of an action."""
        of_update = action.kind in REDUCTIONS or action.kind in (UPDATE, CORRECT)
        return self.number if of_update else self.place(action.micro_batch)[0]


def repetition_positions(
    program: Program, micro_batches: int, first: int, mini_batches: int
) -> list[list[tuple[int, int]]]:
    """Return every rank's (repetition, position) in order, from a fill to a drain.

    Args:
        program: of one repetition.
        micro_batches: of a mini-batch.
        first: number of the first repetition.
        mini_batches: how many there are.
    """
    repetitions = [Repetition(number, micro_batches, mini_batches) for number in range(first, mini_batches)]
    return [
        [(each.number, position) for each in repetitions for position, action in enumerate(actions) if each.has(action)]
        for actions in program.ranks
    ]


def written_out(program: Program, micro_batches: int, first: int, mini_batches: int) -> Program:
    """Return the program of all repetitions from a fill to a drain, with micro-batches counted through.

    Its updates and reductions have none, and are the mini-batches' in turn.
    """
    ranks = []
    orders = repetition_positions(program, micro_batches, first, mini_batches)
    for actions, order in zip(program.ranks, orders, strict=True):
        every = list(actions)
        ranks.append(RankProgram.of(_shift(every[position], number * micro_batches) for number, position in order))
    return Program(tuple(ranks))


def _shift(action: Action, micro_batches: int) -> Action:
    if action.kind in REDUCTIONS or action.kind in (UPDATE, CORRECT):
        return action
    return action._replace(micro_batch=action.micro_batch + micro_batches)
