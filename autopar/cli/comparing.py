"""What commands that train say of their predictions: every action's time over the predicted one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import AutoparError
from autopar.formats.own_times import OwnTimes, compared, own_times
from autopar.formats.plan import Plan
from autopar.formats.program import BACKWARD, FORWARD

if TYPE_CHECKING:
    from autopar.formats.report import Report
    from autopar.runtime.outcome import Outcome

__all__ = ["over_predicted", "planned_times"]


def over_predicted(outcome: Outcome, plan: Path) -> Report:
    """Return the report with measured over predicted times of actions.

    What is predicted follows from the profile and the cluster that the plan file records; without them, of forwards and
    backwards, from the plan.
    """
    from autopar.cli.simulate import predict

    report = outcome.report
    try:
        predicted: OwnTimes = own_times(predict(plan))
    except AutoparError as error:
        predicted = planned_times(Plan.load(plan), outcome)
        note = f"only forwards and backwards are compared with the plan, by stage: {error}"
        report = report.model_copy(update={"notes": (*report.notes, note)}) if predicted else report
    return report.model_copy(update={"kinds": compared(outcome.own_times, predicted)})


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
