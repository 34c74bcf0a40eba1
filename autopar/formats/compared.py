"""Compared: one planner's plan in a comparison."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Compared"]


class Compared(NamedTuple):
    """A plan by what tells it from others; of one that does not fit, what it would need."""

    name: str
    """Whose plan it is."""
    stages: str | None = None
    """In the form that ``autopar plan --stages`` takes."""
    micro_batches: int | None = None
    schedule: str | None = None
    step_s: float | None = None
    """None where it cannot be run."""
    peak_bytes: int | None = None
    """Of the stage that needs most."""
    infeasible: str | None = None
    """Why it cannot be run."""
