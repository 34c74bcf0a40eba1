"""Partitions of virtual workers against all orders of devices and all cuts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise, permutations

import pytest

from autopar.formats.cluster import Cluster, Link
from autopar.planner.candidate import divisors
from autopar.planner.costs.memory import PeakTerms
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions
from autopar.planner.peers.hetpipe import Worker
from autopar.planner.peers.partition import Partitioner, PipelineCounts, depths, makeup_of
from autopar.planner.peers.prices import Prices
from priced import hierarchy, mixed, random_profile


def orders(
    costs: CostModel, devices: list[int], rows: int, pipelined: PipelineCounts
) -> Iterator[tuple[float, Worker]]:
    """Every order of the devices and every cut that fits, with its slowest stage."""
    deep = depths(len(devices), pipelined)
    for cuts in combinations(range(1, costs.layer_count), len(devices) - 1):
        spans = list(pairwise((0, *cuts, costs.layer_count)))
        for order in permutations(devices):
            seconds = [0.0]
            for at, ((first, stop), device) in enumerate(zip(spans, order, strict=True)):
                kind = costs.kind_of[device]
                lead = deep[at - 1] - deep[at] if at else 0
                held = PeakTerms(rows, deep[at], pipelined.turns, pipelined.workers, lead)
                behind = [end for _, end in spans[at + 1 :]]
                if costs.memory[kind].peak(first, stop, held, behind) > costs.limits_bytes[device]:
                    break
                layers, adding = costs.layers[kind], costs.adding(pipelined.turns, pipelined.workers)
                both = (layers.sums("forward_s", rows), layers.sums("backward_s", rows, adding))
                stage_s = sum(sums[stop] - sums[first] for sums in both)
                if at:
                    flow = costs.flows.between(0, first, first, costs.layer_count)
                    size = rows * flow.bytes_per_sample
                    stage_s += costs.message_s(size, order[at - 1], device) if flow.tensors else 0.0
                if at + 1 < len(order):
                    flow = costs.flows.between(0, stop, stop, costs.layer_count)
                    size = rows * flow.gradient_bytes_per_sample
                    stage_s += costs.message_s(size, order[at + 1], device) if flow.gradients else 0.0
                seconds.append(stage_s)
            else:
                yield max(seconds), Worker((*cuts, costs.layer_count), order)


def test_a_partition_has_the_quickest_slowest_stage_of_all_orders_and_cuts_that_fit() -> None:
    found = none = binding = differing = 0
    for seed in range(150):
        rng = random.Random(seed)
        costs = mixed(seed, rng.randint(1, 4))
        count = rng.choice(divisors(costs.batch))
        workers = rng.choice([1, 1, 2])
        pipelined = PipelineCounts(rng.randint(1, 7), -(-count // workers), workers)
        partitioner = Partitioner(Prices(costs, count))
        devices = list(range(len(costs.devices)))
        makeup, sorts = makeup_of(costs, devices)
        partition = partitioner.partition(makeup, pipelined)
        fitting = list(orders(costs, devices, costs.batch // count, pipelined))
        assert (partition is None) == (not fitting), f"seed {seed}"
        if partition is None:
            none += 1
            continue
        found += 1
        least_s = min(slowest_s for slowest_s, _ in fitting)
        assert partition.slowest_s == pytest.approx(least_s, rel=1e-9, abs=1e-15), f"seed {seed}"
        left = [iter(sort) for sort in sorts]
        own = Worker(partition.cuts, tuple(next(left[sort]) for sort in partition.sorts))
        # Devices of a sort may change places: one of the orders is this one.
        same = [slowest_s for slowest_s, worker in fitting if worker == own]
        assert same == [pytest.approx(partition.slowest_s, rel=1e-9, abs=1e-15)], f"seed {seed}"
        free = [each for each, _ in orders(_unlimited(costs), devices, costs.batch // count, pipelined)]
        binding += min(free) < least_s * (1 - 1e-9)
        differing += len(set(makeup.kinds)) > 1
    assert found >= 60
    assert none >= 20
    assert binding >= 5
    assert differing >= 30


def _unlimited(costs: CostModel) -> CostModel:
    devices = tuple(each.model_copy(update={"memory_bytes": 2**50}) for each in costs.devices)
    link = (Link(level="node", latency_s=0.0, bytes_per_s=1e9), Link(level="network", latency_s=0.0, bytes_per_s=1e9))
    free = CostModel(costs.profile, Cluster(devices=devices, links=link), PlanOptions(gpus=len(devices)))
    free.links, free.batch = costs.links, costs.batch
    return free


def test_devices_of_one_sort_reach_all_others_alike_and_those_of_two_do_not() -> None:
    several = 0
    for seed in range(80):
        rng = random.Random(seed)
        cluster = hierarchy(seed, [rng.randint(1, 3) for _ in range(rng.randint(1, 4))], racks=rng.randint(1, 2))
        count = len(cluster.devices)
        costs = CostModel(random_profile(seed), cluster, PlanOptions(gpus=count))
        makeup, sorts = makeup_of(costs, range(count))
        assert sorted(device for sort in sorts for device in sort) == list(range(count))
        assert makeup.counts == tuple(map(len, sorts))

        def seen(device: int, other: int, costs: CostModel = costs, count: int = count) -> list[str]:
            others = (each for each in range(count) if each not in (device, other))
            return [costs.links.level((device, each)) for each in others]

        for at, sort in enumerate(sorts):
            for other, their in enumerate(sorts):
                for one, two in ((one, two) for one in sort for two in their if one != two):
                    assert makeup.levels[at][other] == costs.links.level((one, two)), f"seed {seed}"
                    assert (seen(one, two) == seen(two, one)) == (at == other), f"seed {seed}"
        several += len(sorts) > 1
    assert several > 10
