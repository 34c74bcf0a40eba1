"""Stash: seconds and bytes of the stages of an asynchronous pipeline, priced by the cost model.

Mini-batches follow each other without a pause, and every stage is updated after each (Narayanan et al., "PipeDream:
Generalized Pipeline Parallelism for DNN Training", SOSP 2019). Once filled, the pipeline takes per mini-batch what the
busiest of these does:

    a device       forward, backward and update of its share; of replicas that take turns, each n-th mini-batch
    its reduction  one all-reduce of the stage's gradients; of n replicas that take turns, one in n mini-batches
    a queue        the largest message between two neighbours, forth or back, at the slowest link between them

Computing, reducing and sending go on at the same time. What skips a stage is handed on by it. With n replicas that take
turns (n = 1 where they split each mini-batch), and N of that stage and all behind it, a replica has k = ceil(N / n)
mini-batches in flight: PipeDream's NOAM for the first stage (its section 3.2), and as many as keep up with it behind.
It then holds k versions of its trained parameters, and k mini-batches' inputs and activations (section 3.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.formats.cluster import Level
from autopar.formats.plan import Division
from autopar.planner.candidate import Candidate, Placed
from autopar.planner.costs.memory import Held, Parts, peak_of
from autopar.planner.costs.model import CostModel

Numbers = npt.NDArray[np.float64]


class Shape(NamedTuple):
    """A stage but for its layers."""

    kind: int
    width: int
    division: Division = "split"

    @property
    def lanes(self) -> int:
        """How many mini-batches its replicas have at a time."""
        return self.width if self.division == "round-robin" else 1


def depths(lanes: Sequence[int]) -> list[int]:
    """Return the mini-batches in flight on a replica of every stage.

    >>> depths([3, 1, 2])
    [2, 3, 1]
    """
    return [-(-sum(lanes[index:]) // own) for index, own in enumerate(lanes)]


class StashCosts:
    """Prices of stages ``[first, stop]`` and boundaries of an asynchronous pipeline; a mini-batch is the batch."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self.reduced_bytes, self.trained_bytes = _trained(costs)
        """Of stages: gradients that its replicas reduce, and parameters that there are versions of."""
        self.forth_bytes, self.back_bytes = _crossing(costs)
        """Of what crosses a position, per sample; not a number where nothing does."""
        self._updates: dict[int, Numbers] = {}

    def computing_s(self, shape: Shape, first: int, recompute: frozenset[int] = frozenset()) -> Numbers:
        """Return what a device takes per mini-batch, of stages from a layer on, by their stop."""
        costs, adding = self.costs, self.costs.adding(1, shape.width)
        found = []
        for rows in sorted(set(costs.shares(costs.batch, shape.width, shape.division))):
            forward = np.array(costs.sums.forward(rows, kind=shape.kind))
            both = forward + np.array(costs.sums.backward(rows, adding, recompute, kind=shape.kind))
            found.append(both[first + 1 :] - both[first])
        own = np.maximum.reduce(found) + self._update_s(shape.kind, first)
        return np.asarray((costs.profile.step_overhead_s + own) / shape.lanes)

    def reducing_s(self, shape: Shape, level: Level, first: int) -> Numbers:
        """Return what reductions take per mini-batch, of stages from a layer on, by their stop."""
        sizes = self.reduced_bytes[first, first + 1 :]
        return self.costs.links.collectives_s("all_reduce", sizes, shape.width, level) / shape.lanes

    def sending_s(self, cut: int, rows: Numbers, period: Numbers, level: Level) -> Numbers:
        """Return what messages of so many rows, one in ``period`` mini-batches, occupy the fullest queue at a cut."""
        seconds = np.zeros(rows.shape)
        for size in (self.forth_bytes[cut], self.back_bytes[cut]):
            if not np.isnan(size):
                sent = self.costs.links.messages_s((rows * size).ravel(), level).reshape(rows.shape)
                seconds = np.maximum(seconds, sent / period)
        return seconds

    def message(self, before: Shape, after: Shape) -> tuple[float, int]:
        """Return the rows of the largest message between two stages, and how many mini-batches there is one in."""
        costs = self.costs
        ends = [costs.shares(costs.batch, each.width, each.division) for each in (before, after)]
        period = int(np.lcm(before.lanes, after.lanes))
        if costs.divisible or before.division == after.division == "round-robin":
            return costs.batch, period
        split = [shares for shares, each in zip(ends, (before, after), strict=True) if each.division == "split"]
        edges = np.unique(np.concatenate([[0.0], *(np.cumsum(shares) for shares in split)]))
        return float(np.diff(edges).max()), period

    def held(self, first: int, stop: int, rows: float, kind: int, recompute: frozenset[int]) -> tuple[int, int]:
        """Return a stage's bytes with one mini-batch in flight, and what each further one adds."""
        parts = self.costs.memory[kind].parts(first, stop, rows, recompute)
        one, more = _bytes(parts, rows)
        return int(one), int(more) + int(self.trained_bytes[first, stop])

    def all_held(self, rows: float, kind: int, recompute: frozenset[int]) -> tuple[Numbers, Numbers]:
        """Return :meth:`held` of all stages."""
        one, more = _bytes(self.costs.memory[kind].by_stop(rows, recompute), rows)
        return one, more + self.trained_bytes

    def peak_bytes(self, stage: Placed) -> int:
        """Return the most that a replica of a stage holds."""
        kinds = [self.costs.kind_of[device] for device in stage.devices]
        found = []
        for rows, kind in sorted(set(zip(stage.shares, kinds, strict=True))):
            one, more = self.held(stage.first, stage.stop, rows, kind, frozenset(stage.recompute))
            found.append(one + (stage.warmup - 1) * more)
        return max(found)

    def busy(self, candidate: Candidate) -> dict[str, float]:
        """Return the seconds per mini-batch of everything that may bind, by its name."""
        found: dict[str, float] = {}
        stages = candidate.stages
        for index, stage in enumerate(stages):
            level, at = self.costs.links.level(stage.devices), stage.stop - stage.first - 1
            shapes = self.shapes(stage)
            computing = [self.computing_s(shape, stage.first, frozenset(stage.recompute))[at] for shape in shapes]
            found[f"computing in stage {index}"] = float(max(computing))
            if len(stage.devices) > 1:
                reducing = self.reducing_s(shapes[0], level, stage.first)[at]
                found[f"gradients of stage {index}"] = float(reducing)
        for index, (before, after) in enumerate(pairwise(stages)):
            rows, period = self.message(self.shapes(before)[0], self.shapes(after)[0])
            level = self.costs.links.level((*before.devices, *after.devices))
            sent = self.sending_s(before.stop, np.array([float(rows)]), np.array([float(period)]), level)
            found[f"messages between stages {index} and {index + 1}"] = float(sent[0])
        for index, holders in self.costs.tied_between(stages):
            devices = [device for holder in holders for device in stages[holder].devices]
            often = min(self.shapes(stages[holder])[0].lanes for holder in holders)
            name = self.costs.profile.tied[index].parameter
            found[f"gradients of {name}"] = self.costs.tied_s(index, devices) / often
        return found

    def shapes(self, stage: Placed) -> list[Shape]:
        """Return a stage's shape, one for each kind of its devices."""
        kinds = sorted({self.costs.kind_of[device] for device in stage.devices})
        return [Shape(kind, len(stage.devices), stage.division) for kind in kinds]

    def _update_s(self, kind: int, first: int) -> Numbers:
        sums = np.array(self.costs.layers[kind].update_sums)
        if not self.costs.flows.tied:
            return np.asarray(sums[first + 1 :] - sums[first])
        stops = range(first + 1, self.costs.layer_count + 1)
        return np.array([self.costs.updating_s(first, stop, 1, "node", "none", kind) for stop in stops])


