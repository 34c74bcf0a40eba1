"""HetPipe: virtual workers, pipelines over devices that may differ, which share the data.

Park et al., "HetPipe: Enabling Large DNN Training on (Whimpy) Heterogeneous GPU Clusters through Integration of
Pipelined Model Parallelism and Data Parallelism", USENIX ATC 2020. Each virtual worker, with one device a stage, is cut
so that its slowest stage is fastest within the memory of its micro-batches in flight; of these there are as many in
every virtual worker. The paper's workers push updates in waves and wait only for those that are far behind; here all
wait at the end of every step. Devices are dealt by one of three policies:

- NP, node partition: every node is a virtual worker;
- ED, equal distribution: every virtual worker has as many devices of every node;
- HD, hybrid distribution: nodes are paired, the quickest with the slowest, and each pair is distributed equally to two
  virtual workers.

A plan is one pipeline. Virtual workers that cut alike are one whose replicas take turns. Others are priced so: each
worker's own pipeline is simulated with its share of the step's micro-batches; layers that no worker cuts are reduced
together, among the devices that hold them, from the last layers to the first, as soon as these have done their last
backward; then every device updates. That the pipelines share links is not seen.

The partition of one virtual worker's layers is an integer program in the paper: of all orders of the devices and all
cuts, those whose stages fit the memory, at the micro-batches that each has in flight, and of these the one with the
least of the longest stage, whose time is its computing and the receiving of its activations and gradients. Here it is a
dynamic program over (devices taken, the last of them, the one that follows, layers placed):

    A(D + d, d, n, j) = min over i < j, p in D of max( A(D, p, d, i),  c_p(i) + t_d(i, j) + c'_n(j) )

with t_d(i, j) the forward and backward of layers i:j on d, c_p(i) and c'_n(j) the activations from p and the gradients
from n. Devices that prices cannot tell apart count as one sort.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import gcd, prod
from typing import Literal, NamedTuple

import numpy as np

from autopar.formats.cluster import Level
from autopar.formats.program import BACKWARD, REDUCE_TIED
from autopar.formats.report import VirtualStage, VirtualWorker, VirtualWorkers
from autopar.ownership import Division
from autopar.planner.bounds import candidate_bound_s
from autopar.planner.candidate import Candidate, CandidateStage, divisors
from autopar.planner.costs import memoize
from autopar.planner.costs.activations import between
from autopar.planner.costs.durations import Durations, durations
from autopar.planner.costs.memory import Parts, PeakTerms, peak_of
from autopar.planner.costs.model import CostModel
from autopar.planner.peers.prices import Array, Indices, Prices
from autopar.planner.simulator.simulate import Simulator, outline, trace
from autopar.schedules.expand import expand

Counts = tuple[int, ...]
OVERHEAD = 50_000
"""What numpy's calls for one entry of the tables take, in the time of array elements."""
END = -1
"""In place of the sort that follows the last stage's."""


class Makeup(NamedTuple):
    """What a virtual worker is made of, sort by sort."""

    kinds: tuple[int, ...]
    limits_bytes: tuple[int, ...]
    counts: Counts
    levels: tuple[tuple[Level, ...], ...]
    """Of the links between devices of two sorts."""


class PipelineCounts(NamedTuple):
    """What a stage's memory depends on besides its layers and device."""

    in_flight: int
    """Micro-batches of a virtual worker in its pipeline at once: the paper's Nm."""
    turns: int
    """Micro-batches of a step that a virtual worker is given."""
    workers: int


class Partition(NamedTuple):
    """A virtual worker's stages: they end before the layers ``cuts`` and are on devices of the ``sorts``."""

    slowest_s: float
    """Infinite where no stages fit."""
    cuts: tuple[int, ...]
    sorts: tuple[int, ...]


class _BestPipelines(NamedTuple):
    """The best pipelines by the layers placed: their slowest stage, and where and behind which sort the last begins."""

    slowest_s: Array
    first: Indices
    before: Indices


def depths(stages: int, pipeline: PipelineCounts) -> tuple[int, ...]:
    """Return the micro-batches in flight in each stage.

    Between a micro-batch's forward in stage s of S and its backward there lie 2 (S - s) stages' work, in which as many
    others may enter.

    >>> depths(3, PipelineCounts(4, 8, 1)), depths(3, PipelineCounts(9, 8, 1))
    ((4, 3, 1), (5, 3, 1))
    """
    most = min(pipeline.in_flight, pipeline.turns)
    return tuple(min(most, 2 * behind + 1) for behind in range(stages - 1, -1, -1))


