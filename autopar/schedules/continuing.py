"""Continuing: pipelines that are never flushed repeat one list of actions, each time some micro-batches further on.

With K_s micro-batches in flight on stage s, T of them for an update, and updates that come L_s micro-batches late,
repetition i has the backwards of micro-batches iT + L_s to iT + L_s + T - 1, each followed by the forward K_s
micro-batches ahead, and behind the last backward the update of mini-batch i. Repetitions begin before the first
mini-batch: an action of a micro-batch that there is none of is left out, which fills the pipeline, and drains it in the
end. A drained pipeline is filled again the same way.

Where n replicas of a stage take turns (T = 1), replica r has mini-batches r, n + r, 2n + r and so on, counted from the
fill, and as many in flight as its stage's K_s says. Their gradients are added up, and update all n, once each has had
one more; behind the last mini-batch, with those that there are. A repetition then has several mini-batches: the least
number that all such n divide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm
from typing import NamedTuple

from autopar.formats.plan import Plan
from autopar.formats.program import (
    BACKWARD,
    BEGIN_SUM,
    CORRECT,
    FORWARD,
    PREDICT,
    REDUCE,
    REDUCE_TIED,
    UPDATE,
    Action,
    Program,
    RankProgram,
)
from autopar.ownership import Share
from autopar.policies import POLICIES, StageDepths, distances, sum_lag


class _RepetitionEntry(NamedTuple):
    """One entry of a stage's repetition, without messages."""

    kind: str
    micro_batch: int
    """Counted from the repetition's first backward."""
    version: int
    """How many updates behind the newest weights it sees them."""


def repetition(plan: Plan, own: Share) -> Iterator[_RepetitionEntry]:
    """Yield what a rank of a plan with a weight policy computes in one repetition, updates included."""
    count, stage = plan.span, own.stage
    if count == 1:
        yield from _one_mini_batch(plan, stage)
        return
    # Of a mini-batch that is a single micro-batch; an update is named by the first one that it is of.
    depth = plan.stages[stage].in_flight
    behind = distances(POLICIES[plan.weight_policy], plan.depths[stage], 0)
    for first in range(0, count, own.turns):
        yield _RepetitionEntry(BACKWARD, first + own.turn, behind.backward)
        yield _RepetitionEntry(UPDATE, first, 0)
        yield _RepetitionEntry(FORWARD, first + own.turn + depth, behind.forward)


def _one_mini_batch(plan: Plan, stage: int) -> Iterator[_RepetitionEntry]:
    """Yield a repetition in which all replicas have a part of every micro-batch."""
    depths = plan.depths[stage]
    depth, micro_batches, policy = depths.depth, depths.micro_batches, POLICIES[plan.weight_policy]
    behind = [distances(policy, depths, index) for index in range(micro_batches)]
    last = micro_batches - 1
    for index in range(depths.lag, depths.lag + micro_batches):
        yield _RepetitionEntry(BACKWARD, index, behind[index % micro_batches].backward)
        if policy.sums_gradients and (index - sum_lag(depths)) % micro_batches == last:
            yield _RepetitionEntry(BEGIN_SUM, index - sum_lag(depths), 0)
        if index == last + depths.lag:
            yield _RepetitionEntry(UPDATE, -1, 0)
            if policy.prepares_backwards(depths):
                yield _RepetitionEntry(CORRECT, -1, 0)
        if policy.prepares_forwards(depths) and (depth + index) % micro_batches == 0:
            yield _RepetitionEntry(PREDICT, depth + index, 0)
        yield _RepetitionEntry(FORWARD, depth + index, behind[(depth + index) % micro_batches].forward)
        if not policy.sums_gradients and (depth + index) % micro_batches == last:
            # Nothing but losses and what they counted, which is known once the forwards are done.
            yield _RepetitionEntry(BEGIN_SUM, depth + index, 0)


def lead(plan: Plan) -> int:
    """Return how many mini-batches before the first backward repetitions begin; 0 of a plan with flushes."""
    if plan.weight_policy == "sync":
        return 0
    return mini_batches_ahead([stage.period for stage in plan.stages], plan.depths, plan.micro_batches)


def mini_batches_ahead(periods: Sequence[int], depths: Sequence[StageDepths], micro_batches: int) -> int:
    """Return :func:`lead` of stages whose replicas have every so many-th mini-batch, and that are so deep."""
    ahead = max(count * (each.depth + each.lag) for count, each in zip(periods, depths, strict=True))
    span = lcm(*periods)
    return -(-ahead // (micro_batches * span)) * span


class Repetition(NamedTuple):
    """One repetition of a program, or one step with a flush, and which mini-batches there are."""

    number: int
    """The mini-batch of its first backward; the pipeline is filled in negative ones."""
    micro_batches: int
    """Of a mini-batch."""
    stop: int
    """The first mini-batch that there is none of."""
    start: int = 0
    """The first that there is."""
    span: int = 1
    """How many mini-batches end in it."""

    @property
    def ending(self) -> range:
        """The mini-batches whose backwards it has."""
        return range(max(self.number, self.start), min(self.number + self.span, self.stop))

    def mini_batches_of(self, update: Action, turns: int) -> range:
        """Return the mini-batches that an update is of, of ranks that have every so many-th one."""
        first = self.step_of(update)
        return range(first, min(first + turns, self.stop))

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
        return self.number if _is_of_one(action) else self.place(action.micro_batch)[0]


def _is_of_one(action: Action) -> bool:
    """Whether an action has no micro-batch, the mini-batch that it is of being the repetition's only one."""
    return action.kind == REDUCE_TIED or action.micro_batch < 0


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
    numbers = range(first, mini_batches, program.shift // micro_batches)
    repetitions = [Repetition(number, micro_batches, mini_batches) for number in numbers]
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
    if action.kind in (REDUCE, UPDATE):
        return action._replace(micro_batch=-1)
    return action if _is_of_one(action) else action._replace(micro_batch=action.micro_batch + micro_batches)
