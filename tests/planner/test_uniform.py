"""The best uniform layout is the best of all: one by one, without bounds."""

import pytest

from autopar.ownership import Replicas, Shard
from autopar.planner import PlanOptions
from autopar.planner.candidate import Candidate, divisors, families, place, with_depths, within
from autopar.planner.constraints import Constraints
from autopar.planner.costs.model import CostModel
from autopar.planner.search.moves import balanced_shape
from autopar.planner.simulator.simulate import Simulator
from autopar.planner.uniform import UniformLayouts
from autopar.schedules import SCHEDULES
from in_parts import in_parts
from random_problems import random_cluster, random_profile


def _every(costs: CostModel, schedule: str) -> list[Candidate]:
    """Return all layouts that are alike on all devices."""
    found, devices = [], len(costs.devices)
    shards: tuple[Shard, ...] = ("none", "optimizer")
    for family in families(costs.batch, PlanOptions(schedule=schedule)):
        for team in costs.teams:
            for width in divisors(family.micro_batch_size):
                for chunks in (1,) if schedule == "1f1b" else (2, 3, 4):
                    groups = devices // (width * team.team)
                    whole = chunks == 1 or (groups > 1 and family.micro_batches % groups == 0)
                    if not 1 <= groups * chunks <= costs.layer_count or not whole:
                        continue
                    for shard in shards if width > 1 else shards[:1]:
                        every = (Replicas(width, "split", shard).run_by(team),) * groups
                        edges = range(costs.layer_count + 1)
                        cuts = balanced_shape(costs, family, (team.so_many(width),) * groups, chunks, edges).cuts
                        stages = place(family, cuts, every)
                        # Of every stage, teams have something to divide.
                        if Constraints.of(costs, PlanOptions(), chunks).broken(stages, costs.kind_of) is not None:
                            continue
                        depths = next(iter(SCHEDULES[schedule].warmups(groups, chunks, family.micro_batches).values()))
                        levels = costs.recompute_levels(family.micro_batch_size, costs.form_of(stages[0]))
                        for level in (levels[0], levels[-1]):
                            own = [each._replace(recompute=within(level, each.first, each.stop)) for each in stages]
                            found.append(with_depths(family, own, depths))
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.some(8)
def test_no_uniform_layout_that_fits_is_faster_than_the_best(seed: int, schedule: str) -> None:
    profile, cluster = in_parts(random_profile(seed, 7, (4, 8)), seed), random_cluster(seed, 4)
    cluster = cluster.model_copy(
        update={"devices": tuple(each.model_copy(update={"node": 0}) for each in cluster.devices)}
    )
    for memory_bytes in (None, 8_000_000):
        options = PlanOptions(gpus=4, schedule=schedule, memory_bytes=memory_bytes)
        costs = CostModel(profile, cluster, options)
        simulator = Simulator(costs)
        least_s = min(
            (simulator.step_s(each) for each in _every(costs, schedule) if max(costs.shortfalls(each)) <= 0),
            default=None,
        )
        found = UniformLayouts(simulator, families(costs.batch, options), options).best(schedule)
        assert (found is None) == (least_s is None), f"seed {seed}"
        assert found is None or found.step_s == pytest.approx(least_s, rel=1e-9), f"seed {seed}"
