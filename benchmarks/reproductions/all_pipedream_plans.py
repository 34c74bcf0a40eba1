"""PipeDream's objective by trying all plans: what the dynamic program in ``pipedream.py`` is held against."""

import math
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from autopar.formats.cluster import Cluster, Device, Link
from autopar.formats.profile import Profile
from autopar.interop.pipedream import pipedream_profile
from reproductions.pipedream import pipedream_plan

NODE, NETWORK = 7e9, 2e9


def nodes_of(nodes: int, per_node: int, node: float = NODE, network: float = NETWORK) -> Cluster:
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

    def least(self, first: int, stop: int, machines: int, rate: float, below: tuple[int, float] | None = None) -> float:
        """The least bottleneck of all pipelines on all of the machines, each a device or a node of ``below``."""

        @cache
        def stage_s(begin: int, end: int, used: int) -> float:
            layers = self.layers[begin:end]
            seconds = sum(layer.costs[0].forward_s + layer.costs[0].backward_s for layer in layers)
            seconds = seconds if below is None else self.least(begin, end, *below)
            sent_s = 4 * (used - 1) * sum(layer.parameters_bytes for layer in layers) / (rate * used)
            if begin == first:
                return (seconds + sent_s / (1 if below is None else below[0])) / used
            crossing = max(self.crossing(begin), self.crossing(end) if end < len(self.layers) else 0)
            return max((seconds + sent_s) / used, 2 * crossing / (rate * used))

        return min(
            max(map(stage_s, (first, *cuts), cuts, stages)) for cuts, stages in _pipelines(first, stop, machines)
        )


def _pipelines(first: int, stop: int, machines: int) -> Iterator[tuple[list[int], list[int]]]:
    """Every way to cut layers into stages that use all machines: where stages stop, and their machines."""
    yield [stop], [machines]
    for cut in range(first + 1, stop):
        for used in range(1, machines):
            for cuts, stages in _pipelines(first, cut, machines - used):
                yield [*cuts, stop], [*stages, used]


def check_pipedream(seeds: Sequence[int], levels: int) -> None:
    """See that no plan on so many levels of machines has a lower bottleneck."""
    for seed in seeds:
        profile = _random_profile(seed, most=7 - levels)
        nodes, per_node = (1, seed % 4 + 1) if levels == 1 else (seed % 2 + 2, seed % 3 + 1)
        plan = pipedream_plan(profile, nodes_of(nodes, per_node))
        machines, rate, below = (per_node, NODE, None) if levels == 1 else (nodes, NETWORK, (per_node, NODE))
        slow, count = _Slow(profile), len(profile.layers)
        least = min(slow.least(0, count, used, rate, below) for used in range(1, machines + 1))
        assert math.isclose(plan.bottleneck_s, least, rel_tol=1e-12)
        cuts, widths = [stage.stop for stage in plan.stages], [stage.replicas for stage in plan.stages]
        assert [stage.first for stage in plan.stages] + [count] == [0, *cuts]
        assert len({device for stage in plan.stages for device in stage.devices}) == sum(widths) <= nodes * per_node
        assert levels == 2 or (cuts, widths) in list(_pipelines(0, count, sum(widths)))
