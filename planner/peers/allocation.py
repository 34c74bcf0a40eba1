"""Allocation: the ways in which HetPipe deals devices to virtual workers.

Park et al., "HetPipe: Enabling Large DNN Training on (Whimpy) Heterogeneous GPU Clusters through Integration of
Pipelined Model Parallelism and Data Parallelism", USENIX ATC 2020. A virtual worker is a pipeline with one device a
stage;

- NP, node partition: every node is a virtual worker;
- ED, equal distribution: every virtual worker has as many devices of every node;
- HD, hybrid distribution: nodes are paired, the quickest with the slowest, and each pair is distributed equally to two
  virtual workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd
from typing import Literal, NamedTuple

from autopar.planner.candidate import divisors

Policy = Literal["NP", "ED", "HD"]
Devices = tuple[int, ...]


class Allocation(NamedTuple):
    """The devices of every virtual worker."""

    policy: Policy
    workers: tuple[Devices, ...]


def allocations(nodes: Sequence[Sequence[Devices]], alone_s: Sequence[float]) -> list[Allocation]:
    """Return every allocation that uses all devices, the first of those that are alike.

    The papers' cluster has four nodes of four devices and four virtual workers; here ED has every number of them that
    divides the devices of all nodes.

    Args:
        nodes: of every node, its devices by kind.
        alone_s: of every device, the seconds of a micro-batch of the whole model on it.

    >>> for each in allocations([[(0, 1)], [(2, 3)]], [1.0, 1.0, 2.0, 2.0]):
    ...     print(each.policy, *each.workers)
    NP (0, 1) (2, 3)
    ED (0, 1, 2, 3)
    ED (0, 2) (1, 3)
    """
    found = [Allocation("NP", tuple(tuple(sorted(_all(node))) for node in nodes))]
    groups = [group for node in nodes for group in node]
    found += [Allocation("ED", _dealt(groups, count)) for count in divisors(gcd(*map(len, groups)))]
    order = sorted(range(len(nodes)), key=lambda at: (-sum(1 / max(alone_s[d], 1e-300) for d in _all(nodes[at])), at))
    pairs = [(*nodes[order[at]], *nodes[order[-1 - at]]) for at in range(len(nodes) // 2)]
    if len(nodes) % 2 == 0 and all(len(group) % 2 == 0 for group in groups):
        found.append(Allocation("HD", tuple(worker for pair in pairs for worker in _dealt(pair, 2))))
    first: dict[frozenset[Devices], Allocation] = {}
    for each in found:
        first.setdefault(frozenset(each.workers), each)
    return list(first.values())


def _all(node: Iterable[Devices]) -> list[int]:
    return [device for group in node for device in group]


def _dealt(groups: Sequence[Devices], count: int) -> tuple[Devices, ...]:
    """Return ``count`` workers with as many consecutive devices of every group."""
    return tuple(
        tuple(sorted(_all(group[len(group) * at // count : len(group) * (at + 1) // count] for group in groups)))
        for at in range(count)
    )
