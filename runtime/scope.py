"""Scope: what a plan may ask for that this runtime does not do."""

from __future__ import annotations

from autopar.errors import UsageError
from autopar.formats.plan import Plan

__all__ = ["check_scope"]


def check_scope(plan: Plan) -> None:
    """Refuse a plan that can be simulated, but not carried out.

    Raises:
        UsageError: names what it is, and how to plan without it.
    """
    if plan.refusal is not None:
        raise UsageError(f"{plan.refusal}: `autopar run` trains synchronous pipelines of whole devices")
    if plan.divisible:
        raise UsageError("the plan divides micro-batches freely, as no run can; plan without --divisible")
