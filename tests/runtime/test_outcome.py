"""What ranks bring back becomes a report: where time went, and measured over predicted, of results made by hand."""

import random

import pytest

from autopar.runtime.outcome import outcome_of
from autopar.schedules.expand import expand
from played import plan_of, results_of


@pytest.mark.parametrize(
    ("schedule", "widths", "chunks"), [("1f1b", (2, 1), 1), ("interleaved", (1, 1), 2), ("zb-h1", (1, 1, 1), 1)]
)
def test_every_ranks_times_sum_to_the_step_they_are_of(schedule: str, widths: tuple[int, ...], chunks: int) -> None:
    plan, draw = plan_of(schedule, widths, chunks), random.Random(0)
    results = results_of(plan, 5, lambda step, rank, action: draw.uniform(0.1, 1.0))
    outcome = outcome_of(plan, expand(plan), results, "drawn")
    ends = [max(result["ends_s"][step] for result in results) for step in range(5)]
    lengths = [end - before for before, end in zip([0.0, *ends], ends, strict=False)]
    report = outcome.report
    for times in report.rank_times:
        total = times.compute_s + times.update_s + times.reduce_s + times.waiting_s + times.transfer_s + times.idle_s
        assert min(abs(total - length) for length in lengths[1:]) < 1e-9
        assert times.in_flight == times.predicted_in_flight
        assert report.predicted_peak_bytes[times.rank] == 100 + max(times.stages)


def test_the_first_step_counts_for_nothing_and_an_outlier_moves_no_median() -> None:
    plan = plan_of("1f1b", (1, 1))
    slow = {0: 100.0, 7: 10.0}
    results = results_of(plan, 10, lambda step, rank, action: slow.get(step, 1.0))
    outcome = outcome_of(plan, expand(plan), results, "drawn")
    actions = max(len(rank) for rank in expand(plan).ranks)
    times = outcome.report.step_s
    assert times.median == pytest.approx(actions + 1)
    assert times.p90 < times.longest == pytest.approx(10 * actions + 1)
    assert times.first == pytest.approx(100 * actions + 1)
    assert all(times == pytest.approx(1.0) for (_, action), times in outcome.own_times.items() if action.kind in "FBU")


def test_operations_are_held_against_the_devices_peak_where_that_is_known() -> None:
    plan = plan_of("1f1b", (1, 1))
    results = results_of(plan, 3, lambda step, rank, action: 1.0)
    report = outcome_of(plan, expand(plan), results, "drawn").report
    assert report.model_flops is report.flops_utilisation is None
    for result in results:
        result["peak_flops_per_s"] = 2e12
    report = outcome_of(plan, expand(plan), results, "drawn").report
    assert report.model_flops == 6e12
    assert report.flops_utilisation == pytest.approx(6e12 / (4e12 * report.step_s.median))
