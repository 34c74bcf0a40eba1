"""The search against the oracle that simulates every plan.

Prefixes of stages against folding them one by one; and one fold against the other.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from autopar.formats.cluster import Cluster
from autopar.formats.profile import Profile
from autopar.planner.bounds import LinkTerms, StageTerms, Terms, candidate_bound_s, fold, fold_chain
from autopar.planner.candidate import families
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions
from autopar.planner.search.best_first import NOTHING, Prefix, SearchResult, search
from autopar.planner.search.judge import Best
from autopar.planner.simulator.simulate import Simulator
from oracles.exhaustive import Exhausted, exhaust
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile, small_question

INSTANCES = 1000


def _search(profile: Profile, cluster: Cluster, options: PlanOptions) -> tuple[Best, SearchResult]:
    costs = CostModel(profile, cluster, options)
    best = Best()
    return best, search(Simulator(costs), families(costs.batch, options), options, best)


def _exhaust(profile: Profile, cluster: Cluster, options: PlanOptions) -> tuple[Best, Exhausted]:
    best = Best()
    return best, exhaust(Simulator(CostModel(profile, cluster, options)), options, best)


def _limited(seed: int) -> tuple[Profile, Cluster, PlanOptions, float]:
    """An instance whose memory the best plan without a limit mostly does not fit, and that plan's step time."""
    profile, cluster, options = small_question(seed)
    free, _ = _search(profile, cluster, options)
    assert free.fastest is not None
    if seed % 5 == 0:
        return profile, cluster, options, free.step_s
    peak = max(CostModel(profile, cluster, options).peak_bytes(free.fastest.candidate))
    limit = max(1, int(peak * (0.999, 0.95, 0.9, 0.8)[seed % 4]))
    return profile, cluster, replace(options, memory_bytes=limit), free.step_s


@pytest.mark.slow
def test_an_exact_search_finds_the_oracles_step_time_and_least_bound_with_memory_limits_that_bind() -> None:
    binding = compared = recomputing = sharding = mixed = 0
    for seed in range(INSTANCES):
        profile, cluster, options, free_s = _limited(seed)
        best, searched = _search(profile, cluster, options)
        oracle, exhausted = _exhaust(profile, cluster, options)
        if oracle.fastest is None:
            assert best.fastest is None, f"seed {seed}"
            continue
        assert best.fastest is not None, f"seed {seed}"
        compared += 1
        assert best.step_s == pytest.approx(oracle.step_s, rel=1e-9), f"seed {seed}"
        assert searched.lower_bound_s == pytest.approx(oracle.step_s, rel=1e-9), f"seed {seed}"
        # Where the references or a first candidate are no worse than any bound, no bound is met.
        if searched.least_bound_s < best.step_s:
            assert searched.least_bound_s == pytest.approx(exhausted.least_bound_s, rel=1e-9), f"seed {seed}"
        binding += oracle.step_s > free_s * (1 + 1e-9)
        recomputing += any(stage.recompute for stage in best.fastest.candidate.stages)
        sharding += any(stage.shard != "none" for stage in best.fastest.candidate.stages)
        devices = [device for stage in best.fastest.candidate.stages for device in stage.devices]
        mixed += len({cluster.devices[device].type for device in devices}) > 1
    assert compared > 0.65 * INSTANCES
    assert binding >= compared / 3
    assert min(recomputing, sharding, mixed) >= INSTANCES / 25


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        {"use_all": True},
        {"min_stages": 2},
        {"schedule": "gpipe"},
        {"micro_batches": 2},
        {"bytes_per_s": 3e7},
        {"divisible": True},
    ],
    ids=str,
)
def test_an_exact_search_finds_the_oracles_step_time_under_constraints(asked: dict[str, object]) -> None:
    compared = 0
    for seed in range(1000, 1060):
        profile = random_profile(seed, most_layers=4, batches=(2, 4))
        devices = seed % 2 + 2
        options = PlanOptions(gpus=devices, gap=0.0, shard="auto", **asked)  # type: ignore[arg-type]
        best, _ = _search(profile, random_cluster(seed, devices), options)
        oracle, _ = _exhaust(profile, random_cluster(seed, devices), options)
        compared += oracle.fastest is not None
        assert best.step_s == pytest.approx(oracle.step_s, rel=1e-9), f"seed {seed}"
    assert compared >= 30


@pytest.mark.slow
def test_a_search_that_stops_early_stays_honest_about_the_bound() -> None:
    for seed in range(2000, 2060):
        devices = seed % 2 + 2
        profile, cluster = random_profile(seed, most_layers=4, batches=(2, 4)), random_cluster(seed, devices)
        exact = _exhaust(profile, cluster, PlanOptions(gpus=devices))[0].step_s
        best, searched = _search(profile, cluster, PlanOptions(gpus=devices, gap=0.3))
        assert searched.lower_bound_s <= exact * (1 + 1e-9)
        assert exact <= best.step_s * (1 + 1e-9)
        hasty, searched = _search(profile, cluster, PlanOptions(gpus=devices, gap=0.0, max_candidates=1))
        assert searched.lower_bound_s <= exact * (1 + 1e-9) <= hasty.step_s * (1 + 2e-9)


