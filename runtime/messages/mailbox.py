"""Mailbox: a rank's messages, from posting a receive to joining its rows, and from a send to its release.

In comes a program; from it alone it is known what every send and receive carries, when to post a receive, and when a
sent tensor may be released. On gloo, a send's completion cannot be asked for, only waited for, and waiting must not
hold up computation. But when a peer has sent something that its program places behind the receipt of an earlier
message, that message has arrived. What is sent to a peer that never sends anything is waited for a step later.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import torch

from autopar.capture.graph import TensorSpec
from autopar.formats.plan import Plan
from autopar.formats.program import RECEIVE, RECEIVE_GRADIENT, RECEIVES, SEND, SEND_GRADIENT, SENDS, Action, Program
from autopar.ranks.failure import PeerLostError
from autopar.runtime.messages.transport import Pending, Transport, join, sendable
from autopar.schedules.expand import Message, messages
from autopar.schedules.repetition import Repetition, filling, repetition_positions, written_out


def retirements(program: Program, rank: int) -> dict[int, list[int]]:
    """Return, for positions of receives in a rank's program, the positions of the sends that are done by then.

    Sends that no later receive proves done are not listed.
    """
    mine = list(program.ranks[rank])
    found: dict[int, list[int]] = defaultdict(list)
    for peer in {action.peer for action in mine if action.kind in SENDS}:
        sends, receives = (
            iter([at for at, action in enumerate(mine) if action.peer == peer and action.kind in kinds])
            for kinds in (SENDS, RECEIVES)
        )
        arrived = 0
        for action in program.ranks[peer]:
            if action.peer == rank and action.kind in SENDS:
                # It comes after the peer has received so many more of this rank's sends.
                proof = next(receives)
                found[proof] += islice(sends, arrived)
                arrived = 0
            elif action.peer == rank:
                arrived += 1
    return {proof: done for proof, done in found.items() if done}


def retirements_by_repetition(program: Program, rank: int, plan: Plan) -> dict[int, list[tuple[int, int]]]:
    """Return what :func:`retirements` does, each send with by how many mini-batches its repetition is an earlier one.

    A proof may come some repetitions later: they are those of a full pipeline, and those of one that fills or drains
    are among them, since messages that are left out change no order.
    """
    # As many full repetitions as a message may take, and one more.
    count = filling(plan) + plan.span
    order, draining = repetition_positions(program, plan, count)[rank], count - plan.lead
    found = retirements(written_out(program, plan, count), rank)
    last = max((number for number, _ in order if number < draining), default=0)
    return {
        order[proof][1]: [(order[proof][0] - order[each][0], order[each][1]) for each in done]
        for proof, done in found.items()
        if order[proof][0] == last
    }


def receives_ahead(program: Program, rank: int) -> dict[int, list[int]]:
    """Return, for positions in a rank's program, the receives to post there: two computations ahead of use."""
    mine = list(program.ranks[rank])
    starts = [0]
    posts: dict[int, list[int]] = defaultdict(list)
    for position, action in enumerate(mine):
        if action.kind in RECEIVES:
            posts[starts[max(0, len(starts) - 3)]].append(position)
        elif action.kind not in SENDS:
            starts.append(position + 1)
    return dict(posts)


Key = tuple[str, int, int, int, str]
"""Kind of receive, stage, micro-batch, peer stage, tensor."""

_MARKS = ""
"""In place of a tensor's name: which gradients of a message there are."""


class _ReceivedRows(NamedTuple):
    start: int
    tensor: torch.Tensor | None
    there: bool = True
    """False for zeros in place of a gradient that there is none of."""


class _Sent(NamedTuple):
    """A message that may not have arrived yet."""

    place: tuple[int, int]
    """Repetition and position."""
    pending: list[Pending]


class _Due(NamedTuple):
    """A tensor that a receive expects."""

    key: Key
    start: int
    """Where its rows begin within this rank's share."""
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Slice(NamedTuple):
    """The rows of a tensor that a send carries."""

    name: str
    dim: int
    start: int
    """Within this rank's share."""
    rows: int
    whole: bool
    """Whether these are all rows of the share."""


def messages_by_action(plan: Plan, rank: int) -> dict[tuple[str, int, int, int], tuple[Message, tuple[int, ...]]]:
    """Return the message and its tensors, by (kind, stage, peer, peer's stage) of a rank's sends and receives."""
    found: dict[tuple[str, int, int, int], tuple[Message, tuple[int, ...]]] = {}
    for flow in messages(plan):
        if flow.sender == rank:
            place = flow.producer, flow.receiver, flow.consumer
            found[SEND, *place], found[RECEIVE_GRADIENT, *place] = (flow, flow.tensors), (flow, flow.gradients)
        if flow.receiver == rank:
            place = flow.consumer, flow.sender, flow.producer
            found[RECEIVE, *place], found[SEND_GRADIENT, *place] = (flow, flow.tensors), (flow, flow.gradients)
    return found


