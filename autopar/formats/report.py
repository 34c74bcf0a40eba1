"""Report: what a training run did, and how close the prediction was."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from autopar.formats.document import Bytes, Count, Document, Index, Name, Provenance, Record, Seconds

Ratio = Annotated[float, Field(ge=0)]


class StepTimes(Record):
    """Distribution of measured step times.

    The first step is left out where there are others: it allocates memory, builds the optimizer's state and opens
    connections. No other is: outliers show in ``p90`` and ``longest``, and move no median.
    """

    median: Seconds
    p10: Seconds
    p90: Seconds
    longest: Seconds | None = None
    first: Seconds | None = None


class RankTimes(Record):
    """Where one rank's time went in a step of median length; the seconds sum to that step.

    The step lasts from the end of the one before it, on the slowest rank, to its own end there: what a rank that is
    ahead does of the next step meanwhile counts, too.
    """

    rank: Index
    stages: tuple[Index, ...] = Field(min_length=1)
    replica: Index
    compute_s: Seconds
    """Forwards and backwards, with what they recompute."""
    update_s: Seconds
    """The optimizer's step, with what ranks tell each other there."""
    reduce_s: Seconds = 0.0
    """Blocked in reductions of gradients, as far as no backward hides them."""
    waiting_s: Seconds
    """Blocked in receives before the peer began to send: it still computed."""
    transfer_s: Seconds = 0.0
    """Blocked in receives after that, and handing messages over."""
    idle_s: Seconds = 0.0
    """The rest: loading mini-batches, and what ranks do between actions."""
    in_flight: tuple[Index, ...] = ()
    """By stage, the most micro-batches that were in flight."""
    predicted_in_flight: tuple[Index, ...] = ()


class KindTimes(Record):
    """How long the actions of one kind take by themselves, over what was predicted of them.

    A reduction counts from when its last rank has come, a message from its send to its arrival. What an action takes is
    its median over the recorded steps but the first; the medians here are over actions.
    """

    kind: Literal["F", "B", "I", "W", "S", "SG", "A", "T", "U"]
    """As in a program: a message under its send."""
    actions: Count
    """How many could be compared."""
    measured_s: Seconds
    predicted_s: Seconds
    ratio: Ratio
    """Median over the actions of measured over predicted."""


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
    predicted_peak_bytes: tuple[Bytes, ...] = ()
    """Per rank, as planned: parameters, gradients, the optimizer's state and activations, and of a GPU what its context
    takes. A process grows by more than that; CUDA's allocator does not see the context."""
    bubble: float = Field(ge=0, le=1)
    rank_times: tuple[RankTimes, ...]
    kinds: tuple[KindTimes, ...] = ()
    """Measured over predicted by kind of action; empty where nothing was predicted of single actions."""
    model_flops: float | None = Field(default=None, ge=0)
    """Of a step: three times what the forwards' products take, whatever is recomputed; none where the devices' peak is
    not known."""
    flops_utilisation: float | None = Field(default=None, ge=0)
    """``model_flops`` over what the devices' peak makes of a median step."""
    initial_weights: Name
    notes: tuple[Name, ...] = ()
