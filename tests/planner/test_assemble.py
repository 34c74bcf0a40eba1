"""Plans that are assembled without their programs, against those that are played action by action."""

from __future__ import annotations

import random

import pytest

from autopar.formats.cluster import Overlap
from autopar.planner import PlanOptions
from autopar.planner import assemble as assembling
from autopar.planner.assemble import assemble
from autopar.planner.costs.communication import Sharing
from autopar.planner.costs.model import CostModel
from autopar.schedules.expand import action_count, expand
from drawn import random_candidate
from random_problems import random_cluster, random_profile


def test_a_plan_predicts_the_same_with_its_program_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = 0
    for seed in range(120):
        rng = random.Random(seed)
        devices = rng.randint(1, 8)
        cluster = random_cluster(seed, devices)
        if rng.random() < 0.3:
            shared = (link.model_copy(update={"shared_by": 2}) for link in cluster.links)
            cluster = cluster.model_copy(update={"links": tuple(shared)})
        costs = CostModel(random_profile(seed, batches=(4, 12)), cluster, PlanOptions(gpus=devices))
        candidate = random_candidate(rng, costs)
        depths = [min(stage.in_flight, candidate.micro_batches) for stage in candidate.stages]
        if depths != sorted(depths, reverse=True):
            continue  # Replicas that take turns may be drawn with more in flight than the stage before.
        tried += 1
        monkeypatch.setattr(assembling, "MOST_ACTIONS", 2**16)
        played = assemble(costs, candidate, PlanOptions(), 1e-3, (), ())
        monkeypatch.setattr(assembling, "MOST_ACTIONS", 0)
        quick = assemble(costs, candidate, PlanOptions(), 1e-3, (), ())
        assert action_count(played) == sum(map(len, expand(played).ranks))
        assert quick.predicted.step_s == pytest.approx(played.predicted.step_s, rel=1e-12)
        assert quick.predicted.bubble == pytest.approx(played.predicted.bubble, rel=1e-9, abs=1e-12)
        assert played.predicted.shares is not None
        assert quick.predicted.shares is None
        same = {"step_s": 0.0, "bubble": 0.0, "lower_bound_s": 0.0, "shares": None}
        assert quick.predicted.model_copy(update=same) == played.predicted.model_copy(update=same)
    assert tried > 100


def test_a_bubble_without_the_program_counts_computing_as_long_as_it_takes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slowed by messages, ranks compute for longer: what a timeline shows as bubble is less, and the step longer."""
    cluster = random_cluster(3, 4)
    slower = tuple(Overlap(level=link.level, compute=1.5, communication=1.2) for link in cluster.links)
    costs = CostModel(
        random_profile(2, batches=(12,)), cluster.model_copy(update={"overlaps": slower}), PlanOptions(gpus=4)
    )
    assert Sharing.of(cluster.model_copy(update={"overlaps": slower}), costs.devices)
    candidate = random_candidate(random.Random(1), costs)
    played = assemble(costs, candidate, PlanOptions(), 0.0, (), ()).predicted
    monkeypatch.setattr(assembling, "MOST_ACTIONS", 0)
    quick = assemble(costs, candidate, PlanOptions(), 0.0, (), ()).predicted
    assert quick.step_s == pytest.approx(played.step_s, rel=1e-12)
    assert played.bubble <= quick.bubble <= 1
