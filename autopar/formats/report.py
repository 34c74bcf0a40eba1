"""Reports: what a training run did, or did last; how planners' plans compare, and how ranks and the plain loop do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from autopar.formats.document import (
    Bytes,
    Count,
    Document,
    Index,
    Name,
    Provenance,
    Record,
    Seconds,
    SparseRecord,
    Text,
)
from autopar.formats.plan import Plan
from autopar.formats.prediction import Throughput
from autopar.ownership import Division

_Ratio = Annotated[float, Field(ge=0)]


class StepTimes(Record):
    """Distribution of measured step times.

    A step lasts from the end of the one before it, on the slowest rank, to its own end there; on a GPU, of its last
    action. The first step is left out where there are others: it allocates memory, builds the optimizer's state and
    opens connections. No other is: outliers show in ``p90`` and ``longest``, and move no median.
    """

    median: Seconds
    """Half of the steps are shorter."""
    p10: Seconds
    """A tenth of the steps are shorter."""
    p90: Seconds
    """Nine tenths are shorter."""
    longest: Seconds | None = None
    """The longest of them."""
    first: Seconds | None = None
    """The first step."""


class RankTimes(Record):
    """Where one rank's time went in a step of median length; the seconds sum to that step.

    Where two go on at once, the one that stands first here counts. What a rank that is ahead does of the next step
    meanwhile counts, too.
    """

    rank: Index
    """Counted from 0."""
    stages: tuple[Index, ...] = Field(min_length=1)
    """Those that it runs, counted from 0."""
    replica: Index
    """Which replica of its stages it is, from 0."""
    compute_s: Seconds
    """Forwards and backwards, with what they recompute."""
    loading_s: Seconds = 0.0
    """Waiting for a mini-batch, and nothing to compute meanwhile."""
    update_s: Seconds
    """The optimizer's step, with what ranks tell each other there."""
    reduce_s: Seconds = 0.0
    """Blocked in reductions of gradients, as far as no backward hides them."""
    waiting_s: Seconds
    """Blocked in receives before the peer began to send: it still computed."""
    transfer_s: Seconds = 0.0
    """Blocked in receives after that, and handing messages over."""
    idle_s: Seconds = 0.0
    """The rest: what ranks do between actions."""
    in_flight: tuple[Index, ...] = ()
    """By stage, the most micro-batches that were in flight."""
    predicted_in_flight: tuple[Index, ...] = ()
    """By stage, as planned."""


class KindTimes(Record):
    """How long the actions of one kind take by themselves, over what was predicted of them.

    A reduction counts from when its last rank has come, a message from its send to its arrival, and only where the
    receiver was waiting for it already and no message of the same queue was still under way. An update of a run that
    clips, scales or counts waits for all ranks. An action takes its median over the recorded steps, the last 32, but
    the first; the medians here are over actions.
    """

    kind: Literal["F", "B", "I", "W", "S", "SG", "A", "T", "U"]
    """As in a program: a message under its send."""
    actions: Count
    """How many could be compared."""
    measured_s: Seconds
    """Median over its actions."""
    predicted_s: Seconds
    """Likewise, as predicted."""
    ratio: _Ratio
    """Median over the actions of measured over predicted."""


class CauseTimes(Record):
    """What a step's critical path is spent on: the one way through a step that nothing was waited for.

    From the end of a step backwards: an action waited for the one before it on its rank, for the message that it
    received, or for the last rank of its reduction. Causes add up to the step, and their differences to the error of
    the prediction. The two ways may lead over different ranks: where a cause is longer and another shorter by as much,
    a rank was waited for that was not predicted to be.
    """

    cause: Name
    """``forwards``, ``backwards`` with what they recompute, ``messages`` that were waited for, ``reductions``,
    ``updates``, ``loading`` of mini-batches, and what lies ``between actions``."""
    measured_s: float
    """Less than 0 between actions where a step begins before the one before it has ended on all ranks."""
    predicted_s: float
    """Of the predicted step."""


class LoadingTimes(Record):
    """What reading samples and collating them took."""

    loaders: Index
    """Processes of a host that did so ahead of its ranks; 0: ranks did so themselves."""
    waiting_s: Seconds
    """In a step of median length, what the rank waited that waited longest, with nothing to compute."""
    work_s: Seconds
    """The seconds of reading and collating of a step, median, on the host that has most of it."""
    loaders_needed: Index = 0
    """How many loaders would keep up with the steps; 0 where nobody waited for long."""


