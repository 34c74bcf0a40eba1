"""Cluster as tables: devices, links, and the curves that were measured over them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.markup import escape

from autopar.report.quantity import bandwidth, duration, size
from autopar.report.table import new_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from autopar.formats.cluster import Cluster

__all__ = ["render"]


def render(cluster: Cluster, console: Console) -> None:
    """Print a cluster's devices, links and curves."""
    title = f"cluster {cluster.name}: {len(cluster.devices)} devices, backend {cluster.backend}"
    console.print(title, highlight=False, markup=False)
    console.print(_devices(cluster))
    console.print(_links(cluster))
    if cluster.curves:
        console.print(_curves(cluster))
    for note in cluster.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def _devices(cluster: Cluster) -> Table:
    table = new_table("Devices", (">node", ">devices", "type", ">memory each", ">price per hour"), folded="type")
    kinds = Counter((each.node, each.type, each.memory_bytes, each.price_per_hour) for each in cluster.devices)
    for (node, kind, memory, price), count in kinds.items():
        table.add_row(str(node), str(count), escape(kind), size(memory), "" if price is None else f"{price:g}")
    return table


def _links(cluster: Cluster) -> Table:
    table = new_table("Links", ("level", ">latency", ">bandwidth", "duplex", ">shared by", "known"))
    for link in cluster.links:
        numbers = (duration(link.latency_s), bandwidth(link.bytes_per_s))
        table.add_row(link.level, *numbers, link.duplex, str(link.shared_by), link.provenance)
    return table


def _curves(cluster: Cluster) -> Table:
    table = new_table("Curves", ("operation", ">ranks", "level", ">from", ">to", "known"))
    for curve in cluster.curves:
        ends = [f"{size(curve.sizes[at])} in {duration(curve.seconds[at])}" for at in (0, -1)]
        table.add_row(curve.kind.replace("_", "-"), str(curve.ranks), curve.level, *ends, curve.provenance)
    return table
