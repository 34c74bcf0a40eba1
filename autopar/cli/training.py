"""Commands that train: ``autopar run``, ``autopar worker`` and ``autopar verify``.

``run`` starts a rank for every device of the plan on this host; ``worker`` is one rank of a run that a launcher has
started, on one host or several: the process that the launcher starts reads the plan, starts the same command again as
the rank, and watches over it. With ``--update-profile``, what a run gives is also the plan's profile and cluster, with
the times that the run measured.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar import api
from autopar.api.inputs import data_of, model_of, open_plan, origin_of, read_inputs
from autopar.cli.arguments import PLANNED_FILE, Overwrite, PlanFile, Timeout, json_option, output_option, with_flags
from autopar.cli.output import check_output, long_simulation, phases, put, say, screen, steps_progress
from autopar.errors import FileError, TrainingError, UsageError
from autopar.formats.plan import Plan
from autopar.formats.references import plan_files, rebase_paths
from autopar.options.option import option
from autopar.options.train import PULLS, RunOptions
from autopar.ranks.environment import LaunchedRank, is_supervised, rank_from_environment
from autopar.ranks.failure import SaidElsewhereError

if TYPE_CHECKING:
    from autopar.runtime.outcome import Outcome


_DEFAULT_REPORT = Path("report.json")
CLUSTER = "cluster.json"
"""Beside a profile, where `autopar plan` looks for it."""


@dataclass(frozen=True, kw_only=True)
class TrainingArguments(RunOptions):
    """What commands that train are asked: arguments and options, under their names."""

    plan: Annotated[Path, typer.Argument(help="The plan to carry out.")] = PLANNED_FILE
    seed: int | None = option(None, "Run seed, in place of the plan's.", least=0, most=2**63 - 1)
    report: Annotated[Path, output_option("Where to write the report.", "--report")] = _DEFAULT_REPORT
    trace: Annotated[
        Path | None, output_option("Write the measured timeline of a typical step (Chrome trace).", "--trace")
    ] = None
    update_profile: Annotated[
        bool,
        output_option(
            "Write the plan's profile with the times that this run measured, and cluster.json beside it with its "
            "messages', to plan again.",
            "--update-profile",
        ),
    ] = False
    output: Annotated[
        Path | None, output_option("Where --update-profile writes; default: over the plan's profile.")
    ] = None
    overwrite: Overwrite = False
    as_json: Annotated[bool, json_option("the report")] = False

    @property
    def black_box_file(self) -> Path:
        """Where the last actions of every rank are written if the run fails: beside the report."""
        return self.report.with_suffix(".blackbox.json")

    def check(self, loaded_plan: Plan) -> None:
        """Refuse, before anything starts, what could not be written afterwards.

        Raises:
            UsageError: a file exists and may not be replaced, or is read, or there is no profile to update.
            FileError: a folder is missing, or a file that the plan records.
        """
        named = (self.program, self.replay)
        read = (*plan_files(loaded_plan, self.plan), *(each for each in named if each is not None))
        check_output(self.report, _DEFAULT_REPORT, overwrite=self.overwrite, inputs=read)
        if self.trace is not None:
            check_output(self.trace, None, overwrite=self.overwrite, inputs=read, others=(self.report,))
        if loaded_plan.eager and self.replay is None:
            log = self.pulls or PULLS
            goes_on = self.resume and log.is_file()
            check_output(log, PULLS, overwrite=self.overwrite or goes_on, inputs=read, others=(self.report,))
        if self.log_dir is not None and self.log_dir.exists() and not self.log_dir.is_dir():
            raise UsageError(f"{self.log_dir} is a file; --log-dir takes a folder")
        if self.save is not None and self.save.exists():
            if not self.save.is_dir():
                raise UsageError(f"{self.save} is a file; --save takes a folder")
            from autopar.runtime.checkpoint.weights import INDEX

            # A run that goes on may replace the weights that it has saved before.
            goes_on = self.resume and (self.save / INDEX).exists()
            if any(self.save.iterdir()) and not (self.overwrite or goes_on):
                raise UsageError(f"{self.save} is not empty; pass --overwrite to write into it")
        if self.update_profile:
            self._check_update(loaded_plan, read)
        elif self.output is not None:
            raise UsageError(f"--output {self.output}: names what --update-profile writes; pass that, too")

    def _check_update(self, loaded_plan: Plan, read: tuple[Path, ...]) -> None:
        """Refuse a profile that could not be updated or written; ``read`` is what the command reads.

        Raises:
            UsageError: the plan records no profile, or a file exists.
            FileError: what the plan records is gone, or no longer what it was.
        """
        from autopar.api.runs import check_measures_layers

        why = loaded_plan.policy.refusal_of("update_profile")
        if why is not None:
            raise UsageError(f"--update-profile: {why}")
        check_measures_layers(loaded_plan, "--update-profile")
        target = self.updated_profile(loaded_plan)
        if loaded_plan.times_of is not None:
            raise UsageError(
                f"--update-profile: in {self.plan} times of {loaded_plan.times_of} stand for other devices "
                "(--times-of), whose own a run measures; leave it out, and profile there"
            )
        read_inputs(self.plan)
        # The profile and the cluster may be written over by what they become; the plan and the model may not.
        recorded = (loaded_plan.profile, loaded_plan.cluster)
        replaced = [self.plan.parent / each.path for each in recorded if each is not None]
        inputs = tuple(path for path in read if path not in replaced)
        others = (self.report, *([self.trace] if self.trace is not None else []))
        check_output(target, None, overwrite=self.overwrite, inputs=inputs, others=others)
        check_output(target.parent / CLUSTER, None, overwrite=self.overwrite, inputs=inputs, others=(*others, target))

    def updated_profile(self, loaded_plan: Plan) -> Path:
        """Return where ``--update-profile`` writes: by default over the profile that the plan records."""
        return _recorded_profile(loaded_plan, self.plan) if self.output is None else self.output

    def run_options(self, data: Path | None = None) -> RunOptions:
        """Return what the runtime is asked; ``data`` is the file that feeds an ``hf:`` model."""
        asked = RunOptions(**{each.name: getattr(self, each.name) for each in fields(RunOptions)})
        return replace(asked, time_layers=self.update_profile, black_box=self.black_box_file, data=data)


def conclude(arguments: TrainingArguments, outcome: Outcome) -> None:
    """Write what a run gives, print the report's tables and where the files are; on stdout, the report if asked."""
    from autopar.report.run import render
    from autopar.report.table import print_parts

    report = with_flags(outcome.report)
    report.save(arguments.report)
    if arguments.trace is not None:
        outcome.timeline.save(arguments.trace)
    updated = _write_update(arguments, outcome) if arguments.update_profile else ()
    console = screen()
    print_parts(render(report), console)
    written = [
        str(path)
        for path in (arguments.report, arguments.trace, arguments.save, arguments.log_dir, arguments.pulls)
        if path is not None
    ]
    say(console, f"Written: {', '.join(written)}")
    if updated:
        text = f"Written: {', '.join(map(str, updated))}; `autopar plan {updated[0]}` plans with what was measured"
        say(console, text)
    put(report, arguments.as_json)


