"""Team: the ranks that run a replica together, of whose layers each has a part.

In come whole layers, and the cuts that the plan records; out come the rank's parts of them, which add up over the team
as they run, and which indices the rank has of every parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from autopar.capture.graph import Layer, LayerGraph, TensorSpec
from autopar.capture.split.cuts import AttributeCut
from autopar.capture.split.names import MismatchError
from autopar.capture.split.rewrite import split_layer
from autopar.capture.split.rules.attention import draw_alone, drops_weights
from autopar.capture.split.sums import Summand
from autopar.errors import UsageError
from autopar.formats.cuts import CutPiece, ParameterCut
from autopar.formats.plan import Plan
from autopar.ranks.channel import bytes_of
from autopar.runtime.messages.transport import Transport, join, parts_that_sum, sendable
from autopar.runtime.stage.parameters import sharded_ranges
from autopar.schedules.expand import stages_of, team_of


def cuts_of(plan: Plan, rank: int) -> dict[str, ParameterCut]:
    """Return how the parameters of a rank's stages are cut, by the model's own names; others are whole."""
    return {cut.parameter: cut for stage in stages_of(plan, rank)[0] for cut in plan.stages[stage].cuts}


def part_of_tensor(cut: ParameterCut, part: int, whole: torch.Tensor) -> torch.Tensor:
    """Return what a part has of a parameter, or of something of its shape."""
    slices = [whole.narrow(cut.dim, piece.start, piece.size) for piece in cut.pieces(part)]
    return torch.cat(slices, dim=cut.dim)


def cut_views(
    cut: ParameterCut, part: int, bounds: tuple[int, int], own: torch.Tensor
) -> Iterator[tuple[CutPiece, torch.Tensor]]:
    """Yield what a rank has of a part, piece by piece, with views of it.

    Args:
        cut: of the parameter.
        part: which part.
        bounds: the indices among the part's own that the rank has: all of them, unless replicas divide the part.
        own: what the rank has, of the parameter or of something of its shape.
    """
    for piece in cut.pieces(part):
        low, high = max(bounds[0], piece.offset), min(bounds[1], piece.offset + piece.size)
        if low < high:
            here = CutPiece(piece.start + low - piece.offset, low, high - low, piece.parts)
            yield here, own.narrow(cut.dim, low - bounds[0], high - low)


def check_split_seeds(plan: Plan, graph: LayerGraph) -> None:
    """Refuse ``split_seeds`` where no layer that a team splits attends with dropout in one operator.

    Raises:
        UsageError: says to leave it out.
    """
    layers = (graph.layer(name) for stage in plan.stages if stage.tensor_parallel > 1 for name in stage.layers)
    modules = (layer.module for layer in layers)
    if not any(drops_weights(module.graph.nodes) for module in modules if isinstance(module, fx.GraphModule)):
        raise UsageError(
            "`split_seeds`: no stage of several devices a replica attends in one operator with dropout; leave it out"
        )


class Team:
    """One rank's place among those that run its replica together; alone in most plans."""

    def __init__(self, plan: Plan, rank: int, transport: Transport, *, split_seeds: bool = False) -> None:
        """Find the rank's team, and which indices it has of its stages' parameters.

        Args:
            plan: what is carried out.
            rank: which rank this is.
            transport: carries sums.
            split_seeds: whether fused attention's dropout is drawn by every part for itself.
        """
        self._split_seeds = split_seeds
        self.draws_alone = False
        """Whether some of its layers do so."""
        self.ranks = team_of(plan, rank)
        """By part."""
        self.part = self.ranks.index(rank)
        self.cuts = cuts_of(plan, rank)
        """Of parameters, by the model's own names; others are whole on every rank of the team."""
        self._plan, self._transport = plan, transport
        self._allowed = {stage: frozenset(parts_that_sum(plan.stages[stage])) for stage in stages_of(plan, rank)[0]}
        """Sets of parts that the ranks of a team add up over, by stage."""
        self.summands: dict[str, tuple[Summand, ...]] = {}
        """Of parameters whose gradients are to be added up when a mini-batch is complete, by the model's own names."""

    def sum(self, tensor: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
        """Return the sum of what some parts give; all of these ranks ask, in the same order."""
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._transport.all_reduce(total, self.ranks_of(parts)).wait()
        return total

    def gather(self, tensor: torch.Tensor, dim: int, parts: tuple[int, ...]) -> torch.Tensor:
        """Return what some parts give, one behind the other along a dimension; all of these ranks ask."""
        own = sendable(tensor.detach())
        found = own.new_empty((len(parts), *own.shape))
        self._transport.all_gather(bytes_of(found), bytes_of(own), self.ranks_of(parts)).wait()
        return found.movedim(0, dim).flatten(dim, dim + 1)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, parts: tuple[int, ...]) -> torch.Tensor:
        """Return this part's slice of the sum of what some parts give; all of these ranks ask, in the same order."""
        slices = torch.stack(tensor.detach().chunk(len(parts), dim))
        own = slices.new_empty(slices.shape[1:])
        self._transport.reduce_scatter(own.unsqueeze(0), slices, self.ranks_of(parts)).wait()
        return own

    def ranks_of(self, parts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks that have some parts."""
        return tuple(self.ranks[part] for part in parts)

    def split(self, stage: int, layers: Sequence[Layer]) -> list[Layer]:
        """Return this rank's parts of a stage's layers, cut as the plan says.

        Raises:
            UsageError: they cannot be cut so; names the layer.
        """
        if len(self.ranks) == 1:
            return list(layers)
        uses = Counter(name for layer in layers for name in layer.parameters.values())
        uses.update(tied.parameter for tied in self._plan.tied)
        once = {name for name, count in uses.items() if count == 1}
        return [self._part_of(stage, layer, once) for layer in layers]

    def _part_of(self, stage: int, layer: Layer, deferred: Collection[str]) -> Layer:
        again = "profile and plan again"
        if not isinstance(layer.module, fx.GraphModule):
            if self.divides(layer):
                raise UsageError(f"layer {layer.name} was listed, not captured, and the plan has parts of it; {again}")
            return layer
        try:
            return self.split_captured(stage, layer, self._plan.stages[stage].sequence_dims, deferred)
        except MismatchError as error:
            raise UsageError(f"layer {layer.name} does not split as the plan says: {error}; {again}") from error

    def divides(self, layer: Layer) -> bool:
        """Whether this rank has a part of some parameter of a layer."""
        return any(name in self.cuts for name in layer.parameters.values())

    def split_captured(
        self, stage: int, layer: Layer, sequence: Mapping[str, int] | None = None, deferred: Collection[str] = ()
    ) -> Layer:
        """Return this rank's part of a captured layer, cut as the plan says of its stage.

        Args:
            stage: whose layer it is.
            layer: as captured, in training or evaluation mode.
            sequence: dimensions of tensors that the team has in slices.
            deferred: names of parameters whose gradients this rank adds up once a mini-batch.

        Raises:
            MismatchError: it cannot be cut so, or then adds up over parts that do not add up as the plan has it.
        """
        recorded = {
            attribute: AttributeCut(self.cuts[name].dim, self.cuts[name].parts)
            for attribute, name in layer.parameters.items()
            if name in self.cuts
        }
        own = {name: dim for name, dim in (sequence or {}).items() if name in (*layer.inputs, *layer.outputs)}
        later = [attribute for attribute, name in layer.parameters.items() if name in deferred]
        part = split_layer(layer, self, self.part, len(self.ranks), recorded, own, later)
        others = sorted(part.summing_parts - self._allowed[stage])
        if others:
            raise MismatchError(f"it adds up over parts {list(others[0])}, as the plan does not")
        if self._split_seeds and drops_weights(part.module.graph.nodes):
            self.draws_alone = True
            draw_alone(part.module, self.part)
        self.summands |= {layer.parameters[attribute]: found for attribute, found in part.summands.items()}
        return replace(layer, module=part.module)

    def local_spec(self, spec: TensorSpec, stages: Iterable[int]) -> TensorSpec:
        """Return what this rank has of a tensor between layers; of one that is cut along its sequence, a slice."""
        dims = [self._plan.stages[stage].sequence_dims.get(spec.name) for stage in stages]
        dim = next((each for each in dims if each is not None), None)
        if dim is None:
            return spec
        at, sizes = dim - (dim > spec.batch_dim), list(spec.sizes)
        sizes[at] //= len(self.ranks)
        return replace(spec, sizes=tuple(sizes))

    def take(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return what this rank has of a parameter, or of something of its shape."""
        cut = self.cuts.get(name)
        return whole if cut is None else part_of_tensor(cut, self.part, whole)

    def answered(self, name: str, parameter: torch.Tensor, own: torch.Tensor) -> list[torch.Tensor]:
        """Return views of what this rank answers for, of all of its team that have the same.

        Args:
            name: of a parameter.
            parameter: this rank's, which replicas may divide.
            own: what the rank has of it, or of something of its shape.
        """
        cut = self.cuts.get(name)
        if cut is None:
            return [own] if self.part == 0 else []
        bounds = next(((start, stop) for dim, start, stop in sharded_ranges(parameter) if dim == cut.dim), None)
        views = cut_views(cut, self.part, bounds or (0, own.shape[cut.dim]), own)
        return [view for piece, view in views if piece.parts[0] == self.part]

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
        cut = self.cuts.get(name)
        if cut is None:
            if self.part == 0:
                whole.copy_(own)
            return
        for piece in cut.pieces(self.part):
            if piece.parts[0] == self.part:
                there = whole.narrow(cut.dim, piece.start, piece.size)
                there.copy_(own.narrow(cut.dim, piece.offset, piece.size))

    def whole(self, name: str, own: torch.Tensor) -> torch.Tensor:
        """Return all of a parameter, or of something of its shape; the ranks of the team ask together."""
        cut = self.cuts.get(name)
        if cut is None:
            return own
        found = torch.zeros(self.shape(name, own.shape), dtype=own.dtype, device=own.device)
        self.put(name, own, found)
        join(found, self.ranks, self._transport)
        return found
