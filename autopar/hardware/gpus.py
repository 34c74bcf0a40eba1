"""Gpus: what is known of accelerators that are not at hand, and where that is from.

Rates are the makers' dense peaks (without structured sparsity, without TF32). A GB is 10^9 bytes: a ``80 GB`` GPU has
some more, so that a plan for it never counts on memory that is not there. Watts are what the whole board may take, as
its maker states it: where an entry names no source of its own for them, they are those of llmbook.apartsin.com
(appendix G), and of anandtech.com and geektopia.es for Volta and Turing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from autopar.errors import UsageError
from autopar.formats.cluster import Device
from autopar.formats.profile import Precision

Architecture = Literal["pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell", "cdna3", "cdna4"]


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
    power_w: float | None = None
    """Of the whole board under load, as its data sheet states it; None where nobody stated it."""
    fabric: str | None = None
    """The links inside a node of which collectives were measured (:mod:`autopar.hardware.fabrics`)."""
    domain: int = 8
    """How many make a node where nobody says it: those that links inside a node join."""
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
        power_w=300,
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
        power_w=70,
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
        power_w=400,
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
        power_w=400,
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
        power_w=700,
        fabric="nvlink4",
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
        power_w=700,
        fabric="nvlink4",
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
        power_w=1000,
        fabric="nvlink5",
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
        power_w=350,
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
        power_w=450,
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
        power_w=750,
        source="AMD Instinct MI300X data sheet as in torch 2.13 (device_info.py) and at "
        "ttsugriy.github.io/distributed-training-book; links are Infinity Fabric, one to each of seven peers; "
        "nobody stated RCCL's bus bandwidth",
    ),
    Gpu(
        name="B300-HGX",
        aliases=("B300", "B300-SXM", "B300-268G", "B300-288G", "NVIDIA B300", "NVIDIA B300 SXM6 AC"),
        architecture="blackwell",
        fp32_flops_per_s=75e12,
        fp16_flops_per_s=2250e12,
        bf16_flops_per_s=2250e12,
        memory_bytes=268 * 10**9,
        memory_bytes_per_s=8000e9,
        nvlink_bytes_per_s=900e9,
        pcie_bytes_per_s=_PCIE5,
        collective_bytes_per_s=720e9,
        power_w=1400,
        fabric="nvlink5",
        source="glennklockwood.com/garden/processors/B300 (1400 W at most); memory: sold as 288 GB, of which the share "
        f"is counted on that is seen of a B200's ({_UNVERIFIED}); PCIe: fifth generation is counted on, sold as sixth; "
        f"{_NCCL}",
    ),
    Gpu(
        name="GB200",
        aliases=("GB200-NVL72", "GB200-186G", "NVIDIA GB200"),
        architecture="blackwell",
        fp32_flops_per_s=80e12,
        fp16_flops_per_s=2500e12,
        bf16_flops_per_s=2500e12,
        memory_bytes=186 * 10**9,
        memory_bytes_per_s=8000e9,
        nvlink_bytes_per_s=900e9,
        pcie_bytes_per_s=225e9,
        collective_bytes_per_s=720e9,
        power_w=1200,
        fabric="nvlink5",
        domain=72,
        source="NVIDIA GB200 NVL72 page, a 72nd of its rack: 13.4 TB, 576 TB/s and 130 TB/s of NVLink as at aiwiki.ai, "
        f"bfloat16 dense and power {_UNVERIFIED}; to the host: a half of its superchip's NVLink-C2C (datacrunch.io), "
        f"{_UNVERIFIED}; {_NCCL}",
    ),
    Gpu(
        name="H20",
        aliases=("H20-96G", "H20-SXM", "NVIDIA H20"),
        architecture="hopper",
        fp32_flops_per_s=44e12,
        fp16_flops_per_s=148e12,
        bf16_flops_per_s=148e12,
        memory_bytes=96 * 10**9,
        memory_bytes_per_s=4000e9,
        nvlink_bytes_per_s=450e9,
        pcie_bytes_per_s=_PCIE5,
        collective_bytes_per_s=370e9,
        power_w=400,
        fabric="nvlink4",
        source="willitrunai.com/es/gpus/h20-96gb (memory, fp16, NVLink, power), fp32: zangshuxian.com; PCIe: fifth "
        f"generation {_UNVERIFIED}; {_NCCL}",
    ),
    Gpu(
        name="H100-PCIe",
        aliases=("H100-PCIe-80G", "NVIDIA H100 PCIe"),
        architecture="hopper",
        fp32_flops_per_s=51e12,
        fp16_flops_per_s=756e12,
        bf16_flops_per_s=756e12,
        memory_bytes=80 * 10**9,
        memory_bytes_per_s=2000e9,
        pcie_bytes_per_s=_PCIE5,
        power_w=350,
        source="NVIDIA H100 PCIe product brief PB-11133-001 (memory, PCIe, power; manuals.plus); fp32: gpu.blog; fp16 "
        f"and bf16: {_UNVERIFIED}; a bridge of NVLink joins two cards only and is not counted on; nobody stated "
        "NCCL's bus bandwidth",
    ),
    Gpu(
        name="RTX5090",
        aliases=("5090", "RTX5090-32G", "GeForce RTX 5090", "NVIDIA GeForce RTX 5090"),
        architecture="blackwell",
        fp32_flops_per_s=104.8e12,
        fp16_flops_per_s=209.5e12,
        bf16_flops_per_s=209.5e12,
        memory_bytes=32 * 10**9,
        memory_bytes_per_s=1792e9,
        pcie_bytes_per_s=_PCIE5,
        collective_bytes_per_s=10e9,
        power_w=575,
        source="spheron.network (fp32, memory, PCIe, power; 838 TFLOP/s of fp16 are with sparsity and float16 "
        f"accumulation, a quarter of it is dense and in float32, {_UNVERIFIED}); bus bandwidth: torch 2.13's profile "
        "of PCIe through the host (comm_analysis.py), as these cards have no peer access",
    ),
    Gpu(
        name="MI325X",
        aliases=("MI325X-256G", "AMD Instinct MI325X"),
        architecture="cdna3",
        fp32_flops_per_s=163.4e12,
        fp16_flops_per_s=1307.4e12,
        bf16_flops_per_s=1307.4e12,
        memory_bytes=256 * 10**9,
        memory_bytes_per_s=6000e9,
        nvlink_bytes_per_s=448e9,
        peer_bytes_per_s=64e9,
        pcie_bytes_per_s=_PCIE5,
        power_w=1000,
        source="awesomeagents.ai/hardware/amd-mi325x (rates, memory, power); links: those of the MI300X, one to each "
        f"of seven peers ({_UNVERIFIED}); nobody stated RCCL's bus bandwidth",
    ),
    Gpu(
        name="MI355X",
        aliases=("MI355X-288G", "AMD Instinct MI355X"),
        architecture="cdna4",
        fp32_flops_per_s=157.3e12,
        fp16_flops_per_s=2516.6e12,
        bf16_flops_per_s=2516.6e12,
        memory_bytes=288 * 10**9,
        memory_bytes_per_s=8000e9,
        nvlink_bytes_per_s=537.6e9,
        peer_bytes_per_s=76.8e9,
        pcie_bytes_per_s=_PCIE5,
        power_w=1400,
        source="theregister.com/2025/06/12/amd_mi355x (memory, power); fp16: half its 5 PFLOP/s of fp8 "
        f"(world-today-news.com); fp32 and links (153.6 GB/s both ways to each of seven peers): {_UNVERIFIED}; nobody "
        "stated RCCL's bus bandwidth",
    ),
    Gpu(
        name="TITAN-V",
        aliases=("TITAN-V-12G", "NVIDIA TITAN V"),
        architecture="volta",
        fp32_flops_per_s=13.8e12,
        fp16_flops_per_s=110e12,
        bf16_flops_per_s=None,
        memory_bytes=12 * 10**9,
        memory_bytes_per_s=653e9,
        pcie_bytes_per_s=_PCIE3,
        power_w=250,
        source="anandtech.com/show/12673 and geektopia.es (110 TFLOP/s of tensor cores, power); PCIe: third generation "
        f"{_UNVERIFIED}; nobody stated NCCL's bus bandwidth",
    ),
    Gpu(
        name="TITAN-RTX",
        aliases=("TITAN-RTX-24G", "NVIDIA TITAN RTX"),
        architecture="turing",
        fp32_flops_per_s=16.3e12,
        fp16_flops_per_s=130.5e12,
        bf16_flops_per_s=None,
        memory_bytes=24 * 10**9,
        memory_bytes_per_s=672e9,
        pcie_bytes_per_s=_PCIE3,
        power_w=280,
        source="tomshardware.com/news/nvidia-titan-rtx-specs-pricing,38184 (fp32, memory, power), 130 TFLOP/s of "
        "tensor cores: hothardware.com; a bridge of NVLink joins two cards only and is not counted on; nobody stated "
        "NCCL's bus bandwidth",
    ),
    Gpu(
        name="RTX2060",
        aliases=("2060", "RTX2060-6G", "GeForce RTX 2060", "NVIDIA GeForce RTX 2060"),
        architecture="turing",
        fp32_flops_per_s=6.45e12,
        fp16_flops_per_s=25.8e12,
        bf16_flops_per_s=None,
        memory_bytes=6 * 10**9,
        memory_bytes_per_s=336e9,
        pcie_bytes_per_s=_PCIE3,
        power_w=160,
        source="topcpu.net/pl/cpu/geforce-rtx-2060-tu104 (fp32, memory, PCIe, power); fp16: 240 tensor cores at 1680 "
        f"MHz, half as quick where they add up in float32 ({_UNVERIFIED}); nobody stated NCCL's bus bandwidth",
    ),
    Gpu(
        name="Quadro-P4000",
        aliases=("P4000", "Quadro-P4000-8G", "NVIDIA Quadro P4000"),
        architecture="pascal",
        fp32_flops_per_s=5.3e12,
        # Without tensor cores, products of halves are computed in float32.
        fp16_flops_per_s=5.3e12,
        bf16_flops_per_s=None,
        memory_bytes=8 * 10**9,
        memory_bytes_per_s=243e9,
        pcie_bytes_per_s=_PCIE3,
        power_w=105,
        source="cputronic.com/es/gpu/nvidia-quadro-p4000 (fp32, PCIe, power), memory: notebookinfo.de; nobody stated "
        "NCCL's bus bandwidth",
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


def implausible(gpu: Gpu) -> Iterator[tuple[str, str]]:
    """Yield the fields of a GPU that cannot be as they are, and what to do; of those in the table there are none.

    >>> list(implausible(find("H100")))
    []
    """
    links = gpu.nvlink_bytes_per_s or gpu.pcie_bytes_per_s
    per_byte, whole_s = gpu.fp16_flops_per_s / gpu.memory_bytes_per_s, gpu.memory_bytes / gpu.memory_bytes_per_s
    if gpu.fp16_flops_per_s < gpu.fp32_flops_per_s:
        yield "fp16_flops_per_s", "less than of float32; write the same where products of halves are no quicker"
    if gpu.bf16_flops_per_s is not None and gpu.bf16_flops_per_s < gpu.fp32_flops_per_s:
        yield "bf16_flops_per_s", "less than of float32; leave it out if the GPU does not compute in bfloat16"
    if not _PER_BYTE[0] <= per_byte <= _PER_BYTE[1]:
        yield "memory_bytes_per_s", f"{per_byte:.3g} operations for each byte; write what the data sheet has of both"
    if not _WHOLE_S[0] <= whole_s <= _WHOLE_S[1]:
        yield "memory_bytes", f"all of it would be read in {whole_s:.3g} s; write a single GPU's memory and bandwidth"
    if 0 < gpu.nvlink_bytes_per_s <= gpu.pcie_bytes_per_s:
        yield "nvlink_bytes_per_s", "no more than to the host; leave it out where GPUs are joined by nothing else"
    if (gpu.peer_bytes_per_s or 0.0) > links:
        yield "peer_bytes_per_s", "more than all its links carry; write what one other GPU can be sent"
    if (gpu.collective_bytes_per_s or 0.0) > links:
        yield "collective_bytes_per_s", "more than its links carry in one direction; write nccl-tests' bus bandwidth"


_PER_BYTE, _WHOLE_S = (4, 4000), (1e-3, 1.0)
"""Operations of a half-precision product for each byte of memory, and seconds to read all of it: what GPUs have."""


def power_of(device: Device) -> float | None:
    """Return the watts of a device's board: what its cluster says, or what is known of its type; None where neither is.

    >>> power_of(Device(type="H100-SXM", memory_bytes=1)), power_of(Device(type="cpu", memory_bytes=1))
    (700, None)
    """
    known = _by_name(GPUS).get(_plain(device.type))
    return device.power_w if device.power_w is not None or known is None else known.power_w


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name).casefold()


@lru_cache(maxsize=4)
def _by_name(gpus: tuple[Gpu, ...]) -> dict[str, Gpu]:
    return {_plain(name): gpu for gpu in gpus for name in (gpu.name, *gpu.aliases)}
