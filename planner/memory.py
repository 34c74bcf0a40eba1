"""Memory: the most bytes that a stage holds at once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.formats.plan import Shard
from autopar.formats.profile import Layer
from autopar.planner.flows import Flows, FlowTensor, TiedLayers
from autopar.planner.layers import LayerCosts

__all__ = ["Held", "MemoryModel", "Parts", "Table", "peak_of"]

Table = list[list[int]]
"""Bytes of the layers first:stop, as ``table[first][stop]``."""
Bytes = int | npt.NDArray[np.int64]


class Held(NamedTuple):
    """What a stage's peak depends on besides its layers."""

    rows: float
    """Of the replica's share."""
    warmup: int
    """Most micro-batches in flight."""
    micro_batches: int
    """How many of a step's the replica takes part in."""
    replicas: int = 1
    lead: int = 0
    """How many more micro-batches the stage before has in flight; 0 where there is none."""
    recompute: frozenset[int] = frozenset()
    """Layers of the stage that are run forward again."""
    shard: Shard = "none"


class Parts(NamedTuple):
    """What a stage's peak is made of: one stage's numbers, or arrays over stages."""

    parameters: Bytes
    """With buffers."""
    optimizer: Bytes
    gradients: Bytes
    largest: Bytes
    """Parameters of the largest layer."""
    lasting: Bytes
    """Gradients of parameters that other stages share."""
    update: Bytes
    """What the optimizer's step holds for a while."""
    inputs: Bytes
    """Model inputs per sample."""
    received: Bytes
    """Activations received per sample."""
    answered: Bytes
    """Gradients sent back per sample."""
    returned: Bytes
    """Gradients received per sample, each tensor counted as if one stage read it."""
    activations: Bytes
    """What one micro-batch in flight keeps."""
    peak: Bytes
    """The most that one micro-batch's forward and backward hold."""
    first_peak: Bytes
    """The same with the gradients that the micro-batch's backward makes, if it is a step's first."""


