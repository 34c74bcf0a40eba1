"""Profile: what was measured of a model on one kind of device, layer by layer and micro-batch size by size.

Of a layer that the ranks of a team may compute together, it says how it splits in so many parts: which indices of a
parameter each has. A plan takes that over for its stages, and ranks obey it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from autopar.formats.cuts import ParameterCut, SequenceCut
from autopar.formats.document import (
    Bytes,
    Count,
    Digest,
    Document,
    Index,
    Name,
    Provenance,
    Record,
    Seconds,
    SparseRecord,
    ascending,
    each_once,
    fault,
)

Precision = Literal["fp32", "fp64", "bf16", "fp16"]
"""``bf16`` and ``fp16``: parameters in float32, computed under autocast."""
DeviceType = Literal["cpu", "cuda"]
Threads = Annotated[int, Field(ge=1, le=1024)]


TRANSFORMERS = "hf:"


def path_of(source: str) -> str | None:
    """Return the path in a model's source: a model file's or a Transformers configuration's; none in a factory.

    >>> path_of("gpt.py"), path_of("hf:llama/config.json"), path_of("zoo.gpt:small"), path_of("C:/gpt.py")
    ('gpt.py', 'llama/config.json', None, 'C:/gpt.py')
    """
    if source.startswith(TRANSFORMERS):
        return source.removeprefix(TRANSFORMERS)
    return None if ":" in source and not source.endswith(".py") else source


def is_model(source: str) -> bool:
    """Whether a source is a model, and not the file of another system that a profile was read from.

    >>> [is_model(source) for source in ("gpt.py", "hf:llama", "zoo.gpt:small", "graph.txt")]
    [True, True, True, False]
    """
    return path_of(source) != source or source.endswith(".py")


def with_path(source: str, path: str) -> str:
    """Return a model's source with another path in it.

    >>> with_path("hf:config.json", "llama/config.json"), with_path("zoo.gpt:small", "anything")
    ('hf:llama/config.json', 'zoo.gpt:small')
    """
    if path_of(source) is None:
        return source
    return f"{TRANSFORMERS if source.startswith(TRANSFORMERS) else ''}{path}"


Joins = Literal["producer", "reader"]


class ModelSource(SparseRecord):
    """Where the model's code is, and how it is cut into layers."""

    LEFT_OUT: ClassVar[tuple[str, ...]] = ("joins",)

    source: Name
    """A path relative to the file that holds this record, ``hf:`` and such a path, or ``package.module:factory``."""
    sha256: Digest
    """Of the bytes of the source file, or of the Transformers configuration."""
    data: Name | None = None
    """The file whose ``dataset()`` feeds an ``hf:`` model, relative like the source; none: synthetic inputs."""
    sequence: Count | None = None
    """Tokens of a synthetic sample of an ``hf:`` model; null where samples are no sequences, or not synthetic."""
    imports: Mapping[Name, Digest] | None = None
    """SHA-256 of the files below the same folder that the source file imports, by their paths from the folder in which
    imports begin; of an ``hf:`` model, of its data file and what that imports. None: they were not recorded."""
    joins: Joins = "producer"
    """Which layer an operator between modules belongs to that joins independent branches: the one that reads it, or,
    where an earlier autopar made the file, one that makes what it reads."""


class DeviceKind(Record):
    """The device the layers were measured on."""

    type: DeviceType
    """A CPU process, or a GPU."""
    name: Name
    """As its maker calls it."""
    memory_bytes: Bytes
    """All of its memory."""
    threads: Threads = 1
    """Intra-operator threads per rank (CPU)."""
    reserved_bytes: Bytes = 0
    """What a process takes of the memory for itself: the device's context (as measured, or estimated) and NCCL's
    communicators (as estimated)."""


class Noise(Record):
    """How steady the measurements were; a spread is the interquartile range over the median."""

    median_spread: float = Field(ge=0)
    """Median over all measurements."""
    max_spread: float = Field(ge=0)
    """The widest."""
    caches: Literal["warm", "cold"] = "warm"
    """What a layer found in the device's last cache: what other layers left (``cold``), or its own data (``warm``)."""
    clock_hz: tuple[float, ...] = ()
    """Clock of the device's cores before and after measuring, where it can be read."""
    throttled: Name | None = None
    """Why the device slowed its clock while it was measured, where it says so."""


