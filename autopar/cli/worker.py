"""``autopar worker``: one rank of a run that torchrun, or a launcher with its environment, has started."""

from __future__ import annotations

import os

import typer

from autopar.cli.training import Training, conclude, model_of, read_plan, taking
from autopar.errors import UsageError

__all__ = ["command"]


@taking
def command(asked: Training) -> None:
    """Run one rank of a plan under torchrun: torchrun --nproc-per-node 4 -m autopar worker plan.json."""
    try:
        chosen = read_plan(asked.plan, asked.seed)
        asked.check(chosen)
        model = model_of(chosen, asked.plan)

        from autopar.cli.progress import steps_progress
        from autopar.runtime.launch import join

        with steps_progress(asked.known_steps, quiet=os.environ.get("RANK") != "0") as progress:
            outcome = join(chosen, model, asked.run_options(chosen), progress)
    except UsageError:
        # Every rank finds the same mistake: one of them says it.
        if os.environ.get("RANK", "0") == "0":
            raise
        raise typer.Exit(UsageError.exit_code) from None
    if outcome is not None:
        conclude(asked, outcome)
