"""Plan: which layers run where, in which order, and what is predicted of that.

A group of devices holds one stage, or several that a schedule runs in turn: its chunks. Groups are numbered in the
order of their first stages. Beside the stages stand the predicted step, what bounds it, and its alternatives.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from autopar.depths import Ahead, StageDepths
from autopar.formats.document import (
    Bytes,
    BytesPerSecond,
    Count,
    Digest,
    Document,
    Index,
    Name,
    Record,
    SparseRecord,
    ascending,
    each_once,
    fault,
)
from autopar.formats.prediction import Alternative, Prediction
from autopar.formats.profile import DeviceType, ModelSource, Precision, Threads
from autopar.formats.stage import (
    LAYOUTS,
    Crossing,
    Layout,
    SharedLayers,
    SharedParameter,
    Stage,
    chunks_of,
    group_of,
    groups_of,
    layout_of,
)
from autopar.ownership import Ownership, shards_of
from autopar.policies import POLICIES, Policy

BY_STAGE = ("peak_bytes", "limit_bytes", "forward_s", "backward_s", "compute")
"""What predictions have a number, or a word, of for every stage."""


def _known_schedule(name: Any) -> str:  # noqa: ANN401
    if isinstance(name, str) and name in LAYOUTS:
        return name
    *most, last = map(repr, LAYOUTS)
    raise PydanticCustomError("schedule", "Input should be {names}", {"names": f"{', '.join(most)} or {last}"})


_ScheduleName = Annotated[str, BeforeValidator(_known_schedule)]
ReplicatedState = Literal["first", "average"]
"""What replicas make alike after every step of buffers that forwards write: those of the first, or their mean."""
UsedWeights = Literal["trained", "average"]
"""Those of the newest step, or their average."""
Objective = Literal["step", "throughput", "cost", "pipedream", "piper"]
"""What a plan is the best of: seconds per step of a synchronous pipeline; seconds per mini-batch of an asynchronous
one; price per sample; and what PipeDream's and Piper's planners minimise."""
if TYPE_CHECKING:
    WeightPolicy = str
else:
    WeightPolicy = Literal[tuple(POLICIES)]


class FileReference(Record):
    """Another file of autopar, as it was when the plan was made."""

    path: Name
    """Relative to the file that holds this record."""
    sha256: Digest
    """Of the file's bytes."""


class NodeDevices(Record):
    """Devices of a node that are alike, and follow each other in the cluster."""

    node: Index
    """Which machine, as of the cluster."""
    type: Name
    """Their kind, as the profile names it; of kinds for which another one's times stand, as the cluster does."""
    memory_bytes: Bytes
    """Of each, all of it."""
    count: Count
    """How many."""