class SavedStorage(Record):
    """One storage that a layer keeps from its forward to its backward."""

    storage: Name
    """The name of a crossing tensor of ``Profile.tensors`` if it is that tensor's storage, else unique to the layer."""
    bytes: Bytes
    """Its size."""


class PartSum(Record):
    """What ranks of a team exchange once for every micro-batch, while each waits."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter"]
    """Which collective it is."""
    at: Literal["forward", "backward_input", "backward_weight"]
    """In the forward, and when it is run again; or in that half of the backward."""
    ranks: Annotated[int, Field(ge=2)]
    """How many of the team."""
    bytes: Bytes
    """Of the vector that is summed, or gathered, as a whole."""


class Cost(SparseRecord):
    """One layer, or one rank's part of it, at one micro-batch size."""

    LEFT_OUT: ClassVar[tuple[str, ...]] = ("sums",)

    micro_batch: Count
    """Samples of the micro-batch."""
    forward_s: Seconds
    """Of one forward; of its kernels where ``forward_launch_s`` is known."""
    backward_s: Seconds
    """Of one whole backward; likewise."""
    saved: tuple[SavedStorage, ...]
    """Storages kept for the backward, parameters and buffers excluded, each once."""
    peak_bytes: Bytes
    """Most bytes alive at once in this layer's forward and backward beyond parameters, buffers, parameter gradients
    and the layer's inputs: its saved storages, temporaries, outputs and the gradients of inputs and outputs."""
    output_bytes: Bytes
    """Of all its outputs."""
    backward_input_s: Seconds | None = None
    """The half of a split backward that makes the inputs' gradients; halves take longer together than the whole."""
    backward_weight_s: Seconds | None = None
    """The half that makes the parameters' gradients."""
    weight_saved_bytes: Bytes | None = None
    """What is held from the first half to the second: of what was saved, and the gradients that arrived."""
    recompute_s: Seconds | None = None
    """What a backward that runs the forward again, with the random numbers of the first time, takes beyond
    ``backward_s``."""
    forward_launch_s: Seconds | None = None
    """Seconds in which the host hands the forward's kernels to the device, which computes meanwhile; none where the
    host computes itself."""
    backward_launch_s: Seconds | None = None
    """Likewise, the backward's."""
    forward_spread: float = Field(default=0.0, ge=0)
    """Interquartile range of the repeats over their median."""
    backward_spread: float = Field(default=0.0, ge=0)
    """Likewise."""
    repeats: Index = 0
    """How many times forward and backward were timed; 0 where the times are estimated."""
    provenance: Provenance = "measured"
    """Where the times come from."""
    sums: tuple[PartSum, ...] = ()
    """Of a part, in order; none of a whole layer."""

    @property
    def saved_bytes(self) -> int:
        """Bytes of all storages kept for the backward."""
        return sum(saved.bytes for saved in self.saved)


class Line(Record):
    """Seconds as an affine function of the micro-batch size, fitted to measured or estimated ones."""

    fixed_s: Seconds
    """At no samples."""
    per_sample_s: Seconds
    """More for each sample."""
    residual: float = Field(ge=0)
    """Largest difference from a fitted time, relative to that time."""

    def at(self, rows: float) -> float:
        """Return the seconds at a micro-batch of ``rows`` samples."""
        return self.fixed_s + rows * self.per_sample_s


class PartCosts(Record):
    """A layer's part on one rank of a team, of all parts the one that computes and holds most; fields as of a layer."""

    parameters_bytes: Bytes
    """With what every part has whole."""
    trainable_bytes: Bytes
    """Of those that are trained."""
    gradient_bytes: Bytes
    """Of their gradients."""
    optimizer_bytes: Bytes
    """Of the optimizer's state for them."""
    summand_bytes: Bytes = 0
    """Of gradients that parts have summands of, which they add up once for each mini-batch."""
    update_s: Seconds = 0.0
    """The optimizer's step over those of its parameters that no earlier layer holds as well."""
    accumulate_s: Seconds = 0.0
    """What a backward takes longer that adds to gradients."""
    update_bytes: Bytes = 0
    """What the optimizer's step holds for a while."""
    costs: tuple[Cost, ...] = Field(min_length=1)
    """Beside others' parts, without the seconds of ``Cost.sums``."""
    forward_fit: Line | None = None
    """Fitted to ``costs``."""
    backward_fit: Line | None = None
    """Likewise, of backwards."""

    @model_validator(mode="after")
    def _sums_are_alike(self) -> Self:
        ascending([cost.micro_batch for cost in self.costs], "costs", "micro-batch sizes")
        if len({tuple((each.kind, each.at, each.ranks) for each in cost.sums) for cost in self.costs}) > 1:
            fault("costs", "parts sum other things at one micro-batch size than at another")
        return self


