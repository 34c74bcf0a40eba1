"""Option: one way to run a layer, on how many devices, keeping or recomputing its activations."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from autopar.formats.document import Bytes, Count, Name, Record, Seconds, fault


class Resharded(Record):
    """What a tensor-parallel group exchanges of a tensor that enters or leaves its stage at a layer."""

    tensor: Name
    """One of ``Profile.tensors`` that the layer makes or reads."""
    bytes: Bytes
    """Per micro-batch and direction."""


class LayerOption(Record):
    """One way to run a layer, for one micro-batch.

    With ``y`` micro-batches in flight the layer takes ``memory_per_flight_bytes * y + memory_fixed_bytes`` of every
    device of the group (the configurations of Tarnawski et al., "Piper: Multidimensional Planner for DNN
    Parallelization", NeurIPS 2021, section 3).
    """

    name: Name
    tensor_parallel: Count
    """Devices that run the layer together."""
    recompute: bool
    time_s: Seconds
    """Forward and backward, with all that the group exchanges meanwhile."""
    parameters_bytes: Bytes
    """On each device of the group."""
    memory_per_flight_bytes: Bytes
    memory_fixed_bytes: Bytes
    resharded: tuple[Resharded, ...] = ()
    """Of tensors not listed nothing is exchanged."""

    @model_validator(mode="after")
    def _each_tensor_once(self) -> Self:
        names = [each.tensor for each in self.resharded]
        if len(set(names)) != len(names):
            twice = next(index for index, name in enumerate(names) if name in names[:index])
            fault(f"resharded[{twice}].tensor", f"tensor {names[twice]!r} is given twice")
        return self
