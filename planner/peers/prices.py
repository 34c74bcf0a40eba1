"""Prices: what a peer's planner is told, the stages that it proposes, and how these are tried.

Prices come from the cost model. Proposed stages are judged by memory and simulator, in every micro-batch count and
depth of a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain, islice, pairwise, zip_longest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.formats.cluster import Level
from autopar.hardware.topology import Place
from autopar.ownership import Replicas
from autopar.planner.candidate import Candidate, Family, place, with_depths
from autopar.planner.constraints import crossed_limit
from autopar.planner.costs import memoize
from autopar.planner.costs.model import CostModel
from autopar.planner.search.judge import Best, Reference
from autopar.planner.shares import by_share
from autopar.planner.simulator.simulate import Simulator
from autopar.schedules import SCHEDULES

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


class Prices:
    """Costs of one micro-batch, of ``micro_batches`` in a step, at the positions between layers.

    Arrays have ``layer_count + 1`` entries: sums over all layers before a position, or what crosses a cut there. The
    papers know a bandwidth and no latency; here it is the one that the cluster's curves or links have for a message of
    that size, and for reducing the whole model. They add up layers: where a host launches kernels, seconds are those of
    the queue that is longer of the whole model.
    """

    def __init__(self, costs: CostModel, micro_batches: int) -> None:
        self.costs = costs
        self.micro_batches = micro_batches
        self.rows = costs.batch // micro_batches
        self.layer_count = costs.layer_count
        self.device_count = len(costs.devices)

    @cached_property
    def servers(self) -> list[list[int]]:
        """Devices of every node, nodes in the order in which the cluster lists them."""
        found: dict[int, list[int]] = {}
        for index, device in enumerate(self.costs.devices):
            found.setdefault(device.node, []).append(index)
        return list(found.values())

    @property
    def servers_alike(self) -> bool:
        """Whether there are several nodes with the same number of devices, more than one."""
        sizes = {len(server) for server in self.servers}
        return len(self.servers) > 1 and len(sizes) == 1 and sizes != {1}

    @cached_property
    def outer(self) -> Level:
        """The level that connects all devices: between nodes, the papers know one."""
        return self.costs.links.level(range(self.device_count))

    @property
    def most_replicas(self) -> int:
        """Return among how many replicas a micro-batch can be split."""
        return self.device_count if self.costs.divisible else self.rows

    def forward_s(self, replicas: int) -> Array:
        """Return the forwards of all layers before a position, in the largest share of a micro-batch."""
        return np.array(self.costs.seconds.running(self._share(replicas), 1.0)[0])

    def backward_s(self, replicas: int) -> Array:
        """Return the same of the backwards."""
        adding = self.costs.adding(self.micro_batches, replicas)
        return np.array(self.costs.seconds.running(self._share(replicas), adding)[1])

    @cached_property
    def single(self) -> Array:
        """How many layers before a position may have one replica only."""
        return np.cumsum([0.0, *(float(layer in self.costs.single) for layer in range(self.layer_count))])

    @cached_property
    def layer_s(self) -> Array:
        """Forward and backward of every layer on a whole micro-batch."""
        return np.diff(self.forward_s(1)) + np.diff(self.backward_s(1))

    @cached_property
    def layer_bytes(self) -> list[int]:
        """What every layer takes: what it keeps of a micro-batch, parameters, gradients and optimizer state."""
        layers = self.costs.profile.layers
        kept = [sum(self.costs.layers[0].saved_at(layer, self.rows).values()) for layer in range(self.layer_count)]
        states = (layer.parameters_bytes + layer.gradient_bytes + layer.optimizer_bytes for layer in layers)
        return [saved + state for saved, state in zip(kept, states, strict=True)]

    @cached_property
    def weights_bytes(self) -> Array:
        """Trained parameters of all layers before a position."""
        return np.cumsum([0.0, *(layer.trainable_bytes for layer in self.costs.profile.layers)])

    def forth_s(self, level: Level, replicas: int = 1) -> Array:
        """Return the seconds of sending what crosses a cut, in shares among ``replicas``."""
        return self._sent_s(self.costs.flows.crossing_bytes[0], level, replicas)

    def back_s(self, level: Level, replicas: int = 1) -> Array:
        """Return the same of the gradients that return."""
        return self._sent_s(self.costs.flows.crossing_bytes[1], level, replicas)

    @memoize
    def reduce_rate(self, replicas: int, level: Level) -> float:
        """Return the seconds per byte of reducing gradients among replicas, which the papers place after they price.

        Where a node holds as many, they are taken to be one on each of several nodes, if that is their level; more are
        those that the cluster lists first.
        """
        total = int(self.weights_bytes[-1])
        if replicas == 1 or total == 0:
            return 0.0
        return self.costs.links.collective_s("all_reduce", total, self._place(replicas, level)) / total

    def _place(self, replicas: int, level: Level) -> Place:
        if level == "node":
            return Place(replicas)
        if replicas > max(map(len, self.servers)):
            return self.costs.links.place(range(replicas))
        # Of nodes that hold unlike numbers, the smaller ones are used up first.
        dealt = (each for each in chain.from_iterable(zip_longest(*self.servers)) if each is not None)
        return self.costs.links.place(list(islice(dealt, replicas)))

    def _share(self, replicas: int) -> float:
        return max(self.costs.shares(self.rows, Replicas(replicas)))

    def _sent_s(self, bytes_per_sample: Array, level: Level, replicas: int) -> Array:
        # A position across which nothing travels has NaN.
        rows = self.rows if self.costs.divisible else self._share(replicas)
        seconds = self.costs.links.messages_s(rows * np.nan_to_num(bytes_per_sample), level)
        return np.where(np.isnan(bytes_per_sample), 0.0, seconds)


class Proposal(NamedTuple):
    """Stages that end before the layers ``cuts``, and the devices of each."""

    cuts: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]


def in_cluster_order(cuts: Sequence[int], widths: Sequence[int]) -> Proposal:
    """Return a proposal whose stages take devices in cluster order.

    >>> in_cluster_order((3, 5), (2, 1))
    Proposal(cuts=(3, 5), devices=((0, 1), (2,)))
    """
    edges = [0, *accumulate(widths)]
    return Proposal(tuple(cuts), tuple(tuple(range(start, stop)) for start, stop in pairwise(edges)))


MOST_WORK, LITTLE_WORK = 5 * 10**9, 2 * 10**8
"""Array elements that a peer may take for all its proposals together: about ten seconds, and half a second."""


def planned_counts(prices: Sequence[Prices], work: Callable[[Prices], int], most_work: int = MOST_WORK) -> list[Prices]:
    """Return the micro-batch counts for which a peer's planner is run: all, or as many as time allows, evenly spaced.

    What it proposes for one count is tried with every other, too.
    """
    most = min(len(prices), most_work // max(1, work(prices[0])))
    if most < 2:
        return list(prices[len(prices) // 2 :][:most])
    return [prices[round(index * (len(prices) - 1) / (most - 1))] for index in range(most)]


def candidates_of(costs: CostModel, proposal: Proposal, micro_batches: int, schedule: str) -> Iterator[Candidate]:
    """Return a proposal's candidates, one for every choice of depths that the schedule offers."""
    family = Family(micro_batches, costs.batch // micro_batches, schedule)
    widths, order = tuple(map(len, proposal.devices)), sum(proposal.devices, ())
    stages = place(family, proposal.cuts, map(Replicas, widths), order=order, divisible=costs.divisible)
    stages = tuple(by_share(costs, stage) for stage in stages)
    depths = SCHEDULES[schedule].warmups(len(proposal.cuts), 1, micro_batches).values()
    return (with_depths(family, stages, choice) for choice in dict.fromkeys(depths))


def trial(
    simulator: Simulator, name: str, schedule: str, counts: Sequence[int], proposals: Sequence[Proposal]
) -> Reference:
    """Return the fastest candidate of the proposals that fits, or the one that comes closest and why it does not."""
    costs = simulator.costs
    reasons = {
        candidate: costs.replicated_single(candidate.stages) or crossed_limit(costs, candidate.stages)
        for count in counts
        for proposal in proposals
        if costs.divisible or max(map(len, proposal.devices)) <= costs.batch // count
        for candidate in candidates_of(costs, proposal, count, schedule)
    }
    runnable = [candidate for candidate, reason in reasons.items() if reason is None]
    if reasons and not runnable:
        return Reference(name, None, None, next(iter(reasons.values())))
    best = Best()
    for _ in best.judge_each(simulator, runnable):
        pass
    otherwise = f"no micro-batch of a batch of {costs.batch} has a sample for each replica of a stage"
    return Reference.of(name, best, costs, otherwise)
