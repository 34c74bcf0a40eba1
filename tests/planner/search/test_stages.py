"""Tables of stages against the cost model: every stage that fits, once, and no term above its own."""

import random

import pytest

from autopar.planner import PlanOptions
from autopar.planner.bounds import stage_terms
from autopar.planner.candidate import Candidate, CandidateStage, families
from autopar.planner.costs.model import CostModel
from autopar.planner.placement import Places
from autopar.planner.pool import pool_of
from autopar.planner.search.stages import StageTables
from random_problems import random_cluster, random_profile


def test_every_stage_that_fits_is_there_once_and_no_term_exceeds_the_stages_own() -> None:
    exact = absent = 0
    for seed in range(40):
        rng = random.Random(seed)
        devices = rng.randint(1, 4)
        memory_bytes = int(10 ** rng.uniform(6, 7.5)) if seed % 2 else None
        options = PlanOptions(gpus=devices, memory_bytes=memory_bytes, shard="auto")
        costs = CostModel(random_profile(seed, batches=(4, 6)), random_cluster(seed, devices), options)
        family, pool = rng.choice(families(costs.batch, options)), pool_of(costs, exact=True)
        tables = StageTables(costs, Places(costs, pool), family, options)
        for first in range(tables.layers):
            found = tables.next(first)
            there = list(zip(found.way.tolist(), found.length.tolist(), strict=True))
            assert len(set(there)) == len(there)
            for number, way in enumerate(tables.ways):
                if way.recompute.recomputes or tables.moves[number].after[0] >= pool.states:
                    continue
                placed = pool.devices(0, way.taken, way.variant)
                shares = costs.shares(family.micro_batch_size, way.replicas)
                for length in range(1, tables.layers - first + 1):
                    _, division, shard, *_ = way.replicas
                    stage = CandidateStage(first, first + length, placed, shares, 1, (), shard, division)
                    deep = (stage._replace(warmup=at + 1) for at in range(stage.replicas.most(family.micro_batches)))
                    fitting = [each for each in deep if costs.shortfall(Candidate(*family, (each,)), 0) <= 0]
                    assert ((number, length) in there) == bool(fitting), f"seed {seed}: {stage}"
                    absent += not fitting
                    if not fitting:
                        continue
                    own = stage_terms(costs, fitting[-1], family.micro_batches)
                    place = int(tables.moves[number].place[0])
                    term = found.stages[:, place, there.index((number, length))].tolist()
                    pairs = zip(term, own[: len(term)], strict=True)
                    assert all(a <= b * (1 + 1e-9) + 1e-15 for a, b in pairs), f"seed {seed}"
                    assert term[:3] == pytest.approx([float(each) for each in own[:3]], rel=1e-9), f"seed {seed}"
                    exact += 1
    assert min(exact / 20, absent) > 30
