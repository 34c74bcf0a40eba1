"""What ranks bring back becomes a report: where time went, and measured over predicted, of results made by hand."""

import random

import pytest

from autopar.runtime.checkpoint.writer import SaveResult
from autopar.runtime.outcome import Steps, outcome_of
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
    busy_s = sum(times.compute_s + times.update_s for times in report.rank_times)
    assert report.bubble == pytest.approx(1 - busy_s / (len(results) * total), rel=1e-9)
    median_s = report.step_s.median
    assert (report.error, report.samples_per_s) == pytest.approx((10.0 / median_s - 1, plan.batch / median_s))


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


def test_evaluations_are_told_and_count_for_no_step() -> None:
    plan = plan_of("1f1b", (1, 1))
    results = results_of(plan, 12, lambda step, rank, action: 1.0)
    before = outcome_of(plan, expand(plan), results, "drawn").report
    late = {4: 50.0, 8: 70.0, 10: 30.0}
    for result in results:
        moved = [sum(pause for at, pause in late.items() if at <= step) for step in range(12)]
        for key in ("starts_s", "ends_s"):
            result[key] = [moment + later for moment, later in zip(result[key], moved, strict=True)]  # type: ignore[literal-required]
        result["times_s"] = {
            step: [(start + moved[int(step)], end + moved[int(step)]) for start, end in spans]
            for step, spans in result["times_s"].items()
        }
        # One rank has waited for the others before.
        result["pauses_s"] = [late.get(step, 0.0) + 3.0 * result["rank"] for step in range(12)]
        # As they come from other processes.
        result["evaluations"] = {"10": 0.25, "4": 0.5, "8": 0.75}  # type: ignore[dict-item]
    after = outcome_of(plan, expand(plan), results, "drawn").report
    assert [(each.step, each.loss) for each in after.evaluations] == [(4, 0.5), (8, 0.75), (10, 0.25)]
    assert (after.step_s, after.bubble, after.rank_times) == (before.step_s, before.bubble, before.rank_times)


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
    results[0]["peak_flops_per_s"] = None
    assert outcome_of(plan, expand(plan), results, "drawn").report.flops_utilisation is None


def test_deciles_are_of_all_steps_but_the_first_and_the_typical_one_is_the_last_at_the_median() -> None:
    plan = plan_of("1f1b", (1, 1))
    actions, program = max(len(rank) for rank in expand(plan).ranks), expand(plan)
    steps = Steps(program, results_of(plan, 12, lambda step, rank, action: float(step)))
    times = steps.times()
    assert [times.p10, times.median, times.p90] == [1 + actions * step for step in (2, 6, 10)]
    assert (times.first, times.longest, steps.typical) == (1, 1 + actions * 11, 6)
    # Of equal ones, but for one that nothing follows.
    assert Steps(program, results_of(plan, 5, lambda step, rank, action: 1.0)).typical == 3
    # The first step counts for nothing, even beside a single other one.
    slow = outcome_of(plan, program, results_of(plan, 2, lambda step, rank, action: 9.0 - 8 * step), "drawn")
    assert all(times == pytest.approx(1.0) for (_, action), times in slow.own_times.items() if action.kind in "FBU")


@pytest.mark.parametrize(("loaders", "work_s", "said"), [(0, 3.0, 2), (1, 6.0, 3), (4, 6.0, 3), (0, 0.0, 0)])
def test_what_is_waited_for_samples_is_apart_and_so_many_loaders_would_do(
    loaders: int, work_s: float, said: int
) -> None:
    plan = plan_of("1f1b", (2,))
    program, length_s = expand(plan), 0.25
    results = results_of(plan, 4, lambda step, rank, action: length_s)
    for rank, result in enumerate(results):
        # Two ranks read half each; one waits in what is left of the second before every step.
        result["loaders"], result["loading_work_s"] = loaders, [9.0, *[work_s / 2] * 3]
        spans = {str(step): [(start, start + 0.75)] for step, start in enumerate(result["starts_s"])}
        result["loading_s"] = spans if work_s and rank else {step: [] for step in spans}
    report = outcome_of(plan, program, results, "drawn").report
    step_s, waited_s = 1 + length_s * len(program.ranks[0]), 0.75 if work_s else 0.0
    assert report.loading is not None
    assert (report.loading.waiting_s, report.loading.work_s) == pytest.approx((waited_s, work_s))
    assert report.loading.loaders_needed == said == -(-1.1 * work_s // (step_s - waited_s))
    assert [each.loading_s for each in report.rank_times] == pytest.approx([0.0, waited_s])


def test_of_repetitions_with_several_mini_batches_times_are_those_of_one() -> None:
    plan, draw = plan_of("1f1b", (2, 1)), random.Random(0)
    results = results_of(plan, 4, lambda step, rank, action: draw.uniform(0.1, 1.0))
    single, double = (Steps(expand(plan), results, span) for span in (1, 2))
    assert double.lengths_s == pytest.approx([each / 2 for each in single.lengths_s])
    for one, two in zip(single.time_use(2), double.time_use(2), strict=True):
        assert two == pytest.approx([each / 2 for each in one])
    turning = plan.stages[0].model_copy(update={"division": "round-robin"})
    turns = plan.model_copy(update={"weight_policy": "stash", "stages": (turning, *plan.stages[1:])})
    for result in results:
        result["peak_flops_per_s"] = 2e12
    flops = [outcome_of(each, expand(plan), results, "drawn").report.model_flops for each in (plan, turns)]
    assert (turns.span, flops) == (2, [9e12, 4.5e12])


def test_a_report_counts_overflows_checkpoints_and_what_every_rank_holds_for_them() -> None:
    plan = plan_of("1f1b", (1, 1))
    results = results_of(plan, 4, lambda step, rank, action: 1.0)
    saves = [SaveResult(1, 0.5, 4.0, None), SaveResult(2, 0.1, 1.0, "no space"), SaveResult(3, 0.2, 2.0, None)]
    for rank, result in enumerate(results):
        result["checkpoints"], result["buffers_bytes"], result["peak_bytes"] = saves, 30 + rank, 70 + rank
        result["gradient_norm"], result["overflow"] = [None, 2.0, None, 1.0], [True, False, True, False]
        result["loss"], result["count"] = [6.0 * rank] * 4, [2.0 + rank] * 4
        # The second rank's steps begin sooner before its first action.
        result["starts_s"] = [each + 0.25 * rank for each in result["starts_s"]]
    outcome = outcome_of(plan, expand(plan), results, "drawn", first_step=3)
    report, saved = outcome.report, outcome.report.checkpoints
    assert (report.overflows, report.gradient_norm, report.loss) == (2, (None, 2.0, None, 1.0), (1.2,) * 4)
    assert (report.steps, report.first_step, report.peak_bytes, outcome.overhead_s) == (4, 3, (70, 71), 1.0)
    assert saved is not None
    assert (saved.steps, saved.failures) == ((1, 3), ("step 2: no space",))
    assert (saved.pause_s, saved.busy_s, saved.buffers_bytes) == (0.2, 2.0, (30, 31))
