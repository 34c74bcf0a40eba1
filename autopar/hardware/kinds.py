"""Kinds of devices: profiles of one model on several become one; which has the times of each type of a cluster's.

The first one's costs stay the profile's, those of the others become its ``others``. Model, precision, batch, layers,
tensors and tied parameters must be the same; where they are not, the error names the JSON path in both files. Of what a
profile has once, the worst is kept: the largest ``step_overhead_s`` and the widest spreads. A cluster's devices name
their kind by any of the names of ``autopar cluster list`` or as the profile does. Where no cluster was measured, there
is an estimated one to plan for.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import NamedTuple, get_args

from autopar.errors import FileError, UsageError
from autopar.formats.cluster import Cluster, Device, Link
from autopar.formats.plan import NodeDevices
from autopar.formats.profile import DeviceCosts, DeviceKind, DeviceType, Profile, Tensor, TiedParameter, is_model
from autopar.hardware.gpus import is_known, known_as


class NamedProfile(NamedTuple):
    """A profile, and what to call it."""

    name: str
    """Its file, or the option that asked for it."""
    profile: Profile


_MODEL = "profile the same model on every kind of device"
_AGAIN = "profile the same model with the same versions of autopar and torch"
_SHARED = {
    "model.sha256": _MODEL,
    "model.imports": _MODEL,
    "model.joins": _AGAIN,
    "model.sequence": "profile with the same `sequence`",
    "device.type": "the ranks of a pipeline are all CPUs or all GPUs",
    "precision": "profile with the same `precision`",
    "batch": "profile with the same `batch`",
    "compiled": "profile with `compile` everywhere or nowhere",
    "device.threads": "profile with the same `threads`",
    "ignored_state": _AGAIN,
    "counts_labels": _AGAIN,
    "updates_at_once": _AGAIN,
}
"""What all kinds of devices have in common, and what helps where they differ."""


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
            if expected != found:
                (at, value, remedy), (_, other_value, _) = expected, found
                own = f"{at} is {_text(other_value)}, and {_text(value)} in {first.name}"
                raise FileError(f"{other.name}: {own}; {remedy}")
    _check_names(origins)
    profiles = [origin.profile for origin in origins]
    noises = [profile.noise for profile in profiles]
    spreads = {key: max(getattr(noise, key) for noise in noises) for key in ("median_spread", "max_spread")}
    return first.profile.model_copy(
        update={
            "others": tuple(chain(first.profile.others, *(profile.kinds for profile in profiles[1:]))),
            "noise": first.profile.noise.model_copy(update=spreads),
            "step_overhead_s": max(profile.step_overhead_s for profile in profiles),
            "indivisible": next((each.indivisible for each in profiles if each.indivisible), None),
            "notes": tuple(_notes(profiles)),
        }
    )


def _facts(profile: Profile) -> Iterator[tuple[str, object, str]]:
    """Yield where what may not differ is, what it is, and a remedy; the first difference explains those behind it."""
    for at, remedy in _SHARED.items():
        if at != "device.threads" or profile.device.type == "cpu":
            yield f"$.{at}", attrgetter(at)(profile), remedy
    sizes = ("name", "modules", "parameters_bytes", "trainable_bytes", "gradient_bytes", "optimizer_bytes")
    for key, names in (("layers", sizes), ("tensors", Tensor.model_fields), ("tied", TiedParameter.model_fields)):
        records = getattr(profile, key)
        yield f"the length of $.{key}", len(records), _AGAIN
        for index, record in enumerate(records):
            for name in names:
                yield f"$.{key}[{index}].{name}", getattr(record, name), _AGAIN


def _check_names(origins: Sequence[NamedProfile]) -> None:
    seen: dict[str, str] = {}
    for origin in origins:
        profile = origin.profile
        paths = ["$.device.name", *(f"$.others[{index}].device.name" for index in range(len(profile.others)))]
        for path, kind in zip(paths, profile.kinds, strict=True):
            name = known_as(kind.device.name)
            if name in seen:
                raise FileError(
                    f"{origin.name}: {path} is {_text(kind.device.name)}, which {seen[name]} has costs for; "
                    "name every kind of device once"
                )
            seen[name] = origin.name


def _notes(profiles: Sequence[Profile]) -> Iterator[str]:
    """Yield the first profile's notes, and of the others what they do not say alike."""
    yield from profiles[0].notes
    for profile in profiles[1:]:
        for note in profile.notes:
            if note not in profiles[0].notes:
                yield note if profile.device.name in note else f"{profile.device.name}: {note}"


