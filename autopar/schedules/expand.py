"""Expand: a plan and its schedule become every rank's list of actions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from autopar.formats.plan import Plan, turns
from autopar.formats.program import (
    BACKWARD,
    FORWARD,
    RECEIVE,
    RECEIVE_GRADIENT,
    REDUCE,
    REDUCE_TIED,
    SEND,
    SEND_GRADIENT,
    UPDATE,
    Action,
    Program,
    RankProgram,
)
from autopar.schedules import SCHEDULES
from autopar.schedules.route import Routes

__all__ = ["Entry", "Message", "action_count", "entries_of", "expand", "messages", "mine", "rank_of", "stage_of"]


Entry = tuple[str, int, int, int]
"""Kind, micro-batch, peer and the peer's stage of an action."""


class Message(NamedTuple):
    """What one rank sends another for a micro-batch: some rows of some tensors, bundled."""

    producer: int
    """Sending stage (of activations; gradients flow the other way)."""
    consumer: int
    sender: int
    """Rank in the producing stage."""
    receiver: int
    """Rank in the consuming stage."""
    start: int
    """First row of the micro-batch."""
    stop: int
    tensors: tuple[int, ...]
    """Indices into ``Plan.tensors``."""
    gradients: tuple[int, ...]
    """Those of ``tensors`` whose gradient comes back."""
    first: int = 0
    """The first micro-batch that this message carries; replicas may take turns."""
    period: int = 1

    def carries(self, micro_batch: int) -> bool:
        """Whether a micro-batch causes this message."""
        return micro_batch % self.period == self.first


def rank_of(plan: Plan, stage: int, replica: int) -> int:
    """Return the rank of a replica: ranks count the stages' replicas in order."""
    return sum(earlier.replicas for earlier in plan.stages[:stage]) + replica


def stage_of(plan: Plan, rank: int) -> tuple[int, int]:
    """Return (stage, replica) of a rank."""
    for index, stage in enumerate(plan.stages):
        if rank < stage.replicas:
            return index, rank
        rank -= stage.replicas
    raise IndexError(rank)


def mine(plan: Plan, rank: int) -> range:
    """Return the micro-batches that a rank takes part in."""
    stage, replica = stage_of(plan, rank)
    return turns(plan.stages[stage].division, plan.stages[stage].replicas, replica, plan.micro_batches)


def messages(plan: Plan) -> list[Message]:
    """Return every message that micro-batches cause, by producer, consumer, sender, receiver."""
    found = []
    starts, known = [0, *accumulate(stage.replicas for stage in plan.stages)], Routes()
    for (producer, consumer), tensors in sorted(_exchanged(plan).items()):
        gradients = tuple(index for index in tensors if plan.tensors[index].gradient)
        for route in known.between(plan.stages[producer], plan.stages[consumer]):
            sender, receiver = starts[producer] + route.sender, starts[consumer] + route.receiver
            rows = int(route.start), -int(-route.stop // 1)
            bundle = (*rows, tuple(tensors), gradients, route.first, route.period)
            found.append(Message(producer, consumer, sender, receiver, *bundle))
    return found


def _exchanged(plan: Plan) -> dict[tuple[int, int], list[int]]:
    """Return the tensors that stages exchange, by producer and consumer."""
    pairs: dict[tuple[int, int], list[int]] = {}
    for index, tensor in enumerate(plan.tensors):
        for consumer in tensor.consumers:
            pairs.setdefault((tensor.producer, consumer), []).append(index)
    return pairs


def expand(plan: Plan) -> Program:
    """Return the program of one step of a plan.

    Every forward is preceded by its receives and followed by its sends, every backward likewise; after the last
    backward come the reduction among the stage's replicas, those of parameters shared between stages, and the update.
    """
    stages = [stage for stage, placed in enumerate(plan.stages) for _ in range(placed.replicas)]
    return Program(
        tuple(
            RankProgram.of(Action(kind, stage, *rest) for kind, *rest in entries)
            for stage, entries in zip(stages, entries_of(plan), strict=True)
        )
    )


def action_count(plan: Plan) -> int:
    """Return how many actions the program of a plan has, without expanding it."""
    count = sum(1 + (stage.replicas > 1) for stage in plan.stages for _ in range(stage.replicas))
    count += sum(plan.stages[stage].replicas for tied in plan.tied for stage in tied.stages)
    for stage in plan.stages:
        own = (turns(stage.division, stage.replicas, replica, plan.micro_batches) for replica in range(stage.replicas))
        count += 2 * sum(map(len, own))
    known = Routes()
    for (producer, consumer), tensors in _exchanged(plan).items():
        found = known.between(plan.stages[producer], plan.stages[consumer])
        carried = sum(route.count(plan.micro_batches) for route in found)
        count += 2 * carried * (2 if any(plan.tensors[index].gradient for index in tensors) else 1)
    return count


def entries_of(plan: Plan) -> Iterator[Iterator[Entry]]:
    """Yield every rank's actions as plain tuples: what :func:`expand` makes actions of, for who needs many of them."""
    inward: dict[int, list[Message]] = {}
    outward: dict[int, list[Message]] = {}
    for message in messages(plan):
        inward.setdefault(message.receiver, []).append(message)
        outward.setdefault(message.sender, []).append(message)
    rank = 0
    for stage, placed in enumerate(plan.stages):
        for replica in range(placed.replicas):
            own = turns(placed.division, placed.replicas, replica, plan.micro_batches)
            yield _entries(plan, stage, own, inward.get(rank, []), outward.get(rank, []))
            rank += 1


def _entries(plan: Plan, stage: int, own: range, inward: list[Message], outward: list[Message]) -> Iterator[Entry]:
    order = SCHEDULES[plan.schedule].order(len(own), min(plan.stages[stage].warmup, len(own)))
    taken = any(message.period > 1 for message in (*inward, *outward))
    # (messages received, and sent) of a forward, and of a backward.
    received = [(message, message.sender, message.producer) for message in inward]
    sent = [(message, message.receiver, message.consumer) for message in outward]
    forth = (RECEIVE, received, FORWARD, SEND, sent)
    back = (
        RECEIVE_GRADIENT,
        [each for each in sent if each[0].gradients],
        BACKWARD,
        SEND_GRADIENT,
        [each for each in received if each[0].gradients],
    )
    for kind, index in order:
        micro_batch = own[index]
        before, arriving, work, after, leaving = forth if kind == FORWARD else back
        for message, peer, peer_stage in arriving:
            if not taken or message.carries(micro_batch):
                yield before, micro_batch, peer, peer_stage
        yield work, micro_batch, -1, -1
        for message, peer, peer_stage in leaving:
            if not taken or message.carries(micro_batch):
                yield after, micro_batch, peer, peer_stage
    if plan.stages[stage].replicas > 1:
        yield REDUCE, -1, -1, -1
    for index, tied in enumerate(plan.tied):
        if stage in tied.stages:
            yield REDUCE_TIED, index, -1, -1
    yield UPDATE, -1, -1, -1
