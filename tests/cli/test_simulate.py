"""``autopar simulate``, of programs and other inputs; ``rehearse --steps``, a plan in virtual time, and its trace."""

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


def test_another_profile_or_cluster_takes_the_place_of_the_recorded_one_and_python_has_the_same(run: Run) -> None:
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


@pytest.mark.slow
def test_steps_take_as_long_as_simulated_and_their_trace_lies_over_the_prediction(run: Run) -> None:
    well(run, "plan", "--gpus", "2", "--min-stages", "2")
    out, err = well(run, "rehearse", "--steps", "2", "--trace", "trace.json", "--json")
    figures = json.loads(out)
    assert figures["steps_s"] == pytest.approx([figures["simulated_s"]] * 2, rel=1e-9)
    assert "Rehearsed step" in err
    timeline = Timeline.load("trace.json")
    assert timeline.origin == "rehearsed"
    peaks = timeline.peaks_bytes()
    assert list(peaks.values()) == figures["peak_bytes"]
    assert set(timeline.limits_bytes) == set(peaks) == {0, 1}
    assert f"most memory: rank {max(peaks, key=peaks.__getitem__)}" in err
    shown = json.loads(well(run, "show", "trace.json", "--over", "plan.json", "--json")[0])
    assert shown["error"] == pytest.approx(0.0, abs=1e-6)
    assert set(shown) == {"rehearsed", "predicted", "error"}
