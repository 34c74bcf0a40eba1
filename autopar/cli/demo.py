"""``autopar demo``: profile, plan and run a bundled example."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.arguments import json_option
from autopar.cli.output import screen
from autopar.errors import UsageError
from autopar.formats.document import write_bytes
from autopar.options.plan import PlanOptions
from autopar.options.profile import ProfileOptions

if TYPE_CHECKING:
    from rich.console import Console


BATCH = 16


def command(
    folder: Annotated[Path, typer.Option(help="Where the files go; made if missing.")] = Path("autopar-demo"),
    ranks: Annotated[int, typer.Option(help="Ranks to plan for.", min=2)] = 2,
    steps: Annotated[int, typer.Option(help="Optimizer steps to train.", min=2)] = 20,
    as_json: Annotated[bool, json_option("the report")] = False,
) -> None:
    """Profile, plan and run the bundled GPT in about a minute: pipelined over processes of this machine."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; --folder takes a folder")
    folder.mkdir(parents=True, exist_ok=True)
    console = screen()
    files = {name: folder / name for name in ("profile.json", "plan.json", "report.json")}
    picture = folder / "timeline.png"
    _perform(console, folder, files, picture, ranks, steps)
    _conclude(console, files, picture)
    if as_json:
        sys.stdout.write(files["report.json"].read_text(encoding="utf-8"))


def _perform(console: Console, folder: Path, files: dict[str, Path], picture: Path, ranks: int, steps: int) -> None:
    """Run one command after the other, each said before it begins."""
    import autopar.examples
    from autopar.cli import measure, plan, show, simulate, training

    traces = {name: folder / f"{name}.trace.json" for name in ("measured", "predicted")}
    _say(console, "autopar profile --tensor 1", "measure every layer of a GPT, and the links between ranks")
    (examples,) = autopar.examples.__path__
    model = folder / "gpt.py"
    # Beside the files that name it, so that they can be used from there.
    write_bytes(model, (Path(examples) / "gpt.py").read_bytes())
    measured = ProfileOptions(batch=BATCH, tensor=1)
    measure.profile(str(model), options=measured, ranks=ranks, output=files["profile.json"], overwrite=True)
    _say(console, f"autopar plan --gpus {ranks} --min-stages 2", "find the fastest pipeline")
    planned = PlanOptions(gpus=ranks, min_stages=2)
    plan.plan(files["profile.json"], options=planned, output=files["plan.json"], overwrite=True)
    _say(console, f"autopar run --steps {steps}", "train it that way")
    plan_file, report = files["plan.json"], files["report.json"]
    training.run(
        training.TrainingArguments(steps=steps, plan=plan_file, report=report, trace=traces["measured"], overwrite=True)
    )
    _say(console, "autopar simulate, autopar show --over", "lay the measured step over the predicted one")
    simulate.simulate(files["plan.json"], trace=traces["predicted"], overwrite=True)
    show.show(traces["measured"], traces["predicted"], picture, overwrite=True)


def _say(console: Console, what: str, why: str) -> None:
    console.rule(f"[bold]{what}[/bold]: {why}", align="left")


def _conclude(console: Console, files: dict[str, Path], picture: Path) -> None:
    from autopar.formats.plan import Plan
    from autopar.formats.report import Report
    from autopar.report.table import Table, duration, percentage

    plan, report = Plan.load(files["plan.json"]), Report.load(files["report.json"])
    widths = " + ".join(str(plan.stages[group[0]].replicas) for group in plan.groups)
    table = Table("What happened", ("", ""))
    table.add_row(
        "pipeline",
        f"{len(plan.stages)} stages on {widths} ranks, {plan.schedule}, {plan.micro_batches} x "
        f"{plan.micro_batch_size} samples a step",
    )
    table.add_row("loss", f"{report.loss[0]:.3f} -> {report.loss[-1]:.3f} in {report.steps} steps")
    table.add_row("step, predicted", duration(report.predicted_step_s))
    table.add_row("step, measured", f"{duration(report.step_s.median)} (median)")
    table.add_row("error", percentage(report.error, with_sign=True))
    for name, path in {**files, "timeline": picture}.items():
        table.add_row(name, str(path))
    console.rule()
    console.print(table)
