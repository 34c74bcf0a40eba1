"""Memory: the most bytes that a stage holds at once."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

from autopar.formats.profile import Layer
from autopar.planner.flows import Flows, TiedLayers
from autopar.planner.layers import LayerCosts

__all__ = ["Held", "MemoryModel", "Table"]

RangeBytes = Callable[[int, int], int]
Table = list[list[int]]
"""Bytes of the layers first:stop, as ``table[first][stop]``."""


class Held(NamedTuple):
    """What a stage's peak depends on besides its layers."""

    rows: int
    """Of the replica's share."""
    warmup: int
    """Most micro-batches in flight."""
    micro_batches: int
    replicated: bool
    lead: int = 0
    """How many more micro-batches the stage before has in flight; 0 where there is none."""


class MemoryModel:
    """Peak memory of a stage (docs/planning.md), with k of the step's M micro-batches in flight at a replica's rows.

    It is the largest of three moments, with everywhere the state (parameters, buffers, optimizer state; a parameter
    tied within the stage counted once), the mini-batch's M shares of model inputs, and messages under way:

        a backward with gradients there:   gradients + (k - 1) activations + peak of one micro-batch
        the first backward, if k = M:      the same, with gradients of the layers only that it has left
        the update:                        gradients + what the optimizer holds for a while

    Where k = M, the first of these has one micro-batch less in flight. Replicas, and parameters that other stages
    share, keep their gradients throughout.

    Activations are the union, by storage, of what the layers save, what the stage receives and what it sends, model
    inputs excepted. The peak of one micro-batch is the largest, over the stage's layers l, of the activations of the
    layers up to l and what l holds beyond what it saves, plus the outputs the stage keeps because it sends them.

    Messages: receives are posted two computations ahead, and a sent gradient stays until the program proves that it
    has arrived, which takes as many micro-batches as the stage before leads.
    """

    def __init__(self, costs: LayerCosts, flows: Flows, updates_at_once: bool) -> None:
        self._costs, self._flows = costs, flows
        self._count = len(costs.layers)
        self._activations: dict[int, Table] = {}
        self._peaks: dict[int, Table] = {}
        self._first_peaks: dict[int, Table] = {}
        self.gradients = self._state_table(self._gradient_bytes, gradients=True)
        """Of the parameters."""
        self.states = self._state_table(self._kept_bytes, gradients=False)
        """Parameters, buffers and optimizer state."""
        self.lasting = self._range_table(self._lasting_of)
        """Gradients of parameters that other stages share."""
        self.update_bytes = self._range_table(self._together if updates_at_once else self._in_turn)
        """What the optimizer's step holds for a while."""
        self.input_bytes = self._range_table(self._inputs_of)
        """Model inputs per sample."""
        self.received_bytes = self._range_table(self._received_of)
        """Activations received per sample."""
        self.answered_bytes = self._range_table(self._answered_of)
        """Gradients sent back per sample."""
        self.returned_bytes = self._range_table(self._returned_of)
        """Gradients received per sample, each tensor counted as if one stage read it."""

    def activations(self, rows: int) -> Table:
        """Return the bytes that one micro-batch in flight keeps."""
        self._measure(rows)
        return self._activations[rows]

    def peaks(self, rows: int) -> Table:
        """Return the most bytes that one micro-batch's forward and backward hold."""
        self._measure(rows)
        return self._peaks[rows]

    def first_peaks(self, rows: int) -> Table:
        """Return the same with the gradients that the micro-batch's backward makes, if it is a step's first."""
        self._measure(rows)
        return self._first_peaks[rows]

    def least(self, first: int, stop: int, held: Held) -> int:
        """Return the peak with every tensor that is sent read by one stage only, as it is in most models."""
        rows, in_flight, count = held.rows, held.warmup, held.micro_batches
        activations, gradients = self.activations(rows)[first][stop], self.gradients[first][stop]
        messages = rows * self._message_bytes(first, stop, held)
        full = in_flight - 1
        begun = sent = 0
        if in_flight == count and not held.replicated:
            begun = full * activations + self.first_peaks(rows)[first][stop] + self.lasting[first][stop]
            # With gradients there, a micro-batch's backward is done, and the gradient that it sent is on its way.
            full, sent = full - 1, rows * self.answered_bytes[first][stop]
        steady = gradients + full * activations + self.peaks(rows)[first][stop] + sent if full >= 0 else 0
        update = gradients + self.update_bytes[first][stop]
        inputs = count * rows * self.input_bytes[first][stop]
        return self.states[first][stop] + inputs + max(begun + messages, steady + messages, update)

    def peak(self, first: int, stop: int, held: Held, cuts: Sequence[int] = ()) -> int:
        """Return the peak of a stage whose later stages end before the layers ``cuts``."""
        extra = 0
        for tensor in self._flows.crossing:
            if first <= tensor.producer < stop and tensor.gradient:
                readers, start = 0, stop
                for end in cuts:
                    readers += any(start <= consumer < end for consumer in tensor.consumers)
                    start = end
                extra += max(0, readers - 1) * tensor.bytes_per_sample
        return self.least(first, stop, held) + 2 * held.rows * extra

    def _message_bytes(self, first: int, stop: int, held: Held) -> int:
        """Bytes per sample, beside what is in flight."""
        returned, most = self.returned_bytes[first][stop], held.micro_batches
        answered = min(held.lead, most) * self.answered_bytes[first][stop]
        if held.warmup == most:
            return min(3, most) * returned + answered
        received = self.received_bytes[first][stop]
        return max(received + min(2, most) * returned, min(3, most) * returned) + answered

    def _state_table(self, of: Callable[[Layer], int], *, gradients: bool) -> Table:
        table = [[0] * (self._count + 1) for _ in range(self._count)]
        for first in range(self._count):
            total = 0
            for last in range(first, self._count):
                total += of(self._costs.layers[last])
                for tied in self._flows.tied:
                    if last in tied.layers and any(first <= other < last for other in tied.layers):
                        total -= self._counted_twice(self._costs.layers[last], tied, gradients)
                table[first][last + 1] = total
        return table

    def _counted_twice(self, layer: Layer, tied: TiedLayers, gradients: bool) -> int:
        share = min(1.0, tied.bytes / layer.trainable_bytes) if tied.trainable and layer.trainable_bytes else 0.0
        if gradients:
            return int(share * layer.gradient_bytes)
        return tied.bytes + int(share * layer.optimizer_bytes)

    def _gradient_bytes(self, layer: Layer) -> int:
        return layer.gradient_bytes

    def _kept_bytes(self, layer: Layer) -> int:
        return layer.parameters_bytes + layer.optimizer_bytes + layer.buffers_bytes

    def _lasting_of(self, first: int, stop: int) -> int:
        return sum(
            tied.bytes
            for tied in self._flows.tied
            if tied.trainable and 0 < sum(first <= layer < stop for layer in tied.layers) < len(tied.layers)
        )

    def _together(self, first: int, stop: int) -> int:
        return sum(layer.update_bytes for layer in self._costs.layers[first:stop])

    def _in_turn(self, first: int, stop: int) -> int:
        return max(layer.update_bytes for layer in self._costs.layers[first:stop])

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

    def _answered_of(self, first: int, stop: int) -> int:
        return self._flows.between(0, first, first, stop).gradient_bytes_per_sample

    def _received_of(self, first: int, stop: int) -> int:
        return self._flows.between(0, first, first, stop).bytes_per_sample

    def _returned_of(self, first: int, stop: int) -> int:
        return self._flows.between(first, stop, stop, self._count).gradient_bytes_per_sample

    def _measure(self, rows: int) -> None:
        if rows in self._activations:
            return
        inputs = {tensor.name for tensor in self._flows.inputs}
        saved = [
            {name: size for name, size in self._costs.saved_at(layer, rows).items() if name not in inputs}
            for layer in range(self._count)
        ]
        transient = [self._transient(layer, rows, saved[layer]) for layer in range(self._count)]
        activations = [[0] * (self._count + 1) for _ in range(self._count)]
        peaks = [[0] * (self._count + 1) for _ in range(self._count)]
        first_peaks = [[0] * (self._count + 1) for _ in range(self._count)]
        for first in range(self._count):
            held: dict[str, int] = {}
            total = highest = 0
            highest_begun = -self.gradients[first][self._count]
            for last in range(first, self._count):
                for name, size in saved[last].items():
                    total += max(0, size - held.get(name, 0))
                    held[name] = max(size, held.get(name, 0))
                for tensor in self._flows.crossing:
                    if tensor.producer < first and last in tensor.consumers and tensor.name not in held:
                        held[tensor.name] = rows * tensor.bytes_per_sample
                        total += held[tensor.name]
                # Behind this layer, the first backward has left the gradients of the stage's later layers.
                made = self.gradients[first][last + 1]
                kept = sum(
                    rows * tensor.bytes_per_sample
                    for tensor in self._flows.crossing
                    if first <= tensor.producer <= last < tensor.consumers[-1] and tensor.name not in held
                )
                # What the stage's last layer makes is kept, and its gradients are messages: neither is its own.
                final = total + max(0, transient[last] - rows * self._sent_bytes(last, held))
                activations[first][last + 1] = total + kept
                peaks[first][last + 1] = max(highest, final) + kept
                first_peaks[first][last + 1] = max(highest_begun + made, final) + kept
                highest = max(highest, total + transient[last])
                highest_begun = max(highest_begun, total + transient[last] - made)
        self._activations[rows], self._peaks[rows], self._first_peaks[rows] = activations, peaks, first_peaks

    def _sent_bytes(self, layer: int, held: Container[str]) -> int:
        """Bytes per sample of a layer's outputs that it does not save, and of its outputs' gradients."""
        made = [tensor for tensor in self._flows.crossing if tensor.producer == layer]
        kept = sum(tensor.bytes_per_sample for tensor in made if tensor.name not in held)
        return kept + sum(tensor.bytes_per_sample for tensor in made if tensor.gradient)

    def _transient(self, layer: int, rows: int, saved: dict[str, int]) -> int:
        """Bytes a layer holds for a while beyond what it saves; a layer's peak does not count its inputs."""
        read = {tensor.name for tensor in self._flows.crossing if layer in tensor.consumers}
        own = sum(size for name, size in saved.items() if name not in read)
        return max(0, self._costs.bytes_at(layer, "peak_bytes", rows) - own)