def peak_of(parts: Parts, held: Held) -> Bytes:
    """Return the most bytes that a stage holds, every tensor that it sends read by one stage only."""
    r = held.replicas
    kept, gradients, update = parts.parameters + parts.optimizer, parts.gradients, parts.update
    if held.shard != "none":
        kept = parts.parameters - (-parts.optimizer // r)
        update = -(-update // r)
    if held.shard == "gradients":
        # The shards from which every step gathers the parameters; and two layers' gradients on their way to theirs.
        kept, gradients = kept - (-parts.parameters // r), 2 * parts.largest - (-gradients // r)
    if held.shard == "parameters":
        kept = -(-(parts.parameters + parts.optimizer) // r)
        # Two layers' parameters are whole, one that computes and the next, and as many gradients.
        gradients = 4 * parts.largest - (-gradients // r)
    full = held.warmup - 1
    messages = _messages(parts, held)
    begun: Bytes = 0
    sent: Bytes = 0
    if held.warmup == held.micro_batches and r == 1:
        begun = full * parts.activations + parts.first_peak + parts.lasting
        # With gradients there, a micro-batch's backward is done, and the gradient that it sent is on its way.
        full, sent = full - 1, _rows(held.rows, parts.answered)
    steady = gradients + full * parts.activations + parts.peak + sent if full >= 0 else 0
    inputs = held.micro_batches * _rows(held.rows, parts.inputs)
    most = np.maximum(np.maximum(begun + messages, steady + messages), gradients + update)
    return kept + inputs + most


def _messages(parts: Parts, held: Held) -> Bytes:
    """Bytes of messages under way, beside what is in flight."""
    rows, most = held.rows, held.micro_batches
    returned = _rows(rows, parts.returned)
    answered = min(held.lead, most) * _rows(rows, parts.answered)
    if held.warmup == most:
        return min(3, most) * returned + answered
    least = _rows(rows, parts.received) + min(2, most) * returned
    longest: Bytes = np.maximum(least, min(3, most) * returned)
    return longest + answered


def _rows(rows: float, per_sample: Bytes) -> Bytes:
    """Bytes of some rows, rounded up where rows are fractions."""
    return rows * per_sample if isinstance(rows, int) else np.ceil(rows * np.asarray(per_sample)).astype(np.int64)


class MemoryModel:
    """Peak memory of a stage (docs/planning.md), with k of the step's M micro-batches in flight at a replica's rows.

    It is the largest of three moments, with everywhere the state (parameters, buffers, optimizer state; a parameter
    tied within the stage counted once), the mini-batch's M shares of model inputs, and messages under way:

        a backward with gradients there:   gradients + (k - 1) activations + peak of one micro-batch
        the first backward, if k = M:      the same, with gradients of the layers only that it has left
        the update:                        gradients + what the optimizer holds for a while

    Where k = M, the first of these has one micro-batch less in flight. Replicas, and parameters that other stages
    share, keep their gradients throughout. What replicas shard is divided by their number, but for the layers that are
    at work (docs/planning.md).

    Activations are the union, by storage, of what the layers save, what the stage receives and what it sends, model
    inputs excepted; a layer that is recomputed saves its inputs only. The peak of one micro-batch is the largest, over
    the stage's layers l, of the activations of the layers up to l and what l holds beyond what it saves, plus the
    outputs the stage keeps because it sends them.

    Messages: receives are posted two computations ahead, and a sent gradient stays until the program proves that it
    has arrived, which takes as many micro-batches as the stage before leads.
    """

    def __init__(self, costs: LayerCosts, flows: Flows, updates_at_once: bool) -> None:
        self._costs, self._flows = costs, flows
        self._count = len(costs.layers)
        self._saved: dict[float, list[dict[str, int]]] = {}
        self._totals: dict[float, tuple[int, int]] = {}
        self._sweeps: dict[tuple[int, float, frozenset[int]], tuple[list[int], list[int], list[int]]] = {}
        self._parameters = self._state_table(
            lambda layer: layer.parameters_bytes + layer.buffers_bytes, lambda _, tied: tied.bytes
        )
        self._optimizer = self._state_table(
            lambda layer: layer.optimizer_bytes, lambda layer, tied: _share(layer, tied, layer.optimizer_bytes)
        )
        self._gradients = self._state_table(
            lambda layer: layer.gradient_bytes, lambda layer, tied: _share(layer, tied, layer.gradient_bytes)
        )
        self._largest = self._running([layer.parameters_bytes for layer in costs.layers], max)
        updates = [layer.update_bytes for layer in costs.layers]
        self._update = self._running(updates, operator.add if updates_at_once else max)
        self._lasting = self._lasting_table()
        self._inputs = self._read_table(flows.inputs)
        self._received = self._read_table(flows.crossing)
        self._answered = self._read_table([tensor for tensor in flows.crossing if tensor.gradient])
        self._returned = self._returned_table()

    def parts(self, first: int, stop: int, rows: float, recompute: frozenset[int] = frozenset()) -> Parts:
        """Return what the peak of one stage is made of."""
        tables = self._tables()
        sweep = self._sweep(first, rows, recompute)
        return Parts(*(table[first][stop] for table in tables), *(each[stop] for each in sweep))

    def arrays(self, rows: float, recompute: frozenset[int] = frozenset()) -> Parts:
        """Return what the peaks of all stages are made of, as arrays ``[first, stop]``.

        ``recompute`` are layers of the model: a stage recomputes those of its own among them.
        """
        sweeps = [self._sweep(first, rows, recompute) for first in range(self._count)]
        own = (np.array([sweep[which] for sweep in sweeps], dtype=np.int64) for which in range(3))
        return Parts(*(np.array(table, dtype=np.int64) for table in self._tables()), *own)

    def most(self, rows: float, micro_batches: int) -> int:
        """Return what no stage exceeds, whatever it is and however it is run: everything there is, twice."""
        if rows not in self._totals:
            layers = range(self._count)
            saved = sum(sum(self._saved_by(layer, rows, recomputed=False).values()) for layer in layers)
            passing = sum(self._costs.bytes_at(layer, "peak_bytes", rows) for layer in layers)
            crossing = sum(tensor.bytes_per_sample * len(tensor.consumers) for tensor in self._flows.crossing)
            inputs = sum(tensor.bytes_per_sample for tensor in self._flows.inputs)
            state = sum(
                layer.parameters_bytes
                + layer.buffers_bytes
                + layer.optimizer_bytes
                + layer.gradient_bytes
                + layer.update_bytes
                + 4 * layer.parameters_bytes
                for layer in self._costs.layers
            )
            self._totals[rows] = state + passing, saved + int(_rows(rows, 6 * crossing + inputs))
        fixed, each = self._totals[rows]
        return 2 * (fixed + micro_batches * each)

    def freed_bytes(self, layer: int, rows: float) -> int:
        """Return the bytes by which recomputing a layer shrinks what one micro-batch in flight keeps."""
        read = {tensor.name for tensor in self._flows.received_by(layer)}
        saved = self._saved_by(layer, rows, recomputed=False)
        return sum(size for name, size in saved.items() if name not in read)

    def _tables(self) -> tuple[Table, ...]:
        state = (self._parameters, self._optimizer, self._gradients, self._largest, self._lasting, self._update)
        return (*state, self._inputs, self._received, self._answered, self._returned)

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
        parts = self.parts(first, stop, held.rows, held.recompute)
        return int(peak_of(parts, held)) + 2 * int(_rows(held.rows, extra))

    def _state_table(self, of: Callable[[Layer], int], shared: Callable[[Layer, TiedLayers], int]) -> Table:
        table = [[0] * (self._count + 1) for _ in range(self._count)]
        for first in range(self._count):
            total = 0
            for last in range(first, self._count):
                total += of(self._costs.layers[last])
                for tied in self._flows.tied:
                    if last in tied.layers and any(first <= other < last for other in tied.layers):
                        total -= shared(self._costs.layers[last], tied)
                table[first][last + 1] = total
        return table

    def _running(self, values: Sequence[int], join: Callable[[int, int], int]) -> Table:
        """``join`` of the values of layers first:stop."""
        return [[0] * (first + 1) + list(accumulate(values[first:], join)) for first in range(self._count)]

    def _lasting_table(self) -> Table:
        table = np.zeros((self._count, self._count + 1), dtype=np.int64)
        for tied in self._flows.tied:
            if tied.trainable:
                held = np.zeros(self._count + 1, dtype=np.int64)
                held[np.array(tied.layers) + 1] = 1
                counts = np.cumsum(held)
                within = np.subtract.outer(counts, counts).T[:-1]
                table += tied.bytes * ((within > 0) & (within < len(tied.layers)))
        return table.tolist()

    def _read_table(self, tensors: Iterable[FlowTensor]) -> Table:
        """Bytes per sample that layers first:stop read of what is made before them."""
        table = np.zeros((self._count, self._count + 1), dtype=np.int64)
        for tensor in tensors:
            start = tensor.producer + 1
            for consumer in tensor.consumers:
                # Of stages that begin behind the reader before, this is the first one to be met.
                table[start : consumer + 1, consumer + 1 :] += tensor.bytes_per_sample
                start = max(start, consumer + 1)
        return table.tolist()

    def _returned_table(self) -> Table:
        """Bytes per sample of gradients of what layers first:stop make and later ones read."""
        table = np.zeros((self._count, self._count + 1), dtype=np.int64)
        for tensor in self._flows.crossing:
            if tensor.gradient:
                table[: tensor.producer + 1, tensor.producer + 1 : tensor.consumers[-1] + 1] += tensor.bytes_per_sample
        return table.tolist()

    def _sweep(self, first: int, rows: float, recompute: frozenset[int]) -> tuple[list[int], list[int], list[int]]:
        """Activations, peaks and first peaks of the stages that begin with a layer, by their stop."""
        key = (first, rows, frozenset(layer for layer in recompute if layer >= first))
        if key not in self._sweeps:
            self._sweeps[key] = self._swept(*key)
        return self._sweeps[key]

    def _swept(self, first: int, rows: float, recompute: frozenset[int]) -> tuple[list[int], list[int], list[int]]:
        activations, peaks, first_peaks = ([0] * (self._count + 1) for _ in range(3))
        held: dict[str, int] = {}
        ahead: dict[str, tuple[int, int]] = {}
        total = highest = 0
        highest_begun = -self._gradients[first][self._count]
        for last in range(first, self._count):
            saved = self._saved_by(last, rows, last in recompute)
            transient = self._transient(last, rows, saved)
            for name, size in saved.items():
                total += max(0, size - held.get(name, 0))
                held[name] = max(size, held.get(name, 0))
            for tensor in self._flows.received_by(last):
                if tensor.producer < first and tensor.name not in held:
                    held[tensor.name] = int(_rows(rows, tensor.bytes_per_sample))
                    total += held[tensor.name]
            # Behind this layer, the first backward has left the gradients of the stage's later layers.
            made = self._gradients[first][last + 1]
            for tensor in self._flows.made_by(last):
                ahead[tensor.name] = tensor.consumers[-1], int(_rows(rows, tensor.bytes_per_sample))
            ahead = {name: until for name, until in ahead.items() if until[0] > last and name not in held}
            kept = sum(size for _, size in ahead.values())
            # What the stage's last layer makes is kept, and its gradients are messages: neither is its own.
            final = total + max(0, transient - int(_rows(rows, self._sent_bytes(last, held))))
            activations[last + 1] = total + kept
            peaks[last + 1] = max(highest, final) + kept
            first_peaks[last + 1] = max(highest_begun + made, final) + kept
            highest = max(highest, total + transient)
            highest_begun = max(highest_begun, total + transient - made)
        return activations, peaks, first_peaks

    def _saved_by(self, layer: int, rows: float, recomputed: bool) -> dict[str, int]:
        """Bytes of what a layer keeps for its backward, model inputs excepted, by storage."""
        if recomputed:
            return {tensor.name: int(_rows(rows, tensor.bytes_per_sample)) for tensor in self._flows.received_by(layer)}
        if rows not in self._saved:
            inputs = {tensor.name for tensor in self._flows.inputs}
            self._saved[rows] = [
                {name: size for name, size in self._costs.saved_at(index, rows).items() if name not in inputs}
                for index in range(self._count)
            ]
        return self._saved[rows][layer]

    def _sent_bytes(self, layer: int, held: Container[str]) -> int:
        """Bytes per sample of a layer's outputs that it does not save, and of its outputs' gradients."""
        made = self._flows.made_by(layer)
        kept = sum(tensor.bytes_per_sample for tensor in made if tensor.name not in held)
        return kept + sum(tensor.bytes_per_sample for tensor in made if tensor.gradient)

    def _transient(self, layer: int, rows: float, saved: dict[str, int]) -> int:
        """Bytes a layer holds for a while beyond what it saves; a layer's peak does not count its inputs."""
        read = {tensor.name for tensor in self._flows.received_by(layer)}
        own = sum(size for name, size in saved.items() if name not in read)
        return max(0, self._costs.bytes_at(layer, "peak_bytes", rows) - own)


def _share(layer: Layer, tied: TiedLayers, size: int) -> int:
    """Bytes of a layer's gradients or optimizer state that belong to a tied parameter."""
    share = min(1.0, tied.bytes / layer.trainable_bytes) if tied.trainable and layer.trainable_bytes else 0.0
    return int(share * size)
