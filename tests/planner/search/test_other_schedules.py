"""Plans of schedules that are found by trying: sound, within their bounds, and close to the best of all."""

import random
import re
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import pytest

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.plan import Plan
from autopar.ownership import Replicas
from autopar.planner import PlanOptions, plan, simulate
from autopar.planner.candidate import Shape, families, has_chunks
from autopar.planner.costs.model import CostModel
from autopar.planner.search.best_first import MOST_CLOSELY_BOUNDED, least_bound_s
from autopar.planner.search.other_schedules import Trials, bounds_of
from autopar.planner.simulator.simulate import Simulator
from autopar.schedules.check import check
from autopar.schedules.expand import expand
from chunked import OTHERS, halved, random_chunked, random_costs
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile


@pytest.mark.some(3)
@pytest.mark.parametrize("schedule", OTHERS)
def test_a_plan_is_sound_and_no_plan_of_a_schedule_below_its_bounds(schedule: str) -> None:
    made_any = 0
    for seed in range(4):
        devices = seed % 4 + 1
        profile, cluster = halved(random_profile(seed, most_layers=9), seed), random_cluster(seed, devices)
        try:
            made = plan(profile, cluster, PlanOptions(gpus=devices, schedule=schedule))
        except InfeasibleError as error:
            assert len(profile.layers) < 2, error  # noqa: PT017
            assert has_chunks(schedule)
            continue
        assert Plan.parse(made.dumps(), Path("plan.json")) == made
        assert made.schedule == schedule
        check(expand(made), made)
        assert simulate(made, profile, cluster).end_s == made.predicted.step_s
        bounds = [seconds for _, seconds in made.predicted.bounds]
        assert [*bounds, made.predicted.step_s] == sorted([*bounds, made.predicted.step_s])
        assert sum(part.seconds for part in made.predicted.binding) <= made.predicted.step_s * (1 + 1e-9)
        made_any += len(made.stages) > 1
    assert made_any >= 1
    for seed in range(12):
        # Of one kind of device: of several, replicas take rows by their speed, as those that are drawn do not.
        rng, costs = random.Random(seed), random_costs(2 * seed, most_devices=4)
        options = PlanOptions(schedule=schedule, gpus=len(costs.devices))
        simulator = Simulator(costs)
        found = [random_chunked(rng, costs, schedule) for _ in range(12)]
        steps = [simulator.step_s(each) for each in found if each is not None]
        bounds = bounds_of(costs, options, float("inf"))
        assert bounds.linked_s <= min(steps, default=float("inf")) * (1 + 1e-9), seed


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_no_plan_of_halves_that_fits_is_below_what_bounds_them_all_with_the_limits(schedule: str) -> None:
    closest = []
    for seed in range(20):
        rng, ample = random.Random(seed), random_costs(2 * seed, most_devices=4)
        options = PlanOptions(schedule=schedule, gpus=len(ample.devices), recompute="none")
        drawn = [each for each in (random_chunked(rng, ample, schedule) for _ in range(16)) if each is not None]
        found = [each for each in drawn if not any(stage.recompute for stage in each.stages)]
        if not found:
            continue
        # As much memory as one of them needs.
        peak_bytes = max(ample.peak_bytes(rng.choice(found)))
        costs = CostModel(ample.profile, ample.cluster, replace(options, memory_bytes=peak_bytes))
        fitting = [each for each in found if max(costs.shortfalls(each)) <= 0]
        least = least_bound_s(costs, options, MOST_CLOSELY_BOUNDED)
        simulator = Simulator(costs)
        for each in fitting:
            bound_s, step_s = least(costs, each.family, float("inf")), simulator.step_s(each)
            assert bound_s <= step_s * (1 + 1e-9), f"seed {seed}: {each}"
            closest.append(bound_s / step_s)
    assert max(closest) > 0.95


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zb-v"])
def test_what_is_found_by_trying_is_near_the_best_of_all(schedule: str) -> None:
    over = []
    for seed in range(4):
        profile, cluster = halved(random_profile(seed, most_layers=6, batches=(4, 6)), seed), random_cluster(seed, 3)
        asked, chunks = 2 if schedule == "interleaved" else None, 2 if has_chunks(schedule) else 1
        options = PlanOptions(gpus=3, schedule=schedule, recompute="none", chunks=asked)
        costs = CostModel(profile, cluster, options)
        if costs.layer_count < 2 * chunks:
            continue
        trials = Trials(Simulator(costs), schedule, options, range(3))
        shapes = [
            Shape((*cuts, costs.layer_count), tuple(map(Replicas, widths)))
            for groups in range(1, min(3, costs.layer_count // chunks) + 1)
            for cuts in combinations(range(1, costs.layer_count), groups * chunks - 1)
            for widths in product(range(1, 4), repeat=groups)
            if sum(widths) <= 3
        ]
        best = trials.run_all([(family, shape) for family in families(costs.batch, options) for shape in shapes])
        over.append(plan(profile, cluster, options).predicted.step_s / best.step_s - 1)
    assert -1e-9 <= min(over) <= max(over) < 0.1
    assert sum(each < 1e-9 for each in over) > len(over) // 2


def test_auto_takes_the_quickest_schedule_that_prices_allow() -> None:
    taken = 0
    for seed in (1, 12, 18):
        devices = seed % 3 + 2
        profile = halved(random_profile(seed, most_layers=9, batches=(4, 6)), seed)
        cluster = random_cluster(seed, devices)
        auto = plan(profile, cluster, PlanOptions(gpus=devices, exact=True))
        plain = plan(profile, cluster, PlanOptions(gpus=devices, schedule="1f1b", exact=True))
        assert auto.predicted.step_s <= plain.predicted.step_s
        if auto.schedule in ("zb-h1", "zb-h2"):
            taken += 1
            assert auto.predicted.lower_bound_s <= plain.predicted.lower_bound_s * (1 + 1e-9)
            assert any(each.schedule in ("1f1b", "gpipe") and each.step_s for each in auto.alternatives)
        elif auto.schedule in ("1f1b", "gpipe"):
            assert auto.predicted.step_s == plain.predicted.step_s
    assert taken >= 1
    profile, cluster = gpt_profile(blocks=12, batch=8), local_cluster(4)
    options = PlanOptions(gpus=4, min_stages=4, micro_batches=8, exact=True)
    auto = plan(profile, cluster, options)
    whole = plan(profile, cluster, replace(options, schedule="1f1b"))
    assert auto.schedule == "interleaved"
    assert auto.predicted.step_s < whole.predicted.step_s
    assert any(each.schedule in ("1f1b", "gpipe") and each.step_s for each in auto.alternatives)
    profile, cluster = gpt_profile(blocks=4), local_cluster(4)
    auto = plan(profile, cluster, PlanOptions(gpus=4))
    assert auto.schedule in ("gpipe", "1f1b")
    for schedule in set(OTHERS) - {"interleaved"}:
        with pytest.raises(UsageError, match="which the profile does not hold for every layer; measure them with"):
            plan(profile, cluster, PlanOptions(gpus=4, schedule=schedule))
    profile = halved(gpt_profile(), 1)
    made = plan(profile, local_cluster(4), PlanOptions(gpus=4, divisible=True, min_stages=4, micro_batches=8))
    assert made.schedule in ("gpipe", "1f1b")
    assert not {each.schedule for each in made.alternatives} & set(OTHERS)


@pytest.mark.parametrize(
    ("schedule", "stages", "groups"),
    [
        ("interleaved", "0-3:1,4-6:2,7-9:1,10-13:2", ((0, 2), (1, 3))),
        ("zb-v", "0-3:1,4-6:2,7-9:2,10-13:1", ((0, 3), (1, 2))),
        ("dualpipe-v", "0-3,4-6,7-9,10-13", ((0, 3), (1, 2))),
        ("zb-h1", "0-3:1,4-9:2,10-13:1", ((0,), (1,), (2,))),
        ("interleaved", "0-1,2-3,4-5,6-7,8-9,10-13", ((0, 3), (1, 4), (2, 5))),
    ],
)
def test_dictated_stages_are_laid_out_as_the_schedule_has_them(
    schedule: str, stages: str, groups: tuple[tuple[int, ...], ...]
) -> None:
    profile, cluster = halved(gpt_profile(), 0), local_cluster(4)
    made = plan(profile, cluster, PlanOptions(schedule=schedule, stages=stages))
    assert made.groups == groups
    assert [len(stage.layers) for stage in made.stages] == [
        int(last) - int(first) + 1 for first, last in re.findall(r"(\d+)-(\d+)", stages)
    ]
    assert made.predicted.lower_bound_s <= made.predicted.step_s
    assert simulate(made, profile, cluster).end_s == made.predicted.step_s


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PlanOptions(schedule="interleaved", stages="0-3:1,4-6:2,7-13:1"), "has several stages on the same devices"),
        (PlanOptions(schedule="zb-v", stages="0-3:1,4-6:2,7-9:1,10-13:2"), "2 for every group of devices"),
        (PlanOptions(schedule="interleaved", chunks=8, gpus=4, min_stages=32), "14 layers make at most 14 stages"),
    ],
)
def test_stages_that_do_not_suit_a_schedule_are_refused(options: PlanOptions, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        plan(halved(gpt_profile(), 0), local_cluster(4), options)


def test_layers_are_recomputed_where_memory_is_short_and_where_nothing_fits_the_closest_plan_is_named() -> None:
    with pytest.raises(InfeasibleError, match=r"nothing fits the memory: stage .* in the plan of interleaved"):
        plan(gpt_profile(blocks=2, batch=4), local_cluster(2), PlanOptions(schedule="interleaved", memory_bytes=2**20))
    profile, cluster = halved(gpt_profile(), 3), local_cluster(4)
    options = PlanOptions(schedule="zb-v", gpus=4, min_stages=8, micro_batches=16)
    free = plan(profile, cluster, options)
    limit = int(0.8 * max(free.predicted.peak_bytes))
    tight = plan(profile, cluster, replace(options, memory_bytes=limit))
    assert max(tight.predicted.peak_bytes) <= limit
    assert any(stage.recompute for stage in tight.stages)
    assert tight.predicted.step_s > free.predicted.step_s
