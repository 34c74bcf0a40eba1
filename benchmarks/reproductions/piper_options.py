"""PiperOptions: all layers' options for one number of devices, as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from reproductions.piper_files import PiperProfile

__all__ = ["Numbers", "PiperOptions", "Task"]

Numbers = npt.NDArray[np.float64]


class Task(NamedTuple):
    """What is planned for."""

    devices: int
    memory_bytes: int
    bytes_per_s: float
    micro_batches: int


class _Edge(NamedTuple):
    """One reader of what a layer makes."""

    made: int
    read: int
    tensor: str
    bytes: int


class PiperOptions:
    """Arrays over ``[layer, option]``; seconds are infinite where a layer has fewer options.

    Seconds are the sum over all replicas of a stage: divided by their number, they are Piper's.
    """

    def __init__(self, profile: PiperProfile, group: int, task: Task) -> None:
        options = [[each for each in layer.ways if each.tensor_parallel == group] for layer in profile.layers]
        self.counts = [len(each) for each in options]
        shape = (len(options), max(self.counts))
        self.seconds = np.full(shape, np.inf)
        """Of one replica, but for what crosses the stage's ends."""
        self.rising_s = np.zeros(shape)
        """What every further replica adds."""
        self.per_flight, self.fixed = np.zeros(shape), np.zeros(shape)
        self.into_s = np.zeros((*shape, len(options) + 1))
        """What tensors from before the stage add, as ``[layer, option, first]``."""
        self.out_s = np.zeros((*shape, len(options) + 1))
        """What tensors read behind the stage add, as ``[layer, option, stop]``."""
        edges = _edges(profile)
        for layer, each in enumerate(options):
            for index, option in enumerate(each):
                at = (layer, index)
                self.seconds[at] = option.time_s
                self.rising_s[at] = 4 * option.parameters_bytes / (task.bytes_per_s * task.micro_batches)
                self.per_flight[at], self.fixed[at] = option.memory_per_flight_bytes, option.memory_fixed_bytes
                resharded = {moved.tensor: moved.bytes for moved in option.resharded}
                self._cross(at, edges, resharded, 2 / task.bytes_per_s)

    @property
    def alike(self) -> bool:
        """Whether the options of every layer differ in time and memory alone."""
        arrays = (self.rising_s, self.into_s, self.out_s)
        return all(
            bool((array[layer, :count] == array[layer, :1]).all())
            for layer, count in enumerate(self.counts)
            for array in arrays
        )

    def _cross(
        self, at: tuple[int, int], edges: Sequence[_Edge], resharded: Mapping[str, int], s_per_byte: float
    ) -> None:
        for edge in edges:
            seconds = s_per_byte * (edge.bytes + resharded.get(edge.tensor, 0))
            if edge.read == at[0]:
                self.into_s[(*at, slice(edge.made + 1, None))] += seconds
            if edge.made == at[0]:
                self.out_s[(*at, slice(None, edge.read + 1))] += seconds


def _edges(profile: PiperProfile) -> list[_Edge]:
    order = {layer.name: index for index, layer in enumerate(profile.layers)}
    return [
        _Edge(order[tensor.producer], order[reader], tensor.name, tensor.bytes_per_sample)
        for tensor in profile.tensors
        if tensor.producer is not None
        for reader in tensor.consumers
    ]
