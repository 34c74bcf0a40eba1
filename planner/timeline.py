"""Timeline of a plan: its simulation by the times of the profile that it was made from."""

from __future__ import annotations

from autopar.errors import FileError, UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.formats.timeline import Timeline
from autopar.planner.assemble import candidate_of, crossings, shared_parameters, timeline_of
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions


def simulate(plan: Plan, profile: Profile, cluster: Cluster) -> Timeline:
    """Return the predicted timeline of a plan.

    Raises:
        UsageError: no program follows from the plan (:attr:`Plan.refusal`).
        FileError: the plan's layers are not the profile's.
    """
    if plan.refusal is not None:
        raise UsageError(f"{plan.refusal}: the simulator has programs of synchronous pipelines of whole devices only")
    placed = [name for stage in plan.stages for name in stage.layers]
    names = [layer.name for layer in profile.layers]
    if placed != names:
        index = next((at for at, pair in enumerate(zip(placed, names, strict=False)) if pair[0] != pair[1]), len(names))
        found = placed[index] if index < len(placed) else "nothing"
        raise FileError(
            f"the plan is not of this profile: layer {index} is {found!r} in the plan and "
            f"{names[index] if index < len(names) else 'nothing'!r} in the profile; run `autopar plan` again"
        )
    options = PlanOptions(
        gpus=max(plan.devices) + 1,
        batch=plan.batch,
        bytes_per_s=plan.bytes_per_s,
        times_of=plan.times_of,
        divisible=plan.divisible,
    )
    costs = CostModel(profile, cluster, options)
    _check_flows(plan, costs)
    return timeline_of(plan, costs)


def _check_flows(plan: Plan, costs: CostModel) -> None:
    """Refuse a plan that sends or shares other than what the profile says, as an edited one may."""
    candidate = candidate_of(plan, costs.profile)
    for key, planned, found in (
        ("tensors", plan.tensors, crossings(costs, candidate)),
        ("tied", plan.tied, shared_parameters(costs, candidate)),
    ):
        if planned != found:
            index = next((at for at, pair in enumerate(zip(planned, found, strict=False)) if pair[0] != pair[1]), None)
            at = f"$.{key}" if index is None else f"$.{key}[{index}]"
            raise FileError(
                f"the plan is not of this profile: {at} is not what the profile's layers exchange between these "
                "stages; run `autopar plan` again, with `stages` for stages of your own"
            )
