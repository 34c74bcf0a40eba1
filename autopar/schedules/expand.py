"""Expand: a plan and its schedule become every rank's list of actions, or of the forwards alone, to evaluate.

Of a plan with a weight policy they are those of one repetition (:mod:`.continuing`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from autopar.formats.plan import Plan, Stage, layout_of, turns
from autopar.formats.program import (
    BEGIN_SUM,
    CORRECT,
    FORWARD,
    PREDICT,
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
from autopar.policies import POLICIES
from autopar.schedules import SCHEDULES
from autopar.schedules.continuing import repetition
from autopar.schedules.order import Entry, Order, RankPlace, in_order
from autopar.schedules.route import Route, even_shares, routes


class Message(NamedTuple):
    """What one stage's replica hands another's for a micro-batch: some rows of some tensors, bundled."""

    producer: int
    """Sending stage (of activations; gradients flow the other way)."""
    consumer: int
    sender: int
    """Rank in the producing stage."""
    receiver: int
    """Rank in the consuming stage; where it is the sender, too, nothing is sent."""
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

    @property
    def local(self) -> bool:
        """Whether both stages are on one rank."""
        return self.sender == self.receiver


def rank_of(plan: Plan, stage: int, replica: int, part: int = 0) -> int:
    """Return the rank of a part of a replica: ranks count groups of stages in order, their replicas, and parts."""
    return first_ranks(plan)[stage] + replica * plan.stages[stage].tensor_parallel + part


def team_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """Return the ranks that run a replica together with this one, which is among them, by their parts."""
    (stage, *_), replica = stages_of(plan, rank)
    return tuple(rank_of(plan, stage, replica, part) for part in range(plan.stages[stage].tensor_parallel))


def part_of(plan: Plan, rank: int) -> int:
    """Return which part of its replica a rank has."""
    return team_of(plan, rank).index(rank)


def stages_of(plan: Plan, rank: int) -> tuple[tuple[int, ...], int]:
    """Return (its stages, replica) of a rank; it is that replica of all of them, or a part of it."""
    for chunks in plan.groups:
        stage = plan.stages[chunks[0]]
        if rank < len(stage.devices):
            return chunks, rank // stage.tensor_parallel
        rank -= len(stage.devices)
    raise IndexError(rank)


def mine(plan: Plan, rank: int) -> range:
    """Return the micro-batches that a rank takes part in; without flushes, of every mini-batch that it has."""
    (stage, *_), replica = stages_of(plan, rank)
    if plan.weight_policy != "sync":
        return range(plan.micro_batches)
    return turns(plan.stages[stage].division, plan.stages[stage].replicas, replica, plan.micro_batches)


def messages(plan: Plan) -> list[Message]:
    """Return everything that stages hand each other, by producer, consumer, sender, receiver."""
    found = []
    starts = first_ranks(plan)
    for (producer, consumer), tensors in sorted(_exchanged_tensors(plan).items()):
        gradients = tuple(index for index in tensors if plan.tensors[index].gradient)
        sending, receiving = plan.stages[producer], plan.stages[consumer]
        apart = not plan.passes_parts(producer, consumer)
        for route in routes(sending, receiving):
            for sender, receiver, start, stop in _team_routes(route, sending, receiving, apart=apart):
                ends = producer, consumer, starts[producer] + sender, starts[consumer] + receiver
                found.append(Message(*ends, start, stop, tuple(tensors), gradients, route.first, route.period))
    return found


def _team_routes(route: Route, sending: Stage, receiving: Stage, *, apart: bool) -> Iterator[tuple[int, int, int, int]]:
    """Yield (sender, receiver, first row, stop) of what teams hand each other, given what replicas do.

    A team hands itself all rows. From one to another each row goes once, to and from as many ranks as there are: ranks
    of a team exchange what they have received; but what is in parts goes from each to that with the same part. Senders
    and receivers count from their stage's first.
    """
    start, stop = int(route.start), -int(-route.stop // 1)
    first, other = route.sender * sending.tensor_parallel, route.receiver * receiving.tensor_parallel
    if sending.devices == receiving.devices or not apart:
        yield from ((first + part, other + part, start, stop) for part in range(sending.tensor_parallel))
        return
    slices = max(sending.tensor_parallel, receiving.tensor_parallel)
    for index, rows in enumerate(even_shares(stop - start, slices)):
        if rows:
            yield (
                first + index % sending.tensor_parallel,
                other + index % receiving.tensor_parallel,
                start,
                start + rows,
            )
        start += rows


def first_ranks(plan: Plan) -> list[int]:
    """Return the rank of every stage's first replica."""
    found, rank = [0] * len(plan.stages), 0
    for chunks in plan.groups:
        for stage in chunks:
            found[stage] = rank
        rank += len(plan.stages[chunks[0]].devices)
    return found


def _exchanged_tensors(plan: Plan) -> dict[tuple[int, int], list[int]]:
    """Return the tensors that stages exchange, by producer and consumer."""
    pairs: dict[tuple[int, int], list[int]] = {}
    for index, tensor in enumerate(plan.tensors):
        for consumer in tensor.consumers:
            pairs.setdefault((tensor.producer, consumer), []).append(index)
    return pairs


