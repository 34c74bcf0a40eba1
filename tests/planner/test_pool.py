"""Pools against plain bookkeeping, and policies on pictures."""

import random

import numpy as np
import pytest

from autopar.formats.cluster import Cluster
from autopar.planner import PlanOptions
from autopar.planner.costs.model import CostModel
from autopar.planner.peers.dapple import choose, reachable
from autopar.planner.pool import DeviceGroup, Pool, every_way, groups_of, policy_choices
from random_problems import hierarchy, random_profile


def _groups(sizes: tuple[int, ...]) -> list[DeviceGroup]:
    """Nodes of some sizes; those of one size that are neighbours are alike."""
    found: list[DeviceGroup] = []
    for size in sizes:
        start = sum(len(group.devices) for group in found)
        same = found and len(found[-1].devices) == size
        found.append(DeviceGroup(tuple(range(start, start + size)), found[-1].alike if same else len(found)))
    return found


NODES = (((2, 2), (1,)), ((3, 1), ()), ((2, 2, 2), ()), ((1, 1, 1), (2, 1)), ((4,), (2,)), ((5, 2), ()))
"""Of devices of two kinds."""


def _pools() -> list[tuple[list[DeviceGroup], list[DeviceGroup], Pool]]:
    found = []
    for first, second in NODES:
        groups = _groups(first)
        start = sum(first)
        others = [DeviceGroup(tuple(start + at for at in group.devices), group.alike) for group in _groups(second)]
        kinds = {0: groups, 1: others} if others else {0: groups}
        found += [(groups, others, Pool(kinds, most)) for most in (0, 5, 60, 10_000)]
    return found


def test_states_ascend_and_moves_are_the_variants_of_all() -> None:
    richest = 0
    for groups, others, pool in _pools():
        every = {kind: [d for group in own for d in group.devices] for kind, own in enumerate((groups, others)) if own}
        assert pool.remaining(0) == sorted(device for own in every.values() for device in own)
        assert pool.remaining(pool.empty) == []
        for state in range(pool.states):
            for kind, own in every.items():
                left = [device for device in own if device in pool.remaining(state)]
                assert pool.kind_devices_left(state, kind) == len(left)
                for width in range(1, len(left) + 1):
                    variants = pool.variants(state, ((kind, width),))
                    assert pool.devices(state, ((kind, width),)) == tuple(left[:width])
                    assert [variant for variant, _ in variants][:1] == [0]
                    for variant, after in variants:
                        devices = pool.devices(state, ((kind, width),), variant)
                        assert after > state
                        assert variant or after == pool.take(state, ((kind, width),))
                        assert len(set(devices)) == width
                        assert set(devices) <= set(left)
                        assert not set(devices) & set(pool.remaining(after))
                    richest += len(variants) > 1
    assert richest > 100
    for groups, others, pool in _pools():
        for kind in pool.kinds:
            count = pool.kind_devices_left(0, kind)
            assert count == sum(len(group.devices) for group in (groups, others)[kind])
            for width in range(1, count + 1):
                moves = pool.moves(((kind, width),))
                for state in range(pool.states):
                    there = [(variant, int(after[state])) for variant, after in enumerate(moves) if after[state] >= 0]
                    few = width > pool.kind_devices_left(state, kind)
                    found = [] if few else pool.variants(state, ((kind, width),))
                    assert there == found


def test_alike_nodes_are_gone_through_once_and_policies_take_what_is_asked() -> None:
    """Histories of what stages took, told apart by all but the names of alike nodes, and found by brute force."""
    for sizes in ((2, 2), (1, 1, 1), (2, 2, 1), (1, 2, 2)):
        groups = _groups(sizes)
        found, every = (_histories(groups, sizes, restricted=restricted) for restricted in (True, False))
        unnamed = {_unnamed(groups, history) for history in found}
        assert {_unnamed(groups, history) for history in every} == unnamed
        assert len(unnamed) == len(set(found)) < len(every)
    groups = {0: _groups((8, 8))}
    assert [Pool(groups, most).complete for most in (100, 5_000)] == [False, True]
    for seed in range(200):
        rng = random.Random(seed)
        sizes = [rng.randint(1, 6) for _ in range(rng.randint(1, 5))]
        free = [rng.randint(0, size) for size in sizes]
        if not sum(free):
            continue
        count = rng.randint(1, sum(free))
        for taken in policy_choices(free, sizes, count):
            assert sum(taken) == count
            assert all(0 <= one <= most for one, most in zip(taken, free, strict=True)), f"seed {seed}"
    # One node leaves no choice but the number; a stage takes no more devices than a micro-batch has samples.
    assert choose((5,), (8,), 8).free_after == [(4,), (3,), (2,), (1,)]
    assert reachable((8,), 1000) == 8
    assert choose((8, 8), (8, 8), 3).groups.widths.max() == 3


