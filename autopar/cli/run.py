"""``autopar run``: train on processes of this host, the way a plan says."""

from __future__ import annotations

from autopar.cli.training import TrainingArguments, conclude, training_command
from autopar.formats.plan import Plan
from autopar.inputs import model_of


@training_command
def command(arguments: TrainingArguments) -> None:
    """Train on processes of this host, one per rank, and compare the step time with the prediction.

    The same program runs under torchrun with `autopar worker`.
    """
    from autopar import api
    from autopar.cli.progress import long_simulation, steps_progress

    chosen = Plan.load(arguments.plan)
    arguments.check(chosen)
    # What is not there is said before any rank starts.
    model_of(chosen, arguments.plan)
    with steps_progress(arguments.known_steps) as progress:
        outcome = api.train(
            arguments.plan, seed=arguments.seed, progress=progress, phases=long_simulation, **arguments.options()
        )
    conclude(arguments, outcome)
