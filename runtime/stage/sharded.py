"""ShardedStage: a stage whose replicas divide its optimizer state, gradients or parameters, by torch's FSDP2.

Replicas reduce and gather together, so backwards must reach the same parameters on each. Layers of a captured graph do.
Listed modules may decide while running, by what a replica's samples hold; then one replica would reduce, or gather,
what another one does not, and sums would be of different parameters, or never come. Such replicas tell each other what
they are about to do, and raise where it differs.

Why: docs/design/decisions.md, "Runtime: All levels of sharding are FSDP2's".
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from autopar.capture.graph import Layer, TensorSpec
from autopar.capture.model.meta import place
from autopar.errors import TrainingError, UsageError, text_of
from autopar.ownership import Shard
from autopar.ranks.failure import PeerLostError
from autopar.runtime.stage.layers import used_by_several, wrap
from autopar.runtime.stage.stage import Pass, Stage

_GATHER, _REDUCE, _END = range(3)
_KINDS = 3
"""Of what a replica may come to next."""


class _GatherAgreement:
    """Compares, among the replicas of a stage, what each is about to gather or reduce in a backward."""

    def __init__(
        self, units: Sequence[FSDPModule], names: Mapping[nn.Parameter, str], group: dist.ProcessGroup, *, gathers: bool
    ) -> None:
        """Come before what FSDP2 does in backwards.

        Args:
            units: FSDP2's, one a layer, and what holds them all.
            names: of their divided parameters.
            group: the process group of the replicas.
            gathers: whether parameters are gathered in backwards.
        """
        self._names, self._group, self._gathers = dict(names), group, gathers
        self._places = {name: place for place, name in enumerate(names.values())}
        for unit in units:
            for part in unit._get_fsdp_state()._fsdp_param_groups:
                self._precede(part)

    def end(self) -> None:
        """Say that this replica's backwards of a step are done."""
        self._compare([], _END)

    def _precede(self, part: Any) -> None:  # noqa: ANN401
        gather, reduce = part.pre_backward, part.post_backward
        names = [self._names[each.sharded_param] for each in part.fsdp_params]

        def before_gathering(*arguments: object) -> None:
            if self._gathers and part._training_state != TrainingState.PRE_BACKWARD:
                self._compare(names, _GATHER)
            gather(*arguments)

        def before_reducing(*arguments: object) -> None:
            found = [name for name, each in zip(names, part.fsdp_params, strict=True) if _is_reached(each)]
            if part.reduce_grads and found:
                self._compare(found, _REDUCE)
            reduce(*arguments)

        part.pre_backward, part.post_backward = before_gathering, before_reducing

    def _compare(self, mine: Sequence[str], what: int) -> None:
        """Tell the other replicas what comes next here, and of which parameters.

        Raises:
            TrainingError: something else comes next on another replica.
        """
        total = torch.zeros(len(self._places) + _KINDS)
        total[[self._places[name] for name in mine]] = 1.0
        total[len(self._places) + what] = 1.0
        try:
            dist.all_reduce(total, group=self._group)
        except RuntimeError as error:
            raise PeerLostError(text_of(error)) from error
        counts = dict(zip(self._places, total.tolist(), strict=False))
        every = float(dist.get_world_size(self._group))
        if all(count in (0.0, every) for count in total.tolist()):
            return
        name = next((name for name, count in counts.items() if count not in (0.0, every)), next(iter(counts)))
        raise TrainingError(
            f"the backward of a micro-batch reaches {name} on some replicas of its stage and not on others, and they "
            "divide it; plan with `shard='none'`, or let every forward use it"
        )


def _is_reached(parameter: Any) -> bool:  # noqa: ANN401
    if not hasattr(parameter, "_unsharded_param"):
        return False
    return parameter.unsharded_accumulated_grad is not None or parameter.unsharded_param.grad is not None


@dataclass(frozen=True)
class Sharding:
    """What the replicas of a stage divide, and among whom."""

    level: Shard
    """Not ``none``."""
    mesh: DeviceMesh
    """Of the replicas."""
    offload: bool = False
    """Whether what is divided waits in the host's memory."""
    turning: bool = False
    """Whether the replicas take whole micro-batches in turn."""
    decides: bool = False
    """Whether layers may decide while they run which parameters they use."""


