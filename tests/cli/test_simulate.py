"""``autopar simulate``: the program of a plan, and other inputs than those that it records."""

import json
from pathlib import Path

import pytest

from autopar.formats.plan import Plan
from autopar.formats.timeline import Timeline
from autopar.schedules.check import read_program
from autopar.schedules.expand import expand
from calls import Run, refused, well
from profiled import times_as_long
from random_problems import gpt_profile, local_cluster


def test_simulate_writes_the_program_that_is_run_and_all_that_perform_one_read_it(run: Run) -> None:
    well(run, "plan", "--gpus", "2", "--min-stages", "2")
    assert "Written: program.json" in well(run, "simulate", "--write-program", "program.json")[1]
    plan = Plan.load("plan.json")
    assert read_program(Path("program.json"), plan) == expand(plan)
    asked = ("--program", "program.json", "--json")
    for command in (("simulate",), ("rehearse", "--steps", "1")):
        well(run, *command, *asked)
    Path("program.json").write_text(Path("program.json").read_text().replace("F1@0 ", "", 1))
    for command in (("simulate",), ("rehearse", "--steps", "1")):
        refused(run, 4, "autopar: program.json", *command, *asked)


def test_another_profile_or_cluster_takes_the_place_of_the_recorded_one(run: Run) -> None:
    well(run, "plan", "--stages", "0-7:1,8-13:1", "--schedule", "1f1b", "--micro-batches", "4")
    times_as_long(gpt_profile(), 3).save("slow.json")
    cluster = local_cluster(2)
    link = cluster.links[0].model_copy(update={"latency_s": 0.0, "bytes_per_s": 1e15})
    cluster.model_copy(update={"links": (link,), "curves": ()}).save("free.json")
    figures = []
    for profile in ("profile.json", "slow.json"):
        options = ("--profile", profile, "--cluster", "free.json", "--trace", f"{profile}.trace", "--json")
        figures.append(json.loads(well(run, "simulate", *options)[0]))
    # Where links take no time, all takes three times as long.
    assert figures[1]["step_s"] == pytest.approx(3 * figures[0]["step_s"], rel=1e-3)
    assert figures[1]["bubble"] == pytest.approx(figures[0]["bubble"], abs=1e-3)
    assert Timeline.load("slow.json.trace").end_s == pytest.approx(figures[1]["step_s"], abs=1e-8)
