"""Collectives: how long NCCL's operations take over links that are not at hand.

The shape is that of NCCL's own tuner (``src/graph/tuning.cc``; its constants are also in torch 2.13's
``_inductor/comm_analysis.py``): a latency for every step of a ring or tree, and bytes over the bus bandwidth. Alone it
is 61 % short at 1 MiB and 23 % short at 16 MiB of what eight A100 were measured to take. What it lacks are the terms
of :func:`_in_node_s`: a start, below which nothing is; the filling of the pipeline; and the bandwidth that rings of
few ranks leave unused. The four constants of these were fitted to the all-reduce curves of 2 to 8 A100 that
VIA-Research/vTrain published; over them the mean error is 2.2 %, the largest 16.5 %, from 1 MiB to 1 GiB.
Sizes below 1 MiB, the other operations and other GPUs were not measured: the same terms are assumed there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from autopar.formats.cluster import CurveKind
from autopar.hardware.topology import Place

# Fitted, see above. A collective takes no less than _FLOOR_S, however small it is.
_START_S = 31e-6
_FLOOR_S, _FLOOR_PER_RANK_S = 44e-6, 5.5e-6
_FEW_RANKS = 0.45
# NCCL's seconds per step of a ring: over NVLink (protocol LL128), over PCIe (Simple, as LL128 is for NVLink alone).
_STEP_S = {"nvlink": 1.9e-6, "pcie": 5.7e-6}


class _Protocol(NamedTuple):
    """NCCL's constants for one way to go from node to node."""

    algorithm: Literal["ring", "tree"]
    step_s: float
    share: float
    """Of the bus bandwidth."""
    most_bytes_per_s: float


# Between nodes NCCL uses Simple for large messages and LL for small ones, whose rate differs for two nodes and more.
_SIMPLE = (_Protocol("ring", 14e-6, 1.0, math.inf), _Protocol("tree", 14e-6, 0.92, math.inf))
_LL_TWO_NODES_BYTES_PER_S, _LL_BYTES_PER_S = 39e9, 20.4e9
# What two nodes reach of their network's rate in torch's calibration (H100, RoCE); more nodes were seen to reach more.
NETWORK_SHARE = 0.8
"""Of the network's rate, what is reached."""


@dataclass(frozen=True)
class NodeLinks:
    """What connects the devices of a node, and the nodes."""

    kind: Literal["nvlink", "pcie"]
    bus_bytes_per_s: float
    """Bus bandwidth of a large collective in a node."""
    peer_bytes_per_s: float
    """What one device sends to one other of its node."""
    devices: int
    """Per node; whoever shares its network is assumed to send at the same time."""
    network_bytes_per_s: float = 0.0
    """Of a node, in one direction; 0 where there is one node."""
    network_latency_s: float = 0.0
    """Of every step from node to node, beyond NCCL's own constants."""


def bus_bandwidth_factor(kind: CurveKind, ranks: int) -> float:
    """Return how many times the whole vector crosses a rank's link, nccl-tests' factor from algbw to busbw.

    >>> bus_bandwidth_factor("all_reduce", 4), bus_bandwidth_factor("all_gather", 4), bus_bandwidth_factor("p2p", 2)
    (1.5, 0.75, 1.0)
    """
    if kind == "p2p":
        return 1.0
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks


def collective_s(kind: CurveKind, size_bytes: int, place: Place, links: NodeLinks) -> float:
    """Return the seconds of an operation; ``size_bytes`` is that of the whole vector, as in nccl-tests.

    A point-to-point message goes to another node if the ranks are on several, else to another device of the node. Of
    nodes that are filled unlike, the one with fewest ranks has the fewest ways out, and the one with most most steps.

    >>> links = NodeLinks("nvlink", bus_bytes_per_s=229e9, peer_bytes_per_s=229e9, devices=8)
    >>> round(collective_s("all_reduce", 2**30, Place.even(nodes=1, per_node=8), links) * 1e3, 1)
    8.5
    """
    if kind == "p2p":
        rate = links.peer_bytes_per_s if place.nodes == 1 else _network_bytes_per_s(1, links)
        return message_latency_s(place.nodes, links) + size_bytes / rate
    beyond_start_s = _in_node_s if place.nodes == 1 else _across_nodes_s
    floor_s = _FLOOR_S + _FLOOR_PER_RANK_S * (place.most - 1)
    return max(floor_s, _START_S + beyond_start_s(kind, size_bytes, place, links))


def message_latency_s(nodes: int, links: NodeLinks) -> float:
    """Return the seconds of an empty message in a node, or between two."""
    if nodes == 1:
        return _START_S + _STEP_S[links.kind]
    return _START_S + _SIMPLE[0].step_s + links.network_latency_s


def _in_node_s(kind: CurveKind, size_bytes: int, place: Place, links: NodeLinks) -> float:
    """Return the seconds of a ring in a node beyond its start.

    Filling a pipeline whose pieces have the best length costs 2 sqrt(step x bytes / rate) beyond latency and
    transfer; rings of few ranks reach less of the rate.
    """
    step_s, rate = _STEP_S[links.kind], links.bus_bytes_per_s
    transfer = bus_bandwidth_factor(kind, place.ranks) * size_bytes / rate * (1 + _FEW_RANKS / place.ranks**2)
    return _steps(kind, place.ranks) * step_s + transfer + 2 * math.sqrt(step_s * size_bytes / rate)


def _across_nodes_s(kind: CurveKind, size_bytes: int, place: Place, links: NodeLinks) -> float:
    """Return the seconds over several nodes beyond the start, of the quickest of NCCL's algorithms and protocols."""
    rate = _network_bytes_per_s(place.fewest, links)
    if place.fewest > 1:
        rate = min(rate, links.bus_bytes_per_s)
    most = _LL_TWO_NODES_BYTES_PER_S if place.nodes == 2 else _LL_BYTES_PER_S
    protocols = (*_SIMPLE, _Protocol("ring", 2.7e-6, 0.5, most), _Protocol("tree", 5e-6, 1 / 3.8, most))
    # A tree sends the whole vector up and down.
    moves = {"ring": bus_bandwidth_factor(kind, place.ranks), "tree": 2.0}
    return min(
        _latency_s(kind, place, each, links)
        + moves[each.algorithm] * size_bytes / min(rate * each.share, each.most_bytes_per_s)
        + 2 * math.sqrt(each.step_s * size_bytes / rate)
        for each in protocols
        if each.algorithm == "ring" or kind == "all_reduce"
    )


def _latency_s(kind: CurveKind, place: Place, protocol: _Protocol, links: NodeLinks) -> float:
    step_s, inside_s = protocol.step_s + links.network_latency_s, _STEP_S[links.kind]
    if protocol.algorithm == "ring":
        across = _steps(kind, place.nodes)
        return across * step_s + (_steps(kind, place.ranks) - across) * inside_s
    return 2 * (math.ceil(math.log2(place.nodes)) * step_s + (place.most - 1) * inside_s)


def _steps(kind: CurveKind, ranks: int) -> int:
    return (2 if kind == "all_reduce" else 1) * (ranks - 1)


def _network_bytes_per_s(per_node: int, links: NodeLinks) -> float:
    return links.network_bytes_per_s * NETWORK_SHARE * per_node / links.devices
