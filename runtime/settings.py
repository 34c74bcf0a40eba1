"""TrainSettings: how ranks train, apart from what the plan says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, get_args

from autopar.errors import UsageError

__all__ = ["Last", "TrainSettings"]

Last = Literal["drop", "pad"]
"""What becomes of an epoch's last mini-batch where samples do not fill it: it is left out, or filled up with the
epoch's first samples."""


@dataclass(frozen=True)
class TrainSettings:
    """What the user asks of training, the same on all ranks.

    Raises:
        UsageError: a value is out of range.
    """

    clip_norm: float | None = None
    """Largest norm of all gradients together; larger ones are scaled down to it."""
    cpu_offload: bool = False
    """Whether what replicas divide waits in the host's memory."""

    last: Last = "drop"
    deferred_batch_norm: bool = False
    """Whether running statistics of batch normalisation are updated once per mini-batch."""
    sync_batch_norm: bool = False
    """Whether batch normalisation takes the statistics of whole micro-batches that replicas divide."""
    compile: bool = False
    """Whether layers are compiled (``torch.compile``)."""

    time_layers: bool = False
    """Whether the layers inside stages are timed in the first steps."""
    double: bool = False
    """Whether parameters, buffers and inputs are cast to float64, as ``autopar verify`` has it."""

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UsageError(f"--clip-norm must be positive, found {self.clip_norm}")
        if self.deferred_batch_norm and self.sync_batch_norm:
            raise UsageError("--deferred-batch-norm and --sync-batch-norm exclude each other; choose one")

        if self.last not in get_args(Last):
            raise UsageError(f"--last must be one of {', '.join(get_args(Last))}; found {self.last!r}")

    def as_dict(self) -> dict[str, object]:
        """Return the settings as JSON-able data, which the constructor takes back."""
        return asdict(self)
