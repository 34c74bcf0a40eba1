"""Tables: the terms of all stages, and lower bounds of all suffixes, as arrays over (first, stop) and more.

A suffix table holds, for the layers from ``first`` on, placed on devices from ``offset`` on with a given number of
stages, the component-wise minimum of their terms over all that fit: as :func:`autopar.planner.bounds.fold` never falls
when one of them grows, folding a prefix onto the minima never exceeds the bound of any completion.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from autopar.planner.bounds import LinkTerms, StageTerms, Terms, fold, last
from autopar.planner.candidate import Family
from autopar.planner.costs import CostModel
from autopar.planner.links import Level
from autopar.planner.memory import Held
from autopar.schedules.route import even_shares, routes

__all__ = ["FlowTables", "SizeTables", "SuffixTables", "table_bytes"]

Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class FlowTables:
    """Bytes per sample from layers ``first:stop`` to layers ``stop:next_stop``, as ``[first, stop, next_stop]``."""

    def __init__(self, costs: CostModel) -> None:
        count = costs.layer_count
        shape = (count + 1, count + 1, count + 1)
        self.forth_bytes, self.back_bytes = np.zeros(shape), np.zeros(shape)
        tensors, gradients = np.zeros(shape), np.zeros(shape)
        for tensor in costs.flows.crossing:
            for stop in range(tensor.producer + 1, tensor.consumers[-1] + 1):
                reader = next(consumer for consumer in tensor.consumers if consumer >= stop)
                at = (tensor.producer, stop, slice(reader + 1, None))
                self.forth_bytes[at] += tensor.bytes_per_sample
                tensors[at] += 1
                if tensor.gradient:
                    self.back_bytes[at] += tensor.bytes_per_sample
                    gradients[at] += 1
        for table in (self.forth_bytes, self.back_bytes, tensors, gradients):
            table[:] = np.cumsum(table[::-1], axis=0)[::-1]
        self.forth: Flags = tensors > 0
        self.back: Flags = gradients > 0


class SizeTables:
    """Terms of all stages and boundaries for one micro-batch size; shared by its families."""

    def __init__(self, costs: CostModel, flows: FlowTables, micro_batches: int, micro_batch_size: int) -> None:
        self.costs, self._flows = costs, flows
        self.micro_batches, self._size = micro_batches, micro_batch_size
        self.layers, self.devices = costs.layer_count, len(costs.devices)
        self.widths = min(self.devices, micro_batch_size)
        self._one_node = costs.links.level(range(self.devices)) == "node"
        self._times = {width: self._time_arrays(width) for width in range(1, self.widths + 1)}
        self._closing: dict[tuple[int, Level], Numbers] = {}
        self._peaks: dict[tuple[int, int], Numbers] = {}
        self._messages: dict[tuple[int, Level, bool], Numbers] = {}
        self._links: dict[tuple[int, int], tuple[Numbers, ...]] = {}

    def stage(self, width: int, offset: int, warmup: int) -> StageTerms:
        """Return the terms of all stages of one width, as arrays ``[first, stop]``."""
        forward, backward, busiest = self._times[width]
        level = self.costs.links.level(range(offset, offset + width))
        key = (width, level)
        if key not in self._closing:
            self._closing[key] = self._closing_array(width, level)
        return StageTerms(forward, backward, busiest, self._closing[key], warmup)

    def shortfall(self, width: int, offset: int, warmup: int) -> Numbers:
        """Return by how many bytes stages exceed their smallest device, as ``[first, stop]``."""
        key = (width, warmup)
        if key not in self._peaks:
            self._peaks[key] = self._peak_array(width, warmup)
        return self._peaks[key] - min(self.costs.limits_bytes[offset : offset + width])

    def link(self, width: int, offset: int, next_width: int) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Return the quickest message forth and back and the slowest forth and back, ``[first, stop, next_stop]``."""
        rows: dict[Level, set[int]] = {}
        for route in routes(even_shares(self._size, width), even_shares(self._size, next_width)):
            ends = (offset + route.sender, offset + width + route.receiver)
            rows.setdefault(self.costs.links.level(ends), set()).add(route.stop - route.start)
        found = []
        for pick, reduce in ((min, np.minimum), (max, np.maximum)):
            for back in (False, True):
                messages = [self._message(pick(sizes), level, back) for level, sizes in rows.items()]
                found.append(messages[0] if len(messages) == 1 else reduce.reduce(messages))
        return found[0], found[1], found[2], found[3]

    def boundary(self, width: int, offset: int) -> LinkTerms:
        """Return the least transfers behind all stages of one width, as ``[first, stop, next width - 1]``.

        Least, because the next stage is taken to end after one layer: a longer one reads no less.
        """
        key = (width, 0 if self._one_node else offset)
        places = np.arange(self.layers)
        if key not in self._links:
            stacks: list[list[Numbers]] = [[], [], [], []]
            for next_width in range(1, min(self.widths, self.devices - key[1] - width) + 1):
                for stack, messages in zip(stacks, self.link(width, key[1], next_width), strict=True):
                    stack.append(messages[: self.layers, places, places + 1])
            self._links[key] = tuple(np.stack(stack, axis=2) for stack in stacks)
        count = self.devices - offset - width
        forth_s, back_s, forth_most_s, back_most_s = (array[:, :, :count] for array in self._links[key])
        forth = self._flows.forth[: self.layers, places, places + 1, None]
        back = self._flows.back[: self.layers, places, places + 1, None]
        return LinkTerms(forth, back, forth_s, back_s, forth_most_s, back_most_s)

    def links_after(self, first: int, stop: int, width: int, offset: int) -> LinkTerms:
        """Return the transfers behind one stage, as ``[next width - 1, next_stop]``."""
        most = min(self.widths, self.devices - offset - width)
        by_width = [self.link(width, offset, next_width) for next_width in range(1, most + 1)]
        stacks = [np.stack([messages[which][first, stop] for messages in by_width]) for which in range(4)]
        forth, back = self._flows.forth[first, stop], self._flows.back[first, stop]
        return LinkTerms(forth, back, *stacks)

    def link_to(self, at: tuple[int, int, int], width: int, offset: int, next_width: int) -> LinkTerms:
        """Return the transfers between two stages that ``at`` (first, stop, next_stop) bounds."""
        messages = (float(array[at]) for array in self.link(width, offset, next_width))
        return LinkTerms(bool(self._flows.forth[at]), bool(self._flows.back[at]), *messages)

    def _message(self, rows: int, level: Level, back: bool) -> Numbers:
        key = (rows, level, back)
        if key not in self._messages:
            sizes, there = self._flows.forth_bytes, self._flows.forth
            if back:
                sizes, there = self._flows.back_bytes, self._flows.back
            self._messages[key] = np.where(there, self.costs.links.messages_s(rows * sizes, level), 0.0)
        return self._messages[key]

    def _time_arrays(self, width: int) -> tuple[Numbers, Numbers, Numbers]:
        forward, backward, both = [], [], []
        adding = self.costs.adding(self.micro_batches, width)
        for rows in sorted(set(even_shares(self._size, width))):
            sums = (self.costs.layers.forward_sums(rows), self.costs.layers.backward_sums(rows, adding))
            there, back = (np.subtract.outer(np.array(each), np.array(each)).T[:-1] for each in sums)
            forward.append(there)
            backward.append(back)
            both.append(there + back)
        return np.minimum.reduce(forward), np.minimum.reduce(backward), np.maximum.reduce(both)

    def _closing_array(self, width: int, level: Level) -> Numbers:
        found = np.zeros((self.layers, self.layers + 1))
        shares = set(even_shares(self._size, width))
        for first in range(self.layers):
            for stop in range(first + 1, self.layers + 1):
                exposed = min(self.costs.exposed_s(first, stop, rows, width, level) for rows in shares)
                found[first, stop] = exposed + self.costs.update_s(first, stop)
        return found

    def _peak_array(self, width: int, warmup: int) -> Numbers:
        memory = self.costs.memory
        found = np.full((self.layers, self.layers + 1), np.inf)
        shares = set(even_shares(self._size, width))
        # How much the stage before leads is not known here; without a lead, a stage holds least.
        helds = [Held(rows, warmup, self.micro_batches, width > 1) for rows in shares]
        for first in range(self.layers):
            for stop in range(first + 1, self.layers + 1):
                found[first, stop] = max(memory.least(first, stop, held) for held in helds)
        return found


