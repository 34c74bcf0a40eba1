"""Pools against plain bookkeeping, policies on pictures, and the search against an oracle of all ways to take them."""

import random
from dataclasses import replace

import numpy as np
import pytest

from autopar.formats.cluster import Cluster, Device, Link
from autopar.formats.profile import Profile
from autopar.planner import PlanOptions, placement, plan
from autopar.planner.costs.model import CostModel
from autopar.planner.peers.dapple import choose, reachable
from autopar.planner.placement import DeviceGroup, Pool, every_way
from autopar.planner.simulator.simulate import Simulator
from in_parts import in_parts
from random_problems import hierarchy, random_profile, two_kinds, with_curves
from searched import agreed, searched


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
        for taken in placement.policy_choices(free, sizes, count):
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
    assert placement.policy_choices(free, (8, 8, 8), count) == list(dict.fromkeys((fresh, append, scatter)))


SIZES = ([1, 2], [2, 2], [1, 1, 2], [3, 1], [2, 2, 2], [3, 2, 1], [1, 1, 1], [4, 2], [2, 1, 1])


def _instance(seed: int) -> tuple[Profile, Cluster, PlanOptions]:
    """Up to three uneven nodes of up to six devices, in up to three racks, some with several links or two kinds.

    In half of them it makes a difference how stages fill nodes.
    """
    rng = random.Random(seed)
    sizes = SIZES[seed % len(SIZES)]
    devices = sum(sizes)
    cluster = hierarchy(seed, sizes, racks=rng.choice([1, 1, 2, 3]), more_links=seed % 2 == 0)
    layers, batches = (4, (2, 3)) if devices < 5 else (3, (2,))
    cluster = with_curves(cluster, seed) if seed // 3 % 2 else cluster
    profile = random_profile(seed, most_layers=layers, batches=batches)
    if seed % 3 == 0:
        profile, cluster = two_kinds(profile, cluster, seed)
    asked = {"gpus": devices, "gap": 0.0, "recompute": "none", "use_all": rng.random() < 0.2}
    return profile, cluster, PlanOptions(**asked)  # type: ignore[arg-type]


def _uneven(profile: Profile, cluster: Cluster, options: PlanOptions, seed: int) -> Cluster:
    """Give some devices too little memory for the best plan without a limit."""
    best, _ = searched(profile, cluster, options)
    if best.fastest is None:
        return cluster
    peak = max(CostModel(profile, cluster, options).peak_bytes(best.fastest.candidate))
    rng = random.Random(seed)
    sizes = [int(peak * rng.choice([0.7, 0.95, 1.0, 2.0])) for _ in cluster.devices]
    devices = [one.model_copy(update={"memory_bytes": size}) for one, size in zip(cluster.devices, sizes, strict=True)]
    return cluster.model_copy(update={"devices": tuple(devices)})


@pytest.mark.some(2)
@pytest.mark.parametrize("part", range(27))
def test_an_exact_search_finds_the_fastest_of_all_placements(part: int) -> None:
    compared = 0
    for seed in range(3 * part, 3 * (part + 1)):
        profile, cluster, options = _instance(seed)
        if seed % 4 == 1:
            cluster = _uneven(profile, cluster, options, seed)
        compared += agreed(profile, cluster, options, seed).fastest is not None
    assert compared >= 1


def test_an_exact_search_knows_how_stages_fill_nodes() -> None:
    """Four replicas may stand two by two, or three and one, and reduce much."""
    for seed in range(30, 60):
        cluster = with_curves(hierarchy(seed, [2, 2] if seed % 3 else [3, 1]), seed)
        agreed(random_profile(seed, most_layers=2, batches=(4,)), cluster, PlanOptions(gap=0.0, recompute="none"), seed)


