"""Room: whether this host has the memory for all ranks of a plan, and for the plain loop beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.runtime.initial import host_memory_bytes

__all__ = ["available_bytes", "check_room"]

RANK_BYTES = 200 * 2**20
"""Of a process that has imported torch, what it does not share with others."""
COPIES = 6
"""Of the model in the plain loop: values, gradients, two states of an optimizer, and what is compared of both."""


def available_bytes() -> int:
    """Return the memory of this host that processes can still have."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return host_memory_bytes()
    found = dict(line.split(":", 1) for line in lines)
    kibibytes = found.get("MemAvailable", "").split()
    return int(kibibytes[0]) * 1024 if kibibytes else host_memory_bytes()


def check_room(plan: Plan, model_bytes: Mapping[str, int], wider: float) -> None:
    """Refuse to start what this host's memory does not hold.

    Args:
        plan: its ranks run at once, and hold what was predicted of them.
        model_bytes: of every parameter and buffer, as it is computed.
        wider: how many times as many bytes an element has as in the plan.

    Raises:
        UsageError: says what is needed, and what is there.
    """
    there, whole = available_bytes(), sum(model_bytes.values())
    peaks = [chunks[0] for chunks in plan.groups]
    ranks = sum(
        plan.stages[stage].replicas * (RANK_BYTES + round(wider * plan.predicted.peak_bytes[stage])) for stage in peaks
    )
    for needed, what in (
        (COPIES * whole, f"the plain loop of a model of {_text(whole)}"),
        (ranks + COPIES * whole, f"{len(plan.devices)} ranks beside the plain loop"),
    ):
        if needed > there:
            raise UsageError(
                f"verifying takes about {_text(needed)} for {what}, this host has {_text(there)} of memory left; "
                "verify on a larger host, or a plan of fewer ranks or of a smaller model"
            )


def _text(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"
