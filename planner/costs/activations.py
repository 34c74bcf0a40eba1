"""Activations: what stages keep of a micro-batch for its backward, and the most that its way through them holds.

From what layers save, by storage. What all stages hold is a sum of numbers that each count for some first layers and
some stops (:class:`Areas`), so one sweep over the layers prices all stages; windows of layers that hold the same as
earlier ones, as those of repeated blocks do, are priced once (:class:`Repeats`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.formats.profile import Layer
from autopar.planner.costs.flows import Flows, FlowTensor
from autopar.planner.costs.layers import LayerCosts

Counts = npt.NDArray[np.int64]


class Area(NamedTuple):
    """A number that counts for stages ``first:stop`` with both in a range, ends included."""

    first_low: int
    first_high: int
    stop_low: int
    stop_high: int
    value: int


class Areas:
    """A sum of areas.

    >>> areas = Areas(3, [Area(0, 1, 2, 3, 5), Area(0, 0, 1, 3, 1)])
    >>> areas.at(0, 2), areas.at(1, 2), areas.at(0, 1)
    (6, 5, 1)
    >>> areas.window(3).tolist()
    [[1, 6, 6], [5, 5, 0], [0, 0, 0]]
    """

    def __init__(self, layers: int, areas: Iterable[Area]) -> None:
        """Take the areas, over the stages of so many layers."""
        self._layers = layers
        columns = np.array(list(areas), dtype=np.int64).reshape(-1, 5)
        self._columns = columns[(columns[:, 0] <= columns[:, 1]) & (columns[:, 2] <= columns[:, 3])]

    def at(self, first: int, stop: int) -> int:
        """Return the sum for one stage."""
        first_low, first_high, stop_low, stop_high, value = self._columns.T
        there = (first_low <= first) & (first <= first_high) & (stop_low <= stop) & (stop <= stop_high)
        return int(value[there].sum())

    def window(self, longest: int) -> Counts:
        """Return the sums of all stages of up to ``longest`` layers, ``[first, length - 1]``; 0 for those too long."""
        first_low, first_high, stop_low, stop_high, value = self._columns.T
        found = np.zeros((self._layers, longest), dtype=np.int64)
        for length in range(1, longest + 1):
            low = np.maximum(first_low, stop_low - length)
            high = np.minimum(np.minimum(first_high, stop_high - length), self._layers - length)
            there = low <= high
            steps = np.zeros(self._layers + 1, dtype=np.int64)
            np.add.at(steps, low[there], value[there])
            np.subtract.at(steps, high[there] + 1, value[there])
            found[:, length - 1] = np.cumsum(steps[:-1])
        return found


def window_sums(sums: Counts, longest: int) -> Counts:
    """Return the differences of running sums, ``[first, length - 1]``; 0 for stages that are too long.

    >>> window_sums(np.array([0, 1, 3, 6]), 2).tolist()
    [[1, 3], [2, 5], [3, 0]]
    """
    layers = len(sums) - 1
    stops = np.arange(layers)[:, None] + np.arange(1, longest + 1)
    found: Counts = sums[np.minimum(stops, layers)] - sums[:-1, None]
    found[stops > layers] = 0
    return found


class Windows(NamedTuple):
    """All windows of up to so many layers, by the earliest ones that are alike."""

    rows: Counts
    """Layers that an earliest window begins with, ascending."""
    row: Counts
    """Of every window, ``[first, length - 1]``, the index of its earliest one's; 0 for those that are too long."""

    def spread(self, values: Counts) -> Counts:
        """Return the values of all windows from those of the rows, ``[row, length - 1]``."""
        return np.asarray(np.take_along_axis(values, self.row, axis=0))