class ShardedStage(Stage):
    """A stage of which every replica keeps a part, and gathers its parameters to compute.

    Layers are gathered and reduced one by one. A parameter that several layers of the stage use is gathered for a whole
    step: divided with each of them, it would be several. Gradients are summed, not averaged: the loss of a replica is
    weighted by its samples already. Replicas that take turns gather and reduce before and after all
    micro-batches, since they do not meet in between.
    """

    def __init__(
        self,
        sharding: Sharding,
        root: FSDPModule,
        layers: Sequence[Layer],
        tensors: Sequence[TensorSpec],
        model_inputs: Sequence[str],
        loss: Sequence[str],
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        recompute: Sequence[str] = (),
    ) -> None:
        """Begin with what :func:`shard_layers` returns; the rest is as of :class:`Stage`."""
        super().__init__(layers, tensors, model_inputs, loss, autocast, recompute)
        self._sharding, self._root = sharding, root
        self._units = [cast(FSDPModule, layer.module) for layer in layers]
        every = cast(nn.Module, root).parameters()
        self.parts: list[nn.Parameter] = [parameter for parameter in every if isinstance(parameter, DTensor)]
        """This replica's, of parameters that are divided."""
        # It is never called itself, which is how FSDP2 finds out that layers belong together.
        root._get_fsdp_state()._lazy_init()
        self._gather_agreement: _GatherAgreement | None = None
        if sharding.decides:
            names = {layer.parameter(at): name for layer in layers for at, name in layer.parameters.items()}
            divided, group = {each: names[each] for each in self.parts}, sharding.mesh.get_group()
            self._gather_agreement = _GatherAgreement([*self._units, root], divided, group, gathers=self._lets_go())
        _gather_ahead(self._units)

    def forward(
        self, rows: int, values: Mapping[str, torch.Tensor], seed: Callable[[str], None], *, split: bool = False
    ) -> tuple[dict[str, torch.Tensor], list[Pass]]:
        """See :class:`Stage`."""
        self._root.unshard()
        return super().forward(rows, values, seed, split=split)

    def begin_step(self) -> None:
        """Clear all gradients; those of every micro-batch are reduced if the replicas divide them."""
        for parameter in self.parts:
            parameter.grad = None
        self._set(reduce=self._sharding.level != "optimizer", let_go=self._sharding.level == "parameters")
        self._root.set_is_last_backward(False)
        if self._sharding.turning:
            self._gather()

    def begin_last_backward(self) -> None:
        """Say that the next backward completes the gradients."""
        if not self._sharding.turning:
            self._set(reduce=True, let_go=self._sharding.level == "parameters")

    @contextmanager
    def weight_backward(self) -> Iterator[None]:
        """Return the context of the second half of a backward, which FSDP2 does not see.

        It goes through the layers' operators, not through the layers: all of their parameters are gathered before it,
        and what it made is reduced after it.
        """
        self._gather()
        self._set(reduce=False, let_go=False)
        yield
        if self._sharding.level != "optimizer":
            self._set(reduce=True, let_go=self._sharding.level == "parameters")
            self._end_backward()

    def finish(self) -> None:
        """Reduce what no backward has reduced, and let go of what was gathered for the step."""
        self._set(reduce=True, let_go=True)
        self._root.set_requires_gradient_sync(True, recurse=False)
        self._root.set_reshard_after_backward(True, recurse=False)
        self._root.set_is_last_backward(True)
        self._end_backward()
        if self._gather_agreement is not None:
            self._gather_agreement.end()

    def _set(self, *, reduce: bool, let_go: bool) -> None:
        """Say what the backwards from now on do with a layer's gradients and with its parameters.

        What several layers use stays until the step's end.
        """
        self._root.set_requires_gradient_sync(reduce)
        self._root.set_reshard_after_backward(let_go)
        self._root.set_requires_gradient_sync(False, recurse=False)
        self._root.set_reshard_after_backward(False, recurse=False)

    def _gather(self) -> None:
        for unit in self._units:
            unit.unshard()

    def _end_backward(self) -> None:
        # It reduces all that is left; torch's own pipelines call it after split backwards, too.
        self._root._get_fsdp_state()._root_post_backward_final_callback()

    def lend(self, layers: Sequence[Layer]) -> list[Layer]:
        """See :class:`Stage`; a layer sees whole parameters for as long as it runs."""
        owners: dict[str, tuple[nn.Module, str, FSDPModule]] = {}
        for layer, unit in zip(self.layers, self._units, strict=True):
            for attribute, name in layer.parameters.items():
                owners.setdefault(name, (layer.module, attribute, unit))
        by_layer = self._lets_go()
        lent = []
        for layer in layers:
            owned = {attribute: owners[name] for attribute, name in layer.parameters.items()}
            lent.append(replace(layer, module=_EvaluationLayer(layer.module, owned, by_layer=by_layer)))
        return lent

    @contextmanager
    def lending(self) -> Iterator[None]:
        """See :class:`Stage`; what training gathers for a whole step is gathered for the whole of the context."""
        self._root.unshard()
        if not self._lets_go():
            self._gather()
        try:
            yield
        finally:
            for unit in (*self._units, self._root):
                unit.reshard()

    def _lets_go(self) -> bool:
        """Tell whether parameters are gathered layer by layer."""
        return self._sharding.level == "parameters" and not self._sharding.turning

    def gradients(
        self, views_of: Callable[[nn.Parameter, torch.Tensor], list[torch.Tensor]] | None = None
    ) -> Iterator[torch.Tensor]:
        """Yield this replica's parts of the gradients that there are, or views of them."""
        for parameter in self.parts:
            if isinstance(parameter.grad, DTensor):
                own = parameter.grad.to_local()
                yield from [own] if views_of is None else views_of(parameter, own)


