"""Transport: how tensors move between ranks, apart from what is moved and when.

The messages of an ordered pair of ranks arrive in the order in which they were sent. Sums are taken over groups of
ranks, of which a plan makes a few, each in an order that all ranks share.

Ranks may be threads of one process, for trying many plans quickly. What these tell each other is carried as bytes, as
between processes: a tensor that lies in memory otherwise than it is read is refused, and one that is received as
another type is another tensor.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from autopar.errors import UsageError, text_of
from autopar.formats.plan import Plan
from autopar.formats.stage import SharedParameter, Stage
from autopar.ranks.channel import Channel, InTurn, bytes_of
from autopar.ranks.context import RankContext
from autopar.ranks.failure import PeerLostError
from autopar.ranks.meeting import late_connections_dropped

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed.device_mesh import DeviceMesh

# Renamed in torch 2.13, which warns of the names that torch 2.11 has.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending(Protocol):
    """Something that was begun and will be done."""

    def wait(self) -> None:
        """Return when it is done, or the device's work from now on waits for it.

        Raises:
            PeerLostError: it cannot be done.
        """


class Transport(Protocol):
    """Moves tensors between ranks; every call returns at once."""

    def send(self, tensor: torch.Tensor, peer: int) -> Pending:
        """Begin to send a tensor that is :func:`sendable`, and must stay untouched until waited for."""

    def receive(self, tensor: torch.Tensor, peer: int) -> Pending:
        """Begin to fill a contiguous tensor with the next message of ``peer``."""

    def has_arrived(self, peer: int) -> bool:
        """Return whether the next message of a peer that is sent waves is there; receives before it are done."""

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], *, apart: bool = False) -> Pending:
        """Begin to replace a tensor by its sum over ``ranks``, in place.

        Reductions of the same ranks begin in the same order on all of them; those ``apart`` have an order of their own.
        """

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, ranks: tuple[int, ...]) -> Pending:
        """Begin to fill a contiguous tensor with those of ``ranks``, which ascend, one behind the other.

        It counts as a reduction of theirs.
        """

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> Pending:
        """Begin to fill a contiguous tensor with this rank's slice of the sum of contiguous ones over ``ranks``.

        Slices are of their first dimension, even, and in the order of ranks, which ascend. It counts as a reduction,
        and may use ``whole`` up.
        """

    def mesh(self, ranks: tuple[int, ...]) -> DeviceMesh:
        """Return the mesh of some ranks that reduce together, this one among them."""


class _Work:
    """A piece of work of torch.distributed."""

    __slots__ = ("_waiting", "_work")

    def __init__(self, work: dist.Work | None, waiting: AbstractContextManager[None]) -> None:
        self._work, self._waiting = work, waiting

    def wait(self) -> None:
        if self._work is None:
            return
        try:
            with self._waiting:
                self._work.wait()
        except RuntimeError as error:
            raise PeerLostError(text_of(error)) from error


class Done:
    """Something that was done at once; like something under way, it keeps its tensors until it is let go."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = tensors

    def wait(self) -> None:
        """See :class:`Pending`."""


class Later:
    """Acts that are done one after the other as they are waited for; they keep their tensors until it is let go."""

    def __init__(self, *acts: Callable[[], object]) -> None:
        self._acts = acts

    def wait(self) -> None:
        """See :class:`Pending`."""
        for act in self._acts:
            act()


def _slicing(reduction: Pending, own: torch.Tensor, whole: torch.Tensor, place: int) -> Later:
    """Return a sum of which a rank takes its slice."""
    length = own.shape[0]
    return Later(reduction.wait, lambda: own.copy_(whole.narrow(0, place * length, length)))


class Arrivals:
    """Which messages have been sent through groups, which cannot be asked: senders count them in a store of all ranks.

    They are those of waves, of which there are few; what they carry does not go through the store.
    """

    def __init__(self, store: Store, rank: int, peers: Collection[int]) -> None:
        """Begin with none, of a rank and its ``peers``, in a store of the ranks' for this alone."""
        self._store, self._rank, self.peers = store, rank, peers
        self._received = Counter[int]()

    def note_sent(self, peer: int) -> None:
        """Count a message to a peer."""
        self._store.add(f"{self._rank}>{peer}", 1)

    def note_received(self, peer: int) -> None:
        """Count a message of a peer that is received."""
        self._received[peer] += 1

    def has_arrived(self, peer: int) -> bool:
        """Return whether a peer has sent more than was received."""
        sent: int = self._store.add(f"{peer}>{self._rank}", 0)
        return sent > self._received[peer]


