"""Memory: the most bytes that a stage holds at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.planner.flows import Flows
from autopar.planner.layers import LayerCosts

__all__ = ["MemoryModel", "Table"]

RangeBytes = Callable[[int, int], int]
Table = list[list[int]]
"""Bytes of the layers first:stop, as ``table[first][stop]``."""


class MemoryModel:
    """Peak memory of a stage (docs/planning.md), with k micro-batches in flight and M in the step:

        parameters + gradients + optimizer state + buffers      a parameter tied within the stage counted once
        + (k - 1) activations + peak of one micro-batch          at the replica's rows
        + M x model inputs that the stage reads                  the mini-batch is loaded at once
        + 2 x received messages                                  per peer: one being received, one being used

    Activations are the union, by storage, of what the layers save, what the stage receives and what it sends, model
    inputs excepted. The peak of one micro-batch is the largest, over the stage's layers l, of the activations of the
    layers up to l and what l holds beyond what it saves, plus the outputs the stage keeps because it sends them.
    """

    def __init__(self, costs: LayerCosts, flows: Flows) -> None:
        self._costs, self._flows = costs, flows
        self._count = len(costs.layers)
        self._activations: dict[int, Table] = {}
        self._peaks: dict[int, Table] = {}
        self.states = self._state_table()
        self.input_bytes = self._range_table(self._inputs_of)
        """Model inputs per sample."""
        self.received_bytes = self._range_table(self._received_of)
        """Activations received per sample."""
        self.returned_bytes = self._range_table(self._returned_of)
        """Gradients received per sample, each tensor counted as if one stage read it."""

    def activations(self, rows: int) -> Table:
        """Return the bytes that one micro-batch in flight keeps."""
        if rows not in self._activations:
            self._measure(rows)
        return self._activations[rows]

    def peaks(self, rows: int) -> Table:
        """Return the most bytes that one micro-batch's forward and backward hold."""
        if rows not in self._peaks:
            self._measure(rows)
        return self._peaks[rows]

    def least(self, first: int, stop: int, rows: int, warmup: int, micro_batches: int) -> int:
        """Return the peak with every tensor that is sent read by one stage only, as it is in most models."""
        return (
            self.states[first][stop]
            + (warmup - 1) * self.activations(rows)[first][stop]
            + self.peaks(rows)[first][stop]
            + micro_batches * rows * self.input_bytes[first][stop]
            + 2 * rows * (self.received_bytes[first][stop] + self.returned_bytes[first][stop])
        )

    def peak(self, first: int, stop: int, rows: int, warmup: int, micro_batches: int, cuts: Sequence[int] = ()) -> int:
        """Return the peak of a stage whose later stages end before the layers ``cuts``."""
        extra = 0
        for tensor in self._flows.crossing:
            if first <= tensor.producer < stop and tensor.gradient:
                readers, start = 0, stop
                for end in cuts:
                    readers += any(start <= consumer < end for consumer in tensor.consumers)
                    start = end
                extra += max(0, readers - 1) * tensor.bytes_per_sample
        return self.least(first, stop, rows, warmup, micro_batches) + 2 * rows * extra

    def _state_table(self) -> Table:
        table = [[0] * (self._count + 1) for _ in range(self._count)]
        for first in range(self._count):
            total = 0
            for last in range(first, self._count):
                layer = self._costs.layers[last]
                total += layer.parameters_bytes + layer.gradient_bytes + layer.optimizer_bytes + layer.buffers_bytes
                for tied in self._flows.tied:
                    if last in tied.layers and any(first <= other < last for other in tied.layers):
                        total -= tied.bytes
                        if tied.trainable and layer.trainable_bytes:
                            share = min(1.0, tied.bytes / layer.trainable_bytes)
                            total -= int(share * (layer.gradient_bytes + layer.optimizer_bytes))
                table[first][last + 1] = total
        return table

    def _range_table(self, of: RangeBytes) -> Table:
        return [
            [of(first, stop) if stop > first else 0 for stop in range(self._count + 1)] for first in range(self._count)
        ]

    def _inputs_of(self, first: int, stop: int) -> int:
        return sum(
            tensor.bytes_per_sample
            for tensor in self._flows.inputs
            if any(first <= consumer < stop for consumer in tensor.consumers)
        )

    def _received_of(self, first: int, stop: int) -> int:
        return self._flows.between(0, first, first, stop).bytes_per_sample

    def _returned_of(self, first: int, stop: int) -> int:
        return self._flows.between(first, stop, stop, self._count).gradient_bytes_per_sample

    def _measure(self, rows: int) -> None:
        inputs = {tensor.name for tensor in self._flows.inputs}
        saved = [
            {name: size for name, size in self._costs.saved_at(layer, rows).items() if name not in inputs}
            for layer in range(self._count)
        ]
        transient = [self._transient(layer, rows, saved[layer]) for layer in range(self._count)]
        activations = [[0] * (self._count + 1) for _ in range(self._count)]
        peaks = [[0] * (self._count + 1) for _ in range(self._count)]
        for first in range(self._count):
            held: dict[str, int] = {}
            total = highest = 0
            for last in range(first, self._count):
                for name, size in saved[last].items():
                    total += max(0, size - held.get(name, 0))
                    held[name] = max(size, held.get(name, 0))
                for tensor in self._flows.crossing:
                    if tensor.producer < first and last in tensor.consumers and tensor.name not in held:
                        held[tensor.name] = rows * tensor.bytes_per_sample
                        total += held[tensor.name]
                highest = max(highest, total + transient[last])
                kept = sum(
                    rows * tensor.bytes_per_sample
                    for tensor in self._flows.crossing
                    if first <= tensor.producer <= last < tensor.consumers[-1] and tensor.name not in held
                )
                activations[first][last + 1] = total + kept
                peaks[first][last + 1] = highest + kept
        self._activations[rows], self._peaks[rows] = activations, peaks

    def _transient(self, layer: int, rows: int, saved: dict[str, int]) -> int:
        """Bytes a layer holds for a while beyond what it saves; a layer's peak does not count its inputs."""
        read = {tensor.name for tensor in self._flows.crossing if layer in tensor.consumers}
        own = sum(size for name, size in saved.items() if name not in read)
        return max(0, self._costs.bytes_at(layer, "peak_bytes", rows) - own)
