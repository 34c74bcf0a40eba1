"""TrainSettings: how ranks train, apart from what the plan says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, get_args

from autopar.errors import UsageError

__all__ = ["DEFAULT_STEPS", "Last", "TrainSettings", "known_steps"]

DEFAULT_STEPS = 20

Last = Literal["drop", "pad"]
"""What becomes of an epoch's last mini-batch where samples do not fill it: it is left out, or filled up with the
epoch's first samples."""


def known_steps(steps: int | None, epochs: int | None) -> int | None:
    """Return the optimizer steps to train; None where the dataset decides, by ``epochs``.

    Raises:
        UsageError: both are asked for.
    """
    if epochs is None:
        return DEFAULT_STEPS if steps is None else steps
    if steps is not None:
        raise UsageError(f"`epochs={epochs}` and `steps={steps}` contradict each other; give one")
    return None


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
            raise UsageError(f"`clip_norm` must be positive, found {self.clip_norm}")
        if self.deferred_batch_norm and self.sync_batch_norm:
            raise UsageError("`deferred_batch_norm` and `sync_batch_norm` exclude each other; choose one")

        if self.last not in get_args(Last):
            raise UsageError(f"`last` must be one of {', '.join(get_args(Last))}; found {self.last!r}")

    def as_dict(self) -> dict[str, object]:
        """Return the settings as JSON-able data, which the constructor takes back."""
        return asdict(self)
