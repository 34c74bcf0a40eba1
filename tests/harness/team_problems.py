"""Small problems in which teams may run replicas, every plan of which can be simulated; by seeds."""

import random
from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.formats.cluster import Cluster
from autopar.formats.profile import Profile
from autopar.planner import PlanOptions, plan
from in_parts import in_parts
from random_problems import hierarchy, launched, problem, random_profile, two_kinds, with_curves

SIZES = (
    (3, 3, (1, 2, 3, 4), {}),
    (3, 4, (2, 4), {"recompute": "none"}),
    (4, 3, (2, 4), {"shard": "none"}),
    (2, 4, (2, 4), {}),
    (3, 4, (2,), {"shard": "optimizer"}),
    (5, 2, (2, 3), {}),
    (4, 4, (2,), {"shard": "none", "recompute": "none"}),
)
"""Most layers, devices, batches, and options."""


def team_problem(seed: int) -> tuple[Profile, Cluster, PlanOptions]:
    """Return a question, one in three on two kinds of device, two in three with less memory than its plan needs."""
    draw = random.Random(seed)
    layers, devices, batches, asked = draw.choice(SIZES)
    profile, cluster = problem(seed, devices, 3, most_layers=layers, batches=batches)
    profile = in_parts(profile, seed)
    schedule, splits = "gpipe" if seed % 4 == 3 else "1f1b", any(layer.splits for layer in profile.layers)
    options = PlanOptions(gpus=devices, gap=0.0, schedule=schedule, **asked)
    if splits and seed % 5 == 0 and len({device.type for device in cluster.devices}) == 1:
        options = replace(options, across_nodes=True)
    if seed % 3:
        peaks = plan(profile, cluster, options).predicted.peak_bytes
        options = replace(options, memory_bytes=max(1, int((0.95, 0.8, 0.6)[seed % 3] * max(peaks))))
    return profile, cluster, options


PLACED = (
    (3, [2, 2], 1, {"recompute": "none"}),
    (3, [2, 2], 2, {"shard": "none"}),
    (2, [1, 3], 1, {}),
    (2, [3, 2], 2, {"recompute": "none", "shard": "optimizer"}),
    (4, [2, 1], 1, {"shard": "none"}),
)
"""Most layers, devices of every node, racks, and options."""


def placed_team_problem(seed: int) -> tuple[Profile, Cluster, PlanOptions]:
    """Return a question on nodes in racks, with curves, launches, two kinds or teams across nodes; by turns."""
    draw = random.Random(seed + 17_000_000)
    layers, sizes, racks, asked = draw.choice(PLACED)
    cluster = hierarchy(seed, sizes, racks=racks, more_links=draw.random() < 0.3)
    profile = random_profile(seed, layers, (2, 4))
    if draw.random() < 0.5:
        cluster = with_curves(cluster, seed)
    if draw.random() < 0.3:
        profile = launched(profile, seed)
    if draw.random() < 0.3:
        profile, cluster = two_kinds(profile, cluster, seed)
    profile = in_parts(profile, seed)
    options = PlanOptions(gpus=sum(sizes), gap=0.0, schedule="1f1b", **asked)
    across = draw.random() < 0.4 and len({device.type for device in cluster.devices}) == 1
    if across and any(layer.splits for layer in profile.layers):
        options = replace(options, across_nodes=True)
    if draw.random() < 0.5:
        peaks = plan(profile, cluster, options).predicted.peak_bytes
        options = replace(options, memory_bytes=max(1, int(0.8 * max(peaks))))
    return profile, cluster, options


def planned_s(profile: Profile, cluster: Cluster, options: PlanOptions) -> float:
    """Return the step of a plan; infinite where nothing fits."""
    try:
        return plan(profile, cluster, options).predicted.step_s
    except InfeasibleError:
        return float("inf")
