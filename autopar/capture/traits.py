"""Traits: what an optimizer is told of the stage whose parameters it steps, if the user's function asks for it by name.

In come a plan and the user's model; out comes what is told of each stage. PipeDream multiplies a stage's rate by its
replicas, PipeMare divides it by its delay; the function may do either, or anything else:

    def optimizer(parameters, delay, replicas):
        return torch.optim.SGD(parameters, lr=0.1 * replicas / (1 + delay))

- ``delay``: the updates between a micro-batch's forward and its own update, the mean over a mini-batch, such as 0.5; 0
  with flushes, and where a profile is made. Under ``vertical-sync`` the weights that forwards see may be older.
- ``replicas``: of the stage; 1 where a profile is made.

Training is then of the plan: one with other stages trains otherwise, with flushes, too. A checkpoint that goes on under
such a plan says that the optimizer has changed (``--accept-changes``). ``autopar verify``, and the settings that ranks
are held to, have each parameter's optimizer told of its stage. Stages that share a parameter and would be told
different things are refused.
"""

from __future__ import annotations

from typing import NamedTuple

from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.policies.pipemare import delay


class StageTraits(NamedTuple):
    """What an optimizer may be told of a stage; by default, of the only one of a pipeline with flushes."""

    delay: float = 0.0
    """Mean over a mini-batch of the updates between a micro-batch's forward and its own update; 0 with flushes."""
    replicas: int = 1
    """Of the stage."""


def stage_traits(plan: Plan, options: tuple[str, ...]) -> list[StageTraits]:
    """Return what is told of every stage of a plan: the defaults but for ``options``, which the function asks for.

    A rank's several stages have the same replicas, and no delay: they are told alike.

    Raises:
        UsageError: stages share a parameter, and are told different things.
    """
    delays = [0.0] * len(plan.stages) if plan.weight_policy == "sync" else [delay(each) for each in plan.depths]
    replicas = [stage.replicas for stage in plan.stages]
    every = [StageTraits(*each) for each in zip(delays, replicas, strict=True)]
    found = [StageTraits(**{name: getattr(each, name) for name in options}) for each in every]
    for tied in plan.tied:
        told = dict.fromkeys(found[stage] for stage in tied.stages)
        if len(told) > 1:
            name = next(name for name in options if len({getattr(each, name) for each in told}) > 1)
            other = "policy='sync'" if name == "delay" else "max_stages=1"
            values = " and ".join(dict.fromkeys(f"{getattr(each, name):g}" for each in told))
            raise UsageError(
                f"optimizer() asks for {name}, which is {values} on stages that share {tied.parameter}, whose copies "
                f"would part; leave {name} out of its parameters, or plan with `{other}`"
            )
    return found
