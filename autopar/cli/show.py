"""``autopar show``: any of autopar's files, as tables and pictures."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
        Path | None, typer.Option(help="Draw the trace, or the plan's predicted step, into this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Put the content on stdout as JSON.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the picture if it exists.")] = False,
) -> None:
    """Show a file of autopar as tables; a trace, and the step that a plan predicts, also as a picture."""
    from rich.console import Console

    from autopar.formats.kind import kind_of

    console = Console(stderr=True)
    kind = kind_of(file)
    if png is not None:
        _check_picture(png, overwrite, (file,) if over is None else (file, over))
    if kind == "trace" or over is not None:
        summary = _show_timeline(file, over, png, overwrite, console)
        if as_json:
            sys.stdout.write(json.dumps(summary, indent=1) + "\n")
        return
    text = _show_document(kind, file, console)
    if png is not None:
        from autopar.report.timeline import draw

        _save(draw(_timeline(file)), png, overwrite, console)
    if as_json:
        sys.stdout.write(text)


def _show_document(kind: str, file: Path, console: Console) -> str:
    """Print a document's tables and return its canonical JSON text."""
    if kind == "profile":
        from autopar.formats.profile import Profile
        from autopar.report.profile import render as render_profile

        profile = Profile.load(file)
        render_profile(profile, console)
        return profile.dumps()
    if kind == "cluster":
        from autopar.formats.cluster import Cluster
        from autopar.report.cluster import render as render_cluster

        cluster = Cluster.load(file)
        render_cluster(cluster, console)
        return cluster.dumps()
    if kind == "plan":
        from autopar.formats.plan import Plan
        from autopar.report.plan import render as render_plan

        plan = Plan.load(file)
        render_plan(plan, console)
        return plan.dumps()
    if kind == "report":
        from autopar.formats.report import Report
        from autopar.report.report import render as render_report

        report = Report.load(file)
        render_report(report, console)
        return report.dumps()
    from autopar.formats.program import Program
    from autopar.report.program import render as render_program

    program = Program.load(file)
    render_program(program, console)
    return program.dumps()


def _show_timeline(
    file: Path, over: Path | None, png: Path | None, overwrite: bool, console: Console
) -> dict[str, object]:
    """Print one or two timelines as tables, draw what was asked, and return their figures."""
    from autopar.report.timeline import draw, draw_over, render

    timeline = _timeline(file)
    if over is None:
        render(timeline, console)
        if png is not None:
            _save(draw(timeline), png, overwrite, console)
        return _summary(timeline)
    other = _timeline(over)
    if timeline.origin == other.origin:
        remedy = "--over needs a measured one and a simulated one (`autopar run --trace`, `autopar simulate --trace`)"
        raise UsageError(f"{file} and {over} are both {timeline.origin}; {remedy}")
    if _computations(timeline) != _computations(other):
        raise UsageError(f"{file} and {over} do not hold the same computations; --over needs two traces of one plan")
    measured, predicted = (timeline, other) if timeline.origin == "measured" else (other, timeline)
    for each in (measured, predicted):
        render(each, console)
    _save(draw_over(measured, predicted), png or _PICTURE, overwrite or png is None, console)
    error = predicted.end_s / measured.end_s - 1 if measured.end_s > 0 else None
    return {"measured": _summary(measured), "predicted": _summary(predicted), "error": error}


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


def _check_picture(png: Path, overwrite: bool, inputs: tuple[Path, ...]) -> None:
    from autopar.cli.references import check_output

    if png.suffix.lower() != ".png":
        raise UsageError(f"--png {png}: the picture is a PNG; give a name that ends in .png")
    check_output(png, None, overwrite=overwrite, inputs=inputs)


def _save(figure: Figure, path: Path, overwrite: bool, console: Console) -> None:
    from autopar.formats.document import write_bytes

    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_bytes(path, content.getvalue(), overwrite=overwrite)
    console.print(f"Written: {path}", highlight=False, markup=False)