@pytest.mark.parametrize("most", [0, 5, 120])
def test_a_search_of_fewer_placements_finds_a_plan_of_theirs_and_never_less_than_the_least_of_all(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """With no moves to spare, stages take devices in cluster order; with some, by policies or from a node's start."""
    slower = 0
    for seed in range(6, 26, 2):
        profile, cluster, options = _instance(seed)
        if seed % 8 == 2:
            cluster = _uneven(profile, cluster, options, seed)
        exact, _ = searched(profile, cluster, options)
        with monkeypatch.context() as patch:
            patch.setattr("autopar.planner.placement._MOST_WORK_WHEN_EXACT", most * len(profile.layers) ** 2)
            best, result = searched(profile, cluster, options)
        if exact.fastest is None or best.fastest is None:
            assert best.fastest is None
            continue
        assert exact.step_s * (1 - 1e-9) <= best.step_s
        assert result.lower_bound_s == pytest.approx(best.step_s, rel=1e-9)
        costs = CostModel(profile, cluster, options)
        assert max(costs.shortfalls(best.fastest.candidate)) <= 0
        assert Simulator(costs).step_s(best.fastest.candidate) == pytest.approx(best.step_s, rel=1e-12)
        slower += best.step_s > exact.step_s * (1 + 1e-9)
    assert most or slower > 0


def test_nodes_are_alike_only_where_nothing_tells_them_apart() -> None:
    cluster = hierarchy(3, [2, 2, 2, 2], racks=1)
    profile = random_profile(1)

    def runs(cluster: Cluster) -> list[int]:
        return [group.alike for group in placement.groups_of(CostModel(profile, cluster, PlanOptions()))[0]]

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


def test_placements_left_out_are_said_and_states_looked_at_together_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = 0
    for seed in range(12):
        profile, cluster, options = _instance(seed)
        options = replace(options, use_all=False)
        found = plan(profile, cluster, options)
        assert not any("not all placements" in note for note in found.notes)
        nodes = {cluster.devices[device].node for device in found.devices}
        astray = len(nodes) > 1 and list(found.devices) != sorted(found.devices)
        assert astray == any("start rank i on the i-th device" in note for note in found.notes)
        apart += astray
    assert apart > 0
    monkeypatch.setattr("autopar.planner.placement._MOST_WORK", 0)
    hasty = plan(profile, cluster, replace(options, gap=0.02))
    assert any("not all placements on nodes were searched" in note for note in hasty.notes)
    devices = tuple(Device(type="cpu", memory_bytes=size, node=at // 2) for at, size in enumerate((4, 2, 3, 3, 5)))
    links = tuple(Link(level=level, latency_s=0.0, bytes_per_s=1e9) for level in ("node", "network"))
    plain = Cluster(devices=devices, links=links)

    def found(cluster: Cluster, few: int) -> list[list[placement.StagePlace]]:
        monkeypatch.setattr(placement, "FEW_STATES", few)
        costs = CostModel(random_profile(0), cluster, PlanOptions())
        places = placement.Places(costs, placement.in_order(costs.kind_of))
        moves = [(width, move) for width in range(1, 6) for move in places.moves(0, width)]
        known = {width: list(own) for (width, _), own in places.stage_places.items()}
        states = range(places.pool.states)
        return [[known[width][move.place[at]] for at in states if move.after[at] in states] for width, move in moves]

    for cluster in (plain, with_curves(plain, 0)):
        assert found(cluster, few=0) == found(cluster, few=300)
    filled = {known.place[2:] for own in found(with_curves(plain, 0), few=0) for known in own}
    assert filled == {(0, 0, 0), (2, 1, 1), (2, 1, 2), (2, 2, 2), (3, 1, 2)}


@pytest.mark.parametrize("across", [False, True])
def test_teams_that_are_looked_at_together_stand_as_each_by_itself(
    across: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossing = 0
    for seed in range(12):
        draw = random.Random(seed)
        nodes = sorted(draw.randrange(4) for _ in range(9))
        devices = tuple(Device(type="cpu", memory_bytes=draw.choice((3, 4)), node=node) for node in nodes)
        links = tuple(Link(level=level, latency_s=0.0, bytes_per_s=1e9) for level in ("node", "network"))
        plain = Cluster(devices=devices, links=links)
        profile = in_parts(random_profile(3), 0)
        for cluster in (plain, with_curves(plain, seed)):
            costs = CostModel(profile, cluster, PlanOptions(across_nodes=across))
            for team in (2, 4):
                for width in range(team, 10, team):
                    found = []
                    for few in (0, 300):
                        monkeypatch.setattr(placement, "FEW_STATES", few)
                        places = placement.Places(costs, placement.in_order(costs.kind_of))
                        (move,) = places.moves(0, width, team)
                        known = list(places.stage_places.get((width // team, team), ()))
                        here = np.flatnonzero(move.after < places.pool.states).tolist()
                        found.append([(at, move.after[at], known[move.place[at]]) for at in here])
                    assert found[0] == found[1], f"seed {seed}"
                    alone = len(nodes) - width + 1
                    assert not across or len(found[0]) == alone
                    crossing += len(found[0]) < alone
    assert across or crossing > 50
