"""Tables of stages against the cost model, and suffix tables and round trips against bounds of all candidates."""

import numpy as np
import pytest

from autopar.errors import UsageError
from autopar.planner import PlanOptions
from autopar.planner.bounds import candidate_bound_s, round_trips, work_s
from autopar.planner.candidate import Candidate, CandidateStage, Family, families
from autopar.planner.costs.model import CostModel
from autopar.planner.placement import Places
from autopar.planner.pool import pool_of
from autopar.planner.search import stages
from autopar.planner.search.configs import FINE
from autopar.planner.search.stages import StageTables
from autopar.planner.search.tables import RoundTrips, States, SuffixTables
from oracles.exhaustive import everything
from random_problems import gpt_profile, hierarchy, local_cluster, random_cluster, random_profile

Key = tuple[int, int, str, int, str, str]


def _by_first_stage(costs: CostModel, options: PlanOptions) -> dict[Key, float]:
    """The least bound of all candidates that fit, by family and what the first stage is."""
    least: dict[Key, float] = {}
    for candidate in everything(costs, options):
        if max(costs.shortfalls(candidate)) <= 0:
            first = candidate.stages[0]
            level = costs.links.level(first.devices)
            key = (candidate.micro_batches, len(first.devices), level, first.stop, first.division, first.shard)
            least[key] = min(least.get(key, np.inf), candidate_bound_s(costs, candidate))
    return least


def _table_values(costs: CostModel, family: Family, options: PlanOptions) -> dict[Key, float]:
    pool = pool_of(costs, exact=True)
    tables = SuffixTables(StageTables(costs, Places(costs, pool), family, options), options)
    values: dict[Key, float] = {}
    following, every = tables.terms(0, 0)
    for terms in every:
        steps = np.asarray(terms.step_s) + costs.profile.step_overhead_s
        for number, stop, step_s in zip(following.way.tolist(), following.length.tolist(), steps.tolist(), strict=True):
            way = tables.stages.ways[number]
            level = costs.links.level(pool.devices(0, way.taken, way.variant))
            key = (family.micro_batches, way.replicas.width, level, stop, way.replicas.division, way.replicas.shard)
            values[key] = min(values.get(key, np.inf), step_s)
    return values


def test_tables_are_close_below_bounds_and_refused_where_they_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = close = 0
    for seed in range(18):
        devices = seed % 2 + 2
        profile = random_profile(seed, most_layers=4, batches=(2, 4), skips=0.5)
        cluster = random_cluster(seed, devices)
        if seed % 3 == 0:
            cluster = hierarchy(seed, [1, 1] if devices == 2 else [1, 2], racks=1 + seed % 2, more_links=True)
        options = PlanOptions(gpus=devices, memory_bytes=4_000_000 if seed % 2 else None)
        costs = CostModel(profile, cluster, options)
        least = _by_first_stage(costs, options)
        for family in families(costs.batch, options):
            values = _table_values(costs, family, options)
            for key in values.keys() & least.keys():
                assert values[key] <= least[key] * (1 + 1e-9), f"seed {seed}: {key}"
                compared += 1
                close += values[key] >= least[key] * 0.9
            mine = [value for key, value in least.items() if key[0] == family.micro_batches]
            assert work_s(costs, family) <= min(mine, default=np.inf) * (1 + 1e-9)
    assert close >= 0.5 * compared >= 55
    costs = CostModel(random_profile(8, batches=(6,)), random_cluster(8, 2), PlanOptions(gpus=2))
    uneven = CandidateStage(0, costs.layer_count, (0, 1), (1, 2), 1)
    slow = Candidate(2, 3, "1f1b", (uneven,))
    busiest = costs.forward_s(uneven, 1) + costs.backward_s(uneven, 1, 2)
    assert busiest > 1e-3
    assert candidate_bound_s(costs, slow) >= 2 * busiest
    options = PlanOptions(gpus=16)
    costs = CostModel(gpt_profile(blocks=40, batch=64), local_cluster(16), options)
    family, pool = families(64, options)[3], pool_of(costs, exact=True)
    tables = StageTables(costs, Places(costs, pool), family, options)
    monkeypatch.setattr(stages, "MOST_BYTES", sum(tables.next(first).stages.nbytes for first in range(tables.layers)))
    with pytest.raises(UsageError, match=r"42 layers on 16 devices takes about .* GiB of tables; narrow it with fewer"):
        StageTables(costs, Places(costs, pool), family, options)


@pytest.mark.parametrize("apart", [True, False])
def test_no_plan_has_a_lower_bound_or_a_shorter_round_trip(apart: bool) -> None:
    compared = close = 0
    for seed in range(12):
        profile, devices = random_profile(seed, most_layers=4, batches=(2, 8), skips=0.0), seed % 2 + 1
        options = PlanOptions(gpus=devices, memory_bytes=3_000_000 if seed % 2 else None)
        costs, overhead_s = CostModel(profile, random_cluster(seed, devices), options), profile.step_overhead_s
        plans: dict[int, list[Candidate]] = {}
        for candidate in everything(costs, options):
            if max(costs.shortfalls(candidate)) <= 0:
                plans.setdefault(candidate.micro_batches, []).append(candidate)
        for family in families(costs.batch, options):
            mine = plans.get(family.micro_batches, [])
            pool = pool_of(costs, exact=True)
            stages = StageTables(costs, Places(costs, pool), family, options, None if apart else FINE)
            if not mine or not stages.chain:
                continue
            trips = RoundTrips(stages, States(stages), options)
            steps = [candidate_bound_s(costs, each) - overhead_s for each in mine]
            whole = [round_trips(costs, each)[0] for each in mine]
            for cap_s in (0.9 * min(steps), 1.2 * min(steps)):
                assert trips.bound_s(cap_s, 9) <= min(steps) * (1 + 1e-9), f"seed {seed}"
            close += trips.bound_s(min(steps), 9) >= 0.8 * min(steps)
            for step_s, trip_s in [*zip(steps, whole, strict=True)][::5]:
                assert trips.least_s(step_s - trip_s, step_s) <= trip_s * (1 + 1e-9), f"seed {seed}"
                compared += 1
    assert min(compared / 8, close) >= 4
