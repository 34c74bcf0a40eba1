"""ProbeOptions: what the user asks of measured links."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.options.option import Options, option


@dataclass(frozen=True)
class ProbeOptions(Options):
    """What the user asks of measured links.

    Raises:
        UsageError: a value is out of range.
    """

    ranks: int | None = option(
        None, "Local ranks to start; default: the number of GPUs, or 2. Not under torchrun.", least=2
    )
    device: str = option("auto", "auto, cpu or cuda.")
    threads: int = option(1, "Threads per rank on the CPU.", least=1)
    quick: bool = option(False, "In fewer rounds, and no overlap.")
    largest_bytes: int | None = option(
        None,
        "Largest message; default: 64MiB between CPUs, 1GiB between GPUs. Messages of 12 sizes start at 1 KiB.",
        unit="bytes",
        least=16 * 2**10,
        most=64 * 2**30,
    )
