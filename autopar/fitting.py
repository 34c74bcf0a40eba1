"""Fitting: the plan to go on with where a run has run out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autopar.errors import AutoparError, InfeasibleError, OutOfMemoryError
from autopar.formats.plan import Plan
from autopar.inputs import planned_file, resolve_inputs

_TYPED = "`autopar plan {} --gpus {} --batch {} --memory {}` plans one that fits"


def remedy_of(error: AutoparError, loaded_plan: Plan, path: Path) -> str | None:
    """Return what is to be typed for a plan that fits, and how long its step is; None where memory was not short.

    Args:
        error: what a run of the plan raised.
        loaded_plan: the plan.
        path: its file, to which those that it names are relative.
    """
    if not isinstance(error, OutOfMemoryError):
        return None
    size = f"{error.memory_bytes >> 20}MiB"
    try:
        return _remedy(loaded_plan, path, error.memory_bytes, size)
    except InfeasibleError as none:
        return f"no plan of these devices fits {size} each: {none}"
    except AutoparError:
        # What the plan was made of is gone, or has changed.
        return f"plan again with `memory_bytes='{size}'`"


@contextmanager
def advise_on_memory(loaded_plan: Plan, plan: Plan | str | Path) -> Iterator[None]:
    """Have the error of a run that lacks memory say what would fit; ``plan`` is what the user named."""
    try:
        yield
    except OutOfMemoryError as error:
        error.args = (f"{error}; {remedy_of(error, loaded_plan, planned_file(plan))}",)
        raise


def _remedy(loaded_plan: Plan, path: Path, memory_bytes: int, size: str) -> str:
    from autopar.planner import PlanOptions, plan

    _, profile, cluster = resolve_inputs(loaded_plan, path)
    options = PlanOptions(gpus=len(loaded_plan.devices), batch=loaded_plan.batch, memory_bytes=memory_bytes)
    made = plan(profile, cluster, options)
    recorded = Path("profile.json") if loaded_plan.profile is None else path.parent / loaded_plan.profile.path
    typed = _TYPED.format(recorded, len(loaded_plan.devices), loaded_plan.batch, size)
    return f"{typed}: {made.predicted.step_s:.3g} s a step, {loaded_plan.predicted.step_s:.3g} s of this one"
