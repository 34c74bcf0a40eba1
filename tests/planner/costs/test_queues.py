"""Stages whose host launches what their device computes, against closed forms and two queues kernel by kernel."""

import random
from itertools import pairwise

import numpy as np
import pytest

from autopar.formats.profile import Profile
from autopar.planner import PlanOptions
from autopar.planner.candidate import CandidateStage
from autopar.planner.costs.layers import Site
from autopar.planner.costs.model import CostModel
from chunked import halved
from drawn import random_candidate
from random_problems import _layer as layer_of
from random_problems import cost, launched, local_cluster, profile_of, random_cluster, random_profile


def two_queues(kernels: list[tuple[float, float]]) -> float:
    """Return when the last kernel ends: each has (launch, seconds), and waits for its launch and the one before."""
    host = device = 0.0
    for launch_s, seconds in kernels:
        host += launch_s
        device = max(device, host) + seconds
    return device


def profiled(*layers: tuple[float, float, float, float]) -> Profile:
    """Layers of (kernels, launches) forward and (kernels, launches) backward, at one sample."""
    found = []
    for at, (forward_s, launch_s, backward_s, launch_back_s) in enumerate(layers):
        launches = {"forward_launch_s": launch_s, "backward_launch_s": launch_back_s}
        one = cost(1, forward_s, backward_s, {}, 0, 0).model_copy(update=launches)
        found.append(layer_of(f"layer.{at}", 0, 0.0, (one,)))
    return profile_of(found, [], 1)


@pytest.mark.parametrize(
    ("layers", "forward_s", "backward_s"),
    [
        # Bound by kernels: launches that outlast a forward's kernels hide behind its backward's.
        ([(8.0, 12.0, 20.0, 10.0)], 8.0, 20.0),
        # Bound by launches, in both, and in the forward alone: the host has gained 3 in the backward before.
        ([(8.0, 9.0, 13.0, 14.0)], 9.0, 14.0),
        ([(8.0, 16.0, 13.0, 10.0)], 13.0, 13.0),
        # Each layer is bound by something else, the stage by its kernels: not the 9 and 18 of the layers one by one.
        ([(1.0, 6.0, 2.0, 6.0), (3.0, 1.0, 12.0, 1.0)], 4.0, 14.0),
        ([(0.0, 0.0, 0.0, 0.0)], 0.0, 0.0),
    ],
)
def test_a_stage_takes_what_its_longer_queue_takes(
    layers: list[tuple[float, float, float, float]], forward_s: float, backward_s: float
) -> None:
    costs = CostModel(profiled(*layers), local_cluster(1), PlanOptions())
    stage = CandidateStage(0, len(layers), (0,), (1,), 1)
    assert (costs.forward_s(stage, 0), costs.backward_s(stage, 0, 1)) == (forward_s, backward_s)
    # Launches take as long whatever the rows, where one size was measured.
    wide = stage._replace(shares=(3,))
    own = np.sum(layers, axis=0)
    longer = max(3 * (own[0] + own[2]), own[1] + own[3])
    assert costs.forward_s(wide, 0) + costs.backward_s(wide, 0, 1) == pytest.approx(longer)