class CheckpointTimes(Record):
    """The checkpoints that a run has saved."""

    steps: tuple[Count, ...]
    """After how many steps, counted from the run's first."""
    failures: tuple[Text, ...] = ()
    """Those that could not be written, and why."""
    pause_s: Seconds
    """How long training waited for one, on the slowest rank; median."""
    busy_s: Seconds
    """What writing one took of a processor beside training; likewise."""
    buffers_bytes: tuple[Bytes, ...]
    """Per rank, what copies take of the host's memory."""


class Evaluated(Record):
    """The loss of the model file's ``evaluation_dataset()`` between steps."""

    step: Count
    """Steps trained, counted from the run's first."""
    loss: float
    """In evaluation mode, the mean over all samples."""


class Report(SparseRecord, Document):
    """Outcome of ``autopar run``.

    The prediction is the simulated timeline of the plan, from the profile and the cluster that it records. Where they
    are gone, or no longer what they were, forwards and backwards are compared with the plan's own times of every
    stage's busiest replica, and a note says so.
    """

    LEFT_OUT: ClassVar[tuple[str, ...]] = ("throughput",)

    format: Literal["autopar.report"] = "autopar.report"
    version: Literal[1] = 1
    model: Name
    """Where its code is."""
    plan_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the plan's file."""
    device: Name
    """What ranks computed on."""
    backend: Name
    """What carried tensors between ranks, such as ``gloo`` or ``nccl``."""
    torch: Name
    """The version of torch."""
    ranks: Count
    """How many ranks there were."""
    steps: Index
    """Trained by this attempt."""
    first_step: Index = 0
    """The number of the first of them, counted from the run's first; not 0 where it went on from a checkpoint."""
    loss: tuple[float, ...]
    """Of every step, the mini-batch's mean."""
    losses: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    """Of a loss with names, every term of every step, and the figures under ``log``."""
    evaluations: tuple[Evaluated, ...] = ()
    """Those of ``eval_every``."""
    gradient_norm: tuple[Annotated[float, Field(ge=0)] | None, ...] = ()
    """Per step, of all gradients before they were clipped, where it was needed; none of a step that overflowed."""
    overflows: Index = 0
    """Steps whose scaled gradients were not finite, and which updated nothing (float16)."""
    step_s: StepTimes
    """How long steps took."""
    predicted_step_s: Seconds
    """As planned; with loaders, as far as they are known to keep up."""
    error: float
    """Predicted over measured median, less one."""
    predicted_compute: Provenance | None = None
    """Where the least certain of the prediction's computing times came from."""
    predicted_communication: Provenance | None = None
    """Likewise, of its times of communication."""
    samples_per_s: float = Field(ge=0)
    """The batch over the median step."""
    peak_bytes: tuple[Bytes, ...]
    """Per rank: the most memory held; see ``peak_kind``."""
    peak_kind: Literal["resident", "allocated"]
    """``resident``: growth of the process's resident set since before the stage was built (CPU); ``allocated``: what
    CUDA's allocator held."""
    predicted_peak_bytes: tuple[Bytes, ...] = ()
    """Per rank, as planned: parameters, gradients, the optimizer's state and activations, and of a GPU what its context
    takes. A process grows by more than that; CUDA's allocator does not see the context."""
    bubble: float = Field(ge=0, le=1)
    """Share of all ranks' time in neither ``compute_s`` nor ``update_s``."""
    rank_times: tuple[RankTimes, ...]
    """Where every rank's time went."""
    kinds: tuple[KindTimes, ...] = ()
    """Measured over predicted by kind of action; empty where nothing was predicted of single actions."""
    causes: tuple[CauseTimes, ...] = ()
    """What a step of median length and the predicted one were spent on; empty like ``kinds``."""
    loading: LoadingTimes | None = None
    """How mini-batches were loaded."""
    model_flops: float | None = Field(default=None, ge=0)
    """Of a step: three times the operations of forwards, whatever is recomputed; null where the devices' peak is not
    known, as of CPUs. Peaks are those of the known GPUs in the plan's precision."""
    flops_utilisation: float | None = Field(default=None, ge=0)
    """``model_flops`` over what the devices' peak makes of a median step."""
    throughput: Throughput | None = None
    """What a median step is in tokens, hours and cost, as the plan's profile and cluster tell it; none where they do
    not, or are gone."""
    initial_weights: Name
    """Where they are from."""
    checkpoints: CheckpointTimes | None = None
    """Those that were saved; null: none was asked for."""
    notes: tuple[Text, ...] = ()
    """What a reader should know."""


