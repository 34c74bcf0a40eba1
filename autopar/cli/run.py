"""``autopar run``: train on processes of this host, the way a plan says."""

from __future__ import annotations

from autopar.cli.training import Training, conclude, model_of, read_plan, taking

__all__ = ["command"]


@taking
def command(asked: Training) -> None:
    """Train on processes of this host, one per rank, and compare the step time with the prediction.

    The same program runs under torchrun with `autopar worker`.
    """
    chosen = read_plan(asked.plan, asked.seed)
    asked.check(chosen)
    model = model_of(chosen, asked.plan)

    from autopar.cli.progress import steps_progress
    from autopar.runtime.launch import run

    with steps_progress(asked.known_steps) as progress:
        outcome = run(chosen, model, asked.run_options(chosen), progress)
    conclude(asked, outcome)
