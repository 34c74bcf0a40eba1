"""Piper's objective by trying all plans, straight from its file: what the search in ``piper.py`` is held against."""

import json
import math
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from autopar.errors import InfeasibleError
from autopar.formats.cluster import Cluster, Device, Link
from reproductions.piper import PiperPlan, piper_plan
from reproductions.piper_files import PiperProfile, piper_profile

BANDWIDTH = 1e3


def _cluster(devices: int, memory_bytes: int) -> Cluster:
    link = Link(level="node", latency_s=0.0, bytes_per_s=BANDWIDTH)
    return Cluster(devices=(Device(type="A100", memory_bytes=memory_bytes),) * devices, links=(link,))


def _random_file(seed: int) -> dict[str, Any]:
    """Edges that skip, options that differ in one thing or in all, groups of two that some layers cannot form."""
    rng = random.Random(seed)
    count = rng.randint(1, 4)
    edges = [(a, b) for b in range(1, count) for a in range(b) if rng.random() < (0.9 if a == b - 1 else 0.3)]
    alike = rng.random() < 0.5
    nodes = []
    for node in range(count):
        ways: dict[str, list[dict[str, Any]]] = {}
        for group in (1, 2) if rng.random() < 0.8 else (1,):
            exchanged = [rng.choice([0, rng.randint(1, 400)]) for _ in range(2)]
            parameters = rng.choice([0, rng.randint(1, 1000)])
            ways[str(group)] = []
            for option in range(rng.randint(1, 3)):
                if not alike:
                    exchanged = [rng.choice([0, rng.randint(1, 400)]) for _ in range(2)]
                    parameters = rng.randint(0, 1000)
                ways[str(group)].append(
                    {
                        "id": ["vanilla", "activation recomp", "other"][option],
                        "timePerSample": rng.uniform(0.1, 2) / group,
                        "parameterSize": parameters,
                        "memoryUsageA": rng.randint(0, 60),
                        "memoryUsageB": rng.randint(0, 100),
                        "syncTimeFw": {str(a): exchanged[0] for a, b in edges if b == node},
                        "syncTimeBw": {str(b): exchanged[1] for a, b in edges if a == node},
                    }
                )
        nodes.append({"id": node, "name": "layer", "TMPCs": ways})
    return {
        "maxDevices": 6,
        "maxMemoryPerDevice": 1000,
        "bandwidth": BANDWIDTH,
        "mbsInBatch": rng.choice([1, 2, 3, 4, 6, 12]),
        "nodes": nodes,
        "edges": [{"sourceId": a, "destId": b, "communicationCost": rng.randint(0, 500)} for a, b in edges],
    }


class _Slow:
    """Piper's formulas, straight from a file, for nodes in the order of the profile."""

    def __init__(self, content: dict[str, Any], profile: PiperProfile, memory: int) -> None:
        nodes = {node["id"]: node for node in content["nodes"]}
        self.nodes = [nodes[int(layer.name.split(".")[1])] for layer in profile.layers]
        self.edges, self.memory = content["edges"], memory
        self.bandwidth, self.batch = content["bandwidth"], content["mbsInBatch"]

    def stage_s(self, first: int, stop: int, replicas: int, ways: list[dict[str, Any]], in_flight: int) -> float:
        """Seconds of a stage; infinite where it does not fit."""
        inside = {node["id"] for node in self.nodes[first:stop]}
        crossing = memory = seconds = synchronised = 0.0
        for node, way in zip(self.nodes[first:stop], ways, strict=True):
            seconds += way["timePerSample"]
            memory += way["memoryUsageA"] * in_flight + way["memoryUsageB"]
            synchronised += 4 * (replicas - 1) * way["parameterSize"] / replicas / self.batch
            for edge in self.edges:
                source, target = edge["sourceId"], edge["destId"]
                if target == node["id"] and source not in inside:
                    crossing += 2 * (edge["communicationCost"] + way["syncTimeFw"][str(source)])
                if source == node["id"] and target not in inside:
                    crossing += 2 * (edge["communicationCost"] + way["syncTimeBw"][str(target)])
        if memory > self.memory:
            return math.inf
        return (crossing / replicas + synchronised) / self.bandwidth + seconds / replicas

    def least_s(self, stop: int, devices: int, replicas: int, most: int) -> float:
        """Least bottleneck of the layers before ``stop``; ``devices`` are left, ``replicas`` stand behind."""
        if stop == 0:
            return 0.0
        least = math.inf
        for first, group in product(range(stop), (1, 2)):
            ways = [node["TMPCs"].get(str(group), []) for node in self.nodes[first:stop]]
            for count in range(1, devices // group + 1):
                if self.batch % count == 0 and replicas + count <= most:
                    in_flight = math.ceil((replicas + count) / count)
                    stage_s = min(
                        (self.stage_s(first, stop, count, list(chosen), in_flight) for chosen in product(*ways)),
                        default=math.inf,
                    )
                    if stage_s < least:
                        before_s = self.least_s(first, devices - group * count, replicas + count, most)
                        least = min(least, max(stage_s, before_s))
        return least

    def check(self, plan: PiperPlan, devices: int) -> None:
        """Hold a plan against the rules, and its numbers against the formulas."""
        behind = 0
        for stage in reversed(plan.stages):
            behind += stage.replicas
            nodes = self.nodes[stage.first : stage.stop]
            ways = [
                next(way for way in node["TMPCs"][str(stage.tensor_parallel)] if way["id"] == name)
                for node, name in zip(nodes, stage.options, strict=True)
            ]
            assert stage.recompute == tuple("recomp" in name for name in stage.options)
            assert stage.in_flight == math.ceil(behind / stage.replicas)
            stage_s = self.stage_s(stage.first, stage.stop, stage.replicas, ways, stage.in_flight)
            assert math.isclose(stage.seconds, stage_s, rel_tol=1e-12)
            assert stage.memory_bytes <= self.memory
        assert behind <= self.batch
        assert plan.devices <= devices
        assert [stage.first for stage in plan.stages] == [0, *(stage.stop for stage in plan.stages[:-1])]
        assert plan.bottleneck_s == max(stage.seconds for stage in plan.stages)


def check_piper(seeds: Sequence[int]) -> tuple[int, int, int]:
    """See that no plan has a lower bottleneck, and none is missed; count those found, without, and bound by memory."""
    found = infeasible = bound_by_memory = 0
    for seed in seeds:
        content = _random_file(seed)
        profile = piper_profile(json.dumps(content), Path("random.json"))
        rng = random.Random(seed + 1000)
        devices, memory = rng.randint(1, 6), rng.randint(40, 300)
        slow = _Slow(content, profile, memory)
        least = slow.least_s(len(slow.nodes), devices, 0, min(devices, slow.batch))
        try:
            plan = piper_plan(profile, _cluster(devices, memory))
        except InfeasibleError:
            assert least == math.inf, seed
            infeasible += 1
            continue
        assert math.isclose(plan.bottleneck_s, least, rel_tol=1e-12), seed
        slow.check(plan, devices)
        found += 1
        bound_by_memory += piper_plan(profile, _cluster(devices, 10**9)).bottleneck_s < least * (1 - 1e-9)
    return found, infeasible, bound_by_memory
