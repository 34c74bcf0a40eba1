"""A part of a layer that runs alone: it takes the time and the memory that it takes beside others, and waits for none.

    sums = LoneSums()
    part = make(sums, 0)
    part.module.register_forward_pre_hook(sums.begin)
    sums.keep(rows, PartsBeside(make, 8).run(rows, inputs)[0])
    part.module(rows, x)

What a part gives to a sum is not what it gets. On its own values, a region behind the sum might divide by zero, or take
the logarithm of it, and numbers that are not finite take kernels another time. So all parts of a layer once run side by
side, one operator after the other, and a part that runs alone is given the sums of that run. Backwards, it gets what it
gives: gradients are multiplied by what forwards have made, so that they stay finite, too. All copies are those that the
runtime makes around what is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import fx, nn

from autopar.capture.split.rewrite import LayerPart
from autopar.capture.split.sums import Sums
from autopar.formats.profile import PartSum


class LoneSums:
    """Sums of which nothing is exchanged (:class:`autopar.capture.split.sums.Sums`)."""

    def __init__(self) -> None:
        """Begin without values of other parts."""
        self.noted: list[PartSum] | None = None
        """What would have been exchanged, if somebody takes notes."""
        self.at: Literal["forward", "backward_input", "backward_weight"] = "forward"
        """What runs, for the notes."""
        self._totals: dict[int, Sequence[torch.Tensor]] = {}
        self._next: Iterator[torch.Tensor] = iter(())

    def keep(self, rows: int, totals: Sequence[torch.Tensor]) -> None:
        """Take what the sums of a forward of so many rows are, in order, of :class:`PartsBeside`."""
        self._totals[rows] = totals

    def begin(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Begin a forward, whose first argument is the number of rows; a hook of the part's module."""
        self._next = iter(self._totals.get(arguments[0], ()))

    def sum(self, tensor: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
        """Return the sum, or what the part gives if nobody knows it."""
        self._note("all_reduce", tensor.nbytes, parts)
        return next(self._next, tensor.detach()).clone(memory_format=torch.contiguous_format)

    def gather(self, tensor: torch.Tensor, dim: int, parts: tuple[int, ...]) -> torch.Tensor:
        """Return the part's own slice in place of all."""
        own = tensor.detach().contiguous()
        # There beside what it is copied to, as where it is gathered.
        found = own.new_empty((len(parts), *own.shape))
        self._note("all_gather", found.nbytes, parts)
        return own.expand(found.shape).movedim(0, dim).flatten(dim, dim + 1)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, parts: tuple[int, ...]) -> torch.Tensor:
        """Return the part's slice of the sum, or a slice of what it gives if nobody knows the sum."""
        slices = torch.stack(tensor.detach().chunk(len(parts), dim))
        self._note("reduce_scatter", slices.nbytes, parts)
        return next(self._next, slices[0]).clone(memory_format=torch.contiguous_format)

    def _note(
        self, kind: Literal["all_reduce", "all_gather", "reduce_scatter"], size: int, parts: Sequence[int]
    ) -> None:
        if self.noted is not None:
            self.noted.append(PartSum(kind=kind, at=self.at, ranks=len(parts), bytes=size))


class _SumsBeside:
    """Sums of parts that run side by side: an operator runs once so that all give, and again to get."""

    def __init__(self, index: int, given: dict[int, torch.Tensor]) -> None:
        self._index, self._given = index, given
        self.total: torch.Tensor | None = None
        """What was summed last."""

    def sum(self, tensor: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
        self.total = torch.stack(self._exchange(tensor, parts)).sum(0)
        return self.total

    def gather(self, tensor: torch.Tensor, dim: int, parts: tuple[int, ...]) -> torch.Tensor:
        return torch.cat(self._exchange(tensor, parts), dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, parts: tuple[int, ...]) -> torch.Tensor:
        whole = torch.stack(self._exchange(tensor, parts)).sum(0)
        self.total = whole.chunk(len(parts), dim)[parts.index(self._index)]
        return self.total

    def _exchange(self, tensor: torch.Tensor, parts: tuple[int, ...]) -> list[torch.Tensor]:
        self._given[self._index] = tensor
        return [self._given.get(part, tensor) for part in parts]


class PartsBeside:
    """All parts of a layer, side by side."""

    def __init__(self, make: Callable[[Sums, int], LayerPart], count: int) -> None:
        """Make them: ``make`` returns a part, given its sums and its index."""
        self._given: dict[int, torch.Tensor] = {}
        self._sums = [_SumsBeside(index, self._given) for index in range(count)]
        self._modules = [make(sums, index).module for index, sums in enumerate(self._sums)]

    def run(self, rows: int, inputs: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Run forwards on so many rows, and on what each part reads; return what sums give each, in order."""
        runs = [fx.Interpreter(module) for module in self._modules]
        for run, own in zip(runs, inputs, strict=True):
            run.args_iter = iter((rows, *own))
        found: list[list[torch.Tensor]] = [[] for _ in runs]
        with torch.no_grad():
            # Their graphs are alike, node by node.
            for nodes in zip(*(list(module.graph.nodes) for module in self._modules), strict=True):
                _run_nodes(runs, nodes)
                self._given.clear()
                for sums, totals in zip(self._sums, found, strict=True):
                    totals += [] if sums.total is None else [sums.total]
                    sums.total = None
        return found


def _run_nodes(runs: Sequence[fx.Interpreter], nodes: Sequence[fx.Node]) -> None:
    """Run an operator of every part; what exchanges something, twice."""
    for _ in range(2 if nodes[0].op == "call_module" else 1):
        for run, node in zip(runs, nodes, strict=True):
            run.env[node] = run.run_node(node)
    for run, node in zip(runs, nodes, strict=True):
        for read in run.user_to_last_uses.get(node, []):
            del run.env[read]