History = tuple[tuple[int, ...], ...]


def _histories(groups: list[DeviceGroup], free: tuple[int, ...], *, restricted: bool) -> list[History]:
    found: list[History] = [()]
    for taken in every_way(groups, free) if restricted else np.ndindex(*(count + 1 for count in free)):
        if any(taken):
            left = tuple(one - other for one, other in zip(free, taken, strict=True))
            found += [(tuple(taken), *rest) for rest in _histories(groups, left, restricted=restricted)]
    return found


def _unnamed(groups: list[DeviceGroup], history: History) -> object:
    """What each node gave to the stages, nodes of a run in the order in which stages came to use them."""
    columns = [tuple(taken[at] for taken in history) for at in range(len(groups))]

    def begun(at: int) -> tuple[int, int, int]:
        first = next((turn for turn, count in enumerate(columns[at]) if count), len(history))
        return groups[at].alike, first, at

    return tuple(columns[at] for at in sorted(range(len(groups)), key=begun))


@pytest.mark.parametrize(
    ("free", "count", "fresh", "append", "scatter"),
    [
        # Nodes of 8; 4 of node 0 and 2 of node 1 are taken.
        ((4, 6, 8), 6, (0, 0, 6), (4, 2, 0), (3, 3, 0)),
        # more than the fresh node has: what is left comes from the first that is begun
        ((4, 6, 8), 10, (2, 0, 8), (4, 6, 0), (4, 6, 0)),
        # nothing is taken yet: scattering takes of all
        ((8, 8, 8), 4, (4, 0, 0), (4, 0, 0), (2, 1, 1)),
        # scattering goes on with fresh nodes once the begun ones are used up
        ((1, 8, 8), 4, (0, 4, 0), (1, 3, 0), (1, 2, 1)),
        # a node without any left gives none
        ((0, 5, 8), 3, (0, 0, 3), (0, 3, 0), (0, 3, 0)),
    ],
)
def test_each_policy_takes_what_its_paper_says(
    free: tuple[int, ...], count: int, fresh: tuple[int, ...], append: tuple[int, ...], scatter: tuple[int, ...]
) -> None:
    assert policy_choices(free, (8, 8, 8), count) == list(dict.fromkeys((fresh, append, scatter)))


def test_nodes_are_alike_only_where_nothing_tells_them_apart() -> None:
    cluster = hierarchy(3, [2, 2, 2, 2], racks=1)
    profile = random_profile(1)

    def runs(cluster: Cluster) -> list[int]:
        return [group.alike for group in groups_of(CostModel(profile, cluster, PlanOptions()))[0]]

    def changed(at: int, **update: object) -> Cluster:
        devices = list(cluster.devices)
        devices[at] = devices[at].model_copy(update=update)
        return cluster.model_copy(update={"devices": tuple(devices)})

    assert runs(cluster) == [0, 0, 0, 0]
    assert runs(changed(2, memory_bytes=2**30)) == [0, 1, 2, 3, 3]
    shared = tuple(link.model_copy(update={"shared_by": 3}) for link in cluster.links)
    assert runs(cluster.model_copy(update={"links": shared})) == [0, 0, 0, 0]
    racked = [*(link for link in shared if link.level != "rack"), shared[0].model_copy(update={"level": "rack"})]
    # Eight devices of a rack on ports of three each: the first node has its port with half of the second.
    assert runs(cluster.model_copy(update={"links": tuple(racked)})) == [0, 1, 2, 3]
