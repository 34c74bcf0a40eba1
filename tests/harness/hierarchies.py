"""Random clusters of uneven nodes in racks, with several links per level."""

import random

from autopar.formats.cluster import LEVELS, Cluster, Device, Level, Link


def hierarchy(seed: int, sizes: list[int], *, racks: int = 1, more_links: bool = False) -> Cluster:
    """Nodes of so many devices, in so many racks; each level is mostly slower than the one below it.

    With ``more_links``, a level may have a second link of less latency and less bandwidth.
    """
    rng = random.Random(seed + 5_000_000)
    levels = [level for level in LEVELS if level != "rack" or racks > 1 or rng.random() < 0.3]
    rack_of = [rng.randrange(racks) if "rack" in levels else 0 for _ in sizes]
    rate, latency = 10 ** rng.uniform(7.5, 10.5), rng.choice([0.0, 2e-5, 3e-4])
    links: list[Link] = []
    for level in levels:
        links.append(Link(level=level, latency_s=latency, bytes_per_s=rate))
        if more_links and rng.random() < 0.7:
            links.insert(0, _second(rng, level, latency, rate))
        rate, latency = rate / rng.choice([1.0, 3.0, 10.0]), latency * rng.choice([1.0, 3.0])
    devices = [
        Device(type="cpu", memory_bytes=2**34, node=node, rack=rack_of[node])
        for node, size in enumerate(sizes)
        for _ in range(size)
    ]
    return Cluster(devices=tuple(devices), links=tuple(links))


def _second(rng: random.Random, level: Level, latency: float, rate: float) -> Link:
    return Link(
        level=level, latency_s=latency / 10, bytes_per_s=rate / rng.choice([2, 5]), shared_by=rng.choice([1, 2])
    )
