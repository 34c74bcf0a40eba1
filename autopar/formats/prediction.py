"""Prediction: what is predicted of a plan's step, what bounds it, and the alternatives that were considered."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from autopar.formats.document import Bytes, Count, Index, Name, Provenance, Record, Seconds, SparseRecord, fault

Fraction = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0)]
Term = Literal["compute", "round trip", "link", "filling", "synchronisation", "update", "overhead"]


class Price(Record):
    """What a step costs on the devices that are used, in the cluster's currency."""

    per_hour: float = Field(gt=0)
    """Of all devices that are used."""
    per_step: float = Field(ge=0)
    """Of one step."""
    per_million_samples: float = Field(ge=0)
    """Of training a million samples."""
    lower_bound_per_step: float = Field(ge=0)
    """No plan that was searched, on any of the devices and within the deadline, costs less."""
    deadline_s: Seconds | None = None
    """No step was to take longer; null: however long it takes."""


class Training(SparseRecord):
    """What it takes to train on so many samples, each step as long as one is predicted to be, or was measured."""

    LEFT_OUT: ClassVar[tuple[str, ...]] = ("tokens", "energy_kwh", "cost")

    samples: Amount
    """How many."""
    tokens: Amount | None = None
    """How many these have; none where samples are no sequences."""
    duration_s: Amount
    """``samples / samples_per_s``."""
    device_hours: Amount
    """``devices x duration_s / 3600``."""
    energy_kwh: Amount | None = None
    """``power_w x duration_s / 3,600,000``, without hosts and cooling; none where no power is known."""
    cost: Amount | None = None
    """``price_per_hour x duration_s / 3600``; none where no price is known."""


class Throughput(SparseRecord):
    """What a step is in the units of whoever plans a training; ``planner/throughput.py`` says how each follows."""

    LEFT_OUT: ClassVar[tuple[str, ...]] = (
        *("tokens_per_sample", "tokens_per_s", "tokens_per_s_per_device"),
        *("model_flops", "peak_flops_per_s", "flops_utilisation", "power_w", "price_per_hour"),
        "whole",
    )

    devices: Count
    """How many the plan uses; of idle ones nothing counts."""
    samples_per_s: Amount
    """``batch / step_s``."""
    samples_per_s_per_device: Amount
    """``samples_per_s / devices``."""
    tokens_per_sample: Count | None = None
    """As the model's inputs have them, or as it was said; none where samples are no sequences."""
    tokens_per_s: Amount | None = None
    """``tokens_per_sample x samples_per_s``."""
    tokens_per_s_per_device: Amount | None = None
    """``tokens_per_s / devices``."""
    model_flops: Amount | None = None
    """Of a step: the products of its forwards and backwards, each once, whatever is recomputed; none where the profile
    does not count them."""
    peak_flops_per_s: Amount | None = None
    """Of all devices that are used, in the plan's precision; none where one's is not known, as of a CPU."""
    flops_utilisation: Amount | None = None
    """``model_flops / (step_s x peak_flops_per_s)``."""
    power_w: Amount | None = None
    """Of the boards of all devices that are used, under load; none where one's is not known."""
    price_per_hour: Amount | None = None
    """Of all devices that are used; none where one has no price."""
    unit: Training
    """Of a billion tokens or, where samples are no sequences, of a million samples."""
    whole: Training | None = None
    """Of the training whose length was asked for."""


class Bounds(Record):
    """Lower bounds of every searched plan's step, each knowing more; the last is ``Prediction.lower_bound_s``.

    Only the first bounds plans with several stages a device, and is that of such a plan.
    """

    work_s: Seconds
    """Every device computes without pause."""
    contiguous_s: Seconds
    """Consecutive layers in stages; links cost nothing, and memory has no limit."""
    linked_s: Seconds
    """With transfers and the synchronisation of gradients."""


class BoundPart(Record):
    """A part of the plan's own lower bound; the largest is what binds."""

    term: Term
    """``compute``: all that a stage computes in a step; ``round trip``: of a micro-batch from the stage to the last one
    and back, as often as those in flight leave to wait for; ``link``: the messages across the boundary behind the
    stage; ``filling``: the first micro-batch's way to the stage and the last one's way back; ``synchronisation``: of
    the stage's gradients, as far as no backward hides it; ``update``: its optimizer's step; ``overhead``: of the step.
    """
    stage: Index
    """Counted from 0."""
    seconds: Seconds
    """Of the bound."""
    full: bool = False
    """Of a round trip: whether the stage's memory holds no more micro-batches in flight."""


class Shares(Record):
    """Shares of the ranks' time in a step; they sum to 1."""

    computing: Fraction
    """Forwards, backwards and updates."""
    messages: Fraction
    """Waiting for a message that is under way."""
    reduction: Fraction
    """Waiting for the reduction of gradients."""
    idle: Fraction
    """The rest: waiting for what others compute, and the step's overhead."""


