"""TrainSettings: how ranks train, apart from what the plan says."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from autopar.errors import UsageError

__all__ = ["TrainSettings"]


@dataclass(frozen=True)
class TrainSettings:
    """What the user asks of training, the same on all ranks.

    Raises:
        UsageError: a value is out of range.
    """

    clip_norm: float | None = None
    """Largest norm of all gradients together; larger ones are scaled down to it."""

    time_layers: bool = False
    """Whether the layers inside stages are timed in the first steps."""

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UsageError(f"--clip-norm must be positive, found {self.clip_norm}")

    def as_dict(self) -> dict[str, object]:
        """Return the settings as JSON-able data, which the constructor takes back."""
        return asdict(self)
