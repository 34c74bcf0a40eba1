"""Commands that perform a plan without its devices: ``autopar simulate`` and ``autopar rehearse``.

``simulate`` gives every action of the program its duration; ``rehearse`` has the runtime perform the program, to see
what it holds, or how long it takes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar import api
from autopar.api.inputs import read_inputs
from autopar.cli.arguments import (
    PLANNED_FILE,
    OtherCluster,
    OtherProfile,
    Overwrite,
    PlanFile,
    ProgramFile,
    TimesOf,
    as_flags,
    echo,
    json_option,
    output_option,
)
from autopar.cli.output import check_outputs, long_simulation, phases, put, say, screen, slow_phases
from autopar.errors import InfeasibleError
from autopar.options.rehearse import RehearsalOptions

if TYPE_CHECKING:
    from rich.console import Console

    from autopar.formats.plan import Plan
    from autopar.runtime.rehearsal.steps import Rehearsal


def simulate(
    plan: PlanFile = PLANNED_FILE,
    profile: OtherProfile = None,
    cluster: OtherCluster = None,
    times_of: TimesOf = None,
    trace: Annotated[Path | None, typer.Option(help="Write the timeline here, as a Chrome trace.")] = None,
    program: ProgramFile = None,
    write_program: Annotated[
        Path | None, typer.Option(help="Write the plan's program here, to be edited and read by --program.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, json_option("the step's figures")] = False,
) -> None:
    """Predict when every action of a step runs."""
    from autopar.hardware.kinds import kinds_of
    from autopar.planner.simulator.simulate import pipeline_times
    from autopar.report.pictures import render
    from autopar.report.table import duration, print_parts
    from autopar.schedules.check import read_program
    from autopar.schedules.expand import expand

    check_outputs(plan, (profile, cluster, program), (trace, write_program), overwrite=overwrite)
    planned, measured, machines = read_inputs(plan, profile, cluster, times_of, long_simulation)
    with slow_phases("simulating"):
        timeline = api.simulate(planned, measured, machines, program=program)
    console = screen()
    echo(cluster, machines, console)
    print_parts(render(timeline), console)
    figures = {"step_s": timeline.end_s, "bubble": timeline.bubble(), "busy_s": timeline.busy_s()}
    if planned.lead:
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
    put(figures, as_json)


_CPU_COUNTED = (
    "note: counted with the operators of a CPU, whose attention, dropout and autocast keep other bytes than a GPU's "
    "(docs/design/estimates.md)"
)


def rehearse(
    plan: PlanFile = PLANNED_FILE,
    *,
    options: RehearsalOptions,
    profile: OtherProfile = None,
    cluster: OtherCluster = None,
    trace: Annotated[
        Path | None,
        output_option("Write when every action of the last step ran here, as a Chrome trace.", "--trace"),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, json_option("the stages' peaks, or the steps' figures,")] = False,
) -> None:
    """Check the memory of every stage of a plan, or, with --steps, perform it in virtual time, without its devices.

    Memory: the plan's program is performed on tensors without data. Operators are the CPU's: of a plan for GPUs, what
    attention, dropout and autocast keep is counted as a CPU keeps it. Exits with 3 if a stage holds more than its
    devices have.

    Steps: every rank performs its program with layers that take the profile's seconds and compute nothing. Ranks are
    processes of this machine; more than 16 are threads. The model's code does not run.
    """
    if options.steps is not None:
        check_outputs(plan, (profile, cluster, options.program), [trace], overwrite=overwrite)
        _perform_steps(plan, options, (profile, cluster), trace, as_json)
        return
    options.check_counting(profile=profile, cluster=cluster, trace=trace, overwrite=overwrite or None)
    _check_memory(plan, as_json)


def _check_memory(plan: Path, as_json: bool) -> None:
    from autopar.api.rehearsals import count_bytes
    from autopar.formats.plan import Plan
    from autopar.report.plan import render_memory
    from autopar.report.table import print_parts

    chosen = Plan.load(plan)
    with phases() as progress:
        peaks = count_bytes(plan, progress)
    console = screen()
    print_parts(render_memory(chosen, peaks), console)
    if chosen.device_type == "cuda":
        say(console, _CPU_COUNTED)
    limits = chosen.predicted.limit_bytes
    put({"peak_bytes": peaks, "limit_bytes": limits or None}, as_json)
    over = [index for index, (peak, limit) in enumerate(zip(peaks, limits, strict=False)) if peak > limit]
    if over:
        stage = over[0]
        raise InfeasibleError(
            f"stage {stage} holds {peaks[stage]:,} bytes, its devices have {limits[stage]:,}; "
            f"plan again with a --memory that is smaller by the difference"
        )


def _perform_steps(
    plan: Path,
    options: RehearsalOptions,
    inputs: tuple[Path | None, str | None],
    trace: Path | None,
    as_json: bool,
) -> None:
    from autopar.api.rehearsals import perform
    from autopar.planner.simulator.simulate import pipeline_times

    profile, cluster = inputs
    planned, measured, machines = read_inputs(plan, profile, cluster, options.times_of, long_simulation)
    simulated = api.simulate(planned, measured, machines, program=options.program)
    with phases() as progress:
        found = perform(planned, replace(options, times_of=None), measured, machines, progress)
    console = screen()
    echo(cluster, machines, console)
    simulated_s = simulated.end_s
    if planned.lead:
        simulated_s = pipeline_times(simulated, planned).period_s
    _print_steps(console, planned, found, simulated_s)
    if trace is not None:
        found.timeline.save(trace)
        say(console, f"Written: {trace}; hold it against the prediction: `autopar show {trace} --over {plan}`")
    figures = {
        "steps_s": found.steps_s,
        "simulated_s": simulated_s,
        "peak_bytes": list(found.timeline.peaks_bytes().values()),
        "losses": [loss._asdict() for loss in found.losses],
        "notes": found.notes,
    }
    put(figures, as_json)


def _print_steps(console: Console, plan: Plan, rehearsal: Rehearsal, simulated_s: float) -> None:
    """Print the last step's picture, and how far its seconds and bytes are from the prediction."""
    from statistics import mean, median

    from autopar.report.pictures import render
    from autopar.report.table import duration, print_parts, size

    steps_s, goes_on = rehearsal.steps_s, plan.lead > 0
    print_parts(render(rehearsal.timeline), console)
    # Filled, a pipeline that is never flushed takes as long for every mini-batch, and less for those that drain it;
    # several wait for each other once a wave.
    steady_s = steps_s[len(steps_s) // 2 : len(steps_s) - plan.lead] or steps_s
    steady_s = steady_s[len(steady_s) % plan.span if plan.pipelines and len(steady_s) >= plan.span else 0 :]
    last_s = (mean if plan.pipelines else median)(steady_s) if goes_on else steps_s[-1]
    error = last_s / simulated_s - 1 if simulated_s > 0 else 0.0
    each = " per mini-batch" if goes_on else ""
    say(console, f"simulated: {duration(simulated_s)}{each}, rehearsed {error:+.2%}")
    peaks, planned_bytes = rehearsal.timeline.peaks_bytes(), plan.predicted.peak_bytes
    if peaks and any(planned_bytes):
        rank = max(peaks, key=lambda each: (peaks[each], -each))
        predicted = max(planned_bytes[stage] for stage in plan.ownership.ranks[rank].stages)
        say(console, f"predicted of rank {rank}: {size(predicted)}, held {peaks[rank] / predicted - 1:+.2%}")
    if len(steps_s) > 1:
        say(console, f"steps: {duration(min(steps_s))} to {duration(max(steps_s))}")
    for loss in rehearsal.losses:
        since = f"from the checkpoint of step {loss.checkpoint} on" if loss.checkpoint else "from the first step on"
        say(console, f"{loss.fault}: {duration(loss.lost_s)} are trained again, {since}")
    for note in rehearsal.notes:
        say(console, f"note: {as_flags(note)}")