class GroupTransport:
    """Tensors move through torch.distributed: gloo between hosts' memories, NCCL between GPUs.

    Messages between CPUs of a host go through channels, where there are any.

    NCCL's messages and reductions run on streams of their own, which begin when the present stream has made the tensor;
    waiting for one makes the present stream wait, not the host. Tensors are kept from others until it is done.
    """

    def __init__(
        self,
        context: RankContext,
        groups: Iterable[tuple[int, ...]],
        apart: Iterable[tuple[int, ...]],
        channels: Mapping[int, Channel],
        *,
        with_message_group: bool,
        arrivals: Arrivals | None = None,
    ) -> None:
        """Create the process groups of all reductions; every rank must name the same ones in the same order.

        Args:
            context: the rank's.
            groups: ranks that reduce together.
            apart: those that do so in an order of their own, too.
            channels: lead to ranks that have one to this rank.
            arrivals: of waves that go through groups, if some do.
            with_message_group: whether messages that training depends on go through groups. Otherwise, none is made
                for them, as a thread of Gloo's wakes up a hundred times a second in every one; the default group does
                for the rest.
        """
        with late_connections_dropped():
            patience = timedelta(seconds=context.timeout_s)
            self._groups = {(ranks, False): dist.new_group(list(ranks), timeout=patience) for ranks in groups}
            self._groups |= {(ranks, True): dist.new_group(list(ranks), timeout=patience) for ranks in apart}
            everyone = list(range(context.size))
            group = dist.new_group(everyone, timeout=patience) if with_message_group else dist.group.WORLD
            assert group is not None
            self._up = self._down = group
            if context.nccl:
                # NCCL runs one communicator's operations in order: opposite directions need one each. Of each, torch
                # makes one for every pair of ranks.
                self._down = dist.new_group(everyone, timeout=patience)
        self._meshes: list[DeviceMesh] = []
        self._closes_groups = context.shares_group
        context.on_leaving.append(self._close)
        self._rank, self._device_type = context.rank, context.device.type
        self._channels, self._waiting, self._arrivals = channels, context.waiting, arrivals

    def _close(self) -> None:
        """Let go of all groups: with its last holder, a group ends its threads.

        A thread of Gloo's that still frees a tensor when Python ends aborts the process.
        """
        made = dict.fromkeys([*self._groups.values(), self._up, self._down])
        self._groups.clear()
        del self._up, self._down
        for mesh in self._meshes:
            # Caches of torch's keep the mesh.
            getattr(mesh, "_pg_registry", {}).clear()
        if self._closes_groups:
            for group in made:
                # Of other ranks' groups, this one has none.
                if isinstance(group, dist.ProcessGroup) and group is not dist.group.WORLD:
                    dist.destroy_process_group(group)

    def send(self, tensor: torch.Tensor, peer: int) -> Pending:
        """See :class:`Transport`."""
        if peer in self._channels:
            self._channels[peer].send(tensor)
            return Done(tensor)
        group = self._up if peer > self._rank else self._down
        # The group's own: ``isend`` finds out in every call what is known here.
        begun = self._begin(lambda: group.send([_reals(tensor)], peer, 0))
        if self._arrivals is not None and peer in self._arrivals.peers:
            self._arrivals.note_sent(peer)
        return begun

    def receive(self, tensor: torch.Tensor, peer: int) -> Pending:
        """See :class:`Transport`."""
        if peer in self._channels:
            return self._channels[peer].receive(tensor)
        group = self._down if peer > self._rank else self._up
        if self._arrivals is not None and peer in self._arrivals.peers:
            self._arrivals.note_received(peer)
        return self._begin(lambda: group.recv([_reals(tensor)], peer, 0))

    def has_arrived(self, peer: int) -> bool:
        """See :class:`Transport`."""
        if peer in self._channels:
            return self._channels[peer].has_arrived()
        assert self._arrivals is not None
        return self._arrivals.has_arrived(peer)

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], *, apart: bool = False) -> Pending:
        """See :class:`Transport`."""
        return self._begin(lambda: dist.all_reduce(_reals(tensor), group=self._groups[ranks, apart], async_op=True))

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, ranks: tuple[int, ...]) -> Pending:
        """See :class:`Transport`."""
        group = self._groups[ranks, False]
        return self._begin(lambda: _GATHER(_reals(whole), _reals(own), group=group, async_op=True))

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> Pending:
        """See :class:`Transport`."""
        if not whole.is_cuda:
            # Gloo's own does the same, and not in all of torch's versions.
            return _slicing(self.all_reduce(whole, ranks), own, whole, ranks.index(self._rank))
        group = self._groups[ranks, False]
        return self._begin(lambda: _SCATTER(_reals(own), _reals(whole), group=group, async_op=True))

    def _begin(self, start: Callable[[], dist.Work | None]) -> _Work:
        try:
            return _Work(start(), self._waiting)
        except RuntimeError as error:
            raise PeerLostError(text_of(error)) from error

    def mesh(self, ranks: tuple[int, ...]) -> DeviceMesh:
        """See :class:`Transport`."""
        from torch.distributed.device_mesh import DeviceMesh

        group = self._groups[ranks, False]
        # Meshes of the same ranks and names are one to torch, which remembers them: this job's is told from another's.
        self._meshes.append(DeviceMesh.from_group(group, self._device_type, mesh_dim_names=(group.group_name,)))
        return self._meshes[-1]