def _bytes(parts: Parts, rows: float) -> tuple[Numbers, Numbers]:
    """Return what one mini-batch in flight takes, and what each further one adds, but for its version of parameters.

    The update goes on while others are in flight, so that what it holds counts as a mini-batch's peak. One mini-batch
    more than in flight has its inputs loaded.
    """
    inputs = np.ceil(rows * np.asarray(parts.inputs))
    steady = parts._replace(peak=np.maximum(parts.peak, parts.update), update=0, inputs=0)
    # Of more mini-batches than are in flight, so that gradients are always there; the stage before has one more.
    peak = np.asarray(peak_of(steady, Held(rows, 1, 3, 1, 1)), dtype=np.float64)
    return peak + 2 * inputs, np.asarray(parts.activations + inputs, dtype=np.float64)


def _trained(costs: CostModel) -> tuple[Numbers, Numbers]:
    """Return reduced and trained bytes, ``[first, stop]``."""
    sums = np.concatenate([[0.0], np.cumsum([float(layer.trainable_bytes) for layer in costs.profile.layers])])
    reduced = np.subtract.outer(sums, sums).T[:-1].copy()
    trained = reduced.copy()
    for tied in costs.flows.tied:
        if tied.trainable:
            held = np.zeros(costs.layer_count + 1)
            held[np.array(tied.layers) + 1] = 1
            counts = np.cumsum(held)
            within = np.maximum(0.0, np.subtract.outer(counts, counts).T[:-1])
            again = np.maximum(0.0, within - 1)
            trained -= tied.bytes * again
            # What other stages hold, too, is reduced with them.
            reduced -= tied.bytes * np.where(within < len(tied.layers), within, again)
    return np.maximum(0.0, reduced), np.maximum(0.0, trained)


def _crossing(costs: CostModel) -> tuple[Numbers, Numbers]:
    found = []
    tensors = costs.flows.crossing
    for some in (tensors, [tensor for tensor in tensors if tensor.gradient]):
        change, count = np.zeros(costs.layer_count + 2), np.zeros(costs.layer_count + 2)
        for tensor in some:
            for sums, amount in ((change, tensor.bytes_per_sample), (count, 1)):
                sums[tensor.producer + 1] += amount
                sums[tensor.consumers[-1] + 1] -= amount
        crossing = np.cumsum(change)[:-1]
        found.append(np.where(np.cumsum(count)[:-1] > 0, crossing, np.nan))
    return found[0], found[1]
