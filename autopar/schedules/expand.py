"""Expand: a plan and its schedule become every rank's list of actions, or of the forwards alone, to evaluate.

They are those of one repetition (:class:`autopar.policies.Policy`); with a flush, of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from autopar.depths import StageDepths
from autopar.formats.plan import Plan
from autopar.formats.program import (
    BEGIN_SUM,
    CORRECT,
    FORWARD,
    PREDICT,
    PULL,
    PUSH,
    RECEIVE,
    RECEIVE_GRADIENT,
    REDUCE,
    REDUCE_TIED,
    SEND,
    SEND_GRADIENT,
    UPDATE,
    WEIGHT_BACKWARD,
    Action,
    Program,
    RankProgram,
)
from autopar.formats.stage import layout_of
from autopar.ownership import Samples, Share
from autopar.schedules import SCHEDULES
from autopar.schedules.order import Entry, Order, RankPlace, in_order


class Message(NamedTuple):
    """What one stage's replica hands another's for a micro-batch: some rows of some tensors, bundled."""

    producer: int
    """Sending stage (of activations; gradients flow the other way)."""
    consumer: int
    sender: int
    """Rank in the producing stage."""
    receiver: int
    """Rank in the consuming stage; where it is the sender, too, nothing is sent."""
    samples: Samples
    """The rows, and the micro-batches that cause this message."""
    tensors: tuple[int, ...]
    """Indices into ``Plan.tensors``."""
    gradients: tuple[int, ...]
    """Those of ``tensors`` whose gradient comes back."""

    @property
    def local(self) -> bool:
        """Whether both stages are on one rank."""
        return self.sender == self.receiver


def messages(plan: Plan) -> list[Message]:
    """Return everything that stages hand each other, by producer, consumer, sender, receiver."""
    found: list[Message] = []
    for (producer, consumer), tensors in sorted(_exchanged_tensors(plan).items()):
        gradients = tuple(index for index in tensors if plan.tensors[index].gradient)
        every = plan.ownership.handovers(producer, consumer)
        found += [Message(producer, consumer, *each, tuple(tensors), gradients) for each in every]
    return found


def _exchanged_tensors(plan: Plan) -> dict[tuple[int, int], list[int]]:
    """Return the tensors that stages exchange, by producer and consumer."""
    pairs: dict[tuple[int, int], list[int]] = {}
    for index, tensor in enumerate(plan.tensors):
        for consumer in tensor.consumers:
            pairs.setdefault((tensor.producer, consumer), []).append(index)
    return pairs


def expand(plan: Plan, order: Order | None = None) -> Program:
    """Return the program of one repetition of a plan: with a flush, of a step.

    Every forward is preceded by its receives and followed by its sends, every backward likewise; after the last
    backward come the reductions among the stages' replicas, those of parameters shared between stages, and the update.
    ``order`` is one of your own in place of the schedule's; memory is planned for the micro-batches that this one has
    in flight.
    """
    ranks = tuple(RankProgram.of(Action(*entry) for entry in entries) for entries in entries_of(plan, order))
    return Program(ranks, shift=plan.policy.shift(plan.micro_batches * plan.span))


def action_count(plan: Plan) -> int:
    """Return how many actions the program of a plan has, without expanding it."""
    places = Counter(_place(plan, own) for own in plan.ownership.ranks)
    count = sum(number * _computations(plan, place) for place, number in places.items())
    count += sum(sum(1 for _ in closing_of(plan, own.stages)) for own in plan.ownership.ranks)
    for message in messages(plan):
        if not message.local:
            count += (4 if message.gradients else 2) * len(message.samples.of(plan.micro_batches))
    return count


def _computations(plan: Plan, place: RankPlace) -> int:
    """Return how many forwards and backwards a rank has, halves for themselves."""
    schedule = SCHEDULES[plan.schedule]
    return sum(1 for _ in schedule.order(place)) if schedule.halves else 2 * place.micro_batches * len(place.stages)


def entries_of(plan: Plan, order: Order | None = None) -> Iterable[Iterable[Entry]]:
    """Return every rank's actions as plain tuples: what :func:`expand` makes actions of, for who needs many of them."""
    entries = _unordered_entries(plan, order or SCHEDULES[plan.schedule].order)
    return entries if layout_of(plan.schedule) == "line" else in_order(entries)


