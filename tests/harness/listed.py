"""Problems whose clusters are listed in some order, and again in another."""

import random

from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from random_problems import hierarchy, random_profile, two_kinds, with_curves


def problem(seed: int, most_layers: int = 5, kinds: int = 2) -> tuple[Profile, Cluster]:
    """Up to three uneven nodes of up to three devices of one or two kinds, some with other memory."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
    cluster = hierarchy(seed, sizes, racks=rng.choice([1, 1, 2]))
    cluster = with_curves(cluster, seed) if seed % 2 else cluster
    profile = random_profile(seed, most_layers=most_layers, batches=(4, 6))
    if kinds > 1:
        profile, cluster = two_kinds(profile, cluster, seed)
    memory = [rng.choice([2**34, 2**34, 2**35]) for _ in cluster.devices]
    devices = [one.model_copy(update={"memory_bytes": size}) for one, size in zip(cluster.devices, memory, strict=True)]
    return profile, cluster.model_copy(update={"devices": tuple(devices)})


def relisted(cluster: Cluster, seed: int) -> Cluster:
    """The same machines in another order, with other numbers of nodes and racks."""
    rng = random.Random(seed)
    names = {}
    for key in ("node", "rack"):
        known = sorted({getattr(device, key) for device in cluster.devices})
        names[key] = dict(zip(known, rng.sample(known, len(known)), strict=True))
    devices = [
        device.model_copy(update={key: of[getattr(device, key)] for key, of in names.items()})
        for device in rng.sample(cluster.devices, len(cluster.devices))
    ]
    return cluster.model_copy(update={"devices": tuple(devices)})


def known(found: Plan) -> object:
    """All of a plan but where it stands."""
    stages = [stage.model_copy(update={"devices": ()}) for stage in found.stages]
    return stages, found.predicted, found.alternatives, found.micro_batches, found.schedule
