"""Placement: the devices of a cluster in groups, within which and among which it is all one which are taken first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autopar.planner.costs.model import CostModel
from autopar.planner.costs.sharing import Sharing
from autopar.planner.placement.pool import Pool
from autopar.planner.placement.reserve import Group

_MOST_WORK = 100_000
"""Moves x layers squared: tables of so many entries take a fraction of a second."""
_MOST_WORK_WHEN_EXACT = 2_000_000
_MOST_MOVES = 50_000
"""Found in a fraction of a second."""


def pool_of(costs: CostModel, *, exact: bool, use_all: bool) -> Pool:
    """Return a cost model's devices as a pool; ``exact`` goes through more placements."""
    most = (_MOST_WORK_WHEN_EXACT if exact else _MOST_WORK) // costs.layer_count**2
    return Pool(groups_of(costs), min(most, _MOST_MOVES), idle=not use_all)


def groups_of(costs: CostModel) -> dict[int, list[Group]]:
    """Return the devices of every kind by node and memory, in cluster order.

    Groups next to each other are alike where they are whole nodes of one rack, with as many devices of the same memory,
    that share their ports with the same others.
    """
    topology, ports = costs.sharing.topology, _ports(costs.sharing)
    members: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for device, kind in enumerate(costs.kind_of):
        members[kind, topology.nodes[device], costs.limits_bytes[device]].append(device)
    found: dict[int, list[Group]] = defaultdict(list)
    before: dict[int, object] = {}
    for (kind, node, limit), devices in members.items():
        own = found[kind]
        looks = None
        if len(devices) == topology.nodes.count(node):
            looks = limit, len(devices), topology.racks[devices[0]], _looks(devices, ports)
        same = looks is not None and before.get(kind) == looks
        own.append(Group(tuple(devices), own[-1].alike if same else len(own)))
        before[kind] = looks
    return dict(found)


def _ports(sharing: Sharing) -> list[tuple[tuple[int, ...], ...]]:
    """Return the devices that every device shares each of its ports with."""
    found: list[list[tuple[int, ...]]] = [[] for _ in sharing.topology.nodes]
    for level, links in sharing.links.items():
        for link in links:
            users: dict[tuple[int, int], list[int]] = defaultdict(list)
            for device, place in enumerate(sharing.places[level]):
                users[sharing.topology.unit(device, level), place // link.shared_by].append(device)
            for sharers in users.values():
                for device in sharers:
                    found[device].append(tuple(sharers))
    return [tuple(each) for each in found]


def _looks(devices: Sequence[int], ports: Sequence[tuple[tuple[int, ...], ...]]) -> tuple[object, ...]:
    """Return who shares a node's ports: its own devices by place, so that nodes with ports of their own look alike."""
    return tuple(
        tuple(devices.index(user) for user in users) if set(users) <= set(devices) else users
        for device in devices
        for users in ports[device]
    )
