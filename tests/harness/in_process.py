"""InProcessTransport: ranks as threads of one process, for trying many plans quickly.

What they tell each other is carried as bytes, as between processes: a tensor that lies in memory otherwise than it is
read is refused, and one that is received as another type is another tensor.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Protocol

import torch

from autopar.errors import UsageError
from autopar.ranks.channel import bytes_of
from autopar.ranks.failure import PeerLostError
from autopar.runtime.messages.transport import Done, Pending

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Exchange", "InProcessTransport"]

_Key = tuple[tuple[int, ...], bool, int]
"""Of a reduction: its ranks, whether it is apart, and the how manieth of those it is."""


class Exchange:
    """What all ranks of one process share: a queue per ordered pair, and the reductions under way."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.queues: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self.reductions: dict[_Key, dict[int, torch.Tensor]] = defaultdict(dict)
        self.broken = False

    def break_off(self) -> None:
        """Let every rank that waits, now or later, fail."""
        with self.changed:
            self.broken = True
            self.changed.notify_all()


class InProcessTransport:
    """One rank's end of an :class:`Exchange`; sums are taken in rank order."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange, self._rank = exchange, rank
        self._posted: dict[int, deque[_Receive]] = defaultdict(deque)
        self._count: dict[tuple[tuple[int, ...], bool], int] = defaultdict(int)

    def send(self, tensor: torch.Tensor, peer: int) -> Pending:
        """See :class:`autopar.runtime.messages.transport.Transport`."""
        with self._exchange.changed:
            self._exchange.queues[self._rank, peer].append(bytes_of(tensor).clone())
            self._exchange.changed.notify_all()
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
        key = (ranks, apart, self._count[ranks, apart])
        self._count[ranks, apart] += 1
        with self._exchange.changed:
            self._exchange.reductions[key][self._rank] = _summable(tensor).clone()
            self._exchange.changed.notify_all()
        return _Reduce(self._exchange, key, tensor)


class _Receive:
    def __init__(
        self, exchange: Exchange, pair: tuple[int, int], tensor: torch.Tensor, posted: deque[_Receive]
    ) -> None:
        self._exchange, self._pair, self._tensor, self._posted = exchange, pair, tensor, posted
        self._filled = False

    def wait(self) -> None:
        # Earlier receives of the pair take their messages first, whichever is waited for.
        while not self._filled:
            self._posted.popleft()._fill()

    def _fill(self) -> None:
        queue = self._exchange.queues[self._pair]
        with self._exchange.changed:
            _wait(self._exchange, lambda: bool(queue), f"no message from rank {self._pair[0]}")
            message = queue.popleft()
        content = bytes_of(self._tensor)
        if message.numel() != content.numel():
            raise PeerLostError(f"it has sent {message.numel()} bytes where {content.numel()} were expected")
        content.copy_(message)
        self._filled = True


class _Reduce:
    def __init__(self, exchange: Exchange, key: _Key, tensor: torch.Tensor) -> None:
        self._exchange, self._key, self._tensor = exchange, key, tensor

    def wait(self) -> None:
        ranks = self._key[0]
        with self._exchange.changed:
            parts = self._exchange.reductions[self._key]
            _wait(self._exchange, lambda: len(parts) == len(ranks), f"no reduction among ranks {ranks}")
        total = parts[ranks[0]].clone()
        for rank in ranks[1:]:
            if (parts[rank].shape, parts[rank].dtype) != (total.shape, total.dtype):
                raise PeerLostError(f"ranks {ranks} sum tensors of different sizes or types")
            total += parts[rank]
        _summable(self._tensor).copy_(total)


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


def _wait(exchange: Exchange, ready: _Ready, what: str) -> None:
    arrived = exchange.changed.wait_for(lambda: exchange.broken or ready(), exchange.timeout_s)
    if exchange.broken or not arrived:
        raise PeerLostError(what)


class _Ready(Protocol):
    def __call__(self) -> bool: ...
