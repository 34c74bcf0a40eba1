"""What is drawn of timelines: every action where it was, ranks that are alike once, and never too much at once."""

from typing import Any

import pytest

from autopar.formats.prediction import HeldBytes
from autopar.formats.timeline import Timeline, track_of
from autopar.report.html.charts import Chart
from autopar.report.html.steps import MOST_ACTIONS, HeldByRank, recorded_bytes, step
from played import play, small_plan


def _rows(chart: Chart) -> list[dict[str, Any]]:
    data = chart.spec["data"]["values"]
    return [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "zb-v", "interleaved"])
def test_every_action_of_a_drawn_rank_is_where_it_was(schedule: str) -> None:
    timeline = play(small_plan((2, 1), 4, schedule, chunks=2 if schedule == "interleaved" else 1))
    drawn = step("title", {"": timeline})
    wanted = sorted(
        (str(event.action), float(f"{event.start_s * 1e3:.7g}"), float(f"{event.end_s * 1e3:.7g}"))
        for event in timeline
        if event.rank != 1
    )
    assert sorted((row["name"], row["x"], row["x2"]) for row in _rows(drawn)) == wanted
    computed = {int(row["y"]) for row in _rows(drawn) if track_of(_kind(row)) == "compute"}
    assert computed == {0, 1}
    assert "0, 1 (x 2)" in drawn.spec["encoding"]["y"]["axis"]["labelExpr"]
    colours = drawn.spec["encoding"]["color"]["scale"]["domain"]
    assert (
        {row["what"] for row in _rows(drawn)}
        == set(colours)
        == {key.text for legend in drawn.legends for key in legend}
    )


def _kind(row: dict[str, Any]) -> str:
    return row["name"].partition("@")[0].rstrip("0123456789")


@pytest.mark.parametrize("jitter", [0.0, 0.4])
def test_no_more_is_drawn_than_a_browser_draws_at_once_and_what_is_left_out_is_said(jitter: float) -> None:
    timeline = play(small_plan((1,) * 40, 160), "measured", jitter)
    drawn = step("title", {"": timeline})
    assert len(_rows(drawn)) <= MOST_ACTIONS
    assert "32 of 40 rows are shown." in drawn.about
    assert "left out" in drawn.about or "the first" in drawn.about
    assert "left out" not in step("title", {"": play(small_plan((1,) * 4, 8))}).about


def test_a_measured_row_is_above_the_predicted_one_of_the_same_ranks() -> None:
    both = {"measured": play(small_plan((2, 1), 2), "measured", 0.01), "predicted": play(small_plan((2, 1), 2))}
    drawn = step("title", both)
    assert (
        '["0, 1 (x 2), measured", "predicted", "2, measured", "predicted"]'
        in (drawn.spec["encoding"]["y"]["axis"]["labelExpr"])
    )


def test_what_is_held_is_stacked_up_to_the_limit() -> None:
    timeline = play(small_plan((1,), 2))
    held = HeldBytes((0.0, timeline.end_s / 2), {"parameters and buffers": (40, 40), "activations": (0, 40)}, 100)
    rows = [row for row in _rows(step("title", {"": timeline}, HeldByRank(0, held))) if row["y"] < 0]
    heights = [row["y2"] - row["y"] for row in rows]
    assert heights == pytest.approx([1.8] * 3)
    assert [row["value"] for row in rows] == ["40 B"] * 3
    assert rows[2]["y2"] == rows[1]["y"]
    assert recorded_bytes(timeline) is None
    counted = Timeline("rehearsed", memory={0: [(0.0, 5)], 1: [(0.0, 7)]}, limits_bytes={0: 6, 1: 9})
    found = recorded_bytes(counted)
    assert found is not None
    assert (found.rank, found.held.totals, found.held.limit_bytes) == (0, (5,), 6)
