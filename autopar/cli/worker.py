"""``autopar worker``: one rank of a run that a launcher has started, on one host or several.

The process that the launcher starts reads the plan, starts the same command again as the rank, and watches over it.
"""

from __future__ import annotations

import os
import sys
from functools import partial

import typer

from autopar.cli.training import TrainingArguments, conclude, training_command
from autopar.errors import FileError, UsageError
from autopar.formats.plan import Plan
from autopar.inputs import data_of, model_of, predict, read_plan
from autopar.ranks.environment import LaunchedRank, is_supervised, rank_from_environment
from autopar.ranks.failure import SaidElsewhereError


@training_command
def command(arguments: TrainingArguments) -> None:
    """Run one rank of a plan, as torchrun, srun, mpirun or Kubernetes starts it.

    On every host: torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m autopar
    worker plan.json
    """
    launch = rank_from_environment(os.environ)
    try:
        if is_supervised(os.environ):
            _train(arguments, launch)
        else:
            _watch(arguments, launch)
    except SaidElsewhereError as error:
        raise typer.Exit(error.exit_code) from None
    except UsageError:
        # Every rank finds the same mistake: one of them says it.
        if launch.rank == 0:
            raise
        raise typer.Exit(UsageError.exit_code) from None


def _watch(arguments: TrainingArguments, launch: LaunchedRank) -> None:
    """Start the rank, and watch over it."""
    from autopar.ranks.supervisor import supervise
    from autopar.runs import remedy_of
    from autopar.runtime.start.supervision import watch_of

    chosen, _ = _read(arguments, launch)
    place = (launch.ranks_of_host, arguments.timeout_s, arguments.black_box)
    remedy = partial(remedy_of, loaded_plan=chosen, path=arguments.plan)
    watch = watch_of(chosen, arguments.program, *place, remedy)
    code = supervise(launch, watch, [sys.executable, "-m", "autopar", *sys.argv[1:]])
    if code:
        raise typer.Exit(code)


def _train(arguments: TrainingArguments, launch: LaunchedRank) -> None:
    """Train as the rank, and say what fails to whoever watches over it."""
    from autopar.ranks.supervisor import SupervisedRank

    with SupervisedRank(launch) as supervised:
        try:
            chosen, model = _read(arguments, launch)

            from autopar.cli.progress import long_simulation, steps_progress
            from autopar.runs import compare_with_prediction
            from autopar.runtime.start.launch import join, run_options

            options = run_options(data=data_of(chosen, arguments.plan), **arguments.options())
            with steps_progress(arguments.known_steps, quiet=launch.rank != 0) as progress:
                outcome = join(chosen, model, options, launch, progress, supervised)
            if outcome is not None:
                predicted = partial(predict, arguments.plan, progress=long_simulation)
                conclude(arguments, compare_with_prediction(outcome, chosen, predicted))
            supervised.finish()
        except Exception as error:
            supervised.fail(error)
            raise typer.Exit(1) from None


def _read(arguments: TrainingArguments, launch: LaunchedRank) -> tuple[Plan, str]:
    """Return the plan and MODEL; of a host's ranks, which read the same files, one says what is wrong with them."""
    try:
        chosen = read_plan(arguments.plan, arguments.seed)
        if launch.rank == 0:
            arguments.check(chosen)
        return chosen, model_of(chosen, arguments.plan)
    except FileError as error:
        if launch.local_rank == 0:
            raise
        raise typer.Exit(error.exit_code) from None
