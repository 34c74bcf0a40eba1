"""A run beside its prediction, and inputs that predict what the run would have taken."""

from dataclasses import replace

import pytest

from autopar.api.runs import ESTIMATED, compare_with_prediction, planned_times, recalibrate
from autopar.errors import FileError, UsageError
from autopar.formats.timeline import Timeline, compare_times, own_times
from autopar.planner import PlanOptions, plan, simulate
from autopar.runtime.outcome import outcome_of
from autopar.schedules.expand import expand
from played import plan_of, play, results_of
from profiled import times_as_long
from random_problems import gpt_profile, local_cluster


def test_without_a_profile_a_stages_slowest_replica_is_compared_with_the_plans_own_times() -> None:
    plan = plan_of("1f1b", (2, 1))
    speeds = {("F", 0): 0.25, ("F", 1): 1.0, ("F", 2): 1.0, ("B", 0): 3.0, ("B", 1): 1.0, ("B", 2): 3.0}
    results = results_of(plan, 4, lambda step, rank, action: speeds.get((action.kind, rank), 0.125))
    outcome = outcome_of(plan, expand(plan), results, "drawn")
    kinds = compare_times(outcome.own_times, planned_times(plan, outcome))
    assert [(each.kind, each.actions, round(each.ratio, 9)) for each in kinds] == [("F", 8, 2.0), ("B", 8, 1.5)]


def test_a_run_is_held_against_what_was_predicted_of_it_kind_by_kind() -> None:
    plan = plan_of("1f1b", (1, 1))
    factors = {"F": 2.0, "B": 0.5, "U": 3.0}
    predicted = play(plan)
    units = own_times(predicted)
    # Alone, an action of a run takes what it is said to; messages depend on both ends, and are left out here.
    found = results_of(plan, 4, lambda _, rank, action: factors.get(action.kind, 1.0) * units.get((rank, action), 0.01))
    outcome = compare_with_prediction(outcome_of(plan, expand(plan), found, "drawn"), plan, lambda: predicted)
    ratios = {each.kind: each.ratio for each in outcome.report.kinds if each.kind in factors}
    assert ratios == pytest.approx(factors)
    assert outcome.report.notes == ()
    report = outcome.report
    assert sum(each.measured_s for each in report.causes) == pytest.approx(report.step_s.median)
    assert sum(each.predicted_s for each in report.causes) == pytest.approx(report.predicted_step_s)
    # What takes three times as long as predicted is what the step is longer by.
    updates = next(each for each in report.causes if each.cause == "updates")
    assert updates.measured_s == pytest.approx(3 * updates.predicted_s)


def test_where_nothing_can_be_predicted_the_plan_s_own_times_are_taken_and_a_note_says_why() -> None:
    def fail() -> Timeline:
        raise FileError("plan.json: $.profile: the plan records no profile")

    plan = plan_of("1f1b", (1, 1))
    outcome = outcome_of(plan, expand(plan), results_of(plan, 4, lambda step, rank, action: 1.0), "drawn")
    report = compare_with_prediction(outcome, plan, fail).report
    assert {each.kind: each.ratio for each in report.kinds} == pytest.approx({"F": 1 / 0.5, "B": 1 / 2.0})
    (note,) = report.notes
    assert note.endswith("the plan records no profile")
    mute = plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"forward_s": (), "backward_s": ()})})
    report = compare_with_prediction(outcome, mute, fail).report
    assert (report.kinds, report.causes, report.notes) == ((), (), ())


@pytest.mark.parametrize("loaders", [0, 1, 2, 3])
def test_a_step_is_predicted_to_wait_for_its_loaders_where_they_are_slower(loaders: int) -> None:
    profile, cluster, options = gpt_profile(blocks=4), local_cluster(2), PlanOptions(stages="0-2:1,3-5:1")
    computed_s = plan(profile, cluster, options).predicted.step_s - profile.step_overhead_s
    read_s = 2.0 * computed_s / profile.batch
    known = profile.model_copy(update={"read_s": 0.75 * read_s, "collate_s": 0.25 * read_s})
    known = known.model_copy(update={"step_overhead_s": 2.0 * computed_s})
    planned = plan(known, cluster, options)
    assert (planned.predicted.loading_s, planned.predicted.step_s) == pytest.approx((2 * computed_s, 3 * computed_s))
    results = results_of(planned, 4, lambda step, rank, action: 1.0)
    for result in results:
        result["loaders"] = loaders
    outcome = outcome_of(planned, expand(planned), results, "drawn")
    report = compare_with_prediction(outcome, planned, lambda: simulate(planned, known, cluster)).report
    late_s = max(0.0, 2 * computed_s / loaders - computed_s) if loaders else 2 * computed_s
    assert report.predicted_step_s == pytest.approx(computed_s + late_s)
    assert report.error == pytest.approx(report.predicted_step_s / report.step_s.median - 1)
    causes = {each.cause: each.predicted_s for each in report.causes}
    assert causes["loading"] == pytest.approx(late_s, abs=1e-12)
    assert sum(causes.values()) == pytest.approx(report.predicted_step_s)


def test_recalibrated_inputs_predict_the_step_that_was_run() -> None:
    profile, cluster = gpt_profile(blocks=6), local_cluster(2)
    link = cluster.links[0].model_copy(update={"latency_s": 2e-3, "bytes_per_s": 2e8})
    slow = cluster.model_copy(update={"links": (link,), "curves": ()})
    run = plan(profile, cluster, PlanOptions(stages="0-3:1,4-7:1", micro_batches=4, schedule="1f1b"))
    truth = simulate(run, times_as_long(profile, 3.0), slow)
    drawn = plan_of("1f1b", (1, 1))
    outcome = outcome_of(drawn, expand(drawn), results_of(drawn, 2, lambda step, rank, action: 1.0), "drawn")
    measured = replace(outcome, own_times=own_times(truth), overhead_s=3 * profile.step_overhead_s, layers_s=())
    known, links = recalibrate(run, measured, profile, cluster)
    assert simulate(run, known, links).end_s == pytest.approx(truth.end_s, rel=0.02)
    assert abs(simulate(run, profile, cluster).end_s / truth.end_s - 1) > 0.3
    assert links.notes == (ESTIMATED,)
    # A run that was as predicted leaves the cluster as it is.
    predicted = own_times(simulate(run, profile, cluster))
    same = replace(measured, own_times={key: value for key, value in predicted.items() if key[1].kind in "FBU"})
    assert recalibrate(run, same, profile, cluster)[1].dumps() == cluster.dumps()
    stages = (run.stages[0], run.stages[1].model_copy(update={"tensor_parallel": 2}))
    with pytest.raises(UsageError, match=r"recalibrate\(\): a run measures stages, and in stage 1 parts of layers"):
        recalibrate(run.model_copy(update={"stages": stages}), measured, profile, cluster)
