"""The runs that predictions are held against: how they are read, and that the record is within its bounds."""

import json
import os
from pathlib import Path

import pytest

import measured
from paths import ROOT

DATA = pytest.mark.skipif("AUTOPAR_DATA" not in os.environ, reason="AUTOPAR_DATA names no folder of published data")
BOUNDS = {"b200": 0.06, "dgx": 0.08}


@DATA
def test_runs_are_read_with_what_they_used() -> None:
    folder = Path(os.environ["AUTOPAR_DATA"])
    b200, dgx, nanotron = (measured.read_runs(folder, table) for table in ("b200", "dgx", "nanotron"))
    assert {(run.stages, run.replicas, run.shard, run.sequence) for run in b200} == {(2, 4, "optimizer", 4096)}
    assert {run.batch // run.replicas for run in dgx} == {32}
    assert {(run.sequence, run.way.meets_all, run.way.fuses) for run in dgx} == {(4096, True, True)}
    assert [run.gpus for run in dgx] == [run.replicas for run in dgx] == [8, 16, 32, 64, 128]
    assert {run.shard for run in nanotron} == {"none", "optimizer"}
    assert sum(run.is_stalled for run in nanotron) == 4
    assert not any(run.is_stalled for run in (*b200, *dgx))
    again = {run.step_s for run in nanotron if (run.model, run.stages, run.micro_batch) == ("nanotron-1B", 8, 1)}
    assert max(again) > 50 * min(again)


@DATA
def test_aceso_s_operators_are_a_pipeline_of_their_own_times() -> None:
    rows = [each for each in measured.of_operators(Path(os.environ["AUTOPAR_DATA"])) if each.run.model == "1_3B"]
    assert [each.run.stages for each in rows] == [2]
    assert -0.15 < rows[0].error < 0


def test_what_is_recorded_is_within_its_bounds() -> None:
    scores = json.loads((ROOT / "benchmarks" / "results" / "measured.json").read_text())["scores"]
    for table, bound in BOUNDS.items():
        assert scores[table]["error_mean"] <= bound
    assert scores["b200"]["memory_mean"] <= 0.1
    assert {"error_median", "bias", "error_worst", "rank_correlation", "regret_mean"} <= set(scores["nanotron"])