class Mailbox:
    """Sends and receives what the program says, re-slicing rows between stages of different widths.

    Receives are posted two computations ahead of use. Sends never hold up the rank; a sent tensor is let go when the
    program proves that it has arrived.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        rank: int,
        specs: dict[str, TensorSpec],
        transport: Transport,
        device: torch.device,
        *,
        with_marks: bool = False,
    ) -> None:
        """Find out what this rank will send and receive.

        Args:
            plan: what is carried out.
            program: its expansion.
            rank: which rank this is.
            specs: of the tensors that cross, by name.
            transport: moves them.
            device: where they are.
            with_marks: whether gradient messages say which of their tensors there are: where modules are listed, and
                not captured, a backward may reach a tensor in one micro-batch and not in the next.
        """
        self.with_marks = with_marks
        """Whether gradient messages say which of their tensors there are."""
        self._plan, self._specs, self._transport, self._device = plan, specs, transport, device
        self._actions = list(program.ranks[rank])
        self.due = receives_ahead(program, rank)
        """Receives to post before an action, by their positions."""
        self._retire = retirements_by_repetition(program, rank, plan)
        self._patience = plan.lead + plan.span
        self._repetition = Repetition(0, plan.micro_batches, 1)
        self._own = plan.ownership.ranks[rank]
        self._messages = messages_by_action(plan, rank)
        self._local_messages: dict[tuple[str, int], list[Message]] = defaultdict(list)
        """By kind of send and stage, what it sends to other stages of this rank."""
        for (kind, *_), (flow, _) in self._messages.items():
            if kind == SEND and flow.local:
                self._local_messages[SEND, flow.producer].append(flow)
                self._local_messages[SEND_GRADIENT, flow.consumer].append(flow)
        kinds = [(position, action) for position, action in enumerate(self._actions) if action.peer >= 0]
        self._expected_tensors = {at: self._dues(action) for at, action in kinds if action.kind in RECEIVES}
        self._slices = {at: self._rows_of(action) for at, action in kinds if action.kind not in RECEIVES}
        self._posted_receives: dict[int, list[tuple[Key, _ReceivedRows, Pending]]] = {}
        self._pieces: dict[Key, list[_ReceivedRows]] = defaultdict(list)
        answering = {action.peer for action in self._actions if action.kind in RECEIVES}
        self._unanswered = {at for at, action in kinds if action.kind in SENDS and action.peer not in answering}
        """Sends to peers that send nothing: nothing ever proves that they have arrived."""
        self._sending: dict[int, deque[_Sent]] = defaultdict(deque)
        """By peer, in their order."""

    def begin_step(self, repetition: Repetition) -> None:
        """Begin a repetition; what it sends is proved to have arrived in this or a later one."""
        self._pieces.clear()
        self._repetition = repetition

    def finish(self) -> None:
        """Wait for all sends, at the end of the last step."""
        sent = sorted((each for every in self._sending.values() for each in every), key=lambda each: each.place)
        self._sending.clear()
        while sent:
            for pending in sent.pop(0).pending:
                pending.wait()

    def post(self, position: int) -> None:
        """Post the receives that are due before the action at ``position``."""
        for due in self.due[position]:
            action = self._actions[due]
            if not self._repetition.has(action):
                continue
            posted = []
            for key, start, shape, dtype in self._expected_tensors[due]:
                tensor = torch.empty(shape, dtype=dtype, device=self._device)
                try:
                    pending = self._transport.receive(tensor, action.peer)
                except PeerLostError as error:
                    raise self._peer_lost_error(action, error) from error
                posted.append((key, _ReceivedRows(start, tensor), pending))
            self._posted_receives[due] = posted

    def receive(self, position: int) -> None:
        """Wait for the message of the receive at ``position``."""
        posted = self._posted_receives.pop(position)
        for _, _, pending in posted:
            try:
                pending.wait()
            except PeerLostError as error:
                raise self._peer_lost_error(self._actions[position], error) from error
        marks = [True] * len(posted)
        if posted and posted[-1][0][-1] == _MARKS:
            marked = posted.pop()[1].tensor
            assert marked is not None
            marks = [bool(each) for each in marked.tolist()]
        for (key, piece, _), there in zip(posted, marks, strict=True):
            self._pieces[key].append(piece if there else piece._replace(there=False))
        for before, done in self._retire.get(position, ()):
            self._wait_for_sends(self._actions[done].peer, (self._repetition.number - before, done))

    def _wait_for_sends(self, peer: int, last: tuple[int, int]) -> None:
        """Wait for the sends to a peer, up to that of a repetition and position.

        What proves an earlier one may be left out in a fill; and where replicas take turns, other repetitions follow a
        drain.
        """
        sent = self._sending[peer]
        while sent and sent[0].place <= last:
            for pending in sent.popleft().pending:
                pending.wait()

    def send(self, position: int, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Begin the send at ``position``: the rows of this rank's tensors that the peer needs, zeros for None."""
        action = self._actions[position]
        try:
            if position in self._unanswered:
                # The same message of a repetition with which its receiver is surely done.
                self._wait_for_sends(action.peer, (self._repetition.number - self._patience, position))
            carried = self._carried_by(position, tensors)
            pending = [self._transport.send(each, action.peer) for each in carried]
            self._sending[action.peer].append(_Sent((self._repetition.number, position), pending))
        except PeerLostError as error:
            raise self._peer_lost_error(action, error) from error

    def _carried_by(self, position: int, tensors: Mapping[str, torch.Tensor | None]) -> Iterator[torch.Tensor]:
        slices = self._slices[position]
        for name, dim, start, rows, whole in slices:
            tensor = tensors[name]
            if tensor is None:
                spec = self._specs[name]
                yield torch.zeros(spec.shape(rows), dtype=spec.dtype, device=self._device)
            else:
                tensor = tensor.detach()
                yield sendable(tensor if whole else tensor.narrow(dim, start, rows))
        if self.with_marks and self._actions[position].kind == SEND_GRADIENT:
            marks = [tensors[each.name] is not None for each in slices]
            yield torch.tensor(marks, dtype=torch.uint8, device=self._device)

    def pass_on(self, kind: str, stage: int, micro_batch: int, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Hand tensors that a stage would send, or their gradients, to the other stages of this rank that read them."""
        for flow in self._local_messages[kind, stage]:
            indices, other = (flow.tensors, flow.consumer) if kind == SEND else (flow.gradients, flow.producer)
            received = RECEIVE if kind == SEND else RECEIVE_GRADIENT
            for name in (self._plan.tensors[index].name for index in indices):
                tensor = tensors[name]
                piece = _ReceivedRows(0, None, there=False) if tensor is None else _ReceivedRows(0, tensor.detach())
                self._pieces[received, other, micro_batch, stage, name] = [piece]

    def take(self, stage: int, micro_batch: int, peer_stage: int, name: str) -> torch.Tensor:
        """Return a tensor that a stage has received from another, its rows joined."""
        found = self._pop_tensor((RECEIVE, stage, micro_batch, peer_stage, name))
        assert found is not None
        return found

    def take_gradient(self, stage: int, micro_batch: int, peer_stage: int, name: str) -> torch.Tensor | None:
        """Return the gradient that a stage has received from another, its rows joined; None where there is none."""
        return self._pop_tensor((RECEIVE_GRADIENT, stage, micro_batch, peer_stage, name))

    def _pop_tensor(self, key: Key) -> torch.Tensor | None:
        if len(self._own.team) > 1 and self._plan.ownership.joins(*sorted((key[1], key[-2]))):
            return self._pop_joined(key)
        pieces = self._pieces.pop(key)
        if not any(piece.there for piece in pieces):
            return None
        if len(pieces) == 1:
            return pieces[0].tensor
        pieces.sort(key=lambda piece: piece.start)
        tensors = [piece.tensor for piece in pieces if piece.tensor is not None]
        return torch.cat(tensors, dim=self._specs[key[-1]].batch_dim)

    def _pop_joined(self, key: Key) -> torch.Tensor:
        """Return a tensor of which the ranks of the team have received some rows each, all of them together."""
        spec = self._specs[key[-1]]
        whole = self._blank(spec)
        for start, piece, _ in self._pieces.pop(key, []):
            if piece is not None:
                whole.narrow(spec.batch_dim, start, piece.shape[spec.batch_dim]).copy_(piece)
        join(whole, self._own.team, self._transport)
        return whole

    def _blank(self, spec: TensorSpec) -> torch.Tensor:
        """Return zeros for all of this rank's rows of a tensor."""
        return torch.zeros(spec.shape(len(self._own.rows)), dtype=spec.dtype, device=self._device)

    def _dues(self, action: Action) -> list[_Due]:
        flow, start, names = self._flow(action)
        key = (action.kind, action.stage, action.micro_batch, action.peer_stage)
        rows = int(flow.samples.rows)
        specs = [self._specs[name] for name in names]
        dues = [_Due((*key, spec.name), start, spec.shape(rows), spec.dtype) for spec in specs]
        if self.with_marks and action.kind == RECEIVE_GRADIENT:
            dues.append(_Due((*key, _MARKS), start, (len(dues),), torch.uint8))
        return dues

    def _rows_of(self, action: Action) -> list[_Slice]:
        flow, start, names = self._flow(action)
        rows = int(flow.samples.rows)
        whole = rows == len(self._own.rows)
        return [_Slice(name, self._specs[name].batch_dim, start, rows, whole) for name in names]

    def _flow(self, action: Action) -> tuple[Message, int, list[str]]:
        """Return the message of an action, where its rows begin within this rank's share, and its tensors' names."""
        flow, indices = self._messages[action.kind, action.stage, action.peer, action.peer_stage]
        start = int(flow.samples.start) - self._own.rows.start
        return flow, start, [self._plan.tensors[index].name for index in indices]

    def _peer_lost_error(self, action: Action, error: PeerLostError) -> PeerLostError:
        peer = f"rank {action.peer} (stage {action.peer_stage})"
        return PeerLostError(f"lost {peer} at {action}: {error}")