def test_the_plan_with_the_least_bound_is_not_always_the_fastest() -> None:
    differing = 0
    for seed in range(3000, 3080):
        profile, cluster = random_profile(seed, most_layers=5), random_cluster(seed, 3)
        options = PlanOptions(gpus=3, gap=0.0)
        best, searched = _search(profile, cluster, options)
        assert best.fastest is not None
        costs = CostModel(profile, cluster, options)
        differing += candidate_bound_s(costs, best.fastest.candidate) > searched.least_bound_s * (1 + 1e-6)
    assert differing > 0


def test_a_search_over_a_gpt_certifies_its_gap_or_stays_close_within_the_budget() -> None:
    gaps = []
    for devices in (2, 4, 8):
        for bytes_per_s in (None, 3e8, 3e7):
            options = PlanOptions(gpus=devices, bytes_per_s=bytes_per_s, shard="none")
            best, searched = _search(gpt_profile(), local_cluster(devices), options)
            gaps.append(best.step_s / searched.lower_bound_s - 1)
    # Where transfers take about as long as computing, no depths come within 2 % of a bound that leaves them open.
    assert sum(gap <= 0.02 for gap in gaps) >= 7
    assert max(gaps) <= 0.06


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits",
    [
        ("pace.MANY_SWEPT",),
        ("best_first.MOST_APART", "pace.MANY_ELEMENTS"),
        ("best_first.MOST_APART", "pace.MANY_SWEPT"),
        ("best_first.MOST_APART", "best_first.TABLES"),
        ("best_first.MOST_APART", "stages.MOST_TABLED"),
    ],
)
def test_families_are_bounded_whatever_their_size(monkeypatch: pytest.MonkeyPatch, limits: tuple[str, ...]) -> None:
    """What only large problems meet: no tables, stages taken together, bounds by round trips, by a family, by work."""
    for limit in limits:
        monkeypatch.setattr(f"autopar.planner.search.{limit}", 0)
    above = 0
    for seed in range(40):
        profile, cluster, options = small_question(seed)
        optimum, _ = _exhaust(profile, cluster, options)
        best = Best()
        simulator = Simulator(CostModel(profile, cluster, options))
        found = search(simulator, families(simulator.costs.batch, options), replace(options, gap=0.02), best)
        assert found.lower_bound_s <= optimum.step_s * (1 + 1e-9), f"seed {seed}"
        above += best.step_s > optimum.step_s * (1 + 1e-9)
    assert above, "else nothing is left out, and nothing tested"


def _stage(rng: random.Random) -> StageTerms:
    numbers = [rng.choice([0.0, rng.uniform(0, 3)]) for _ in range(4)]
    halves = rng.choice([(None, None), (rng.uniform(0, 60), rng.uniform(0, 60))])
    return StageTerms(*numbers, rng.uniform(1, 4), rng.uniform(0, 9), *halves)


def _link(rng: random.Random, *, whole: bool = False) -> LinkTerms:
    forth = whole or rng.random() < 0.8
    back = whole or (forth and rng.random() < 0.8)
    numbers = [rng.uniform(0, 1) if there else 0.0 for there in (forth, back)]
    return LinkTerms(forth, back, *numbers, *(4 * each for each in numbers))


def test_a_prefix_gives_what_folding_its_stages_gives() -> None:
    for seed in range(500):
        rng = random.Random(seed)
        chain = [(_stage(rng), _link(rng)) for _ in range(rng.randint(0, 7))]
        trip, backward, done = (rng.uniform(0, 20) for _ in range(3))
        behind = Terms(trip, backward, done, max(done, rng.uniform(0, 20)))
        prefix: Prefix = NOTHING
        for stage, link in chain:
            prefix = prefix.then(stage, link)
        folded = behind
        for stage, link in reversed(chain):
            folded = fold(stage, link, folded)
        assert float(prefix.step_s(behind)) == pytest.approx(float(folded.step_s), rel=1e-12)


def test_a_prefix_takes_arrays() -> None:
    rng = random.Random(1)
    prefix = NOTHING.then(_stage(rng), _link(rng, whole=True)).then(_stage(rng), _link(rng, whole=True))
    columns = np.array([[1.0, 5.0, 30.0], [2.0, 6.0, 31.0], [3.0, 7.0, 1.0], [4.0, 8.0, 40.0]])
    found = prefix.step_s(Terms(*columns))
    each = [float(prefix.step_s(Terms(*column))) for column in columns.T]
    assert np.asarray(found).tolist() == pytest.approx(each)


def test_folding_a_chain_is_folding() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        stage, link = _stage(rng), _link(rng, whole=True)
        rows = np.array([[rng.uniform(0, 20) for _ in range(6)] for _ in range(4)])
        rows[3] = np.maximum(rows[2], rows[3])
        expected = fold(stage, link, Terms(*rows))
        found = fold_chain(stage, link, Terms(*rows.copy()))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)