def join(tensor: torch.Tensor, ranks: tuple[int, ...], transport: Transport) -> None:
    """Fill a contiguous tensor, of which each of some ranks has some elements, and zeros elsewhere, in place.

    Bytes are added up: what comes is what was there, of any type, to the last bit.
    """
    transport.all_reduce(bytes_of(tensor), ranks).wait()


def sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose numbers lie in memory as they are, one behind the other: not conjugated when they are read.

    >>> sendable(torch.tensor([1 + 2j]).conj()).view(torch.float32)
    tensor([ 1., -2.])
    """
    return tensor.contiguous().resolve_conj().resolve_neg()


def _reals(tensor: torch.Tensor) -> torch.Tensor:
    """Backends send real numbers only."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def reducing_groups(plan: Plan) -> list[tuple[int, ...]]:
    """Return every set of ranks that reduce gradients together, in an order that all ranks share."""
    groups = [ranks for index, _ in enumerate(plan.stages) for ranks in plan.ownership.copies([index])]
    groups += [ranks for tied in plan.tied for ranks in sharing_groups(plan, tied)]
    groups += [each.ranks for each in plan.shared_layers]
    return list(dict.fromkeys(group for group in groups if len(group) > 1))


def sharing_groups(plan: Plan, parameter: SharedParameter) -> list[tuple[int, ...]]:
    """Return the sets of ranks that reduce the gradients of a parameter that stages share.

    Those with the same part of it do so, or all together where stages have other parts of it.
    """
    if plan.cuts_alike(parameter):
        return plan.ownership.copies(parameter.stages)
    return [tuple(dict.fromkeys(own.rank for stage in parameter.stages for own in plan.ownership.holders(stage)))]


def team_groups(plan: Plan) -> list[tuple[int, ...]]:
    """Return every set of ranks that add up parts of a replica's layers, in an order that all ranks share.

    They are whole teams, and where two dimensions are split together, those of a team that have the same of one.
    """
    found: list[tuple[int, ...]] = []
    for index, stage in enumerate(plan.stages):
        summing = parts_that_sum(stage)
        for team in plan.ownership.replicas[index]:
            found += [tuple(team[part] for part in parts) for parts in summing]
    return list(dict.fromkeys(found))


def parts_that_sum(stage: Stage) -> list[tuple[int, ...]]:
    """Return the sets of a stage's parts that add up: all, and those with the same indices of some parameter.

    Where sets of as many have the same, those at the same place among them add up, too.
    """
    found = [tuple(range(stage.tensor_parallel))]
    for cut in stage.cuts:
        pieces = (piece for part in range(stage.tensor_parallel) for piece in cut.pieces(part))
        rows = list(dict.fromkeys(piece.parts for piece in pieces))
        found += rows
        if len({len(row) for row in rows}) == 1:
            found += zip(*rows, strict=True)
    return list(dict.fromkeys(parts for parts in found if len(parts) > 1))


def synced_groups(plan: Plan) -> list[tuple[int, ...]]:
    """Return every set of ranks that divide micro-batches among them, in an order that all ranks share."""
    divided = [i for i, stage in enumerate(plan.stages) if stage.division == "split" and stage.replicas > 1]
    return list(dict.fromkeys(ranks for index in divided for ranks in plan.ownership.copies([index])))


