"""Channel: messages between two processes of a host, through memory that both of them map.

Who sends copies a tensor into memory of its own and says in a pipe where it lies; who receives copies it out and says
in another pipe that it has. No thread stands between the two, and the kernel copies nothing. Ranks open their channels
together, each to those it exchanges messages with.

Why: docs/design/decisions.md, "Ranks: Processes of a host share memory".
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import select
import socket
import struct
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import torch

from autopar.errors import TrainingError
from autopar.ranks.context import RankContext
from autopar.ranks.failure import PeerLostError

_PLACE = struct.Struct("=QQ")
"""Where a message lies, and how many bytes it has; pipes write so little at once or not at all."""
_TAKEN = b"\0"
_MANY_TAKEN = 4096
_ALIGNED = 64
_LEAST = 2**20
"""Bytes of memory that is mapped at once."""


class _ChannelEnd(NamedTuple):
    """File descriptors of one end of what carries messages in one direction."""

    memory: int
    places: int
    """A pipe: where messages lie."""
    acknowledgements: int
    """A pipe the other way: a byte for every message that has been copied out."""

    def close(self) -> None:
        for descriptor in self:
            os.close(descriptor)


def is_supported() -> bool:
    """Return whether this system has memory that only those it is handed to can map."""
    return hasattr(os, "memfd_create") and hasattr(select, "poll")


def new_channel_ends() -> tuple[_ChannelEnd, _ChannelEnd]:
    """Return the ends of who sends and of who receives."""
    memory = os.memfd_create("autopar", os.MFD_CLOEXEC)
    places, place_writer = os.pipe()
    acknowledgements, acknowledgement_writer = os.pipe()
    for descriptor in (places, place_writer, acknowledgements):
        os.set_blocking(descriptor, False)
    sender = _ChannelEnd(memory, place_writer, acknowledgements)
    return sender, _ChannelEnd(os.dup(memory), places, acknowledgement_writer)


class Channel:
    """One of the two ends."""

    def __init__(self, outward: _ChannelEnd, inward: _ChannelEnd, timeout_s: float) -> None:
        """Take over the descriptors, which are closed with the channel.

        Args:
            outward: what this end sends through.
            inward: what it receives through.
            timeout_s: longest that it waits for the other end.
        """
        self._outlet, self._inlet = _Outlet(outward, timeout_s), _Inlet(inward, timeout_s)
        self._waiting: deque[InTurn] = deque()

    def close(self) -> None:
        """Let go of descriptors and memory; nothing is sent or received any more."""
        self._outlet.close()
        self._inlet.close()

    def send(self, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor of the CPU, which is no longer needed when this returns.

        Raises:
            PeerLostError: the other end is gone.
        """
        self._outlet.send(bytes_of(tensor))

    def receive(self, tensor: torch.Tensor) -> InTurn:
        """Return what, waited for, fills a contiguous tensor of the CPU with the next message.

        It raises where the other end says nothing for too long, or sent something of another size.
        """
        return InTurn(self._waiting, lambda: self._inlet.receive(bytes_of(tensor)))

    def has_arrived(self) -> bool:
        """Return whether the next message is there, or never comes, so that to receive it takes no time."""
        return self._inlet.has_arrived()


class InTurn:
    """Something that is done behind what was begun before it, whichever is waited for."""

    __slots__ = ("_act", "_begun", "_done")

    def __init__(self, begun: deque[InTurn], act: Callable[[], None]) -> None:
        self._begun, self._act, self._done = begun, act, False
        begun.append(self)

    def wait(self) -> None:
        """Return when it is done.

        Raises:
            PeerLostError: it cannot be done.
        """
        while not self._done:
            first = self._begun.popleft()
            first._act()
            first._done = True


class _End:
    """One end of a way, and the memory that is mapped there, which grows."""

    def __init__(self, way: _ChannelEnd, timeout_s: float) -> None:
        self._way, self._timeout_s = way, timeout_s
        self._size = 0
        self._mapping: mmap.mmap | None = None
        self._close = weakref.finalize(self, way.close)

    def close(self) -> None:
        """Let go of it; nothing may be asked of it any more."""
        self._mapping = None
        self._close()

    def _at(self, start: int, size: int) -> memoryview:
        """Return the bytes of a place."""
        if start + size > self._size:
            self._map()
        assert self._mapping is not None
        return memoryview(self._mapping)[start : start + size]

    def _map(self) -> None:
        self._size = os.fstat(self._way.memory).st_size
        self._mapping = mmap.mmap(self._way.memory, self._size)