class Repeats:
    """The earliest of all windows that are alike: as long, and of layers with the same codes.

    >>> repeats = Repeats("xabababy")
    >>> [repeats.earliest(first, first + 3) for first in range(6)]
    [0, 1, 2, 1, 2, 5]
    >>> repeats.windows(2).rows.tolist()
    [0, 1, 2, 6, 7]
    """

    def __init__(self, codes: Iterable[Hashable]) -> None:
        """Take what tells layers apart; none tells where in the model a layer stands."""
        known: dict[Hashable, int] = {}
        first = [known.setdefault(code, at) for at, code in enumerate(codes)]
        self._earliest: dict[int, list[int]] = {1: first}
        """By length, of the windows that begin with every layer."""
        self._windows: dict[int, Windows] = {}
        self.any = len(known) < len(first)
        """Whether any two windows are alike."""

    @classmethod
    def of(cls, layers: Sequence[Layer], flows: Flows) -> Repeats:
        """Return those of a model: windows that hold and exchange the same bytes, each in the same place."""
        return cls(_codes(layers, flows))

    def among(self, layers: frozenset[int]) -> Repeats:
        """Return those of the same model, with some layers told from the others."""
        return Repeats((code, at in layers) for at, code in enumerate(self._earliest[1]))

    def earliest(self, first: int, stop: int) -> int:
        """Return the first layer of the earliest window that is alike."""
        return self._of_length(stop - first)[first] if self.any else first

    def windows(self, longest: int) -> Windows:
        """Return all windows of up to ``longest`` layers."""
        if longest not in self._windows:
            layers = len(self._earliest[1])
            found = np.zeros((layers, longest), dtype=np.int64)
            for length in range(1, longest + 1):
                found[: layers - length + 1, length - 1] = self._of_length(length)
            rows, row = np.unique(found, return_inverse=True)
            self._windows[longest] = Windows(rows, row.reshape(found.shape))
        return self._windows[longest]

    def _of_length(self, length: int) -> list[int]:
        """Two windows are alike where two shorter ones are that together cover each, as in sorting suffixes.

        Karp, Miller and Rosenberg, "Rapid identification of repeated patterns in strings, trees and arrays", 1972.
        """
        if length not in self._earliest:
            layers = len(self._earliest[1])
            part = 1 << (length - 1).bit_length() - 1
            known = np.array(self._of_length(part))
            pairs = known[: layers - length + 1] * layers + known[length - part :]
            _, first, number = np.unique(pairs, return_index=True, return_inverse=True)
            self._earliest[length] = first[number].tolist()
        return self._earliest[length]


def _codes(layers: Sequence[Layer], flows: Flows) -> Iterable[Hashable]:
    """What layers hold, make and read, by places relative to their own; a tied parameter's are like no others."""
    names = _Names(layers, flows)
    tied = {layer for each in flows.tied for layer in each.layers}
    inputs: list[list[tuple[int, int]]] = [[] for _ in layers]
    for number, tensor in enumerate(flows.inputs):
        for consumer in tensor.consumers:
            inputs[consumer].append((number, tensor.bytes_per_sample))
    for at, layer in enumerate(layers):
        made = tuple(
            (tensor.bytes_per_sample, tensor.gradient, *(consumer - at for consumer in tensor.consumers))
            for tensor in flows.made_by(at)
        )
        read = tuple(
            (*names.of(at, tensor.name), tensor.bytes_per_sample, tensor.gradient) for tensor in flows.received_by(at)
        )
        yield at if at in tied else -1, _layer_code(at, layer, names), made, read, tuple(inputs[at])


def _layer_code(at: int, layer: Layer, names: _Names) -> Hashable:
    state = (
        layer.parameters_bytes,
        layer.buffers_bytes,
        layer.optimizer_bytes,
        layer.gradient_bytes,
        layer.trainable_bytes,
        layer.update_bytes,
        layer.written_bytes,
        layer.writes and layer.writes.inputs,
    )
    costs = tuple(
        (
            cost.micro_batch,
            cost.peak_bytes,
            cost.output_bytes,
            tuple((*names.of(at, saved.storage), saved.bytes) for saved in cost.saved),
        )
        for cost in layer.costs
    )
    return state, costs