def _unordered_entries(plan: Plan, order: Order) -> Iterator[Iterator[Entry]]:
    inward: dict[tuple[int, int], list[Message]] = {}
    outward: dict[tuple[int, int], list[Message]] = {}
    for message in messages(plan):
        if not message.local:
            inward.setdefault((message.receiver, message.consumer), []).append(message)
            outward.setdefault((message.sender, message.producer), []).append(message)
    depths = plan.depths
    for own in plan.ownership.ranks:
        ends = ((own.rank, stage) for stage in own.stages)
        flows = {end[1]: _stage_messages(inward.get(end, []), outward.get(end, [])) for end in ends}
        yield _entries(plan, order, own, depths[own.stage], flows)


def _place(plan: Plan, own: Share) -> RankPlace:
    count = len(own.samples.of(plan.micro_batches))
    depths = tuple(min(plan.stages[stage].warmup, count) for stage in own.stages)
    return RankPlace(own.group, plan.ownership.groups, own.stages, count, depths)


_Peer = tuple[Message, int, int]
"""A message, the other rank and its stage."""


_StageMessages = tuple[list[_Peer], list[_Peer], list[_Peer], list[_Peer], bool]
"""Activations that a stage on a rank receives and sends, gradients that it receives and sends, and whether some of
these messages carry some micro-batches only."""


def _stage_messages(inward: list[Message], outward: list[Message]) -> _StageMessages:
    received = [(message, message.sender, message.producer) for message in inward]
    sent = [(message, message.receiver, message.consumer) for message in outward]
    returned, returning = ([each for each in some if each[0].gradients] for some in (sent, received))
    return received, sent, returned, returning, any(message.samples.period > 1 for message in (*inward, *outward))


def _entries(
    plan: Plan, order: Order, own: Share, depths: StageDepths, flows: dict[int, _StageMessages]
) -> Iterator[Entry]:
    closing, early, policy = list(closing_of(plan, own.stages)), list[Entry](), plan.policy
    computed = policy.repetition(own, depths, plan.span, order(_place(plan, own)))
    for kind, stage, micro_batch, version in computed:
        if kind == UPDATE:
            for entry in (each for each in closing if each not in early):
                yield entry if micro_batch < 0 else (*entry[:2], micro_batch, *entry[3:])
        elif kind in (PREDICT, CORRECT, BEGIN_SUM, PUSH, PULL):
            if kind == BEGIN_SUM and policy.sums_gradients:
                # What the first holder of a shared parameter has of it counts for the norm of all.
                first = {(REDUCE_TIED, index) for index, tied in enumerate(plan.tied) if tied.stages[0] == stage}
                early = [each for each in closing if each[0] == REDUCE or (each[0], each[2]) in first]
                yield from early
            yield kind, stage, micro_batch, -1, -1
        else:
            yield from _with_messages((kind, stage, micro_batch, -1, -1, version), flows[stage])


def _with_messages(computation: Entry, flows: _StageMessages) -> Iterator[Entry]:
    """Yield a computation between the receives that it waits for and the sends of what it makes."""
    kind, stage, micro_batch, *_ = computation
    if kind == WEIGHT_BACKWARD:
        yield computation
        return
    received, sent, gradients_received, gradients_sent, taken = flows
    forth = kind == FORWARD
    for message, peer, peer_stage in received if forth else gradients_received:
        if not taken or message.samples.has(micro_batch):
            yield RECEIVE if forth else RECEIVE_GRADIENT, stage, micro_batch, peer, peer_stage
    yield computation
    for message, peer, peer_stage in sent if forth else gradients_sent:
        if not taken or message.samples.has(micro_batch):
            yield SEND if forth else SEND_GRADIENT, stage, micro_batch, peer, peer_stage


def closing_of(plan: Plan, chunks: tuple[int, ...]) -> Iterator[Entry]:
    """Yield what follows the last backward; a rank's last stage is the first whose gradients are complete."""
    for stage in reversed(chunks):
        if plan.stages[stage].replicas > 1:
            yield REDUCE, stage, -1, -1, -1
    for index, tied in enumerate(plan.tied):
        holding = [stage for stage in chunks if stage in tied.stages]
        if holding and _spread(plan, tied.stages):
            yield REDUCE_TIED, holding[0], index, -1, -1
    yield UPDATE, chunks[0], -1, -1, -1


def _spread(plan: Plan, stages: tuple[int, ...]) -> bool:
    """Whether stages are on several ranks."""
    return plan.stages[stages[0]].replicas > 1 or len({plan.stages[stage].devices for stage in stages}) > 1


FORWARDS = (FORWARD, SEND, RECEIVE)
"""Kinds of actions that evaluate."""


def expand_forwards(plan: Plan) -> Program:
    """Return the program of an evaluation: every rank's forwards and messages, which end as the whole order does."""
    return Program(
        tuple(
            RankProgram.of(Action(*entry) for entry in entries if entry[0] in FORWARDS) for entries in entries_of(plan)
        )
    )
