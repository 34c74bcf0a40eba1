"""Pass: a segment's way forth and back with one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopar.capture.halves import Halves
from autopar.runtime.recompute import Before, forgetting
from autopar.runtime.segment import Segment

__all__ = ["Pass", "taken"]

_UNRECORDED = nullcontext()


class Pass:
    """One forward of a segment, and its backward, whole or in halves.

    What enters and what leaves are tensors without history. The backward takes the ``.grad`` that later segments have
    left in the outputs, and what it is given by other stages; it adds to that of the inputs.
    """

    def __init__(
        self,
        segment: Segment,
        rows: int,
        values: Mapping[str, torch.Tensor],
        seed: Callable[[str], None],
        *,
        split: bool,
    ) -> None:
        """Take what the forward needs.

        Args:
            segment: whose it is.
            rows: samples in the share.
            values: what it reads, and maybe more.
            seed: called with the name of every layer that draws random numbers, just before it runs.
            split: whether the backward comes in halves.
        """
        self._segment, self._rows, self._seed = segment, rows, seed
        self._inputs = {name: values[name] for name in segment.inputs}
        self._outputs: dict[str, torch.Tensor] = {}
        self._edges: dict[str, GradientEdge] | None = None
        self._halves = Halves() if split else None
        self._before: Before | None = None

    def forward(self) -> dict[str, torch.Tensor]:
        """Run forward; return what it makes."""
        inputs, recomputed = self._inputs, self._segment.recomputed
        if recomputed:
            self._before = self._segment.before(inputs)
            self._inputs = {**inputs, **self._before.inputs}
        with forgetting() if recomputed else self._recording():
            made = self._segment.run(self._rows, inputs, self._seed)
        if not recomputed:
            self._keep(made)
        self._outputs = {name: each.detach().requires_grad_(each.requires_grad) for name, each in made.items()}
        return self._outputs

    def recompute(self) -> None:
        """Run a segment that keeps its inputs only forward again, unless that is done."""
        if self._edges is None:
            before, self._before = self._before, None
            with self._recording():
                self._keep(self._segment.run(self._rows, self._inputs, self._seed, again=before))

    def backward(self, given: Mapping[str, torch.Tensor]) -> None:
        """Run the backward; ``given`` are gradients of outputs."""
        edges, gradients = self._begin(given)
        if edges:
            torch.autograd.backward(edges, gradients)

    def backward_input(self, given: Mapping[str, torch.Tensor]) -> None:
        """Run the half of the backward that makes the inputs' gradients."""
        assert self._halves is not None
        edges, gradients = self._begin(given)
        leaves = list(self._inputs.values())
        for leaf, gradient in zip(leaves, self._halves.input(edges, gradients, leaves), strict=True):
            if gradient is not None:
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        self._inputs.clear()

    def backward_weight(self) -> None:
        """Run the other half, which makes the parameters' gradients."""
        assert self._halves is not None
        self._halves.weight()

    def _recording(self) -> AbstractContextManager[object]:
        return _UNRECORDED if self._halves is None else self._halves.recording()

    def _keep(self, made: Mapping[str, torch.Tensor]) -> None:
        """Keep of a forward what its backward needs."""
        self._edges = {name: _edge(each) for name, each in made.items() if each.requires_grad}
        self._inputs = {name: each for name, each in self._inputs.items() if each.requires_grad}

    def _begin(self, given: Mapping[str, torch.Tensor]) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Return where the backward starts and with which gradients, and let go of the outputs."""
        self.recompute()
        edges, gradients = [], []
        for name, edge in (self._edges or {}).items():
            output = self._outputs[name]
            for each in (given.get(name), taken(output)):
                if each is not None:
                    edges.append(edge)
                    gradients.append(each.to(output.dtype))
        self._outputs, self._edges = {}, {}
        return edges, gradients


def taken(leaf: torch.Tensor) -> torch.Tensor | None:
    """Return a leaf's gradient, and let go of it: the graph of a half that is to come holds the leaf."""
    gradient, leaf.grad = leaf.grad, None
    return gradient


def _edge(tensor: torch.Tensor) -> GradientEdge:
    """Return where a tensor's gradient goes; for one that torch's own operators made, without torch's detours.

    A function in Python does not keep its own history, for which torch finds a way.
    """
    node = tensor.grad_fn
    if node is None or isinstance(cast(object, node), BackwardCFunction):
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)
