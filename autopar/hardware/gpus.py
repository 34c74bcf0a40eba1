"""Gpus: what is known of accelerators that are not at hand, and where that is from.

Rates are the makers' dense peaks (without structured sparsity, without TF32). A GB is 10^9 bytes: a ``80 GB`` GPU has
some more, so that a plan for it never counts on memory that is not there.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from autopar.errors import UsageError
from autopar.formats.profile import Precision

Architecture = Literal["volta", "turing", "ampere", "ada", "hopper", "blackwell", "cdna3"]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of accelerator."""

    name: str
    aliases: tuple[str, ...]
    """Other names; case, spaces, ``-`` and ``_`` count in none of them."""
    architecture: Architecture
    fp32_flops_per_s: float
    fp16_flops_per_s: float
    """With products added up in float32."""
    bf16_flops_per_s: float | None
    """None where the GPU does not compute in bfloat16."""
    memory_bytes: int
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float = 0.0
    """To the other GPUs of its node, in one direction: NVLink, or Infinity Fabric; 0 where there is only PCIe."""
    peer_bytes_per_s: float | None = None
    """Of that, what one other GPU of the node can be sent: None for all, less where no switch joins the links."""
    pcie_bytes_per_s: float
    """To the host, in one direction."""
    collective_bytes_per_s: float | None = None
    """Bus bandwidth that NCCL reaches in a node with large messages; None where nobody stated it."""
    source: str
    """Where the numbers are from, and which of them nobody here could verify."""

    def flops_per_s(self, precision: Precision) -> float:
        """Return the peak rate of matrix products.

        >>> find("H100").flops_per_s("bf16")
        989000000000000.0

        Raises:
            UsageError: the GPU does not compute in this precision, or its rate is not known.
        """
        rates = {"fp32": self.fp32_flops_per_s, "fp16": self.fp16_flops_per_s, "bf16": self.bf16_flops_per_s}
        rate = rates.get(precision)
        if rate is None:
            why = "has no bfloat16" if precision == "bf16" else f"has no known rate in {precision}"
            known = ", ".join(name for name, each in rates.items() if each is not None)
            raise UsageError(f"`precision={precision!r}`: {self.name} {why}; use one of {known}")
        return rate


# PCI Express, 16 lanes, one direction, after its 128b/130b code.
_PCIE3, _PCIE4, _PCIE5 = 15.75e9, 31.5e9, 63.0e9
_NCCL = "bus bandwidth: NCCL's own constant for its generation (torch 2.13, _inductor/comm_analysis.py)"
_UNVERIFIED = "unverified here"

