"""Views: what there is to be seen of any of autopar's files, as tables, a picture, or a page of both."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from autopar.errors import UsageError
from autopar.progress import Progress, no_progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from autopar.formats.timeline import Timeline


class FileView(NamedTuple):
    """A file's content as tables, JSON, and a picture where there is one; printed, it is its tables."""

    kind: str
    title: str
    json: str
    render: Callable[[Console], None]
    """Prints the tables."""
    draw: Callable[[], Figure] | None = None

    def __str__(self) -> str:
        from autopar.report.table import as_text

        return as_text(self.render)


def show(file: str | Path, over: str | Path | None = None, *, progress: Progress = no_progress) -> FileView:
    """Return what there is to be seen of any of autopar's files: ``print()`` it for tables, ``draw()`` for a picture.

    Args:
        file: a profile, cluster, plan, program, report or trace.
        over: a second trace, or the plan, to lay a measured step over a predicted one.
        progress: told what is done.

    Raises:
        FileError: a file is missing or malformed.
        UsageError: the two cannot be compared.

    >>> view = autopar.show("plan.json")
    >>> view.kind
    'plan'
    >>> view.draw().savefig("plan.png")
    """
    file, over = Path(file), None if over is None else Path(over)

    from autopar.formats.references import kind_of

    kind = kind_of(file)
    if kind == "trace" or over is not None:
        return _timelines(kind, file, over, progress)
    return _document(kind, file, progress)


def _document(kind: str, file: Path, progress: Progress) -> FileView:
    """Return a document's canonical JSON text, its tables, and its picture if it has one."""
    from autopar.formats.checkpoint import Checkpoint
    from autopar.formats.cluster import Cluster
    from autopar.formats.plan import Plan
    from autopar.formats.profile import Profile
    from autopar.formats.program import Program
    from autopar.formats.report import BlackBox, Report
    from autopar.report import inputs, run
    from autopar.report import plan as plans

    match kind:
        case "plan":
            plan, picture = Plan.load(file), partial(_draw_plan, file, progress)
            return FileView(kind, f"plan of {plan.model.source}", plan.dumps(), partial(plans.render, plan), picture)
        case "profile":
            from autopar.report.pictures import draw_profile

            profile = Profile.load(file)
            tables, picture = partial(inputs.render_profile, profile), partial(draw_profile, profile)
            return FileView(kind, inputs.title_of(profile), profile.dumps(), tables, picture)
        case "cluster":
            cluster = Cluster.load(file)
            return FileView(kind, f"cluster {cluster.name}", cluster.dumps(), partial(inputs.render_cluster, cluster))
        case "report":
            report = Report.load(file)
            return FileView(kind, f"report of {report.model}", report.dumps(), partial(run.render, report))
        case "blackbox":
            box = BlackBox.load(file)
            title = f"last actions before {box.date}"
            return FileView(kind, title, box.dumps(), partial(run.render_black_box, box))
        case "program":
            program = Program.load(file)
            return FileView(kind, f"program {file.name}", program.dumps(), partial(run.render_program, program))
    manifest = Checkpoint.load(file)
    title = f"checkpoint of {manifest.run.model}, step {manifest.step}"
    return FileView(kind, title, manifest.dumps(), partial(run.render_manifest, manifest, title))


def _draw_plan(file: Path, progress: Progress) -> Figure:
    from autopar.api.inputs import read_inputs
    from autopar.planner import simulate
    from autopar.report.pictures import draw_placement

    plan, profile, cluster = read_inputs(file, progress=progress)
    return draw_placement(plan, cluster, simulate(plan, profile, cluster))


def _timelines(kind: str, file: Path, over: Path | None, progress: Progress) -> FileView:
    """Return what there is to be seen of one timeline, or of a measured and a predicted one."""
    from autopar.report.pictures import draw_over, draw_timeline, extent, render

    timeline = _timeline(file, progress)
    if over is None:
        title = f"{extent(timeline)} of {file.name}"
        return FileView(
            kind, title, _to_json(_summary(timeline)), partial(render, timeline), partial(draw_timeline, timeline)
        )
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

    def render_both(console: Console) -> None:
        render(measured, console)
        render(predicted, console)

    error = predicted.end_s / measured.end_s - 1 if measured.end_s > 0 else None
    figures = {measured.origin: _summary(measured), "predicted": _summary(predicted), "error": error}
    title = f"{file.name} over {over.name}"
    return FileView(kind, title, _to_json(figures), render_both, partial(draw_over, measured, predicted))


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


def page(title: str, render: Callable[[Console], None], figures: Sequence[Figure] = ()) -> str:
    """Return an HTML page of what ``render`` prints, and of figures as inline SVG; equal content, equal bytes."""
    from rich.console import Console

    console = Console(file=io.StringIO(), record=True, width=_PAGE_WIDTH, force_terminal=True, color_system="truecolor")
    render(console)
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
