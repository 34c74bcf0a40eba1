"""Where stages stand: the search against an oracle of all ways to take devices."""

import random
from dataclasses import replace

import numpy as np
import pytest

from autopar.formats.cluster import Cluster, Device, Link
from autopar.formats.profile import Profile
from autopar.planner import PlanOptions, placement, plan
from autopar.planner.costs.model import CostModel
from autopar.planner.pool import in_order
from autopar.planner.simulator.simulate import Simulator
from in_parts import in_parts
from random_problems import hierarchy, random_profile, two_kinds, with_curves
from searched import agreed, searched

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


@pytest.mark.some(1)
@pytest.mark.parametrize("part", range(27))
def test_an_exact_search_finds_the_fastest_of_all_placements(part: int) -> None:
    compared = 0
    for seed in range(3 * part, 3 * (part + 1)):
        profile, cluster, options = _instance(seed)
        if seed % 4 == 1:
            cluster = _uneven(profile, cluster, options, seed)
        compared += agreed(profile, cluster, options, seed).fastest is not None
    assert compared >= 1


@pytest.mark.some(1)
@pytest.mark.parametrize("part", range(5, 10))
def test_an_exact_search_knows_how_stages_fill_nodes(part: int) -> None:
    """Four replicas may stand two by two, or three and one, and reduce much."""
    for seed in range(6 * part, 6 * (part + 1)):
        cluster = with_curves(hierarchy(seed, [2, 2] if seed % 3 else [3, 1]), seed)
        agreed(random_profile(seed, most_layers=2, batches=(4,)), cluster, PlanOptions(gap=0.0, recompute="none"), seed)


@pytest.mark.some(2)
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
            patch.setattr("autopar.planner.pool._MOST_WORK_WHEN_EXACT", most * len(profile.layers) ** 2)
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
    monkeypatch.setattr("autopar.planner.pool._MOST_WORK", 0)
    hasty = plan(profile, cluster, replace(options, gap=0.02))
    assert any("not all placements on nodes were searched" in note for note in hasty.notes)
    devices = tuple(Device(type="cpu", memory_bytes=size, node=at // 2) for at, size in enumerate((4, 2, 3, 3, 5)))
    links = tuple(Link(level=level, latency_s=0.0, bytes_per_s=1e9) for level in ("node", "network"))
    plain = Cluster(devices=devices, links=links)

    def found(cluster: Cluster, few: int) -> list[list[placement.StagePlace]]:
        monkeypatch.setattr(placement, "FEW_STATES", few)
        costs = CostModel(random_profile(0), cluster, PlanOptions())
        places = placement.Places(costs, in_order(costs.kind_of))
        moves = [(width, move) for width in range(1, 6) for move in places.moves(((0, width),))]
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
                        places = placement.Places(costs, in_order(costs.kind_of))
                        (move,) = places.moves(((0, width),), team)
                        known = list(places.stage_places.get((width // team, team), ()))
                        here = np.flatnonzero(move.after < places.pool.states).tolist()
                        found.append([(at, move.after[at], known[move.place[at]]) for at in here])
                    assert found[0] == found[1], f"seed {seed}"
                    alone = len(nodes) - width + 1
                    assert not across or len(found[0]) == alone
                    crossing += len(found[0]) < alone
    assert across or crossing > 50
