"""Sleeping: layers that sleep in place of computing, so that eight ranks fit on two cores; the rest of a rank is real.

They are one model for whoever trains it: modules for torch, a captured graph for autopar.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.capture.graph import Layer, LayerGraph, TensorSpec
from autopar.capture.model.source import UserModel

__all__ = ["Pace", "SleepingModule", "graph_of", "modules_of", "user_of", "weights_of"]

INPUT = "batch.x"


class Pace(NamedTuple):
    """How long one layer sleeps for every row of a micro-batch, and what it makes of a row."""

    forward_s: float
    backward_s: float
    values: int
    """float32 numbers per row of its output."""

    def times(self, factor: float) -> Pace:
        """Return a layer that sleeps so many times as long."""
        return self._replace(forward_s=factor * self.forward_s, backward_s=factor * self.backward_s)


class _Whole(torch.autograd.Function):
    """Sleeps forward, and backward once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:  # noqa: ANN401
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        time.sleep(ctx.backward_s)
        return gradients[0].clone(), torch.zeros(1), None, None


class _Input(torch.autograd.Function):
    """Sleeps forward, and where its input's gradient is made."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, input_s: float) -> torch.Tensor:  # noqa: ANN401
        ctx.input_s = input_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        time.sleep(ctx.input_s)
        return gradients[0].clone(), None, None


class _Weight(torch.autograd.Function):
    """Sleeps where the weight's gradient is made."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, weight_s: float) -> torch.Tensor:  # noqa: ANN401
        ctx.weight_s = weight_s
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        time.sleep(ctx.weight_s)
        return gradients[0], None


class SleepingModule(nn.Module):
    """One layer; ``split``: the halves of its backward, of one length, can sleep apart."""

    def __init__(self, pace: Pace, split: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.pace, self.split = pace, split

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sleep; the first layer widens its input, and makes a gradient for it as the others do."""
        rows, (forward_s, backward_s, values) = len(x), self.pace
        if x.shape[1] != values:
            x = x.expand(rows, values)
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()
        if not self.split:
            made = _apply(_Whole, x, self.weight, rows * forward_s, rows * backward_s)
            # Layers of models end in torch's own operators, whose outputs are less trouble to keep track of.
            return made.view_as(made)
        half_s = rows * backward_s / 2
        return _apply(_Input, x, rows * forward_s, half_s) + _apply(_Weight, self.weight, half_s)


def _apply(function: type[torch.autograd.Function], *arguments: object) -> torch.Tensor:
    made: torch.Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return made


class _Captured(SleepingModule):
    """A layer, called as those of captured graphs are; the last one makes the loss."""

    def __init__(self, pace: Pace, split: bool, last: bool) -> None:
        super().__init__(pace, split)
        self.last = last

    def forward(self, rows: int, x: torch.Tensor) -> tuple[torch.Tensor]:  # type: ignore[override]
        made = super().forward(x)
        return (made.mean() if self.last else made,)


def modules_of(paces: Sequence[Pace], split: bool) -> list[SleepingModule]:
    """Return the layers as modules."""
    return [SleepingModule(pace, split) for pace in paces]


def graph_of(paces: Sequence[Pace], split: bool) -> LayerGraph:
    """Return the layers as a graph; their weights are ``0.weight``, ``1.weight`` ..."""
    last = len(paces) - 1
    layers = tuple(
        Layer(
            name=str(index),
            modules=(str(index),),
            inputs=(f"h{index - 1}" if index else INPUT,),
            outputs=(f"h{index}" if index < last else "loss",),
            parameters={"weight": f"{index}.weight"},
            buffers={},
            random=False,
            fingerprint=str(index),
            module=_Captured(pace, split, index == last),
        )
        for index, pace in enumerate(paces)
    )
    tensors = [TensorSpec(INPUT, None, ("0",), (1,), 0, torch.float32, False)]
    for index in range(last):
        sizes = (paces[index].values,)
        tensors.append(TensorSpec(f"h{index}", str(index), (str(index + 1),), sizes, 0, torch.float32, True))
    return LayerGraph(layers, tuple(tensors), (INPUT,), ("loss",), portable=False)


def user_of(samples: int) -> UserModel:
    """Return a model file's worth of functions."""
    functions = {
        "dataset": lambda: [{"x": torch.zeros(1)}] * samples,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    }
    return UserModel("sleeping.py", Path(__file__), "0" * 64, nn.Identity, functions)


def weights_of(names: Iterable[str]) -> Mapping[str, torch.Tensor]:
    """Return the initial weights of those names."""
    return {name: torch.zeros(1) for name in names}
