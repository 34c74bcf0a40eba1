"""Flags: arguments that the library's errors and notes name, as they are typed on the command line."""

from __future__ import annotations

import ast
import re
import shlex
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from autopar.formats.plan import Plan
    from autopar.formats.predicted import Alternative
    from autopar.formats.profile import Profile
    from autopar.formats.report import Report

    Noted = TypeVar("Noted", Plan, Profile, Report)


_OWN = {
    "bytes_per_s": "bandwidth",
    "deadline_s": "deadline",
    "largest_bytes": "largest",
    "memory_bytes": "memory",
    "timeout_s": "timeout",
}
"""Flags that are not called like their arguments, which have units."""
ARGUMENTS = frozenset(
    (
        *("accept_loss", "batch", "calibrate_with", "chunks", "clip_norm", "cluster", "compile", "cpu_offload", "data"),
        *("deferred_batch_norm", "device", "divisible", "effort", "epochs", "equal_widths", "exact", "forbid_cut"),
        *("gap", "gpus", "last", "max_stages", "micro_batches", "min_stages", "objective", "over", "overwrite", "pin"),
        *("precision", "profile", "profiled_batch", "ranks", "recompute", "replicate_state", "save", "schedule"),
        *("seed", "sequence", "shard", "share_gpus", "solver", "solver_seconds", "stages", "steps", "sync_batch_norm"),
        *("threads", "times_of", "use_all", "weights", *_OWN),
    )
)
"""Arguments that are options of some command, too."""


def as_flags(text: str) -> str:
    """Return a text with flags for the arguments that it names in backquotes.

    >>> as_flags("`gpus=4`: too few; a plan fits with `shard='auto', gpus=8`, or without `use_all`")
    '--gpus 4: too few; a plan fits with --shard auto --gpus 8, or without --use-all'
    >>> as_flags("`autopar plan` writes it; pass `exact=True`, or `pin='a,b same stage'`")
    "`autopar plan` writes it; pass --exact, or --pin 'a,b same stage'"
    """
    return re.sub("`([^`]+)`", lambda match: _typed(match[1]) or match[0], text)


def with_flags(record: Noted) -> Noted:
    """Return a record with flags in its notes."""
    return record.model_copy(update={"notes": tuple(map(as_flags, record.notes))})


def plan_with_flags(plan: Plan) -> Plan:
    """Return a plan with flags in its notes, and where it says what is against its alternatives."""
    alternatives = tuple(map(_alternative, plan.alternatives))
    return with_flags(plan.model_copy(update={"alternatives": alternatives}))


def _alternative(alternative: Alternative) -> Alternative:
    reasons = {"infeasible": alternative.infeasible, "excluded": alternative.excluded}
    return alternative.model_copy(update={name: each and as_flags(each) for name, each in reasons.items()})


def _typed(arguments: str) -> str | None:
    """Return the arguments of a call as they are typed; None where these are none."""
    call = f"call({arguments})"
    try:
        found = ast.parse(call, mode="eval").body
    except (SyntaxError, ValueError):
        return None
    if not isinstance(found, ast.Call):
        return None
    names = [each.id if isinstance(each, ast.Name) else "" for each in found.args]
    names += [each.arg or "" for each in found.keywords]
    if not names or not ARGUMENTS.issuperset(names):
        return None
    values = ["" for _ in found.args] + [_value(call, each.value) for each in found.keywords]
    flags = (f"--{_OWN.get(name, name).replace('_', '-')}" for name in names)
    return " ".join(f"{flag} {value}".rstrip() for flag, value in zip(flags, values, strict=True))


def _value(call: str, value: ast.expr) -> str:
    """Return a value as a shell takes it; nothing where its flag alone says it."""
    if isinstance(value, ast.Constant) and value.value is True:
        return ""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return shlex.quote(value.value)
    return ast.get_source_segment(call, value) or ""
