"""StagedTransport: tensors of GPUs that nothing connects move through their hosts' memory.

Ranks that share a GPU have no NCCL between them. What one sends is copied to page-locked memory beside what the GPU
computes, sent from there, and copied on by who receives it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from autopar.errors import UsageError
from autopar.runtime.copies import Copies
from autopar.runtime.transport import Pending, Transport

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["StagedTransport"]


class StagedTransport:
    """Puts copies between a device and a transport of host memory.

    A thread begins each send and reduction when its copy is there, in the order in which they were asked for, so that
    computing waits for none. Receives are begun at once.
    """

    def __init__(self, inner: Transport, copies: Copies) -> None:
        self._inner, self._copies = inner, copies
        self._thread = ThreadPoolExecutor(1, "staged", copies.prepare_thread)

    def send(self, tensor: torch.Tensor, peer: int) -> Pending:
        """See :class:`autopar.runtime.transport.Transport`."""
        return self._begun(tensor, lambda host: self._inner.send(host, peer))[1]

    def receive(self, tensor: torch.Tensor, peer: int) -> Pending:
        """See :class:`autopar.runtime.transport.Transport`."""
        if not self._copies.holds(tensor):
            return self._inner.receive(tensor, peer)
        host = self._copies.buffer(tensor)
        return _Landing(self._inner.receive(host, peer), host, tensor, self._copies)

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], *, apart: bool = False) -> Pending:
        """See :class:`autopar.runtime.transport.Transport`."""
        host, begun = self._begun(tensor, lambda host: self._inner.all_reduce(host, ranks, apart=apart))
        return begun if host is tensor else _Landing(begun, host, tensor, self._copies)

    def mesh(self, ranks: tuple[int, ...]) -> DeviceMesh:
        """Refuse: what shards goes from device to device."""
        raise UsageError(
            f"ranks {', '.join(map(str, ranks))} shard, and NCCL does not connect their GPUs; plan with `shard='none'`"
        )

    def _begun(self, tensor: torch.Tensor, begin: Callable[[torch.Tensor], Pending]) -> tuple[torch.Tensor, Pending]:
        """Return a tensor's copy in the host's memory, and what begins with it once it is there."""
        copy = self._copies.to_host(tensor) if self._copies.holds(tensor) else None
        host = tensor if copy is None else copy.tensor

        def act() -> Pending:
            if copy is not None:
                copy.wait()
            return begin(host)

        return host, _Begun(self._thread.submit(act))


class _Begun:
    """Something that the thread begins."""

    def __init__(self, future: Future[Pending]) -> None:
        self._future = future

    def wait(self) -> None:
        """See :class:`autopar.runtime.transport.Pending`."""
        self._future.result().wait()


class _Landing:
    """Something that arrives in the host's memory, and is wanted in the device's."""

    def __init__(self, arriving: Pending, host: torch.Tensor, tensor: torch.Tensor, copies: Copies) -> None:
        self._arriving, self._host, self._tensor, self._copies = arriving, host, tensor, copies
        self._since = copies.moment()

    def wait(self) -> None:
        """Wait here until it has arrived; the device's work waits for the copy."""
        self._arriving.wait()
        self._copies.to_device(self._host, self._tensor, self._since)
