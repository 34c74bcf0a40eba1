"""``autopar checkpoint``: what a folder of checkpoints holds, whether it is sound, and a model of it as one file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.commands import add, examples
from autopar.cli.output import check_output, say, screen
from autopar.errors import FileError

if TYPE_CHECKING:
    from autopar.formats.checkpoint import CheckpointView

Folder = Annotated[Path, typer.Argument(help="What `autopar run --checkpoint` was given.")]
AsJson = Annotated[bool, typer.Option("--json", help="Put what was found on stdout as JSON.")]
_OUTPUT = Path("model.safetensors")

app = typer.Typer(
    help="List the checkpoints of a run, verify them, or export a model of one.",
    epilog=examples("autopar checkpoint list checkpoints"),
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def list_(folder: Folder, as_json: AsJson = False) -> None:
    """List the checkpoints of a folder; their manifests are read, and nothing else."""
    from autopar import api

    _print(api.checkpoints(folder), as_json)


def verify(folder: Folder, as_json: AsJson = False) -> None:
    """Read every file of every checkpoint, and compare it with what its manifest says."""
    from autopar import api
    from autopar.cli.progress import phases

    with phases() as progress:
        found = api.checkpoints(folder, thorough=True, progress=progress)
    _print(found, as_json)
    damaged = [each.problem for each in found if each.problem is not None]
    if damaged:
        raise FileError(f"{len(damaged)} of {len(found)} checkpoints are damaged: {'; '.join(damaged)}")


def export(
    folder: Folder,
    step: Annotated[int | None, typer.Option("--step", help="Of which step; default: the newest sound one.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the model.")] = _OUTPUT,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
) -> None:
    """Write the model of a checkpoint as one safetensors file, as `load_state_dict` takes it."""
    from autopar import api

    check_output(output, None, overwrite=overwrite)
    say(screen(), f"Written: {output}, the model after step {api.export_checkpoint(folder, output, step=step)}")


def _print(found: list[CheckpointView], as_json: bool) -> None:
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

    render_checkpoints(found, screen())


add(app, "list", list_, "autopar checkpoint list checkpoints")
add(app, "verify", verify, "autopar checkpoint verify checkpoints")
add(app, "export", export, "autopar checkpoint export checkpoints --step 100 -o model.safetensors")
