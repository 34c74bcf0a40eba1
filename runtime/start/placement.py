"""Placement: which rank of a plan each process becomes, by the node and the kind of the device that it has.

In come a plan, which says where its devices are and what they are, and what ranks say of theirs as they arrive, in
their launcher's order. Out comes one permutation: the ranks of a node are those of a host, and each has a device of its
kind. Where there is none, the plan is refused, with the line that plans for what is there.
"""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.hardware.gpus import is_known, known_as
from autopar.ranks.device import FoundDevice
from autopar.ranks.meeting import Arrival, node_of_each

_NOT_SAID = (
    "the plan is of an earlier autopar, and does not say where its devices are: ranks are as launched; plan again"
)
_NAMED = 3
"""Hosts that are named of those that are alike."""


class Placement(NamedTuple):
    """Where ranks are."""

    ranks: tuple[int, ...]
    """Which each process becomes, in the launcher's order."""
    notes: tuple[str, ...] = ()

    @property
    def is_as_launched(self) -> bool:
        """Whether all ranks stay what their launcher has made them."""
        return self.ranks == tuple(range(len(self.ranks)))


def match(planned: Sequence[tuple[int, str]], found: Sequence[tuple[int, str]]) -> tuple[int, ...] | None:
    """Return the rank that each process becomes; None where there is no such permutation.

    Ranks of a node are on one host, and no others are. Of hosts and devices that are alike, the first are taken, so
    that whoever is in order stays.

    >>> match([(0, "V100"), (0, "H100"), (1, "H100")], [(0, "H100"), (1, "H100"), (1, "V100")])
    (2, 1, 0)

    Args:
        planned: every rank's node and kind.
        found: every process's host and kind.
    """
    free, ranks = _members([host for host, _ in found]), [-1] * len(found)
    for own in _members([node for node, _ in planned]):
        wanted = Counter(planned[rank][1] for rank in own)
        host = next((each for each in free if Counter(found[process][1] for process in each) == wanted), None)
        if host is None:
            return None
        free.remove(host)
        for rank in own:
            process = next(each for each in host if found[each][1] == planned[rank][1])
            host.remove(process)
            ranks[process] = rank
    return None if free else tuple(ranks)


def _members(groups: Sequence[int]) -> list[list[int]]:
    """Return the members of every group, in the order of the first ones, given the group of each.

    >>> _members([5, 2, 5])
    [[0, 2], [1]]
    """
    found: dict[int, list[int]] = {}
    for member, group in enumerate(groups):
        found.setdefault(group, []).append(member)
    return list(found.values())


def place(plan: Plan, arrivals: Sequence[Arrival]) -> Placement:
    """Return where the plan's ranks are.

    CPUs of the planned names are taken where that is possible; else any are, which a note says.

    Raises:
        UsageError: there are no such devices; says which there are, and what to type.
    """
    hosts, devices, places = _hosts_of(arrivals), [each.device for each in arrivals], plan.places
    if not places:
        return Placement(tuple(range(len(arrivals))), (_NOT_SAID,) if len(set(hosts)) > 1 else ())
    for kind in (known_as, _kind_beside_cpus) if plan.device_type == "cpu" else (known_as,):
        planned = [(each.node, kind(each.type)) for each in places]
        ranks = match(planned, [(host, kind(each.name)) for host, each in zip(hosts, devices, strict=True)])
        if ranks is not None:
            return Placement(ranks, (*_moves_text(ranks, arrivals), *_other_processors(plan, ranks, devices)))
    there = f"{_planned_text(plan)}, and its ranks are on {_found_text(arrivals)}"
    raise UsageError(f"the plan is for {there}; {_remedy(plan, arrivals)}")


def _kind_beside_cpus(name: str) -> str:
    """Return a GPU's name in the table, or what all CPUs have in common.

    >>> _kind_beside_cpus("Tesla V100-SXM2-32GB"), _kind_beside_cpus("AMD EPYC 7B13")
    ('V100-SXM2-32G', 'cpu')
    """
    return known_as(name) if is_known(name) else "cpu"


def _hosts_of(arrivals: Sequence[Arrival]) -> list[int]:
    """Return every process's host, which its name alone does not tell."""
    return node_of_each([(each.host, each.local_rank) for each in arrivals])


def _by_host(arrivals: Sequence[Arrival]) -> list[list[Arrival]]:
    return [[arrivals[each] for each in own] for own in _members(_hosts_of(arrivals))]


def _moves_text(ranks: tuple[int, ...], arrivals: Sequence[Arrival]) -> list[str]:
    """Say which ranks are where, if that is not as launched."""
    if Placement(ranks).is_as_launched:
        return []
    hosts = _members(_hosts_of(arrivals))
    each = (f"{arrivals[own[0]].host} has {', '.join(str(ranks[process]) for process in own)}" for own in hosts)
    return [f"ranks are placed by the plan's nodes and kinds of devices, in the launcher's order: {'; '.join(each)}"]


