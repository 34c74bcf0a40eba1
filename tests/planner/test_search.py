"""The search against the oracle that simulates every plan."""

from __future__ import annotations

import pytest
from instances import gpt_profile, local_cluster, random_cluster, random_profile

from autopar.formats.cluster import Cluster
from autopar.formats.profile import Profile
from autopar.planner.bounds import bound
from autopar.planner.candidate import families
from autopar.planner.costs import CostModel
from autopar.planner.exhaustive import exhaust
from autopar.planner.judge import Best
from autopar.planner.options import PlanOptions
from autopar.planner.search import search
from autopar.planner.simulate import Simulator

INSTANCES = 480


def _search(profile: Profile, cluster: Cluster, options: PlanOptions) -> tuple[Best, float]:
    costs = CostModel(profile, cluster, options)
    best = Best()
    every = families(costs.batch, min(costs.layer_count, len(costs.devices)), options)
    return best, search(Simulator(costs), every, options, best)


def _exhaust(profile: Profile, cluster: Cluster, options: PlanOptions) -> Best:
    best = Best()
    exhaust(Simulator(CostModel(profile, cluster, options)), options, best)
    return best


def _limited(seed: int) -> tuple[Profile, Cluster, PlanOptions, float]:
    """An instance whose memory the best plan without a limit just does not fit, and that plan's step time."""
    devices = seed % 4 + 2
    profile, cluster = random_profile(seed), random_cluster(seed, devices)
    options = PlanOptions(gpus=devices, gap=0.0)
    free, _ = _search(profile, cluster, options)
    assert free.found is not None
    if seed % 6 == 0:
        return profile, cluster, options, free.step_s
    peak = max(CostModel(profile, cluster, options).peak_bytes(free.found.candidate))
    limit = max(1, peak - 1 if seed % 2 else int(peak * 0.9))
    return profile, cluster, PlanOptions(gpus=devices, gap=0.0, memory_bytes=limit), free.step_s


def test_an_exact_search_finds_the_oracles_step_time_with_memory_limits_that_bind() -> None:
    binding = compared = 0
    for seed in range(INSTANCES):
        profile, cluster, options, free_s = _limited(seed)
        best, lower_bound_s = _search(profile, cluster, options)
        oracle = _exhaust(profile, cluster, options)
        if oracle.found is None:
            assert best.found is None, f"seed {seed}"
            continue
        compared += 1
        assert best.step_s == pytest.approx(oracle.step_s, rel=1e-9), f"seed {seed}"
        assert lower_bound_s == pytest.approx(oracle.step_s, rel=1e-9), f"seed {seed}"
        binding += oracle.step_s > free_s * (1 + 1e-9)
    assert compared >= 300
    assert binding >= compared / 3


@pytest.mark.parametrize(
    "asked",
    [{"use_all": True}, {"min_stages": 2}, {"schedule": "gpipe"}, {"micro_batches": 2}, {"bytes_per_s": 3e7}],
    ids=str,
)
def test_an_exact_search_finds_the_oracles_step_time_under_constraints(asked: dict[str, object]) -> None:
    compared = 0
    for seed in range(1000, 1100):
        profile = random_profile(seed, batches=(2, 4))
        devices = seed % 3 + 2
        options = PlanOptions(gpus=devices, gap=0.0, **asked)  # type: ignore[arg-type]
        best, _ = _search(profile, random_cluster(seed, devices), options)
        oracle = _exhaust(profile, random_cluster(seed, devices), options)
        compared += oracle.found is not None
        assert best.step_s == pytest.approx(oracle.step_s, rel=1e-9), f"seed {seed}"
    assert compared >= 50


def test_a_search_that_stops_early_stays_honest_about_the_bound() -> None:
    for seed in range(2000, 2060):
        devices = seed % 4 + 2
        profile, cluster = random_profile(seed), random_cluster(seed, devices)
        exact = _exhaust(profile, cluster, PlanOptions(gpus=devices)).step_s
        best, lower_bound_s = _search(profile, cluster, PlanOptions(gpus=devices, gap=0.3))
        assert lower_bound_s <= exact * (1 + 1e-9)
        assert best.step_s <= 1.3 * lower_bound_s * (1 + 1e-9)
        hasty, lower_bound_s = _search(profile, cluster, PlanOptions(gpus=devices, gap=0.0, max_candidates=1))
        assert lower_bound_s <= exact * (1 + 1e-9) <= hasty.step_s * (1 + 2e-9)


def test_the_plan_with_the_least_bound_is_not_always_the_fastest() -> None:
    differing = 0
    for seed in range(3000, 3080):
        profile, cluster, options = random_profile(seed), random_cluster(seed, 4), PlanOptions(gpus=4, gap=0.0)
        best, lower_bound_s = _search(profile, cluster, options)
        assert best.found is not None
        costs = CostModel(profile, cluster, options)
        differing += bound(costs, best.found.candidate) < lower_bound_s * (1 - 1e-6)
    assert differing > 0


def test_a_search_over_a_gpt_certifies_its_gap_within_the_budget() -> None:
    for devices in (2, 4, 8):
        for bytes_per_s in (None, 3e8, 3e7):
            options = PlanOptions(gpus=devices, bytes_per_s=bytes_per_s)
            best, lower_bound_s = _search(gpt_profile(), local_cluster(devices), options)
            assert best.step_s <= 1.02 * lower_bound_s