def peak_terms(rows: int, depths_of_stages: Sequence[int], stage: int, pipeline: PipelineCounts) -> PeakTerms:
    """Return what a stage's memory depends on besides its layers, its gradients kept for the reduction among all."""
    depth, (_, turns, workers) = depths_of_stages[stage], pipeline
    return PeakTerms(rows, depth, turns, workers, depths_of_stages[stage - 1] - depth if stage else 0)


def makeup_of(costs: CostModel, devices: Sequence[int]) -> tuple[Makeup, list[list[int]]]:
    """Return what devices make up, and those of every sort, ascending: these could change places unnoticed."""
    links = costs.links
    places = links.topology.racks, links.topology.nodes, costs.kind_of, costs.limits_bytes
    on_node: dict[tuple[object, ...], list[int]] = {}
    for device in devices:
        on_node.setdefault(tuple(of[device] for of in places), []).append(device)
    # Whatever tells devices of different nodes apart, two of each node do.
    some = [device for same in on_node.values() for device in same[:2]]
    alike: list[list[int]] = []
    for same in on_node.values():
        # Those beside it are the likeliest to tell a device apart.
        known = next((sort for sort in alike if _same(costs, sort[0], same[0], [*sort[1:2], *same[1:2], *some])), None)
        if known is None:
            alike.append(list(same))
        else:
            known += same
    sorts = list(map(sorted, alike))
    firsts = [sort[0] for sort in sorts]
    # A sort of one has no link of its own.
    levels = tuple(tuple(links.level((one, sort[-1])) for sort in sorts) for one in firsts)
    kinds, limits = (tuple(of[device] for device in firsts) for of in (costs.kind_of, costs.limits_bytes))
    return Makeup(kinds, limits, tuple(map(len, sorts)), levels), sorts


def _same(costs: CostModel, one: int, other: int, devices: Sequence[int]) -> bool:
    level = costs.links.level
    return (
        costs.kind_of[one] == costs.kind_of[other]
        and costs.limits_bytes[one] == costs.limits_bytes[other]
        and all(level((one, each)) == level((other, each)) for each in devices if each not in (one, other))
    )


class Partitioner:
    """Partitions virtual workers at one micro-batch count."""

    def __init__(self, prices: Prices) -> None:
        self.prices, self.costs = prices, prices.costs

    @memoize
    def partition(self, makeup: Makeup, pipeline: PipelineCounts) -> Partition:
        """Return the partition whose slowest stage is fastest.

        A stage's memory is reckoned with every tensor that it sends read by one stage.
        """
        return _PartitionSearch(self, makeup, pipeline).go()

    def stage_s(self, kind: int, pipeline: PipelineCounts) -> Array:
        """Return the forward and backward of layers ``[first, stop]``; infinite where there are none."""
        adding = self.costs.adding(pipeline.turns, pipeline.workers)
        forward, backward = self.costs.seconds.running(self.prices.rows, adding, kind)
        return between(np.array(forward) + np.array(backward))[:-1]

    @memoize
    def parts(self, kind: int) -> Parts:
        """Return what layers ``[first, stop]`` hold on a kind of device."""
        return self.costs.memory[kind].by_stop(self.prices.rows)


