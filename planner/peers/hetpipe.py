"""HetPipe: virtual workers, pipelines over devices that may differ, which share the data.

Park et al., 2020: devices are dealt to virtual workers by a policy (:mod:`autopar.planner.peers.allocation`), each of
which is cut so that its slowest stage is fastest within the memory of its micro-batches in flight
(:mod:`autopar.planner.peers.partition`); of these there are as many in every virtual worker. The paper's workers push
updates in waves and wait only for those that are far behind; here all wait at the end of every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from autopar.formats.compared import VirtualStage, VirtualWorker, VirtualWorkers
from autopar.planner.bounds.chain import bound
from autopar.planner.candidate import Candidate
from autopar.planner.costs.model import CostModel
from autopar.planner.peers.allocation import Allocation, allocations
from autopar.planner.peers.partition import Makeup, Partition, Partitioner, Pipelined, depths, makeup_of
from autopar.planner.peers.partition import work as partition_work
from autopar.planner.peers.prices import Prices
from autopar.planner.peers.workers import Worker, Workers, bound_s, candidate_of, peaks, step_s
from autopar.planner.simulator.simulate import Simulator

MOST_WORK = 10**9
"""Array elements that one virtual worker's partition may take."""


class Found(NamedTuple):
    """The virtual workers whose step is fastest, and the plan that they are, if they cut the layers alike."""

    step_s: float
    workers: Workers
    candidate: Candidate | None


class Dealt(NamedTuple):
    """An allocation, with what every virtual worker is made of, and its devices by sort."""

    allocation: Allocation
    makeups: tuple[Makeup, ...]
    sorts: tuple[list[list[int]], ...]

    @property
    def stages(self) -> int:
        """Devices of the largest virtual worker."""
        return max(map(len, self.allocation.workers))


def dealt(prices: Prices, most_workers: int) -> list[Dealt] | str:
    """Return the allocations with a layer for every device of a virtual worker, and a micro-batch for every worker.

    Where a partition would take more than about a second, the allocation is left out.

    Returns:
        Them, or why there are none.
    """
    costs = prices.costs
    nodes = []
    for server in prices.servers:
        groups: dict[tuple[int, int], list[int]] = {}
        for device in server:
            groups.setdefault((costs.kind_of[device], costs.limits_bytes[device]), []).append(device)
        nodes.append([tuple(group) for group in groups.values()])
    whole = Pipelined(1, prices.micro_batches, 1)
    partitioner = Partitioner(prices)
    by_kind = {kind: float(partitioner.stage_s(kind, whole)[0, -1]) for kind in set(costs.kind_of)}
    found = []
    for allocation in allocations(nodes, [by_kind[kind] for kind in costs.kind_of]):
        if max(map(len, allocation.workers)) > costs.layer_count or len(allocation.workers) > most_workers:
            continue
        made = [makeup_of(costs, devices) for devices in allocation.workers]
        if max(partition_work(makeup, costs.layer_count) for makeup, _ in made) > MOST_WORK:
            continue
        found.append(Dealt(allocation, tuple(makeup for makeup, _ in made), tuple(sorts for _, sorts in made)))
    if found:
        return found
    return (
        f"its virtual workers would have more devices than the {costs.layer_count} layers, be more than the "
        f"{most_workers} micro-batches, or take too long to partition"
    )


def work(given: Sequence[Dealt], layers: int) -> int:
    """Return how many array elements the partitions take, were three depths tried."""
    return 3 * sum(partition_work(makeup, layers) for makeup in {makeup for each in given for makeup in each.makeups})


def best(simulator: Simulator, planned: Sequence[Prices], given: Sequence[Dealt]) -> Found | None:
    """Return the fastest of the virtual workers that fit, over policies, micro-batch counts and depths."""
    costs = simulator.costs
    partitioners = [Partitioner(prices) for prices in planned]
    partitions = (workers for at in partitioners for each in given for workers in partitioned(at, each))
    choices = [(workers, candidate_of(workers)) for workers in partitions]
    bounds = [bound_s(costs, own) if plan is None else bound(costs, plan) for own, plan in choices]
    found: Found | None = None
    for at in sorted(range(len(choices)), key=lambda index: (bounds[index], index)):
        if found is not None and bounds[at] >= found.step_s:
            break
        own, plan = choices[at]
        if _fits(costs, own, plan):
            seconds = step_s(costs, own) if plan is None else simulator.step_s(plan)
            if found is None or seconds < found.step_s:
                found = Found(seconds, own, plan)
    return found