class Prediction(SparseRecord):
    """What the simulator says of the plan."""

    LEFT_OUT: ClassVar[tuple[str, ...]] = ("throughput",)

    step_s: Seconds
    """Of an asynchronous pipeline (``weight_policy`` ``stash``): seconds per mini-batch, once it is filled."""
    lower_bound_s: Seconds
    """No plan that was searched, under any searched schedule, takes less; 0 where nothing is proved of it. If the
    objective is the price, what it may cost at least, in seconds of the plan's devices."""
    objective_s: Seconds | None = None
    """What ``pipedream`` (per mini-batch) or ``piper`` (per micro-batch) minimises, by its own formulas."""
    price: Price | None = None
    """If the objective is the price."""
    bubble: float = Field(ge=0, le=1)
    """Share of the ranks' time in a step in which they compute nothing."""
    peak_bytes: tuple[Bytes, ...]
    """Per stage, of the replica with the least room: of one kind of device, the largest."""
    limit_bytes: tuple[Bytes, ...] = ()
    """Per stage, the memory of that replica's smallest device; empty where unknown."""
    forward_s: tuple[Seconds, ...] = ()
    """Of one micro-batch, by stage."""
    backward_s: tuple[Seconds, ...] = ()
    """Per stage, of one micro-batch on its busiest replica; empty where unknown."""
    compute: tuple[Provenance, ...] = ()
    """Per stage, where these times come from; empty where unknown."""
    communication: Provenance | None = None
    """Where the times of messages and reductions come from; none where nothing is communicated."""
    loading_s: Seconds | None = None
    """In which one process reads and collates a mini-batch; null where the profile does not say. ``step_s`` has it in
    it as far as ranks that load for themselves do nothing meanwhile; loaders read while ranks compute."""
    bounds: Bounds | None = None
    """Weaker bounds than ``lower_bound_s``; none where unknown."""
    binding: tuple[BoundPart, ...] = ()
    """What the plan's own bound is the sum of, largest first; empty where unknown."""
    shares: Shares | None = None
    """None where no timeline was predicted."""
    throughput: Throughput | None = None
    """Where the length of a training was asked for; `autopar show` tells it of any plan."""

    @property
    def fullness(self) -> tuple[float, ...]:
        """Per stage, the peak's share of the limit; where there are no limits, which orders stages alike, the peak."""
        limits = self.limit_bytes or (1,) * len(self.peak_bytes)
        return tuple(peak / max(limit, 1) for peak, limit in zip(self.peak_bytes, limits, strict=True))


class Alternative(Record):
    """Another plan that was considered: its predicted step time, or why it cannot be."""

    name: Name
    """What it is called."""
    step_s: Seconds | None = None
    """Predicted seconds per step; null: it cannot be run."""
    infeasible: Name | None = None
    """Why it does not fit."""
    price_per_step: Annotated[float, Field(ge=0)] | None = None
    """What the step costs, if the objective is the price."""
    stages: Annotated[str, Field(min_length=1, max_length=2**20)] | None = None
    """In the form that ``autopar plan --stages`` takes."""
    micro_batches: Count | None = None
    """Micro-batches of a step."""
    schedule: Name | None = None
    """The rule that orders forwards and backwards."""
    excluded: Name | None = None
    """The option that excludes it; none where it could have been chosen."""

    @model_validator(mode="after")
    def _one_outcome(self) -> Self:
        if (self.step_s is None) == (self.infeasible is None):
            fault("step_s", "exactly one of step_s and infeasible must be given")
        return self


HELD_FOR = (
    "parameters and buffers",
    "optimizer state",
    "weight versions",
    "gradients",
    "inputs",
    "messages",
    "activations",
    "computing",
    "update",
)
"""What ranks hold memory for. ``optimizer state``: with an average of the weights; ``weight versions``: older ones, and
gradients of further mini-batches; ``inputs``: of the model, a mini-batch's; ``activations``: of micro-batches in
flight, but for the one in ``computing``, which counts with the most that its forward or backward holds; ``messages``:
received ahead, and sent but maybe not arrived; ``update``: what the optimizer's step holds for a while."""


class HeldBytes(NamedTuple):
    """What a rank holds over a step, by cause."""

    times_s: tuple[float, ...]
    """When it changes."""
    causes: dict[str, tuple[int, ...]]
    """Bytes from each of these moments on, by those of :data:`HELD_FOR` that are held at all."""
    limit_bytes: int | None = None
    """What there is for all."""

    @property
    def totals(self) -> tuple[int, ...]:
        """All bytes from each moment on."""
        return tuple(map(sum, zip(*self.causes.values(), strict=True)))


class MetPlan(NamedTuple):
    """A plan that the search met, as far as it is kept: the fastest of its kind."""

    step_s: float
    """Of one that is not the fastest of its number of stages, it may be a lower bound."""
    simplicity: tuple[int, ...]
    """What makes it hard to use, what counts most first; less is simpler. See :data:`SIMPLICITY`."""
    micro_batches: int
    """Of a step."""


SIMPLICITY = (
    "several kinds a stage",
    "stages across nodes",
    "tensor degrees",
    "unequal widths",
    "unequal shares",
    "replicas in turns",
    "sharded",
    "other schedules",
    "stages",
    "recomputed layers",
)
"""What is counted of a plan: of two numbers of replicas or more, how many there are."""