class LayerSplit(SparseRecord):
    """How a layer's parameters are cut in so many parts; those that are not named are whole on every part."""

    LEFT_OUT: ClassVar[tuple[str, ...]] = ("sequence", "part", "sliced")

    count: Annotated[int, Field(ge=2)]
    """Ranks that divide it."""
    cuts: tuple[ParameterCut, ...] = Field(min_length=1)
    """The parameters that are cut."""
    sequence: tuple[SequenceCut, ...] = ()
    """Tensors that the layer may take or give in parts."""
    part: PartCosts | None = None
    """What a part costs that takes and gives whole tensors; null: nobody found out."""
    sliced: PartCosts | None = None
    """Likewise, where those of ``sequence`` are in slices; null where there are none, too."""

    @model_validator(mode="after")
    def _parts_are_so_many(self) -> Self:
        for index, cut in enumerate(self.cuts):
            if len(cut.parts) != self.count:
                fault(f"cuts[{index}].parts", f"{len(cut.parts)} parts of {cut.parameter!r}, for {self.count}")
        return self


class Writes(Record):
    """What a layer's forward changes beside its outputs, running statistics of batch normalisation apart."""

    buffers: tuple[Name, ...] = ()
    """Names of the buffers that it writes."""
    parameters: tuple[Name, ...] = ()
    """By the model's own names."""
    inputs: tuple[Name, ...] = ()
    """Of the model."""
    state: tuple[Name, ...] = ()
    """Paths of Python state of a listed module."""

    @property
    def single(self) -> str | None:
        """Why replicas of the layer would train differently from one; None where they would not."""
        for what, names in (("parameter", self.parameters), ("Python state", self.state), ("buffer", self.buffers)):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                return f"its forward changes the {what} {names[0]}{more}"
        return None

    @property
    def once(self) -> str | None:
        """Why the layer cannot be recomputed; None where it can: of buffers and inputs, copies are kept."""
        return Writes(parameters=self.parameters, state=self.state).single


_OF_PARTS = tuple(PartCosts.model_fields)