class _Names:
    """Storages and tensors by where they first occur, relative to a layer, instead of by name."""

    def __init__(self, layers: Sequence[Layer], flows: Flows) -> None:
        self._home: dict[str, tuple[int, str, int]] = {}
        """The layer that makes a tensor, or that first keeps a storage, and which of these it is there."""
        for number, tensor in enumerate(flows.inputs):
            self._home[tensor.name] = (0, "input", number)
        for at in range(len(layers)):
            for number, tensor in enumerate(flows.made_by(at)):
                self._home[tensor.name] = (at, "tensor", number)
        for at, layer in enumerate(layers):
            kept = dict.fromkeys(saved.storage for cost in layer.costs for saved in cost.saved)
            for number, name in enumerate(kept):
                self._home.setdefault(name, (at, "storage", number))

    def of(self, layer: int, name: str) -> tuple[int, str, int]:
        """Return a name as a layer sees it."""
        home, sort, number = self._home[name]
        return (0 if sort == "input" else home - layer), sort, number


FEW_ROWS = 4
"""Of the layers, one in how many begins a window like no earlier one, that each of these is gone through by itself."""


class ActivationBytes(NamedTuple):
    """Bytes of one stage, or of many."""

    activations: int | Counts
    """What one micro-batch in flight keeps."""
    peak: int | Counts
    """The most that one micro-batch's forward and backward hold."""
    first_peak: int | Counts
    """The same with the gradients that the micro-batch's backward makes, if it is a step's first."""


def rows_bytes(rows: float, per_sample: int | Counts) -> int | Counts:
    """Return the bytes of some rows, rounded up where rows are fractions."""
    return rows * per_sample if isinstance(rows, int) else np.ceil(rows * np.asarray(per_sample)).astype(np.int64)


