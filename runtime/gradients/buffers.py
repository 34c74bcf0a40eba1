"""Buffers that forwards write, made alike on all replicas of a stage after every step, as the plan asks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autopar.capture.graph import Layer
from autopar.formats.plan import ReplicatedState
from autopar.runtime.messages.transport import Transport
from autopar.runtime.stage.parameters import Held


class ReplicatedBuffers:
    """The written buffers of one rank's layers."""

    def __init__(
        self,
        layers: Iterable[Layer],
        held: Held,
        how: ReplicatedState | None,
        transport: Transport,
        ranks: tuple[int, ...],
        rank: int,
    ) -> None:
        """Find them.

        Args:
            layers: the rank's.
            held: their buffers.
            how: whose values all replicas get: those of the first, or the mean of all, where numbers are floating.
            transport: carries sums.
            ranks: the replicas, the first one first.
            rank: this one.
        """
        written = [layer.writes.buffers for layer in layers if layer.writes is not None]
        names = dict.fromkeys(name for each in written for name in each) if how and len(ranks) > 1 else {}
        self._buffers = [held.buffers[name] for name in names]
        self._how, self._transport, self._ranks, self._first = how, transport, ranks, rank == ranks[0]

    @torch.no_grad()
    def settle(self) -> None:
        """Make the buffers alike; every replica does so at once."""
        for buffer in self._buffers:
            mean = self._how == "average" and (buffer.is_floating_point() or buffer.is_complex())
            # Backends do not add up booleans; of these and of integers, the first replica's are taken.
            sent = buffer.to(torch.int64) if buffer.dtype is torch.bool else buffer.clone()
            if not mean and not self._first:
                sent.zero_()
            self._transport.all_reduce(sent, self._ranks).wait()
            buffer.copy_(sent / len(self._ranks) if mean else sent)
