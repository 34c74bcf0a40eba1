"""Plans of several ranks for each replica, without a model: nothing says how they divide it."""

from collections.abc import Sequence

from autopar.formats.plan import Plan, Stage


def resized(plan: Plan, sizes: Sequence[int]) -> Plan:
    """Return a plan whose replicas are run by so many ranks each, by stage."""
    devices, count = {}, 0
    for chunks in plan.groups:
        width = plan.stages[chunks[0]].replicas * sizes[chunks[0]]
        devices |= dict.fromkeys(chunks, tuple(range(count, count + width)))
        count += width
    stages = [
        Stage(**(stage.model_dump() | {"devices": devices[index], "tensor_parallel": sizes[index]}))
        for index, stage in enumerate(plan.stages)
    ]
    return Plan(**(dict(plan) | {"stages": tuple(stages)}))
