"""Partitions come in the order of their busiest stage, and none is left out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import combinations, product
from math import lcm

import pytest

from autopar.planner import PlanOptions
from autopar.planner.candidate import Family
from autopar.planner.constraints import FixedStages
from autopar.planner.costs.model import CostModel
from autopar.planner.objectives.partitions import PartitionTable, PipelinePartition, StageWay
from autopar.planner.objectives.unflushed import PolicyJudge, device_orders
from autopar.planner.simulator.simulate import Simulator
from random_problems import random_cluster, random_profile, two_kinds


def asked(seed: int) -> tuple[PolicyJudge, Family, tuple[int, ...]]:
    """Return a judge of some policy, a family, and an order of devices."""
    profile, cluster = random_profile(seed, most_layers=4, batches=(1, 2, 4)), random_cluster(seed, 2 + seed % 3)
    if seed % 4 == 0:
        profile, cluster = two_kinds(profile, cluster, seed)
    options = PlanOptions(policy=("stash", "2bw", "stash")[seed % 3], shard="none", schedule="1f1b")  # type: ignore[arg-type]
    judge = PolicyJudge(Simulator(CostModel(profile, cluster, options)), options)
    counts = [count for count in (1, 2, 4) if profile.batch % count == 0]
    micro_batches = counts[seed % len(counts)]
    orders = device_orders(judge.costs)
    return judge, Family(micro_batches, profile.batch // micro_batches, "1f1b"), orders[seed % len(orders)]


def table_of(
    judge: PolicyJudge, family: Family, devices: tuple[int, ...], fixed_stages: FixedStages | None = None
) -> PartitionTable:
    busy_s = partial(judge.busy_s, family)
    return PartitionTable(judge.costs, family, devices, partial(judge.divisions, family), busy_s, fixed_stages)


def every(judge: PolicyJudge, family: Family, table: PartitionTable, devices: int, most: int) -> Iterator[float]:
    """Yield what the busiest stage of every partition does, whose replicas have had equal turns after ``most``."""
    layers = judge.costs.layer_count
    ways = [StageWay(width, each) for width in range(1, devices + 1) for each in judge.divisions(family, width)]
    for count in range(1, min(layers, devices) + 1):
        for cuts, chosen in product(combinations(range(1, layers), count - 1), product(ways, repeat=count)):
            turns = lcm(*(way.turning for way in chosen))
            if sum(way.width for way in chosen) <= devices and turns <= most:
                stages = table.stages(PipelinePartition(0.0, (*cuts, layers), chosen))
                busiest_s = max(judge.busy_s(family, stage) for stage in stages)
                if busiest_s < float("inf"):
                    yield busiest_s


@pytest.mark.parametrize("seed", range(40))
def test_all_partitions_come_those_of_the_least_busy_first(seed: int) -> None:
    judge, family, devices = asked(seed)
    table, most = table_of(judge, family, devices), (2, 64)[seed % 2]
    found = list(table.in_order(None, most))
    assert [each.busiest_s for each in found] == sorted(every(judge, family, table, len(devices), most))
    for each in found:
        stages = table.stages(each)
        assert each.busiest_s == max(judge.busy_s(family, stage) for stage in stages)
        assert [device for stage in stages for device in stage.devices] == list(devices[: each.width])


@pytest.mark.parametrize("seed", range(8))
def test_fixed_stages_are_the_only_ones_and_their_replicas_divide_as_they_may(seed: int) -> None:
    judge, family, devices = asked(seed)
    layers = judge.costs.layer_count
    if layers < 2 or len(devices) < 3:
        pytest.skip("too small for two stages")
    table = table_of(judge, family, devices, FixedStages((1, layers), (len(devices) - 1, 1), (1, 1)))
    found = list(table.in_order(None, 64))
    assert all(each.stops == (1, layers) for each in found)
    assert all([way.width for way in each.ways] == [len(devices) - 1, 1] for each in found)
    assert len(found) <= len(judge.divisions(family, len(devices) - 1))


def test_at_most_so_many_stages_have_a_partition() -> None:
    judge, family, devices = asked(5)
    table = table_of(judge, family, devices)
    assert {len(each.stops) for each in table.in_order(1, 64)} == {1}
