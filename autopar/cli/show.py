"""``autopar show``: any of autopar's files, as tables and pictures."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.output import say, screen
from autopar.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from autopar.views import FileView


_PICTURE = Path("timeline.png")


def command(
    file: Annotated[Path, typer.Argument(help="A profile, cluster, plan, program, report or trace.")],
    over: Annotated[
        Path | None, typer.Option(help="A second trace, or the plan: draw measured over predicted.")
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(
            help="Draw the profile's layers, the trace, or the plan's stages and predicted step, into this file."
        ),
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
    from autopar import api
    from autopar.cli.progress import long_simulation
    from autopar.formats.references import kind_of

    console = screen()
    kind = kind_of(file)
    inputs = (file,) if over is None else (file, over)
    for path, flag in ((png, "png"), (html, "html")):
        if path is not None:
            _check_written(path, flag, overwrite, inputs)
    if png is not None and html is not None and png.resolve() == html.resolve():
        raise UsageError(f"{png} cannot hold both the picture and the page; name another --html")
    shown = api.show(file, over, progress=long_simulation)
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


def _check_written(path: Path, kind: str, overwrite: bool, inputs: tuple[Path, ...]) -> None:
    from autopar.cli.output import check_output

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


def _save_page(view: FileView, figures: list[Figure], path: Path, overwrite: bool, console: Console) -> None:
    from autopar.formats.document import write_text
    from autopar.views import page

    write_text(path, page(view.title, view.render, figures), overwrite=overwrite)
    say(console, f"Written: {path}")