class _PartitionSearch:
    def __init__(self, owner: Partitioner, makeup: Makeup, pipeline: PipelineCounts) -> None:
        self.owner, self.makeup, self.pipeline = owner, makeup, pipeline
        self.layers = owner.prices.layer_count
        self.depths = depths(sum(makeup.counts), pipeline)
        self.sorts = range(len(makeup.counts))
        self.seconds = [owner.stage_s(kind, pipeline) for kind in makeup.kinds]
        none = np.zeros(self.layers + 1, dtype=np.int64)
        start = _BestPipelines(np.where(np.arange(self.layers + 1) == 0, 0.0, np.inf), none, none)
        self.best = {((0,) * len(self.sorts), END, sort): start for sort in self.sorts}
        """By the devices taken, the sort of the last of them, and that of the one that follows."""

    def go(self) -> Partition:
        """Fill the tables, fewer devices first; return the best whole partition."""
        counts = self.makeup.counts
        for taken in sorted(product(*(range(count + 1) for count in counts)), key=sum)[1:]:
            for sort in self.sorts:
                if taken[sort]:
                    self._extend(taken, sort)
        slowest_s, sort = min((float(self.best[counts, sort, END].slowest_s[-1]), sort) for sort in self.sorts)
        return self._backtrack(slowest_s, sort) if slowest_s < np.inf else Partition(slowest_s, (), ())

    def _extend(self, taken_counts: Counts, sort: int) -> None:
        """Find the best pipelines that end with a device of a sort."""
        before = _less(taken_counts, sort)
        stage_s, prices, levels = self._fitting(sum(before), sort), self.owner.prices, self.makeup.levels[sort]
        ahead = []
        for each in [each for each in self.sorts if before[each]] or [END]:
            received_s = np.zeros(self.layers) if each == END else prices.forth_s(levels[each])[:-1]
            ahead.append((each, self.best[before, each, sort].slowest_s[:-1], received_s))
        following = [each for each in self.sorts if taken_counts[each] < self.makeup.counts[each]] or [END]
        for after in following:
            whole_s = stage_s + (0.0 if after == END else prices.back_s(levels[after]))
            self.best[taken_counts, sort, after] = _least(ahead, whole_s)

    def _fitting(self, position: int, sort: int) -> Array:
        """Return the seconds of stages ``[first, stop]`` at a position; infinite where they do not fit."""
        held = peak_terms(self.owner.prices.rows, self.depths, position, self.pipeline)
        peaks = np.asarray(peak_of(self.owner.parts(self.makeup.kinds[sort]), held))
        return np.where(peaks <= self.makeup.limits_bytes[sort], self.seconds[sort], np.inf)

    def _backtrack(self, slowest_s: float, sort: int) -> Partition:
        cuts: list[int] = []
        sorts: list[int] = []
        taken, after, stop = self.makeup.counts, END, self.layers
        while stop:
            best = self.best[taken, sort, after]
            cuts.insert(0, stop)
            sorts.insert(0, sort)
            taken, after = _less(taken, sort), sort
            sort, stop = int(best.before[stop]), int(best.first[stop])
        return Partition(slowest_s, tuple(cuts), tuple(sorts))


def _less(counts: Counts, sort: int) -> Counts:
    return tuple(count - (index == sort) for index, count in enumerate(counts))


