"""The climb from shape to shape: what is met is sound, and never slower than the start."""

import random
from dataclasses import replace
from itertools import combinations, product

import pytest

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.profile import Profile
from autopar.hardware.clusters import cluster_named
from autopar.planner import PlanOptions, plan
from autopar.planner.candidate import Family, Shape, equal_widths, families
from autopar.planner.constraints import Constraints
from autopar.planner.costs.model import CostModel
from autopar.planner.search import local
from autopar.planner.search.judge import Best
from autopar.planner.search.local import LocalSearch, judge_even_splits, search_locally, widths_by_time
from autopar.planner.shares import by_speed
from autopar.planner.simulator.simulate import Simulator
from drawn import random_shape
from random_problems import gpt_profile, hierarchy, local_cluster, problem, random_cluster, random_profile


def _question(seed: int) -> tuple[Profile, Cluster, PlanOptions]:
    devices = seed % 4 + 2
    profile, cluster = problem(seed, devices, 5, most_layers=7)
    memory_bytes = None if seed % 3 else 4_000_000
    options = PlanOptions(gpus=devices, memory_bytes=memory_bytes, shard="none" if seed % 2 else "auto")
    if seed % 7 == 3 and len(profile.layers) > 2:
        options = replace(options, min_stages=2, forbid_cut=("0",))
    return profile, cluster, replace(options, use_all=seed % 11 == 0)


def test_whatever_is_met_fits_obeys_and_takes_what_is_said() -> None:
    checked = 0
    for seed in range(30):
        profile, cluster, options = _question(seed)
        costs = CostModel(profile, cluster, options)
        try:
            rules = Constraints.of(costs, options)
        except UsageError:
            continue
        simulator, every, best = Simulator(costs), families(costs.batch, options), Best()
        judge_even_splits(simulator, every, options, best)
        before = best.step_s
        search_locally(simulator, options, best, 0.0)
        assert best.step_s <= before
        for found in (*best.by_stages.values(), *best.by_trait.values()):
            stages = found.candidate.stages
            assert max(costs.shortfalls(found.candidate)) <= 0, f"seed {seed}"
            assert rules.broken(stages, costs.kind_of) is None, f"seed {seed}"
            family = found.candidate.family
            assert all(stage == by_speed(costs, stage, family) for stage in stages if stage.division == "split")
            assert not options.use_all or sum(len(stage.devices) for stage in stages) == len(costs.devices)
            if not simulator.sharing:
                assert found.step_s == pytest.approx(simulator.step_s(found.candidate), rel=1e-12), f"seed {seed}"
            checked += 1
        assert best.equal is None or equal_widths(best.equal.candidate.stages)
    assert checked > 90


def test_a_layout_is_judged_once_and_a_climb_from_a_plan_keeps_to_equal_widths_where_it_is_to() -> None:
    options = PlanOptions(gpus=4, memory_bytes=60 * 2**20)
    costs = CostModel(gpt_profile(), local_cluster(4), options)
    simulator, best = Simulator(costs), Best()
    judge_even_splits(simulator, families(costs.batch, options), options, best)
    own = Best()
    LocalSearch(simulator, options, own, 1e6, equal=True).climb(best.equal)
    assert all(equal_widths(found.candidate.stages) for found in own.by_stages.values())
    climb = LocalSearch(simulator, options, Best(), 1e6)
    family, order = families(costs.batch, options)[2], tuple(range(4))
    shape = Shape.of(best.equal.candidate)
    assert climb.judge(family, shape, order, float("inf")) is not None
    assert climb.judge(family, shape, order, float("inf")) is None


def test_effort_and_widths_by_time_leave_no_plan_slower() -> None:
    compared = 0
    for seed in range(5):
        profile, cluster, options = _question(seed)
        try:
            made = plan(profile, cluster, options)
        except (InfeasibleError, UsageError):
            continue
        exact = plan(profile, cluster, replace(options, exact=True))
        assert plan(profile, cluster, replace(options, exact=True)) == exact
        # Not exact, a plan may be the simplest of those about as fast; the wider search's may not be a slower one.
        assert exact.predicted.step_s <= made.predicted.step_s * (1 + 1e-12)
        more = plan(profile, cluster, replace(options, exact=True, effort=3))
        assert more.predicted.step_s <= exact.predicted.step_s * (1 + 1e-12)
        compared += 1
    assert compared >= 3
    for seed in range(60):
        rng = random.Random(seed)
        stages = rng.randint(1, 4)
        devices = stages + rng.randint(0, 6)
        seconds = [rng.uniform(0.1, 3.0) for _ in range(stages)]
        widths = widths_by_time(seconds, devices)
        assert sum(widths) == devices
        every = (each for each in product(range(1, devices + 1), repeat=stages) if sum(each) == devices)
        least_s = min(max(s / w for s, w in zip(seconds, each, strict=True)) for each in every)
        assert max(s / w for s, w in zip(seconds, widths, strict=True)) <= 1.5 * least_s, f"seed {seed}"
    costs = CostModel(gpt_profile(), cluster_named("3x2xH100:25Gbps"), PlanOptions(gpus=6, times_of="cpu"))
    assert local.orders_of(costs) == [(0, 1, 2, 3, 4, 5), (0, 2, 4, 1, 3, 5)]
    widths = {each.widths for each in local.even_shapes(costs, Family(4, 2, "1f1b"))}
    assert {(3, 3), (2, 2), (1, 1, 2, 2), (2, 2, 2)} <= widths
    # Of uneven nodes, the largest one.
    costs = CostModel(gpt_profile(), hierarchy(0, [1, 4, 3]), PlanOptions(gpus=8))
    widths = {each.widths for each in local.even_shapes(costs, Family(4, 2, "1f1b"))}
    assert {each for each in widths if len(each) == 1} == {(8,), (4,)}


def test_what_a_layout_takes_is_about_known_before_it_is_simulated_on_quick_and_on_slow_links() -> None:
    for bytes_per_s in (1e10, 2e7):
        right = wrong = 0
        for seed in range(20):
            rng = random.Random(seed)
            profile, cluster = random_profile(seed, most_layers=9), random_cluster(seed, 6)
            options = PlanOptions(gpus=6, shard="none", bytes_per_s=bytes_per_s)
            simulator = Simulator(CostModel(profile, cluster, options))
            climb = LocalSearch(simulator, options, Best(), float("inf"))
            family = max(families(simulator.costs.batch, options))
            known = []
            for shape in {random_shape(rng, len(profile.layers), 6) for _ in range(8)}:
                found = climb.judge(family, shape, tuple(range(6)), float("inf"))
                depths = [family.micro_batches] * len(profile.layers)
                if found is not None:
                    known.append((found.step_s, climb.score(family, shape, tuple(range(6)), depths)))
            for (one, one_score), (other, other_score) in combinations(known, 2):
                if one > 1.2 * other or other > 1.2 * one:
                    as_simulated = (one > other) == (one_score > other_score)
                    right, wrong = right + as_simulated, wrong + (not as_simulated)
        assert right > 9 * wrong, f"{bytes_per_s}: {right} right, {wrong} wrong"
        assert right > 12