class Plan(SparseRecord, Document):
    """How one step is trained: stages, replicas, micro-batches, schedule."""

    LEFT_OUT: ClassVar[tuple[str, ...]] = (
        "anneal_steps",
        "synchronous_steps",
        "ahead",
        "pipelines",
        "wave",
        "staleness",
        "eager",
        "nodes",
        "times_spread",
        "ema_decay",
        "used_weights",
    )

    format: Literal["autopar.plan"] = "autopar.plan"
    version: Literal[1] = 1
    model: ModelSource
    """Where its code is."""
    profile: FileReference | None = None
    """What it was made of, if that is a file."""
    cluster: FileReference | None = None
    """Likewise, the devices and links."""
    cluster_name: Name | None = None
    """A built-in cluster, such as ``8xH100``, in place of a file."""
    batch: Count
    """Samples of a step."""
    precision: Precision
    """What is computed in; ``bf16`` and ``fp16`` have float32 parameters, under autocast."""
    device_type: DeviceType = "cpu"
    """Type of the devices planned for."""
    nodes: tuple[NodeDevices, ...] = ()
    """The devices planned for, in the cluster's order, with those that no stage is on; ranks are placed by them. None
    in plans of an earlier autopar."""
    threads: Threads = 1
    """Intra-operator threads per rank (CPU), as profiled."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """The run's seed."""
    bytes_per_s: BytesPerSecond | None = None
    """Bandwidth that was assumed of every link in place of the cluster's, if any."""
    times_of: Name | None = None
    """Kind of the profile's devices whose times were let stand for those of kinds that it has none of, if any."""
    divisible: bool = False
    """Whether micro-batches were assumed to divide freely, as planners in papers do; such a plan cannot be run."""
    schedule: _ScheduleName
    """The rule that orders forwards and backwards."""
    objective: Objective = "step"
    """What it is the best of."""
    weight_policy: WeightPolicy = "sync"
    """Which weights forwards and backwards see. But for ``sync``, mini-batches follow each other without a flush, and
    each stage is updated as soon as its gradients are there."""
    anneal_steps: Count | None = None
    """Of ``pipemare``: mini-batches after which rates are no longer reduced."""
    synchronous_steps: int = Field(default=0, ge=0)
    """Of ``pipemare``: mini-batches that are trained with a flush each, before all others."""
    ahead: Ahead = "counted"
    """Of ``predict``: how many updates ahead weights are predicted."""
    pipelines: tuple[Count, ...] = ()
    """Where several pipelines train the model together, each on mini-batches of its own, how many of the stages each
    has, one behind the other: HetPipe's virtual workers. A mini-batch is then one pipeline's, a step one of each."""
    wave: Count | None = None
    """Of ``wsp``: mini-batches of a pipeline behind whose last it pushes what they have changed."""
    staleness: int | None = Field(default=None, ge=0)
    """Of ``wsp``: by how many waves more a pipeline may be ahead of what it has taken of others."""
    eager: bool = False
    """Of ``wsp``: whether pulls take all waves that have come, and log it; else those that the staleness says."""
    ema_decay: float | None = Field(default=None, ge=0, le=1)
    """Where an average of the weights is kept, its share that every step leaves: the rest is the new weights'."""
    used_weights: UsedWeights = "trained"
    """Which weights evaluation, saved weights and exported checkpoints have."""
    micro_batches: Count
    """Micro-batches of a step."""
    micro_batch_size: Count
    """Samples of a micro-batch."""
    stages: tuple[Stage, ...] = Field(min_length=1)
    """In the order of their layers."""
    replicate_state: ReplicatedState | None = None
    """Where replicated layers write buffers, how these are made alike; null: no layer that writes any is replicated."""
    tensors: tuple[Crossing, ...] = ()
    """Those that cross from stage to stage."""
    tied: tuple[SharedParameter, ...] = ()
    """Parameters that several stages use."""
    predicted: Prediction
    """What the simulator says of it."""
    alternatives: tuple[Alternative, ...] = ()
    """Other plans that were considered."""
    ignored_state: tuple[Name, ...] = ()
    """As of the profile."""
    loss_difference: float | None = Field(default=None, ge=0)
    """How far a mini-batch's loss and gradients are from those of its parts, relative, where the user accepts it."""
    times_spread: float | None = Field(default=None, gt=0)
    """How much the profile's times of the same layer spread, over their median, where that is much."""
    counts_labels: bool = False
    """Whether the loss of a Transformers model that is given from Python is taken as a sum over labels and a count."""
    notes: tuple[Name, ...] = ()
    """What a reader should know."""

    @property
    def refusal(self) -> str | None:
        """Why the plan can be neither simulated nor run; None where a program follows from it."""
        shared = next((tied.parameter for tied in self.tied), None)
        why = self.policy.refusal([stage.replication for stage in self.stages], self.micro_batches, shared)
        if why is not None:
            return f"weight policy {self.weight_policy}: {why}"
        for index, stage in enumerate(self.stages):
            if stage.tensor_parallel > 1 and not stage.cuts:
                return (
                    f"stage {index} runs each replica on {stage.tensor_parallel} devices, and does not say how they "
                    "divide it; plan with `objective='step'`"
                )
        return None

    @cached_property
    def ownership(self) -> Ownership:
        """What every rank has of the plan."""
        dims = [stage.sequence_dims for stage in self.stages]
        cut = (each for each in self.tensors if dims[each.producer] and each.name in dims[each.producer])
        by_parts = {(each.producer, consumer) for each in cut for consumer in each.consumers}
        turn_of = partial(self.policy.turn, micro_batches=self.micro_batches)
        return Ownership(self.stages, self.groups, turn_of, by_parts)

    def __copy__(self) -> Self:
        copied = super().__copy__()
        # A copy that is changed has another.
        for name in ("ownership", "separate", "shared_layers"):
            copied.__dict__.pop(name, None)
        return copied

    def cuts_alike(self, tied: SharedParameter) -> bool:
        """Whether the stages that share a parameter have the same parts of it."""
        placed = [self.stages[stage] for stage in tied.stages]
        return len({(stage.tensor_parallel, stage.cut(tied.parameter)) for stage in placed}) == 1

    @property
    def policy(self) -> Policy:
        """Its weight policy."""
        # On GPUs, waves that are sent whole wait in the memory of hosts.
        buffered_of = len(self.pipelines[1:]) if self.device_type == "cpu" else 0
        policy = POLICIES[self.weight_policy]
        return policy.with_waves(self.wave, self.staleness, eager=self.eager, buffered_of=buffered_of)

    @property
    def depths(self) -> list[StageDepths]:
        """How deep every stage is, and how late its updates come."""
        if self.pipelines:
            return [depths for each in self.separate for depths in each.depths]
        in_flight, shared = [stage.warmup for stage in self.stages], [tied.stages for tied in self.tied]
        return self.policy.stage_depths(in_flight, self.micro_batches, shared, self.ahead)

    @property
    def span(self) -> int:
        """How many mini-batches end in a repetition."""
        return self.policy.span(self._periods)

    @property
    def lead(self) -> int:
        """How many mini-batches before the first backward repetitions begin: as many fill the pipeline."""
        return self.policy.lead(self._periods, self.depths)

    @property
    def _periods(self) -> list[int]:
        return [stage.period for stage in self.stages]

    @property
    def caveats(self) -> tuple[str, ...]:
        """What a reader of the plan, or of what it gave, must know."""
        if self.times_spread is None:
            return self.accepted
        spread = (
            f"the profile's times of the same layer spread by {self.times_spread:.0%} of their median, so that "
            "predictions may be as far off; profile again on an idle machine"
        )
        return (*self.accepted, spread)

    @property
    def accepted(self) -> tuple[str, ...]:
        """In what training by the plan may differ from plain training, since the user has accepted it."""
        found = []
        if self.ignored_state:
            names = ", ".join(self.ignored_state)
            found.append(f"Python state is ignored, which forwards change and only log: {names}")
        if self.loss_difference is not None and self.divides:
            found.append(
                f"loss and gradients of a mini-batch differ by {self.loss_difference:.2g} from those of its parts, as "
                "accepted: results depend on micro-batches and shares"
            )
        if self.replicate_state is not None:
            how = {"first": "the first replica's", "average": "the mean of the replicas'"}[self.replicate_state]
            found.append(
                f"after every step, buffers that forwards write are {how}, as asked: one replica would train "
                "differently"
            )
        return tuple(found)

    @property
    def divides(self) -> bool:
        """Whether a mini-batch is divided: into micro-batches, or among replicas that split them."""
        split = any(stage.replicas > 1 and stage.division == "split" for stage in self.stages)
        return self.micro_batches > 1 or split

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices in rank order: the stages' one after the other, each once."""
        return tuple(dict.fromkeys(device for stage in self.stages for device in stage.devices))

    @property
    def places(self) -> tuple[NodeDevices, ...]:
        """Where every rank is, in rank order; empty where the plan does not say."""
        ends = list(accumulate(each.count for each in self.nodes))
        return tuple(self.nodes[bisect_right(ends, device)] for device in self.devices) if ends else ()

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every group of devices: one each, or the chunks that its ranks run in turn."""
        return groups_of([stage.devices for stage in self.stages])

    @property
    def stages_by_pipeline(self) -> tuple[range, ...]:
        """The stages of every pipeline; of a plan with one, all."""
        ends = accumulate(self.pipelines or (len(self.stages),), initial=0)
        return tuple(range(*pair) for pair in pairwise(ends))

    def pipeline_of(self, stage: int) -> int:
        """Return which pipeline a stage is of."""
        return next(at for at, stages in enumerate(self.stages_by_pipeline) if stage in stages)

    def place_of(self, stage: int) -> str:
        """Return a stage in words, with its pipeline where there are several."""
        return f"pipeline {self.pipeline_of(stage)}, stage {stage}" if self.pipelines else f"stage {stage}"

    def tensors_of(self, stage: int) -> tuple[Crossing, ...]:
        """Return the tensors that cross between the stages of a stage's pipeline."""
        own = self.stages_by_pipeline[self.pipeline_of(stage)]
        return tuple(each for each in self.tensors if each.producer in own) if self.pipelines else self.tensors

    def number_of(self, step: int, stage: int) -> int:
        """Return which of the run's mini-batches a stage has in a step: pipelines take them in turn."""
        return step * len(self.stages_by_pipeline) + self.pipeline_of(stage) if self.pipelines else step

    @cached_property
    def separate(self) -> tuple[Self, ...]:
        """Every pipeline as a plan of its own, whose stages count from 0, on the same devices; it alone, if one."""
        return tuple(map(self._alone, self.stages_by_pipeline)) if self.pipelines else (self,)

    def _alone(self, own: range) -> Self:
        some = slice(own.start, own.stop)
        tensors = (each for each in self.tensors if each.producer in own)
        predicted = {name: getattr(self.predicted, name)[some] for name in BY_STAGE}
        return self.model_copy(
            update={
                "pipelines": (),
                "stages": self.stages[some],
                "predicted": self.predicted.model_copy(update=predicted | {"binding": ()}),
                "tensors": tuple(each.moved(-own.start) for each in tensors),
                "tied": tuple(each.moved(-own.start) for each in self.tied if each.stages[0] in own),
            }
        )

    @cached_property
    def shared_layers(self) -> tuple[SharedLayers, ...]:
        """Layers by the ranks that hold them, one of each pipeline, in the model's order; none of a single one."""
        found: dict[tuple[int, ...], list[str]] = {}
        placed: list[dict[str, int]] = []
        for stages in self.stages_by_pipeline if self.pipelines else ():
            ranks = ((self.ownership.holders(stage)[0].rank, self.stages[stage].layers) for stage in stages)
            placed.append({layer: rank for rank, layers in ranks for layer in layers})
        for layer in placed[0] if placed else ():
            found.setdefault(tuple(each[layer] for each in placed), []).append(layer)
        return tuple(SharedLayers(ranks, tuple(layers)) for ranks, layers in found.items())

    @property
    def step_samples(self) -> int:
        """Samples of a step, in which every pipeline has a mini-batch."""
        return self.batch * len(self.stages_by_pipeline)

    @property
    def counts_apart(self) -> bool:
        """Whether each rank that makes losses divides them by what its own mini-batch counts, which it has all of."""
        return self.span > 1 or bool(self.pipelines)

    @property
    def first_pull(self) -> int:
        """How many mini-batches after the pipeline's fill the first comes that pulls."""
        return self.policy.first_pull

    @property
    def early_pulls(self) -> int:
        """How many pulls come before the first that waits for waves of other pipelines."""
        return self.policy.early_pulls

    @classmethod
    def joined(cls, plans: Sequence[Self], **differing: Any) -> Self:  # noqa: ANN401
        """Return a plan of the pipelines of some plans, on different devices; ``differing`` are other fields."""
        first, starts = plans[0], list(accumulate((len(each.stages) for each in plans), initial=0))
        moved = list(zip(plans, starts, strict=False))
        found = {name: tuple(value for each in plans for value in getattr(each.predicted, name)) for name in BY_STAGE}
        own = {
            "pipelines": tuple(len(each.stages) for each in plans),
            "stages": tuple(stage for each in plans for stage in each.stages),
            "tensors": tuple(tensor.moved(start) for each, start in moved for tensor in each.tensors),
            "tied": tuple(tied.moved(start) for each, start in moved for tied in each.tied),
            "predicted": first.predicted.model_copy(update=found | {"binding": ()}),
        }
        return cls(**{name: getattr(first, name) for name in cls.model_fields} | own | differing)

    @model_validator(mode="after")
    def _average_is_kept(self) -> Self:
        if self.used_weights == "average" and self.ema_decay is None:
            fault("used_weights", "there is no average without ema_decay")
        return self

    @model_validator(mode="after")
    def _one_cluster(self) -> Self:
        if self.cluster is not None and self.cluster_name is not None:
            fault("cluster_name", "the plan records a cluster's file, and may not name a built-in one, too")
        return self

    @model_validator(mode="after")
    def _devices_are_placed(self) -> Self:
        count = sum(each.count for each in self.nodes)
        if self.nodes and max(self.devices) >= count:
            fault("nodes", f"a stage is on device {max(self.devices)}, and the nodes have {count}")
        return self

    @model_validator(mode="after")
    def _stages_are_sound(self) -> Self:
        if self.micro_batches * self.micro_batch_size != self.batch:
            product = f"{self.micro_batches} x {self.micro_batch_size}"
            fault("micro_batches", f"micro_batches x micro_batch_size must be the batch {self.batch}, found {product}")
        layers: set[str] = set()
        self._check_pipelines()
        self._check_layout()
        before, begins = None, {stages.start for stages in self.stages_by_pipeline}
        for index, stage in enumerate(self.stages):
            at = f"stages[{index}]"
            if index in begins:
                before = None
                layers.clear()
            for layer in stage.layers:
                if layer in layers:
                    fault(f"{at}.layers", f"layer {layer!r} is placed twice")
                layers.add(layer)
            self._check_shares(stage, at)
            if not set(stage.recompute) <= set(stage.layers):
                other = next(layer for layer in stage.recompute if layer not in stage.layers)
                fault(f"{at}.recompute", f"layer {other!r} is not in this stage")
            if stage.shard != "none" and stage.replicas == 1:
                fault(f"{at}.shard", f"{stage.shard!r} needs several replicas")
            if stage.shard not in shards_of(stage.division):
                fault(f"{at}.shard", f"{stage.shard!r} has replicas wait for each other in every layer, not take turns")
            self._check_depth(stage, before, at)
            before = stage
        for name in BY_STAGE:
            numbers = getattr(self.predicted, name)
            if len(numbers) != len(self.stages) and (numbers or name == "peak_bytes"):
                fault(f"predicted.{name}", f"{len(numbers)} numbers for {len(self.stages)} stages")
        for index, part in enumerate(self.predicted.binding):
            if part.stage >= len(self.stages) - (part.term == "link"):
                fault(f"predicted.binding[{index}].stage", f"{part.stage} is not one of {len(self.stages)} stages")
        return self

    @model_validator(mode="after")
    def _policy_is_sound(self) -> Self:
        only = self.policy.schedule
        if only not in (None, self.schedule):
            fault("weight_policy", f"a pipeline that is never flushed runs by {only}, found {self.schedule}")
        depth = max(stage.warmup for stage in self.stages)
        least = self.policy.least_micro_batches(depth)
        if self.micro_batches < least:
            deep = f"with {depth} in flight on a stage"
            fault("micro_batches", f"{self.weight_policy} needs {least} {deep}, found {self.micro_batches}")
        return self

    def _check_pipelines(self) -> None:
        """Several pipelines place the same layers in one order."""
        if sum(self.pipelines) not in (0, len(self.stages)) or len(self.pipelines) == 1:
            wanted = f"two pipelines or more have the {len(self.stages)} stages, found {list(self.pipelines)}"
            fault("pipelines", wanted if self.pipelines[1:] else "a single pipeline has all stages, and is left out")
        if self.pipelines and self.divisible:
            fault("divisible", "several pipelines are not priced as papers do")
        self._check_settings()
        waves = self.policy.has_pipelines
        if bool(self.pipelines) != waves:
            fault("pipelines", "several pipelines train under wsp, and a single one under no such policy")
        if waves and max(stage.warmup for stage in self.stages) > (self.wave or 1):
            fault("wave", f"{self.wave} mini-batches are fewer than a stage has in flight")
        if waves and self.micro_batches > 1:
            fault("micro_batches", f"wsp has whole mini-batches in flight, found {self.micro_batches} parts of each")
        first, *others = [[name for at in own for name in self.stages[at].layers] for own in self.stages_by_pipeline]
        for at, layers in enumerate(others):
            if layers != first:
                fault(f"pipelines[{at + 1}]", "a pipeline has not the layers of the first one, in their order")

    def _check_settings(self) -> None:
        """What only some policies have is there under these, and under no others."""
        for policy in POLICIES.values():
            for name, why in policy.settings.items():
                value, default = getattr(self, name), type(self).model_fields[name].default
                if value is None if policy.name == self.weight_policy else value != default:
                    fault(name, why)

    def _check_layout(self) -> None:
        """Every device is in one group, and groups hold the stages that the schedule has them hold, divided alike."""
        layout, groups = layout_of(self.schedule), self.groups
        devices: set[int] = set()
        for chunks in groups:
            for device in self.stages[chunks[0]].devices:
                if device in devices:
                    fault(f"stages[{chunks[0]}].devices", f"device {device} is used twice")
                devices.add(device)
            if layout == "line" and len(chunks) > 1:
                device = self.stages[chunks[1]].devices[0]
                fault(f"stages[{chunks[1]}].devices", f"device {device} is used twice, as {self.schedule} cannot")
        if layout != "line":
            self._check_chunks(layout, groups)

    def _check_chunks(self, layout: Layout, groups: tuple[tuple[int, ...], ...]) -> None:
        for index, stage in enumerate(self.stages):
            first = groups[group_of(layout, index, len(groups))][0]
            at, other = f"stages[{index}]", self.stages[first]
            if stage.devices != other.devices:
                fault(f"{at}.devices", f"{self.schedule} has stage {index} on the devices of {first}")
            if stage.shares != other.shares:
                fault(f"{at}.shares", f"stages {first} and {index} share devices, and must divide rows alike")
            if stage.division != "split":
                fault(f"{at}.division", f"{self.schedule} has replicas split micro-batches")
        each = chunks_of(layout)
        if len(self.stages) != len(groups) * (each or len(groups[0])):
            wanted = "as many" if each is None else str(each)
            found = f"found {len(self.stages)} stages on {len(groups)}"
            fault("stages", f"{self.schedule} has {wanted} stages on every group of devices, {found}")

    def _check_shares(self, stage: Stage, at: str) -> None:
        rows = self.micro_batch_size
        if len(stage.devices) % stage.tensor_parallel:
            fault(
                f"{at}.tensor_parallel", f"{len(stage.devices)} devices do not make groups of {stage.tensor_parallel}"
            )
        self._check_cuts(stage, at)
        if len(stage.shares) != stage.replicas:
            fault(f"{at}.shares", f"{len(stage.shares)} shares for {stage.replicas} replicas")
        if not self.divisible and not all(isinstance(share, int) for share in stage.shares):
            fault(f"{at}.shares", f"rows are whole, found {list(stage.shares)}")
        if stage.division == "round-robin":
            if set(stage.shares) != {rows}:
                fault(f"{at}.shares", f"round-robin replicas take all {rows} rows each, found {list(stage.shares)}")
            if stage.shard != "none" and stage.replicas > self.micro_batches:
                fault(f"{at}.shard", f"{stage.replicas} replicas divide gradients that only {self.micro_batches} make")
        elif abs(sum(stage.shares) - rows) > 1e-6 * rows:
            fault(f"{at}.shares", f"shares must sum to the micro-batch's {rows} rows, found {sum(stage.shares)}")

    @staticmethod
    def _check_cuts(stage: Stage, at: str) -> None:
        each_once((cut.parameter for cut in stage.cuts), f"{at}.cuts[{{}}].parameter", "parameter")
        for index, cut in enumerate(stage.cuts):
            if len(cut.parts) != stage.tensor_parallel:
                found = f"{len(cut.parts)} parts for groups of {stage.tensor_parallel} devices"
                fault(f"{at}.cuts[{index}].parts", found)

    def _check_depth(self, stage: Stage, before: Stage | None, at: str) -> None:
        most = self.policy.most_in_flight(stage.replication, self.micro_batches)
        if most is not None and stage.warmup > most:
            fault(f"{at}.warmup", f"{stage.warmup} is more than the {most} micro-batches of a replica")
        if layout_of(self.schedule) != "line":
            # How deep the chunks of a group go follows from one another.
            return
        if before is not None:
            in_flight, periods = (before.in_flight, stage.in_flight), (before.period, stage.period)
            if self.policy.stands_still(in_flight, periods, self.micro_batches):
                fault(f"{at}.warmup", f"{stage.warmup} lets more in flight than the stage before has (deadlock)")
        if self.schedule == "gpipe" and most not in (None, stage.warmup):
            fault(f"{at}.warmup", f"gpipe keeps all {most} micro-batches in flight")

    @model_validator(mode="after")
    def _tensors_flow_forth(self) -> Self:
        """Tensors and shared parameters go on to later stages, of several pipelines within each."""
        # Of several pipelines, each has its own, which do not leave it.
        names, stops = list[str](), [own.stop for own in self.stages_by_pipeline for _ in own]
        for index, tensor in enumerate(self.tensors):
            at, stop = f"tensors[{index}]", stops[min(tensor.producer, len(stops) - 1)]
            ascending(tensor.consumers, f"{at}.consumers", "stages")
            if tensor.consumers[0] <= tensor.producer or tensor.consumers[-1] >= stop:
                fault(f"{at}.consumers", f"must lie behind the producer {tensor.producer} and below {stop}")
            self._check_sequence(tensor, at)
            names.append(f"{tensor.name} before stage {stop}" if self.pipelines else tensor.name)
        each_once(names, "tensors[{}].name", "tensor")
        shared = list[str]()
        for index, tied in enumerate(self.tied):
            ascending(tied.stages, f"tied[{index}].stages", "stages")
            stop = stops[min(tied.stages[0], len(stops) - 1)]
            if tied.stages[-1] >= stop:
                fault(f"tied[{index}].stages", f"must lie below {stop}, found {tied.stages[-1]}")
            shared.append(f"{tied.parameter} before stage {stop}" if self.pipelines else tied.parameter)
        each_once(shared, "tied[{}].parameter", "parameter")
        return self

    def _check_sequence(self, tensor: Crossing, at: str) -> None:
        """A tensor goes in parts between teams of one size alone, cut alike on all of them."""
        placed = [self.stages[stage] for stage in (tensor.producer, *tensor.consumers)]
        dims = {stage.sequence_dims.get(tensor.name) for stage in placed}
        if dims != {None} and (len(dims) > 1 or len({stage.tensor_parallel for stage in placed}) > 1):
            fault(f"{at}.name", f"{tensor.name!r} is cut along its sequence, and not alike in all stages that have it")
