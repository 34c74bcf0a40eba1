"""Stand-ins: layers of a profile that compute next to nothing, in place of a model's.

In comes a profile; out come a graph whose layers read and make what the profile's do, in tensors of one number a
sample, and what else a job asks of a model. No code of the user's runs. A ledger counts the bytes that they stand for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import networkx as nx
import torch
from torch import nn

from autopar.capture.graph import Layer, LayerGraph, TensorSpec
from autopar.capture.model.source import UserModel
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.formats.profile import Tensor as ProfiledTensor
from autopar.formats.program import LayerBytes, Program
from autopar.formats.stage import Crossing
from autopar.runtime.clocks import VirtualClock
from autopar.runtime.job import Job
from autopar.runtime.messages.mailbox import Mailbox
from autopar.runtime.messages.transport import Transport
from autopar.runtime.stage.layers import crossing_specs
from autopar.runtime.stage.versions import NewestWeights

_LOSS = "loss"
_Sized = TypeVar("_Sized", ProfiledTensor, Crossing)


def tensors_on(plan: Plan, rank: int, tensors: Iterable[_Sized]) -> tuple[_Sized, ...]:
    """Return tensors as a rank has them: of those that its team keeps in slices of the sequence, its own."""
    own = plan.ownership.ranks[rank]
    in_slices = {name for stage in own.stages for name in plan.stages[stage].sequence_dims}
    return tuple(
        each.model_copy(update={"bytes_per_sample": each.bytes_per_sample // len(own.team)})
        if each.name in in_slices
        else each
        for each in tensors
    )


class MemoryLedger:
    """Counts the bytes that a rank's stand-ins stand for, over the time of its clock.

    A tensor of a few bytes is given the bytes of the one that it stands for, and counts as long as its storage is
    alive: so what is held, and when it is let go, is what the executor really does.
    """

    def __init__(self, clock: VirtualClock, state: int) -> None:
        """Begin with the bytes that are held throughout."""
        self.clock = clock
        self._sizes: dict[int, int] = {}
        self.alive_bytes = state
        self.is_halved = False
        """Whether the backward that runs is the first half of one."""
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the moments of the step before."""
        self.moments: list[tuple[float, int]] = [(0.0, self.alive_bytes)]
        """When how many bytes were alive, at every change."""
        self.peak_bytes = self.alive_bytes

    def count(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        """Give a tensor's storage some bytes, unless it has been given some; return the tensor."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if size > 0 and key not in self._sizes:
            self._sizes[key] = size
            self._change(size)
            weakref.finalize(storage, self._remove, key)
        return tensor

    def spike(self, size: int) -> None:
        """Note bytes that are held for a while, beside what is alive."""
        if size > 0:
            self._note(self.alive_bytes + size)
            self._note(self.alive_bytes)

    def _remove(self, key: int) -> None:
        self._change(-self._sizes.pop(key))

    def _change(self, size: int) -> None:
        self.alive_bytes += size
        self._note(self.alive_bytes)

    def _note(self, size: int) -> None:
        self.moments.append((self.clock.now_s, size))
        self.peak_bytes = max(self.peak_bytes, size)


class _KeepUntilBackward(torch.autograd.Function):
    """Gives a tensor on, and keeps others until its backward is done."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        total: torch.Tensor,
        at_work: Callable[[torch.Tensor], torch.Tensor],
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.at_work = at_work
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        kept = ctx.saved_tensors
        return ctx.at_work(gradients[0]), None, *(None for _ in kept)


class _Output(torch.autograd.Function):
    """Gives a tensor on as an output, and keeps the output for its backward where the layer does."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, keeps: bool) -> torch.Tensor:  # noqa: ANN401
        output = total.clone()
        if keeps:
            ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        return gradients[0].clone(), None


class _StandInLayer(nn.Module):
    """Adds up what it reads, and gives it on; a ledger counts the bytes that it holds in the model's place."""

    def __init__(
        self,
        ledger: MemoryLedger,
        held: LayerBytes,
        inputs: Sequence[str],
        outputs: Sequence[ProfiledTensor],
        shared_parameters: int,
        *,
        is_last: bool,
        is_trained: bool,
    ) -> None:
        """Make its parameters.

        Args:
            ledger: of its rank.
            held: what it holds of a micro-batch.
            inputs: names of what it reads.
            outputs: what it makes.
            shared_parameters: how many parameters it has beside its own.
            is_last: whether it makes the loss, too.
            is_trained: whether a backward comes to it.
        """
        super().__init__()
        self._ledger, self._held, self._outputs, self._is_last = ledger, held, list(outputs), is_last
        self._kept_inputs = [at for at, name in enumerate(inputs) if name in held.saved_tensors]
        self.weight = nn.Parameter(torch.zeros(1), requires_grad=is_trained)
        self.shared = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(shared_parameters))

    def note_gradients(self) -> None:
        """Have the gradient of its own parameter counted, for all of its parameters', when a backward has made it."""

        def count(parameter: nn.Parameter) -> None:
            if parameter.grad is not None:
                self._ledger.count(parameter.grad, self._held.gradients)

        if self.weight.requires_grad:
            self.weight.register_post_accumulate_grad_hook(count)  # type: ignore[no-untyped-call]

    def forward(self, rows: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs."""
        # What one adds to the other has a gradient of its own, as products have.
        total = 1.0 * sum(inputs, torch.zeros(rows)) + self.weight.expand(rows)
        for each in self.shared:
            total = total + each
        self._ledger.spike(self._held.saved + self._held.transient)
        own = self._ledger.count(torch.zeros(1), self._held.saved)
        kept = (own, *(inputs[at] for at in self._kept_inputs))
        total = cast(torch.Tensor, _KeepUntilBackward.apply(total, self._work, *kept))  # type: ignore[no-untyped-call]
        outputs = [self._output(rows, total, each) for each in self._outputs]
        return (*outputs, total.mean()) if self._is_last else tuple(outputs)

    def _output(self, rows: int, total: torch.Tensor, tensor: ProfiledTensor) -> torch.Tensor:
        """Return an output, with the bytes of the one that it stands for."""
        keeps = tensor.name in self._held.saved_tensors
        made: torch.Tensor = _Output.apply(total, keeps) if tensor.gradient else total.detach().clone()  # type: ignore[no-untyped-call]
        return self._ledger.count(made, rows * tensor.bytes_per_sample)

    def _work(self, gradient: torch.Tensor) -> torch.Tensor:
        """Note what a backward holds; what is kept for a second half goes with the gradient that waits for it."""
        self._ledger.spike(self._held.transient)
        return self._ledger.count(gradient.clone(), self._held.pending) if self._ledger.is_halved else gradient


_NOTHING = LayerBytes(saved=0, saved_tensors=(), transient=0, pending=0, gradients=0)


def stand_in_graph(profile: Profile, ledger: MemoryLedger, held: Mapping[str, LayerBytes]) -> LayerGraph:
    """Return a profile's layers and tensors; ``held`` is what layers of the ledger's rank hold, by their names."""
    shared: dict[str, list[str]] = {layer.name: [] for layer in profile.layers}
    for tied in profile.tied:
        for name in tied.layers if tied.trainable else ():
            shared[name].append(tied.parameter)
    last, trained, layers = profile.layers[-1].name, _layers_trained(profile), []
    for each in profile.layers:
        made = [tensor for tensor in profile.tensors if tensor.producer == each.name]
        read = tuple(tensor.name for tensor in profile.tensors if each.name in tensor.consumers)
        names = {f"shared.{at}": name for at, name in enumerate(dict.fromkeys(shared[each.name]))}
        place = (held.get(each.name, _NOTHING), read, made, len(names))
        module = _StandInLayer(ledger, *place, is_last=each.name == last, is_trained=each.name in trained)
        outputs = tuple(tensor.name for tensor in made)
        layers.append(
            Layer(
                name=each.name,
                modules=(each.name,),
                inputs=read,
                outputs=(*outputs, _LOSS) if each.name == last else outputs,
                parameters={"weight": f"{each.name}:weight", **names},
                buffers={},
                random=False,
                fingerprint=each.name,
                module=module,
            )
        )
    tensors = tuple(
        TensorSpec(each.name, each.producer, each.consumers, (), 0, torch.float32, each.gradient)
        for each in sorted(profile.tensors, key=lambda each: each.producer is not None)
    )
    inputs = tuple(each.name for each in tensors if each.producer is None)
    return LayerGraph(tuple(layers), tensors, inputs, (_LOSS,))


def _layers_trained(profile: Profile) -> set[str]:
    """Return the layers that a backward from the last one comes to."""
    last, flowing = profile.layers[-1].name, (tensor for tensor in profile.tensors if tensor.gradient)
    graph = nx.DiGraph((tensor.producer, name) for tensor in flowing for name in tensor.consumers)
    return {last} | (nx.ancestors(graph, last) if last in graph else set())


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


class _StandInMailbox(Mailbox):
    """Has what ranks of a team join counted, as what is sent and received."""

    def __init__(self, ledger: MemoryLedger, plan: Plan, *rest: Any, **how: Any) -> None:  # noqa: ANN401
        """Take the ledger; the rest is as of :class:`Mailbox`."""
        super().__init__(plan, *rest, **how)
        self._ledger = ledger
        self._sizes = {each.name: len(self._own.rows) * each.bytes_per_sample for each in plan.tensors}

    def _blank(self, spec: TensorSpec) -> torch.Tensor:
        return self._ledger.count(super()._blank(spec), self._sizes[spec.name])


class StandInJob(Job):
    """A job of stand-ins, whose time is a clock's of its own."""

    notes_sends = True
    loads_data = False

    def __init__(
        self,
        ledger: MemoryLedger,
        charge: Callable[[int, int], None],
        plan: Plan,
        program: Program,
        rank: int,
        graph: LayerGraph,
        transport: Transport,
    ) -> None:
        """Take the ledger, and what charges its clock for (step, position); the rest is as of :class:`Job`."""
        self._ledger = ledger
        model = UserModel("stand-ins", Path(__file__), "", nn.Identity, {"optimizer": _optimizer})

        def zeros(names: Iterable[str]) -> dict[str, torch.Tensor]:
            return {name: torch.zeros(1) for name in names}

        super().__init__(plan, program, rank, graph, model, zeros, transport, torch.device("cpu"), charge)
        for layer in (layer for stage in self.stages.values() for layer in stage.layers):
            # What shards a layer has a module of its own, and its gradients are held throughout.
            if isinstance(layer.module, _StandInLayer):
                layer.module.note_gradients()

    def _clock(self) -> VirtualClock:
        return self._ledger.clock

    def _crossing_specs(self, graph: LayerGraph) -> list[TensorSpec]:
        # One number a sample has no slices.
        return crossing_specs(self.plan, graph)

    def _open_mailbox(self, program: Program, specs: dict[str, TensorSpec], *, with_marks: bool) -> Mailbox:
        mine = self.plan, program, self.rank, specs, self.transport, self._device
        return _StandInMailbox(self._ledger, *mine, with_marks=with_marks)

    def _weight_versions(self, graph: LayerGraph) -> NewestWeights:
        # Nothing reads the weights of stand-ins.
        return NewestWeights()
