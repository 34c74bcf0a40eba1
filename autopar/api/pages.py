"""Pages: what a page shows of a document beside its tables: charts above them, and stages and commands below."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import AutoparError
from autopar.formats.profile import Profile
from autopar.formats.references import resolve
from autopar.report.commands import plan_commands, profile_commands
from autopar.report.html import charts
from autopar.report.html.page import Block, Fold, Folds
from autopar.report.html.steps import HeldByRank, recorded_bytes, step, summary
from autopar.report.plan import stage_texts

if TYPE_CHECKING:
    from autopar.formats.cluster import Cluster
    from autopar.formats.plan import Plan
    from autopar.formats.report import Report
    from autopar.formats.timeline import Timeline


def plan_charts(plan: Plan, made_of: Callable[[], tuple[Profile, Cluster]]) -> Iterator[Block]:
    """Yield the predicted step, where the files are there that tell it, and what is predicted of the stages."""
    from autopar.planner import simulate

    try:
        profile, cluster = made_of()
        timeline = simulate(plan, profile, cluster)
        yield step(f"Step, {summary(timeline)}", {"": timeline}, _fullest(plan, profile, cluster, timeline))
    except AutoparError as error:
        yield f"no timeline is drawn: {error}"
    yield from charts.stages(plan)


def _fullest(plan: Plan, profile: Profile, cluster: Cluster, timeline: Timeline) -> HeldByRank:
    """Return what the rank holds that is predicted to be fullest."""
    from autopar.planner import held_bytes

    stage = max(range(len(plan.stages)), key=plan.predicted.fullness.__getitem__)
    replica = max(range(plan.stages[stage].replicas), key=plan.stages[stage].shares.__getitem__)
    rank = plan.ownership.replicas[stage][replica][0]
    return HeldByRank(rank, held_bytes(plan, profile, cluster, timeline, [rank])[rank])


def plan_folds(plan: Plan) -> Folds:
    """Return the layers and the devices of every stage."""
    return Folds("Layers and devices of each stage", [Fold(*each) for each in stage_texts(plan)])


def commands_of_plan(plan: Plan, file: Path) -> Iterator[str]:
    """Yield what makes a plan again, and, where its profile is there, that."""
    if plan.profile is not None:
        try:
            profile = Profile.load(resolve(plan.profile, file, "profile"))
        except AutoparError:
            # A plan can be read without it.
            pass
        else:
            yield from profile_commands(profile.model_copy(update={"model": plan.model}), plan.profile.path)
    yield from plan_commands(plan, file.name)


def step_charts(timelines: Mapping[str, Timeline]) -> Iterator[Block]:
    """Yield the steps of timelines by name, with what was held in the first of them that counted it."""
    every = timelines.values()
    held = next(filter(None, map(recorded_bytes, every)), None)
    yield step(f"Step, {'; '.join(map(summary, every))}", timelines, held)


def report_charts(report: Report) -> Iterator[Block]:
    """Yield the loss of every step, and what steps were spent on."""
    yield charts.loss(report)
    if report.causes:
        yield charts.causes(report)