class Activations:
    """Activations of all stages at any number of rows; layers that are recomputed save their inputs only."""

    def __init__(
        self, costs: LayerCosts, flows: Flows, gradient_bytes: Callable[[int, int], int], repeats: Repeats
    ) -> None:
        """Take what is known of the layers; ``gradient_bytes`` returns the bytes of the gradients of a stage."""
        self._costs, self._flows, self._gradient_bytes, self._repeats = costs, flows, gradient_bytes, repeats
        self._count = len(costs.layers)
        self._saved_bytes: dict[float, list[dict[str, int]]] = {}
        self._transients: dict[tuple[float, int, bool], int] = {}
        self._sweeps: dict[tuple[int, float, frozenset[int]], _Sweep] = {}

    def of(self, first: int, stop: int, rows: float, recompute: frozenset[int]) -> ActivationBytes:
        """Return what one stage holds."""
        key = (first, rows, frozenset(layer for layer in recompute if first <= layer < stop))
        if key not in self._sweeps:
            self._sweeps[key] = _Sweep(first)
        sweep = self._sweeps[key]
        # A sweep serves later stops, too, as long as their further layers are not recomputed.
        while len(sweep.by_length) < stop - first:
            self._advance(sweep, rows, recompute)
        return sweep.by_length[stop - first - 1]

    def window(self, rows: float, recompute: frozenset[int], longest: int, gradients: Counts) -> ActivationBytes:
        """Return what all stages of up to ``longest`` layers hold, as arrays ``[first, length - 1]``.

        ``gradients`` are their gradients' bytes.
        """
        repeats = self._repeats.among(recompute) if self._repeats.any else self._repeats
        if repeats.any and len(repeats.windows(longest).rows) * FEW_ROWS <= self._count:
            found = self._each(rows, recompute, longest, repeats.windows(longest).rows.tolist())
            return ActivationBytes(*(repeats.windows(longest).spread(np.asarray(each)) for each in found))
        if self._irregular(rows):
            return self._each(rows, recompute, longest, range(self._count))
        totals = Areas(self._count, self._storage_areas(rows, recompute)).window(longest)
        ahead = Areas(self._count, self._ahead(rows, recompute)).window(longest)
        layers = range(self._count)
        transients = np.array([self.transient(layer, rows, layer in recompute) for layer in layers])
        sent = (self._sent_bytes(layer, self.saved_bytes(layer, rows, layer in recompute)) for layer in layers)
        finals = np.maximum(0, transients - np.array([int(rows_bytes(rows, each)) for each in sent]))
        highest = np.zeros(self._count, dtype=np.int64)
        begun = np.full(self._count, -(2**60))
        peaks, first_peaks = np.zeros_like(totals), np.zeros_like(totals)
        for at in range(longest):
            last = np.minimum(np.arange(self._count) + at, self._count - 1)
            total, final = totals[:, at], totals[:, at] + finals[last]
            peaks[:, at] = np.maximum(highest, final) + ahead[:, at]
            first_peaks[:, at] = np.maximum(begun + gradients[:, at], final) + ahead[:, at]
            highest = np.maximum(highest, total + transients[last])
            begun = np.maximum(begun, total + transients[last] - gradients[:, at])
        return ActivationBytes(totals + ahead, peaks, first_peaks)

    def saved_bytes(self, layer: int, rows: float, is_recomputed: bool) -> dict[str, int]:
        """Return the bytes of what a layer keeps for its backward, model inputs excepted, by storage."""
        copied = self._copied_bytes(layer, rows, is_recomputed)
        kept = self._storages_without_copies(layer, rows, is_recomputed)
        return {**kept, f"{self._costs.layers[layer].name} before": copied} if copied else kept

    def _copied_bytes(self, layer: int, rows: float, is_recomputed: bool) -> int:
        """Return the bytes of copies, of what a layer's forward writes, that are kept as they were."""
        record = self._costs.layers[layer]
        if record.writes is None:
            return 0
        written = [tensor for tensor in self._flows.inputs if is_recomputed and tensor.name in record.writes.inputs]
        return record.written_bytes + sum(int(rows_bytes(rows, tensor.bytes_per_sample)) for tensor in written)

    def _storages_without_copies(self, layer: int, rows: float, is_recomputed: bool) -> dict[str, int]:
        if is_recomputed:
            received = self._flows.received_by(layer)
            return {tensor.name: int(rows_bytes(rows, tensor.bytes_per_sample)) for tensor in received}
        if rows not in self._saved_bytes:
            inputs = {tensor.name for tensor in self._flows.inputs}
            self._saved_bytes[rows] = [
                {name: size for name, size in self._costs.saved_at(index, rows).items() if name not in inputs}
                for index in range(self._count)
            ]
        return self._saved_bytes[rows][layer]

    def transient(self, layer: int, rows: float, is_recomputed: bool) -> int:
        """Return the bytes a layer holds for a while beyond what it saves; its peak does not count its inputs."""
        key = (rows, layer, is_recomputed)
        if key not in self._transients:
            read = {tensor.name for tensor in self._flows.received_by(layer)}
            own = sum(
                size
                for name, size in self._storages_without_copies(layer, rows, is_recomputed).items()
                if name not in read
            )
            self._transients[key] = max(0, self._costs.bytes_at(layer, "peak_bytes", rows) - own)
        return self._transients[key]

    def _sent_bytes(self, layer: int, storages: Container[str]) -> int:
        """Bytes per sample of a layer's outputs that it does not save, and of its outputs' gradients."""
        made = self._flows.made_by(layer)
        kept = sum(tensor.bytes_per_sample for tensor in made if tensor.name not in storages)
        return kept + sum(tensor.bytes_per_sample for tensor in made if tensor.gradient)

    def _advance(self, sweep: _Sweep, rows: float, recompute: frozenset[int]) -> None:
        """Add the next layer to a stage."""
        first, last, held = sweep.first, sweep.first + len(sweep.by_length), sweep.storages
        saved = self.saved_bytes(last, rows, last in recompute)
        transient = self.transient(last, rows, last in recompute)
        for name, size in saved.items():
            sweep.total += max(0, size - held.get(name, 0))
            held[name] = max(size, held.get(name, 0))
        for tensor in self._flows.received_by(last):
            if tensor.producer < first and tensor.name not in held:
                held[tensor.name] = int(rows_bytes(rows, tensor.bytes_per_sample))
                sweep.total += held[tensor.name]
        # Behind this layer, the first backward has left the gradients of the stage's later layers.
        made = self._gradient_bytes(first, last + 1)
        for tensor in self._flows.made_by(last):
            sweep.ahead[tensor.name] = tensor.consumers[-1], int(rows_bytes(rows, tensor.bytes_per_sample))
        sweep.ahead = {name: until for name, until in sweep.ahead.items() if until[0] > last and name not in held}
        kept, total = sum(size for _, size in sweep.ahead.values()), sweep.total
        # What the stage's last layer makes is kept, and its gradients are messages: neither is its own.
        final = total + max(0, transient - int(rows_bytes(rows, self._sent_bytes(last, held))))
        first_peak = max(sweep.highest_begun + made, final) + kept
        sweep.by_length.append(ActivationBytes(total + kept, max(sweep.highest, final) + kept, first_peak))
        sweep.highest = max(sweep.highest, total + transient)
        sweep.highest_begun = max(sweep.highest_begun, total + transient - made)

    def _irregular(self, rows: float) -> bool:
        """Whether a layer keeps a storage that bears the name of what a later one makes."""
        producers = {tensor.name: tensor.producer for tensor in self._flows.crossing}
        names = (
            (layer, name) for layer in range(self._count) for name in self.saved_bytes(layer, rows, is_recomputed=False)
        )
        return any(layer < producers.get(name, -1) for layer, name in names)

    def _each(self, rows: float, recompute: frozenset[int], longest: int, firsts: Sequence[int]) -> ActivationBytes:
        """The stages that begin with some layers, one after the other, ``[index of the layer, length - 1]``."""
        found = np.zeros((3, len(firsts), longest), dtype=np.int64)
        for row, first in enumerate(firsts):
            sweep = _Sweep(first)
            while len(sweep.by_length) < min(longest, self._count - first):
                self._advance(sweep, rows, recompute)
            found[:, row, : len(sweep.by_length)] = np.array(sweep.by_length).T
        return ActivationBytes(*found)

    def _storage_areas(self, rows: float, recompute: frozenset[int]) -> Iterator[Area]:
        """What joins the union of kept storages at a layer, by the first layers for which it does."""
        events: dict[str, list[tuple[int, int]]] = {}
        for layer in range(self._count):
            for name, size in self.saved_bytes(layer, rows, layer in recompute).items():
                events.setdefault(name, []).append((layer, size))
        tensors = {tensor.name: tensor for tensor in self._flows.crossing}
        for name in dict.fromkeys((*events, *tensors)):
            saves = events.get(name, [])
            yield from _union(saves, tensors.get(name), rows, self._count)

    def _ahead(self, rows: float, recompute: frozenset[int]) -> Iterator[Area]:
        """What is made in a stage, kept by none of its layers yet, and read behind it."""
        saves: dict[str, int] = {}
        for layer in range(self._count):
            for name in self.saved_bytes(layer, rows, layer in recompute):
                saves.setdefault(name, layer)
        for tensor in self._flows.crossing:
            until = min(tensor.consumers[-1], saves.get(tensor.name, self._count))
            size = int(rows_bytes(rows, tensor.bytes_per_sample))
            yield Area(0, tensor.producer, tensor.producer + 1, until, size)


