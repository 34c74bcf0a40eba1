"""Flags: which options an objective knows; the others contradict it."""

from __future__ import annotations

from autopar.errors import UsageError
from autopar.planner.options import PLANNED, Objective, PlanOptions

_OPTIONS = (
    "batch",
    "memory_bytes",
    "schedule",
    "chunks",
    "micro_batches",
    "stages",
    "min_stages",
    "max_stages",
    "forbid_cut",
    "pin",
    "use_all",
    "divisible",
    "recompute",
    "shard",
    "effort",
    "exact",
    "equal_widths",
    "solver",
    "solver_seconds",
    "deadline_s",
)
_KNOWN: dict[Objective, frozenset[str]] = {
    "step": frozenset(_OPTIONS) - {"deadline_s"},
    "cost": frozenset(_OPTIONS) - {"stages", "solver", "solver_seconds", "effort", "exact", "equal_widths"},
    "throughput": frozenset({"batch", "memory_bytes", "use_all", "divisible", "recompute"}),
}
_WHY: dict[Objective, str] = {
    "step": "finds the fastest plan, and not the cheapest one that meets it (`objective='cost'`)",
    "cost": "searches every set of devices",
    "throughput": "is of mini-batches that flow whole, one after the other",
}


def check_flags(options: PlanOptions) -> None:
    """Refuse an option that the objective does not know.

    Devices, bandwidth, gap and seed apply to all; those objectives that are found exactly keep any gap.

    Raises:
        UsageError: names the option.
    """
    usual = PlanOptions()
    for name in _OPTIONS:
        if name not in _KNOWN[options.objective] and getattr(options, name) != getattr(usual, name):
            raise UsageError(
                f"`{name}` does not go with `objective={options.objective!r}`, which {_WHY[options.objective]}; "
                f"leave out `{name}`"
            )
    if options.objective == "cost" and options.schedule not in ("auto", *PLANNED):
        raise UsageError(f"`objective='cost'` searches {' and '.join(PLANNED)} only, not {options.schedule}")
