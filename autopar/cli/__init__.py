"""The command line, one module per command; a command imports what it needs only when it runs."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

from autopar.cli import plan, profile, run, show, simulate, worker
from autopar.errors import AutoparError

__all__ = ["app", "main"]

app = typer.Typer(
    name="autopar",
    help="Measure a PyTorch model, plan the fastest way to train it on your machines, and train it that way.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _settings(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    context.obj = {"debug": debug}


app.command("profile")(profile.command)
app.command("plan")(plan.command)
app.command("simulate")(simulate.command)
app.command("run")(run.command)
app.command("worker")(worker.command)
app.command("show")(show.command)


def main() -> None:
    """Run a command; an error of autopar becomes one line on stderr and its exit code."""
    debug = "--debug" in sys.argv[1:]
    try:
        app()
    except AutoparError as error:
        if debug:
            traceback.print_exc()
        sys.stderr.write(f"autopar: {' '.join(str(error).split())}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("autopar: interrupted\n")
        sys.exit(130)
