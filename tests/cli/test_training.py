"""``autopar run --update-profile``: what a run measured, planned with again."""

from pathlib import Path

import pytest

from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.formats.report import Report
from calls import Run, refused, well
from profiled import times_as_long, write_profiled


@pytest.mark.slow
def test_a_profile_that_was_wrong_predicts_what_a_run_measured_once_the_run_has_updated_it(run: Run) -> None:
    write_profiled(Path(), "mlp-64")
    # Far from what a layer takes on any machine, however busy.
    before = times_as_long(Profile.load("profile.json"), 3000)
    before.save("profile.json")
    stages = ("--gpus", "2", "--stages", "0-3:1,4-10:1", "--micro-batches", "2", "--schedule", "1f1b")
    well(run, "plan", *stages)
    refused(run, 2, "--output new.json: names what --update-profile writes", "run", "-o", "new.json")
    refused(run, 2, "profile.json exists; pass --overwrite", "run", "--update-profile")
    replaced = ("run", "--update-profile", "-o", "plan.json", "--overwrite")
    refused(run, 2, "plan.json is read by this command", *replaced)
    Path("new").mkdir()
    _, said = well(run, "run", "--steps", "12", "--update-profile", "-o", "new/profile.json")
    assert "`autopar plan new/profile.json` plans with what was measured" in said
    assert before == Profile.load("profile.json")

    report = Report.load("report.json")
    assert {"F", "B", "U"} <= {each.kind for each in report.kinds}
    assert all(each.ratio < 0.5 for each in report.kinds if each.kind in "FB")
    well(run, "plan", "new/profile.json", *stages, "-o", "again.json")
    again, first = Plan.load("again.json"), Plan.load("plan.json")
    assert again.model.source == "mlp.py"
    measured_s = report.step_s.median
    assert abs(again.predicted.step_s - measured_s) < abs(first.predicted.step_s - measured_s) / 4
    if Path("new/cluster.json").exists():
        (link,) = Cluster.load("new/cluster.json").links
        assert link.provenance == "measured"

    with Path("profile.json").open("a") as file:
        file.write("\n")
    refused(run, 4, "has changed since the plan was made", "run", "--update-profile", "-o", "other.json")
