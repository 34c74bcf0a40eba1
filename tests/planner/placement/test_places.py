"""Placement: the search against an oracle that goes through every way of taking devices."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autopar.formats.cluster import Cluster
from autopar.formats.profile import Profile
from autopar.planner import plan
from autopar.planner.bounds.chain import candidate_bound_s
from autopar.planner.candidate import families
from autopar.planner.compare import compare
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions
from autopar.planner.placement.places import groups_of
from autopar.planner.search.best_first import SearchResult, search
from autopar.planner.search.judge import Best
from autopar.planner.simulator.simulate import Simulator
from drawn import random_candidate
from hierarchies import hierarchy
from oracles.exhaustive import Exhausted, exhaust
from random_problems import random_profile, two_kinds

SIZES = ([1, 2], [2, 2], [1, 1, 2], [3, 1], [2, 2, 2], [3, 2, 1], [1, 1, 1], [4, 2], [2, 1, 1])


def _instance(seed: int) -> tuple[Profile, Cluster, PlanOptions]:
    """Up to three uneven nodes of up to six devices, in up to three racks, some with several links or two kinds."""
    rng = random.Random(seed)
    sizes = SIZES[seed % len(SIZES)]
    devices = sum(sizes)
    cluster = hierarchy(seed, sizes, racks=rng.choice([1, 1, 2, 3]), more_links=seed % 2 == 0)
    layers, batches = (4, (2, 3)) if devices < 5 else (3, (2,))
    profile = random_profile(seed, most_layers=layers, batches=batches)
    if seed % 3 == 0:
        profile, cluster = two_kinds(profile, cluster, seed)
    asked = {"gpus": devices, "gap": 0.0, "recompute": "none", "use_all": rng.random() < 0.2}
    return profile, cluster, PlanOptions(**asked)  # type: ignore[arg-type]


def _uneven(profile: Profile, cluster: Cluster, options: PlanOptions, seed: int) -> Cluster:
    """Give some devices too little memory for the best plan without a limit."""
    best, _ = _search(profile, cluster, options)
    if best.fastest is None:
        return cluster
    peak = max(CostModel(profile, cluster, options).peak_bytes(best.fastest.candidate))
    rng = random.Random(seed)
    devices = [
        device.model_copy(update={"memory_bytes": int(peak * rng.choice([0.7, 0.95, 1.0, 2.0]))})
        for device in cluster.devices
    ]
    return cluster.model_copy(update={"devices": tuple(devices)})


def _search(profile: Profile, cluster: Cluster, options: PlanOptions) -> tuple[Best, SearchResult]:
    costs = CostModel(profile, cluster, options)
    best = Best()
    return best, search(Simulator(costs), families(costs.batch, options), options, best)


def _exhaust(profile: Profile, cluster: Cluster, options: PlanOptions) -> tuple[Best, Exhausted]:
    best = Best()
    return best, exhaust(Simulator(CostModel(profile, cluster, options)), options, best)


@pytest.mark.slow
def test_an_exact_search_finds_the_fastest_of_all_placements() -> None:
    compared = moved = 0
    for seed in range(80):
        profile, cluster, options = _instance(seed)
        if seed % 4 == 1:
            cluster = _uneven(profile, cluster, options, seed)
        best, searched = _search(profile, cluster, options)
        oracle, exhausted = _exhaust(profile, cluster, options)
        if oracle.fastest is None:
            assert best.fastest is None, f"seed {seed}"
            continue
        assert best.step_s == pytest.approx(oracle.step_s, rel=1e-9), f"seed {seed}"
        assert searched.lower_bound_s == pytest.approx(oracle.step_s, rel=1e-9), f"seed {seed}"
        if searched.least_bound_s < best.step_s:
            assert searched.least_bound_s == pytest.approx(exhausted.least_bound_s, rel=1e-9), f"seed {seed}"
        compared += 1
        assert best.fastest is not None
        devices = [device for stage in best.fastest.candidate.stages for device in stage.devices]
        moved += devices != list(range(len(devices)))
    assert compared >= 63
    assert moved >= 20


def test_no_simulated_step_is_shorter_than_its_bound_wherever_stages_stand() -> None:
    tight = 0
    for seed in range(150):
        rng = random.Random(seed)
        cluster = hierarchy(seed, SIZES[seed % len(SIZES)], racks=1 + seed % 3, more_links=seed % 2 == 0)
        profile = random_profile(seed, most_layers=8, batches=(4, 6, 12))
        if seed % 5 == 0:
            profile, cluster = two_kinds(profile, cluster, seed)
        costs = CostModel(profile, cluster, PlanOptions())
        simulator = Simulator(costs)
        for _ in range(15):
            candidate = random_candidate(rng, costs)
            step_s, least_s = simulator.step_s(candidate), candidate_bound_s(costs, candidate)
            assert least_s <= step_s * (1 + 1e-9), f"seed {seed}: {candidate}"
            tight += least_s >= step_s * (1 - 1e-9)
    assert tight >= 300


@pytest.mark.parametrize("most", [0, 5, 120])
def test_a_search_of_fewer_placements_finds_a_plan_of_theirs_and_never_less_than_the_least_of_all(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """With no moves to spare, stages take devices in cluster order; with some, by policies or from a node's start."""
    slower = 0
    for seed in range(0, 60, 2):
        profile, cluster, options = _instance(seed)
        exact, _ = _search(profile, cluster, options)
        with monkeypatch.context() as patch:
            patch.setattr("autopar.planner.placement.places._MOST_WORK_WHEN_EXACT", most * len(profile.layers) ** 2)
            best, searched = _search(profile, cluster, options)
        if exact.fastest is None or best.fastest is None:
            assert best.fastest is None
            continue
        assert exact.step_s * (1 - 1e-9) <= best.step_s
        assert searched.lower_bound_s == pytest.approx(best.step_s, rel=1e-9)
        costs = CostModel(profile, cluster, options)
        assert candidate_bound_s(costs, best.fastest.candidate) <= best.step_s * (1 + 1e-9)
        assert Simulator(costs).step_s(best.fastest.candidate) == pytest.approx(best.step_s, rel=1e-12)
        slower += best.step_s > exact.step_s * (1 + 1e-9)
    assert most or slower > 0


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


