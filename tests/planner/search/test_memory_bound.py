"""Memory bound: below every plan that fits, and above work where memory forces layers to run again."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from autopar.formats.stage import layout_of
from autopar.planner import PlanOptions, plan
from autopar.planner.bounds import work_s
from autopar.planner.candidate import Family
from autopar.planner.constraints import runnable
from autopar.planner.costs.model import CostModel
from autopar.planner.search.memory_bound import memory_bound_s
from chunked import halved
from in_parts import dictated_teams, in_parts
from random_problems import gpt_profile, local_cluster, random_cluster
from searched import exhausted
from team_problems import placed_team_problem, team_problem


@pytest.mark.parametrize("seed", range(80))
@pytest.mark.some(10)
def test_no_plan_that_fits_is_below_the_memory_bound(seed: int) -> None:
    profile, cluster, options = (placed_team_problem if seed % 2 else team_problem)(seed)
    costs, step_s = CostModel(profile, cluster, options), exhausted(profile, cluster, options)[0].step_s
    families = runnable(costs, options)
    low_s = 0.3 * min(work_s(costs, each) for each in families)
    if step_s < float("inf"):
        assert memory_bound_s(costs, families, options, low_s, 2 * step_s) <= step_s * (1 + 1e-9), f"seed {seed}"


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.some(4)
def test_no_dictated_plan_is_below_the_bound_in_the_memory_that_it_takes(seed: int) -> None:
    found = dictated_teams(seed)
    if found is None:
        return
    made, profile, cluster = found
    options = PlanOptions(
        gpus=sum(len(stage.devices) for stage in made.stages),
        schedule=made.schedule,
        memory_bytes=max(made.predicted.peak_bytes),
        across_nodes=True,
    )
    costs = CostModel(profile, cluster, options)
    family = Family(made.micro_batches, costs.batch // made.micro_batches, made.schedule)
    step_s, low_s = made.predicted.step_s, 0.2 * work_s(costs, family)
    # What bounds several stages a rank, in halves, bounds all.
    for each in (family, family._replace(schedule="zb-v")):
        assert memory_bound_s(costs, [each], options, low_s, 2 * step_s) <= step_s * (1 + 1e-9), f"seed {seed}"


@pytest.mark.some(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_where_all_but_layers_inputs_must_go_the_bound_has_their_second_run(schedule: str) -> None:
    profile = gpt_profile(blocks=8, context=1024, batch=32).model_copy(update={"tied": ()})
    profile, cluster = in_parts(halved(profile, 3), 3), random_cluster(3, 4)
    asked = PlanOptions(gpus=4, schedule=schedule, tensor=1)
    most = max(plan(profile, cluster, replace(asked, recompute="full")).predicted.peak_bytes)
    made = plan(profile, cluster, replace(asked, memory_bytes=most // 2))
    for options in (replace(asked, memory_bytes=most // 2), asked):
        costs = CostModel(profile, cluster, options)
        families = runnable(costs, options)
        known_s = min(work_s(costs, each) for each in families)
        bound_s = memory_bound_s(costs, families, options, known_s, made.predicted.step_s)
        if options.memory_bytes is None:
            assert bound_s == pytest.approx(known_s, rel=0.03)
        else:
            assert 1.05 * known_s < bound_s <= made.predicted.step_s


def test_what_does_not_fit_has_no_plan_below_any_seconds() -> None:
    profile, cluster = gpt_profile(), random_cluster(1, 4)
    options = PlanOptions(gpus=4, memory_bytes=1_000_000)
    costs = CostModel(profile, cluster, options)
    assert memory_bound_s(costs, runnable(costs, options), options, 0.001, 1000.0) == pytest.approx(1000.0)


def test_nothing_is_said_where_gradients_do_not_cross_every_boundary() -> None:
    found = 0
    for seed in range(20):
        profile, cluster, options = team_problem(seed)
        costs = CostModel(profile, cluster, options)
        if np.isnan(costs.flows.crossing_bytes[1][1:-1]).any():
            found += 1
            assert memory_bound_s(costs, runnable(costs, options), options, 0.5, 9.0) == 0.5
    assert found


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.some(7)
def test_nor_is_one_with_many_micro_batches_in_flight(seed: int) -> None:
    draw = random.Random(seed)
    schedule, count = draw.choice(("1f1b", "1f1b", "zb-h1", "interleaved", "zb-v")), draw.choice((4, 8, 16))
    profile = gpt_profile(blocks=draw.randint(6, 9), context=1024, batch=16).model_copy(update={"tied": ()})
    profile = halved(profile, seed)
    profile = in_parts(profile, seed) if seed % 2 else profile
    layers, devices = len(profile.layers), draw.choice((1, 2, 4))
    stages = devices * (1 if layout_of(schedule) == "line" else 2)
    edges = [0, *sorted(draw.sample(range(1, layers), stages - 1)), layers]
    asked = PlanOptions(
        stages=",".join(f"{first}-{stop - 1}:1" for first, stop in pairwise(edges)),
        schedule=schedule,
        micro_batches=count,
        recompute=draw.choice(("none", "full")),
    )
    cluster = local_cluster(devices)
    made = plan(profile, cluster, asked)
    limit, step_s = max(made.predicted.peak_bytes), made.predicted.step_s
    options = PlanOptions(schedule=schedule, recompute=asked.recompute, memory_bytes=limit, gpus=devices)
    costs, family = CostModel(profile, cluster, options), Family(count, 16 // count, schedule)
    bound_s = memory_bound_s(costs, [family], options, 0.5 * work_s(costs, family), 2 * step_s)
    assert bound_s <= step_s * (1 + 1e-9), f"seed {seed}"


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.some(1)
def test_nor_is_a_long_pipeline_whose_memory_is_all_in_use(seed: int) -> None:
    draw = random.Random(seed)
    schedule, layers, stages = draw.choice(("1f1b", "zb-h1")), 14, draw.randint(11, 14)
    profile = halved(gpt_profile(blocks=12, context=1024, batch=32), seed)
    profile = profile.model_copy(update={"tied": ()})
    edges = [0, *sorted(draw.sample(range(1, layers), stages - 1)), layers]
    text = ",".join(f"{first}-{stop - 1}:1" for first, stop in pairwise(edges))
    asked = PlanOptions(stages=text, schedule=schedule, micro_batches=draw.choice((16, 32)), recompute="none")
    cluster = local_cluster(stages)
    made = plan(profile, cluster, asked)
    limits = dict(enumerate(made.predicted.peak_bytes))
    # Every device has just what its stage takes, so that no plan has a byte to spare.
    devices = tuple(each.model_copy(update={"memory_bytes": limits[at]}) for at, each in enumerate(cluster.devices))
    options = PlanOptions(schedule=schedule, recompute="none", gpus=stages)
    costs = CostModel(profile, cluster.model_copy(update={"devices": devices}), options)
    family = Family(made.micro_batches, costs.batch // made.micro_batches, schedule)
    step_s = made.predicted.step_s
    bound_s = memory_bound_s(costs, [family], options, 0.5 * work_s(costs, family), 2 * step_s)
    assert bound_s <= step_s * (1 + 1e-9), f"seed {seed}"
