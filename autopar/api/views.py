"""Views: what there is to be seen of autopar's objects and files, as tables, pictures by name, or a page of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import AutoparError, UsageError, printable, unknown
from autopar.progress import Progress, no_progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from autopar.formats.cluster import Cluster
    from autopar.formats.contest import RunComparison
    from autopar.formats.plan import Plan
    from autopar.formats.prediction import MetPlan, Throughput
    from autopar.formats.profile import Profile
    from autopar.formats.report import Comparison, Report
    from autopar.formats.timeline import Timeline
    from autopar.report.html.page import Block
    from autopar.report.table import Part

    MadeOf = Callable[[], tuple[Profile, Cluster]]


_LONGEST_LINE = 198
_MOST_ACTIONS = 20_000
_MOST_RANKS = 32
_MOST_DEVICES = 1024
"""Of a picture that nobody asked for: of more, it would take seconds."""


@dataclass(frozen=True, repr=False)
class View:
    """What there is to be seen of a file or an object; printed, it is its tables."""

    kind: str
    title: str
    to_json: Callable[[], str]
    parts: Callable[[], Iterable[Part]]
    """Tables, and paragraphs between them."""
    pictures: Mapping[str, Callable[[], Figure]] = field(default_factory=dict)
    """By name; the first is drawn where none is named."""
    small: str | None = None
    """Which of them notebooks show unasked; none where it would take seconds."""
    charts: Callable[[], Iterable[Block]] = tuple
    """What a page shows above the tables."""
    folds: Callable[[], Iterable[Block]] = tuple
    """What it shows below them, folded."""
    commands: Callable[[], Iterable[str]] = tuple
    """What to type in the file's folder to make it again."""

    @property
    def json(self) -> str:
        """The content."""
        return self.to_json()

    def __repr__(self) -> str:
        line = printable(self.title)
        return f"<{line if len(line) <= _LONGEST_LINE else f'{line[: _LONGEST_LINE - 3]}...'}>"

    def __str__(self) -> str:
        from autopar.report.table import as_text

        return as_text(self.parts())

    def _repr_html_(self) -> str:
        from autopar.report.notebook import as_html

        return as_html(self.parts(), None if self.small is None else self.pictures[self.small]())

    def to_html(self, path: str | Path | None = None) -> str:
        """Return a page of its own, which asks no network, and write it to a file if one is named."""
        from autopar.formats.document import write_text
        from autopar.report.html.page import Commands, page

        # The title says as much.
        parts = (part for part in self.parts() if not (isinstance(part, str) and part in self.title))
        lines = tuple(self.commands())
        ends = (Commands("Typed in the folder of its file, these make it again.", lines),) if lines else ()
        text = page(self.title, chain(self.charts(), parts, self.folds(), ends))
        if path is not None:
            write_text(path, text)
        return text

    def plot(self, kind: str | None = None, path: str | Path | None = None) -> Figure:
        """Return a picture, and write it to a file if one is named.

        Args:
            kind: which of ``pictures``; None: the first.
            path: a file that ends in ``.png``, ``.svg`` or ``.pdf``.

        Raises:
            UsageError: there is no such picture; names those that there are.
        """
        if not self.pictures:
            raise UsageError(f"there is no picture of a {self.kind}; print() shows its tables")
        if kind is not None and kind not in self.pictures:
            names, asked = ", ".join(map(repr, self.pictures)), str(kind)
            hint = f"; plot(path={asked!r}) writes a file" if Path(asked).suffix else ""
            message = f"plot({asked!r}): there are pictures of the kinds {names}{hint}"
            raise unknown(UsageError, message, asked, () if hint else self.pictures)
        figure = self.pictures[kind or next(iter(self.pictures))]()
        if path is not None:
            figure.savefig(path)
        return figure