class Layer(SparseRecord):
    """The smallest unit the planner moves."""

    LEFT_OUT: ClassVar[tuple[str, ...]] = ("flops_per_sample", "summand_bytes", "options", "splits", "split_obstacles")

    name: Name
    """That of its first module."""
    modules: tuple[Name, ...]
    """Named modules whose calls make up the layer, in call order."""
    parameters_bytes: Bytes
    """Of all its parameters."""
    trainable_bytes: Bytes
    """Of those that are trained."""
    gradient_bytes: Bytes
    """Of their gradients."""
    optimizer_bytes: Bytes
    """Of the optimizer's state for them."""
    buffers_bytes: Bytes = 0
    """Of its buffers."""
    update_s: Seconds = 0.0
    """The optimizer's step over this layer's parameters, without those that an earlier layer holds as well."""
    accumulate_s: Seconds = 0.0
    """What a backward takes beyond ``backward_s`` where it adds to gradients that are there: not a step's first."""
    update_bytes: Bytes = 0
    """What the optimizer's step holds for a while, beside parameters, gradients and the optimizer's state."""
    summand_bytes: Bytes = 0
    """Of a part, as of :class:`PartCosts`; none of a whole layer."""
    costs: tuple[Cost, ...] = Field(min_length=1)
    """By micro-batch size, ascending."""
    forward_fit: Line | None = None
    """Fitted to ``costs``, for sizes beyond them; none where a single size was measured."""
    backward_fit: Line | None = None
    """Likewise, of backwards."""
    flops_per_sample: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Operations of a forward and backward, for each sample: two for each multiplication of a product of matrices, a
    convolution or an attention, as torch counts them, nothing run again counted; null: nobody counted them."""
    input_s: Seconds = 0.0
    """Of every forward, what reading the model's inputs takes, where an imported profile tells it apart."""
    measured_as: Name | None = None
    """The identical layer whose measurement, or estimate, this is, if not its own."""
    writes: Writes | None = None
    """What its forward changes beside its outputs; null: nothing but batch normalisation's running statistics."""
    written_bytes: Bytes = 0
    """Of the buffers that it writes; a copy of them is kept for every micro-batch in flight."""
    least_samples: Count = 1
    """The fewest samples of a micro-batch that it can be given at once."""
    most_samples: Count | None = None
    """The most; null: any number."""
    options: Annotated[tuple[Name, ...], BeforeValidator(lambda _: ())] = ()
    """Not written any more: what earlier versions have here, nothing planned with. It is read, and forgotten."""
    splits: tuple[LayerSplit, ...] = ()
    """How the ranks of a team may divide it, by their number; none where nothing of it splits."""
    split_obstacles: tuple[Name, ...] = ()
    """Operators that every rank of a team computes whole, each with the reason."""

    def split(self, count: int) -> LayerSplit | None:
        """Return how it splits in so many parts; None where it does not."""
        return next((each for each in self.splits if each.count == count), None)

    def on_team(self, count: int, *, sliced: bool = False) -> Layer | None:
        """Return what it is to one rank of a team: a part, or all of it where it does not split in so many.

        Args:
            count: ranks of the team.
            sliced: whether tensors between layers are in slices, as far as this one takes and gives them so.

        Returns:
            The layer with the part's sizes and costs; None where nobody found these out.
        """
        split = self.split(count)
        if split is None:
            return self
        part = split.sliced if sliced and split.sequence else split.part
        return None if part is None else self.model_copy(update={name: getattr(part, name) for name in _OF_PARTS})

    @model_validator(mode="after")
    def _sizes_ascend(self) -> Self:
        ascending([cost.micro_batch for cost in self.costs], "costs", "micro-batch sizes")
        ascending([split.count for split in self.splits], "splits", "numbers of parts")
        return self


class Tensor(Record):
    """A tensor that is made in one layer and read in later ones; or a model input."""

    name: Name
    """What it is called."""
    producer: Name | None
    """Name of the layer that makes it; null for a model input, which every stage that reads it is given."""
    consumers: tuple[Name, ...] = Field(min_length=1)
    """Those that read it."""
    bytes_per_sample: Bytes
    """Its size, for one sample."""
    dtype: Name
    """As torch names it."""
    gradient: bool
    """Whether a gradient flows back over it."""


class TiedParameter(Record):
    """A parameter that several layers use."""

    parameter: Name
    """By the model's own name."""
    layers: tuple[Name, ...] = Field(min_length=2)
    """Layers that use it, by name."""
    bytes: Bytes
    """Its size."""
    trainable: bool = True
    """Whether it is trained."""


class DeviceCosts(Record):
    """The same layers on another kind of device."""

    device: DeviceKind
    """Which kind that is."""
    layers: tuple[Layer, ...] = Field(min_length=1)
    """The profile's layers, in its order."""


