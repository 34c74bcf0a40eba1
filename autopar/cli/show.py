"""Commands that show what files hold: ``autopar show``, and ``autopar checkpoint``, of a folder of checkpoints.

Checkpoints are listed, verified, or exported: a model of one as one file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar import api
from autopar.cli.arguments import Overwrite, add, group, json_option, output_option
from autopar.cli.output import check_drawn, check_output, long_simulation, phases, say, screen, write_png
from autopar.errors import FileError, TrainingError, UsageError, unknown
from autopar.formats.document import write_text

if TYPE_CHECKING:
    from autopar.api.views import View
    from autopar.formats.checkpoint import CheckpointView


def show(
    file: Annotated[Path, typer.Argument(help="A profile, cluster, plan, program, report or trace.")],
    over: Annotated[
        Path | None, typer.Option(help="A second trace, or the plan: draw measured over predicted.")
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(
            help="Draw into this file: layers, devices, the plan's stages and predicted step, the loss, or the trace."
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write charts and tables as a page of its own, which asks no network.")
    ] = None,
    picture: Annotated[
        str | None,
        typer.Option(
            help="Which picture: of a plan placement, timeline, stages, messages, memory, layers or search; of a trace "
            "timeline or messages."
        ),
    ] = None,
    as_json: Annotated[bool, json_option("the content")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Show a file of autopar as tables, and as a picture where one is asked for."""
    from autopar.report.table import print_parts

    console = screen()
    inputs = (file,) if over is None else (file, over)
    for path, flag in ((png, "png"), (html, "html")):
        if path is not None:
            check_drawn(path, flag, overwrite=overwrite, inputs=inputs)
    if png is not None and html is not None and png.resolve() == html.resolve():
        raise UsageError(f"{png} cannot hold both the picture and the page; name another --html")
    shown = api.show(file, over, progress=long_simulation)
    _check_picture(shown, file, picture, png)
    print_parts(shown.parts(), console)
    if png is not None:
        write_png(shown.plot(picture), png, overwrite=overwrite)
    if html is not None:
        write_text(html, shown.to_html(), overwrite=overwrite)
        say(console, f"Written: {html}")
    if as_json:
        sys.stdout.write(shown.json)


def _check_picture(shown: View, file: Path, picture: str | None, png: Path | None) -> None:
    """Refuse a picture that there is not, or that goes nowhere."""
    if png is not None and not shown.pictures:
        raise UsageError(f"{file} is a {shown.kind}, of which there is no picture; leave --png out")
    if picture is None:
        return
    if picture not in shown.pictures:
        names = f"has the pictures {', '.join(shown.pictures)}" if shown.pictures else "has no picture"
        message = f"--picture {picture}: {file} is a {shown.kind}, which {names}"
        raise unknown(UsageError, message, picture, shown.pictures)
    if png is None:
        raise UsageError(f"--picture {picture} is drawn into a file; add --png {picture}.png")


CheckpointFolder = Annotated[Path, typer.Argument(help="What `autopar run --checkpoint` was given.")]
_AsJson = Annotated[bool, json_option("what was found")]
_MODEL = Path("model.safetensors")

checkpoints = group(
    "List the checkpoints of a run, verify them, or export a model of one.", "autopar checkpoint list checkpoints"
)


def list_checkpoints(folder: CheckpointFolder, as_json: _AsJson = False) -> None:
    """List the checkpoints of a folder; their manifests are read, and nothing else."""
    _print_checkpoints(api.checkpoints(folder), as_json)


def verify_checkpoints(folder: CheckpointFolder, as_json: _AsJson = False) -> None:
    """Read every file of every checkpoint, and compare it with what its manifest says.

    Exits with 4 if a file is damaged; with 5 if all are whole, and training had spoilt one: more of its parameters, or
    of the optimizer's state, is not finite than at step 0. A run that is resumed leaves both out.
    """
    with phases() as progress:
        found = api.checkpoints(folder, thorough=True, progress=progress)
    _print_checkpoints(found, as_json)
    wrong = [each for each in found if each.problem is not None]
    damaged = [each for each in wrong if each.manifest is None]
    if wrong:
        kind, what = (FileError, "damaged") if damaged else (TrainingError, "not finite")
        problems = "; ".join(str(each.problem) for each in wrong)
        raise kind(f"{len(damaged or wrong)} of {len(found)} checkpoints are {what}: {problems}")


def export_checkpoint(
    folder: CheckpointFolder,
    step: Annotated[int | None, typer.Option("--step", help="Of which step; default: the newest sound one.")] = None,
    output: Annotated[Path, output_option("Where to write the model.")] = _MODEL,
    overwrite: Overwrite = False,
) -> None:
    """Write the model of a checkpoint as one safetensors file, as `load_state_dict` takes it."""
    check_output(output, None, overwrite=overwrite)
    say(screen(), f"Written: {output}, the model after step {api.export_checkpoint(folder, output, step=step)}")


def _print_checkpoints(found: list[CheckpointView], as_json: bool) -> None:
    if as_json:
        content = [
            {
                "step": each.step,
                "folder": str(each.folder),
                "bytes": each.bytes,
                "problem": each.problem,
                "plan": None if each.manifest is None else each.manifest.plan.model_dump(mode="json"),
                "run": None if each.manifest is None else each.manifest.run.model_dump(mode="json"),
            }
            for each in found
        ]
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
        return
    from autopar.report.run import render_checkpoints
    from autopar.report.table import print_parts

    print_parts(render_checkpoints(found), screen())


add(checkpoints, "list", list_checkpoints, "autopar checkpoint list checkpoints")
add(checkpoints, "verify", verify_checkpoints, "autopar checkpoint verify checkpoints")
add(checkpoints, "export", export_checkpoint, "autopar checkpoint export checkpoints --step 100 -o model.safetensors")
