"""Profile: what was measured of a model on one kind of device."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from autopar.formats.document import Bytes, Count, Document, Index, Name, Record, Seconds, fault

__all__ = [
    "Cost",
    "DeviceKind",
    "DeviceType",
    "Layer",
    "ModelSource",
    "Noise",
    "Precision",
    "Profile",
    "Saved",
    "Tensor",
    "Threads",
    "Tied",
    "is_factory",
]

Provenance = Literal["measured", "interpolated", "estimated"]
Precision = Literal["fp32", "fp64"]
DeviceType = Literal["cpu", "cuda"]
Threads = Annotated[int, Field(ge=1, le=1024)]


def is_factory(source: str) -> bool:
    """Whether a model's source is ``package.module:factory``, and not a path.

    >>> is_factory("zoo.gpt:small"), is_factory("gpt.py"), is_factory("C:/gpt.py")
    (True, False, False)
    """
    return ":" in source and not source.endswith(".py")


class ModelSource(Record):
    """Where the model's code is."""

    source: Name
    """A path relative to the file that holds this record, or ``package.module:factory``."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Of the source file's bytes."""


class DeviceKind(Record):
    """The device the layers were measured on."""

    type: DeviceType
    name: Name
    memory_bytes: Bytes
    threads: Threads = 1
    """Intra-operator threads per rank (CPU)."""


class Noise(Record):
    """How steady the measurements were; a spread is the interquartile range over the median."""

    median_spread: float = Field(ge=0)
    max_spread: float = Field(ge=0)


class Saved(Record):
    """One storage that a layer keeps from its forward to its backward."""

    storage: Name
    """The name of a crossing tensor of ``Profile.tensors`` if it is that tensor's storage, else unique to the layer."""
    bytes: Bytes


class Cost(Record):
    """One layer at one micro-batch size."""

    micro_batch: Count
    forward_s: Seconds
    backward_s: Seconds
    saved: tuple[Saved, ...]
    """Storages kept for the backward, parameters and buffers excluded, each once."""
    peak_bytes: Bytes
    """Most bytes alive at once in this layer's forward and backward beyond parameters, buffers, parameter gradients
    and the layer's inputs: its saved storages, temporaries, outputs and the gradients of inputs and outputs."""
    output_bytes: Bytes
    forward_spread: float = Field(default=0.0, ge=0)
    backward_spread: float = Field(default=0.0, ge=0)
    repeats: Index = 0


class Layer(Record):
    """The smallest unit the planner moves."""

    name: Name
    modules: tuple[Name, ...]
    """Named modules whose calls make up the layer, in call order."""
    parameters_bytes: Bytes
    trainable_bytes: Bytes
    gradient_bytes: Bytes
    optimizer_bytes: Bytes
    buffers_bytes: Bytes = 0
    update_s: Seconds = 0.0
    """The optimizer's step over this layer's parameters."""
    costs: tuple[Cost, ...] = Field(min_length=1)
    measured_as: Name | None = None
    """The identical layer whose measurement this is, if not its own."""
    provenance: Provenance = "measured"

    @model_validator(mode="after")
    def _sizes_ascend(self) -> Self:
        sizes = [cost.micro_batch for cost in self.costs]
        if sizes != sorted(set(sizes)):
            fault("costs", f"micro-batch sizes must ascend without repeats, found {sizes}")
        return self


class Tensor(Record):
    """A tensor that is made in one layer and read in later ones; or a model input."""

    name: Name
    producer: Name | None
    """Name of the layer that makes it; null for a model input, which every stage that reads it is given."""
    consumers: tuple[Name, ...] = Field(min_length=1)
    bytes_per_sample: Bytes
    dtype: Name
    gradient: bool
    """Whether a gradient flows back over it."""


class Tied(Record):
    """A parameter that several layers use."""

    parameter: Name
    layers: tuple[Name, ...] = Field(min_length=2)
    bytes: Bytes
    trainable: bool = True


class Profile(Document):
    """Costs of every layer, and the tensors between them."""

    KIND: ClassVar[str] = "profile"

    format: Literal["autopar.profile"] = "autopar.profile"
    version: Literal[1] = 1
    model: ModelSource
    batch: Count
    """Samples per step, unless the planner is told otherwise."""
    device: DeviceKind
    precision: Precision
    layers: tuple[Layer, ...] = Field(min_length=1)
    tensors: tuple[Tensor, ...]
    tied: tuple[Tied, ...] = ()
    noise: Noise
    step_overhead_s: Seconds = 0.0
    """Time of a step that belongs to no layer: loading the mini-batch, zeroing gradients."""
    notes: tuple[Name, ...] = ()

    @model_validator(mode="after")
    def _layers_and_tensors_agree(self) -> Self:
        order = {layer.name: index for index, layer in enumerate(self.layers)}
        for index, layer in enumerate(self.layers):
            if order[layer.name] != index:
                fault(f"layers[{index}].name", f"layer {layer.name!r} is given twice")
        seen: set[str] = set()
        for index, tensor in enumerate(self.tensors):
            at = f"tensors[{index}]"
            if tensor.name in seen:
                fault(f"{at}.name", f"tensor {tensor.name!r} is given twice")
            seen.add(tensor.name)
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
