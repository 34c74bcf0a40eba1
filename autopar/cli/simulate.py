"""``autopar simulate``: the predicted timeline of a plan."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.arguments import ProgramFile, TimesOf
from autopar.cli.output import check_outputs, say, screen


def command(
    plan: Annotated[Path, typer.Argument(help="What `autopar plan` wrote.")] = Path("plan.json"),
    profile: Annotated[Path | None, typer.Option(help="Profile to use in place of the one the plan records.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Cluster, a file or a name, to use in place of the one the plan records.")
    ] = None,
    times_of: TimesOf = None,
    trace: Annotated[Path | None, typer.Option(help="Write the timeline here, as a Chrome trace.")] = None,
    program: ProgramFile = None,
    write_program: Annotated[
        Path | None, typer.Option(help="Write the plan's program here, to be edited and read by --program.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Put the step's figures on stdout as JSON.")] = False,
) -> None:
    """Predict when every action of a step runs."""
    from autopar import api
    from autopar.cli.arguments import as_flags, echo
    from autopar.cli.progress import long_simulation, slow_phases
    from autopar.hardware.kinds import kinds_of
    from autopar.inputs import read_inputs
    from autopar.planner.simulator.simulate import pipeline_times
    from autopar.report.pictures import render
    from autopar.report.table import duration
    from autopar.schedules.check import read_program
    from autopar.schedules.expand import expand

    check_outputs(plan, (profile, cluster, program), (trace, write_program), overwrite=overwrite)
    planned, measured, machines = read_inputs(plan, profile, cluster, times_of, long_simulation)
    with slow_phases("simulating"):
        timeline = api.simulate(planned, measured, machines, program=program)
    console = screen()
    echo(cluster, machines, console)
    render(timeline, console)
    figures = {"step_s": timeline.end_s, "bubble": timeline.bubble(), "busy_s": timeline.busy_s()}
    if planned.weight_policy != "sync":
        how = pipeline_times(timeline, planned)
        say(console, f"filled in {duration(how.fill_s)}, then {duration(how.period_s)} per mini-batch")
        figures |= {"step_s": how.period_s, "fill_s": how.fill_s, "drain_s": how.drain_s}
    for note in kinds_of(measured, machines.devices[: max(planned.devices) + 1], planned.times_of).notes:
        say(console, f"note: {as_flags(note)}")
    if write_program is not None:
        (expand(planned) if program is None else read_program(program, planned)).save(write_program)
        say(console, f"Written: {write_program}; run it with `autopar run {plan} --program {write_program}`")
    if trace is not None:
        timeline.save(trace)
        say(console, f"Written: {trace}; open it in Perfetto, or `autopar show {trace}`")
    if as_json:
        sys.stdout.write(json.dumps(figures, indent=1) + "\n")
