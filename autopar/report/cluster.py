"""Tables of clusters (devices, links, curves) and of known GPUs, with the sources of their numbers.

Bandwidths are those of nccl-tests: ``algbw`` is bytes over seconds, ``busbw`` what of it crosses a rank's link.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from autopar.hardware.collectives import bus_bandwidth_factor
from autopar.report.table import Table, bandwidth, duration, say, size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from autopar.formats.cluster import Cluster, Curve, Link
    from autopar.hardware.gpus import Gpu


_Make = tuple[str, int, float | None]
"""Type, memory and price of a device."""
_Nodes = tuple[tuple[tuple[tuple[_Make, int], ...], int], ...]
"""(devices of every make, number of nodes with so many)."""


def render(cluster: Cluster, console: Console, *, sizes: bool = False) -> None:
    """Print a cluster's devices, links and curves; with ``sizes``, curves at every size and not their ends alone."""
    title = f"cluster {cluster.name}: {len(cluster.devices)} devices, backend {cluster.backend}"
    say(console, title)
    console.print(_devices(cluster))
    console.print(_links(cluster))
    if cluster.curves:
        console.print(_points(cluster) if sizes else _curves(cluster))
    if cluster.overlaps:
        console.print(_overlaps(cluster))
    for note in cluster.notes:
        say(console, f"note: {note}")


def cluster_summary(cluster: Cluster, share: float = 1.0) -> str:
    """Return in a line what a cluster is: devices, nodes, and what each sends; of networks ``share`` is counted on.

    >>> from autopar.hardware.clusters import cluster_named
    >>> from autopar.hardware.collectives import NETWORK_SHARE
    >>> cluster_summary(cluster_named("2x8xH100:400Gbps"), NETWORK_SHARE).split("; ")[:2]
    ['16 devices (H100-SXM) in 2 nodes of 8', 'within a node 370 GB/s per device']
    """
    sizes = Counter(device.node for device in cluster.devices).values()
    racked = any(link.level == "rack" for link in cluster.links)
    racks = f", {len({device.rack for device in cluster.devices})} racks" if racked else ""
    kinds = Counter(device.type for device in cluster.devices)
    names = ", ".join(kinds if len(kinds) == 1 else (f"{count} {kind}" for kind, count in kinds.items()))
    nodes = "1 node" if len(sizes) == 1 else f"{len(sizes)} nodes of {' and '.join(map(str, sorted(set(sizes))))}"
    plural = "s" if len(cluster.devices) > 1 else ""
    found = [f"{len(cluster.devices)} device{plural} ({names}) in {nodes}{racks}"]
    where = {"node": "within a node", "rack": "between nodes of a rack"}
    where["network"] = "between racks" if racked else "between nodes"
    for link in cluster.links:
        if link.level == "node" and max(sizes) > 1:
            found.append(f"{where[link.level]} {_bandwidth_text(link, 1.0, None)}")
        elif link.level != "node" and len(sizes) > 1:
            found.append(
                f"{where[link.level]} {_bandwidth_text(link, share, min(sizes) if len(set(sizes)) == 1 else None)}"
            )
    return "; ".join(found)


def _bandwidth_text(link: Link, share: float, per_node: int | None) -> str:
    """Return what a device or a node sends over a link, which is shared by as many; ``per_node`` devices have each."""
    rate, unit = link.bytes_per_s / share, bandwidth if link.level == "node" else _bits
    counted = "" if share == 1 else f", of which {share:.0%} are counted on"
    if link.shared_by > 1:
        whose = " per node" if link.shared_by == per_node else ""
        return f"{unit(rate)}{whose}, shared by {link.shared_by} devices ({unit(rate / link.shared_by)} each){counted}"
    whole = "" if per_node is None else f" ({unit(rate * per_node)} per node)"
    return f"{unit(rate)} per device{whole}{counted}"


def _bits(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:.4g} Gbit/s"


def _devices(cluster: Cluster) -> Table:
    racked = any(link.level == "rack" for link in cluster.links)
    columns = (">nodes", ">devices each", "type", ">memory each", ">price per hour")
    table = Table("Devices", (">racks", *columns) if racked else columns)
    for racks, alike in _by_rack(cluster, racked):
        for kinds, count in alike:
            for (kind, memory, price), devices in kinds:
                dear = "" if price is None else f"{price:g}"
                row = (str(count), str(devices), kind, size(memory), dear)
                table.add_row(*((str(racks), *row) if racked else row))
    return table


