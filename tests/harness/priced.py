"""Prices of random problems, in small or in two nodes."""

from __future__ import annotations

import random

from autopar.formats.cluster import Cluster, Device
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions
from autopar.planner.peers.prices import Prices
from hierarchies import hierarchy
from random_problems import cost, gpt_profile, local_cluster, profile_of, random_cluster, random_profile, two_kinds

__all__ = [
    "cost",
    "gpt_profile",
    "hierarchy",
    "local_cluster",
    "nodes_of",
    "prices_of",
    "profile_of",
    "random_cluster",
    "random_profile",
    "two_kinds",
]


def nodes_of(cluster: Cluster, sizes: tuple[int, ...]) -> Cluster:
    """Return a cluster with so many devices in its nodes."""
    devices = [
        Device(type="cpu", memory_bytes=2**34, node=node) for node, size in enumerate(sizes) for _ in range(size)
    ]
    return cluster.model_copy(update={"devices": tuple(devices)})


def prices_of(seed: int, sizes: tuple[int, ...], most_layers: int = 5) -> Prices:
    """Return the prices of a random profile on nodes of given sizes, in a random micro-batch count."""
    devices = sum(sizes)
    profile = random_profile(seed, most_layers=most_layers, batches=(4, 6, 8))
    cluster = nodes_of(random_cluster(seed, devices), sizes)
    costs = CostModel(profile, cluster, PlanOptions(gpus=devices))
    return Prices(costs, random.Random(seed).choice([count for count in (1, 2, 4) if costs.batch % count == 0]))
