"""Kinds: profiles of one model on several kinds of devices become one.

The first one's costs stay the profile's, those of the others become its ``others``. Model, precision, batch, layers,
tensors and tied parameters must be the same; where they are not, the error names the JSON path in both files. Of what a
profile has once, the worst is kept: the largest ``step_overhead_s`` and the widest spreads. A cluster's devices name
their kind by any of the names of ``autopar cluster list`` or as the profile does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from autopar.errors import FileError

if TYPE_CHECKING:
    from autopar.formats.profile import DeviceCosts, Profile


class NamedProfile(NamedTuple):
    """A profile, and what to call it."""

    name: str
    """Its file, or the option that asked for it."""
    profile: Profile


class _SharedValue(NamedTuple):
    """Something that all kinds of devices have in common."""

    at: str
    """JSON path."""
    value: object
    remedy: str


def join_profiles(origins: Sequence[NamedProfile]) -> Profile:
    """Return the first profile with the costs that the others found on their kinds of devices.

    A step has one ``step_overhead_s`` and a profile one ``noise``: the largest of all.

    Raises:
        FileError: they differ in more than their devices, or two are of the same kind; names the JSON path.
    """
    first = origins[0]
    facts = list(_facts(first.profile))
    for other in origins[1:]:
        for expected, found in zip(facts, _facts(other.profile), strict=False):
            if (expected.at, expected.value) != (found.at, found.value):
                raise FileError(
                    f"{other.name}: {expected.at} is {_text(found.value)}, and {_text(expected.value)} in "
                    f"{first.name}; {expected.remedy}"
                )
    _check_names(origins)
    profiles = [origin.profile for origin in origins]
    noises = [profile.noise for profile in profiles]
    spreads = {key: max(getattr(noise, key) for noise in noises) for key in ("median_spread", "max_spread")}
    return first.profile.model_copy(
        update={
            "others": tuple(chain(first.profile.others, *map(_kinds, profiles[1:]))),
            "noise": first.profile.noise.model_copy(update=spreads),
            "step_overhead_s": max(profile.step_overhead_s for profile in profiles),
            "indivisible": next((each.indivisible for each in profiles if each.indivisible), None),
            "notes": tuple(_notes(profiles)),
        }
    )


def _facts(profile: Profile) -> Iterator[_SharedValue]:
    """Yield what may not differ, in an order in which the first difference explains those behind it."""
    yield _SharedValue("$.model.sha256", profile.model.sha256, "profile the same model on every kind of device")
    yield _SharedValue("$.model.imports", profile.model.imports, "profile the same model on every kind of device")
    yield _SharedValue("$.model.sequence", profile.model.sequence, "profile with the same `sequence`")
    yield _SharedValue("$.device.type", profile.device.type, "the ranks of a pipeline are all CPUs or all GPUs")
    yield _SharedValue("$.precision", profile.precision, "profile with the same `precision`")
    yield _SharedValue("$.batch", profile.batch, "profile with the same `batch`")
    yield _SharedValue("$.compiled", profile.compiled, "profile with `compile` everywhere or nowhere")
    if profile.device.type == "cpu":
        yield _SharedValue("$.device.threads", profile.device.threads, "profile with the same `threads`")
    again = "profile the same model with the same versions of autopar and torch"
    yield _SharedValue("$.ignored_state", profile.ignored_state, again)
    yield _SharedValue("$.counts_labels", profile.counts_labels, again)
    yield _SharedValue("$.updates_at_once", profile.updates_at_once, again)
    yield _SharedValue("the length of $.layers", len(profile.layers), again)
    for index, layer in enumerate(profile.layers):
        for key in ("name", "modules", "parameters_bytes", "trainable_bytes", "gradient_bytes", "optimizer_bytes"):
            yield _SharedValue(f"$.layers[{index}].{key}", getattr(layer, key), again)
    for key in ("tensors", "tied"):
        records = getattr(profile, key)
        yield _SharedValue(f"the length of $.{key}", len(records), again)
        for index, record in enumerate(records):
            for name, value in record:
                yield _SharedValue(f"$.{key}[{index}].{name}", value, again)


def _check_names(origins: Sequence[NamedProfile]) -> None:
    from autopar.hardware.gpus import known_as

    seen: dict[str, str] = {}
    for origin in origins:
        profile = origin.profile
        paths = ["$.device.name", *(f"$.others[{index}].device.name" for index in range(len(profile.others)))]
        for path, device in zip(paths, (profile.device, *(other.device for other in profile.others)), strict=True):
            name = known_as(device.name)
            if name in seen:
                raise FileError(
                    f"{origin.name}: {path} is {_text(device.name)}, which {seen[name]} has costs for; "
                    "name every kind of device once"
                )
            seen[name] = origin.name


def _kinds(profile: Profile) -> tuple[DeviceCosts, ...]:
    from autopar.formats.profile import DeviceCosts

    return (DeviceCosts(device=profile.device, layers=profile.layers), *profile.others)


def _notes(profiles: Sequence[Profile]) -> Iterator[str]:
    """Yield the first profile's notes, and of the others what they do not say alike."""
    yield from profiles[0].notes
    for profile in profiles[1:]:
        for note in profile.notes:
            if note not in profiles[0].notes:
                yield note if profile.device.name in note else f"{profile.device.name}: {note}"


def _text(value: object) -> str:
    return json.dumps(value, default=str)[:80]
