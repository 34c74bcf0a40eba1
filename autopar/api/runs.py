"""Runs: what is made of what a run has done.

Its times stand beside their prediction, or become those of a profile and a cluster; where it ran out of memory, there
is a plan that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.api.inputs import planned_file, read_inputs, resolve_inputs
from autopar.api.objects import Cluster, PlanFile, Profile, shown_as
from autopar.api.views import known_throughput
from autopar.errors import AutoparError, InfeasibleError, OutOfMemoryError, UsageError
from autopar.formats import cluster as clusters
from autopar.formats import profile as profiles
from autopar.formats.plan import Plan
from autopar.formats.program import BACKWARD, FORWARD
from autopar.formats.timeline import OwnTimes, compare_paths, compare_times, own_times
from autopar.ownership import SCATTERING

if TYPE_CHECKING:
    from autopar.api.views import MadeOf
    from autopar.formats.report import CauseTimes, Report
    from autopar.formats.timeline import Timeline
    from autopar.runtime.outcome import Outcome


ESTIMATED = "devices are estimated; messages took as long in a run"


def tell_throughput(outcome: Outcome, plan: Plan, made_of: MadeOf) -> Outcome:
    """Return an outcome whose report says what a step is in tokens, hours and cost, as far as that is known."""
    from autopar.planner.throughput import measured_throughput

    report, predicted_s = outcome.report, plan.predicted.step_s
    planned = None if predicted_s <= 0 else known_throughput(plan, made_of)
    if planned is None:
        return outcome
    found = measured_throughput(planned, report.step_s.median / predicted_s)
    return replace(outcome, report=report.model_copy(update={"throughput": found}))


def compare_with_prediction(outcome: Outcome, plan: Plan, predict: Callable[[], Timeline]) -> Outcome:
    """Return an outcome whose report has times of actions over those of ``predict``, or over the plan's if it fails.

    And what the critical paths of both were spent on.
    """
    report = outcome.report
    causes: tuple[CauseTimes, ...] = ()
    if plan.policy.refusal_of("critical_path") is not None:
        # No step has a critical path of its own; and updates are simulated with what a step takes beside its actions.
        kinds = compare_times(outcome.own_times, planned_times(plan, outcome))
        return replace(outcome, report=report.model_copy(update={"kinds": kinds}))
    try:
        timeline = predict()
        predicted: OwnTimes = own_times(timeline)
        report = _loaded_ahead(report, plan, timeline)
        causes = compare_paths(outcome.timeline, timeline, report.step_s.median, report.predicted_step_s)
    except AutoparError as error:
        predicted = planned_times(plan, outcome)
        note = f"only forwards and backwards are compared with the plan, by stage: {error}"
        report = report.model_copy(update={"notes": (*report.notes, note)}) if predicted else report
    kinds = compare_times(outcome.own_times, predicted)
    return replace(outcome, report=report.model_copy(update={"kinds": kinds, "causes": causes}))


def _loaded_ahead(report: Report, plan: Plan, timeline: Timeline) -> Report:
    """Return a report whose prediction is of its loaders, and put into the predicted timeline how far they are late.

    Plans are predicted of ranks that load for themselves. Loaders read while ranks compute, and each mini-batch takes
    them at least so long that together they are not behind.
    """
    own_s, loaders = plan.predicted.loading_s, 0 if report.loading is None else report.loading.loaders
    if own_s is None or not loaders:
        return report
    hidden_s = max((end for _, _, end in timeline.loading), default=0.0)
    computed_s = report.predicted_step_s - hidden_s
    late_s = max(0.0, own_s / loaders - computed_s)
    timeline.loading[:] = [(rank, hidden_s - late_s, hidden_s) for rank in range(timeline.rank_count())]
    step_s = computed_s + late_s
    return report.model_copy(update={"predicted_step_s": step_s, "error": step_s / report.step_s.median - 1})


def planned_times(plan: Plan, outcome: Outcome) -> OwnTimes:
    """Return what the plan says of the forwards and backwards of every stage's busiest replica: its slowest one."""
    total: dict[tuple[int, int, str], float] = {}
    for (rank, action), seconds in outcome.own_times.items():
        key = action.stage, rank, action.kind
        total[key] = total.get(key, 0.0) + seconds
    busiest: dict[tuple[int, str], int] = {}
    for (stage, rank, kind), seconds in sorted(total.items()):
        if seconds > total.get((stage, busiest.get((stage, kind), -1), kind), -1.0):
            busiest[stage, kind] = rank
    planned = {FORWARD: plan.predicted.forward_s, BACKWARD: plan.predicted.backward_s}
    return {
        (rank, action): planned[action.kind][action.stage]
        for rank, action in outcome.own_times
        if planned.get(action.kind) and busiest[action.stage, action.kind] == rank
    }