class _Sweep:
    """A stage that grows layer by layer."""

    __slots__ = ("ahead", "by_length", "first", "highest", "highest_begun", "storages", "total")

    def __init__(self, first: int) -> None:
        self.first = first
        self.by_length: list[ActivationBytes] = []
        """By length."""
        self.storages: dict[str, int] = {}
        self.ahead: dict[str, tuple[int, int]] = {}
        self.total = self.highest = 0
        self.highest_begun = -(2**60)


def _union(saves: list[tuple[int, int]], tensor: FlowTensor | None, rows: float, count: int) -> Iterator[Area]:
    """Areas of one storage: the largest of what the stage's layers keep of it, or of what it receives."""
    reads = () if tensor is None else tensor.consumers
    made = -1 if tensor is None else tensor.producer
    received = 0 if tensor is None else int(rows_bytes(rows, tensor.bytes_per_sample))
    sizes = dict(saves)
    places = sorted({*sizes, *reads})
    starts = sorted({-1, *places, *([made] if tensor else [])})
    most = max((*sizes.values(), received if reads else 0), default=0)
    for before, start in zip(starts, (*starts[1:], count - 1), strict=True):
        # Stages that begin behind `before`, and at `start` at the latest.
        held = 0
        known = False
        for at in range(bisect_left(places, start), len(places)):
            if known and held >= most:
                break
            place = places[at]
            size = sizes.get(place)
            more = held if size is None else max(held, size)
            known = known or size is not None
            if not known and place in reads and before >= made:
                more, known = received, True
            if more > held:
                yield Area(before + 1, start, place + 1, count, more - held)
            held = more
