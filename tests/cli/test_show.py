"""``autopar show``: every kind of file, pictures and pages, and two timelines over each other."""

import json
from pathlib import Path

import pytest

import autopar
from autopar.api import inputs
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.formats.timeline import Timeline
from autopar.schedules.expand import action_count
from calls import Run, ended, refused, well
from played import timeline
from random_problems import gpt_profile

PNG = b"\x89PNG"
KEPT = Path(__file__).parents[1] / "formats" / "kept"


@pytest.fixture
def run(run: Run) -> Run:
    """Run autopar in a folder with a small profile, a cluster, a plan of two stages, and timelines."""
    gpt_profile(blocks=2).save("profile.json")
    well(run, "plan", "--gpus", "2", "--stages", "0-1:1,2-3:1", "--micro-batches", "2")
    timeline("measured", "F0@0 0 0.2  F1@0 0.2 0.4").save("measured.json")
    timeline("simulated", "F0@0 0 0.1  F1@0 0.1 0.2").save("simulated.json")
    return run


def test_steps_are_drawn_where_asked_and_every_kind_of_file_becomes_a_page(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = well(run, "show", "cluster.json")
    assert (out, "8 GiB" in err) == ("", True)
    out, _ = well(run, "show", "measured.json", "--png", "picture.png", "--json")
    assert json.loads(out)["step_s"] == pytest.approx(0.4)
    assert Path("picture.png").read_bytes().startswith(PNG)
    Path("mine.png").write_text("precious")
    code, _, err = run("show", "measured.json", "--png", "mine.png")
    assert (code, "--overwrite" in err, Path("mine.png").read_text()) == (2, True, "precious")
    well(run, "show", "measured.json", "--png", "mine.png", "--overwrite")
    assert Path("mine.png").read_bytes().startswith(PNG)
    for name, count in {"cluster": 0, "plan": 3, "measured": 1, "profile": 3}.items():
        out, _ = well(run, "show", f"{name}.json", "--html", f"{name}.html", "--json")
        text = Path(f"{name}.html").read_text()
        assert text.startswith("<!DOCTYPE html>")
        assert text.count('<div class="chart"') == count
        assert f"autopar show {name}.json --html {name}.html" in text
    assert Profile.parse(out, Path("stdout")) == gpt_profile(blocks=2)
    assert "Where time and memory are" in text
    for picture in ("memory", "layers", "search"):
        well(run, "show", "plan.json", "--picture", picture, "--png", f"{picture}.png")
        assert Path(f"{picture}.png").read_bytes().startswith(PNG)
    names = "placement, timeline, stages, messages, memory, layers, search"
    said = f"autopar: --picture memroy: plan.json is a plan, which has the pictures {names}; did you mean "
    refused(run, 2, said, "show", "plan.json", "--picture", "memroy", "--png", "a.png")
    said = "autopar: --picture memory is drawn into a file; add --png memory.png\n"
    refused(run, 2, said, "show", "plan.json", "--picture", "memory")
    well(run, "show", "profile.json", "--png", "bars.png")
    assert Path("bars.png").read_bytes().startswith(PNG)
    well(run, "show", "measured.json", "--over", "simulated.json", "--html", "both.html")
    assert "measured: 400 ms" in Path("both.html").read_text()
    # A page has the picture; another is drawn where none is named, or where that one is.
    assert not Path("timeline.png").exists()
    well(run, "show", "measured.json", "--over", "simulated.json", "--html", "more.html", "--png", "both.png")
    assert Path("both.png").read_bytes().startswith(PNG)
    assert not Path("timeline.png").exists()
    count = action_count(Plan.load("plan.json"))
    monkeypatch.setattr(inputs, "MANY_ACTIONS", count - 1)
    assert f"Simulating {count:,} actions of" in well(run, "show", "plan.json", "--png", "step.png")[1]
    monkeypatch.setattr(inputs, "MOST_ACTIONS", count - 1)
    code, _, err = run("show", "plan.json", "--png", "other.png")
    assert (code, Path("other.png").exists()) == (2, False)
    assert f"a timeline of {count:,} actions of" in err


def test_two_traces_are_laid_over_each_other_and_a_measured_one_over_a_plan_that_is_drawn(run: Run) -> None:
    for one, other in (("measured", "simulated"), ("simulated", "measured")):
        out, _ = well(run, "show", f"{one}.json", "--over", f"{other}.json", "--json")
        assert json.loads(out)["error"] == pytest.approx(-0.5)
    assert not Path("timeline.png").exists()
    said = (
        "autopar: measured.json and measured.json are both measured; --over needs one that ranks recorded (`autopar "
        "run --trace`, `autopar rehearse --steps 1 --trace`) and a simulated one (`autopar simulate --trace`)\n"
    )
    refused(run, 2, said, "show", "measured.json", "--over", "measured.json")
    out, _ = well(run, "show", "plan.json", "--json", "--png", "step.png")
    assert json.loads(out)["format"] == "autopar.plan"
    assert Path("step.png").read_bytes().startswith(PNG)
    measured = Timeline("measured")
    for event in autopar.simulate("plan.json"):
        measured.add(event.rank, event.action, event.start_s * 2, event.end_s * 2)
    measured.save("trace.json")
    out, _ = well(run, "show", "trace.json", "--over", "plan.json", "--json")
    assert json.loads(out)["error"] == pytest.approx(-0.5, abs=1e-6)


def test_checkpoints_are_listed_by_their_manifests_and_verified_with_every_file(run: Run) -> None:
    Path("saved/step-3").mkdir(parents=True)
    Path("saved/step-3/manifest.json").write_bytes((KEPT / "checkpoint.json").read_bytes())
    assert "step 3" not in well(run, "checkpoint", "list", "saved")[1]
    ended(run, 4, "1 of 1 checkpoints are damaged: ", "checkpoint", "verify", "saved")
