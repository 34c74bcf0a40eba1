"""Compared: one planner's plan in a comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class VirtualStage:
    """One device of a virtual worker."""

    layers: str
    """Positions in the profile, such as ``0-5``."""
    device: int
    """Index into the cluster's devices."""
    type: str
    """Of the device, as the profile names it."""
    in_flight: int
    stage_s: float
    """Of one micro-batch: forward, backward, and receiving its activations and gradients."""
    peak_bytes: int


@dataclass(frozen=True)
class VirtualWorker:
    """A pipeline with one device a stage."""

    stages: tuple[VirtualStage, ...]
    samples_per_s: float
    """That its slowest stage, and the micro-batches in flight, let through when it waits for no other worker."""


@dataclass(frozen=True)
class VirtualWorkers:
    """HetPipe's partition of a cluster: pipelines that cut the layers each in its own way, and share the data."""

    policy: str
    """How devices were dealt: ``NP``, ``ED`` or ``HD``."""
    in_flight: int
    """Micro-batches in a worker's pipeline at once."""
    workers: tuple[VirtualWorker, ...]
    samples_per_s: float
    """Of all together, the quicker ones waiting for the slowest; without reducing gradients."""


class Compared(NamedTuple):
    """A plan by what tells it from others; of one that does not fit, what it would need."""

    name: str
    """Whose plan it is."""
    stages: str | None = None
    """In the form that ``autopar plan --stages`` takes; none of virtual workers that cut differently."""
    micro_batches: int | None = None
    schedule: str | None = None
    step_s: float | None = None
    """None where it cannot be run."""
    peak_bytes: int | None = None
    """Of the stage that needs most."""
    infeasible: str | None = None
    """Why it cannot be run."""
    virtual_workers: VirtualWorkers | None = None
