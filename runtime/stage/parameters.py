"""What one rank has of its stages: its team's parts of layers, and parameters and buffers by the model's own names.

In come whole layers, and the cuts that the plan records for a team, which runs a replica together. Out come the rank's
parts of them, which add up over the team as they run, and which indices the rank has of every parameter. Replicas may
divide what is left further; then the optimizer is given whole parameters as tensors of the divided kind, too. Buffers
that forwards write are made equal on all replicas after every step, as the plan asks.

In evaluation mode a layer may end elsewhere than in training, and then need whole what training leaves in parts: a head
that is split together with the loss gives whole predictions. Such a layer is joined: all ranks of a team run it whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx, nn
from torch.func import functional_call

from autopar.capture.graph import Layer, LayerGraph, TensorSpec
from autopar.capture.model.meta import materialize, place
from autopar.capture.split.names import MismatchError
from autopar.capture.split.rewrite import split_as_recorded
from autopar.capture.split.rules.draws import draw_locally, drops_weights
from autopar.capture.split.sums import Summand
from autopar.errors import FileError, UsageError
from autopar.formats.cuts import CutPiece, ParameterCut
from autopar.formats.plan import Plan, ReplicatedState
from autopar.formats.program import Program
from autopar.options.train import TrainSettings
from autopar.ranks.channel import bytes_of
from autopar.runtime.messages.transport import Transport, join, parts_that_sum, sendable
from autopar.runtime.stage.layers import wrap

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def cuts_of(plan: Plan, rank: int) -> dict[str, ParameterCut]:
    """Return how the parameters of a rank's stages are cut, by the model's own names; others are whole."""
    return {cut.parameter: cut for stage in plan.ownership.ranks[rank].stages for cut in plan.stages[stage].cuts}


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
        self.draws_per_part = False
        """Whether some of its layers do so."""
        own = plan.ownership.ranks[rank]
        self.ranks, self.part = own.team, own.part
        """By part; and this rank's."""
        self.cuts = cuts_of(plan, rank)
        """Of parameters, by the model's own names; others are whole on every rank of the team."""
        self._plan, self._transport = plan, transport
        self._allowed = {stage: frozenset(parts_that_sum(plan.stages[stage])) for stage in own.stages}
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

    def _part_of(self, stage: int, layer: Layer, deferred_names: Collection[str]) -> Layer:
        again = "profile and plan again"
        if not isinstance(layer.module, fx.GraphModule):
            if self.divides(layer):
                raise UsageError(f"layer {layer.name} was listed, not captured, and the plan has parts of it; {again}")
            return layer
        try:
            return self.split_captured(stage, layer, self._plan.stages[stage].sequence_dims, deferred_names)
        except MismatchError as error:
            raise UsageError(f"layer {layer.name} does not split as the plan says: {error}; {again}") from error

    def divides(self, layer: Layer) -> bool:
        """Whether this rank has a part of some parameter of a layer."""
        return any(name in self.cuts for name in layer.parameters.values())

    def split_captured(
        self, stage: int, layer: Layer, sequence: Mapping[str, int] | None = None, deferred_names: Collection[str] = ()
    ) -> Layer:
        """Return this rank's part of a captured layer, cut as the plan says of its stage.

        Args:
            stage: whose layer it is.
            layer: as captured, in training or evaluation mode.
            sequence: dimensions of tensors that the team has in slices.
            deferred_names: names of parameters whose gradients this rank adds up once a mini-batch.

        Raises:
            MismatchError: it cannot be cut so, or then adds up over parts that do not add up as the plan has it.
        """
        part = split_as_recorded(layer, self, self.part, len(self.ranks), self.cuts, sequence or {}, deferred_names)
        others = sorted(part.summing_parts - self._allowed[stage])
        if others:
            raise MismatchError(f"it adds up over parts {list(others[0])}, as the plan does not")
        if self._split_seeds and draw_locally(part.module, self.part):
            self.draws_per_part = True
        self.summands |= {layer.parameters[attribute]: found for attribute, found in part.summands.items()}
        return replace(layer, module=part.module)

    def local_spec(self, spec: TensorSpec, stages: Iterable[int]) -> TensorSpec:
        """Return what this rank has of a tensor between layers; of one that is cut along its sequence, a slice."""
        dims = [self._plan.stages[stage].sequence_dims.get(spec.name) for stage in stages]
        dim = next((each for each in dims if each is not None), None)
        return spec if dim is None else spec.slice(dim, len(self.ranks))

    def take(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return what this rank has of a parameter, or of something of its shape."""
        cut = self.cuts.get(name)
        return whole if cut is None else part_of_tensor(cut, self.part, whole)

    def owned_views(self, name: str, parameter: torch.Tensor, own: torch.Tensor) -> list[torch.Tensor]:
        """Return views of what this rank answers for, of all of its team that have the same.

        Args:
            name: of a parameter.
            parameter: this rank's, which replicas may divide.
            own: what the rank has of it, or of something of its shape.
        """
        cut = self.cuts.get(name)
        if cut is None:
            return [own] if self.part == 0 else []
        views = cut_views(cut, self.part, sharded_bounds(parameter, cut.dim), own)
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


Weights = Callable[[Iterable[str]], Mapping[str, torch.Tensor]]
"""Reads initial parameters and buffers by name."""


class RankInputs(NamedTuple):
    """What the layers of a rank are made of."""

    plan: Plan
    program: Program
    graph: LayerGraph
    weights: Weights
    settings: TrainSettings
    team: Team
    """The rank's."""
    transport: Transport
    device: torch.device
    rank: int


class LocalParameters:
    """Parameters, in the order in which layers read them, and buffers."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], buffers: Mapping[str, torch.Tensor]) -> None:
        """Begin with whole ones."""
        self.parameters, self.buffers = dict(parameters), dict(buffers)

    def state(self) -> dict[str, torch.Tensor]:
        """Return both together."""
        return {**self.parameters, **self.buffers}

    def trainable_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that have gradients."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @contextmanager
    def dividing(self, names: set[str], layers: Sequence[Layer]) -> Iterator[frozenset[torch.nn.Parameter]]:
        """Return the context in which replicas divide the named parameters of a stage's layers; it gives their others.

        Nothing is held of them meanwhile: as soon as a layer's are divided, they must be nowhere as a whole. After it,
        what is held of the layers' parameters is what the layers have by then.
        """
        order = list(self.parameters)
        whole = {name for layer in layers for name in layer.parameters.values()} - names
        for name in names:
            del self.parameters[name]
        yield frozenset(self.parameters[name] for name in whole)
        left = {name: layer.parameter(attribute) for layer in layers for attribute, name in layer.parameters.items()}
        self.parameters = {name: left[name] if name in left else self.parameters[name] for name in order}


def hold(
    plan: Plan, stages: Mapping[int, Sequence[Layer]], weights: Weights, device: torch.device, team: Team | None = None
) -> LocalParameters:
    """Put the parameters and buffers of a rank's layers in place, and return them.

    Args:
        plan: says what replicas divide.
        stages: the layers, by stage; their modules are given what they lack.
        weights: reads the values.
        device: where they go, but for what replicas divide: that waits in the host's memory until it is.
        team: says what the rank has of parameters that are cut.

    Raises:
        FileError: the initial weights lack some.
    """
    layers = [layer for each in stages.values() for layer in each]
    trainable: dict[str, bool] = {}
    wanted: dict[str, None] = {}
    for layer in layers:
        for attribute, name in layer.parameters.items():
            trainable[name] = layer.parameter(attribute).requires_grad
        wanted.update(dict.fromkeys([*layer.parameters.values(), *layer.buffers.values()]))
    values = _read(weights, wanted, team)
    parts = {name for index, each in stages.items() for name in sharded_parameter_names(plan, index, each)}
    parameters = {
        # What is divided need not fit the device as a whole.
        name: torch.nn.Parameter(values[name].to("cpu" if name in parts else device), requires_grad=needed)
        for name, needed in trainable.items()
    }
    held = LocalParameters(parameters, {name: values[name].to(device) for name in wanted if name not in trainable})
    for layer in layers:
        materialize(layer, held.state(), device)
    return held


def _read(weights: Weights, names: Collection[str], team: Team | None) -> Mapping[str, torch.Tensor]:
    values = weights(names)
    if team is not None and team.cuts:
        values = {name: team.take(name, value) for name, value in values.items()}
    missing = [name for name in names if name not in values]
    if missing:
        raise FileError(f"the initial weights lack {missing[0]!r} and {len(missing) - 1} more; check `weights`")
    return values


def replicate_buffers(
    layers: Iterable[Layer],
    local_parameters: LocalParameters,
    how: ReplicatedState | None,
    transport: Transport,
    ranks: tuple[int, ...],
    rank: int,
) -> Callable[[], None]:
    """Return what makes the buffers that layers write alike on all replicas; every replica calls it at once.

    Args:
        layers: the rank's.
        local_parameters: have their buffers.
        how: whose values all replicas get: those of the first, or the mean of all, where numbers are floating.
        transport: carries sums.
        ranks: the replicas, the first one first.
        rank: this one.
    """
    written = [layer.writes.buffers for layer in layers if layer.writes is not None]
    names = dict.fromkeys(name for each in written for name in each) if how and len(ranks) > 1 else {}
    buffers = [local_parameters.buffers[name] for name in names]

    @torch.no_grad()
    def synchronize() -> None:
        for buffer in buffers:
            mean = how == "average" and (buffer.is_floating_point() or buffer.is_complex())
            # Backends do not add up booleans; of these and of integers, the first replica's are taken.
            sent = buffer.to(torch.int64) if buffer.dtype is torch.bool else buffer.clone()
            if not mean and rank != ranks[0]:
                sent.zero_()
            transport.all_reduce(sent, ranks).wait()
            buffer.copy_(sent / len(ranks) if mean else sent)

    return synchronize


def sharded_parameter_names(plan: Plan, stage: int, layers: Iterable[Layer]) -> set[str]:
    """Return the names of the parameters of a stage's layers of which every replica is to keep a part.

    Those that other stages hold, too, stay whole, and so does what has no rows or cannot be reduced in parts: scalars,
    empty tensors, complex numbers.
    """
    if plan.stages[stage].shard == "none":
        return set()
    found = {name: layer.parameter(attribute) for layer in layers for attribute, name in layer.parameters.items()}
    parts = {name for name, each in found.items() if each.dim() and each.numel() and not each.is_complex()}
    return parts - {tied.parameter for tied in plan.tied}


def first_stages(plan: Plan, graph: LayerGraph) -> dict[str, int]:
    """Return, for every parameter and buffer that layers read, the first stage that holds it."""
    first: dict[str, int] = {}
    for stage, placed in enumerate(plan.stages):
        for layer in map(graph.layer, placed.layers):
            for name in (*layer.parameters.values(), *layer.buffers.values()):
                first.setdefault(name, stage)
    return first


class OptimizerParameters:
    """Stand-ins for whole parameters, of the kind of the divided ones beside them, whose values are theirs.

    Torch's kernels for many parameters at once would refuse some of one kind and some of the other.
    """

    def __init__(self, trainable_parameters: Mapping[str, torch.nn.Parameter], mesh: DeviceMesh | None) -> None:
        """Make them; without a mesh of replicas that divide parameters, there are none."""
        self._twins: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self.trainable_parameters = dict(trainable_parameters)
        """By the model's own names."""
        if mesh is not None:
            from torch.distributed.tensor import DTensor, Replicate

            self._replicated = partial(DTensor.from_local, device_mesh=mesh, placements=[Replicate()], run_check=False)
            # Complex numbers are not divided: kernels take them by themselves.
            found = [each for each in trainable_parameters.values() if not each.is_complex()]
            whole = [each for each in found if not isinstance(each, DTensor)]
            self._twins = {each: torch.nn.Parameter(self._replicated(each.detach())) for each in whole}
        self.optimizer_parameters = {
            name: self._twins.get(parameter, parameter) for name, parameter in trainable_parameters.items()
        }
        """What an optimizer is given, in the order of the trained parameters."""

    def set_gradients(self) -> None:
        """Give the twins the gradients of their parameters, before the optimizer steps."""
        for parameter, twin in self._twins.items():
            twin.grad = None if parameter.grad is None else self._replicated(parameter.grad)


def sharded_ranges(tensor: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return (dimension, start, stop) of what is here of a tensor that replicas divide, where it is not all."""
    if not hasattr(tensor, "to_local"):
        return []
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placed: Any = tensor
    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, placed.device_mesh, placed.placements)
    sides = enumerate(zip(sizes, starts, tensor.shape, strict=True))
    return [(dim, start, start + size) for dim, (size, start, whole) in sides if size != whole]


def sharded_bounds(tensor: torch.Tensor, dim: int) -> tuple[int, int]:
    """Return the first index of a dimension that is here, and the one behind the last."""
    return next(((start, stop) for at, start, stop in sharded_ranges(tensor) if at == dim), (0, tensor.shape[dim]))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this replica's part of a tensor that replicas divide, and any other as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor; of one that replicas divide, they ask for it together."""
    found: torch.Tensor = tensor.detach()
    return found.full_tensor() if hasattr(found, "full_tensor") else found


class _JoinedLayer(nn.Module):
    """Joins the parts of a layer's parameters whenever it runs; nothing of that stays, and no gradient passes."""

    def __init__(self, module: nn.Module, names: Mapping[str, str], team: Team) -> None:
        """Take what the layer computes, and the names of the parameters that are cut, by attribute."""
        super().__init__()
        self.module = module
        self._names, self._team = dict(names), team

    def forward(self, *arguments: object) -> Any:  # noqa: ANN401
        """Return what the whole layer does."""
        by_name: dict[str, torch.Tensor] = {}
        for attribute, name in self._names.items():
            if name not in by_name:
                by_name[name] = self._team.whole(name, self.module.get_parameter(attribute).detach())
        return functional_call(self.module, {at: by_name[name] for at, name in self._names.items()}, arguments)


def with_parts(layer: Layer, team: Team) -> Layer:
    """Return a layer after its parameters have got the shapes of this rank's parts; they have no values."""
    for attribute, name in layer.parameters.items():
        if name in team.cuts:
            own = team.take(name, layer.parameter(attribute).detach().to("meta"))
            place(layer.module, attribute, nn.Parameter(own, requires_grad=False))
    return layer


def join_layer(layer: Layer, team: Team) -> Layer:
    """Return a layer that has parts of its parameters as one that runs whole."""
    names = {attribute: name for attribute, name in layer.parameters.items() if name in team.cuts}
    return wrap(layer, _JoinedLayer(layer.module, names, team))