class _Outlet(_End):
    """What one end sends through: memory in which places are used again once messages have been taken."""

    def __init__(self, way: _ChannelEnd, timeout_s: float) -> None:
        super().__init__(way, timeout_s)
        self._end = 0
        self._sent_places: deque[tuple[int, int]] = deque()
        self._free: dict[int, list[int]] = defaultdict(list)
        """Places by their sizes: those of a program's messages are few."""

    def send(self, content: torch.Tensor) -> None:
        size = content.numel()
        self._reclaim()
        start = self._place(size)
        if size:
            self._at(start, size)[:] = content.numpy().data
        self._sent_places.append((start, size))
        self._tell(_PLACE.pack(start, size))

    def _reclaim(self) -> None:
        """Free the places of messages that have been taken, which are the oldest."""
        if not self._sent_places:
            return
        try:
            taken = os.read(self._way.acknowledgements, _MANY_TAKEN)
        except BlockingIOError:
            return
        for _ in taken:
            start, size = self._sent_places.popleft()
            self._free[size].append(start)

    def _place(self, size: int) -> int:
        if self._free[size]:
            return self._free[size].pop()
        start = self._end
        self._end += -(-size // _ALIGNED) * _ALIGNED
        if self._end > self._size:
            # Pages that nobody has written take no memory.
            os.ftruncate(self._way.memory, max(_LEAST, 2 * self._end))
            self._map()
        return start

    def _tell(self, place: bytes) -> None:
        while True:
            try:
                os.write(self._way.places, place)
            except BlockingIOError:
                # Thousands of messages wait to be received.
                _await(self._way.places, select.POLLOUT, self._timeout_s)
            except BrokenPipeError as error:
                raise PeerLostError("it has closed the connection") from error
            else:
                return


class _Inlet(_End):
    """What one end receives through."""

    def receive(self, content: torch.Tensor) -> None:
        start, size = self._next()
        if size != content.numel():
            raise PeerLostError(f"it has sent {size} bytes where {content.numel()} were expected")
        if size:
            content.numpy().data[:] = self._at(start, size)
        try:
            os.write(self._way.acknowledgements, _TAKEN)
        except BrokenPipeError:
            # Who has sent its last message need not wait until it is taken.
            return

    def has_arrived(self) -> bool:
        return _poll(self._way.places, select.POLLIN, 0)

    def _next(self) -> tuple[int, int]:
        while True:
            try:
                place = os.read(self._way.places, _PLACE.size)
            except BlockingIOError:
                _await(self._way.places, select.POLLIN, self._timeout_s)
                continue
            if not place:
                raise PeerLostError("it has closed the connection")
            start, size = _PLACE.unpack(place)
            return start, size


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, as one piece of memory that both share.

    Raises:
        PeerLostError: the tensor does not lie in memory as it is read, and cannot be carried.
    """
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        # What networks refuse, or carry as something else.
        raise PeerLostError("a tensor was to be carried that is not contiguous, or conjugated when it is read")
    return tensor.detach().reshape(-1).view(torch.uint8)


def _await(descriptor: int, event: int, timeout_s: float) -> None:
    if not _poll(descriptor, event, timeout_s):
        raise PeerLostError(f"it has said nothing for {timeout_s:g} s")


def _poll(descriptor: int, event: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(1e3 * timeout_s))


_RANK = struct.Struct("=Q")
_CREDENTIALS = struct.Struct("=iII")
"""Process, user and group, as the kernel tells them of a socket's other end."""


def partners(rank: int, pairs: Iterable[tuple[int, int]]) -> set[int]:
    """Return the ranks that have something to tell a rank, or to hear from it."""
    return {other for pair in pairs if rank in pair for other in pair} - {rank}


def open_channels(context: RankContext, pairs: Iterable[tuple[int, int]]) -> dict[int, Channel]:
    """Return this rank's channels by the rank at the other end; all ranks call this with the same pairs.

    Pairs of ranks have one where they are of one host, whose system supports it, and reach each other there: not from
    one container to another. The later rank of a pair makes it, and hands one end over. Channels are closed when the
    rank leaves its peers.

    Raises:
        TrainingError: a rank that has said it would open a channel did not.
    """
    pairs = list(pairs)
    if not pairs:
        return {}
    local_partners = partners(context.rank, pairs).intersection(context.ranks_of_host) if is_supported() else set()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        # An abstract name: it leaves no file behind.
        name = f"\0autopar-{secrets.token_hex(16)}"
        if is_supported():
            listener.bind(name)
            listener.listen(context.size)
            listener.settimeout(context.timeout_s)
        names = [json.loads(text) for text in context.gather(json.dumps(name if is_supported() else None))]
        later = [rank for rank in local_partners if rank > context.rank]
        opened = _offer(context, {rank: names[rank] for rank in local_partners if rank < context.rank})
        offers = [json.loads(text) for text in context.gather(json.dumps(sorted(opened)))]
        opened |= _accept(context, listener, [rank for rank in later if context.rank in offers[rank]])
    context.on_leaving.extend(channel.close for channel in opened.values())
    return opened


def _offer(context: RankContext, names: dict[int, str | None]) -> dict[int, Channel]:
    """Make channels to the ranks that listen under these names, as far as they can be reached."""
    opened = {}
    for rank, name in names.items():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.connect(name or "")
                _check_user(connection)
            except OSError:
                continue
            sends, receives = new_channel_ends()
            their_sends, their_receives = new_channel_ends()
            handed = (*their_sends, *receives)
            try:
                socket.send_fds(connection, [_RANK.pack(context.rank)], handed)
            finally:
                their_sends.close()
                receives.close()
            opened[rank] = Channel(sends, their_receives, context.timeout_s)
    return opened


def _accept(context: RankContext, listener: socket.socket, ranks: Collection[int]) -> dict[int, Channel]:
    """Take the ends that so many ranks hand over."""
    accepted: dict[int, Channel] = {}
    while len(accepted) < len(ranks):
        try:
            connection, _ = listener.accept()
            with connection:
                _check_user(connection)
                message, descriptors, _, _ = socket.recv_fds(connection, _RANK.size, 6)
        except PermissionError:
            continue
        except OSError as error:
            missing = sorted(set(ranks) - accepted.keys())
            raise TrainingError(
                f"rank {context.rank} could not open a channel with rank {missing[0]}: {error}"
            ) from error
        (rank,) = _RANK.unpack(message)
        accepted[rank] = Channel(_ChannelEnd(*descriptors[:3]), _ChannelEnd(*descriptors[3:]), context.timeout_s)
    return accepted


def _check_user(connection: socket.socket) -> None:
    """Make sure that the other end is of the same user: names can be seen by all."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
        raise PermissionError("a channel was opened by another user")
