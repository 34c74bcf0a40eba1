"""PipeDream's objective: the dynamic program against all plans, and against what its own optimizer found."""

import csv
import os
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from autopar.formats.cluster import Cluster, Device, Link
from autopar.formats.profile import Profile
from autopar.interop.pipedream import pipedream_profile
from reproductions.pipedream import PipeDreamPlan, pipedream_plan

NODE, NETWORK = 7e9, 2e9


def _cluster(nodes: int, per_node: int, node: float = NODE, network: float = NETWORK) -> Cluster:
    devices = [Device(type="V100", memory_bytes=16 * 10**9, node=at) for at in range(nodes) for _ in range(per_node)]
    links = (Link(level="node", latency_s=0, bytes_per_s=node), Link(level="network", latency_s=0, bytes_per_s=network))
    return Cluster(devices=tuple(devices), links=links)


def _random_profile(seed: int, most: int = 6) -> Profile:
    """Branches, skips, several first and last layers, and layers without time, parameters or outputs."""
    rng = random.Random(seed)
    count = rng.randint(1, most)
    lines = []
    for index in range(count):
        times = [rng.choice([0, rng.uniform(1, 50)]) for _ in range(2)]
        sizes = [rng.choice([0, rng.randint(1, 10**8)]) for _ in range(2)]
        lines.append(
            f"node{index} -- layer -- forward_compute_time={times[0]}, backward_compute_time={times[1]}, "
            f"activation_size={sizes[0]}, parameter_size={sizes[1]}"
        )
    lines += [
        f"\tnode{source} -- node{target}"
        for target in range(1, count)
        for source in range(target)
        if rng.random() < (0.8 if source == target - 1 else 0.25)
    ]
    return pipedream_profile("\n".join(lines), Path("random.txt"))


class _Sums(NamedTuple):
    seconds: float
    parameters_bytes: float


class _Slow:
    """PipeDream's formulas, one plan after the other, with layers as sets."""

    def __init__(self, profile: Profile) -> None:
        self.layers = profile.layers
        order = {layer.name: index for index, layer in enumerate(profile.layers)}
        self.readers: dict[int, set[int]] = {index: set() for index in order.values()}
        for tensor in profile.tensors:
            if tensor.producer is not None:
                self.readers[order[tensor.producer]] |= {order[name] for name in tensor.consumers}

    def before(self, layer: int) -> set[int]:
        makers = {each for each, readers in self.readers.items() if layer in readers}
        return makers.union(*(self.before(maker) for maker in makers))

    def crossing(self, stop: int) -> int:
        """The outputs of the augmented antichain of the layers before ``stop``."""
        ends = {layer for layer in range(stop) if not any(reader < stop for reader in self.readers[layer])}
        counted = set(ends)
        for end in ends:
            before = self.before(end)
            counted |= {layer for layer in before if self.readers[layer] - before - {end}}
        return sum(self.layers[layer].costs[0].output_bytes for layer in counted)

    def sums(self, first: int, stop: int) -> _Sums:
        layers = self.layers[first:stop]
        seconds = sum(layer.costs[0].forward_s + layer.costs[0].backward_s for layer in layers)
        return _Sums(seconds, sum(layer.parameters_bytes for layer in layers))

    def least(self, first: int, stop: int, machines: int, rate: float, below: tuple[int, float] | None) -> float:
        """The least bottleneck of all pipelines on all of the machines, each a device or a node of ``below``."""

        @cache
        def one(first: int, stop: int) -> float:
            if below is None:
                return self.sums(first, stop).seconds
            return self.least(first, stop, below[0], below[1], None)

        return min(
            max(
                self._stage(first, cuts[0], stages[0], one(first, cuts[0]), rate, below),
                *(
                    self._later(begin, end, used, one(begin, end), rate)
                    for begin, end, used in zip(cuts[:-1], cuts[1:], stages[1:], strict=True)
                ),
                0.0,
            )
            for cuts, stages in _pipelines(first, stop, machines)
        )

    def _stage(
        self, first: int, stop: int, used: int, seconds: float, rate: float, below: tuple[int, float] | None
    ) -> float:
        sent_s = 4 * (used - 1) * self.sums(first, stop).parameters_bytes / (rate * used)
        return (seconds + sent_s / (1 if below is None else below[0])) / used

    def _later(self, first: int, stop: int, used: int, seconds: float, rate: float) -> float:
        sent_s = 4 * (used - 1) * self.sums(first, stop).parameters_bytes / (rate * used)
        into_s = 2 * self.crossing(first) / (rate * used)
        out_s = 2 * self.crossing(stop) / (rate * used) if stop < len(self.layers) else 0.0
        return max((seconds + sent_s) / used, into_s, out_s)


