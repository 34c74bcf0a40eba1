"""PiperStages: seconds and memory of every stage by Piper's rules.

A stage on d replicas of t devices, with y micro-batches in flight, takes per micro-batch of a batch of N

    sum over its layers of  time / d  +  2 (edges across its ends + what is resharded of them) / (d B)
                                      +  4 (d - 1) w / (d N B)

with B the bandwidth and w a layer's parameters on each device, and of every device the sum of a y + b bytes over its
layers; each layer takes any of its options for t devices. (Tarnawski et al., "Piper: Multidimensional Planner for DNN
Parallelization", NeurIPS 2021, section 3; the factors 2, for forward and backward, and 4, which is PipeDream's, are
those of its published planner.)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from reproductions.piper_choice import Choice, Way, quickest
from reproductions.piper_files import PiperProfile
from reproductions.piper_options import Numbers, PiperOptions, Task

__all__ = ["PiperStages", "Stage"]

Counts = npt.NDArray[np.int64]
_MOST_S = 1e12


class Stage(NamedTuple):
    """Layers ``first`` to before ``stop``, on ``replicas`` groups of ``group`` devices."""

    first: int
    stop: int
    group: int
    replicas: int


class _Chosen(NamedTuple):
    choice: Choice
    beyond_s: float
    """More than with the quickest options, as a sum over the replicas."""


class PiperStages:
    """Prices of stages: with their layers' quickest options as arrays, with those that fit one by one.

    Arrays are over ``[stop - 1, group, first, replicas]``, the last three by their places in ``groups``, the layers and
    ``replicas``; seconds are infinite where no such stage is.
    """

    def __init__(self, profile: PiperProfile, task: Task) -> None:
        self.task, self.layers = task, len(profile.layers)
        self.replicas = [count for count in range(1, task.devices + 1) if task.micro_batches % count == 0]
        found = {option.tensor_parallel for layer in profile.layers for option in layer.ways}
        self.groups = sorted(group for group in found if group <= task.devices)
        self._options = {group: PiperOptions(profile, group, task) for group in self.groups}
        self._alike = {group: options.alike for group, options in self._options.items()}
        self._choices: dict[tuple[int, ...], _Chosen | None] = {}
        most = np.arange(min(task.devices, task.micro_batches) + 2)
        self.rates = np.array([_rates(options, most) for options in self._options.values()])
        """The least seconds, summed over replicas, for each byte that options save; as ``[group, in flight]``."""
        shape = (self.layers, len(self.groups), self.layers, len(self.replicas))
        self.fastest_s, self.per_flight, self.fixed = np.full(shape, np.inf), np.zeros(shape), np.zeros(shape)
        """With every layer's quickest option: seconds, and bytes per micro-batch in flight and besides."""
        self.least_per_flight = np.zeros((*shape[:3], 1))
        """No choice takes fewer bytes per micro-batch in flight."""
        self.room = np.zeros((*shape[:3], 1))
        """Nor leaves more of the memory to those."""
        least_s = [min(each.time_s * each.tensor_parallel for each in layer.ways) for layer in profile.layers]
        self.work_s = np.concatenate([[0.0], np.cumsum(least_s)])
        """Device-seconds that the layers before each one need at least, and all of them."""
        for stop in range(1, self.layers + 1):
            for index, group in enumerate(self.groups):
                self._fill(stop, index, self._options[group], [1] if self._alike[group] else self.replicas)

    def beyond_s(self, stage: Stage, in_flight: int) -> float:
        """Return the least seconds per micro-batch that a stage takes beyond ``fastest_s`` to fit; infinite if none."""
        chosen = self._choice(stage, in_flight)
        return math.inf if chosen is None else chosen.beyond_s / stage.replicas

    def choice(self, stage: Stage, in_flight: int) -> tuple[Choice, float]:
        """Return the quickest options of a stage that fits, and its seconds per micro-batch, added up exactly."""
        chosen = self._choice(stage, in_flight)
        if chosen is None:
            raise ValueError(f"{stage} does not fit with {in_flight} in flight")
        taken = zip(self._ways(stage, in_flight), chosen.choice.options, strict=True)
        return chosen.choice, math.fsum(each[option].seconds for each, option in taken) / stage.replicas

    def _choice(self, stage: Stage, in_flight: int) -> _Chosen | None:
        # Where options differ in time and memory alone, the best are the same for any number of replicas.
        key = (stage.first, stage.stop, stage.group, 1 if self._alike[stage.group] else stage.replicas, in_flight)
        if key not in self._choices:
            priced = Stage(*key[:-1])
            choice = quickest(self._ways(priced, in_flight), self.task.memory_bytes)
            at = (priced.stop - 1, self.groups.index(priced.group), priced.first, self.replicas.index(priced.replicas))
            fastest_s = float(self.fastest_s[at]) * priced.replicas
            self._choices[key] = None if choice is None else _Chosen(choice, max(0.0, choice.seconds - fastest_s))
        return self._choices[key]

    def _ways(self, stage: Stage, in_flight: int) -> list[list[Way]]:
        """Return every layer's options: seconds, as a sum over the replicas, and bytes."""
        options = self._options[stage.group]
        seconds = options.into_s[:, :, stage.first] + options.out_s[:, :, stage.stop]
        seconds += options.seconds + (stage.replicas - 1) * options.rising_s
        memory = options.per_flight * in_flight + options.fixed
        return [
            [Way(float(seconds[layer, way]), int(memory[layer, way])) for way in range(options.counts[layer])]
            for layer in range(stage.first, stage.stop)
        ]

    def _fill(self, stop: int, index: int, options: PiperOptions, replicas: list[int]) -> None:
        """Price all stages that end before ``stop``, with the options that are quickest at each number of replicas."""
        layers = slice(0, stop)
        single = (
            options.seconds[layers]
            + options.out_s[layers, :, stop]
            + options.into_s[layers, :, :stop].transpose(2, 0, 1)
        )
        further = np.array(replicas, dtype=np.float64) - 1
        # Over [first, layer, option, replicas].
        best = (single[..., np.newaxis] + options.rising_s[layers, :, np.newaxis] * further).argmin(axis=2)
        inside = np.tri(stop, dtype=np.bool_).T[:, :, np.newaxis]
        rows, firsts = np.arange(stop)[:, np.newaxis], np.arange(stop)[:, np.newaxis, np.newaxis]
        at = (stop - 1, index, slice(0, stop))

        def total(array: Numbers) -> Numbers:
            return np.asarray(np.where(inside, array, 0.0).sum(axis=1))

        rising = total(options.rising_s[rows, best])
        count = np.array(self.replicas, dtype=np.float64)
        self.fastest_s[at] = (total(single[firsts, rows, best]) + rising * (count - 1)) / count
        self.per_flight[at], self.fixed[at] = total(options.per_flight[rows, best]), total(options.fixed[rows, best])
        there = np.isfinite(options.seconds[layers])
        self.least_per_flight[at] = _suffix_sums(np.where(there, options.per_flight[layers], np.inf).min(axis=1))
        fixed = _suffix_sums(np.where(there, options.fixed[layers], np.inf).min(axis=1))
        self.room[at] = self.task.memory_bytes - fixed


def _suffix_sums(array: Numbers) -> Numbers:
    return np.cumsum(array[::-1])[::-1][:, np.newaxis]


def _rates(options: PiperOptions, in_flight: Counts) -> Numbers:
    """Return, for numbers of micro-batches in flight, the least seconds for which any layer's options save a byte."""
    if not options.alike:
        return np.zeros(len(in_flight))
    at = options.seconds.argmin(axis=1)[:, np.newaxis]
    there = np.isfinite(options.seconds)

    def less(array: Numbers) -> Numbers:
        """By how much an option's number is below that of the quickest one."""
        return np.asarray(np.take_along_axis(array, at, axis=1) - array)[:, :, np.newaxis]

    saved_bytes = less(options.per_flight) * in_flight + less(options.fixed)
    useful = there[:, :, np.newaxis] & (saved_bytes > 0)
    slower_s = np.where(useful, -less(np.where(there, options.seconds, 0.0)), np.inf)
    # Where nothing can be saved, a stage that is too large is not quick enough at any rate.
    return np.asarray((slower_s / np.where(useful, saved_bytes, 1.0)).min(axis=(0, 1), initial=_MOST_S))
