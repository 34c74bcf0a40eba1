"""Levels of nodes and racks against those of every pair of devices."""

import random
from itertools import combinations

from autopar.formats.cluster import LEVELS, Cluster, Level
from autopar.hardware.topology import Topology, devices_of
from random_problems import hierarchy


def _plain_level(cluster: Cluster, devices: tuple[int, ...]) -> Level:
    """The widest level of any pair."""
    found: list[Level] = ["node"]
    for one, other in combinations([cluster.devices[device] for device in devices], 2):
        near = one.rack == other.rack and any(link.level == "rack" for link in cluster.links)
        found.append("node" if one.node == other.node else "rack" if near else "network")
    return max(found, key=LEVELS.index)


def test_the_level_of_devices_is_the_widest_of_any_two_and_levels_between_groups_are_those_of_their_pairs() -> None:
    seen = set()
    for seed in range(200):
        rng = random.Random(seed)
        cluster = hierarchy(seed, [rng.randint(1, 3) for _ in range(rng.randint(1, 4))], racks=rng.randint(1, 3))
        topology = Topology(cluster, cluster.devices)
        count = len(cluster.devices)
        some = tuple(rng.sample(range(count), rng.randint(1, count)))
        others = tuple(rng.sample(range(count), rng.randint(1, count)))
        assert topology.level(some) == _plain_level(cluster, some)
        assert topology.pair(some[0], others[0]) == _plain_level(cluster, (some[0], others[0]))
        pairs = {_plain_level(cluster, (one, other)) for one in some for other in others}
        assert topology.between(some, others) == pairs
        seen |= pairs
    assert seen == set(LEVELS)


def test_devices_stand_and_share_a_way_out_where_the_clusters_own_do() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        cluster = hierarchy(seed, [rng.randint(1, 3) for _ in range(rng.randint(1, 4))], racks=rng.randint(1, 3))
        listed = len(cluster.devices)
        topology = Topology(cluster, devices_of(cluster, 2 * listed + 1))
        some = [rng.randrange(2 * listed + 1) for _ in range(4)]
        among = topology.among(some)
        for one, other in combinations(range(4), 2):
            ends = some[one] % listed, some[other] % listed
            assert among.pair(one, other) == topology.pair(*ends) == _plain_level(cluster, ends), f"seed {seed}"
    shared = apart = 0
    for seed in range(100):
        rng = random.Random(seed)
        cluster = hierarchy(seed, [rng.randint(1, 3) for _ in range(rng.randint(2, 4))], racks=rng.randint(1, 3))
        topology = Topology(cluster, cluster.devices)
        for level in topology.levels[1:]:
            for one, other in combinations(range(len(cluster.devices)), 2):
                below = topology.levels.index(topology.pair(one, other)) < topology.levels.index(level)
                assert (topology.unit(one, level) == topology.unit(other, level)) == below, f"seed {seed}: {level}"
                shared, apart = shared + below, apart + (not below)
    assert min(shared, apart) > 50
