"""Order: in which order planning numbers devices, so that no listing of the same cluster changes a plan.

A plan's file counts devices as the cluster lists them (:attr:`CostModel.listed`); within planning they stand rack by
rack and node by node, the fastest first.
"""

from __future__ import annotations

from itertools import islice, permutations

from autopar.planner.candidate import Candidate
from autopar.planner.costs.model import CostModel

Rank = tuple[float, int, float, str]
"""What tells a device from others: less of the faster ones, and of as fast ones of the larger ones."""


def canonical(costs: CostModel) -> CostModel:
    """Return a cost model whose devices are numbered as planning goes by them; those alike stand as they are listed."""
    nodes, racks = costs.links.topology.nodes, costs.links.topology.racks
    ranks = [_rank(costs, device) for device in range(len(nodes))]
    own = {each: sorted(rank for rank, node in zip(ranks, nodes, strict=True) if node == each) for each in set(nodes)}
    looks = {node: (every[0], -len(every), every) for node, every in own.items()}
    within = {each: {node for node, rack in zip(nodes, racks, strict=True) if rack == each} for each in set(racks)}
    by_node = sorted(own, key=lambda node: (looks[node], nodes.index(node)))
    by_rack = sorted(within, key=lambda rack: (sorted(looks[node] for node in within[rack]), racks.index(rack)))
    order = sorted(
        range(len(nodes)),
        key=lambda device: (by_rack.index(racks[device]), by_node.index(nodes[device]), ranks[device], device),
    )
    return costs if order == list(range(len(nodes))) else costs.among(order)


def _rank(costs: CostModel, device: int) -> Rank:
    own, kind = costs.devices[device], costs.kind_of[device]
    return whole_s(costs, kind), -costs.limits_bytes[device], own.price_per_hour or 0.0, own.type


def whole_s(costs: CostModel, kind: int) -> float:
    """Return the seconds of all layers on one kind of device, or in another form."""
    return sum(each[-1] for each in costs.seconds.running(float(costs.batch), 1.0, kind))


def as_listed(costs: CostModel) -> list[int]:
    """Return all devices in the order in which the cluster lists them."""
    return sorted(range(len(costs.devices)), key=costs.listed.__getitem__)


def numbered(costs: CostModel, candidate: Candidate) -> Candidate:
    """Return a plan's candidate with the numbers that devices have here, in place of where the cluster lists them."""
    number = {listed: device for device, listed in enumerate(costs.listed)}
    stages = (stage._replace(devices=tuple(map(number.__getitem__, stage.devices))) for stage in candidate.stages)
    return candidate._replace(stages=tuple(stages))


MOST_ORDERS = 6
"""Of kinds of devices that are tried."""


def orders_by_kind(costs: CostModel) -> list[tuple[int, ...]]:
    """Return the orders in which stages take devices: the cluster's, and kind by kind, each kind in its own order.

    Of four devices, A, B, A and B, these are 0123, 0213 and 1302.
    """
    kinds = islice(permutations(sorted(set(costs.kind_of))), MOST_ORDERS)
    by_kind = (tuple(device for kind in order for device in costs.devices_of(kind)) for order in kinds)
    return list(dict.fromkeys([tuple(range(len(costs.devices))), *by_kind]))