def _by_rack(cluster: Cluster, has_racks: bool) -> list[tuple[int, _Nodes]]:
    """Return how many racks, all nodes in one unless ``has_racks``, hold as many nodes of each make."""
    nodes: dict[tuple[int, int], Counter[_Make]] = {}
    for each in cluster.devices:
        place = each.rack if has_racks else 0, each.node
        nodes.setdefault(place, Counter())[each.type, each.memory_bytes, each.price_per_hour] += 1
    racks: dict[int, Counter[tuple[tuple[_Make, int], ...]]] = {}
    for (rack, _), counted in nodes.items():
        racks.setdefault(rack, Counter())[tuple(counted.items())] += 1
    alike = Counter(tuple(counted.items()) for counted in racks.values())
    return [(count, found) for found, count in alike.items()]


def _links(cluster: Cluster) -> Table:
    table = Table("Links", ("level", ">latency", ">bandwidth", "duplex", ">shared by", "known"))
    for link in cluster.links:
        numbers = (duration(link.latency_s), bandwidth(link.bytes_per_s))
        table.add_row(link.level, *numbers, link.duplex, str(link.shared_by), link.provenance)
    return table


def _curves(cluster: Cluster) -> Table:
    ends = dict.fromkeys(f"{size(curve.sizes[0])} to {size(curve.sizes[-1])}" for curve in cluster.curves)
    known = {curve.provenance for curve in cluster.curves}
    title = f"Curves from {' or '.join(ends)}{'' if len(known) > 1 else f' ({min(known)})'}"
    columns = ("operation", ">ranks", "level", ">smallest", ">largest", ">algbw", ">busbw")
    table = Table(title, (*columns, *(("known",) if len(known) > 1 else ())))
    for curve in cluster.curves:
        times = (duration(curve.seconds[0]), duration(curve.seconds[-1]))
        row = (*_operation(curve), *times, *_bandwidths(curve, -1), curve.provenance)
        table.add_row(*row[: len(table.columns)])
    return table


def _points(cluster: Cluster) -> Table:
    known = ", ".join(dict.fromkeys(curve.provenance for curve in cluster.curves))
    columns = ("operation", ">ranks", "level", ">size", ">time", ">algbw", ">busbw")
    table = Table(f"Curves ({known})", columns)
    for curve in cluster.curves:
        for at, (count, seconds) in enumerate(zip(curve.sizes, curve.seconds, strict=True)):
            numbers = (size(count), duration(seconds), *_bandwidths(curve, at))
            table.add_row(*_operation(curve), *numbers, end_section=at + 1 == len(curve.sizes))
    return table


def _overlaps(cluster: Cluster) -> Table:
    table = Table("Computing while communicating", ("level", ">computing takes", ">communicating takes", "known"))
    for each in cluster.overlaps:
        table.add_row(each.level, f"{each.compute:.2f} x", f"{each.communication:.2f} x", each.provenance)
    return table


def _operation(curve: Curve) -> tuple[str, str, str]:
    return curve.kind.replace("_", "-"), str(curve.ranks), curve.level


def _bandwidths(curve: Curve, at: int) -> tuple[str, str]:
    if curve.seconds[at] == 0:
        return "", ""
    rate = curve.sizes[at] / curve.seconds[at]
    return bandwidth(rate), bandwidth(rate * bus_bandwidth_factor(curve.kind, curve.ranks))


def render_gpus(gpus: Iterable[Gpu], console: Console) -> None:
    """Print what is known of GPUs, and below it where that is from."""
    columns = ("name", ">fp32", ">bf16", ">fp16", ">memory", ">its rate", ">NVLink", ">PCIe", ">NCCL bus")
    table = Table("GPUs (dense TFLOP/s, GB, and GB/s in one direction)", columns)
    listed = list(gpus)
    for gpu in listed:
        flops = (gpu.fp32_flops_per_s, gpu.bf16_flops_per_s, gpu.fp16_flops_per_s)
        links = (gpu.memory_bytes_per_s, gpu.nvlink_bytes_per_s, gpu.pcie_bytes_per_s, gpu.collective_bytes_per_s)
        numbers = (*(_in(1e12, each) for each in flops), *(_in(1e9, each) for each in (gpu.memory_bytes, *links)))
        table.add_row(gpu.name, *numbers)
    console.print(table)
    say(console, "Sources", "bold")
    for gpu in listed:
        say(console, f"{gpu.name}: {gpu.source}")


def _in(unit: float, value: float | None) -> str:
    return f"{value / unit:.4g}" if value else "-"
