"""Result: what a rank brings back from a training run; plain data."""

from __future__ import annotations

from typing import TypedDict

from autopar.runtime.weights import StoredFile

__all__ = ["RankResult", "StepResults"]


class StepResults(TypedDict):
    """What its steps gave; lists are by step."""

    loss: list[float]
    count: list[float]
    starts_s: list[float]
    ends_s: list[float]
    times_s: dict[str, list[tuple[float, float]]]
    """Step -> start and end of every action, for the last steps."""
    gradient_norm: list[float | None]
    overflowed: list[bool]
    layers_s: dict[str, tuple[float, float]]
    """Layer -> median seconds forward and backward, where layers were timed."""
    forward_flops: int
    """Of all forwards of a step, where the device's peak is known."""
    peak_flops_per_s: float | None


class RankResult(StepResults):
    """All of it."""

    rank: int
    stages: list[int]
    replica: int
    backend: str
    """What carried tensors between the ranks."""
    peak_bytes: int
    peak_kind: str
    samples: int
    """In the dataset; 0 where this rank does not read it."""
    notes: list[str]
    """What whoever reads the report should know."""
    saved: list[StoredFile]
    """Files of trained weights that this rank wrote."""
