"""``autopar import``: a profile that another system measured, as autopar's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.errors import FileError, UsageError

if TYPE_CHECKING:
    from autopar.formats.profile import Profile

__all__ = ["command"]

_OUTPUT = Path("profile.json")
_FORMATS = ("pipedream", "piper")


def command(
    system: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT", help="pipedream: the text graph of PipeDream and DAPPLE; piper: Piper's JSON."
        ),
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to read.")],
    profiled_batch: Annotated[
        int | None,
        typer.Option(help="Samples of the mini-batch that was profiled (pipedream); default: it counts as 1."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the profile.")] = _OUTPUT,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Put the profile on stdout as JSON.")] = False,
) -> None:
    """Read another system's profile, and write it as a profile of autopar's."""
    from rich.console import Console

    from autopar.cli.references import check_output, rebased

    if system not in _FORMATS:
        raise UsageError(f"FORMAT must be one of {', '.join(_FORMATS)}; found {system!r}")
    if profiled_batch is not None and system != "pipedream":
        raise UsageError("--profiled-batch is for pipedream: Piper's files state how many micro-batches they are for")
    if not file.exists():
        raise FileError(f"{file}: no such file; name one that {system} wrote")
    check_output(output, _OUTPUT, overwrite=overwrite, inputs=(file,))
    read = _read(system, file, profiled_batch)
    profile = read.model_copy(update={"model": rebased(read.model, file, output)})
    profile.save(output)
    console = Console(stderr=True)
    for note in profile.notes:
        console.print(f"Note: {note}", highlight=False, markup=False)
    seconds = sum(layer.costs[0].forward_s + layer.costs[0].backward_s for layer in profile.layers)
    console.print(
        f"Written: {output}, {len(profile.layers)} layers of {seconds:.6g} s; `autopar plan {output}` plans for it",
        highlight=False,
        markup=False,
    )
    if as_json:
        sys.stdout.write(profile.dumps())


def _read(system: str, file: Path, profiled_batch: int | None) -> Profile:
    from autopar.formats.document import read_text
    from autopar.interop.pipedream import pipedream_profile
    from autopar.interop.piper import piper_profile

    if system == "piper":
        return piper_profile(read_text(file, "Piper"), file)
    return pipedream_profile(read_text(file, "PipeDream"), file, 1 if profiled_batch is None else profiled_batch)