def expand(plan: Plan, order: Order | None = None) -> Program:
    """Return the program of one step of a plan, or of one repetition where its pipeline is never flushed.

    Every forward is preceded by its receives and followed by its sends, every backward likewise; after the last
    backward come the reductions among the stages' replicas, those of parameters shared between stages, and the update.
    ``order`` is one of your own in place of the schedule's; memory is planned for the micro-batches that this one has
    in flight.
    """
    ranks = tuple(RankProgram.of(Action(*entry) for entry in entries) for entries in entries_of(plan, order))
    return Program(ranks, shift=0 if plan.weight_policy == "sync" else plan.micro_batches * plan.span)


def action_count(plan: Plan) -> int:
    """Return how many actions the program of a plan has, without expanding it."""
    count = len(plan.devices) + sum(len(stage.devices) for stage in plan.stages if stage.replicas > 1)
    for group, chunks in enumerate(plan.groups):
        first = plan.stages[chunks[0]]
        shared = sum(bool(set(chunks) & set(tied.stages)) for tied in plan.tied if _spread(plan, tied.stages))
        places = Counter(_place(plan, group, chunks, replica) for replica in range(first.replicas))
        count += len(first.devices) * shared
        each = first.tensor_parallel
        count += sum(each * number * _computations(plan, place) for place, number in places.items())
    for (producer, consumer), tensors in _exchanged_tensors(plan).items():
        sending, receiving = plan.stages[producer], plan.stages[consumer]
        if sending.devices != receiving.devices:
            apart = not plan.passes_parts(producer, consumer)
            carried = sum(
                route.count(plan.micro_batches) * sum(1 for _ in _team_routes(route, sending, receiving, apart=apart))
                for route in routes(sending, receiving)
            )
            count += 2 * carried * (2 if any(plan.tensors[index].gradient for index in tensors) else 1)
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
    rank = 0
    for group, chunks in enumerate(plan.groups):
        for index in range(len(plan.stages[chunks[0]].devices)):
            replica = index // plan.stages[chunks[0]].tensor_parallel
            flows = {
                stage: _stage_messages(inward.get((rank, stage), []), outward.get((rank, stage), []))
                for stage in chunks
            }
            yield _entries(plan, order, _place(plan, group, chunks, replica), replica, flows)
            rank += 1


def _place(plan: Plan, group: int, chunks: tuple[int, ...], replica: int) -> RankPlace:
    first = plan.stages[chunks[0]]
    count = len(turns(first.division, first.replicas, replica, plan.micro_batches))
    depths = tuple(min(plan.stages[stage].warmup, count) for stage in chunks)
    return RankPlace(group, len(plan.groups), chunks, count, depths)


_Peer = tuple[Message, int, int]
"""A message, the other rank and its stage."""


_StageMessages = tuple[list[_Peer], list[_Peer], list[_Peer], list[_Peer], bool]
"""Activations that a stage on a rank receives and sends, gradients that it receives and sends, and whether some of
these messages carry some micro-batches only."""


def _stage_messages(inward: list[Message], outward: list[Message]) -> _StageMessages:
    received = [(message, message.sender, message.producer) for message in inward]
    sent = [(message, message.receiver, message.consumer) for message in outward]
    returned, returning = ([each for each in some if each[0].gradients] for some in (sent, received))
    return received, sent, returned, returning, any(message.period > 1 for message in (*inward, *outward))


def _entries(
    plan: Plan, order: Order, place: RankPlace, replica: int, flows: dict[int, _StageMessages]
) -> Iterator[Entry]:
    if plan.weight_policy != "sync":
        yield from _repeated_entries(plan, place.stages[0], replica, flows)
        return
    first = plan.stages[place.stages[0]]
    own = turns(first.division, first.replicas, replica, plan.micro_batches)
    for kind, stage, index in order(place):
        yield from _with_messages((kind, stage, own[index], -1, -1), flows[stage])
    yield from closing_of(plan, place.stages)


def _repeated_entries(plan: Plan, stage: int, replica: int, flows: dict[int, _StageMessages]) -> Iterator[Entry]:
    closing, early = list(closing_of(plan, (stage,))), list[Entry]()
    if POLICIES[plan.weight_policy].sums_gradients:
        # What the first holder of a shared parameter has of it counts for the norm of all.
        first = {(REDUCE_TIED, index) for index, tied in enumerate(plan.tied) if tied.stages[0] == stage}
        early = [each for each in closing if each[0] == REDUCE or (each[0], each[2]) in first]
    for kind, micro_batch, version in repetition(plan, stage, replica):
        if kind == UPDATE:
            for own in (each for each in closing if each not in early):
                yield own if micro_batch < 0 else (*own[:2], micro_batch, *own[3:])
        elif kind in (PREDICT, CORRECT, BEGIN_SUM):
            yield from early if kind == BEGIN_SUM else ()
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
        if not taken or message.carries(micro_batch):
            yield RECEIVE if forth else RECEIVE_GRADIENT, stage, micro_batch, peer, peer_stage
    yield computation
    for message, peer, peer_stage in sent if forth else gradients_sent:
        if not taken or message.carries(micro_batch):
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