def _least(ahead: Sequence[tuple[int, Array, Array]], whole_s: Array) -> _BestPipelines:
    """Return the best last stages ``[first, stop]``, the first sort and layer of equals."""
    slowest = np.stack([np.maximum(known[:, None], whole_s + received[:, None]) for _, known, received in ahead])
    every = slowest.reshape(-1, slowest.shape[-1])
    chosen = every.argmin(axis=0)
    sorts = np.array([sort for sort, _, _ in ahead], dtype=np.int64)
    at = np.arange(every.shape[-1])
    return _BestPipelines(every[chosen, at], chosen % slowest.shape[1], sorts[chosen // slowest.shape[1]])


def partition_work(makeup: Makeup, layers: int) -> int:
    """Return how many array elements a partition takes."""
    sorts = len(makeup.counts)
    return prod(count + 1 for count in makeup.counts) * sorts**2 * (OVERHEAD + sorts * (layers + 1) ** 2)


Policy = Literal["NP", "ED", "HD"]
Devices = tuple[int, ...]


class Allocation(NamedTuple):
    """The devices of every virtual worker."""

    policy: Policy
    workers: tuple[Devices, ...]
    makeups: tuple[tuple[Makeup, list[list[int]]], ...] = ()
    """What every worker is made of, and its devices by sort; see :func:`makeup_of`."""


def allocations(nodes: Sequence[Sequence[Devices]], alone_s: Sequence[float]) -> list[Allocation]:
    """Return every allocation that uses all devices, the first of those that are alike.

    The papers' cluster has four nodes of four devices and four virtual workers; here ED has every number of them that
    divides the devices of all nodes.

    Args:
        nodes: of every node, its devices by kind.
        alone_s: of every device, the seconds of a micro-batch of the whole model on it.

    >>> for each in allocations([[(0, 1)], [(2, 3)]], [1.0, 1.0, 2.0, 2.0]):
    ...     print(each.policy, *each.workers)
    NP (0, 1) (2, 3)
    ED (0, 1, 2, 3)
    ED (0, 2) (1, 3)
    """
    found = [Allocation("NP", tuple(tuple(sorted(_all(node))) for node in nodes))]
    groups = [group for node in nodes for group in node]
    found += [Allocation("ED", _equal_workers(groups, count)) for count in divisors(gcd(*map(len, groups)))]
    order = sorted(range(len(nodes)), key=lambda at: (-sum(1 / max(alone_s[d], 1e-300) for d in _all(nodes[at])), at))
    pairs = [(*nodes[order[at]], *nodes[order[-1 - at]]) for at in range(len(nodes) // 2)]
    if len(nodes) % 2 == 0 and all(len(group) % 2 == 0 for group in groups):
        found.append(Allocation("HD", tuple(worker for pair in pairs for worker in _equal_workers(pair, 2))))
    first: dict[frozenset[Devices], Allocation] = {}
    for each in found:
        first.setdefault(frozenset(each.workers), each)
    return list(first.values())


def _all(node: Iterable[Devices]) -> list[int]:
    return [device for group in node for device in group]


def _equal_workers(groups: Sequence[Devices], count: int) -> tuple[Devices, ...]:
    """Return ``count`` workers with as many consecutive devices of every group."""
    return tuple(
        tuple(sorted(_all(group[len(group) * at // count : len(group) * (at + 1) // count] for group in groups)))
        for at in range(count)
    )


class Worker(NamedTuple):
    """A pipeline: stages that end before the layers ``cuts``, on one device each."""

    cuts: tuple[int, ...]
    devices: tuple[int, ...]


class Workers(NamedTuple):
    """Virtual workers that share the micro-batches of a step."""

    policy: Policy
    micro_batches: int
    rows: int
    pipeline: PipelineCounts
    workers: tuple[Worker, ...]

    def turns(self, worker: int) -> int:
        """Return how many of the step's micro-batches a worker is given; the first ones take what is left over."""
        each, more = divmod(self.micro_batches, len(self.workers))
        return each + (worker < more)

    def stages(self, worker: int) -> list[CandidateStage]:
        """Return a worker's stages, with as many micro-batches in flight as those of the worker with most turns."""
        cuts, devices = self.workers[worker]
        fields = zip((0, *cuts[:-1]), cuts, devices, depths(len(cuts), self.pipeline), strict=True)
        return [CandidateStage(first, stop, (each,), (self.rows,), depth) for first, stop, each, depth in fields]


def joint_candidate(virtual_workers: Workers) -> Candidate | None:
    """Return workers as one plan whose replicas take turns; none where they cut the layers differently."""
    if len({worker.cuts for worker in virtual_workers.workers}) > 1:
        return None
    return _in_turn(virtual_workers, 0, tuple(zip(*(each.devices for each in virtual_workers.workers), strict=True)))


def _in_turn(virtual_workers: Workers, worker: int, devices: Sequence[tuple[int, ...]]) -> Candidate:
    """Return the plan of a worker's stages on some devices each, as many as there are workers, which take turns."""
    rows, count = virtual_workers.rows, len(virtual_workers.workers)
    division: Division = "round-robin" if count > 1 else "split"
    stages = (
        stage._replace(devices=own, shares=(rows,) * count, division=division)
        for stage, own in zip(virtual_workers.stages(worker), devices, strict=True)
    )
    return Candidate(virtual_workers.micro_batches, rows, "1f1b", tuple(stages))


def alike(virtual_workers: Workers, worker: int) -> Candidate:
    """Return the plan of a worker beside others that cut the layers as it does, on its own devices."""
    count = len(virtual_workers.workers)
    return _in_turn(virtual_workers, worker, [(each,) * count for each in virtual_workers.workers[worker].devices])


def bound_s(costs: CostModel, virtual_workers: Workers) -> float:
    """Return a lower bound of :func:`step_s`."""
    return max(candidate_bound_s(costs, own) for own in _pipelines(virtual_workers))


def step_s(costs: CostModel, virtual_workers: Workers) -> float:
    """Return the seconds of a step of workers that cut the layers each in its own way."""
    ready: dict[int, float] = {}
    update_s: dict[int, float] = {}
    for at, own in enumerate(_pipelines(virtual_workers)):
        # With other workers, gradients are there from the first backward on.
        stages = alike(virtual_workers, at).stages
        backward_s = [costs.backward_s(stage, 0, own.micro_batches) for stage in stages]
        times = replace(durations(costs, own), backward_s=backward_s)
        for stage, done_s, length in zip(own.stages, _ready(costs, own, times), times.update_s, strict=True):
            ready[stage.devices[0]], update_s[stage.devices[0]] = done_s, length
    for holders, size in _segments(costs, virtual_workers):
        start = max(ready[device] for device in holders)
        end = start + costs.links.collective_s("all_reduce", size, costs.links.place(holders))
        ready |= dict.fromkeys(holders, end)
    return max(ready[device] + update_s[device] for device in ready)


def _pipelines(virtual_workers: Workers) -> Iterator[Candidate]:
    """Yield every worker's own pipeline."""
    for at in range(len(virtual_workers.workers)):
        turns = virtual_workers.turns(at)
        stages = (stage._replace(warmup=min(stage.warmup, turns)) for stage in virtual_workers.stages(at))
        yield Candidate(turns, virtual_workers.rows, "1f1b", tuple(stages))


def _ready(costs: CostModel, own: Candidate, times: Durations) -> list[float]:
    """Return when each stage's gradients are there."""
    program = expand(outline(costs, own))
    found = [0.0] * len(own.devices)
    for event in trace(program, times, costs.sharing.among(own.devices)):
        if event.action.kind in (BACKWARD, REDUCE_TIED):
            found[event.rank] = max(found[event.rank], event.end_s)
    return found


def _segments(costs: CostModel, virtual_workers: Workers) -> Iterator[tuple[Sequence[int], int]]:
    """Yield the devices that hold the same layers and these layers' gradients in bytes, from the last layers on."""
    ends = sorted({cut for worker in virtual_workers.workers for cut in worker.cuts})
    for first, stop in reversed(list(pairwise((0, *ends)))):
        holders = [
            next(device for cut, device in zip(worker.cuts, worker.devices, strict=True) if stop <= cut)
            for worker in virtual_workers.workers
        ]
        size = sum(layer.trainable_bytes for layer in costs.profile.layers[first:stop])
        for tied in costs.flows.tied:
            if tied.trainable:
                # Summed within a worker first; among workers, its first layer stands for it.
                size -= tied.bytes * sum(first <= layer < stop for layer in tied.layers[1:])
        yield holders, max(0, size)


MOST_WORK = 10**9
"""Array elements that one virtual worker's partition may take."""


class HetPipePlan(NamedTuple):
    """The virtual workers whose step is fastest, and the plan that they are, if they cut the layers alike."""

    step_s: float
    workers: Workers
    candidate: Candidate | None


def allocate_workers(prices: Prices, most_workers: int) -> list[Allocation] | str:
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
    whole = PipelineCounts(1, prices.micro_batches, 1)
    partitioner = Partitioner(prices)
    by_kind = {kind: float(partitioner.stage_s(kind, whole)[0, -1]) for kind in set(costs.kind_of)}
    found = []
    for allocation in allocations(nodes, [by_kind[kind] for kind in costs.kind_of]):
        if max(map(len, allocation.workers)) > costs.layer_count or len(allocation.workers) > most_workers:
            continue
        made = tuple(makeup_of(costs, devices) for devices in allocation.workers)
        if max(partition_work(makeup, costs.layer_count) for makeup, _ in made) <= MOST_WORK:
            found.append(allocation._replace(makeups=made))
    if found:
        return found
    return (
        f"its virtual workers would have more devices than the {costs.layer_count} layers, be more than the "
        f"{most_workers} micro-batches, or take too long to partition"
    )


def work(worker_allocations: Sequence[Allocation], layers: int) -> int:
    """Return how many array elements the partitions take, were three depths tried."""
    makeups = {makeup for each in worker_allocations for makeup, _ in each.makeups}
    return 3 * sum(partition_work(makeup, layers) for makeup in makeups)


def best(
    simulator: Simulator, prices_by_count: Sequence[Prices], worker_allocations: Sequence[Allocation]
) -> HetPipePlan | None:
    """Return the fastest of the virtual workers that fit, over policies, micro-batch counts and depths."""
    costs = simulator.costs
    partitioners = [Partitioner(prices) for prices in prices_by_count]
    partitions = (
        workers for at in partitioners for each in worker_allocations for workers in partitioned_workers(at, each)
    )
    choices = [(workers, joint_candidate(workers)) for workers in partitions]
    bounds = [bound_s(costs, own) if plan is None else candidate_bound_s(costs, plan) for own, plan in choices]
    found: HetPipePlan | None = None
    for at in sorted(range(len(choices)), key=bounds.__getitem__):
        if found is not None and bounds[at] >= found.step_s:
            break
        own, plan = choices[at]
        if _fits(costs, own):
            seconds = step_s(costs, own) if plan is None else simulator.step_s(plan)
            if found is None or seconds < found.step_s:
                found = HetPipePlan(seconds, own, plan)
    return found


def partitioned_workers(partitioner: Partitioner, allocation: Allocation) -> Iterator[Workers]:
    """Yield partitioned virtual workers, with ever fewer micro-batches in flight while stages are quicker for it."""
    prices, count = partitioner.prices, len(allocation.workers)
    if prices.micro_batches < count:
        return
    turns = -(-prices.micro_batches // count)
    fewest = PipelineCounts(1, turns, count)
    least_s, known_s = max(partitioner.partition(makeup, fewest).slowest_s for makeup, _ in allocation.makeups), np.inf
    for in_flight in range(min(2 * max(map(len, allocation.workers)) - 1, turns), 0, -1):
        pipelined = fewest._replace(in_flight=in_flight)
        partitions = [partitioner.partition(makeup, pipelined) for makeup, _ in allocation.makeups]
        slowest_s = max(each.slowest_s for each in partitions)
        if slowest_s < known_s:
            pairs = zip(partitions, allocation.makeups, strict=True)
            workers = tuple(_worker(partition, sorts) for partition, (_, sorts) in pairs)
            yield Workers(allocation.policy, prices.micro_batches, prices.rows, pipelined, workers)
            known_s = slowest_s
        if slowest_s <= least_s:
            return


def _worker(partition: Partition, sorts: Sequence[Sequence[int]]) -> Worker:
    """Return a partition on devices, those of a sort in cluster order."""
    left = [iter(sort) for sort in sorts]
    return Worker(partition.cuts, tuple(next(left[sort]) for sort in partition.sorts))


def _fits(costs: CostModel, own: Workers) -> bool:
    return all(max(costs.shortfalls(alike(own, at))) <= 0 for at in range(len(own.workers)))


def describe(prices: Prices, virtual_workers: Workers) -> VirtualWorkers:
    """Return virtual workers with the seconds and bytes of their stages, and what they train."""
    workers = tuple(_describe_worker(prices, virtual_workers, at) for at in range(len(virtual_workers.workers)))
    together = len(workers) * min(worker.samples_per_s for worker in workers)
    return VirtualWorkers(virtual_workers.policy, virtual_workers.pipeline.in_flight, workers, together)


def _describe_worker(prices: Prices, virtual_workers: Workers, at: int) -> VirtualWorker:
    costs, devices = prices.costs, virtual_workers.workers[at].devices
    partitioner, links = Partitioner(prices), costs.links
    every = zip(virtual_workers.stages(at), devices, costs.peak_bytes(alike(virtual_workers, at)), strict=True)
    stages = []
    for place, (stage, device, peak_bytes) in enumerate(every):
        first, stop, kind = stage.first, stage.stop, costs.kind_of[device]
        stage_s = float(partitioner.stage_s(kind, virtual_workers.pipeline)[first, stop])
        if place:
            stage_s += float(prices.forth_s(links.level(devices[place - 1 : place + 1]))[first])
        if place + 1 < len(devices):
            stage_s += float(prices.back_s(links.level(devices[place : place + 2]))[stop])
        name, listed = costs.kinds[kind].name, costs.listed[device]
        stages.append(VirtualStage(stage.layers_text(), listed, name, stage.warmup, stage_s, peak_bytes))
    seconds = [stage.stage_s for stage in stages]
    slowest_s = max(max(seconds), sum(seconds) / virtual_workers.pipeline.in_flight)
    return VirtualWorker(tuple(stages), virtual_workers.rows / slowest_s if slowest_s else 0.0)
