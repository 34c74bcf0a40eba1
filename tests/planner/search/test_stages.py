"""The tables of stages against the cost model asked stage by stage, and rough tables against fine ones."""

from __future__ import annotations

import random

import numpy as np
import pytest

from autopar.errors import UsageError
from autopar.planner.bounds import stage_terms
from autopar.planner.candidate import Candidate, CandidateStage, families
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions
from autopar.planner.placement import Places, pool_of
from autopar.planner.search import stages
from autopar.planner.search.stages import StageTables
from autopar.planner.search.variants import Fineness
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile


def _tables(seed: int, fineness: Fineness | None = None) -> StageTables:
    rng = random.Random(seed)
    devices = rng.randint(1, 4)
    memory_bytes = int(10 ** rng.uniform(6, 7.5)) if seed % 2 else None
    options = PlanOptions(gpus=devices, memory_bytes=memory_bytes, shard="auto")
    costs = CostModel(random_profile(seed, batches=(4, 6)), random_cluster(seed, devices), options)
    family = rng.choice(families(costs.batch, options))
    return StageTables(costs, Places(costs, pool_of(costs, exact=True, use_all=False)), family, options, fineness)


def test_every_stage_that_fits_is_there_once_and_no_term_exceeds_the_stages_own() -> None:
    exact = absent = 0
    for seed in range(40):
        tables = _tables(seed)
        costs, family = tables.costs, tables.family
        for first in range(tables.layers):
            found = tables.next(first)
            there = list(zip(found.way.tolist(), found.length.tolist(), strict=True))
            assert len(set(there)) == len(there)
            for number, way in enumerate(tables.ways):
                if way.choice.recomputes or tables.moves[number].after[0] >= tables.pool.states:
                    continue
                devices = tables.pool.devices(0, way.kind, way.width, way.variant)
                shares = costs.shares(family.micro_batch_size, way.width, way.choice.division)
                for length in range(1, tables.layers - first + 1):
                    stage = CandidateStage(first, first + length, devices, shares, 1, (), *way.choice[1::-1])
                    depths = range(1, stage.turns(0, family.micro_batches) + 1)
                    fitting = [
                        stage._replace(warmup=depth)
                        for depth in depths
                        if costs.shortfall(Candidate(*family, (stage._replace(warmup=depth),)), 0) <= 0
                    ]
                    assert ((number, length) in there) == bool(fitting), f"seed {seed}: {stage}"
                    absent += not fitting
                    if not fitting:
                        continue
                    own = stage_terms(costs, fitting[-1], family.micro_batches)
                    at = there.index((number, length))
                    place = np.array(
                        [int(move.place[0]) if move.after[0] < tables.pool.states else 0 for move in tables.moves]
                    )
                    term = found.stages[:, place[number], at].tolist()
                    pairs = zip(term, own[: len(term)], strict=True)
                    assert all(a <= b * (1 + 1e-9) + 1e-15 for a, b in pairs), f"seed {seed}"
                    assert term[:3] == pytest.approx([float(each) for each in own[:3]], rel=1e-9), f"seed {seed}"
                    exact += 1
    assert exact > 600
    assert absent > 30


def test_stages_that_are_taken_together_take_no_longer_than_any_of_them() -> None:
    compared = 0
    for seed in range(30):
        fine, rough = _tables(seed), _tables(seed, Fineness(lengths=2, growth=1.5))
        for first in range(fine.layers):
            each, every = fine.next(first), rough.next(first)
            alone_s = [float(seconds.min(initial=np.inf)) for seconds in (each.alone_s, every.alone_s)]
            assert alone_s[1] <= alone_s[0] * (1 + 1e-9), f"seed {seed}: {first}"
            for length in range(1, fine.layers - first + 1):
                own = each.alone_s[:, each.length == length].min(initial=np.inf)
                within = (every.length <= length) & (length <= every.longest)
                assert every.alone_s[:, within].min(initial=np.inf) <= own * (1 + 1e-9), f"seed {seed}"
                compared += bool(np.isfinite(own))
    assert compared > 100


def test_tables_that_no_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    options = PlanOptions(gpus=16)
    costs = CostModel(gpt_profile(blocks=40, batch=64), local_cluster(16), options)
    family, pool = families(64, options)[3], pool_of(costs, exact=True, use_all=False)
    tables = StageTables(costs, Places(costs, pool), family, options)
    monkeypatch.setattr(stages, "MOST_BYTES", sum(tables.next(first).stages.nbytes for first in range(tables.layers)))
    with pytest.raises(UsageError, match=r"42 layers on 16 devices takes about .* GiB of tables; narrow it with fewer"):
        StageTables(costs, Places(costs, pool), family, options)