def _pipelines(first: int, stop: int, machines: int) -> Iterator[tuple[list[int], list[int]]]:
    """Every way to cut layers into stages that use all machines: where stages stop, and their machines."""
    yield [stop], [machines]
    for cut in range(first + 1, stop):
        for used in range(1, machines):
            for cuts, stages in _pipelines(first, cut, machines - used):
                yield [*cuts, stop], [*stages, used]


def _check_shape(plan: PipeDreamPlan, layers: int, devices: int) -> None:
    assert plan.stages[0].first == 0
    assert plan.stages[-1].stop == layers
    assert all(a.stop == b.first for a, b in zip(plan.stages, plan.stages[1:], strict=False))
    used = [device for stage in plan.stages for device in stage.devices]
    assert len(set(used)) == len(used)
    assert set(used) <= set(range(devices))


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("seed", range(24))
def test_no_plan_has_a_lower_bottleneck(seed: int, levels: int) -> None:
    profile = _random_profile(seed, most=7 - levels)
    nodes, per_node = (1, seed % 4 + 1) if levels == 1 else (seed % 2 + 2, seed % 3 + 1)
    plan = pipedream_plan(profile, _cluster(nodes, per_node))
    machines, rate, below = (per_node, NODE, None) if levels == 1 else (nodes, NETWORK, (per_node, NODE))
    slow, count = _Slow(profile), len(profile.layers)
    least = min(slow.least(0, count, used, rate, below) for used in range(1, machines + 1))
    assert plan.bottleneck_s == pytest.approx(least, rel=1e-12)
    _check_shape(plan, count, nodes * per_node)
    stages = [(stage.stop, stage.replicas) for stage in plan.stages]
    cuts, widths = (list(each) for each in zip(*stages, strict=True))
    assert levels == 2 or (cuts, widths) in list(_pipelines(0, count, sum(widths)))


def test_stages_of_a_node_lie_at_the_same_places_of_all_nodes_that_share_the_layers() -> None:
    lines = [
        "node0 -- a -- forward_compute_time=8, backward_compute_time=8, activation_size=1, parameter_size=0",
        "node1 -- b -- forward_compute_time=4, backward_compute_time=4, activation_size=1, parameter_size=1e6",
        "\tnode0 -- node1",
    ]
    plan = pipedream_plan(pipedream_profile("\n".join(lines), Path("two.txt")), _cluster(2, 3, 1e6, 1e9))
    assert [stage.devices for stage in plan.stages] == [(0, 1, 3, 4), (2, 5)]
    assert plan.bottleneck_s == pytest.approx((0.008 + 4 * 1e6 / (2 * 1e9) / 3) / 2)
    assert plan.one_device_s == pytest.approx(0.024)


CLUSTERS = {
    "4 (": _cluster(1, 4, 1e9),
    "16 flat": _cluster(1, 16, 1e9),
    "A 4x4": _cluster(4, 4, 10e9, 1.25e9),
    "B 8x2": _cluster(2, 8, 25e9, 3.125e9),
}


@pytest.mark.skipif("AUTOPAR_DATA" not in os.environ, reason="AUTOPAR_DATA names no folder of published data")
def test_no_bottleneck_is_above_that_of_pipedreams_own_optimizer() -> None:
    folder = Path(os.environ["AUTOPAR_DATA"])
    with (folder / "reference_numbers.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["planner"] == "pipedream"]
    compared = 0
    for row in rows:
        if row["setting"].endswith(" PPcomm"):
            path = folder / "pipedream" / f"{row['model']}.txt"
            cluster = next(each for name, each in CLUSTERS.items() if row["setting"].startswith(name))
            profile = pipedream_profile(path.read_text(), path)
            plan = pipedream_plan(profile, cluster)
            assert plan.bottleneck_s <= float(row["value"]) * (1 + 1e-9), row
            assert plan.data_parallel_s == pytest.approx(float(row["extra"].split()[-1]) * float(row["value"]), 1e-9)
            compared += 1
    assert compared == 12
