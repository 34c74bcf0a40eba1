"""Verified: how a plan's ranks and the plain loop compare."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Difference:
    """The largest difference between what the ranks and what the plain loop made of one kind."""

    what: str
    """``losses``, ``gradients``, ``parameters`` or ``buffers``."""
    compared: int
    """How many tensors, on all ranks that hold them, or losses."""
    largest: float | None
    """In the unit of ``allowed``; None where it is no number: one side has no value, or none that is finite."""
    where: str
    """The tensor and the rank, or the step."""
    allowed: float
    unit: str
    """What differences are divided by."""

    @property
    def equal(self) -> bool:
        """Whether nothing differs by more than is allowed."""
        return self.largest is not None and self.largest <= self.allowed


@dataclass(frozen=True)
class Verified:
    """What ``autopar verify`` found."""

    steps: int
    ranks: int
    computed: str
    """The type that both computed in, such as ``float64``."""
    rounding: str
    """Where the allowed differences are from."""
    differences: tuple[Difference, ...]
    by_choice: tuple[str, ...] = ()
    """What the plan lets differ from training without replicas."""
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether the ranks trained what the plain loop trained."""
        return all(each.equal for each in self.differences)

    def as_dict(self) -> dict[str, object]:
        """Return all of it as JSON-able data."""
        differences = [{**asdict(each), "equal": each.equal} for each in self.differences]
        return {"equal": self.equal, **asdict(self), "differences": differences}