_Key = tuple[int, int, object]
"""Of a queue: who puts, who takes, and in which group's reductions; None of messages."""


class Exchange:
    """What all ranks of one process share: a queue for each ordered pair of ranks, and for each of their groups."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self._timeout_s, self._lock, self._broken = timeout_s, threading.Lock(), False
        self._queues: dict[_Key, SimpleQueue[torch.Tensor | None]] = defaultdict(SimpleQueue)

    def put(self, key: _Key, tensor: torch.Tensor) -> None:
        """Put a tensor into a queue."""
        self._queue(key).put(tensor)

    def take(self, key: _Key, what: str) -> torch.Tensor:
        """Return the next tensor of a queue; ``what`` is lost where none comes."""
        try:
            found = self._queue(key).get(timeout=self._timeout_s)
        except Empty:
            found = None
        if found is None:
            raise PeerLostError(what)
        return found

    def has(self, key: _Key) -> bool:
        """Return whether a queue has a tensor, or none ever comes."""
        return not self._queue(key).empty()

    def break_off(self) -> None:
        """Let every rank that waits, now or later, fail."""
        with self._lock:
            self._broken = True
            for each in self._queues.values():
                each.put(None)

    def _queue(self, key: _Key) -> SimpleQueue[torch.Tensor | None]:
        with self._lock:
            if self._broken:
                self._queues[key].put(None)
            return self._queues[key]


class InProcessTransport:
    """One rank's end of an :class:`Exchange`; sums are taken in rank order."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange, self._rank = exchange, rank
        self._begun: dict[object, deque[InTurn]] = defaultdict(deque)
        """By peer or group, what was begun and not waited for."""

    def send(self, tensor: torch.Tensor, peer: int) -> Pending:
        """See :class:`Transport`."""
        self._exchange.put((self._rank, peer, None), bytes_of(tensor).clone())
        return Done(tensor)

    def receive(self, tensor: torch.Tensor, peer: int) -> Pending:
        """See :class:`Transport`."""

        def fill() -> None:
            message = self._exchange.take((peer, self._rank, None), f"no message from rank {peer}")
            content = bytes_of(tensor)
            if message.numel() != content.numel():
                raise PeerLostError(f"it has sent {message.numel()} bytes where {content.numel()} were expected")
            content.copy_(message)

        return InTurn(self._begun[peer], fill)

    def has_arrived(self, peer: int) -> bool:
        """See :class:`Transport`."""
        return self._exchange.has((peer, self._rank, None))

    def mesh(self, ranks: tuple[int, ...]) -> DeviceMesh:
        """Refuse: threads of one process have no mesh."""
        raise UsageError(f"ranks {ranks} of one process cannot shard; train with processes")

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], *, apart: bool = False) -> Pending:
        """See :class:`Transport`."""

        def fill(parts: Sequence[torch.Tensor]) -> None:
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            _summable(tensor).copy_(total)

        return self._meet(_summable(tensor), (ranks, apart), fill)

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, ranks: tuple[int, ...]) -> Pending:
        """See :class:`Transport`."""
        return self._meet(bytes_of(own), (ranks, False), lambda parts: bytes_of(whole).copy_(torch.cat(list(parts))))

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> Pending:
        """See :class:`Transport`."""
        return _slicing(self.all_reduce(whole, ranks), own, whole, ranks.index(self._rank))

    def _meet(
        self,
        part: torch.Tensor,
        group: tuple[tuple[int, ...], bool],
        fill: Callable[[Sequence[torch.Tensor]], object],
    ) -> Pending:
        """Begin to do something with what all of a group's ranks bring, in their order."""
        own, ranks = part.clone(), group[0]
        for rank in ranks:
            self._exchange.put((self._rank, rank, group), own)

        def act() -> None:
            lost = f"no reduction among ranks {ranks}"
            parts = [self._exchange.take((rank, self._rank, group), lost) for rank in ranks]
            if len({(each.shape, each.dtype) for each in parts}) > 1:
                raise PeerLostError(f"ranks {ranks} sum tensors of different sizes or types")
            fill(parts)

        return InTurn(self._begun[group], act)


_SUMMED = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}
"""Of which Gloo makes sums."""


def _summable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's numbers in the order in which they lie in memory, where a process could sum them."""
    bytes_of(tensor)
    numbers = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    if numbers.dtype not in _SUMMED:
        raise PeerLostError(f"Invalid scalar type {numbers.dtype}")
    return numbers.reshape(-1)