def shard_layers(
    sharding: Sharding, layers: Sequence[Layer], apart: frozenset[nn.Parameter]
) -> tuple[list[Layer], FSDPModule]:
    """Divide the parameters of a stage's layers, whose modules take hold of their parts.

    Args:
        sharding: what is divided.
        layers: the stage's.
        apart: parameters that every replica keeps whole.

    Returns:
        Layers whose calls FSDP2 attends to, and what holds all of them.

    Raises:
        UsageError: a layer has trained parameters of several types, which are not reduced together.
    """
    # A layer may return a view of what it made: no other layer writes into it.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
    for layer in layers:
        _check_types(layer, apart)
    several = used_by_several(layer.module.parameters() for layer in layers)
    called = [wrap(layer, _LayerWrapper(layer.module)) for layer in layers]
    for layer in called:
        _divide(sharding, layer.module, apart | several)
    modules = [layer.module for layer in called]
    return called, _divide(sharding, _Whole(modules, several - apart), apart)


def _divide(sharding: Sharding, module: nn.Module, apart: frozenset[nn.Parameter]) -> FSDPModule:
    unit: Any = fully_shard(
        module,
        mesh=sharding.mesh,
        reshard_after_forward=sharding.level == "parameters",
        offload_policy=CPUOffloadPolicy() if sharding.offload else OffloadPolicy(),
        ignored_params=set(apart),
    )
    assert isinstance(unit, FSDPModule)
    unit.set_gradient_divide_factor(1.0)
    # Backends differ in what else than sums they know.
    unit.set_force_sum_reduction_for_comms(True)
    return unit


class _LayerWrapper(nn.Module):
    """A layer's module, whose calls FSDP2 attends to; the module itself stays what it is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: object) -> Any:  # noqa: ANN401
        return self.module(*arguments)


def _gather_ahead(units: Sequence[FSDPModule]) -> None:
    """Have every layer's parameters gathered while the layer before it computes, forward and backward."""
    for before, after in pairwise(units):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    # Left to itself, it would gather what another micro-batch's forward came to.
    units[0].set_modules_to_backward_prefetch([units[0]])


class _EvaluationLayer(nn.Module):
    """A layer in another mode, whose parameters are those of layers that FSDP2 attends to."""

    def __init__(
        self, module: nn.Module, owners: Mapping[str, tuple[nn.Module, str, FSDPModule]], *, by_layer: bool
    ) -> None:
        """Keep apart what the layer computes, and where its parameters are: attribute -> module, attribute, unit."""
        super().__init__()
        self.module = module
        self._owners = dict(owners)
        self._units_to_gather = list(dict.fromkeys(unit for _, _, unit in owners.values())) if by_layer else []

    def forward(self, *arguments: object) -> Any:  # noqa: ANN401
        for unit in self._units_to_gather:
            unit.unshard()
        for attribute, (module, held, _) in self._owners.items():
            place(self.module, attribute, module.get_parameter(held))
        try:
            return self.module(*arguments)
        finally:
            for unit in self._units_to_gather:
                unit.reshard()


class _Whole(nn.Module):
    """All layers of a stage."""

    def __init__(self, layers: Sequence[nn.Module], several: frozenset[nn.Parameter]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        # Its own, so that FSDP2 gathers them with this module.
        for index, parameter in enumerate([each for each in self.parameters() if each in several]):
            self.register_parameter(f"several_{index}", parameter)


def _check_types(layer: Layer, apart: frozenset[nn.Parameter]) -> None:
    trained = [each for each in layer.module.parameters() if each.requires_grad and each not in apart]
    types = sorted({str(each.dtype) for each in trained})
    if len(types) > 1:
        raise UsageError(
            f"layer {layer.name} has trained parameters of {' and '.join(types)}, which replicas cannot divide "
            "together; plan with `shard='none'`"
        )
