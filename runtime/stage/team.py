"""Team: the ranks that run a replica together, of whose layers each has a part.

In come whole layers, and the cuts that the plan records; out come the rank's parts of them, which add up over the team
as they run, and which indices the rank has of every parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from autopar.capture.graph import Layer
from autopar.capture.split.cuts import ParameterCut as LayerCut
from autopar.capture.split.names import MismatchError
from autopar.capture.split.rewrite import split_layer
from autopar.errors import UsageError
from autopar.formats.cuts import ParameterCut
from autopar.formats.plan import Plan
from autopar.runtime.messages.transport import Transport, join, parts_that_sum
from autopar.schedules.expand import stages_of, team_of


def cuts_of(plan: Plan, rank: int) -> dict[str, ParameterCut]:
    """Return how the parameters of a rank's stages are cut, by the model's own names; others are whole."""
    return {cut.parameter: cut for stage in stages_of(plan, rank)[0] for cut in plan.stages[stage].cuts}


def part_of_tensor(cut: ParameterCut, part: int, whole: torch.Tensor) -> torch.Tensor:
    """Return what a part has of a parameter, or of something of its shape."""
    slices = [whole.narrow(cut.dim, start, size) for start, _, size in cut.offsets(part)]
    return torch.cat(slices, dim=cut.dim)


class Team:
    """One rank's place among those that run its replica together; alone in most plans."""

    def __init__(self, plan: Plan, rank: int, transport: Transport) -> None:
        """Find the rank's team, and which indices it has of its stages' parameters.

        Args:
            plan: what is carried out.
            rank: which rank this is.
            transport: carries sums.
        """
        self.ranks = team_of(plan, rank)
        """By part."""
        self.part = self.ranks.index(rank)
        self.cuts = cuts_of(plan, rank)
        """Of parameters, by the model's own names; others are whole on every rank of the team."""
        self._plan, self._transport = plan, transport

    def sum(self, tensor: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
        """Return the sum of what some parts give; all of these ranks ask, in the same order."""
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._transport.all_reduce(total, tuple(self.ranks[part] for part in parts)).wait()
        return total

    def gather(self, tensor: torch.Tensor, dim: int, parts: tuple[int, ...]) -> torch.Tensor:
        """Return what some parts give, one behind the other along a dimension; all of these ranks ask."""
        shape = list(tensor.shape)
        shape[dim] *= len(parts)
        found = tensor.new_zeros(shape)
        found.narrow(dim, parts.index(self.part) * tensor.shape[dim], tensor.shape[dim]).copy_(tensor.detach())
        join(found, tuple(self.ranks[part] for part in parts), self._transport)
        return found

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, parts: tuple[int, ...]) -> torch.Tensor:
        """Return this part's slice of the sum of what some parts give; all of these ranks ask, in the same order."""
        length = tensor.shape[dim] // len(parts)
        own = self.sum(tensor, parts).narrow(dim, parts.index(self.part) * length, length)
        return own.clone(memory_format=torch.contiguous_format)

    def split(self, stage: int, layers: Sequence[Layer]) -> list[Layer]:
        """Return this rank's parts of a stage's layers, cut as the plan says.

        Raises:
            UsageError: they cannot be cut so; names the layer.
        """
        if len(self.ranks) == 1:
            return list(layers)
        allowed = set(parts_that_sum(self._plan.stages[stage]))
        return [self._part_of(layer, allowed) for layer in layers]

    def _part_of(self, layer: Layer, allowed: set[tuple[int, ...]]) -> Layer:
        again = "profile and plan again"
        recorded = {
            attribute: LayerCut(self.cuts[name].dim, self.cuts[name].parts)
            for attribute, name in layer.parameters.items()
            if name in self.cuts
        }
        if not isinstance(layer.module, fx.GraphModule):
            if recorded:
                raise UsageError(f"layer {layer.name} was listed, not captured, and the plan has parts of it; {again}")
            return layer
        try:
            part = split_layer(layer, self, self.part, len(self.ranks), recorded)
        except MismatchError as error:
            raise UsageError(f"layer {layer.name} does not split as the plan says: {error}; {again}") from error
        other = next((parts for parts in sorted(part.summing_parts) if parts not in allowed), None)
        if other is not None:
            raise UsageError(f"layer {layer.name} adds up over parts {list(other)}, as the plan does not; {again}")
        return replace(layer, module=part.module)

    def take(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return what this rank has of a parameter, or of something of its shape."""
        cut = self.cuts.get(name)
        return whole if cut is None else part_of_tensor(cut, self.part, whole)

    def answers_for(self, name: str) -> bool:
        """Tell whether this rank is the first of its team with just these elements of a parameter or buffer."""
        cut = self.cuts.get(name)
        return self.part == (0 if cut is None else cut.first_with(self.part))

    def shape(self, name: str, own: Sequence[int]) -> tuple[int, ...]:
        """Return the whole shape of a parameter, or of something of its shape, given this rank's."""
        cut = self.cuts.get(name)
        if cut is None:
            return tuple(own)
        return (*own[: cut.dim], cut.size, *own[cut.dim + 1 :])

    def outline(self, name: str, own: torch.Tensor) -> torch.Tensor:
        """Return a tensor whose shape and type are those of :meth:`whole`; values it may have none."""
        if name not in self.cuts:
            return own
        return torch.empty(self.shape(name, own.shape), dtype=own.dtype, device="meta")

    def put(self, name: str, own: torch.Tensor, whole: torch.Tensor) -> None:
        """Copy what this rank answers for of a parameter, or of something of its shape, to where it is in the whole."""
        if not self.answers_for(name):
            return
        cut = self.cuts.get(name)
        if cut is None:
            whole.copy_(own)
            return
        for start, offset, size in cut.offsets(self.part):
            whole.narrow(cut.dim, start, size).copy_(own.narrow(cut.dim, offset, size))

    def whole(self, name: str, own: torch.Tensor) -> torch.Tensor:
        """Return all of a parameter, or of something of its shape; the ranks of the team ask together."""
        cut = self.cuts.get(name)
        if cut is None:
            return own
        found = torch.zeros(self.shape(name, own.shape), dtype=own.dtype, device=own.device)
        self.put(name, own, found)
        join(found, self.ranks, self._transport)
        return found
