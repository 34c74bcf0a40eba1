"""Report: what a training run did, and how close the prediction was."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from autopar.formats.document import Bytes, Count, Document, Index, Name, Provenance, Record, Seconds

__all__ = ["RankTimes", "Report", "StepTimes"]


class StepTimes(Record):
    """Distribution of measured step times, the first (warm-up) step left out where there are others."""

    median: Seconds
    p10: Seconds
    p90: Seconds


class RankTimes(Record):
    """Where one rank's median step went."""

    rank: Index
    stages: tuple[Index, ...] = Field(min_length=1)
    replica: Index
    compute_s: Seconds
    update_s: Seconds
    waiting_s: Seconds
    """Waiting for messages and reductions, and idle."""


class Report(Document):
    """Outcome of ``autopar run``."""

    KIND: ClassVar[str] = "report"

    format: Literal["autopar.report"] = "autopar.report"
    version: Literal[1] = 1
    model: Name
    plan_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    device: Name
    backend: Name
    torch: Name
    ranks: Count
    steps: Index
    loss: tuple[float, ...]
    gradient_norm: tuple[Annotated[float, Field(ge=0)] | None, ...] = ()
    """Per step, of all gradients before they were clipped, where it was needed; none of a step that overflowed."""
    overflows: Index = 0
    """Steps whose scaled gradients were not finite, and which updated nothing (float16)."""
    step_s: StepTimes
    predicted_step_s: Seconds
    error: float
    """Predicted over measured median, less one."""
    predicted_compute: Provenance | None = None
    """Where the least certain of the prediction's computing times came from."""
    predicted_communication: Provenance | None = None
    samples_per_s: float = Field(ge=0)
    peak_bytes: tuple[Bytes, ...]
    """Per rank: the most memory held; see ``peak_kind``."""
    peak_kind: Literal["resident", "allocated"]
    """``resident``: growth of the process's resident set since before the stage was built (CPU); ``allocated``: what
    CUDA's allocator held."""
    bubble: float = Field(ge=0, le=1)
    rank_times: tuple[RankTimes, ...]
    initial_weights: Name
    notes: tuple[Name, ...] = ()