def _text(value: object) -> str:
    return json.dumps(value, default=str)[:80]


class Kinds(NamedTuple):
    """The kinds of devices that are planned for."""

    costs: tuple[DeviceCosts, ...]
    """The profile's kinds; behind them those for which another one stands, if both are in the cluster."""
    of_type: dict[str, int]
    """By the cluster's types, the index of their kind."""
    names: dict[str, str]
    """By the cluster's types, what such a device is called: as its kind, or, where another kind's times stand for it or
    are taken, by its own name if that says more."""
    stands: str | None
    """The name of the kind that stands for others; none where none does."""
    notes: tuple[str, ...]


def kinds_of(profile: Profile, devices: Sequence[Device], times_of: str | None) -> Kinds:
    """Return the kinds of some devices; with ``times_of``, that one stands for those that the profile has none of.

    A type is a kind of the profile by its name, or is the type of a single one. Names that no table knows may be
    anything: where the cluster has no other type and the profile no other kind, it is taken for that.

    Raises:
        UsageError: the profile has no times of a type, or no kind is called ``times_of``.
        FileError: a type that no table knows is beside others, or may be any of several kinds.
    """
    kinds = [each.device for each in profile.kinds]
    types = dict.fromkeys(device.type for device in devices)
    own = {name: _own(kinds, name) for name in types}
    known = {name: index for name, index in own.items() if index is not None}
    missing = [name for name in types if name not in known]
    if times_of is not None and missing:
        return _substitute_kinds(profile, known, missing, times_of)
    names_of = {name: kinds[index].name for name, index in known.items()}
    if not missing:
        return Kinds(profile.kinds, known, names_of, None, ())
    if not known:
        _refuse_known(profile, missing)
    if len(types) > 1 or len(kinds) > 1:
        raise _missing_costs_error(kinds, devices, missing[0])
    names = ", ".join(types)
    note = f"the profile is of {kinds[0].name}, but the cluster has {names}: times are {kinds[0].name}'s"
    own_name = missing[0] if is_known(missing[0]) else kinds[0].name
    return Kinds(profile.kinds, {missing[0]: 0}, {missing[0]: own_name}, None, (note,))


def planned_nodes(profile: Profile, devices: Sequence[Device], times_of: str | None) -> tuple[NodeDevices, ...]:
    """Return what a plan says of the devices that it is for: those together that are alike and follow each other."""
    names = kinds_of(profile, devices, times_of).names
    places = ((device.node, names[device.type], device.memory_bytes) for device in devices)
    return tuple(
        NodeDevices(node=node, type=name, memory_bytes=memory_bytes, count=len(list(same)))
        for (node, name, memory_bytes), same in groupby(places)
    )


def check_times_of(profile: Profile, cluster: Cluster, times_of: str | None, gpus: int | None = None) -> None:
    """Refuse a kind whose times need not stand for any other, on so many devices of the cluster.

    Raises:
        UsageError: no kind is called so, or the profile has times of the whole cluster.
    """
    if times_of is None:
        return
    kinds = [each.device for each in profile.kinds]
    _kind_index(kinds, times_of)
    types = dict.fromkeys(device.type for device in cluster.devices[:gpus])
    if None not in [_own(kinds, name) for name in types]:
        raise UsageError(
            f"`times_of={times_of!r}`: the profile has times of all devices to plan for ({', '.join(types)}); "
            "leave it out"
        )


def _own(kinds: Sequence[DeviceKind], name: str, spell: Callable[[str], str] = str) -> int | None:
    """Return the kind that a type is, by its name, or since it is the only one of the type."""
    names = [spell(known_as(kind.name)) for kind in kinds]
    if spell(known_as(name)) in names:
        return names.index(spell(known_as(name)))
    alike = [index for index, kind in enumerate(kinds) if kind.type == spell(name)]
    return alike[0] if len(alike) == 1 else None


def _kind_index(kinds: Sequence[DeviceKind], times_of: str) -> int:
    """Return the kind of a name, or the only one of a type, however it is spelled.

    Raises:
        UsageError: there is none, or there are several.
    """
    index = _own(kinds, times_of, str.casefold)
    if index is not None:
        return index
    names = " and ".join(_kind_text(kinds, index) for index in range(len(kinds)))
    raise UsageError(f"`times_of={times_of!r}`: the profile has times of {names} only; name one of them")


