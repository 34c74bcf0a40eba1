"""Stage: consecutive layers on one rank, run forward one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from autopar.capture.graph import Layer, TensorSpec
from autopar.errors import TrainingError
from autopar.runtime.passes import Pass
from autopar.runtime.segment import Watch, segments_of

__all__ = ["Stage"]


class Stage:
    """The layers of one stage, and the names of the tensors that enter and leave it."""

    def __init__(
        self,
        layers: Sequence[Layer],
        tensors: Sequence[TensorSpec],
        model_inputs: Sequence[str],
        loss: Sequence[str],
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        recompute: Sequence[str] = (),
    ) -> None:
        """Work out what flows.

        Args:
            layers: the stage's, in order, with parameters in place.
            tensors: every crossing tensor of the model.
            model_inputs: names of the model's inputs.
            loss: names of the loss outputs.
            autocast: makes the context that forwards run in.
            recompute: layers that run forward again before their backward.
        """
        self.layers = list(layers)
        mine = {layer.name for layer in layers}
        made = {name for layer in layers for name in layer.outputs}
        read = {name for layer in layers for name in layer.inputs}
        self.inputs = tuple(name for name in model_inputs if name in read)
        self.received = tuple(spec for spec in tensors if spec.name in read - made and spec.name not in model_inputs)
        self.sent = tuple(spec for spec in tensors if spec.name in made and not mine.issuperset(spec.consumers))
        self.loss = tuple(name for name in loss if name in made)
        wanted = {*(spec.name for spec in self.sent), *self.loss}
        self._segments = segments_of(layers, wanted, autocast, recompute)
        self._shapes: dict[int, list[tuple[str, torch.dtype, tuple[int, ...]]]] = {}

    def forward(
        self, rows: int, values: Mapping[str, torch.Tensor], seed: Callable[[str], None], *, split: bool = False
    ) -> tuple[dict[str, torch.Tensor], list[Pass]]:
        """Run the layers on one share of a micro-batch.

        Args:
            rows: samples in the share.
            values: the model inputs and received tensors that the layers read; those whose gradient goes back are
                leaves.
            seed: called with the name of every layer that draws random numbers, just before it runs.
            split: whether the backward comes in two halves.

        Returns:
            The tensors that are sent and the loss outputs; and what the backward needs, by segment.

        Raises:
            TrainingError: a layer failed; names it.
        """
        known, passes = dict(values), list[Pass]()
        for segment in self._segments:
            passes.append(Pass(segment, rows, known, seed, split=split))
            known.update(passes[-1].forward())
            for name in segment.done:
                del known[name]
        return known, passes

    def watch(self, watch: Watch | None) -> None:
        """Have layers run by ``watch`` from now on, or again by themselves."""
        for segment in self._segments:
            segment.watch = watch

    def sendable(self, rows: int, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what is sent of a share's outputs, in the types that receivers expect.

        Raises:
            TrainingError: a tensor has another shape than they expect; names it.
        """
        sent = {}
        for name, dtype, expected in self._expected(rows):
            tensor = outputs[name]
            if tensor.shape != expected:
                raise TrainingError(
                    f"tensor {name} has shape {tuple(tensor.shape)}, the plan sends {expected}; shapes must not change "
                    "between steps"
                )
            # Under autocast, a device may have made another type than was profiled.
            sent[name] = tensor.detach() if tensor.dtype is dtype else tensor.detach().to(dtype)
        return sent

    def lend(self, layers: Sequence[Layer]) -> list[Layer]:
        """Return layers of another mode, to which this stage lends its parameters while they run.

        They hold the stage's parameters already; see :meth:`lending`.
        """
        return list(layers)

    def lending(self) -> AbstractContextManager[None]:
        """Return the context that lent layers run in, entered by all replicas together."""
        return nullcontext()

    def _expected(self, rows: int) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Return the names, types and shapes of what is sent of so many rows, found once."""
        if rows not in self._shapes:
            self._shapes[rows] = [(spec.name, spec.dtype, spec.shape(rows)) for spec in self.sent]
        return self._shapes[rows]
