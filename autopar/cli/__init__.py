"""The command line, one module per kind of commands; a command imports what it needs only when it runs."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from contextlib import suppress
from itertools import pairwise
from typing import Annotated

import typer
from typer.exceptions import TyperException

from autopar.cli import cache, demo, exchange, measure, plan, show, simulate, start, training
from autopar.cli.arguments import Quiet, add, as_flags, examples
from autopar.cli.mistakes import Commands, hint_of, meant_line, say_versions
from autopar.cli.output import quietly, results_only
from autopar.cli.settings import SETTINGS, is_setting, read_settings
from autopar.errors import AutoparError, FileError, UsageError, cause_of, escape, printable, text_of
from autopar.formats.references import allow_any_path
from autopar.ranks.environment import is_supervised
from autopar.ranks.supervisor import refusals_heard
from autopar.signals import INTERRUPTED, Termination, ended_by, record_interrupts, unwind_on_termination

__all__ = ["app", "main"]

app = typer.Typer(
    name="autopar",
    cls=Commands,
    help="Measure a PyTorch model, plan the fastest way to train it on your machines, and train it that way.",
    no_args_is_help=True,
    epilog=examples("autopar profile gpt.py", "autopar plan --gpus 8", "autopar run", "autopar --quiet plan --json"),
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _settings(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Say which version this is, and torch's.", callback=say_versions, is_eager=True),
    ] = False,
    quiet: Quiet = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    trust_paths: Annotated[
        bool,
        typer.Option("--trust-paths", help="Open what a plan names outside of its folder and the working folder, too."),
    ] = False,
) -> None:
    if quiet:
        context.with_resource(quietly())
    read_settings(context)
    if trust_paths:
        context.with_resource(allow_any_path())
    # main() reads --debug from the command line itself: mistakes on it are errors, too.
    # A rank's launcher ends all of its ranks, and waits for none that is inside a collective; so does a supervisor.
    if not is_supervised(os.environ) and not (context.invoked_subcommand == "cluster" and "RANK" in os.environ):
        context.with_resource(unwind_on_termination(context.obj))


add(app, "init", start.init, "autopar init", "autopar init net.py")
add(app, "env", start.env, "autopar env", "autopar env --json")
add(app, "profile", measure.profile, "autopar profile gpt.py --batch 64", "autopar profile gpt.py --device H100")
add(
    app,
    "plan",
    plan.plan,
    "autopar plan --gpus 8",
    "autopar plan --cluster 4x8xA100-80G:200Gbps --schedule 1f1b --shard auto",
)
add(app, "simulate", simulate.simulate, "autopar simulate plan.json --trace trace.json")
add(app, "compare", plan.compare, "autopar compare --gpus 8 --batch 256")
add(app, "rehearse", simulate.rehearse, "autopar rehearse plan.json", "autopar rehearse --steps 2 --trace trace.json")
add(app, "verify", training.verify, "autopar verify plan.json --steps 3")
add(
    app,
    "run",
    training.run,
    "autopar run plan.json --steps 100 --trace trace.json",
    "autopar run --epochs 2 --save weights",
)
add(
    app,
    "worker",
    training.worker,
    "autopar worker plan.json --steps 100",
    of_ranks=True,
    refusing=refusals_heard,
)
app.add_typer(show.checkpoints, name="checkpoint")
app.add_typer(measure.clusters, name="cluster")
app.add_typer(cache.captured, name="cache")
add(app, "demo", demo.command, "autopar demo --folder autopar-demo")
add(app, "show", show.show, "autopar show plan.json", "autopar show trace.json --over plan.json --png steps.png")
add(app, "export", exchange.export, "autopar export torch plan.json -o schedule.csv")
add(
    app,
    "import",
    exchange.import_,
    "autopar import pipedream graph.txt --profiled-batch 32",
    "autopar import profiles h100.json a100.json -o both.json",
)


def main() -> None:
    """Run a command; an error becomes one line on stderr and its exit code."""
    asked: list[int] = []
    try:
        with record_interrupts(asked), results_only():
            code = app(standalone_mode=False, obj=asked, prog_name="autopar")
        if asked and not code:
            # It has ended by itself, sooner than it was to.
            code = _report_signal(asked[0])
        elif code == INTERRUPTED:
            _say("interrupted")
    except (KeyboardInterrupt, typer.Abort):
        code = _report_signal(signal.SIGINT)
    except Termination as end:
        code = _report_signal(end.number)
    except Exception as error:
        # Whatever being asked to end has turned into, it is what ended the command.
        code = _report_signal(asked[0]) if asked else _code_of(error)
    sys.exit(code)


def _report_signal(number: int) -> int:
    """Say which signal ended the command; return the exit code."""
    _say(ended_by(number))
    return 128 + number


def _code_of(error: Exception) -> int:
    """Say what failed; return the exit code."""
    if isinstance(error, AutoparError):
        return _report_error(f"{as_flags(str(error))}{meant_line(error)}", error.exit_code)
    if isinstance(error, TyperException):
        return _usage(error)
    package = _broken_package(error)
    if package is not None:
        remedy = f"`pip check` says what it lacks, `pip install --force-reinstall {package}` installs it anew"
        return _report_error(f"{package} cannot be imported: {error}; {remedy}", FileError.exit_code)
    if isinstance(error, OSError):
        return _report_error(
            f"{error.filename or 'the system'}: {error.strerror or text_of(error)}", FileError.exit_code
        )
    remedy = "this is a fault of autopar; please report it with what --debug shows"
    return _report_error(f"{cause_of(error)}; {remedy}", AutoparError.exit_code)


def _broken_package(error: Exception) -> str | None:
    """Return the package whose import failed, if that is what an error is of."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>")
    importing = [str(frame.f_globals.get("__name__")) for frame in frames]
    missing = [error.name] if isinstance(error, ImportError) and error.name else []
    packages = (name.partition(".")[0] for name in (*importing, *missing))
    return next((each for each in packages if each not in ("autopar", "__main__")), None)


def _report_error(message: str, code: int) -> int:
    """Say what failed, in one line behind the traceback that ``--debug`` asks for; return the exit code."""
    if "--debug" in sys.argv[1:]:
        sys.stderr.write(escape(traceback.format_exc()))
    _say(message)
    return code


def _say(message: str) -> None:
    sys.stderr.write(f"autopar: {printable(as_flags(message))}\n")


def _usage(error: TyperException) -> int:
    """Say what is wrong with a command line; without any arguments, its help has been shown already."""
    message, hint = hint_of(error)
    value = _value_of(getattr(error, "param", None))
    if value is not None and repr(value) not in message:
        message = f"{message}; found {value!r}"
    if is_setting(error):
        message = f"{SETTINGS}: {message}"
    if message:
        _say(f"{message}{hint}")
    context = getattr(error, "ctx", None)
    if context is not None and context.info_name == "worker":
        with suppress(UsageError), refusals_heard():
            raise UsageError(message)
    return UsageError.exit_code


def _value_of(parameter: object) -> str | None:
    """Return what was typed for an option, last if more than once; None for arguments, and for what was not typed."""
    options, found = getattr(parameter, "opts", ()), None
    for typed, following in pairwise((*sys.argv[1:], "")):
        option, equals, value = typed.partition("=")
        if option in options and (equals or following):
            found = value if equals else following
    return found