def show(file: str | Path, over: str | Path | None = None, *, progress: Progress = no_progress) -> View:
    """Return what there is to be seen of any of autopar's files: ``print()`` it for tables, ``plot()`` for a picture.

    Args:
        file: a profile, cluster, plan, program, report or trace.
        over: a second trace, or the plan, to lay a measured step over a predicted one.
        progress: told what is done.

    Raises:
        FileError: a file is missing or malformed.
        UsageError: the two cannot be compared.

    >>> view = autopar.show("plan.json")
    >>> view
    <plan of mlp.py: 2 stages on 2 devices, 1f1b, 4 x 16 samples, fp32>
    >>> list(view.pictures)
    ['placement', 'timeline', 'stages', 'messages', 'memory', 'layers', 'search']
    >>> figure = view.plot("timeline", "step.png")
    """
    from autopar.formats.references import kind_of
    from autopar.report.commands import show_command

    file, over = Path(file), None if over is None else Path(over)
    kind, other = kind_of(file), None if over is None else over.name
    is_timeline = kind == "trace" or over is not None
    view = _timelines(kind, file, over, progress) if is_timeline else _document(kind, file, progress)
    return replace(view, commands=lambda: [*view.commands(), show_command(file.name, other)])


def _document(kind: str, file: Path, progress: Progress) -> View:
    from autopar.api.inputs import made_of
    from autopar.api.pages import commands_of_plan
    from autopar.formats.checkpoint import Checkpoint
    from autopar.formats.cluster import Cluster
    from autopar.formats.plan import Plan
    from autopar.formats.profile import Profile
    from autopar.formats.program import Program
    from autopar.formats.pulls import PullLog
    from autopar.formats.report import BlackBox, Report
    from autopar.report import run
    from autopar.report.commands import profile_commands, run_command

    match kind:
        case "plan":
            planned = Plan.load(file)
            view = view_plan(planned, partial(_read_inputs, file, progress), partial(made_of, planned, file))
            first = dict.fromkeys(("placement", "timeline", *view.pictures))
            pictures = {name: view.pictures[name] for name in first}
            return replace(view, pictures=pictures, commands=partial(commands_of_plan, planned, file))
        case "profile":
            profile = Profile.load(file)
            return replace(view_profile(profile), commands=partial(profile_commands, profile, file.name))
        case "cluster":
            return view_cluster(Cluster.load(file))
        case "report":
            report = Report.load(file)
            return replace(view_report(report), commands=lambda: [run_command(report.steps, file.name)])
        case "blackbox":
            box = BlackBox.load(file)
            return View(kind, f"last actions before {box.date}", box.dumps, partial(run.render_black_box, box))
        case "pulls":
            log = PullLog.load(file)
            return View(kind, run.title_of_pulls(log), log.dumps, partial(run.render_pulls, log))
        case "program":
            program = Program.load(file)
            return View(kind, f"program {file.name}", program.dumps, partial(run.render_program, program))
    manifest = Checkpoint.load(file)
    title = f"checkpoint of {manifest.run.model}, step {manifest.step}"
    return View(kind, title, manifest.dumps, partial(run.render_manifest, manifest, title))


def view_profile(profile: Profile) -> View:
    """Return what there is to be seen of a profile."""
    from autopar.report.charts import draw_profile
    from autopar.report.html.charts import layers
    from autopar.report.inputs import render_profile, title_of

    pictures = {"layers": partial(draw_profile, profile)}
    parts, charts = partial(render_profile, profile), partial(layers, profile)
    return View("profile", title_of(profile), profile.dumps, parts, pictures, "layers", charts)


def view_cluster(cluster: Cluster) -> View:
    """Return what there is to be seen of a cluster."""
    from autopar.report.inputs import cluster_title, render_cluster
    from autopar.report.maps import draw_devices

    pictures = {"devices": partial(draw_devices, cluster)}
    small = "devices" if len(cluster.devices) <= _MOST_DEVICES else None
    return View("cluster", cluster_title(cluster), cluster.dumps, partial(render_cluster, cluster), pictures, small)


