"""Stages on devices of several kinds: the search against every plan, bounds below them, terms below their own."""

import random
from dataclasses import replace

import pytest

from autopar.ownership import Replicas
from autopar.planner import PlanOptions, plan
from autopar.planner.bounds import fold, last, link_terms, placed_terms, work_s
from autopar.planner.candidate import Candidate, CandidateStage, Family, families
from autopar.planner.costs.model import CostModel
from autopar.planner.placement import Places
from autopar.planner.pool import pool_of
from autopar.planner.search.configs import COARSE, mixtures_of
from autopar.planner.search.stages import StageTables
from autopar.planner.search.tables import SuffixTables
from autopar.planner.shares import by_speed
from autopar.planner.simulator.simulate import Simulator
from chunked import halved, random_chunked
from listed import relisted
from mixed_problems import mixed as mixed_stages
from mixed_problems import mixed_problem, three_kinds_problem, uneven_problem
from random_problems import launched, random_cluster, random_profile, two_kinds
from searched import agreed, exhausted, searched


@pytest.mark.some(2)
@pytest.mark.parametrize("part", range(10))
def test_an_exact_search_finds_the_best_of_all_plans_with_kinds_mixed(part: int) -> None:
    for seed in range(4 * part, 4 * (part + 1)):
        agreed(*mixed_problem(seed), seed)


@pytest.mark.some(1)
@pytest.mark.parametrize("part", range(3))
def test_an_exact_search_finds_the_best_where_devices_of_a_kind_have_unlike_memory(part: int) -> None:
    for seed in range(2 * part, 2 * (part + 1)):
        agreed(*uneven_problem(seed), seed)


@pytest.mark.some(1)
@pytest.mark.parametrize("part", range(4))
def test_an_exact_search_finds_the_best_of_three_kinds_and_so_does_the_program(part: int) -> None:
    three = 0
    for seed in range(3 * part, 3 * (part + 1)):
        profile, cluster, options = three_kinds_problem(seed)
        best = agreed(profile, cluster, options, seed).fastest
        assert best is not None
        found = plan(profile, cluster, replace(options, solver="milp", schedule="1f1b"))
        assert found.predicted.step_s <= best.step_s * (1 + 1e-9), f"seed {seed}"
        three += any(len(set(stage.types)) == 3 for stage in found.stages)
    assert three > 0


@pytest.mark.some(2)
@pytest.mark.parametrize("rows", [32, 0])
@pytest.mark.parametrize("part", range(2))
def test_bounds_of_stages_that_are_taken_together_are_below_every_plan(
    monkeypatch: pytest.MonkeyPatch, part: int, rows: int
) -> None:
    monkeypatch.setattr("autopar.planner.search.best_first.MOST_APART", 0)
    monkeypatch.setattr("autopar.planner.search.mixed.MOST_ROWS", rows)
    mixed = 0
    for seed in range(4 * part, 4 * (part + 1)):
        profile, cluster, options = mixed_problem(seed)
        profile = launched(profile, seed) if seed % 3 == 0 else profile
        options = replace(options, gap=0.02)
        found, oracle = searched(profile, cluster, options)[1], exhausted(profile, cluster, options)[0]
        if oracle.fastest is None:
            continue
        costs = CostModel(profile, cluster, options)
        assert found.lower_bound_s <= oracle.step_s * (1 + 1e-9), f"seed {seed}"
        assert work_s(costs, oracle.fastest.candidate.family) <= oracle.step_s * (1 + 1e-9)
        mixed += bool(mixed_stages(costs, oracle.fastest.candidate))
    assert mixed > 0


def test_no_term_of_a_stage_of_several_kinds_exceeds_its_own() -> None:
    priced = short = 0
    for seed in range(24):
        rng = random.Random(seed)
        memory_bytes = int(10 ** rng.uniform(6, 7.5)) if seed % 2 else None
        options = PlanOptions(gpus=4, memory_bytes=memory_bytes, shard="auto")
        profile, cluster = two_kinds(random_profile(seed, batches=(4, 6)), random_cluster(seed, 4), seed)
        costs = CostModel(launched(profile, seed) if seed % 3 == 0 else profile, cluster, options)
        family, pool = rng.choice(families(costs.batch, options)), pool_of(costs, exact=True)
        tables = StageTables(costs, Places(costs, pool), family, options)
        for number, way in enumerate(tables.ways):
            if not way.is_mixed or way.recompute.recomputes or tables.moves[number].after[0] >= pool.states:
                continue
            devices, place = pool.devices(0, way.taken, way.variant), int(tables.moves[number].place[0])
            for first in range(tables.layers):
                found = tables.next(first)
                there = list(zip(found.way.tolist(), found.length.tolist(), strict=True))
                for length in range(1, tables.layers - first + 1):
                    shares = costs.shares(family.micro_batch_size, way.replicas)
                    stage = CandidateStage.of(first, first + length, devices, shares, 1, way.replicas)
                    stage = by_speed(costs, stage, family)
                    deep = (stage._replace(warmup=at + 1) for at in range(family.micro_batches))
                    fitting = [each for each in deep if costs.shortfall(Candidate(*family, (each,)), 0) <= 0]
                    assert ((number, length) in there) >= bool(fitting), f"seed {seed}: {stage}"
                    short += not fitting
                    if fitting:
                        own = placed_terms(costs, fitting[-1], family.micro_batches)
                        term = found.stages[:, place, there.index((number, length))].tolist()
                        pairs = zip(term, (*own[:6], own.slowest_s), strict=True)
                        assert all(a <= b * (1 + 1e-9) + 1e-15 for a, b in pairs), f"seed {seed}: {stage}"
                        priced += 1
    assert min(priced / 10, short) > 10


