"""ProfileOptions: what is measured, and how."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import UsageError
from autopar.formats.profile import Precision

MOST = 2**31 - 1


@dataclass(frozen=True)
class ProfileOptions:
    """How to measure."""

    batch: int = 64
    """Samples per step: the largest micro-batch that is measured."""
    device: str = "auto"
    threads: int = 1
    """Threads per rank on the CPU."""
    seed: int = 0
    budget_s: float = 10.0
    """Seconds to spend on timing layers, about."""
    precision: Precision | None = None
    """``bf16`` or ``fp16``: float32 parameters, layers under autocast; none: as the parameters are."""
    compile: bool = False
    """Whether layers are compiled with ``torch.compile``."""

    accept_loss: bool = False
    """Whether a loss is taken that depends on how a mini-batch is divided."""

    def __post_init__(self) -> None:
        """Refuse numbers that nothing can be measured with.

        Raises:
            UsageError: names the option.
        """
        for name, value in (("`batch`", self.batch), ("`threads`", self.threads)):
            if not 1 <= value <= MOST:
                raise UsageError(f"{name} must be at least 1 and below 2^31, found {value}")