def view_plan(plan: Plan, simulated_with: MadeOf, made_of: MadeOf, met: Sequence[MetPlan] = ()) -> View:
    """Return what there is to be seen of a plan.

    Args:
        plan: what is to be seen.
        simulated_with: asked for its profile and cluster; refuses plans whose actions are too many to be drawn.
        made_of: asked for the same.
        met: the plans that its search met, if they are known.
    """
    from autopar.api import pages
    from autopar.planner.throughput import with_throughput
    from autopar.report.charts import draw_layers, draw_search, draw_stages
    from autopar.report.plan import render, title_of

    pictures: dict[str, Callable[[], Figure]] = {
        "stages": partial(draw_stages, plan),
        "placement": lambda: _draw_step(plan, *simulated_with(), "placement"),
        "timeline": lambda: _draw_step(plan, *simulated_with(), "timeline"),
        "messages": lambda: _draw_step(plan, *simulated_with(), "messages"),
        "memory": lambda: _draw_step(plan, *simulated_with(), "memory"),
        "layers": lambda: draw_layers(plan, made_of()[0]),
        "search": partial(draw_search, plan, met),
    }
    return View(
        "plan",
        title_of(plan),
        lambda: with_throughput(plan, known_throughput(plan, made_of)).dumps(),
        lambda: render(plan, known_throughput(plan, made_of)),
        pictures,
        "stages",
        charts=partial(pages.plan_charts, plan, simulated_with),
        folds=lambda: [pages.plan_folds(plan)],
    )


def known_throughput(plan: Plan, made_of: MadeOf) -> Throughput | None:
    """Return what a plan's step is in other units: as it records, or as its profile and cluster, if there, tell."""
    from autopar.options.plan import PlanOptions
    from autopar.planner.throughput import plan_throughput

    if plan.predicted.throughput is not None:
        return plan.predicted.throughput
    try:
        return plan_throughput(plan, *made_of(), PlanOptions())
    except AutoparError:
        return None


def _draw_step(plan: Plan, profile: Profile, cluster: Cluster, picture: str) -> Figure:
    """Return a picture of the step that is predicted of a plan."""
    from autopar.planner import held_bytes, simulate
    from autopar.report.folding import alike_ranks, time_axis
    from autopar.report.maps import draw_placement
    from autopar.report.memory import draw_memory, ranks_shown
    from autopar.report.pictures import draw_timeline, extent

    timeline = simulate(plan, profile, cluster)
    if picture == "placement":
        return draw_placement(plan, cluster, timeline)
    if picture != "memory":
        return draw_timeline(timeline, messages=picture == "messages")
    shown = ranks_shown(plan, alike_ranks(timeline))
    held = held_bytes(plan, profile, cluster, timeline, shown)
    title = f"Predicted memory over the {extent(timeline)}"
    return draw_memory({shown[rank]: each for rank, each in held.items()}, time_axis(timeline, shown), title)


def _read_inputs(file: Path, progress: Progress) -> tuple[Profile, Cluster]:
    from autopar.api.inputs import read_inputs

    _, profile, cluster = read_inputs(file, progress=progress)
    return profile, cluster


def view_timeline(timeline: Timeline, name: str = "") -> View:
    """Return what there is to be seen of a timeline; ``name`` is that of its file."""
    from autopar.api.pages import step_charts
    from autopar.report.pictures import draw_timeline, extent, render
    from autopar.report.table import duration

    ranks = timeline.rank_count()
    of = f" of {name}" if name else f" of {ranks} rank{'s' if ranks > 1 else ''}"
    title = f"{timeline.origin} {extent(timeline)}{of}: {duration(timeline.end_s)}"
    small = "timeline" if ranks <= _MOST_RANKS and len(timeline) <= _MOST_ACTIONS else None
    pictures = {
        "timeline": partial(draw_timeline, timeline),
        "messages": partial(draw_timeline, timeline, messages=True),
    }
    parts, charts = partial(render, timeline), partial(step_charts, {"": timeline})
    return View("trace", title, lambda: _to_json(_summary(timeline)), parts, pictures, small, charts)


def view_report(report: Report) -> View:
    """Return what there is to be seen of a report."""
    from autopar.api.pages import report_charts
    from autopar.report import run
    from autopar.report.charts import draw_losses

    title, pictures = f"report of {run.title_of(report)}", {"loss": partial(draw_losses, report)}
    charts = partial(report_charts, report)
    return View("report", title, report.dumps, partial(run.render, report), pictures, "loss", charts)


def view_comparison(comparison: Comparison) -> View:
    """Return what there is to be seen of a comparison."""
    from autopar.report.charts import draw_planners
    from autopar.report.html.charts import planners
    from autopar.report.plan import render_comparison

    rows, plan = comparison.rows, comparison.plan
    title = f"comparison of {len(rows)} plans of {plan.model.source}"
    pictures = {"planners": partial(draw_planners, rows)}
    parts = partial(render_comparison, rows, plan.predicted.step_s)
    content = {"rows": [row.as_dict() for row in rows]}
    return View("comparison", title, partial(_to_json, content), parts, pictures, "planners", lambda: [planners(rows)])


