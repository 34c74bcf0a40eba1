"""Depths that do not deadlock and that fit, against the cost model asked stage by stage and depth by depth."""

import random

import numpy as np
import pytest

from autopar.planner import PlanOptions, plan
from autopar.planner.candidate import Candidate, CandidateStage, Family, families
from autopar.planner.costs.layers import Levels, Span
from autopar.planner.costs.model import CostModel
from autopar.planner.pool import pool_of
from autopar.planner.search.configs import FINE, StageConfig, configs_of
from autopar.planner.search.depths import DepthLimits, depth_choices
from oracles.exhaustive import everything
from random_problems import random_cluster, random_profile


def test_no_choice_of_depths_lets_more_in_flight_than_the_stage_before_has() -> None:
    turning = 0
    for seed in range(60):
        rng = random.Random(seed)
        profile = random_profile(seed, most_layers=6, batches=(4, 6, 8))
        costs = CostModel(profile, random_cluster(seed, 8), PlanOptions(gpus=8))
        layers, micro_batches = costs.layer_count, rng.choice([2, costs.batch])
        rows = costs.batch // micro_batches
        stages = []
        for first in range(layers):
            width = rng.choice([1, 2, 3])
            turns = 1 < width <= micro_batches
            shares = (rows,) * (width if turns else 1)
            stage = CandidateStage(first, first + 1, tuple(range(len(shares))), shares, 1)
            stage = stage._replace(division="round-robin" if turns else "split")
            stages.append(stage._replace(warmup=rng.randint(1, stage.replicas.most(micro_batches))))
            turning += turns
        spans = [Span(Levels([]))] * layers
        found = depth_choices(costs, Family(micro_batches, rows, "1f1b"), stages, spans, exact=False)
        for candidate in found.candidates:
            flying = [min(micro_batches, stage.in_flight) for stage in candidate.stages]
            assert flying == sorted(flying, reverse=True), f"seed {seed}"
    assert turning >= 40


@pytest.mark.parametrize("shard", ["none", "auto"])
def test_a_plan_is_found_with_the_least_memory_that_any_plan_needs(shard: str) -> None:
    for seed in range(8):
        profile = random_profile(seed, most_layers=4, batches=(2, 4), skips=0.0)
        cluster = random_cluster(seed, 3)
        options = PlanOptions(gpus=3, shard=shard)  # type: ignore[arg-type]
        costs = CostModel(profile, cluster, options)
        least = min(max(costs.peak_bytes(candidate)) for candidate in everything(costs, options))
        made = plan(profile, cluster, PlanOptions(gpus=3, shard=shard, memory_bytes=max(1, least)))  # type: ignore[arg-type]
        assert max(made.predicted.peak_bytes) <= max(1, least), f"seed {seed}"


def _problem(seed: int, most_layers: int = 6) -> tuple[CostModel, Family, PlanOptions]:
    rng = random.Random(seed)
    memory_bytes, schedule = int(10 ** rng.uniform(5.5, 8.0)), "gpipe" if seed % 4 == 0 else "1f1b"
    options = PlanOptions(gpus=3, memory_bytes=memory_bytes, schedule=schedule)
    profile = random_profile(seed, most_layers=most_layers, batches=(4, 6, 12))
    costs = CostModel(profile, random_cluster(seed, 3), options)
    return costs, rng.choice(families(costs.batch, options)), options


def _configs(costs: CostModel, family: Family, options: PlanOptions) -> list[StageConfig]:
    """Every way to run a stage, on so many replicas each."""
    every = configs_of(costs, family, options, (0,), True, FINE)
    return [config.so_wide(width) for config in every for width in range(config.widths[0], config.widths[-1] + 1)]


def _deepest(costs: CostModel, family: Family, stage: CandidateStage) -> int:
    """The most in flight with which a stage fits by itself; 0 if it never does."""
    turns = stage.replicas.most(family.micro_batches)
    depths = range(turns, 0, -1) if family.schedule != "gpipe" else (turns,)
    deep = (Candidate(*family, (stage._replace(warmup=depth),)) for depth in depths)
    return next((each.stages[0].warmup for each in deep if costs.shortfall(each, 0) <= 0), 0)


def _stage(costs: CostModel, family: Family, config: StageConfig, span: tuple[int, int]) -> CandidateStage:
    width, division, shard, *_ = config.replicas
    shares = costs.shares(family.micro_batch_size, config.replicas)
    return CandidateStage(*span, tuple(range(width)), shares, 1, (), shard, division)


def test_as_many_are_in_flight_as_fit_and_no_recomputation_of_the_range_lets_more_in() -> None:
    exact = some = recomputing = 0
    for seed in range(30):
        costs, family, options = _problem(seed)
        limits = DepthLimits(costs, family, pool_of(costs, exact=True))
        levels = costs.recompute_levels(family.micro_batch_size)
        for config in _configs(costs, family, options):
            depths = limits.depth(0, *config[1:3], costs.limits_bytes[0])
            sure, _ = limits.sure_depth(0, *config[1:3])
            counts = limits.layer_order(0).counts
            for first in range(costs.layer_count):
                for length in range(1, costs.layer_count - first + 1):
                    stage = _stage(costs, family, config, (first, first + length))
                    able = [layer for layer in levels.order if first <= layer < first + length]
                    assert len(able) == counts[first, length - 1]
                    low, high = config.recompute.of(np.array([len(able)]))
                    for number in range(int(low[0]), int(high[0]) + 1):
                        again = stage._replace(recompute=tuple(sorted(able[:number])))
                        truth, found = _deepest(costs, family, again), int(depths[first, length - 1])
                        assert found >= truth, f"seed {seed}: {config} {again}"
                        if number == int(low[0]):
                            assert int(sure[first, length - 1]) <= truth, f"seed {seed}: {config} {again}"
                        if not config.recompute.recomputes:
                            assert found == truth, f"seed {seed}: {config} {again}"
                            exact += 1
                            some += 0 < truth < stage.replicas.most(family.micro_batches)
                        recomputing += config.recompute.recomputes
    assert min(exact, recomputing, 50 * some) > 700


def test_memory_binds_where_a_stage_does_not_fit_with_all_in_flight_and_none_longer_than_the_reach_fits() -> None:
    binding = short = 0
    for seed in range(16):
        costs, family, options = _problem(seed, most_layers=24)
        limits = DepthLimits(costs, family, pool_of(costs, exact=True))
        stops = np.arange(costs.layer_count)[:, None] + limits.lengths
        binds = False
        for first in range(costs.layer_count):
            for stop in range(first + 1, costs.layer_count + 1):
                stage = CandidateStage(first, stop, (0,), (family.micro_batch_size,), 1)
                full = Candidate(*family, (stage._replace(warmup=family.micro_batches),))
                binds = binds or costs.shortfall(full, 0) > 0
        assert limits.binding(0) == binds, f"seed {seed}"
        asked = configs_of(costs, family, options, (0,), binds)
        reach = limits.reach(asked)
        for config in asked:
            fits = (limits.depth(0, *config[1:3], costs.limits_bytes[0]) > 0) & (stops <= costs.layer_count)
            assert not fits[:, reach:].any(), f"seed {seed}: {config}"
        binding += binds
        short += reach < costs.layer_count
    assert min(binding, 16 - binding, short) > 1