class Profile(Document):
    """Costs of every layer, and the tensors between them."""

    format: Literal["autopar.profile"] = "autopar.profile"
    version: Literal[1] = 1
    model: ModelSource
    """Where its code is."""
    batch: Count
    """Samples per step, unless the planner is told otherwise."""
    device: DeviceKind
    """What the layers were measured on."""
    precision: Precision
    """What is computed in; ``bf16`` and ``fp16`` have float32 parameters, under autocast."""
    compiled: bool = False
    """Whether the layers were compiled with ``torch.compile``."""
    layers: tuple[Layer, ...] = Field(min_length=1)
    """In the order in which they run."""
    tensors: tuple[Tensor, ...]
    """Those between layers."""
    tied: tuple[TiedParameter, ...] = ()
    """Parameters that several layers use."""
    updates_at_once: bool = False
    """Whether the optimizer works on all parameters at once, and holds ``update_bytes`` of all layers together, or on
    one after the other."""
    indivisible: Name | None = None
    """Why the optimizer cannot step parts of parameters with the same result; none: it can, or it was not tried."""
    noise: Noise
    """How steady the measurements were."""
    step_overhead_s: Seconds = 0.0
    """Time of a step that belongs to no layer: loading the mini-batch, zeroing gradients."""
    read_s: Seconds | None = None
    """Of reading one sample of the dataset, in one process; null where nobody measured."""
    collate_s: Seconds | None = None
    """Of collating, for every sample; likewise."""
    others: tuple[DeviceCosts, ...] = ()
    """The same layers on other kinds of devices."""
    ignored_state: tuple[Name, ...] = ()
    """Paths of Python state that forwards change and that is only logged, as the user says."""
    loss_difference: float | None = Field(default=None, ge=0)
    """How far a mini-batch's loss and gradients are from those of its parts, relative, where the user accepts it."""
    counts_labels: bool = False
    """Whether the loss of a Transformers model that is given from Python is taken as a sum over labels and a count."""
    notes: tuple[Name, ...] = ()
    """What a reader should know."""

    @property
    def kinds(self) -> tuple[DeviceCosts, ...]:
        """Costs on every kind of device, the profile's own first."""
        return (DeviceCosts(device=self.device, layers=self.layers), *self.others)

    def loading_s(self, batch: int) -> float | None:
        """Return the seconds in which one process reads and collates a mini-batch; None where that is not known."""
        return None if self.read_s is None or self.collate_s is None else batch * (self.read_s + self.collate_s)

    def loading_beside_s(self, batch: int) -> float:
        """Return how much of that is in ``step_overhead_s``, where ranks load for themselves: estimates have none."""
        estimated = self.layers[0].costs[0].provenance == "estimated"
        return 0.0 if estimated else min(self.step_overhead_s, self.loading_s(batch) or 0.0)

    def crossing_bytes(self) -> list[int]:
        """Return the bytes per sample that a cut behind each layer would send; model inputs are given, not sent."""
        order = {layer.name: index for index, layer in enumerate(self.layers)}
        crossing = [0] * len(order)
        for tensor in self.tensors:
            if tensor.producer is not None:
                last = max(order[consumer] for consumer in tensor.consumers)
                for boundary in range(order[tensor.producer], last):
                    crossing[boundary] += tensor.bytes_per_sample
        return crossing

    def disconnected_layers(self) -> tuple[str, ...]:
        """Return the layers that no tensor or parameter connects with the last one, however indirectly."""
        names = [layer.name for layer in self.layers]
        groups = [{tensor.producer, *tensor.consumers} for tensor in self.tensors if tensor.producer is not None]
        groups += [set(tied.layers) for tied in self.tied]
        joined: set[str | None] = {names[-1]}
        ahead = [names[-1]]
        members: dict[str | None, list[int]] = {}
        for index, group in enumerate(groups):
            for name in group:
                members.setdefault(name, []).append(index)
        while ahead:
            for index in members.pop(ahead.pop(), []):
                new = groups[index] - joined
                joined |= new
                ahead += [name for name in new if name is not None]
        return tuple(name for name in names if name not in joined)

    @model_validator(mode="after")
    def _layers_and_tensors_agree(self) -> Self:
        order = {layer.name: index for index, layer in enumerate(self.layers)}
        each_once((layer.name for layer in self.layers), "layers[{}].name", "layer")
        for index, other in enumerate(self.others):
            if [layer.name for layer in other.layers] != list(order):
                fault(f"others[{index}].layers", "these are not the profile's layers, in its order")
            if other.device.name in {self.device.name, *(each.device.name for each in self.others[:index])}:
                fault(f"others[{index}].device.name", f"{other.device.name!r} is given twice")
        each_once((tensor.name for tensor in self.tensors), "tensors[{}].name", "tensor")
        for index, tensor in enumerate(self.tensors):
            at = f"tensors[{index}]"
            if tensor.producer is not None and tensor.producer not in order:
                fault(f"{at}.producer", f"no layer is called {tensor.producer!r}")
            made = -1 if tensor.producer is None else order[tensor.producer]
            for consumer in tensor.consumers:
                if consumer not in order:
                    fault(f"{at}.consumers", f"no layer is called {consumer!r}")
                if order[consumer] <= made:
                    fault(f"{at}.consumers", f"{consumer!r} does not come after the producer {tensor.producer!r}")
        for index, tied in enumerate(self.tied):
            for name in tied.layers:
                if name not in order:
                    fault(f"tied[{index}].layers", f"no layer is called {name!r}")
        return self
