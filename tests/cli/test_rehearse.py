"""``autopar rehearse --steps``: a plan in virtual time, and its trace over the prediction."""

import json
import re

import pytest

import autopar
from autopar.errors import FileError, UsageError
from autopar.formats.timeline import Timeline
from calls import Run, well


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


def test_python_has_the_same(run: Run) -> None:
    well(run, "plan", "--gpus", "2", "--stages", "0-6:1,7-13:1")
    rehearsal = autopar.rehearse("plan.json", steps=1, threads=True)
    assert rehearsal.steps_s == (pytest.approx(autopar.simulate("plan.json").end_s),)
    assert rehearsal.timeline.plot() is not None
    for options, error, said in (
        ({"steps": 0}, UsageError, "`steps` must be at least 1, found 0"),
        ({"real_time": True}, UsageError, "`real_time` is of steps"),
        ({"steps": 1, "program": "no.json"}, FileError, "no.json"),
    ):
        with pytest.raises(error, match=re.escape(said)):
            autopar.rehearse("plan.json", **options)  # type: ignore[call-overload]