def table_bytes(layers: int, devices: int, most_stages: int, micro_batch_size: int) -> int:
    """Return the bytes of one family's suffix tables."""
    widths = min(devices, micro_batch_size)
    return 8 * 4 * (devices + 1) * widths * (layers + 1) ** 2 * most_stages


class SuffixTables:
    """Least terms of all suffixes, for one family."""

    def __init__(self, sizes: SizeTables, family: Family, most_stages: int, use_all: bool) -> None:
        self.sizes, self.family = sizes, family
        self._use_all = use_all
        count, devices, widths = sizes.layers, sizes.devices, sizes.widths
        shape = (4, devices + 1, widths, count + 1, count + 1)
        self.chosen = [np.full(shape, np.inf) for _ in range(most_stages)]
        """By stages behind: least terms ``[term, offset, width - 1, first, stop]`` once the first stage is chosen."""
        self.least: list[Numbers] = []
        for behind in range(most_stages):
            for width in range(1, widths + 1):
                for offset in range(devices - width + 1):
                    self._fill(behind, width, offset)
            self.least.append(self.chosen[behind].min(axis=4))

    def _fill(self, behind: int, width: int, offset: int) -> None:
        sizes, warmup = self.sizes, self.family.depths[behind]
        stage = sizes.stage(width, offset, warmup)
        fits = sizes.shortfall(width, offset, warmup) <= 0
        count, after = sizes.layers, offset + width
        target = self.chosen[behind][:, offset, width - 1]
        if behind == 0:
            if not self._use_all or after == sizes.devices:
                for part, value in zip(target, last(stage, self.family.micro_batches), strict=True):
                    part[:count, count] = np.where(fits[:, count], np.asarray(value)[:, count], np.inf)
            return
        if after >= sizes.devices:
            return
        link = sizes.boundary(width, offset)
        suffix = self.least[behind - 1][:, after, : np.shape(link.forth_s)[2], :count].transpose(0, 2, 1)[:, None]
        terms = fold(stage.at((slice(None), slice(count), None)), link, Terms(*suffix), self.family.micro_batches)
        for part, value in zip(target, terms, strict=True):
            part[:count, :count] = np.where(fits[:, :count], np.asarray(value).min(axis=2), np.inf)
