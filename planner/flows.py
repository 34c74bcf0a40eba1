"""Flows: which tensors, how many bytes, travel between ranges of layers; which parameters they share."""

from __future__ import annotations

from typing import NamedTuple

from autopar.formats.profile import Profile

__all__ = ["NO_FLOW", "Flow", "FlowTensor", "Flows", "TiedLayers"]


class Flow(NamedTuple):
    """What travels from one range of layers to another, per sample."""

    tensors: int
    bytes_per_sample: int
    gradients: int
    """How many of the tensors have a gradient that comes back."""
    gradient_bytes_per_sample: int


NO_FLOW = Flow(0, 0, 0, 0)


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
        self._made: list[list[FlowTensor]] = [[] for _ in profile.layers]
        self._received: list[list[FlowTensor]] = [[] for _ in profile.layers]
        for entry in self.crossing:
            self._made[entry.producer].append(entry)
            for consumer in entry.consumers:
                self._received[consumer].append(entry)
        self.tied = [
            TiedLayers(index, tuple(sorted({position[name] for name in tied.layers})), tied.bytes, tied.trainable)
            for index, tied in enumerate(profile.tied)
        ]
        self._between: dict[tuple[int, int, int, int], Flow] = {}

    def made_by(self, layer: int) -> list[FlowTensor]:
        """Return the tensors that a layer makes and another reads."""
        return self._made[layer]

    def received_by(self, layer: int) -> list[FlowTensor]:
        """Return the tensors that a layer reads and another makes."""
        return self._received[layer]

    def between(self, first: int, stop: int, next_first: int, next_stop: int) -> Flow:
        """Return what layers ``first:stop`` make and layers ``next_first:next_stop`` read."""
        key = (first, stop, next_first, next_stop)
        if key not in self._between:
            found = [
                tensor
                for tensor in self.crossing
                if first <= tensor.producer < stop
                and any(next_first <= consumer < next_stop for consumer in tensor.consumers)
            ]
            back = [tensor.bytes_per_sample for tensor in found if tensor.gradient]
            total = sum(tensor.bytes_per_sample for tensor in found)
            self._between[key] = Flow(len(found), total, len(back), sum(back)) if found else NO_FLOW
        return self._between[key]
