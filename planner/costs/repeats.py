"""Repeats: windows of layers that hold the same bytes as earlier ones, as those of repeated blocks do."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from autopar.formats.profile import Layer
from autopar.planner.costs.areas import Counts
from autopar.planner.costs.flows import Flows


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
        yield at if at in tied else -1, _held(at, layer, names), made, read, tuple(inputs[at])


def _held(at: int, layer: Layer, names: _Names) -> Hashable:
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