@pytest.mark.some(2)
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
@pytest.mark.parametrize("part", range(4))
def test_no_plan_of_halves_with_kinds_mixed_is_below_what_bounds_them_all(part: int, schedule: str) -> None:
    closest = []
    for seed in range(6 * part, 6 * (part + 1)):
        rng = random.Random(seed)
        profile = random_profile(seed, most_layers=6, batches=(4, 6, 8))
        profile, cluster = two_kinds(profile, random_cluster(seed, 4), seed)
        profile = halved(launched(profile, seed) if seed % 3 == 0 else profile, seed)
        options = PlanOptions(gpus=4, schedule=schedule, shard="auto", tensor=1)
        costs = CostModel(profile, cluster, options)
        simulator, places = Simulator(costs), Places(costs, pool_of(costs, exact=True))
        drawn = [each for each in (random_chunked(rng, costs, schedule) for _ in range(24)) if each is not None]
        for candidate in drawn:
            family = candidate.family
            stages = tuple(by_speed(costs, stage._replace(recompute=()), family) for stage in candidate.stages)
            candidate = candidate._replace(stages=stages)
            step_s = simulator.step_s(candidate)
            for fineness in (None, COARSE) if mixed_stages(costs, candidate) else ():
                tables = SuffixTables(StageTables(costs, places, family, options, fineness), options)
                bound_s = tables.least_s + costs.profile.step_overhead_s
                assert bound_s <= step_s * (1 + 1e-9), f"seed {seed}: {candidate}"
                closest.append(bound_s / step_s)
    assert len(closest) > 20
    assert max(closest) > 0.85


def test_the_slowest_replica_of_a_later_stage_does_not_wait_for_the_busiest_of_one_before() -> None:
    """Two replicas have one row and two; the slower of the next stage's reads the one row's."""
    tried, slower = 0, 0
    for seed in range(60):
        profile = random_profile(seed, most_layers=3, batches=(3, 6, 9))
        profile, cluster = two_kinds(profile, random_cluster(seed, 4), seed)
        costs = CostModel(profile, cluster, PlanOptions(gpus=4))
        family = Family(costs.batch // 3, 3, "1f1b")
        many = max(costs.kind_of, key=costs.kind_of.count)
        alike, others = ([at for at, kind in enumerate(costs.kind_of) if (kind == many) == same] for same in (1, 0))
        for cut in range(1, costs.layer_count) if len(alike) == 3 else ():
            ends = (0, cut, alike[:2]), (cut, costs.layer_count, [alike[2], others[0]])
            placed = (
                CandidateStage.of(*layers, tuple(devices), (1, 2), family.micro_batches, Replicas(2))
                for *layers, devices in ends
            )
            stages = [by_speed(costs, stage, family) for stage in placed]
            candidate = Candidate(*family, tuple(stages))
            first, behind = (placed_terms(costs, stage, family.micro_batches) for stage in stages)
            found = fold(first, link_terms(costs, *stages, candidate), last(behind))
            step_s = Simulator(costs).step_s(candidate)
            assert costs.profile.step_overhead_s + float(found.step_s) <= step_s * (1 + 1e-9), f"seed {seed}"
            tried += 1
            slower += behind.slowest_s is not None and behind.slowest_s > behind.work_s + behind.closing_s
    assert min(tried / 10, slower) >= 1


def test_mixtures_are_all_numbers_of_replicas_once_or_in_classes() -> None:
    every = mixtures_of({0: 3, 1: 2, 2: 1}, 6, None)
    assert len({(each.kinds, each.fewest) for each in every}) == len(every) == 4 * 3 * 2 - 3 - 2 - 1 - 1
    for classes in (4, 9, 16):
        found = mixtures_of({0: 30, 1: 12}, 40, classes)
        assert len(found) <= classes
        for one, other in ((1, 1), (30, 10), (7, 12), (2, 5)):
            within = [
                each
                for each in found
                if each.fewest[0] <= one <= each.most[0] and each.fewest[1] <= other <= each.most[1]
            ]
            assert len(within) == 1


def test_no_listing_changes_a_plan_of_kinds_that_are_mixed() -> None:
    mixed = 0
    for seed in range(0, 16, 2):
        profile, cluster, options = mixed_problem(seed)
        options = replace(options, gap=0.02 if seed % 4 else 0.0)
        found, other = (plan(profile, each, options) for each in (cluster, relisted(cluster, seed)))
        assert found.predicted.step_s == other.predicted.step_s
        assert [(stage.layers, stage.shares, stage.types) for stage in found.stages] == [
            (stage.layers, stage.shares, stage.types) for stage in other.stages
        ]
        mixed += any(len(stage.types) > 1 for stage in found.stages)
    assert mixed > 0
