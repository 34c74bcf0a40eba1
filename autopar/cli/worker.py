"""``autopar worker``: one rank of a run that a launcher has started, on one host or several."""

from __future__ import annotations

import os
from functools import partial

import typer

from autopar.cli.training import Training, conclude, taking
from autopar.errors import FileError, UsageError
from autopar.formats.plan import Plan
from autopar.inputs import data_of, model_of, predict, read_plan
from autopar.ranks.environment import LaunchedRank, launched
from autopar.ranks.failure import SaidElsewhereError


@taking
def command(asked: Training) -> None:
    """Run one rank of a plan, as torchrun, srun, mpirun or Kubernetes starts it.

    On every host: torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m autopar
    worker plan.json
    """
    launch = launched(os.environ)
    try:
        chosen, model = _read(asked, launch)

        from autopar.cli.progress import long_simulation, steps_progress
        from autopar.recalibration import over_predicted
        from autopar.runtime.start.launch import join, run_options

        options = run_options(data=data_of(chosen, asked.plan), **asked.options())
        with steps_progress(asked.known_steps, quiet=launch.rank != 0) as progress:
            outcome = join(chosen, model, options, launch, progress)
    except SaidElsewhereError as error:
        raise typer.Exit(error.exit_code) from None
    except UsageError:
        # Every rank finds the same mistake: one of them says it.
        if launch.rank == 0:
            raise
        raise typer.Exit(UsageError.exit_code) from None
    if outcome is not None:
        conclude(asked, over_predicted(outcome, chosen, partial(predict, asked.plan, progress=long_simulation)))


def _read(asked: Training, launch: LaunchedRank) -> tuple[Plan, str]:
    """Return the plan and MODEL; of a host's ranks, which read the same files, one says what is wrong with them."""
    try:
        chosen = read_plan(asked.plan, asked.seed)
        if launch.rank == 0:
            asked.check(chosen)
        return chosen, model_of(chosen, asked.plan)
    except FileError as error:
        if launch.local_rank == 0:
            raise
        raise typer.Exit(error.exit_code) from None
