"""Stages on devices of several kinds: the search against every plan, bounds below them, terms below their own."""

import random
from dataclasses import replace

import pytest

from autopar.planner import PlanOptions, plan
from autopar.planner.bounds import stage_terms, work_s
from autopar.planner.candidate import Candidate, CandidateStage, Family, families
from autopar.planner.costs.model import CostModel
from autopar.planner.placement import Places, pool_of
from autopar.planner.search.configs import mixtures_of
from autopar.planner.search.stages import StageTables
from autopar.planner.shares import by_speed
from listed import relisted
from mixed_problems import mixed as mixed_stages
from mixed_problems import mixed_problem, uneven_problem
from random_problems import launched, random_cluster, random_profile, two_kinds
from searched import agreed, exhausted, searched


@pytest.mark.some(2)
@pytest.mark.parametrize("part", range(10))
def test_an_exact_search_finds_the_best_of_all_plans_with_kinds_mixed(part: int) -> None:
    for seed in range(4 * part, 4 * (part + 1)):
        agreed(*mixed_problem(seed), seed)


def test_an_exact_search_finds_the_best_where_devices_of_a_kind_have_unlike_memory() -> None:
    for seed in range(6):
        agreed(*uneven_problem(seed), seed)


@pytest.mark.parametrize("rows", [32, 0])
def test_bounds_of_stages_that_are_taken_together_are_below_every_plan(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr("autopar.planner.search.best_first.MOST_APART", 0)
    monkeypatch.setattr("autopar.planner.search.mixed.MOST_ROWS", rows)
    mixed = 0
    for seed in range(8):
        profile, cluster, options = mixed_problem(seed)
        profile = launched(profile, seed) if seed % 3 == 0 else profile
        options = replace(options, gap=0.02)
        found, oracle = searched(profile, cluster, options)[1], exhausted(profile, cluster, options)[0]
        if oracle.fastest is None:
            continue
        costs = CostModel(profile, cluster, options)
        assert found.lower_bound_s <= oracle.step_s * (1 + 1e-9), f"seed {seed}"
        assert work_s(costs, Family(*oracle.fastest.candidate[:3])) <= oracle.step_s * (1 + 1e-9)
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
            if way.mixture is None or way.recompute.recomputes or tables.moves[number].after[0] >= pool.states:
                continue
            devices, place = pool.mixed_devices(0, way.taken, way.variant), int(tables.moves[number].place[0])
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
                        every = [
                            stage_terms(costs, fitting[-1], family.micro_batches, at)
                            for at in range(way.replicas.width)
                        ]
                        # The slowest replica's work, and whatever else any of them takes.
                        own = every[-1]._replace(work_s=max(each.work_s for each in every))
                        term = found.stages[:, place, there.index((number, length))].tolist()
                        pairs = zip(term, own[: len(term)], strict=True)
                        assert all(a <= b * (1 + 1e-9) + 1e-15 for a, b in pairs), f"seed {seed}: {stage}"
                        priced += 1
    assert min(priced / 10, short) > 10


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
