"""What planners in papers price an asynchronous pipeline at, beside the same pipeline simulated action by action."""

import pytest

from autopar.errors import AutoparError
from autopar.planner import PlanOptions, plan
from autopar.planner.assemble import candidate_of
from autopar.planner.costs.model import CostModel
from autopar.planner.objectives.unflushed import shallow_depths
from random_problems import random_cluster, random_profile
from reproductions.stash import StashCosts


def test_no_pipeline_runs_quicker_than_its_stages_compute_and_with_free_links_none_slower() -> None:
    equal = turns = 0
    for seed in range(30):
        profile = random_profile(seed).model_copy(update={"tied": ()})
        options = PlanOptions(policy="stash", micro_batches=1, bytes_per_s=1e18, recompute="none")
        cluster = random_cluster(seed, 4)
        links = [each.model_copy(update={"latency_s": 0.0}) for each in cluster.links]
        cluster = cluster.model_copy(update={"links": tuple(links), "curves": ()})
        try:
            made = plan(profile, cluster, options)
        except AutoparError:
            continue
        candidate, prices = candidate_of(made, profile), StashCosts(CostModel(profile, cluster, options))
        busiest_s = max(prices.busy(candidate).values())
        assert made.predicted.step_s >= busiest_s * (1 - 1e-6), seed
        equal += made.predicted.step_s == pytest.approx(busiest_s, rel=1e-6)
        turns += made.span > 1
    assert min(equal, turns) >= 6


def test_pipedreams_micro_batches_in_flight_keep_all_replicas_busy() -> None:
    assert shallow_depths([15, 1]) == [2, 1]
    assert shallow_depths([1, 1, 1, 1]) == [4, 3, 2, 1]
    assert shallow_depths([3, 1, 2]) == [2, 3, 1]