@pytest.mark.parametrize("seed", range(40))
def test_micro_batches_take_two_queues_their_price_and_at_most_the_shorter_queue_more(seed: int) -> None:
    rng = random.Random(seed)
    costs = CostModel(launched(random_profile(seed), seed), random_cluster(seed, 2), PlanOptions(gpus=2))
    first, stop = sorted(rng.sample(range(costs.layer_count + 1), 2))
    stage = CandidateStage(first, stop, (0,), (rng.randint(1, 4),), 1)
    kernels, shorter_s = [], np.inf
    for queue in (0, 1):
        fields = [("forward_s", "backward_s"), ("forward_launch_s", "backward_launch_s")][queue]
        sums = [costs.layers[0].sums(field, stage.shares[0]) for field in fields]  # type: ignore[arg-type]
        there, back = ([end - begin for begin, end in pairwise(each[first : stop + 1])] for each in sums)
        kernels.append([*there, *reversed(back)])
        shorter_s = min(shorter_s, sum(kernels[-1]))
    # A layer's kernels are launched one by one.
    parts = rng.randint(1, 5)
    one = [(launch_s / parts, each / parts) for each, launch_s in zip(*kernels, strict=True) for _ in range(parts)]
    price_s = costs.forward_s(stage, 0) + costs.backward_s(stage, 0, 1)
    for count in (1, 2, 7):
        assert count * price_s <= two_queues(one * count) * (1 + 1e-9)
        assert two_queues(one * count) <= (count * price_s + shorter_s) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_every_way_to_run_a_stage_takes_the_longer_of_both_queues(seed: int) -> None:
    """With backwards in halves, with forwards that run again, of one stage or of all at once."""
    rng = random.Random(seed)
    costs = CostModel(launched(halved(random_profile(seed), seed), seed), random_cluster(seed, 2), PlanOptions(gpus=2))
    first, stop = sorted(rng.sample(range(costs.layer_count + 1), 2))
    again = tuple(layer for layer in range(first, stop) if rng.random() < 0.5)
    stage = CandidateStage(first, stop, (0,), (rng.randint(1, 4),), 1, again)
    count, site = rng.randint(1, 4), Site()
    sums = costs.seconds.by_queue(stage.shares[0], costs.adding(count, 1), 0, split=True)
    queues = [[each[stop] - each[first] for each in queue] for queue in sums]
    more = costs.seconds.again(again, stage.shares[0], costs.adding(count, 1), site)
    forward_s, backward_s = costs.forward_s(stage, 0), costs.backward_s(stage, 0, count)
    input_s, weight_s = costs.halves_s(stage, 0, count)
    whole = max(queue[0] + queue[1] + each for queue, each in zip(queues, more, strict=True))
    parted = max(queue[0] + queue[2] + queue[3] + each for queue, each in zip(queues, more, strict=True))
    assert forward_s + backward_s == pytest.approx(whole, abs=1e-12)
    assert forward_s + input_s + weight_s == pytest.approx(parted, abs=1e-12)
    assert min(forward_s, backward_s, input_s, weight_s) >= 0
    every = costs.seconds.every(stage.shares[0], costs.adding(count, 1), 0)
    plain = stage._replace(recompute=())
    found = [each[first, stop] for each in every]
    assert found == pytest.approx([costs.forward_s(plain, 0), costs.backward_s(plain, 0, count)], abs=1e-12)
    assert all(np.isinf(each[np.tri(*each.shape, dtype=bool)]).all() for each in every)


def test_a_device_whose_host_launches_in_no_time_is_priced_as_one_without() -> None:
    for seed in range(10):
        profile = random_profile(seed)
        draw, plain = random.Random(seed), CostModel(profile, random_cluster(seed, 3), PlanOptions(gpus=3))
        candidate = random_candidate(draw, plain)
        update = {"forward_launch_s": 1e-15, "backward_launch_s": 1e-15}
        layers = tuple(
            layer.model_copy(update={"costs": tuple(each.model_copy(update=update) for each in layer.costs)})
            for layer in profile.layers
        )
        quick = CostModel(profile.model_copy(update={"layers": layers}), random_cluster(seed, 3), PlanOptions(gpus=3))
        assert quick.layers[0].has_launches
        for stage in candidate.stages:
            assert quick.forward_s(stage, 0) == pytest.approx(plain.forward_s(stage, 0), abs=1e-13)
            assert quick.backward_s(stage, 0, 3) == pytest.approx(plain.backward_s(stage, 0, 3), abs=1e-13)
            assert quick.replica_exposed_s(stage, 0) == pytest.approx(plain.replica_exposed_s(stage, 0), abs=1e-13)
