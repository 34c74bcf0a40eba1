"""Pools and reserves against plain bookkeeping, and their ways of taking devices against brute force."""

from __future__ import annotations

import numpy as np

from autopar.planner.placement.pool import DeviceGroup, Pool, TakenCounts, by_policies, enumerate_states, every_way


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
    for first, second in (
        ((2, 2), (1,)),
        ((3, 1), ()),
        ((2, 2, 2), ()),
        ((1, 1, 1), (2, 1)),
        ((4,), (2,)),
        ((5, 2), ()),
    ):
        groups = _groups(first)
        start = sum(first)
        others = [
            DeviceGroup(tuple(start + device for device in group.devices), group.alike) for group in _groups(second)
        ]
        kinds = {0: groups, 1: others} if others else {0: groups}
        found += [(groups, others, Pool(kinds, most)) for most in (0, 5, 60, 10_000)]
    return found


def test_states_ascend_as_devices_are_taken_and_the_first_variant_is_cluster_order() -> None:
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
                    variants = pool.variants(state, kind, width)
                    assert pool.devices(state, kind, width) == tuple(left[:width])
                    assert [variant for variant, _ in variants][:1] == [0]
                    for variant, after in variants:
                        devices = pool.devices(state, kind, width, variant)
                        assert after == pool.take(state, kind, width, variant) > state
                        assert len(set(devices)) == width
                        assert set(devices) <= set(left)
                        assert not set(devices) & set(pool.remaining(after))
                    richest += len(variants) > 1
    assert richest > 100


def test_moves_are_the_variants_of_all_states() -> None:
    for groups, others, pool in _pools():
        for kind in pool.kinds:
            count = pool.kind_devices_left(0, kind)
            assert count == sum(len(group.devices) for group in (groups, others)[kind])
            for width in range(1, count + 1):
                moves = pool.moves(kind, width)
                for state in range(pool.states):
                    there = [(variant, int(after[state])) for variant, after in enumerate(moves) if after[state] >= 0]
                    found = pool.variants(state, kind, width) if width <= pool.kind_devices_left(state, kind) else []
                    assert there == found


def test_of_nodes_that_are_alike_every_way_is_gone_through_once() -> None:
    """Histories of what stages took, told apart by all but the names of alike nodes, and found by brute force."""
    for sizes in ((2, 2), (1, 1, 1), (2, 2, 1), (1, 2, 2)):
        groups = _groups(sizes)
        found = set(_histories(groups, sizes, restricted=True))
        every = list(_histories(groups, sizes, restricted=False))
        assert len(found) < len(every)
        assert {_unnamed(groups, history) for history in every} == {_unnamed(groups, history) for history in found}
        assert len({_unnamed(groups, history) for history in found}) == len(found)


History = tuple[tuple[int, ...], ...]


def _histories(groups: list[DeviceGroup], free: tuple[int, ...], *, restricted: bool) -> list[History]:
    found: list[History] = [()]
    some = every_way(groups, free) if restricted else np.ndindex(*(count + 1 for count in free))
    for taken in some:
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


def test_a_stage_may_begin_with_the_next_node_where_it_would_stand_in_fewer() -> None:
    chain = TakenCounts(_groups((3, 3, 2)), skip=True)
    assert chain.devices(1, 3, 0) == (1, 2, 3)
    assert chain.devices(1, 3, 1) == (3, 4, 5)
    assert [after.tolist() for after in chain.after(3)][1] == [-1, 6, 6, -1, -1, -1, -1, -1, -1]


def test_policies_lead_to_some_of_all_states() -> None:
    for sizes in ((2, 2), (3, 1, 2), (4, 4)):
        groups = _groups(sizes)
        some, every = enumerate_states(groups, by_policies, 10_000), enumerate_states(groups, every_way, 10_000)
        assert some is not None
        assert every is not None
        assert some.moves <= every.moves
        assert some.states <= every.states
    assert enumerate_states(_groups((4, 4)), every_way, 100) is None


def test_where_all_devices_are_to_be_used_none_is_skipped() -> None:
    groups = {0: _groups((8, 8))}
    assert [len(Pool(groups, 100, idle=idle).moves(0, 2)) for idle in (True, False)] == [2, 1]
    assert [Pool(groups, most).complete for most in (100, 5_000)] == [False, True]
