"""Plans that are assembled without their programs, against those that are played action by action.

A dictated run costs what the simulator says of the whole plan, for any times of its layers.
"""

from __future__ import annotations

import random
from itertools import accumulate

import numpy as np
import pytest

from autopar.errors import UsageError
from autopar.formats.cluster import Overlap
from autopar.planner import PlanOptions
from autopar.planner import assemble as assembling
from autopar.planner.assemble import DictatedRun, assemble
from autopar.planner.candidate import Candidate, Family, place, with_depths
from autopar.planner.costs.communication import Sharing
from autopar.planner.costs.model import CostModel
from autopar.planner.simulator.simulate import Simulator
from autopar.schedules import SCHEDULES
from autopar.schedules.expand import action_count, expand
from drawn import random_candidate
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile


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


def _times(costs: CostModel, rows: tuple[int, ...]) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
    return (
        {size: list(map(float, np.diff(costs.sums.forward(size)))) for size in rows},
        {size: list(map(float, np.diff(costs.sums.backward(size, 0.0)))) for size in rows},
    )


def _candidate(cuts: tuple[int, ...], widths: tuple[int, ...], micro_batches: int, size: int) -> Candidate:
    depths = SCHEDULES["1f1b"].warmups(len(cuts), 1, micro_batches)["PA"]
    family = Family(micro_batches, size, "1f1b")
    return with_depths(family, place(family, cuts, widths), depths)


@pytest.mark.parametrize("seed", range(30))
def test_a_run_with_the_profiles_times_takes_what_the_whole_plan_does(seed: int) -> None:
    draw = random.Random(seed)
    profile = random_profile(seed)
    cluster = random_cluster(seed, 4)
    costs = CostModel(profile, cluster, PlanOptions())
    stages = draw.randint(1, min(2, costs.layer_count))
    cuts = (*sorted(draw.sample(range(1, costs.layer_count), stages - 1)), costs.layer_count)
    widths = (draw.choice((1, 2)),) * stages if seed % 2 else tuple(draw.randint(1, 2) for _ in cuts)
    micro_batches, size = draw.randint(1, 5), draw.choice((2, 3, 4))
    dictated = DictatedRun(costs, Family(micro_batches, size, "1f1b"), cuts, widths)
    forward_s, backward_s = _times(costs, dictated.rows)
    accumulate_s = [layer.accumulate_s for layer in profile.layers]
    update_s = [layer.update_s for layer in profile.layers]
    step_s = dictated.step_s(forward_s, backward_s, accumulate_s, update_s, profile.step_overhead_s)
    whole_s = Simulator(costs).step_s(_candidate(cuts, widths, micro_batches, size))
    assert step_s == pytest.approx(whole_s, rel=1e-12)


def test_longer_layers_and_adding_to_gradients_make_a_step_longer() -> None:
    profile = gpt_profile()
    costs = CostModel(profile, local_cluster(4), PlanOptions())
    cuts = tuple(accumulate((costs.layer_count // 2, costs.layer_count - costs.layer_count // 2)))
    dictated = DictatedRun(costs, Family(4, 4, "1f1b"), cuts, (2, 2))
    forward_s, backward_s = _times(costs, dictated.rows)
    none = [0.0] * costs.layer_count
    step_s = dictated.step_s(forward_s, backward_s, none, none, 0.0)
    assert dictated.step_s(forward_s, backward_s, none, none, 0.5) == pytest.approx(step_s + 0.5)
    assert dictated.step_s(forward_s, backward_s, [0.1] * costs.layer_count, none, 0.0) > step_s
    doubled = {size: [2 * seconds for seconds in each] for size, each in backward_s.items()}
    assert dictated.step_s(forward_s, doubled, none, none, 0.0) > step_s


@pytest.mark.parametrize(
    ("widths", "size", "schedule", "message"),
    [
        ((4,), 2, "1f1b", "4 replicas share a micro-batch of 2 samples"),
        ((5,), 8, "1f1b", "5 devices are used of a cluster of 4"),
        ((1,), 8, "zigzag", "'zigzag' is none of gpipe, 1f1b"),
    ],
)
def test_a_run_that_cannot_be_is_refused(widths: tuple[int, ...], size: int, schedule: str, message: str) -> None:
    costs = CostModel(gpt_profile(), local_cluster(4), PlanOptions())
    with pytest.raises(UsageError, match=message):
        DictatedRun(costs, Family(2, size, schedule), (costs.layer_count,), widths)
