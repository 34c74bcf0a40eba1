"""``autopar run``: train on processes of this host, the way a plan says."""

from __future__ import annotations

from autopar.cli.training import Training, conclude, taking
from autopar.formats.plan import Plan
from autopar.inputs import model_of


@taking
def command(asked: Training) -> None:
    """Train on processes of this host, one per rank, and compare the step time with the prediction.

    The same program runs under torchrun with `autopar worker`.
    """
    from autopar import api
    from autopar.cli.progress import long_simulation, steps_progress

    chosen = Plan.load(asked.plan)
    asked.check(chosen)
    # What is not there is said before any rank starts.
    model_of(chosen, asked.plan)
    with steps_progress(asked.known_steps) as progress:
        outcome = api.train(asked.plan, seed=asked.seed, progress=progress, phases=long_simulation, **asked.options())
    conclude(asked, outcome)
