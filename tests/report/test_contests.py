"""Contests as tables, frames and a picture: everyone is in all of them, those in trouble too."""

import pytest

import autopar
from autopar.formats.contest import Contestant, ContestResult, ContestRow, RunComparison, ordered
from autopar.report.contests import draw_contests, render_contests
from autopar.report.frames import contest_frame, losses_frame
from autopar.report.table import as_text
from played import plan_of

SINKING = tuple(5.0 - at / 10 for at in range(30))


def _found(loss: float | None, cluster: str | None) -> RunComparison:
    def row(name: str, *results: ContestResult) -> ContestRow:
        return ContestRow(Contestant(name, plan_of("1f1b", (1, 1)), "0:1,1:1"), results, cluster is not None)

    measured = {"step_s": 0.25, "peak_bytes": 2**20}
    rows = [
        row("$quick$", ContestResult(loss=SINKING, **measured), ContestResult(loss=SINKING[:20] * 2, **measured)),
        row(
            "diverges", ContestResult(loss=SINKING[:3], diverged="the loss is inf"), ContestResult(loss=(), failure="x")
        ),
        ContestRow(Contestant("refused", refusal="it fits no memory"), ()),
    ]
    return RunComparison("model.py", ordered(rows, loss), loss, cluster, ("a note",))


@pytest.mark.parametrize("loss", [None, 3.6, -1.0])
@pytest.mark.parametrize("cluster", [None, "8xH100"])
def test_everyone_is_shown_with_what_happened(loss: float | None, cluster: str | None) -> None:
    found = _found(loss, cluster)
    text = as_text(render_contests(found))
    for expected in ("$quick$", "it fits no memory", "diverged after 3 mini-batches: the loss is inf", "note: a note"):
        assert expected in text
    assert ("never" in text) == (loss == -1.0)
    assert ("measured" in text.split("What they hold")[0]) == (cluster is None)
    assert ("simulated for" in text or "as on 8xH100" in text) == (cluster is not None)
    figure = draw_contests(found)
    left, right = figure.axes
    assert [each.get_label() for each in left.lines if not each.get_label().startswith("_")] == ["diverges", "$quick$"]
    # Seconds are those by which rows are compared; of who has none, there is no second curve.
    last = 30 * (10.0 if cluster else 0.25)
    assert max(max(each.get_xdata()) for each in right.lines if len(each.get_xdata()) > 2) >= last


def test_frames_have_a_row_for_everyone_and_a_column_for_every_seed() -> None:
    found = _found(3.5, None)
    frame = contest_frame(found.rows, found.loss)
    assert {*frame.index} == {"$quick$", "diverges", "refused"}
    assert frame.loc["$quick$", "loss"] == pytest.approx(3.05)
    assert frame.loc["$quick$", "loss_least"] <= frame.loc["$quick$", "loss"] <= frame.loc["$quick$", "loss_most"]
    assert frame.loc["diverges", "trouble"].startswith("diverged")
    losses = losses_frame(found.rows)
    assert tuple(losses["$quick$", 0].dropna()) == SINKING
    assert losses["diverges", 0].count() == 3
    shown = autopar.RunComparison(*found)
    assert repr(shown) == "<3 plans of model.py compared by running>"
    assert "$quick$" in shown._repr_html_()
    assert shown.losses().equals(losses)
