"""``autopar compare``: a table for people, rows for programs."""

import json

from autopar.formats.plan import Plan
from calls import Run, files, well
from random_problems import gpt_profile


def test_compare_shows_every_planner_and_writes_nothing(run: Run) -> None:
    before = files()
    out, err = well(run, "compare", "--gpus", "4")
    assert (out, files()) == ("", before)
    for name in ("autopar", "data parallelism", "equal split", "GPipe", "by time", "by size", "PipeDream", "DAPPLE"):
        assert name in err
    assert "planning for 4 assumes 2 more like them" in err


def test_rows_on_stdout_hold_what_plan_finds(run: Run) -> None:
    gpt_profile(blocks=8).save("profile.json")
    asked = ("--gpus", "4", "--bandwidth", "300MB/s", "--memory", "45MiB", "--batch", "8")
    rows = json.loads(well(run, "compare", *asked, "--json")[0])
    keys = ["name", "stages", "micro_batches", "schedule", "step_s", "peak_bytes", "infeasible", "virtual_workers"]
    assert all(list(row) == [*keys, "over"] for row in rows)
    well(run, "plan", *asked)
    plan = Plan.load("plan.json")
    own = next(row for row in rows if row["name"] == "autopar")
    assert (own["step_s"], own["over"], own["micro_batches"]) == (plan.predicted.step_s, 0, plan.micro_batches)
    for row in rows:
        assert (row["step_s"] is None) == (row["over"] is None) == (row["infeasible"] is not None)
        assert row["peak_bytes"] is None or (row["peak_bytes"] <= 45 * 2**20) == (row["step_s"] is not None)
    assert any(row["infeasible"] is not None for row in rows)


def test_a_named_cluster_with_several_nodes_and_asked_micro_batches_are_planned_for(run: Run) -> None:
    asked = ("--cluster", "2x2xA100-80G:100Gbps", "--times-of", "cpu", "--micro-batches", "4", "--json")
    out, err = well(run, "compare", *asked)
    assert {row["micro_batches"] for row in json.loads(out) if row["micro_batches"]} == {4}
    assert "times of test stand for A100-SXM-80G" in err
