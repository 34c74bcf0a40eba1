"""Infeasible: the error when nothing fits, from the plan that comes closest, and options with which one fits.

Remedies are tried: each is an option changed alone, the least change that helps first, then some of them together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations, islice
from math import ceil, prod
from typing import Any

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.plan import SHARDS
from autopar.planner.candidate import Candidate, Family, divisors, families
from autopar.planner.closest import closest, oversized_layer
from autopar.planner.costs.model import UNLIMITED_BYTES, CostModel
from autopar.planner.options import PLANNED, PlanOptions, admissible_options

Fits = Callable[[PlanOptions], bool]
"""Whether a plan fits the memory of the same cluster with other options."""
Changes = dict[str, Sequence[object]]
"""Of options, by their names: values that may help."""

MOST_DEVICES = 512
MOST_TIMES = 16
"""As many times the devices are tried."""
MOST_STATES = 2048
"""Of the devices that are left, by kind."""
MOST_DOUBLINGS = 8
"""Of a batch."""
_USUAL = PlanOptions()
_LEFT_OUT = ("use_all", "max_stages", "min_stages", "forbid_cut", "pin", "chunks", "equal_widths")
"""Options without which there may be a plan."""


def any_plan_fits(costs: CostModel, options: PlanOptions) -> bool:
    """Whether any plan fits the memory of the same cluster with other options."""
    options = admissible_options(options, costs.profile)
    other = CostModel(costs.profile, costs.cluster, options)
    found = closest(other, families(other.batch, options), options, any_fits=True)
    return found is not None and found[0] <= 0


def advice(suggestions: Sequence[str]) -> str:
    """Return the end of an error: what would help, each of it tried, or that nothing was found."""
    if not suggestions:
        return "no options were found with which a plan would fit: divide the largest layers, or use a smaller model"
    return f"a plan fits {', or '.join(suggestions)}"


def remedies(costs: CostModel, options: PlanOptions, fits: Fits, short: int) -> list[str]:
    """Return changes of the options that let a plan fit, as they can be typed, those first that ask for least.

    ``short`` is by how many bytes the closest plan does not fit. Of sharding the first level that helps is named, of
    micro-batch counts the nearest, of devices the least number (at most 512), of batches the largest of its halves, of
    memory the least. Where nothing but devices, batch or memory helps alone, recomputation and sharding are tried
    together, and with more devices.
    """
    found = _alone(_usual_changes(costs, options), options, fits)
    found += _device_remedies(costs, options, fits, alone=not found)
    found += _alone({"batch": _halves(costs.batch, options)}, options, fits)
    return found + _memory_texts(_sizes(costs, options, short), options, fits)


def schedule_remedies(costs: CostModel, options: PlanOptions, fits: Fits, short: int | None) -> list[str]:
    """Return :func:`remedies` for a schedule that is found by trying: of devices twice or four times as many.

    Without a plan that comes closest (``short``), also the options without which there is one.
    """
    counts = (len(costs.devices) * times for times in (2, 4) if options.stages is None)
    changes = _usual_changes(costs, options) | {
        "gpus": [count for count in counts if count <= MOST_DEVICES],
        "batch": _halves(costs.batch, options),
    }
    sizes = None if short is None else _sizes(costs, options, short)
    return _with_or_without(_alone(changes, options, fits), sizes, costs, options, fits)


def policy_remedies(costs: CostModel, options: PlanOptions, fits: Fits, ample_bytes: int) -> list[str]:
    """Return what lets a pipeline without flushes fit, or one with flushes in its place.

    ``ample_bytes`` is the memory of a device with which one does.
    """
    other: Changes = {"objective": ["step"]} if options.policy == "sync" else {"policy": ["sync"]}
    counts = (len(costs.devices) * times for times in (2, 4) if options.stages is None)
    changes: Changes = {
        "recompute": ["auto"] if options.recompute == "none" else [],
        **other,
        "gpus": [count for count in counts if count <= MOST_DEVICES],
        "batch": _halves(costs.batch, options),
    }
    return [*_alone(changes, options, fits), *_memory_texts([ample_bytes, 2 * ample_bytes], options, fits)]


def constraint_remedies(costs: CostModel, options: PlanOptions, fits: Fits) -> list[str]:
    """Return what lets there be a plan where none obeys the options: other numbers, or options left out."""
    changes = _usual_changes(costs, options)
    if options.use_all:
        fewer = range(len(costs.devices) - 1, max(1, options.min_stages) - 1, -1)
        changes |= {"gpus": fewer[:MOST_TIMES], "batch": [costs.batch << step for step in range(1, MOST_DOUBLINGS)]}
    return _with_or_without(_alone(changes, options, fits), None, costs, options, fits)


def _fits(fits: Fits, options: PlanOptions, **changes: Any) -> bool:  # noqa: ANN401
    """Whether a plan fits with options so changed; none does where they contradict each other."""
    try:
        return fits(replace(options, **changes))
    except UsageError:
        return False


def _with_or_without(
    remedies: Sequence[str], sizes: Sequence[int] | None, costs: CostModel, options: PlanOptions, fits: Fits
) -> list[str]:
    """Return what helps with memory of the first of some sizes that does; without any, also what may be left out.

    Where neither helps, the schedule is changed or options are left out together with more memory.
    """
    if sizes is not None:
        return [*remedies, *_memory_texts(sizes, options, fits)]
    every = [*remedies, *(f"without {_names(each)}" for each in _left_out(options, fits))]
    return every or _memory_remedies(costs, options, fits)


def _names(names: Sequence[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)


def _options_text(**options: object) -> str:
    """Return options as errors advise them, with their values.

    >>> _options_text(shard="auto", gpus=8)
    "with `shard='auto', gpus=8`"
    """
    return f"with `{', '.join(f'{name}={value!r}' for name, value in options.items())}`"


def _gpus_text(count: int | None) -> list[str]:
    return [] if count is None else [_options_text(gpus=count)]


def _left_out(options: PlanOptions, fits: Fits) -> list[tuple[str, ...]]:
    """Return the options without which there is a plan: each that helps alone, else as few as are needed."""
    asked = [name for name in _LEFT_OUT if getattr(options, name) != getattr(_USUAL, name)]
    for count in range(1, len(asked) + 1):
        found = [names for names in combinations(asked, count) if _fits(fits, _reset_options(options, names))]
        if found:
            return found
    return []


def _reset_options(options: PlanOptions, names: Sequence[str]) -> PlanOptions:
    return replace(options, **{name: getattr(_USUAL, name) for name in names})


def _memory_remedies(costs: CostModel, options: PlanOptions, fits: Fits) -> list[str]:
    """Return what helps together with more memory, where nothing does without."""
    ample = replace(options, memory_bytes=UNLIMITED_BYTES)
    for schedule in _first(_schedules(options), "schedule", ample, fits):
        other = replace(options, schedule=schedule)
        return _memory_texts(_sizes(costs, other), other, fits, schedule=schedule)
    for names in _left_out(ample, fits)[:1]:
        other = _reset_options(options, names)
        texts = _memory_texts(_sizes(costs, other), other, fits)
        return [f"without {_names(names)} and {each}" for each in texts]
    return []


def _usual_changes(costs: CostModel, options: PlanOptions) -> Changes:
    """Return the options that may help by themselves, but for devices, batch and memory."""
    asked = options.micro_batches
    counts: list[int] = []
    if asked is not None:
        counts = [count for count in divisors(costs.batch) if count != asked]
        counts.sort(key=lambda count: (count < asked, abs(count - asked)))
    level = len(SHARDS) if options.shard == "auto" else SHARDS.index(options.shard) + 1
    most = min(costs.layer_count, len(costs.devices))
    return {
        "recompute": ["auto"] if options.recompute == "none" else [],
        "shard": SHARDS[level:],
        "micro_batches": counts,
        "schedule": _schedules(options),
        "chunks": range(2, options.chunks) if options.chunks is not None else [],
        "max_stages": range(options.max_stages + 1, most + 1) if options.max_stages is not None else [],
    }


def _schedules(options: PlanOptions) -> list[str]:
    """Return the schedule that may hold less; where stages or chunks are asked for, those of others are not."""
    if options.schedule == "gpipe":
        return ["1f1b"]
    planned = options.schedule in ("auto", *PLANNED)
    return [] if planned or options.chunks is not None or options.stages is not None else ["auto"]


def _device_remedies(costs: CostModel, options: PlanOptions, fits: Fits, *, alone: bool) -> list[str]:
    """Return with how many devices a plan fits; if ``alone``, also with recomputation and sharding at once."""
    names = [name for name in ("recompute", "shard") if alone and getattr(options, name) != "auto"]
    both = _reset_options(options, names)
    changes = dict.fromkeys(names, "auto")
    if changes and _fits(fits, both):
        return [_options_text(**changes)]
    if options.stages is not None:
        return []
    count = _devices(costs, options, fits)
    fewer = _devices(costs, both, fits) if changes else None
    found = [] if fewer is None or (count is not None and count <= fewer) else [_options_text(**changes, gpus=fewer)]
    return found + _gpus_text(count)


def _alone(changes: Changes, options: PlanOptions, fits: Fits) -> list[str]:
    """Return the options that help by themselves, each with its first value that does."""
    first = ((name, value) for name, values in changes.items() for value in _first(values, name, options, fits))
    return [_options_text(**{name: value}) for name, value in first]


def _first(values: Iterable[Any], name: str, options: PlanOptions, fits: Fits) -> list[Any]:
    """Return the first value of an option with which a plan fits, if there is one."""
    return [*islice((value for value in values if _fits(fits, options, **{name: value})), 1)]


def _devices(costs: CostModel, options: PlanOptions, fits: Fits) -> int | None:
    """Return the least number of devices with which a plan fits, none if that would be too many to try."""
    least = len(costs.devices)
    most = min(MOST_DEVICES, MOST_TIMES * least, costs.layer_count * costs.batch)
    while most > least and _states(costs, most) > MOST_STATES:
        most //= 2
    # Few devices are tried quickly, and are mostly enough.
    enough = min(most, 2 * least)
    while enough < most and not _fits(fits, options, gpus=enough):
        least, enough = enough, min(most, 2 * enough)
    if enough <= least or (enough == most and not _fits(fits, options, gpus=most)):
        return None
    fewer = range(enough - 1, least, -1)
    return enough - bisect_left(fewer, True, key=lambda count: not _fits(fits, options, gpus=count))


def _states(costs: CostModel, devices: int) -> int:
    more = -(-devices // len(costs.kind_of))
    return prod(more * costs.kind_of.count(kind) + 1 for kind in set(costs.kind_of))


def _halves(batch: int, options: PlanOptions) -> list[int]:
    count = options.micro_batches or 1
    return [batch >> step for step in range(1, batch.bit_length()) if (batch >> step) % count == 0]


def _sizes(costs: CostModel, options: PlanOptions, short: int | None = None) -> list[int]:
    """Return the least memory per device with which a plan may fit, near which ``short`` comes, and twice as much."""
    reserved = {costs.kinds[kind].reserved_bytes for kind in costs.kind_of}
    limits = set(costs.limits_bytes)
    if short is not None and len(limits) == len(reserved) == 1:
        needed = limits.pop() + reserved.pop() + short
    elif options.stages is None:
        # What chunks need in memory is not told beforehand, but near what `1f1b` does.
        schedule = options.schedule if options.schedule in PLANNED else "auto"
        ample = replace(options, memory_bytes=UNLIMITED_BYTES, schedule=schedule, chunks=None)
        model = CostModel(costs.profile, costs.cluster, ample)
        found = closest(model, families(model.batch, ample), ample)
        if found is None:
            return []
        needed = UNLIMITED_BYTES + found[0]
    else:
        # About: what the largest device of those that differ has, and all that the stage lacks that lacks most.
        needed = max(limits) + max(reserved) + (short or 0)
    return [needed, 2 * needed]


def _memory_texts(sizes: Iterable[int], options: PlanOptions, fits: Fits, **changes: object) -> list[str]:
    """Return the first of some sizes of memory with which a plan fits, beside ``changes`` that are made already."""
    typed = map(_size_option, sizes)
    texts = (text for text, bytes_ in typed if _fits(fits, options, memory_bytes=bytes_))
    return [_options_text(**changes, memory_bytes=text) for text in islice(texts, 1)]


def _size_option(count: int) -> tuple[str, int]:
    """Return bytes as they can be typed, rounded up by little, and how many bytes that is.

    >>> _size_option(300), _size_option(3 * 2**20 + 1), _size_option(20 * 2**30 + 1)
    (('300', 300), ('4MiB', 4194304), ('20481MiB', 21475885056))
    """
    if count < 2**20:
        return str(count), count
    mebibytes = ceil(count / 2**20)
    return f"{mebibytes}MiB", mebibytes * 2**20


MOST_STAGES = 8
"""That are written out in an error."""


def size(count: int) -> str:
    """Return bytes for people.

    >>> size(3 * 2**29), size(300)
    ('1.50 GiB', '300 B')
    """
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 2**power:
            return f"{count / 2**power:.2f} {unit}"
    return f"{count} B"


def explain(costs: CostModel, candidate: Candidate) -> str:
    """Return which stage of a candidate exceeds its memory, and by how much."""
    shorts = costs.shortfalls(candidate)
    index = max(range(len(shorts)), key=lambda at: (shorts[at], -at))
    stage = candidate.stages[index]
    names = costs.profile.layers[stage.first].name, costs.profile.layers[stage.stop - 1].name
    layers = f"layer {names[0]}" if names[0] == names[1] else f"layers {names[0]}..{names[1]}"
    limit = costs.limit_bytes(stage.devices)
    reserved = costs.kinds[costs.kind_of[stage.devices[0]]].reserved_bytes
    if limit == 0 < reserved:
        return f"stage {index} ({layers}) needs {size(shorts[index])} beside the {size(reserved)} of the process itself"
    return f"stage {index} ({layers}) needs {size(shorts[index])} more than {size(limit)} ({shorts[index]} bytes)"


def infeasible(
    costs: CostModel,
    families: Sequence[Family],
    options: PlanOptions,
    closest_plan: tuple[int, Candidate] | None,
    fits: Fits,
) -> InfeasibleError:
    """Return the error that names the stage, the least shortfall, and options with which a plan fits.

    All plans of the families count, none where stages are dictated, and the closest plan that was met already.
    """
    found = closest(costs, families, options)
    if found is None or (closest_plan is not None and closest_plan[0] <= found[0]):
        found = closest_plan
    if found is None:
        return InfeasibleError(f"{_unmet(costs, options)}; {advice(constraint_remedies(costs, options, fits))}")
    candidate = found[1]
    layer = oversized_layer(costs, families, options)
    large = "" if layer is None else f"layer {costs.profile.layers[layer].name} alone fits no device; "
    count = len(candidate.stages)
    stages = candidate.text() if count <= MOST_STAGES else f"{count} stages"
    how = f"{stages} with {candidate.schedule} and {candidate.micro_batches} micro-batches"
    return InfeasibleError(
        f"nothing fits the memory: {explain(costs, candidate)} even in the plan that comes closest ({how}); "
        f"{large}{advice(remedies(costs, options, fits, found[0]))}"
    )


def _unmet(costs: CostModel, options: PlanOptions) -> str:
    """Return why no plan obeys the options, whatever the memory."""
    devices = f"{len(costs.devices)} device{'s' if len(costs.devices) > 1 else ''}"
    if options.max_stages is not None or options.forbid_cut or options.pin:
        asked = "`max_stages`, `forbid_cut`, `pin` and `use_all` that were asked for"
        return f"no plan for {devices} obeys all of {asked}"
    if costs.single:
        return f"no plan uses all {devices}: {next(iter(costs.single.values())).reason}"
    if costs.share_limits:
        return f"no plan obeys what layers take at once: {costs.share_limits[0].text}"
    most = min(costs.layer_count, len(costs.devices))
    return (
        f"no plan uses all {devices}: {costs.layer_count} layers and a batch of {costs.batch} make at most {most} "
        "stages with a sample for every replica"
    )
