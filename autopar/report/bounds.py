"""Bounds as text: how a plan's step is bounded, what binds it, and what the ranks' time goes to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.report.quantity import duration, percentage

if TYPE_CHECKING:
    from autopar.formats.plan import Plan
from autopar.formats.predicted import BoundPart


def bound_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return the stack of bounds, weakest first, and the gap of the step to the last of them."""
    predicted, bounds = plan.predicted, plan.predicted.bounds
    last = "lower bound"
    rows = []
    if bounds is not None:
        rows = [("bound of any plan: work alone", bounds.work_s)]
        if len(plan.groups[0]) > 1:
            # The others are of plans with one stage on every device.
            found = [(name, duration(seconds)) for name, seconds in rows]
            return [*found, ("gap to it", percentage(predicted.step_s / bounds.work_s - 1))] if bounds.work_s else found
        rows += [("one stage a device: contiguous", bounds.contiguous_s), ("+ links", bounds.linked_s)]
        last = "+ memory: their lower bound"
    rows.append((last, predicted.lower_bound_s))
    found = [(name, duration(seconds)) for name, seconds in rows]
    if predicted.lower_bound_s > 0:
        found.append(("gap to it", percentage(predicted.step_s / predicted.lower_bound_s - 1)))
    return found


def binding_text(plan: Plan) -> str:
    """Return what binds a plan, by its own bound; empty where unknown."""
    parts = plan.predicted.binding
    if not parts:
        return ""
    own_s = sum(part.seconds for part in parts)
    found = f"{_term(plan, parts[0])}: {duration(parts[0].seconds)} of its own bound of {duration(own_s)}"
    if len(parts) > 1:
        found += f"; then {_term(plan, parts[1])}: {duration(parts[1].seconds)}"
    return found


def _term(plan: Plan, part: BoundPart) -> str:
    stage, depth = part.stage, plan.stages[part.stage].warmup
    return {
        "compute": f"computing on stage {stage}",
        "round trip": f"round trips of stage {stage} with {depth} in flight"
        + (", more than which its memory does not hold" if part.full else ""),
        "link": f"messages between stages {stage} and {stage + 1}",
        "filling": f"filling and draining the pipeline around stage {stage}",
        "synchronisation": f"gradient synchronisation of stage {stage}",
        "update": f"the update of stage {stage}",
        "overhead": "the step's overhead",
    }[part.term]


def share_text(plan: Plan) -> str:
    """Return what the ranks' time goes to; empty where unknown."""
    shares = plan.predicted.shares
    if shares is None:
        return ""
    named = {
        "computing": shares.computing,
        "waiting for messages": shares.messages,
        "for gradients to be reduced": shares.reduction,
        "idle": shares.idle,
    }
    return ", ".join(f"{name} {percentage(share)}" for name, share in named.items())
