"""Known GPUs as a table, with the sources of their numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.report.table import Table, say

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from autopar.hardware.gpus import Gpu


def render(gpus: Iterable[Gpu], console: Console) -> None:
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
