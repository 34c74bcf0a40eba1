"""Estimate: a cluster to plan for where none was measured."""

from __future__ import annotations

from autopar.formats.cluster import Cluster, Device, Link
from autopar.formats.profile import Profile

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
        notes=("no cluster was measured: link and device numbers are estimated; `autopar profile` measures them",),
    )
