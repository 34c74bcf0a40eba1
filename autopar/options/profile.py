"""ProfileOptions: what the user asks of a profile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autopar.formats.profile import Precision
from autopar.options.option import Options, option

_LARGEST = 2**31 - 1
_LONGEST_S = 86_400


@dataclass(frozen=True)
class ProfileOptions(Options):
    """What the user asks of a profile.

    Raises:
        UsageError: a value is out of range.
    """

    batch: int = option(64, "Samples per step; the largest micro-batch measured.", least=1, most=_LARGEST)
    device: str = option(
        "auto",
        "auto, cpu, cuda; or a GPU that is not there, such as H100 (`autopar cluster list`); or several kinds of GPUs, "
        "such as H100,A100-80G or cuda,A100-80G; or a cluster's file, such as lab.toml: the kinds that it has.",
    )
    threads: int = option(1, "Threads per rank on the CPU.", least=1, most=_LARGEST)
    precision: Precision | None = option(
        None, "bf16, fp16: float32 parameters, layers under autocast; default: the parameters' own."
    )
    compile: bool = option(False, "Compile every layer with torch.compile; needs a compiler.")
    data: Path | None = option(None, "A Python file whose dataset() feeds an hf: model; default: synthetic inputs.")
    sequence: int | None = option(
        None, "Tokens of a synthetic sample of an hf: model; default: its positions, at most 2048.", least=2
    )
    calibrate_with: Path | None = option(
        None, "Measured runs (CSV) that the estimates for a GPU that is not there are fitted to."
    )
    accept_loss: bool = option(False, "Take a loss that depends on how a mini-batch is divided; plans say so.")
    seed: int = option(0, "Seed for the weights that model() draws.", least=0, most=2**63 - 1)
    tensor: int = option(
        8,
        "Largest team (2, 4 or 8 ranks) of which a profile says what parts of layers cost; 1: none.",
        least=1,
        most=8,
    )
    budget_s: float = option(
        10.0,
        "Seconds for timing layers, about; every micro-batch size runs once however few.",
        unit="seconds",
        above=0,
        most=_LONGEST_S,
    )