def recalibrate(
    plan: PlanFile,
    outcome: Outcome,
    profile: profiles.Profile | str | Path | None = None,
    cluster: clusters.Cluster | str | Path | None = None,
) -> tuple[Profile, Cluster]:
    """Return a plan's profile and cluster with the times that a run of it measured, to plan again.

    Args:
        plan: what was run.
        outcome: what :func:`autopar.train` gave with ``time_layers=True``.
        profile: what the plan was made of, in place of what it knows or its file records.
        cluster: likewise.

    Raises:
        FileError: a file is missing, malformed, or no longer what it was when the plan was made.
        UsageError: the plan's weight policy does not measure what a profile has, or several devices run a replica.

    >>> outcome = autopar.train("plan.json", steps=6, time_layers=True)
    >>> profile, cluster = autopar.recalibrate("plan.json", outcome)
    >>> plan = autopar.plan(profile, cluster)
    """
    planned, measured, machines = read_inputs(plan, profile, cluster)
    planned.policy.check("recalibrate")
    check_measures_layers(planned, "recalibrate()")
    from autopar.planner import simulate
    from autopar.profiler.recalibrate import correct_gathering, correct_links, correct_profile, without_gathering

    taken, predicted = outcome.own_times, own_times(simulate(planned, measured, machines))
    made = correct_profile(measured, planned, taken, predicted, outcome.layers_s, outcome.overhead_s)
    links = correct_links(machines, planned, taken, predicted)
    if any(stage.shard in SCATTERING for stage in planned.stages):
        with_gathers, without_gathers = (
            own_times(simulate(planned, made, each)) for each in (machines, without_gathering(machines))
        )
        links = correct_gathering(links, planned, taken, with_gathers, without_gathers)
    if links != machines and planned.cluster is None and planned.cluster_name is None:
        links = links.model_copy(update={"name": "local", "notes": (ESTIMATED,)})
    return shown_as(Profile, made), shown_as(Cluster, links)


def check_measures_layers(plan: Plan, asked: str) -> None:
    """Refuse a plan whose runs measure parts of layers; ``asked`` is what the user called.

    Raises:
        UsageError: names the stage.
    """
    for at, stage in enumerate(plan.stages):
        if stage.tensor_parallel > 1:
            raise UsageError(
                f"{asked}: a run measures stages, and in stage {at} parts of layers with what their "
                f"{stage.tensor_parallel} devices exchange, which a profile has apart; leave it out, or profile again"
            )


_TYPED_PLAN = "`autopar plan {} --gpus {} --batch {} --memory {}` plans one that fits"


def remedy_of(error: AutoparError, loaded_plan: Plan, path: Path) -> str | None:
    """Return what is to be typed for a plan that fits, and how long its step is; None where memory was not short.

    Args:
        error: what a run of the plan raised.
        loaded_plan: the plan.
        path: its file, to which those that it names are relative.
    """
    if not isinstance(error, OutOfMemoryError):
        return None
    size = f"{error.memory_bytes >> 20}MiB"
    from autopar.planner import PlanOptions, plan

    count, batch = len(loaded_plan.devices), loaded_plan.batch
    try:
        _, profile, cluster = resolve_inputs(loaded_plan, path)
        made = plan(profile, cluster, PlanOptions(gpus=count, batch=batch, memory_bytes=error.memory_bytes))
        recorded = Path("profile.json") if loaded_plan.profile is None else path.parent / loaded_plan.profile.path
        typed = _TYPED_PLAN.format(recorded, count, batch, size)
        return f"{typed}: {made.predicted.step_s:.3g} s a step in place of {loaded_plan.predicted.step_s:.3g} s"
    except InfeasibleError as none:
        return f"no plan of these devices fits {size} each: {none}"
    except AutoparError:
        # What the plan was made of is gone, or has changed.
        return f"plan again with `memory_bytes='{size}'`"


@contextmanager
def advise_on_memory(loaded_plan: Plan, plan: Plan | str | Path) -> Iterator[None]:
    """Have the error of a run that lacks memory say what would fit; ``plan`` is what the user named."""
    try:
        yield
    except OutOfMemoryError as error:
        error.args = (f"{error}; {remedy_of(error, loaded_plan, planned_file(plan))}",)
        raise