GPUS: tuple[Gpu, ...] = (
    Gpu(
        name="V100-SXM2-32G",
        aliases=("V100", "V100-32G", "V100-SXM2", "V100-SXM2-32GB", "Tesla V100-SXM2-32GB"),
        architecture="volta",
        fp32_flops_per_s=15.7e12,
        fp16_flops_per_s=125e12,
        bf16_flops_per_s=None,
        memory_bytes=32 * 10**9,
        memory_bytes_per_s=900e9,
        nvlink_bytes_per_s=150e9,
        peer_bytes_per_s=25e9,
        pcie_bytes_per_s=_PCIE3,
        collective_bytes_per_s=134e9,
        source="rates: copies of the datasheet (xenon.com.au, developer.nvidia.com); memory and NVLink: Dell EMC Ready "
        "Solutions for AI, reference guide; peers are joined by one or two links, one is assumed; bus bandwidth: "
        "measured by VIA-Research/vTrain (8 GPUs, 1 GB)",
    ),
    Gpu(
        name="T4",
        aliases=("T4-16G", "Tesla T4", "NVIDIA T4"),
        architecture="turing",
        fp32_flops_per_s=8.1e12,
        fp16_flops_per_s=65e12,
        bf16_flops_per_s=None,
        # With error correction, of 16 GB.
        memory_bytes=15_800_000_000,
        memory_bytes_per_s=320e9,
        pcie_bytes_per_s=_PCIE3,
        source="sysrqmts.com/en/gpus/nvidia/tesla/t4, geektopia.es (Nvidia's announcement); memory left by error "
        f"correction: {_UNVERIFIED}; nobody stated NCCL's bus bandwidth",
    ),
    Gpu(
        name="A100-SXM-80G",
        aliases=("A100", "A100-80G", "A100-80GB", "A100-SXM", "A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
        architecture="ampere",
        fp32_flops_per_s=19.5e12,
        fp16_flops_per_s=312e12,
        bf16_flops_per_s=312e12,
        memory_bytes=80 * 10**9,
        memory_bytes_per_s=2039e9,
        nvlink_bytes_per_s=300e9,
        pcie_bytes_per_s=_PCIE4,
        collective_bytes_per_s=229e9,
        source="NVIDIA A100 datasheet r4, as in torch 2.13 (_inductor/analysis/device_info.py) and at "
        "glennklockwood.com; bus bandwidth: measured by VIA-Research/vTrain (8 GPUs, 1 GB)",
    ),
    Gpu(
        name="A100-SXM-40G",
        aliases=("A100-40G", "A100-40GB", "A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB"),
        architecture="ampere",
        fp32_flops_per_s=19.5e12,
        fp16_flops_per_s=312e12,
        bf16_flops_per_s=312e12,
        memory_bytes=40 * 10**9,
        memory_bytes_per_s=1555e9,
        nvlink_bytes_per_s=300e9,
        pcie_bytes_per_s=_PCIE4,
        collective_bytes_per_s=229e9,
        source="glennklockwood.com/garden/processors/A100 and techpowerup.com; bus bandwidth: that of the 80 GB kind, "
        f"which has the same links ({_UNVERIFIED})",
    ),
    Gpu(
        name="H100-SXM",
        aliases=("H100", "H100-80G", "H100-SXM5", "H100-SXM-80G", "NVIDIA H100 80GB HBM3"),
        architecture="hopper",
        fp32_flops_per_s=67e12,
        fp16_flops_per_s=989e12,
        bf16_flops_per_s=989e12,
        memory_bytes=80 * 10**9,
        memory_bytes_per_s=3350e9,
        nvlink_bytes_per_s=450e9,
        pcie_bytes_per_s=_PCIE5,
        collective_bytes_per_s=370e9,
        source=f"NVIDIA H100 page as in torch 2.13 (device_info.py states sparse rates, halved here); {_NCCL}",
    ),
    Gpu(
        name="H200-SXM",
        aliases=("H200", "H200-141G", "H200-SXM5", "NVIDIA H200"),
        architecture="hopper",
        fp32_flops_per_s=67e12,
        fp16_flops_per_s=989e12,
        bf16_flops_per_s=989e12,
        memory_bytes=141 * 10**9,
        memory_bytes_per_s=4800e9,
        nvlink_bytes_per_s=450e9,
        pcie_bytes_per_s=_PCIE5,
        collective_bytes_per_s=370e9,
        source="ttsugriy.github.io/distributed-training-book, appendix of hardware assumptions; " + _NCCL,
    ),
    Gpu(
        name="B200-HGX",
        aliases=("B200", "B200-SXM", "B200-179G", "NVIDIA B200"),
        architecture="blackwell",
        fp32_flops_per_s=80e12,
        fp16_flops_per_s=2250e12,
        bf16_flops_per_s=2250e12,
        memory_bytes=179 * 10**9,
        memory_bytes_per_s=8000e9,
        nvlink_bytes_per_s=900e9,
        pcie_bytes_per_s=_PCIE5,
        collective_bytes_per_s=720e9,
        source="glennklockwood.com/garden/processors/B200 (at 1000 W); memory: the 179 GB that docs.vultr.com saw, "
        f"sold as 192 GB; PCIe: fifth generation {_UNVERIFIED} (one source says sixth); {_NCCL}",
    ),
    Gpu(
        name="L40S",
        aliases=("L40S-48G", "NVIDIA L40S"),
        architecture="ada",
        fp32_flops_per_s=91.6e12,
        fp16_flops_per_s=362e12,
        bf16_flops_per_s=362e12,
        memory_bytes=48 * 10**9,
        memory_bytes_per_s=864e9,
        pcie_bytes_per_s=_PCIE4,
        collective_bytes_per_s=24e9,
        source="copy of the datasheet at mullet.se; bus bandwidth: torch 2.13's constant for PCIe (comm_analysis.py)",
    ),
    Gpu(
        name="RTX4090",
        aliases=("4090", "RTX4090-24G", "GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
        architecture="ada",
        fp32_flops_per_s=82.6e12,
        fp16_flops_per_s=165.2e12,
        bf16_flops_per_s=165.2e12,
        memory_bytes=24 * 10**9,
        memory_bytes_per_s=1008e9,
        pcie_bytes_per_s=_PCIE4,
        collective_bytes_per_s=10e9,
        source=f"waredb.com, float32 accumulation; PCIe {_UNVERIFIED}; bus bandwidth: torch 2.13's profile of PCIe "
        "through the host (comm_analysis.py), as these cards have no peer access",
    ),
    Gpu(
        name="MI300X",
        aliases=("MI300X-192G", "AMD Instinct MI300X"),
        architecture="cdna3",
        fp32_flops_per_s=163.4e12,
        fp16_flops_per_s=1307.4e12,
        bf16_flops_per_s=1307.4e12,
        memory_bytes=192 * 10**9,
        memory_bytes_per_s=5300e9,
        nvlink_bytes_per_s=448e9,
        peer_bytes_per_s=64e9,
        pcie_bytes_per_s=_PCIE5,
        source="AMD Instinct MI300X data sheet as in torch 2.13 (device_info.py) and at "
        "ttsugriy.github.io/distributed-training-book; links are Infinity Fabric, one to each of seven peers; "
        "nobody stated RCCL's bus bandwidth",
    ),
)


def find(name: str) -> Gpu:
    """Return the GPU of a name; case, spaces, ``-`` and ``_`` do not count.

    >>> find("h100 sxm").name, find("A100_80GB").name, find("rtx-4090").name
    ('H100-SXM', 'A100-SXM-80G', 'RTX4090')

    Raises:
        UsageError: no such GPU is known; names the nearest ones.
    """
    named = _by_name(GPUS)
    found = named.get(_plain(name))
    if found is not None:
        return found
    nearest = dict.fromkeys(named[key].name for key in difflib.get_close_matches(_plain(name), named, n=9))
    known = (
        f"the nearest are {', '.join(list(nearest)[:3])}"
        if nearest
        else "known are " + ", ".join(gpu.name for gpu in GPUS)
    )
    error = UsageError(f"no GPU called {name[:80]!r} is known; {known} (`autopar cluster list`)")
    error.meant = (name, next(iter(nearest))) if nearest else None
    raise error


def known_as(name: str) -> str:
    """Return the name by which a device is known here, or its own where it is not.

    >>> known_as("NVIDIA A100-SXM4-80GB"), known_as("my accelerator")
    ('A100-SXM-80G', 'my accelerator')
    """
    found = _by_name(GPUS).get(_plain(name))
    return name if found is None else found.name


def is_known(name: str) -> bool:
    """Return whether a name is that of a GPU in the table.

    >>> is_known("a100 80gb"), is_known("cuda")
    (True, False)
    """
    return _plain(name) in _by_name(GPUS)


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name).casefold()


@lru_cache(maxsize=4)
def _by_name(gpus: tuple[Gpu, ...]) -> dict[str, Gpu]:
    return {_plain(name): gpu for gpu in gpus for name in (gpu.name, *gpu.aliases)}
