"""Repetition: one pass of the ranks through their programs, and the mini-batches that there are meanwhile.

Pipelines repeat one list of actions, each time some micro-batches further on. With a flush, a repetition is a step, and
its actions are of one mini-batch. Without, they are of several (:class:`autopar.policies.Policy`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autopar.formats.plan import Plan
from autopar.formats.program import BACKWARDS, PULL, REDUCE, REDUCE_TIED, UPDATE, Action, Program, RankProgram


class Repetition(NamedTuple):
    """One repetition of a program, and which mini-batches there are."""

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
    first_pull: int = 0
    """How many mini-batches after the first the one comes that pulls first."""

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

    def is_full(self, ahead: range) -> bool:
        """Whether there are all mini-batches of its actions, which are so far ahead of its own."""
        begins, ends = self.number + ahead.start, self.number + ahead.stop
        return (
            self.start <= begins and ends <= self.stop and self.start + self.first_pull <= self.number + self.span - 1
        )

    def absent(self, actions: Sequence[Action]) -> frozenset[int]:
        """Return the positions of actions of mini-batches that there are none of."""
        return frozenset(position for position, action in enumerate(actions) if not self.has(action))

    def has(self, action: Action) -> bool:
        """Whether an action is of a mini-batch that there is."""
        start = self.start + self.first_pull if action.kind == PULL else self.start
        return start <= self.step_of(action) < self.stop

    def step_of(self, action: Action) -> int:
        """Return the mini-batch of an action."""
        return self.number if _is_of_one(action) else self.place(action.micro_batch)[0]


def _is_of_one(action: Action) -> bool:
    """Whether an action has no micro-batch, the mini-batch that it is of being the repetition's only one."""
    return action.kind == REDUCE_TIED or action.micro_batch < 0


def repetitions(plan: Plan, mini_batches: range) -> Iterator[Repetition]:
    """Yield those of some mini-batches, from a fill to a drain."""
    for number in range(mini_batches.start - plan.lead, mini_batches.stop, plan.span):
        yield repetition_of(plan, number, mini_batches)


def repetition_of(plan: Plan, number: int, mini_batches: range) -> Repetition:
    """Return the one of some mini-batches, from a fill to a drain, that begins with a mini-batch's backward."""
    bounds = mini_batches.stop, mini_batches.start
    return Repetition(number, plan.micro_batches, *bounds, plan.span, plan.first_pull)


def last_backwards(actions: Sequence[Action], plan: Plan) -> set[int]:
    """Return the positions of mini-batches' last backwards on their stages, or of halves of one."""
    last: dict[tuple[int, int], tuple[int, int]] = {}
    span = plan.span
    for position, action in enumerate(actions):
        if action.kind in BACKWARDS:
            # A mini-batch has backwards in several repetitions, those that are less ahead in a later one.
            ahead = action.micro_batch // plan.micro_batches
            key, place = (action.stage, ahead % span), (-ahead, position)
            last[key] = max(last.get(key, place), place)
    return {position for _, position in last.values()}


def filling(plan: Plan) -> int:
    """Return the fewest mini-batches of which some repetitions have all actions: those of a full pipeline."""
    pulling = -(-plan.first_pull // plan.span) * plan.span + plan.early_pulls * plan.span
    return plan.span + 2 * plan.lead + pulling


def repetition_positions(program: Program, plan: Plan, mini_batches: int) -> list[list[tuple[int, int]]]:
    """Return every rank's (repetition, position) in order, from a fill to a drain of so many mini-batches."""
    every = list(repetitions(plan, range(mini_batches)))
    return [
        [(each.number, position) for each in every for position, action in enumerate(actions) if each.has(action)]
        for actions in program.ranks
    ]


def written_out(program: Program, plan: Plan, mini_batches: int) -> Program:
    """Return the program of all repetitions from a fill to a drain, with micro-batches counted through.

    Its updates and reductions have none, and are the mini-batches' in turn.
    """
    if len(list(repetitions(plan, range(mini_batches)))) == 1:
        # It is all of one repetition.
        return program
    ranks, several = [], plan.span > 1
    orders = repetition_positions(program, plan, mini_batches)
    for actions, order in zip(program.ranks, orders, strict=True):
        every = list(actions)
        shifted = (_shift(every[at], number * plan.micro_batches, several=several) for number, at in order)
        ranks.append(RankProgram.of(shifted))
    return Program(tuple(ranks))


def _shift(action: Action, micro_batches: int, *, several: bool) -> Action:
    if action.kind in (REDUCE, UPDATE) and several:
        return action._replace(micro_batch=-1)
    return action if _is_of_one(action) else action._replace(micro_batch=action.micro_batch + micro_batches)
