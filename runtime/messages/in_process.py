"""InProcessTransport: ranks as threads of one process, for trying many plans quickly.

What they tell each other is carried as bytes, as between processes: a tensor that lies in memory otherwise than it is
read is refused, and one that is received as another type is another tensor.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from autopar.errors import UsageError
from autopar.ranks.channel import bytes_of
from autopar.ranks.failure import PeerLostError
from autopar.runtime.messages.transport import Done, Pending, Slicing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Exchange", "InProcessTransport"]

_Key = tuple[tuple[int, ...], bool, int]
"""Of a reduction: its ranks, whether it is apart, and the how manieth of those it is."""


_Fill = Callable[[Sequence[torch.Tensor]], object]
"""Does something with what ranks brought, in their order."""


class _Meeting:
    """Where those who have something to do with each other wait for one another, and nobody else does."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.messages: deque[torch.Tensor] = deque()
        self.parts: dict[int, torch.Tensor] = {}
        """Of a reduction, by rank."""
        self.left = 0
        """How many ranks have the sum."""


class Exchange:
    """What all ranks of one process share: a queue per ordered pair, and the reductions under way."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.broken = False
        self._timeout_s, self._lock = timeout_s, threading.Lock()
        self._queues: dict[tuple[int, int], _Meeting] = {}
        self._reductions: dict[_Key, _Meeting] = {}

    def queue(self, pair: tuple[int, int]) -> _Meeting:
        """Return the queue of an ordered pair."""
        with self._lock:
            return self._queues.setdefault(pair, _Meeting())

    def reduction(self, key: _Key) -> _Meeting:
        """Return a reduction that is not over."""
        with self._lock:
            return self._reductions.setdefault(key, _Meeting())

    def end(self, key: _Key) -> None:
        """Forget a reduction."""
        with self._lock:
            del self._reductions[key]

    def wait(self, meeting: _Meeting, ready: _Ready, what: str) -> None:
        """Wait, holding a meeting, until something is so; ``what`` is lost otherwise."""
        arrived = meeting.changed.wait_for(lambda: self.broken or ready(), self._timeout_s)
        if self.broken or not arrived:
            raise PeerLostError(what)

    def break_off(self) -> None:
        """Let every rank that waits, now or later, fail."""
        with self._lock:
            self.broken = True
            every = [*self._queues.values(), *self._reductions.values()]
        for meeting in every:
            with meeting.changed:
                meeting.changed.notify_all()


class InProcessTransport:
    """One rank's end of an :class:`Exchange`; sums are taken in rank order."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange, self._rank = exchange, rank
        self._posted: dict[int, deque[_Receive]] = defaultdict(deque)
        self._count: dict[tuple[tuple[int, ...], bool], int] = defaultdict(int)

    def send(self, tensor: torch.Tensor, peer: int) -> Pending:
        """See :class:`autopar.runtime.messages.transport.Transport`."""
        queue = self._exchange.queue((self._rank, peer))
        with queue.changed:
            queue.messages.append(bytes_of(tensor).clone())
            queue.changed.notify_all()
        return Done(tensor)

    def receive(self, tensor: torch.Tensor, peer: int) -> Pending:
        """See :class:`autopar.runtime.messages.transport.Transport`."""
        receive = _Receive(self._exchange, (peer, self._rank), tensor, self._posted[peer])
        self._posted[peer].append(receive)
        return receive

    def mesh(self, ranks: tuple[int, ...]) -> DeviceMesh:
        """Refuse: threads of one process have no mesh."""
        raise UsageError(f"ranks {ranks} of one process cannot shard; train with processes")

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], *, apart: bool = False) -> Pending:
        """See :class:`autopar.runtime.messages.transport.Transport`."""

        def fill(parts: Sequence[torch.Tensor]) -> None:
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            _summable(tensor).copy_(total)

        return self._meet(_summable(tensor), (ranks, apart), fill)

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, ranks: tuple[int, ...]) -> Pending:
        """See :class:`autopar.runtime.messages.transport.Transport`."""
        return self._meet(bytes_of(own), (ranks, False), lambda parts: bytes_of(whole).copy_(torch.cat(list(parts))))

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> Pending:
        """See :class:`autopar.runtime.messages.transport.Transport`."""
        return Slicing(self.all_reduce(whole, ranks), own, whole, ranks.index(self._rank))

    def _meet(self, part: torch.Tensor, group: tuple[tuple[int, ...], bool], fill: _Fill) -> Pending:
        """Begin to do something with what all of a group's ranks bring."""
        key = (*group, self._count[group])
        self._count[group] += 1
        meeting = self._exchange.reduction(key)
        with meeting.changed:
            meeting.parts[self._rank] = part.clone()
            meeting.changed.notify_all()
        return _Reduce(self._exchange, key, meeting, fill)


class _Receive:
    def __init__(
        self, exchange: Exchange, pair: tuple[int, int], tensor: torch.Tensor, receives: deque[_Receive]
    ) -> None:
        self._exchange, self._pair, self._tensor, self._receives = exchange, pair, tensor, receives
        self._filled = False

    def wait(self) -> None:
        # Earlier receives of the pair take their messages first, whichever is waited for.
        while not self._filled:
            self._receives.popleft()._fill()

    def _fill(self) -> None:
        queue = self._exchange.queue(self._pair)
        with queue.changed:
            self._exchange.wait(queue, lambda: bool(queue.messages), f"no message from rank {self._pair[0]}")
            message = queue.messages.popleft()
        content = bytes_of(self._tensor)
        if message.numel() != content.numel():
            raise PeerLostError(f"it has sent {message.numel()} bytes where {content.numel()} were expected")
        content.copy_(message)
        self._filled = True


class _Reduce:
    def __init__(self, exchange: Exchange, key: _Key, meeting: _Meeting, fill: _Fill) -> None:
        self._exchange, self._key, self._meeting, self._fill = exchange, key, meeting, fill

    def wait(self) -> None:
        """See :class:`autopar.runtime.messages.transport.Pending`."""
        meeting, ranks = self._meeting, self._key[0]
        with meeting.changed:
            ready = f"no reduction among ranks {ranks}"
            self._exchange.wait(meeting, lambda: len(meeting.parts) == len(ranks), ready)
            meeting.left += 1
            if meeting.left == len(ranks):
                self._exchange.end(self._key)
        parts = [meeting.parts[rank] for rank in ranks]
        if len({(part.shape, part.dtype) for part in parts}) > 1:
            raise PeerLostError(f"ranks {ranks} sum tensors of different sizes or types")
        self._fill(parts)


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


class _Ready(Protocol):
    def __call__(self) -> bool: ...