@pytest.mark.slow
def test_no_plan_of_dapples_is_faster_on_nodes_and_racks() -> None:
    compared = behind = 0
    for seed in range(36):
        sizes = SIZES[seed % len(SIZES)]
        cluster = hierarchy(seed, sizes, racks=1 + seed % 3, more_links=seed % 2 == 0)
        profile = random_profile(seed, most_layers=5, batches=(6, 12))
        options = PlanOptions(gap=0.0, recompute="none", micro_batches=2)
        rows = {row.name: row.step_s for row in compare(profile, cluster, options).rows}
        step_s = plan(profile, cluster, options).predicted.step_s
        assert step_s == pytest.approx(rows["autopar"], rel=1e-9), f"seed {seed}"
        dapple_s = rows["DAPPLE"]
        if dapple_s is not None:
            assert step_s <= dapple_s * (1 + 1e-9), f"seed {seed}"
            compared += 1
            behind += dapple_s > step_s * (1 + 1e-6)
    assert compared >= 28
    assert behind >= 14


def test_a_plan_says_what_placements_were_left_out_and_where_ranks_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = 0
    for seed in range(20):
        profile, cluster, options = _instance(seed)
        options = replace(options, use_all=False)
        found = plan(profile, cluster, options)
        assert not any("not all placements" in note for note in found.notes)
        nodes = {cluster.devices[device].node for device in found.devices}
        astray = len(nodes) > 1 and list(found.devices) != sorted(found.devices)
        assert astray == any("start rank i on the i-th device" in note for note in found.notes)
        apart += astray
    assert apart > 0
    monkeypatch.setattr("autopar.planner.placement.places._MOST_WORK", 0)
    hasty = plan(profile, cluster, replace(options, gap=0.02))
    assert any("not all placements on nodes were searched" in note for note in hasty.notes)
