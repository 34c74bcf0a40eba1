"""Commands of the first minutes: ``autopar init`` writes a model file, ``autopar env`` says what this machine has."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from autopar import api
from autopar.cli.arguments import Overwrite, json_option
from autopar.cli.output import check_output, put, say, screen
from autopar.errors import UsageError
from autopar.formats.document import write_text

_MODEL = Path("model.py")


def init(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = _MODEL,
    overwrite: Overwrite = False,
) -> None:
    """Write a model file with comments, to be filled with your own model; it runs as it is."""
    from importlib.resources import files

    if file.suffix != ".py":
        error = UsageError(f"{file}: a model file is Python; give a name that ends in .py")
        error.meant = str(file), f"{file}.py"
        raise error
    check_output(file, None, overwrite=overwrite)
    write_text(file, (files("autopar.examples") / "starter.py").read_text(encoding="utf-8"), overwrite=overwrite)
    say(screen(), f"Written: {file}; `autopar profile {file}` measures its model")


def env(as_json: Annotated[bool, json_option("what was found")] = False) -> None:
    """Say what autopar finds here: torch, GPUs, processors, memory, caches; and what is wrong, with the remedy."""
    from autopar.report.table import Table

    found = api.environment()
    console, table = screen(), Table("Environment", ("", ""))
    for what, value in found.entries.items():
        table.add_row(what, value)
    console.print(table)
    for problem in found.problems:
        say(console, f"wrong: {problem}")
    if not found.problems:
        say(console, "nothing is wrong")
    put(asdict(found), as_json)
    if found.problems:
        raise typer.Exit(UsageError.exit_code)
