"""Views: what there is to be seen of autopar's objects and files, as tables, pictures by name, or a page of both."""

from __future__ import annotations

import html
import io
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
    from autopar.formats.plan import Plan
    from autopar.formats.prediction import Throughput
    from autopar.formats.profile import Profile
    from autopar.formats.report import Comparison, Report
    from autopar.formats.timeline import Timeline
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
    ['placement', 'timeline', 'stages']
    >>> figure = view.plot("timeline", "step.png")
    """
    file, over = Path(file), None if over is None else Path(over)

    from autopar.formats.references import kind_of

    kind = kind_of(file)
    if kind == "trace" or over is not None:
        return _timelines(kind, file, over, progress)
    return _document(kind, file, progress)


def _document(kind: str, file: Path, progress: Progress) -> View:
    from autopar.api.inputs import made_of
    from autopar.formats.checkpoint import Checkpoint
    from autopar.formats.cluster import Cluster
    from autopar.formats.plan import Plan
    from autopar.formats.profile import Profile
    from autopar.formats.program import Program
    from autopar.formats.report import BlackBox, Report
    from autopar.report import run

    match kind:
        case "plan":
            planned = Plan.load(file)
            view = view_plan(planned, partial(_read_inputs, file, progress), partial(made_of, planned, file))
            return replace(view, pictures={name: view.pictures[name] for name in ("placement", "timeline", "stages")})
        case "profile":
            return view_profile(Profile.load(file))
        case "cluster":
            return view_cluster(Cluster.load(file))
        case "report":
            return view_report(Report.load(file))
        case "blackbox":
            box = BlackBox.load(file)
            return View(kind, f"last actions before {box.date}", box.dumps, partial(run.render_black_box, box))
        case "program":
            program = Program.load(file)
            return View(kind, f"program {file.name}", program.dumps, partial(run.render_program, program))
    manifest = Checkpoint.load(file)
    title = f"checkpoint of {manifest.run.model}, step {manifest.step}"
    return View(kind, title, manifest.dumps, partial(run.render_manifest, manifest, title))


def view_profile(profile: Profile) -> View:
    """Return what there is to be seen of a profile."""
    from autopar.report.charts import draw_profile
    from autopar.report.inputs import render_profile, title_of

    pictures = {"layers": partial(draw_profile, profile)}
    return View("profile", title_of(profile), profile.dumps, partial(render_profile, profile), pictures, "layers")


def view_cluster(cluster: Cluster) -> View:
    """Return what there is to be seen of a cluster."""
    from autopar.report.inputs import cluster_title, render_cluster
    from autopar.report.pictures import draw_devices

    pictures = {"devices": partial(draw_devices, cluster)}
    small = "devices" if len(cluster.devices) <= _MOST_DEVICES else None
    return View("cluster", cluster_title(cluster), cluster.dumps, partial(render_cluster, cluster), pictures, small)


def view_plan(plan: Plan, simulated_with: MadeOf, made_of: MadeOf) -> View:
    """Return what there is to be seen of a plan, given what is asked for its profile and cluster.

    ``simulated_with`` refuses plans whose actions are too many to be drawn.
    """
    from autopar.planner.throughput import with_throughput
    from autopar.report.charts import draw_stages
    from autopar.report.plan import render, title_of

    pictures: dict[str, Callable[[], Figure]] = {
        "stages": partial(draw_stages, plan),
        "placement": lambda: _draw_plan(plan, *simulated_with(), on_devices=True),
        "timeline": lambda: _draw_plan(plan, *simulated_with(), on_devices=False),
    }
    return View(
        "plan",
        title_of(plan),
        lambda: with_throughput(plan, known_throughput(plan, made_of)).dumps(),
        lambda: render(plan, known_throughput(plan, made_of)),
        pictures,
        "stages",
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


def _draw_plan(plan: Plan, profile: Profile, cluster: Cluster, *, on_devices: bool) -> Figure:
    from autopar.planner import simulate
    from autopar.report.pictures import draw_placement, draw_timeline

    timeline = simulate(plan, profile, cluster)
    return draw_placement(plan, cluster, timeline) if on_devices else draw_timeline(timeline)


def _read_inputs(file: Path, progress: Progress) -> tuple[Profile, Cluster]:
    from autopar.api.inputs import read_inputs

    _, profile, cluster = read_inputs(file, progress=progress)
    return profile, cluster


def view_timeline(timeline: Timeline, name: str = "") -> View:
    """Return what there is to be seen of a timeline; ``name`` is that of its file."""
    from autopar.report.pictures import draw_timeline, extent, render
    from autopar.report.table import duration

    ranks = timeline.rank_count()
    of = f" of {name}" if name else f" of {ranks} rank{'s' if ranks > 1 else ''}"
    title = f"{timeline.origin} {extent(timeline)}{of}: {duration(timeline.end_s)}"
    small = "timeline" if ranks <= _MOST_RANKS and len(timeline) <= _MOST_ACTIONS else None
    pictures = {"timeline": partial(draw_timeline, timeline)}
    return View("trace", title, lambda: _to_json(_summary(timeline)), partial(render, timeline), pictures, small)


def view_report(report: Report) -> View:
    """Return what there is to be seen of a report."""
    from autopar.report import run
    from autopar.report.charts import draw_losses

    title, pictures = f"report of {run.title_of(report)}", {"loss": partial(draw_losses, report)}
    return View("report", title, report.dumps, partial(run.render, report), pictures, "loss")


def view_comparison(comparison: Comparison) -> View:
    """Return what there is to be seen of a comparison."""
    from autopar.report.charts import draw_planners
    from autopar.report.plan import render_comparison

    rows, plan = comparison.rows, comparison.plan
    title = f"comparison of {len(rows)} plans of {plan.model.source}"
    pictures = {"planners": partial(draw_planners, rows)}
    parts = partial(render_comparison, rows, plan.predicted.step_s)
    return View(
        "comparison", title, lambda: _to_json({"rows": [row.as_dict() for row in rows]}), parts, pictures, "planners"
    )


def _timelines(kind: str, file: Path, over: Path | None, progress: Progress) -> View:
    """Return what there is to be seen of one timeline, or of a measured and a predicted one."""
    from autopar.report.pictures import draw_over, render

    timeline = _timeline(file, progress)
    if over is None:
        return view_timeline(timeline, file.name)
    other = _timeline(over, progress)
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
    measured, predicted = (timeline, other) if timeline.origin != "simulated" else (other, timeline)

    error = predicted.end_s / measured.end_s - 1 if measured.end_s > 0 else None
    figures = {measured.origin: _summary(measured), "predicted": _summary(predicted), "error": error}
    title = f"{file.name} over {over.name}"
    pictures = {"over": partial(draw_over, measured, predicted)}
    return View(kind, title, partial(_to_json, figures), lambda: chain(*map(render, (measured, predicted))), pictures)


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


_PAGE_WIDTH = 110
_PAGE_HEAD = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ margin: 2em auto; max-width: 75em; padding: 0 1em; font-family: system-ui, sans-serif;
        color: #2b2f36; background: #ffffff; }}
h1 {{ font-size: 1.2em; overflow-wrap: anywhere; }}
pre {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 0.85em;
       line-height: 1.3; overflow-x: auto; }}
figure {{ margin: 0; overflow-x: auto; }}
</style>
</head>
<body>
<h1>{title}</h1>
"""


def page(title: str, parts: Iterable[Part], figures: Sequence[Figure] = ()) -> str:
    """Return an HTML page of parts, and of figures as inline SVG; equal content, equal bytes."""
    from rich.console import Console

    from autopar.report.table import print_parts

    console = Console(file=io.StringIO(), record=True, width=_PAGE_WIDTH, force_terminal=True, color_system="truecolor")
    print_parts(parts, console)
    tables = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>\n")
    pictures = "".join(f"<figure>\n{_svg(figure)}</figure>\n" for figure in figures)
    return f"{_PAGE_HEAD.format(title=html.escape(title))}{pictures}{tables}</body>\n</html>\n"


def _svg(figure: Figure) -> str:
    import matplotlib as mpl

    content = io.StringIO()
    # No date, and names that follow from the content: the same figure gives the same bytes.
    unsaid = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with mpl.rc_context({"svg.hashsalt": "autopar", "svg.fonttype": "none"}):
        figure.savefig(content, format="svg", metadata=unsaid)
    text = content.getvalue()
    return text[text.index("<svg") :]
