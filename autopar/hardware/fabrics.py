"""Fabrics: what collectives were measured to reach over links of one kind, and where that was published.

A fabric corrects the formula of :mod:`autopar.hardware.collectives` by a factor: what was measured, over what the
formula has for the machine that was measured. Between the nodes and the bytes that were measured the factor is
interpolated in their logarithms, beyond them it is that of the nearest. An operation that was measured at one size only
is, at others, as much further from the formula than an all-reduce as at that one. So a fabric counts on machines with
other nodes, or with links of another rate, as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autopar.errors import UsageError, unknown
from autopar.formats.cluster import CurveKind
from autopar.hardware.collectives import NodeLinks, bus_bandwidth_factor, collective_s
from autopar.hardware.topology import Place


class Measured(NamedTuple):
    """Bus bandwidth of an operation among all devices of some nodes."""

    nodes: int
    size_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """What joins the devices of a node, or nodes."""

    name: str
    aliases: tuple[str, ...] = ()
    links: NodeLinks
    """Of the machine that was measured."""
    all_reduce: tuple[Measured, ...] = ()
    all_gather: tuple[Measured, ...] = ()
    reduce_scatter: tuple[Measured, ...] = ()
    """Of these three, what was measured; where nothing was, the formula stands."""
    source: str
    """Where the numbers are from, and under which terms."""

    @property
    def is_network(self) -> bool:
        """Whether it joins nodes."""
        return self.links.network_bytes_per_s > 0

    @property
    def device_bytes_per_s(self) -> float:
        """What each device sent to other nodes, in one direction, on the machine that was measured."""
        return self.links.network_bytes_per_s / self.links.devices


_MIB, _MB = 2**20, 10**6
_H100 = NodeLinks("nvlink", bus_bytes_per_s=370e9, peer_bytes_per_s=370e9, devices=8)
_H100_400 = NodeLinks("nvlink", bus_bytes_per_s=370e9, peer_bytes_per_s=370e9, devices=8, network_bytes_per_s=400e9)
_PLAYBOOK = (
    "Hugging Face's ultra-scale playbook, pp_comm_bandwidth.html (H100, 3.2 Tbit/s of EFA per node; "
    "github.com/vinjn/nanotron-ultrascale-playbook at 924e4d0, of which the figures alone are taken)"
)


def _by_nodes(size_bytes: int, *gb_per_s: float, nodes: Sequence[int]) -> tuple[Measured, ...]:
    return tuple(Measured(count, size_bytes, each * 1e9) for count, each in zip(nodes, gb_per_s, strict=True))


def _by_size(nodes: int, **gb_per_s: float) -> tuple[Measured, ...]:
    """By MiB or KiB, such as ``MiB_16=237.21``."""
    units = {"KiB": 2**10, "MiB": _MIB}
    named = ((name.partition("_"), each) for name, each in gb_per_s.items())
    return tuple(Measured(nodes, units[unit] * int(count), each * 1e9) for (unit, _, count), each in named)


_EFA_NODES = (2, 4, 8, 16, 32, 64)
FABRICS: tuple[Fabric, ...] = (
    Fabric(
        name="nvlink4",
        links=_H100,
        all_reduce=_by_size(
            1,
            KiB_1=0.11,
            KiB_16=1.60,
            KiB_64=5.87,
            KiB_256=22.45,
            KiB_512=44.41,
            MiB_1=67.04,
            MiB_2=86.94,
            MiB_4=135.44,
            MiB_8=176.77,
            MiB_16=237.21,
            MiB_32=294.69,
            MiB_64=361.67,
            MiB_128=400.53,
            MiB_256=422.25,
            MiB_512=436.79,
            MiB_1024=466.33,
        ),
        all_gather=_by_nodes(256 * _MB, 249.85, nodes=(1,)),
        reduce_scatter=_by_nodes(256 * _MB, 249.73, nodes=(1,)),
        source="all-reduce: nccl-tests on a DGX H100 in NVIDIA's recipe (github.com/NVIDIA/dgxc-benchmarking, "
        f"nccl/README.md at 46e4201, Apache-2.0), 8 GPUs; all-gather and reduce-scatter at 256 MB: {_PLAYBOOK}",
    ),
    Fabric(
        name="nvlink5",
        links=NodeLinks("nvlink", bus_bytes_per_s=720e9, peer_bytes_per_s=720e9, devices=8),
        all_reduce=_by_nodes(1024 * _MIB, 668.2, nodes=(1,)),
        all_gather=_by_nodes(1024 * _MIB, 606.2, nodes=(1,)),
        reduce_scatter=_by_nodes(1024 * _MIB, 605.8, nodes=(1,)),
        source="shares of 900 GB/s that SimuMax fitted to eight B200 (github.com/MooreThreads/SimuMax, release v1.2, "
        "Apache-2.0); they are taken for those of 1 GiB",
    ),
    Fabric(
        name="infiniband",
        aliases=("ib",),
        links=_H100_400,
        all_reduce=_by_size(2, MiB_1=22.30, MiB_10=124.92, MiB_100=304.03, MiB_1000=434.99),
        source="two nodes of eight H100 with 400 Gbit/s each (github.com/drmysore/nebius-h100-16gpu-benchmark at "
        "21b4865, of which the figures alone are taken; NCCL 2.20.5); more nodes are as far from the formula as two",
    ),
    Fabric(
        name="efa",
        links=_H100_400,
        all_reduce=_by_nodes(256 * _MB, 361.75, 160.14, 99.56, 84.74, 64.93, 32.94, nodes=_EFA_NODES),
        all_gather=_by_nodes(256 * _MB, 184.61, 118.97, 69.0, 54.97, 27.97, 11.04, nodes=_EFA_NODES),
        reduce_scatter=_by_nodes(256 * _MB, 181.55, 115.76, 68.55, 54.52, 27.94, 11.07, nodes=_EFA_NODES),
        source=f"{_PLAYBOOK}; at 256 MB, other sizes are as far from the formula",
    ),
    Fabric(
        name="roce",
        aliases=("ethernet",),
        links=_H100_400,
        source="nothing was measured of it beyond the formula, whose share of a network's rate is that of torch 2.13's "
        "calibration (H100, RoCE; _inductor/comm_analysis.py)",
    ),
)


def find_fabric(name: str) -> Fabric:
    """Return the fabric of a name; case does not count.

    >>> find_fabric("EFA").name, find_fabric("ib").name
    ('efa', 'infiniband')

    Raises:
        UsageError: no such fabric is known; names the nearest, or all.
    """
    named = {each: fabric for fabric in FABRICS for each in (fabric.name, *fabric.aliases)}
    found = named.get(name.strip().casefold())
    if found is not None:
        return found
    known = ", ".join(fabric.name for fabric in FABRICS if fabric.is_network)
    raise unknown(UsageError, f"no fabric called {name[:80]!r} is known: {known}", name, named)


def fabric_s(fabric: Fabric | None, kind: CurveKind, size_bytes: int, place: Place, links: NodeLinks) -> float:
    """Return the seconds of an operation: those of the formula, times what the fabric was measured to take more.

    >>> efa, place = find_fabric("efa"), Place.even(nodes=64, per_node=8)
    >>> seconds = fabric_s(efa, "all_reduce", 256 * 10**6, place, efa.links)
    >>> round(bus_bandwidth_factor("all_reduce", place.ranks) * 256e6 / seconds / 1e9, 2)
    32.94
    """
    formula_s = collective_s(kind, size_bytes, place, links)
    if fabric is None or kind == "p2p" or fabric.is_network != (place.nodes > 1):
        return formula_s
    return formula_s * _factor(fabric, kind, place.nodes, max(1, size_bytes))


def _factor(fabric: Fabric, kind: CurveKind, nodes: int, size_bytes: int) -> float:
    """Return how many times what the formula has is taken, among all devices of so many nodes."""
    known = _factors(fabric, kind)
    if not known:
        return _factor(fabric, "all_reduce", nodes, size_bytes) if kind != "all_reduce" else 1.0
    each = {count: _at_size(fabric, kind, count, size_bytes) for count in known}
    return _between(nodes, sorted(each.items()))


def _at_size(fabric: Fabric, kind: CurveKind, nodes: int, size_bytes: int) -> float:
    """Return the factor among nodes that were measured; of an operation of one size by the shape of all-reduces."""
    own, shape = _factors(fabric, kind)[nodes], _factors(fabric, "all_reduce").get(nodes, ())
    if len(own) > 1 or len(shape) < 2:
        return _between(size_bytes, own)
    measured_bytes, factor = own[0]
    return factor * _between(size_bytes, shape) / _between(measured_bytes, shape)


@lru_cache(maxsize=64)
def _factors(fabric: Fabric, kind: CurveKind) -> dict[int, tuple[tuple[int, float], ...]]:
    """Return by number of nodes the sizes and factors that were measured, ascending."""
    every: dict[str, tuple[Measured, ...]] = {
        "all_reduce": fabric.all_reduce,
        "all_gather": fabric.all_gather,
        "reduce_scatter": fabric.reduce_scatter,
    }
    found: dict[int, tuple[tuple[int, float], ...]] = {}
    for each in sorted(every[kind]):
        place = Place.even(each.nodes, fabric.links.devices)
        measured_s = bus_bandwidth_factor(kind, place.ranks) * each.size_bytes / each.bytes_per_s
        factor = measured_s / collective_s(kind, each.size_bytes, place, fabric.links)
        found[each.nodes] = (*found.get(each.nodes, ()), (each.size_bytes, factor))
    return found


def _between(at: int, points: Sequence[tuple[int, float]]) -> float:
    """Return what is interpolated in logarithms, and beyond the ends stays what it is there.

    >>> round(_between(4, [(2, 1.0), (8, 4.0)]), 3), _between(1, [(2, 1.0), (8, 4.0)])
    (2.0, 1.0)
    """
    places, factors = np.log(np.transpose(points))
    return float(np.exp(np.interp(np.log(at), places, factors)))
