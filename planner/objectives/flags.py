"""Flags: which options an objective knows; the others contradict it."""

from __future__ import annotations

from autopar.errors import UsageError
from autopar.formats.plan import Objective
from autopar.planner.options import PLANNED, PlanOptions

__all__ = ["check_flags"]

_FLAGS = {
    "batch": "--batch",
    "memory_bytes": "--memory",
    "schedule": "--schedule",
    "chunks": "--chunks",
    "micro_batches": "--micro-batches",
    "stages": "--stages",
    "min_stages": "--min-stages",
    "max_stages": "--max-stages",
    "forbid_cut": "--forbid-cut",
    "pin": "--pin",
    "use_all": "--use-all",
    "divisible": "--divisible",
    "recompute": "--recompute",
    "shard": "--shard",
    "effort": "--effort",
    "exact": "--exact",
    "equal_widths": "--equal-widths",
    "solver": "--solver",
    "solver_seconds": "--solver-seconds",
    "deadline_s": "--deadline",
}
_KNOWN: dict[Objective, frozenset[str]] = {
    "step": frozenset(_FLAGS) - {"deadline_s"},
    "cost": frozenset(_FLAGS) - {"stages", "solver", "solver_seconds", "effort", "exact", "equal_widths"},
    "throughput": frozenset({"batch", "memory_bytes", "use_all", "divisible", "recompute"}),
    "pipedream": frozenset(),
    "piper": frozenset({"batch", "memory_bytes"}),
}
_WHY: dict[Objective, str] = {
    "step": "finds the fastest plan, and not the cheapest one that meets it (--objective cost)",
    "cost": "searches every set of devices",
    "throughput": "is of mini-batches that flow whole, one after the other",
    "pipedream": "is PipeDream's, whose planner takes the profiled mini-batch and keeps no memory limit",
    "piper": "is Piper's, whose planner takes one sample per micro-batch and the options in the profile",
}


def check_flags(options: PlanOptions) -> None:
    """Refuse an option that the objective does not know.

    Devices, bandwidth, gap and seed apply to all; those objectives that are found exactly keep any gap.

    Raises:
        UsageError: names the flag.
    """
    usual = PlanOptions()
    for name, flag in _FLAGS.items():
        if name not in _KNOWN[options.objective] and getattr(options, name) != getattr(usual, name):
            raise UsageError(
                f"{flag} does not go with --objective {options.objective}, which {_WHY[options.objective]}; "
                f"leave out {flag}"
            )
    if options.objective == "cost" and options.schedule not in ("auto", *PLANNED):
        raise UsageError(f"--objective cost searches {' and '.join(PLANNED)} only, not {options.schedule}")
