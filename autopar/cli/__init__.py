"""The command line, one module per command; a command imports what it needs only when it runs."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer
from typer.exceptions import TyperException

from autopar.cli import demo, plan, profile, run, show, simulate, worker
from autopar.errors import AutoparError, UsageError

__all__ = ["app", "main"]

INTERRUPTED = 130

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
app.command("demo")(demo.command)
app.command("show")(show.command)


def main() -> None:
    """Run a command; an error becomes one line on stderr and its exit code."""
    try:
        code = app(standalone_mode=False)
    except AutoparError as error:
        if "--debug" in sys.argv[1:]:
            traceback.print_exc()
        sys.stderr.write(f"autopar: {' '.join(str(error).split())}\n")
        code = error.exit_code
    except TyperException as error:
        code = _usage(error)
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("autopar: interrupted\n")
        code = INTERRUPTED
    sys.exit(code)


def _usage(error: TyperException) -> int:
    """Say what is wrong with a command line; without any arguments, its help has been shown already."""
    message = " ".join(error.format_message().split())
    if message:
        sys.stderr.write(f"autopar: {message} (try --help)\n")
    return UsageError.exit_code
