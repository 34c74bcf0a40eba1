"""Problems whose best plans may have stages on devices of several kinds."""

import random
from dataclasses import replace

from autopar.formats.cluster import Cluster
from autopar.formats.profile import Profile
from autopar.planner import PlanOptions
from autopar.planner.candidate import Candidate
from autopar.planner.costs.model import CostModel
from random_problems import random_cluster, random_profile, two_kinds
from searched import searched


def mixed_problem(seed: int) -> tuple[Profile, Cluster, PlanOptions]:
    """Two or three devices of two kinds, every second time with too little memory for the best plan."""
    rng = random.Random(seed)
    profile = random_profile(seed, most_layers=3, batches=(4, 5) if seed % 3 else (3, 6))
    profile, cluster = two_kinds(profile, random_cluster(seed, rng.choice((2, 3, 3))), seed)
    options = PlanOptions(gpus=len(cluster.devices), gap=0.0)
    if seed % 2 == 0:
        return profile, cluster, options
    return (
        profile,
        cluster,
        replace(options, memory_bytes=int(most_held(profile, cluster, options) * rng.choice((0.6, 0.8, 0.95)))),
    )


def uneven_problem(seed: int) -> tuple[Profile, Cluster, PlanOptions]:
    """Three devices of two kinds, of which each has memory of its own, some too little for the best plan."""
    rng = random.Random(seed)
    profile, cluster = two_kinds(random_profile(seed, most_layers=3, batches=(4, 6)), random_cluster(seed, 3), seed)
    options = PlanOptions(gpus=3, gap=0.0)
    most = most_held(profile, cluster, options)
    devices = (
        each.model_copy(update={"memory_bytes": int(most * rng.choice((0.5, 0.8, 1.0)))}) for each in cluster.devices
    )
    return profile, cluster.model_copy(update={"devices": tuple(devices)}), options


def three_kinds_problem(seed: int) -> tuple[Profile, Cluster, PlanOptions]:
    """Three or four devices of three kinds, at least one of each."""
    rng = random.Random(seed)
    profile, cluster = random_profile(seed, most_layers=2, batches=(4, 6)), random_cluster(seed, rng.choice((3, 4)))
    others = []
    for name, at in (("other", seed), ("third", seed + 1000)):
        (made,) = two_kinds(profile, cluster, at)[0].others
        others.append(made.model_copy(update={"device": made.device.model_copy(update={"name": name})}))
    types = ["test", "other", "third", rng.choice(("test", "other", "third"))][: len(cluster.devices)]
    rng.shuffle(types)
    devices = (each.model_copy(update={"type": name}) for each, name in zip(cluster.devices, types, strict=True))
    options = PlanOptions(gpus=len(types), gap=0.0, shard=rng.choice(("none", "optimizer")))
    return (
        profile.model_copy(update={"others": tuple(others)}),
        cluster.model_copy(update={"devices": tuple(devices)}),
        options,
    )


def most_held(profile: Profile, cluster: Cluster, options: PlanOptions) -> int:
    """Return what the best plan holds at most on a device."""
    found = searched(profile, cluster, options)[0].fastest
    assert found is not None
    return max(CostModel(profile, cluster, options).peak_bytes(found.candidate))


def mixed(costs: CostModel, candidate: Candidate) -> list[int]:
    """Return the stages that have devices of several kinds."""
    return [at for at, stage in enumerate(candidate.stages) if costs.is_mixed(stage)]
