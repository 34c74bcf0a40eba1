"""``autopar worker``: one rank of a run that a launcher has started, on one host or several."""

from __future__ import annotations

import os
from functools import partial

import typer

from autopar.cli.training import TrainingArguments, conclude, training_command
from autopar.errors import FileError, UsageError
from autopar.formats.plan import Plan
from autopar.inputs import data_of, model_of, predict, read_plan
from autopar.ranks.environment import LaunchedRank, rank_from_environment
from autopar.ranks.failure import SaidElsewhereError


@training_command
def command(arguments: TrainingArguments) -> None:
    """Run one rank of a plan, as torchrun, srun, mpirun or Kubernetes starts it.

    On every host: torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m autopar
    worker plan.json
    """
    launch = rank_from_environment(os.environ)
    try:
        chosen, model = _read(arguments, launch)

        from autopar.cli.progress import long_simulation, steps_progress
        from autopar.recalibration import compare_with_prediction
        from autopar.runtime.start.launch import join, run_options

        options = run_options(data=data_of(chosen, arguments.plan), **arguments.options())
        with steps_progress(arguments.known_steps, quiet=launch.rank != 0) as progress:
            outcome = join(chosen, model, options, launch, progress)
    except SaidElsewhereError as error:
        raise typer.Exit(error.exit_code) from None
    except UsageError:
        # Every rank finds the same mistake: one of them says it.
        if launch.rank == 0:
            raise
        raise typer.Exit(UsageError.exit_code) from None
    if outcome is not None:
        conclude(
            arguments,
            compare_with_prediction(outcome, chosen, partial(predict, arguments.plan, progress=long_simulation)),
        )


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