def partitioned(partitioner: Partitioner, given: Dealt) -> Iterator[Workers]:
    """Yield partitioned virtual workers, with ever fewer micro-batches in flight while stages are quicker for it."""
    count, prices = len(given.allocation.workers), partitioner.prices
    if prices.micro_batches < count:
        return
    turns = -(-prices.micro_batches // count)
    fewest = _partitions(partitioner, given, Pipelined(1, turns, count))
    if fewest is None:
        return
    least_s, known_s = max(each.slowest_s for each in fewest), float("inf")
    for in_flight in range(min(2 * given.stages - 1, turns), 0, -1):
        pipelined = Pipelined(in_flight, turns, count)
        partitions = _partitions(partitioner, given, pipelined)
        slowest_s = max(each.slowest_s for each in partitions) if partitions else float("inf")
        if partitions and slowest_s < known_s:
            workers = tuple(_worker(*each) for each in zip(partitions, given.sorts, strict=True))
            yield Workers(given.allocation.policy, prices.micro_batches, prices.rows, pipelined, workers)
            known_s = slowest_s
        if slowest_s <= least_s:
            return


def _partitions(partitioner: Partitioner, given: Dealt, pipelined: Pipelined) -> list[Partition] | None:
    found = []
    for makeup in given.makeups:
        partition = partitioner.partition(makeup, pipelined)
        if partition is None:
            return None
        found.append(partition)
    return found


def _worker(partition: Partition, sorts: Sequence[Sequence[int]]) -> Worker:
    """Return a partition on devices, those of a sort in cluster order."""
    left = [iter(sort) for sort in sorts]
    return Worker(partition.cuts, tuple(next(left[sort]) for sort in partition.sorts))


def _fits(costs: CostModel, own: Workers, plan: Candidate | None) -> bool:
    if plan is not None:
        return max(costs.shortfalls(plan)) <= 0
    return all(
        peak <= costs.limits_bytes[device]
        for at, worker in enumerate(own.workers)
        for peak, device in zip(peaks(costs, own, at), worker.devices, strict=True)
    )


def described(prices: Prices, found: Workers) -> VirtualWorkers:
    """Return virtual workers with the seconds and bytes of their stages, and what they train."""
    workers = tuple(_described(prices, found, at) for at in range(len(found.workers)))
    together = len(workers) * min(worker.samples_per_s for worker in workers)
    return VirtualWorkers(found.policy, found.pipelined.in_flight, workers, together)


def _described(prices: Prices, found: Workers, at: int) -> VirtualWorker:
    costs, worker = prices.costs, found.workers[at]
    partitioner, links = Partitioner(prices), costs.links
    spans = list(pairwise((0, *worker.cuts)))
    seconds = []
    for place, ((first, stop), device) in enumerate(zip(spans, worker.devices, strict=True)):
        stage_s = float(partitioner.stage_s(costs.kind_of[device], found.pipelined)[first, stop])
        if place:
            stage_s += float(prices.forth_s(links.level((worker.devices[place - 1], device)))[first])
        if place + 1 < len(spans):
            stage_s += float(prices.back_s(links.level((device, worker.devices[place + 1])))[stop])
        seconds.append(stage_s)
    fields = zip(
        spans, worker.devices, depths(len(spans), found.pipelined), seconds, peaks(costs, found, at), strict=True
    )
    stages = tuple(
        VirtualStage(
            str(first) if stop - first == 1 else f"{first}-{stop - 1}",
            device,
            costs.kinds[costs.kind_of[device]].name,
            depth,
            stage_s,
            peak,
        )
        for (first, stop), device, depth, stage_s, peak in fields
    )
    slowest_s = max(max(seconds), sum(seconds) / found.pipelined.in_flight)
    return VirtualWorker(stages, found.rows / slowest_s if slowest_s else 0.0)
