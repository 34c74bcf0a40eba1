"""Remedies: options with which a plan would fit, each of them tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import ceil, prod

from autopar.errors import UsageError
from autopar.formats.plan import SHARDS
from autopar.planner.candidate import divisors, families
from autopar.planner.closest import Known, closest
from autopar.planner.costs.model import UNLIMITED_BYTES, CostModel
from autopar.planner.options import PlanOptions, admitted

__all__ = ["Fits", "any_plan_fits", "remedies"]

Fits = Callable[[PlanOptions], bool]
"""Whether a plan fits the memory of the same cluster with other options."""

MOST_DEVICES = 512
MOST_TIMES = 16
"""As many times the devices are tried."""
MOST_STATES = 2048
"""Of the devices that are left, by kind."""


def any_plan_fits(costs: CostModel, known: Known, options: PlanOptions) -> bool:
    """Whether any plan fits the memory of the same cluster with other options."""
    options = admitted(options, costs.profile)
    other = CostModel(costs.profile, costs.cluster, options)
    found = closest(other, families(other.batch, options), options, None, known, any_fits=True)
    return found is not None and found[0] <= 0


def remedies(costs: CostModel, options: PlanOptions, fits: Fits, short: int) -> list[str]:
    """Return changes of the options that let a plan fit, as they can be typed, those first that ask for least.

    ``short`` is by how many bytes the closest plan does not fit. Of sharding the first level that helps is named, of
    micro-batch counts the nearest, of devices the least number (at most 512), of batches the largest of its halves, of
    memory the least. Where nothing but devices, batch or memory helps alone, recomputation and sharding are tried
    together, and with more devices.
    """
    found = [f"{flag} {value}" for flag, value in _alone(costs, options, fits)]
    found += _more(costs, options, fits, alone=not found)
    found += [f"--batch {batch}" for batch in _first(_halves(costs.batch, options), "batch", options, fits)]
    return [*found, *_memory(costs, options, fits, short)]


def _alone(costs: CostModel, options: PlanOptions, fits: Fits) -> Iterator[tuple[str, object]]:
    """Yield the flags that help by themselves, but for devices, batch and memory."""
    asked = options.micro_batches
    counts: list[int] = []
    if asked is not None:
        counts = [count for count in divisors(costs.batch) if count != asked]
        counts.sort(key=lambda count: (count < asked, abs(count - asked)))
    level = len(SHARDS) if options.shard == "auto" else SHARDS.index(options.shard) + 1
    every: dict[str, Sequence[object]] = {
        "recompute": ["auto"] if options.recompute == "none" else [],
        "shard": SHARDS[level:],
        "micro_batches": counts,
        "schedule": ["1f1b"] if options.schedule == "gpipe" else [],
    }
    for name, values in every.items():
        for value in _first(values, name, options, fits):
            yield f"--{name.replace('_', '-')}", value


def _more(costs: CostModel, options: PlanOptions, fits: Fits, *, alone: bool) -> list[str]:
    """Return with how many devices a plan fits; if ``alone``, also with recomputation and sharding at once."""
    both = replace(options, recompute="auto", shard="auto")
    typed = " ".join(_changes(options, both))
    together = bool(alone and typed)
    if together and fits(both):
        return [typed]
    if options.stages is not None:
        return []
    count = _devices(costs, options, fits)
    fewer = _devices(costs, both, fits) if together else None
    found = [] if fewer is None or (count is not None and count <= fewer) else [f"{typed} --gpus {fewer}"]
    return found if count is None else [*found, f"--gpus {count}"]


def _first(values: Sequence[object], name: str, options: PlanOptions, fits: Fits) -> list[object]:
    """Return the first value of an option with which a plan fits, if there is one."""
    for value in values:
        try:
            if fits(replace(options, **{name: value})):  # type: ignore[arg-type]
                return [value]
        except UsageError:
            # What contradicts the other options is no remedy.
            continue
    return []


def _changes(options: PlanOptions, other: PlanOptions) -> list[str]:
    names = [name for name in ("recompute", "shard") if getattr(options, name) != getattr(other, name)]
    return [f"--{name} {getattr(other, name)}" for name in names]


def _devices(costs: CostModel, options: PlanOptions, fits: Fits) -> int | None:
    """Return the least number of devices with which a plan fits, none if that would be too many to try."""
    least = len(costs.devices)
    most = min(MOST_DEVICES, MOST_TIMES * least, costs.layer_count * costs.batch)
    while most > least and _states(costs, most) > MOST_STATES:
        most //= 2
    # Few devices are tried quickly, and are mostly enough.
    enough = min(most, 2 * least)
    while enough < most and not fits(replace(options, gpus=enough)):
        least, enough = enough, min(most, 2 * enough)
    if enough <= least or (enough == most and not fits(replace(options, gpus=most))):
        return None
    most = enough
    while most - least > 1:
        middle = (least + most) // 2
        if fits(replace(options, gpus=middle)):
            most = middle
        else:
            least = middle
    return most


def _states(costs: CostModel, devices: int) -> int:
    more = -(-devices // len(costs.kind_of))
    return prod(more * costs.kind_of.count(kind) + 1 for kind in set(costs.kind_of))


def _halves(batch: int, options: PlanOptions) -> list[int]:
    count = options.micro_batches or 1
    return [batch >> step for step in range(1, batch.bit_length()) if (batch >> step) % count == 0]


def _memory(costs: CostModel, options: PlanOptions, fits: Fits, short: int) -> list[str]:
    """Return the least memory per device with which a plan fits."""
    memory = {options.memory_bytes or device.memory_bytes for device in costs.devices}
    if len(memory) == 1 and len(set(costs.limits_bytes)) == 1 and costs.limits_bytes[0] > 0:
        needed = memory.pop() + short
    elif options.stages is None:
        ample = replace(options, memory_bytes=UNLIMITED_BYTES)
        model = CostModel(costs.profile, costs.cluster, ample)
        found = closest(model, families(model.batch, ample), ample)
        if found is None:
            return []
        needed = UNLIMITED_BYTES + found[0]
    else:
        return []
    text, typed_bytes = _typed(needed)
    return [f"--memory {text}"] if fits(replace(options, memory_bytes=typed_bytes)) else []


def _typed(count: int) -> tuple[str, int]:
    """Return bytes as they can be typed, rounded up by little, and how many bytes that is.

    >>> _typed(300), _typed(3 * 2**20 + 1), _typed(20 * 2**30 + 1)
    (('300', 300), ('4MiB', 4194304), ('20481MiB', 21475885056))
    """
    if count < 2**20:
        return str(count), count
    mebibytes = ceil(count / 2**20)
    return f"{mebibytes}MiB", mebibytes * 2**20