class ComparisonRow(NamedTuple):
    """A plan by what tells it from others; of one that does not fit, what it would need."""

    name: str
    """Whose plan it is."""
    stages: str | None = None
    """In the form that ``autopar plan --stages`` takes; none of what no plan says."""
    micro_batches: int | None = None
    """Micro-batches of a step."""
    schedule: str | None = None
    """The rule that orders forwards and backwards."""
    step_s: float | None = None
    """None where it cannot be run."""
    peak_bytes: int | None = None
    """Of the stage that needs most."""
    infeasible: str | None = None
    """Why it cannot be run."""
    division: Division | None = None
    """How all replicas share the work; none where stages differ, or where there is one of each."""
    throughput: Throughput | None = None
    """What its step is in tokens, utilisation, hours and cost; none where none of them is known."""
    priced: str | None = None
    """Of parameters on servers, which are priced and not run: how much of the step is spent on which link."""
    waves: str | None = None
    """Of several pipelines, which are never flushed: how many there are, and their waves. A step is then the time in
    which they train as many samples together as one mini-batch has."""

    def as_dict(self) -> dict[str, object]:
        """Return it as JSON has it, without what only some rows have where this one has it not."""
        of_some = {name for name in ("throughput", "priced", "waves") if getattr(self, name) is None}
        found = {name: value for name, value in self._asdict().items() if name not in of_some}
        if self.throughput is not None:
            found["throughput"] = self.throughput.model_dump(mode="json")
        return found


class Comparison(NamedTuple):
    """autopar's plan beside those of others."""

    rows: tuple[ComparisonRow, ...]
    """Fastest first; behind them what is priced and not run, and last what fits no memory or cannot be."""
    plan: Plan
    """autopar's own."""


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
    """The largest that counts as equal."""
    unit: str
    """What differences are divided by."""

    @property
    def equal(self) -> bool:
        """Whether nothing differs by more than is allowed."""
        return self.largest is not None and self.largest <= self.allowed


@dataclass(frozen=True)
class Verification:
    """What ``autopar verify`` found."""

    steps: int
    """How many were trained."""
    ranks: int
    """How many there were."""
    computed: str
    """The type that both computed in, such as ``float64``."""
    rounding: str
    """Where the allowed differences are from."""
    differences: tuple[Difference, ...]
    """By what was compared."""
    by_choice: tuple[str, ...] = ()
    """What the plan lets differ from training without replicas."""
    notes: tuple[str, ...] = ()
    """What a reader should know."""

    @property
    def equal(self) -> bool:
        """Whether the ranks trained what the plain loop trained."""
        return all(each.equal for each in self.differences)

    def as_dict(self) -> dict[str, object]:
        differences = [{**asdict(each), "equal": each.equal} for each in self.differences]
        return {"equal": self.equal, **asdict(self), "differences": differences}


class BeganAction(Record):
    """An action that a rank had begun."""

    step: Index
    """From the run's first."""
    action: Name
    """As in a program's text, with the stage: ``B2@1``."""
    before_s: Seconds
    """How long before the failure was noticed."""


class RankActions(Record):
    """A rank's last actions, oldest first."""

    rank: Index
    """Counted from 0."""
    doing: Name
    """What it was doing when the failure was noticed, in words."""
    actions: tuple[BeganAction, ...] = ()
    """Oldest first."""


class BlackBox(Document):
    """What the ranks of a host had last done when a run failed."""

    format: Literal["autopar.blackbox"] = "autopar.blackbox"
    version: Literal[1] = 1
    message: Text
    """What was said of the failure."""
    date: Name
    """When it was noticed: UTC, ISO 8601."""
    ranks: tuple[RankActions, ...] = Field(min_length=1)
    """Those of the host."""