def _other_processors(plan: Plan, ranks: Sequence[int], devices: Sequence[FoundDevice]) -> list[str]:
    """Say which CPUs are others than were planned for."""
    pairs = ((plan.places[rank].type, device.name) for rank, device in zip(ranks, devices, strict=True))
    others = (pair for pair in dict.fromkeys(pairs) if plan.device_type == "cpu" and pair[0] not in ("cpu", pair[1]))
    return [f"the plan is for {planned}, and ran on {name}: its times are of another CPU" for planned, name in others]


def _planned_text(plan: Plan) -> str:
    nodes = _members([each.node for each in plan.places])
    texts = Counter(_devices_text(plan.places[rank].type for rank in own) for own in nodes)
    return " and ".join(f"{count} node{'s' * (count > 1)} ({text}{_each(count)})" for text, count in texts.items())


def _found_text(arrivals: Sequence[Arrival]) -> str:
    alike: dict[str, list[str]] = defaultdict(list)
    for own in _by_host(arrivals):
        alike[_devices_text(_device_text(each.device) for each in own)].append(own[0].host)
    return " and ".join(f"{_names(hosts)} ({text}{_each(len(hosts))})" for text, hosts in alike.items())


def _each(count: int) -> str:
    return " each" if count > 1 else ""


def _device_text(device: FoundDevice) -> str:
    return device.name if device.type == "cpu" else f"{device.name} of {device.memory_bytes / 2**30:.0f} GiB"


def _devices_text(names: Iterable[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())


def _names(hosts: Sequence[str]) -> str:
    more = len(hosts) - _NAMED
    return ", ".join(hosts[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _remedy(plan: Plan, arrivals: Sequence[Arrival]) -> str:
    """Return the line that plans for what is there."""
    profile = "profile.json" if plan.profile is None else plan.profile.path
    hosts = [[each.device for each in own] for own in _by_host(arrivals)]
    cluster = _cluster_name(plan, hosts)
    if cluster is not None:
        return f"start it where those are, or plan for these: `autopar plan {profile} --cluster {cluster}`"
    if len(arrivals) == 1:
        # No link is to be measured.
        return f"start it where that is, or profile here: `autopar profile {plan.model.source} --batch {plan.batch}`"
    probe = "`autopar cluster probe`, started as these ranks are,"
    if len(hosts) == 1:
        probe = f"`autopar cluster probe --device {plan.device_type} --ranks {len(arrivals)}`"
    return f"start it where those are, or measure these: {probe} and `autopar plan {profile} --cluster cluster.json`"


def _cluster_name(plan: Plan, hosts: Sequence[Sequence[FoundDevice]]) -> str | None:
    """Return what `autopar plan` calls such hosts; None where their devices are not in its table, or unlike."""
    if any(len(set(own)) > 1 or not is_known(own[0].name) for own in hosts):
        return None
    runs = groupby((len(own), known_as(own[0].name)) for own in hosts)
    parts = ((len(list(same)), count, name) for (count, name), same in runs)
    named = "+".join(f"{f'{nodes}x' * (nodes > 1)}{count}x{name}" for nodes, count, name in parts)
    # That of the network between nodes, if there are several in both.
    several = len(hosts) > 1 and len({each.node for each in plan.places}) > 1
    return ":".join([named, *((plan.cluster_name or "").split(":")[1:2] if several else [])])


def check_launched(plan: Plan, arrivals: Sequence[Arrival]) -> Placement:
    """Return where the ranks of a user's own script are, which stay what their launcher has made them.

    Raises:
        UsageError: the plan has them elsewhere; says in which order to start hosts. Or as :func:`place`.
    """
    found = place(plan, arrivals)
    if found.is_as_launched:
        return found
    raise UsageError(
        "a script's ranks stay what their launcher makes them, and the plan has them on other devices: "
        f"{_order(found.ranks, arrivals)}"
    )


def _order(ranks: Sequence[int], arrivals: Sequence[Arrival]) -> str:
    """Return how to start a script's hosts so that ranks are as planned."""
    planned = [sorted(own, key=ranks.__getitem__) for own in _members(_hosts_of(arrivals))]
    planned.sort(key=lambda own: ranks[own[0]])
    if [ranks[process] for own in planned for process in own] != list(range(len(ranks))):
        return "ranks of its nodes take turns, as no launcher numbers them; `autopar worker` places ranks itself"
    said = []
    if planned != sorted(planned, key=min):
        said.append(f"start hosts in the order {', '.join(arrivals[own[0]].host for own in planned)}")
    for own in (each for each in planned if each != sorted(each)):
        order = ",".join(str(arrivals[process].local_rank) for process in own)
        said.append(f"set CUDA_VISIBLE_DEVICES={order} on {arrivals[own[0]].host}")
    return "; ".join(said)


def place_here(plan: Plan, devices: Sequence[FoundDevice]) -> Placement:
    """Return where the ranks of a plan are on this host, whose devices processes take in turn.

    Raises:
        UsageError: as :func:`place`.
    """
    count, host = len(plan.devices), platform.node()
    every = [devices[index % len(devices)] for index in range(count)]
    return place(plan, [Arrival(host, index, count, {}, {}, each) for index, each in enumerate(every)])
