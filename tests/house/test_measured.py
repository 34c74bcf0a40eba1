"""The runs that predictions are held against: how they are read, and that the record is within its bounds."""

import json
import os
from pathlib import Path

import pytest
import torch

import measured
from autopar.profiler.kernels import Kernel
from paths import ROOT

DATA = pytest.mark.skipif("AUTOPAR_DATA" not in os.environ, reason="AUTOPAR_DATA names no folder of published data")
BOUNDS = {"b200": 0.1, "dgx": 0.08, "l4": 0.09, "nanotron, one node": 0.15}


@DATA
def test_runs_are_read_with_what_they_used() -> None:
    folder = Path(os.environ["AUTOPAR_DATA"])
    b200, dgx, nanotron = (measured.read_runs(folder, table) for table in ("b200", "dgx", "nanotron"))
    assert {(run.team, run.stages, run.replicas) for run in b200} == {(1, 2, 4), (2, 1, 4), (4, 1, 2), (8, 1, 1)}
    assert {(run.shard, run.sequence) for run in b200} == {("optimizer", 4096)}
    assert {run.batch // run.replicas for run in dgx} == {32}
    assert {(run.sequence, run.way.meets_all, run.way.fuses) for run in dgx} == {(4096, True, True)}
    assert [run.gpus for run in dgx] == [run.replicas for run in dgx] == [8, 16, 32, 64, 128]
    assert {run.shard for run in nanotron} == {"none", "optimizer"}
    assert sum(run.is_stalled for run in nanotron) == 4
    assert not any(run.is_stalled for run in (*b200, *dgx))
    again = {run.step_s for run in nanotron if (run.model, run.stages, run.micro_batch) == ("nanotron-1B", 8, 1)}
    assert max(again) > 50 * min(again)


def test_attention_is_causal_but_where_queries_meet_the_keys_of_another_device() -> None:
    kernel = Kernel("attention", "attention", torch.bfloat16, 8, 0, 0)
    for meets_all in (False, True):
        way = measured.Way(fuses=True, meets_all=meets_all, sums_late=False)
        assert [each.flops for each in measured._kernels([kernel], way)] == [16 if meets_all else 8]


@pytest.mark.slow
@DATA
def test_aceso_s_plans_of_teams_are_priced_by_its_operators_beside_its_own_prices() -> None:
    found = list(measured.of_operators(Path(os.environ["AUTOPAR_DATA"])))
    ours, theirs = ([each for each in found if each.run.table == table] for table in ("l4", "l4, by Aceso"))
    assert len(ours) == len(theirs) == 14
    assert {each.run.team for each in ours} == {1, 2, 4}
    # What Aceso's authors' model has of these runs, by whose measured them.
    assert sum(abs(each.error) for each in theirs) / 14 == pytest.approx(0.092, abs=0.0005)
    assert min(each.error for each in theirs) == pytest.approx(-0.123, abs=0.0005)
    for one, other in zip(ours, theirs, strict=True):
        if one.run.team == 1:
            assert one.step_s == pytest.approx(other.step_s, rel=0.03)
    assert sum(abs(each.error) for each in ours) / 14 < 0.09


def test_what_is_recorded_is_within_its_bounds() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "measured.json").read_text())
    scores = record["scores"]
    for table, bound in BOUNDS.items():
        assert scores[table]["error_mean"] <= bound
    for table in ("b200", "nanotron, one node", "nanotron, 2 to 16 nodes"):
        assert scores[table]["memory_mean"] <= 0.1
    alone = [abs(row["error"]) for row in record["runs"] if row["table"] == "b200" and row["team"] == 1]
    assert sum(alone) / len(alone) <= 0.06
    assert scores["b200"]["regret_mean"] <= 0.03
    assert scores["l4"]["regret_mean"] <= 0.005
    assert {"error_median", "bias", "error_worst", "rank_correlation", "regret_mean"} <= set(scores["nanotron"])
