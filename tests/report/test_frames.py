"""Frames hold what objects hold, as numbers; styled, with their units."""

import pytest
from pandas import DataFrame

from autopar.formats.report import ComparisonRow
from autopar.formats.timeline import Timeline
from autopar.hardware.clusters import cluster_named
from autopar.report.frames import cluster_frame, comparison_frame, plan_frame, profile_frame, style, timeline_frame
from played import play, small_plan
from random_problems import random_profile


@pytest.mark.parametrize("seed", range(20))
def test_a_profiles_frame_has_every_cost_and_charges_a_cut_with_what_crosses_it(seed: int) -> None:
    profile = random_profile(seed, most_layers=9, skips=0.3)
    frame = profile_frame(profile)
    assert len(frame) == sum(len(layer.costs) for layer in profile.layers)
    for index, layer in enumerate(profile.layers):
        for cost in layer.costs:
            row = frame.loc[(layer.name, cost.micro_batch)]
            assert (row.forward_s, row.backward_s) == (cost.forward_s, cost.backward_s)
            assert (row.saved_bytes, row.peak_bytes) == (cost.saved_bytes, cost.peak_bytes)
            assert row.crossing_bytes_per_sample == profile.crossing_bytes()[index]


@pytest.mark.parametrize(("widths", "schedule"), [((1,), "gpipe"), ((2, 1, 3), "1f1b"), ((1, 2), "zb-v")])
def test_plans_and_timelines_have_a_row_for_each_stage_and_action(widths: tuple[int, ...], schedule: str) -> None:
    plan = small_plan(widths, 4, schedule)
    frame = plan_frame(plan)
    assert [*frame.replicas] == [stage.replicas for stage in plan.stages]
    assert [*frame.peak_bytes] == [*plan.predicted.peak_bytes]
    assert frame.forward_s.isna().all()  # nobody has predicted them
    timeline = play(plan)
    events = timeline_frame(timeline)
    assert [(row.rank, row.action, row.start_s, row.end_s) for row in events.itertuples()] == [
        (event.rank, str(event.action), event.start_s, event.end_s) for event in timeline
    ]
    assert len(timeline_frame(Timeline("measured"))) == 0


def test_clusters_and_comparisons_have_a_row_for_each_device_and_planner_and_units_are_read() -> None:
    cluster = cluster_named("2x4xH100:100Gbps")
    frame = cluster_frame(cluster)
    assert [*frame.node] == [0] * 4 + [1] * 4
    assert [*frame.memory_bytes] == [device.memory_bytes for device in cluster.devices]
    rows = (ComparisonRow("autopar", "0-1:1", 4, "1f1b", 0.5, 2**30), ComparisonRow("GPipe", infeasible="<too large>"))
    planners = comparison_frame(rows)
    assert planners.loc["autopar", "step_s"] == 0.5
    shown = style(planners).to_html()
    assert ("500 ms" in shown, "1 GiB" in shown, "nan" in shown) == (True, True, False)
    assert "&lt;too large&gt;" in shown
    hostile = DataFrame({"<b>_s": [1.0]}, index=["<i>"])
    assert not {"<b>", "<i>"} & set(style(hostile).to_html().replace(">", "<").split("<"))
