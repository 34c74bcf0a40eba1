"""``autopar show``: any of autopar's files, as tables and pictures."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from autopar.cli.screen import say, screen
from autopar.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from autopar.formats.timeline import Timeline

__all__ = ["command"]

_PICTURE = Path("timeline.png")


def command(
    file: Annotated[Path, typer.Argument(help="A profile, cluster, plan, program, report or trace.")],
    over: Annotated[
        Path | None, typer.Option(help="A second trace, or the plan: draw measured over predicted.")
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(help="Draw the profile's layers, the trace, or the plan's predicted step, into this file."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write tables, and the picture where there is one, as a page of its own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Put the content on stdout as JSON.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the picture and the page if they exist.")
    ] = False,
) -> None:
    """Show a file of autopar as tables; a profile, a trace, and the step that a plan predicts, also as a picture."""
    from autopar.formats.kind import kind_of

    console = screen()
    kind = kind_of(file)
    inputs = (file,) if over is None else (file, over)
    for path, flag in ((png, "png"), (html, "html")):
        if path is not None:
            _check_written(path, flag, overwrite, inputs)
    if png is not None and html is not None and png.resolve() == html.resolve():
        raise UsageError(f"{png} cannot hold both the picture and the page; name another --html")
    shown = _timelines(file, over) if kind == "trace" or over is not None else _document(kind, file)
    if png is not None and shown.draw is None:
        raise UsageError(f"{file} is a {kind}, which has no timeline to draw; give a profile, a trace or a plan")
    shown.render(console)
    if shown.draw is not None and (png is not None or html is not None or over is not None):
        figure = shown.draw()
        if png is not None or over is not None:
            _save(figure, png or _PICTURE, overwrite or png is None, console)
        if html is not None:
            _save_page(shown, [figure], html, overwrite, console)
    elif html is not None:
        _save_page(shown, [], html, overwrite, console)
    if as_json:
        sys.stdout.write(shown.json)


class _Shown(NamedTuple):
    """What there is to be seen of a file."""

    title: str
    json: str
    render: Callable[[Console], None]
    draw: Callable[[], Figure] | None = None


def _document(kind: str, file: Path) -> _Shown:
    """Return a document's canonical JSON text, its tables, and its picture if it has one."""
    if kind == "profile":
        from autopar.formats.profile import Profile
        from autopar.report.bars import draw as draw_profile
        from autopar.report.profile import render as render_profile
        from autopar.report.profile import title_of

        profile = Profile.load(file)
        tables = partial(render_profile, profile)
        return _Shown(title_of(profile), profile.dumps(), tables, partial(draw_profile, profile))
    if kind == "cluster":
        from autopar.formats.cluster import Cluster
        from autopar.report.cluster import render as render_cluster

        cluster = Cluster.load(file)
        return _Shown(f"cluster {cluster.name}", cluster.dumps(), partial(render_cluster, cluster))
    if kind == "plan":
        from autopar.formats.plan import Plan
        from autopar.report.plan import render as render_plan

        plan = Plan.load(file)
        return _Shown(
            f"plan of {plan.model.source}", plan.dumps(), partial(render_plan, plan), partial(_predicted, file)
        )
    if kind == "report":
        from autopar.formats.report import Report
        from autopar.report.report import render as render_report

        report = Report.load(file)
        return _Shown(f"report of {report.model}", report.dumps(), partial(render_report, report))
    from autopar.formats.program import Program
    from autopar.report.program import render as render_program

    program = Program.load(file)
    return _Shown(f"program {file.name}", program.dumps(), partial(render_program, program))


def _predicted(file: Path) -> Figure:
    from autopar.report.timeline import draw

    return draw(_timeline(file))


def _timelines(file: Path, over: Path | None) -> _Shown:
    """Return what there is to be seen of one timeline, or of a measured and a predicted one."""
    from autopar.report.timeline import draw, draw_over, render

    timeline = _timeline(file)
    if over is None:
        return _Shown(
            f"step of {file.name}", _dumped(_summary(timeline)), partial(render, timeline), partial(draw, timeline)
        )
    other = _timeline(over)
    if timeline.origin == other.origin:
        remedy = "--over needs a measured one and a simulated one (`autopar run --trace`, `autopar simulate --trace`)"
        raise UsageError(f"{file} and {over} are both {timeline.origin}; {remedy}")
    if _computations(timeline) != _computations(other):
        raise UsageError(f"{file} and {over} do not hold the same computations; --over needs two traces of one plan")
    measured, predicted = (timeline, other) if timeline.origin == "measured" else (other, timeline)

    def render_both(console: Console) -> None:
        render(measured, console)
        render(predicted, console)

    error = predicted.end_s / measured.end_s - 1 if measured.end_s > 0 else None
    figures = {"measured": _summary(measured), "predicted": _summary(predicted), "error": error}
    return _Shown(
        f"{file.name} over {over.name}", _dumped(figures), render_both, partial(draw_over, measured, predicted)
    )


def _dumped(figures: Mapping[str, object]) -> str:
    return json.dumps(figures, indent=1) + "\n"


def _timeline(file: Path) -> Timeline:
    """Return the timeline of a trace, or the one that a plan predicts."""
    from autopar.formats.kind import kind_of

    kind = kind_of(file)
    if kind == "trace":
        from autopar.formats.timeline import Timeline

        return Timeline.load(file)
    if kind == "plan":
        from autopar.cli.simulate import predict

        return predict(file)
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


def _check_written(path: Path, kind: str, overwrite: bool, inputs: tuple[Path, ...]) -> None:
    from autopar.cli.references import check_output

    if path.suffix.lower() != f".{kind}":
        what = "picture is a PNG" if kind == "png" else "page is HTML"
        raise UsageError(f"--{kind} {path}: the {what}; give a name that ends in .{kind}")
    check_output(path, None, overwrite=overwrite, inputs=inputs)


def _save(figure: Figure, path: Path, overwrite: bool, console: Console) -> None:
    from autopar.formats.document import write_bytes

    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_bytes(path, content.getvalue(), overwrite=overwrite)
    say(console, f"Written: {path}")


def _save_page(shown: _Shown, figures: list[Figure], path: Path, overwrite: bool, console: Console) -> None:
    from autopar.formats.document import write_text
    from autopar.report.page import page

    write_text(path, page(shown.title, shown.render, figures), overwrite=overwrite)
    say(console, f"Written: {path}")