def _kind_text(kinds: Sequence[DeviceKind], index: int) -> str:
    """Return a kind as ``--times-of`` takes it: a GPU by its known name, others by their type if that is enough."""
    kind = kinds[index]
    if kind.type == "cuda" and is_known(kind.name):
        return known_as(kind.name)
    is_unique = sum(each.type == kind.type for each in kinds) == 1
    return kind.type if is_unique else shlex.quote(kind.name)


def _substitute_kinds(profile: Profile, known_kinds: dict[str, int], missing: Sequence[str], times_of: str) -> Kinds:
    """Return kinds of which one stands for those that are missing: in its own place, unless that is taken."""
    costs = list(profile.kinds)
    index = _kind_index([each.device for each in costs], times_of)
    of_type = dict(known_kinds)
    # However the cluster lists them, so that kinds have the same numbers.
    for name in sorted(missing):
        same = [of_type[other] for other in missing if other in of_type and known_as(other) == known_as(name)]
        if same or index not in of_type.values():
            of_type[name] = same[0] if same else index
            continue
        of_type[name] = len(costs)
        device = costs[index].device.model_copy(update={"name": name})
        costs.append(costs[index].model_copy(update={"device": device}))
    stands = costs[index].device.name
    note = f"times of {stands} stand for {', '.join(missing)}, as asked (`times_of`)"
    names = {name: costs[at].device.name for name, at in known_kinds.items()}
    own = {name: stands if name in get_args(DeviceType) else name for name in missing}
    return Kinds(tuple(costs), of_type, names | own, stands, (note,))


def _refuse_known(profile: Profile, types: Sequence[str]) -> None:
    """Refuse a cluster whose types are all known to be other kinds than the profile's.

    Raises:
        UsageError: names them, and what would do instead.
    """
    kinds = [each.device for each in profile.kinds]
    if not all(_differ(kind, name) for kind in kinds for name in types):
        return
    wanted = list(dict.fromkeys(known_as(name) for name in types))
    # All ranks of a pipeline are CPUs, or all are GPUs.
    profiled = is_model(profile.model.source) and (len(wanted) == 1 or all(map(is_known, wanted)))
    measured = f"profile with `device={','.join(wanted)!r}`, or " if profiled else ""
    names = " and ".join(known_as(kind.name) for kind in kinds)
    raise UsageError(
        f"the cluster has {' and '.join(wanted)}, and the profile has times of {names} only: {measured}plan with "
        f"`times_of={_kind_text(kinds, 0)!r}` if its times are to stand for those of {' and '.join(wanted)}"
    )


def _differ(kind: DeviceKind, name: str) -> bool:
    """Whether a type is known to be another kind: a GPU or CPU, and another GPU or CPU."""
    measured = kind.name if is_known(kind.name) else kind.type
    known = [known_as(each) if is_known(each) else each for each in (measured, name)]
    return all(is_known(each) or each == "cpu" for each in known) and known[0] != known[1]


def _missing_costs_error(kinds: Sequence[DeviceKind], devices: Sequence[Device], name: str) -> FileError:
    index = next(at for at, device in enumerate(devices) if device.type == name)
    known = ", ".join(kind.name for kind in kinds)
    if any(kind.type == name for kind in kinds):
        return FileError(
            f"$.devices[{index}].type: {name!r} may be any of {known}, which the profile has costs for; "
            "write there which it is"
        )
    return FileError(
        f"$.devices[{index}].type: the profile has no costs for {name!r}, only for {known}; estimate "
        "them with `autopar profile --device`, which takes several kinds, or measure them there and join the "
        f"profiles with `autopar import profiles`, or plan with `times_of={_kind_text(kinds, 0)!r}` to let its times "
        "stand for them"
    )


# Round numbers of ordinary machines: loopback between two processes, PCIe between two accelerators.
_LINKS = {"cpu": (1e-4, 1e9), "cuda": (2e-5, 12e9)}


def estimated_cluster(profile: Profile, devices: int) -> Cluster:
    """Return a node with devices like the profile's, its link a guess that the plan's notes mention."""
    kind = profile.device.type
    name = profile.device.name if profile.others else kind
    latency_s, bytes_per_s = _LINKS.get(kind, _LINKS["cpu"])
    return Cluster(
        name="estimated",
        backend="nccl" if kind == "cuda" else "gloo",
        devices=(Device(type=name, memory_bytes=profile.device.memory_bytes),) * devices,
        links=(Link(level="node", latency_s=latency_s, bytes_per_s=bytes_per_s),),
        notes=("no measured cluster was given: its links are estimated; `autopar profile` writes cluster.json",),
    )
