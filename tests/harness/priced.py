"""Prices of random problems, in small or in two nodes."""

import random

from autopar.formats.cluster import Cluster, Device
from autopar.options.plan import PlanOptions
from autopar.planner.costs.model import CostModel
from autopar.planner.peers.prices import Prices
from random_problems import random_cluster, random_profile, two_kinds


def nodes_of(cluster: Cluster, sizes: tuple[int, ...]) -> Cluster:
    """Return a cluster with so many devices in its nodes."""
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    devices = [Device(type="cpu", memory_bytes=2**34, node=node) for node in nodes]
    return cluster.model_copy(update={"devices": tuple(devices)})


def prices_of(seed: int, sizes: tuple[int, ...], most_layers: int = 5) -> Prices:
    """Return the prices of a random profile on nodes of given sizes, in a random micro-batch count."""
    devices = sum(sizes)
    profile = random_profile(seed, most_layers=most_layers, batches=(4, 6, 8))
    costs = CostModel(profile, nodes_of(random_cluster(seed, devices), sizes), PlanOptions(gpus=devices))
    return Prices(costs, random.Random(seed).choice([count for count in (1, 2, 4) if costs.batch % count == 0]))


def mixed(seed: int, devices: int, limited: bool = True) -> CostModel:
    """Two kinds of devices in one or two nodes, with memory that may be too little for some stages, or for all."""
    rng = random.Random(seed)
    profile = random_profile(seed, most_layers=6, batches=(4, 6, 8), skips=0.0)
    profile, cluster = two_kinds(profile, random_cluster(seed, devices), seed)
    if seed % 2 and devices % 2 == 0:
        # A node of each kind: of such, workers mostly cut differently.
        nodes = enumerate([(0, "test")] * (devices // 2) + [(1, "other")] * (devices // 2))
        halves = [cluster.devices[at].model_copy(update={"node": node, "type": kind}) for at, (node, kind) in nodes]
        cluster = cluster.model_copy(update={"devices": tuple(halves)})
    if limited:
        whole = sum(4 * layer.parameters_bytes + layer.costs[-1].saved_bytes for layer in profile.layers)
        sizes = {kind: max(1, int(whole * rng.choice([0.3, 0.6, 1.0, 2.0]))) for kind in ("test", "other")}
        listed = tuple(each.model_copy(update={"memory_bytes": sizes[each.type]}) for each in cluster.devices)
        cluster = cluster.model_copy(update={"devices": listed})
    return CostModel(profile, cluster, PlanOptions(gpus=devices))
