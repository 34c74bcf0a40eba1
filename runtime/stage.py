"""Stage: consecutive layers on one rank, run forward one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from autopar.capture.graph import Layer, TensorSpec
from autopar.errors import AutoparError, TrainingError
from autopar.runtime.recompute import recomputed

__all__ = ["Stage", "Watch"]

Watch = Callable[[str, Callable[[], Sequence[torch.Tensor]]], Sequence[torch.Tensor]]
"""Called with a layer's name and what runs it forward; returns what that returns."""


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
        self._autocast, self._recompute = autocast, frozenset(recompute)
        self.layers = list(layers)
        mine = {layer.name for layer in layers}
        made = {name for layer in layers for name in layer.outputs}
        read = {name for layer in layers for name in layer.inputs}
        self.inputs = tuple(name for name in model_inputs if name in read)
        self.received = tuple(spec for spec in tensors if spec.name in read - made and spec.name not in model_inputs)
        self.sent = tuple(spec for spec in tensors if spec.name in made and not mine.issuperset(spec.consumers))
        self.loss = tuple(name for name in loss if name in made)
        self.watch: Watch | None = None
        self._drop = self._last_uses()

    def forward(
        self, rows: int, values: dict[str, torch.Tensor], seed: Callable[[str], None]
    ) -> dict[str, torch.Tensor]:
        """Run the layers on one share of a micro-batch.

        Args:
            rows: samples in the share.
            values: the model inputs and received tensors that the layers read.
            seed: called with the name of every layer that draws random numbers, just before it runs.

        Returns:
            The tensors that are sent, and the loss outputs.

        Raises:
            TrainingError: a layer failed; names it.
        """
        values = dict(values)
        for layer, drop in zip(self.layers, self._drop, strict=True):
            try:
                inputs = [values[name] for name in layer.inputs]
                if self.watch is None:
                    outputs = self._run(layer, rows, inputs, seed)
                else:
                    outputs = self.watch(layer.name, partial(self._run, layer, rows, inputs, seed))
            except (AutoparError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise TrainingError(f"layer {layer.name}: {type(error).__name__}: {error}") from error
            values.update(zip(layer.outputs, outputs, strict=True))
            for name in drop:
                del values[name]
        return values

    def _run(
        self, layer: Layer, rows: int, inputs: Sequence[torch.Tensor], seed: Callable[[str], None]
    ) -> Sequence[torch.Tensor]:
        def run(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            if layer.random:
                seed(layer.name)
            with self._autocast():
                outputs: Sequence[torch.Tensor] = layer.module(rows, *tensors)
            return outputs

        if layer.name not in self._recompute:
            return run(*inputs)
        return recomputed(run, inputs, [buffer for _, buffer in layer.module.named_buffers()])

    def _last_uses(self) -> list[list[str]]:
        """For every layer, the names that no later layer reads and nobody is sent: they are let go after it."""
        kept = {spec.name for spec in self.sent} | set(self.loss)
        drops: list[list[str]] = []
        alive = set(self.inputs) | {spec.name for spec in self.received}
        for index, layer in enumerate(self.layers):
            alive |= set(layer.outputs)
            later = {name for after in self.layers[index + 1 :] for name in after.inputs}
            gone = sorted(alive - later - kept)
            drops.append(gone)
            alive -= set(gone)
        return drops