def view_contests(found: RunComparison) -> View:
    """Return what there is to be seen of plans that were compared by running them."""
    from autopar.report.contests import draw_contests, render_contests

    rows = [row.as_dict(found.loss) for row in found.rows]
    content = {"cluster": found.cluster, "loss": found.loss, "notes": found.notes, "rows": rows}
    pictures = {"losses": partial(draw_contests, found)}
    title = f"{len(found.rows)} plans of {found.model} compared by running"
    return View("contest", title, partial(_to_json, content), partial(render_contests, found), pictures, "losses")


def _timelines(kind: str, file: Path, over: Path | None, progress: Progress) -> View:
    """Return what there is to be seen of one timeline, or of a measured and a predicted one."""
    from autopar.api.pages import step_charts
    from autopar.formats.references import kind_of
    from autopar.report.commands import trace_command
    from autopar.report.pictures import draw_over, render

    timeline = _timeline(file, progress)
    if over is None:
        line = trace_command(timeline.origin, file.name)
        return replace(view_timeline(timeline, file.name), commands=lambda: [line])
    other = _timeline(over, progress)
    _check_comparable((file, timeline), (over, other))
    measured, predicted = (timeline, other) if timeline.origin != "simulated" else (other, timeline)

    error = predicted.end_s / measured.end_s - 1 if measured.end_s > 0 else None
    figures = {measured.origin: _summary(measured), "predicted": _summary(predicted), "error": error}
    title = f"{file.name} over {over.name}"
    pictures = {"over": partial(draw_over, measured, predicted)}
    charts = partial(step_charts, {measured.origin: measured, "predicted": predicted})
    both = (file, timeline), (over, other)
    lines = [trace_command(each.origin, path.name) for path, each in both if kind_of(path) == "trace"]
    return View(
        kind,
        title,
        partial(_to_json, figures),
        lambda: chain(*map(render, (measured, predicted))),
        pictures,
        charts=charts,
        commands=lambda: lines,
    )


def _check_comparable(one: tuple[Path, Timeline], another: tuple[Path, Timeline]) -> None:
    (file, timeline), (over, other) = one, another
    if (timeline.origin == "simulated") == (other.origin == "simulated"):
        remedy = (
            "`over` needs one that ranks recorded (`autopar run --trace`, `autopar rehearse --steps 1 --trace`) and a "
            "simulated one (`autopar simulate --trace`)"
        )
        both = timeline.origin == other.origin
        origins = f"both {timeline.origin}" if both else f"{timeline.origin} and {other.origin}"
        raise UsageError(f"{file} and {over} are {origins}; {remedy}")
    if _computations(timeline) != _computations(other):
        raise UsageError(f"{file} and {over} do not hold the same computations; `over` needs two traces of one plan")


def _to_json(figures: Mapping[str, object]) -> str:
    return json.dumps(figures, indent=1) + "\n"


def _timeline(file: Path, progress: Progress) -> Timeline:
    """Return the timeline of a trace, or the one that a plan predicts."""
    from autopar.formats.references import kind_of

    kind = kind_of(file)
    if kind == "trace":
        from autopar.formats.timeline import Timeline

        return Timeline.load(file)
    if kind == "plan":
        from autopar.api.inputs import read_inputs
        from autopar.planner import simulate

        return simulate(*read_inputs(file, progress=progress))
    raise UsageError(f"{file} is a {kind}, which has no timeline to draw; give a trace or a plan")


def _computations(timeline: Timeline) -> set[tuple[int, str]]:
    from autopar.formats.timeline import track_of

    return {(event.rank, str(event.action)) for event in timeline if track_of(event.action.kind) == "compute"}


def _summary(timeline: Timeline) -> dict[str, object]:
    return {
        "origin": timeline.origin,
        "step_s": timeline.end_s,
        "ranks": timeline.rank_count(),
        "bubble": timeline.bubble(),
        "busy_s": timeline.busy_s(),
    }
