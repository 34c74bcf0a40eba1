"""Flows: which tensors, how many bytes, travel between ranges of layers; which parameters they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from autopar.formats.profile import Profile
from autopar.planner.costs import memoize
from autopar.planner.costs.links import Numbers


class Flow(NamedTuple):
    """What travels from one range of layers to another, per sample."""

    tensors: int
    bytes_per_sample: int
    gradients: int
    """How many of the tensors have a gradient that comes back."""
    gradient_bytes_per_sample: int


class FlowTensor(NamedTuple):
    """A tensor by the positions of its layers; the producer of a model input is -1."""

    name: str
    producer: int
    consumers: tuple[int, ...]
    bytes_per_sample: int
    gradient: bool


class TiedLayers(NamedTuple):
    """A parameter that several layers use."""

    number: int
    """Index into ``Profile.tied``."""
    layers: tuple[int, ...]
    bytes: int
    trainable: bool


class Flows:
    """Tensors and tied parameters of a profile, by the positions of their layers."""

    def __init__(self, profile: Profile) -> None:
        position = {layer.name: index for index, layer in enumerate(profile.layers)}
        self.crossing: list[FlowTensor] = []
        self.inputs: list[FlowTensor] = []
        for tensor in profile.tensors:
            consumers = tuple(sorted({position[name] for name in tensor.consumers}))
            made = -1 if tensor.producer is None else position[tensor.producer]
            entry = FlowTensor(tensor.name, made, consumers, tensor.bytes_per_sample, tensor.gradient)
            (self.inputs if tensor.producer is None else self.crossing).append(entry)
        self.made_by: list[list[FlowTensor]] = [[] for _ in profile.layers]
        """By layer, the tensors that it makes and another reads."""
        self.received_by: list[list[FlowTensor]] = [[] for _ in profile.layers]
        """By layer, the tensors that it reads and another makes."""
        for entry in self.crossing:
            self.made_by[entry.producer].append(entry)
            for consumer in entry.consumers:
                self.received_by[consumer].append(entry)
        every = [tensor for made in self.made_by for tensor in made]
        self._forked_tensors = [tensor for tensor in every if len(tensor.consumers) > 1]
        self._forked_before = _counts_before(self._forked_tensors, len(profile.layers))
        self._constants = [tensor for tensor in every if not tensor.gradient]
        self._constants_before = _counts_before(self._constants, len(profile.layers))
        self.tied = [
            TiedLayers(index, tuple(sorted({position[name] for name in tied.layers})), tied.bytes, tied.trainable)
            for index, tied in enumerate(profile.tied)
        ]
        pairs = [(number, each.producer, to) for number, each in enumerate(self.crossing) for to in each.consumers]
        self._numbers, self._producers, self._consumers = np.array(pairs, dtype=np.int64).reshape(-1, 3).T
        """Of every tensor and layer that reads it."""

    def constants(self, first: int, stop: int) -> list[FlowTensor]:
        """Return the tensors that a stage makes, other layers read, and no gradient comes back of."""
        return self._constants[self._constants_before[first] : self._constants_before[stop]]

    def forked_tensors(self, first: int, stop: int) -> list[FlowTensor]:
        """Return the tensors that a stage makes and several layers read."""
        return self._forked_tensors[self._forked_before[first] : self._forked_before[stop]]

    @memoize
    def between(self, first: int, stop: int, next_first: int, next_stop: int) -> Flow:
        """Return what layers ``first:stop`` make and layers ``next_first:next_stop`` read."""
        made = chain.from_iterable(self.made_by[first:stop])
        return _flow([each for each in made if any(next_first <= reader < next_stop for reader in each.consumers)])

    @cached_property
    def crossing_bytes(self) -> tuple[Numbers, Numbers]:
        """Bytes per sample that cross every position, forth and as gradients; not a number where nothing does."""
        forth, back = (self._crossing_bytes(gradient=gradient) for gradient in (False, True))
        return forth, back

    def _crossing_bytes(self, *, gradient: bool) -> Numbers:
        change, count = np.zeros((2, len(self.made_by) + 2))
        for tensor in self.crossing:
            if tensor.gradient or not gradient:
                for sums, amount in ((change, tensor.bytes_per_sample), (count, 1)):
                    sums[tensor.producer + 1] += amount
                    sums[tensor.consumers[-1] + 1] -= amount
        return np.where(np.cumsum(count)[:-1] > 0, np.cumsum(change)[:-1], np.nan)

    def exchanges(self, stops: Sequence[int]) -> list[tuple[int, int, Flow]]:
        """Return (producer, consumer, what travels) for stages that end before the layers ``stops``."""
        stage_of = np.repeat(np.arange(len(stops)), np.diff(stops, prepend=0))
        made, read = stage_of[self._producers], stage_of[self._consumers]
        crosses = np.flatnonzero(made != read)
        # A stage is sent a tensor once, however many of its layers read it.
        keys = np.unique((made[crosses] * len(stops) + read[crosses]) * len(self.crossing) + self._numbers[crosses])
        groups: dict[int, list[int]] = {}
        for key in keys.tolist():
            groups.setdefault(key // len(self.crossing), []).append(key % len(self.crossing))
        return [
            (*divmod(pair, len(stops)), _flow([self.crossing[number] for number in numbers]))
            for pair, numbers in groups.items()
        ]


def _counts_before(tensors: Sequence[FlowTensor], layers: int) -> list[int]:
    """Return how many of the tensors are made before every layer, and by all of them."""
    made = Counter(tensor.producer for tensor in tensors)
    return [*accumulate((made[layer] for layer in range(layers)), initial=0)]


def _flow(tensors: Sequence[FlowTensor]) -> Flow:
    back = [tensor.bytes_per_sample for tensor in tensors if tensor.gradient]
    return Flow(len(tensors), sum(tensor.bytes_per_sample for tensor in tensors), len(back), sum(back))
