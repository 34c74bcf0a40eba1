"""Delayed: a transport whose messages arrive some time after they were sent, as over a slower link."""

from __future__ import annotations

import time

import torch

from autopar.runtime.messages.transport import Pending, Transport

__all__ = ["DelayedTransport"]


class DelayedTransport:
    """Sends with every message the moment of its sending, on the clock of the host, and delivers it so much later."""

    def __init__(self, inner: Transport, delay_s: float) -> None:
        self._inner, self._delay_s = inner, delay_s

    def send(self, tensor: torch.Tensor, peer: int) -> Pending:
        """See :class:`autopar.runtime.messages.transport.Transport`."""
        moment = torch.tensor([time.monotonic()], dtype=torch.float64)
        return _Both(self._inner.send(moment, peer), self._inner.send(tensor, peer), moment, 0.0)

    def receive(self, tensor: torch.Tensor, peer: int) -> Pending:
        """See :class:`autopar.runtime.messages.transport.Transport`."""
        moment = torch.zeros(1, dtype=torch.float64)
        return _Both(self._inner.receive(moment, peer), self._inner.receive(tensor, peer), moment, self._delay_s)

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Pending:
        """See :class:`autopar.runtime.messages.transport.Transport`; not delayed."""
        return self._inner.all_reduce(tensor, ranks)

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, ranks: tuple[int, ...]) -> Pending:
        """See :class:`autopar.runtime.messages.transport.Transport`; not delayed."""
        return self._inner.all_gather(whole, own, ranks)

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> Pending:
        """See :class:`autopar.runtime.messages.transport.Transport`; not delayed."""
        return self._inner.reduce_scatter(own, whole, ranks)


class _Both:
    """A message and the moment of its sending, on their way together."""

    def __init__(self, first: Pending, second: Pending, moment: torch.Tensor, delay_s: float) -> None:
        self._first, self._second, self._moment, self._delay_s = first, second, moment, delay_s

    def wait(self) -> None:
        """Wait for both, then until the delay is over."""
        self._first.wait()
        self._second.wait()
        left_s = float(self._moment) + self._delay_s - time.monotonic()
        if self._delay_s and left_s > 0:
            time.sleep(left_s)