def _write_update(arguments: TrainingArguments, outcome: Outcome) -> tuple[Path, ...]:
    """Write the profile, and the cluster where messages were measured; return the files."""
    planned, profile, cluster = read_inputs(arguments.plan)
    target = arguments.updated_profile(planned)
    made, links = api.recalibrate(planned, outcome, profile, cluster)
    model = rebase_paths(profile.model, _recorded_profile(planned, arguments.plan), target)
    made.model_copy(update={"model": model}).save(target)
    if links.dumps() == cluster.dumps():
        return (target,)
    links.save(target.parent / CLUSTER)
    return target, target.parent / CLUSTER


def _recorded_profile(loaded_plan: Plan, plan: Path) -> Path:
    if loaded_plan.profile is None:
        raise UsageError(f"--update-profile: {plan} records no profile; `autopar plan` writes plans that do")
    return plan.parent / loaded_plan.profile.path


def run(arguments: TrainingArguments) -> None:
    """Train on processes of this host, one per rank, and compare the step time with the prediction.

    The same program runs under torchrun with `autopar worker`.
    """
    chosen = Plan.load(arguments.plan)
    # Ranks are forks of this process, and libraries read this where they are imported.
    os.environ.update({name: str(chosen.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")})

    from autopar.ranks.fork_server import forked_servers

    arguments.check(chosen)
    # What is not there is said before any rank starts.
    model_of(chosen, arguments.plan)
    with forked_servers(), steps_progress(arguments.steps) as progress:
        asked = arguments.run_options()
        outcome = api.train(arguments.plan, asked, seed=arguments.seed, progress=progress, phases=long_simulation)
    conclude(arguments, outcome)


def worker(arguments: TrainingArguments) -> None:
    """Run one rank of a plan, as torchrun, srun, mpirun or Kubernetes starts it.

    On every host: PYTHONSAFEPATH=1 torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint
    HOST:29500 -m autopar worker plan.json
    """
    launch = rank_from_environment(os.environ)
    try:
        if is_supervised(os.environ):
            _work(arguments, launch)
        else:
            _supervise(arguments, launch)
    except SaidElsewhereError as error:
        raise typer.Exit(error.exit_code) from None


def _supervise(arguments: TrainingArguments, launch: LaunchedRank) -> None:
    """Start the rank, and watch over it."""
    from autopar.api.runs import remedy_of
    from autopar.ranks.fork_server import command_of
    from autopar.ranks.supervisor import refusals_heard, supervise
    from autopar.runtime.start.supervision import watch_of
    from autopar.schedules.check import read_program
    from autopar.schedules.expand import expand

    with refusals_heard():
        chosen, _ = _read_plan(arguments, launch)
    # Only for what is said: most runs need none.
    program = cache(lambda: read_program(arguments.program, chosen) if arguments.program else expand(chosen))
    place = (launch.ranks_of_host, arguments.timeout_s, arguments.black_box_file)
    remedy = partial(remedy_of, loaded_plan=chosen, path=arguments.plan)
    watch = watch_of(chosen, program, *place, remedy)
    code = supervise(launch, watch, command_of("autopar.cli", *sys.argv[1:]))
    if code:
        raise typer.Exit(code)


def _work(arguments: TrainingArguments, launch: LaunchedRank) -> None:
    """Train as the rank, and say what fails to whoever watches over it."""
    from autopar.ranks.supervisor import SupervisedRank

    with SupervisedRank(launch) as supervised:
        try:
            chosen, model = _read_plan(arguments, launch)

            from autopar.api.runs import compare_with_prediction, tell_throughput
            from autopar.runtime.start.launch import join

            options = arguments.run_options(data_of(chosen, arguments.plan))
            with steps_progress(options.steps, quiet=launch.rank != 0) as progress:
                outcome = join(chosen, model, options, launch, progress, supervised)
            if outcome is not None:
                outcome = tell_throughput(outcome, chosen, partial(origin_of, arguments.plan))
                predicted = partial(api.simulate, arguments.plan, progress=long_simulation)
                conclude(arguments, compare_with_prediction(outcome, chosen, predicted))
            supervised.finish()
        except Exception as error:
            supervised.fail(error)
            if not supervised.board.has_come(launch.rank):
                from autopar.ranks.meeting import refuse

                refuse(launch, error)
            raise typer.Exit(1) from None


def _read_plan(arguments: TrainingArguments, launch: LaunchedRank) -> tuple[Plan, str]:
    """Return the plan and MODEL; of a host's ranks, which read the same files, one says what is wrong with them."""
    try:
        chosen, _ = open_plan(arguments.plan, arguments.seed)
        if launch.rank == 0:
            arguments.check(chosen)
        return chosen, model_of(chosen, arguments.plan)
    except FileError as error:
        if launch.local_rank == 0:
            raise
        raise SaidElsewhereError(str(error), error.exit_code) from None


def verify(
    plan: PlanFile = PLANNED_FILE,
    steps: Annotated[int, typer.Option("--steps", help="Optimizer steps to train and compare.", min=1)] = 3,
    timeout_s: Timeout = 300.0,
    as_json: Annotated[bool, json_option("the differences")] = False,
) -> None:
    """Check that a plan's ranks train what one process does: run them here for some steps, and a plain loop beside.

    Both compute in float64 where the model can, on CPUs, whatever the plan is for. Losses, the first step's gradients,
    parameters and buffers are compared. Exits with 5 if they differ by more than docs/howto/verify.md allows.
    """
    from autopar.report.run import render_verification
    from autopar.report.table import print_parts

    with phases() as progress:
        found = api.verify(plan, steps=steps, timeout_s=timeout_s, progress=progress)
    print_parts(render_verification(found), screen())
    put(found.as_dict(), as_json)
    worst = next((each for each in found.differences if not each.equal), None)
    if worst is not None:
        largest = "differ" if worst.largest is None else f"differ by {worst.largest:.2g} ({worst.allowed:.2g} allowed)"
        raise TrainingError(
            f"{plan}: the ranks did not train what plain training does: {worst.what} {largest}, most at {worst.where}; "
            "please report it with the plan and the model file"
        )
