"""Stand-ins: layers of a profile that compute next to nothing, in place of a model's, and messages at their prices.

In comes a profile; out come a graph whose layers read and make what the profile's do, in tensors of one number a
sample, and what else a job asks of a model. No code of the user's runs. A ledger counts the bytes that they stand for.

In come the prices of a rank's actions and a transport, which really carries what is sent; a clock takes what actions
cost. A message carries the moment of its arrival, for which its receiver's clock waits. Those who reduce tell each
other when they came. Ranks decide nothing together but this, so that no order of theirs is taken for granted.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import networkx as nx
import torch
from torch import nn

from autopar.capture.graph import Layer, LayerGraph, TensorSpec
from autopar.capture.model.source import UserModel
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.formats.profile import Tensor as ProfiledTensor
from autopar.formats.program import (
    INPUT_BACKWARD,
    RECEIVES,
    REDUCE,
    REDUCE_TIED,
    SENDS,
    Action,
    LayerBytes,
    Program,
    RankPrices,
    RankProgram,
    price_key,
)
from autopar.runtime.device import Clock
from autopar.runtime.job import Job
from autopar.runtime.messages.mailbox import messages_by_action
from autopar.runtime.messages.transport import Later, Pending, Transport
from autopar.runtime.stage.versions import NewestWeights
from autopar.schedules.repetition import last_backwards

_LOSS = "loss"


class VirtualClock(Clock):
    """Time is a number, which begins at 0 whenever the pipeline is filled.

    The actions of its rank take no time of their own: their prices pass in it.
    """

    def __init__(self, overhead_s: float) -> None:
        """Begin; ``overhead_s`` is what a fill takes before its first action."""
        self._overhead_s, self._now_s = overhead_s, 0.0

    @property
    def now_s(self) -> float:
        """The present moment; ranks that tell each other moments have it of the same origin."""
        return self._now_s

    def start(self) -> None:
        """See :class:`autopar.runtime.device.Clock`: time goes on from one repetition to the next."""

    def refill(self) -> None:
        """Begin anew."""
        self._now_s = self._overhead_s

    def mark(self) -> object:
        """See :class:`autopar.runtime.device.Clock`."""
        return self.now_s

    def spend(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds

    def wait_until(self, moment_s: float) -> None:
        """Let time pass until a moment, if that is to come."""
        self._now_s = max(self._now_s, moment_s)


class SleepingClock(VirtualClock):
    """Time is this host's: a rank sleeps as long as its actions take."""

    @property
    def now_s(self) -> float:
        """See :class:`VirtualClock`."""
        return time.perf_counter()

    def refill(self) -> None:
        """See :class:`VirtualClock`."""
        self.spend(self._overhead_s)

    def spend(self, seconds: float) -> None:
        """See :class:`VirtualClock`."""
        time.sleep(max(0.0, seconds))

    def wait_until(self, moment_s: float) -> None:
        """See :class:`VirtualClock`."""
        self.spend(moment_s - self.now_s)


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


class StandInJob(Job):
    """A job of stand-ins, whose time is a clock's of its own."""

    notes_sends = True
    loads_data = False

    def __init__(
        self,
        clock: VirtualClock,
        charge: Callable[[int, int], None],
        plan: Plan,
        program: Program,
        rank: int,
        graph: LayerGraph,
        transport: Transport,
    ) -> None:
        """Take the clock, and what charges it for (step, position); the rest is as of :class:`Job`."""
        self._own_clock = clock
        model = UserModel("stand-ins", Path(__file__), "", nn.Identity, {"optimizer": _optimizer})

        def zeros(names: Iterable[str]) -> dict[str, torch.Tensor]:
            return {name: torch.zeros(1) for name in names}

        super().__init__(plan, program, rank, graph, model, zeros, transport, torch.device("cpu"), charge)
        for layer in (layer for stage in self.stages.values() for layer in stage.layers):
            # What shards a layer has a module of its own, and its gradients are held throughout.
            if isinstance(layer.module, _StandInLayer):
                layer.module.note_gradients()

    def _clock(self) -> VirtualClock:
        return self._own_clock

    def _weight_versions(self, graph: LayerGraph) -> NewestWeights:
        # Nothing reads the weights of stand-ins.
        return NewestWeights()


class PricedTransport:
    """Charges a rank's clock for its actions, and carries moments beside tensors.

    A message waits for the one before it to the same rank, and occupies no one's time but the receiver's who waits. A
    reduction of gradients ends when every replica's part does, which began beside its last backward, and not sooner
    after the one before than it takes.
    """

    def __init__(
        self,
        inner: Transport,
        ledger: MemoryLedger,
        prices: RankPrices,
        plan: Plan,
        rank: int,
        actions: RankProgram,
    ) -> None:
        """Prepare.

        Args:
            inner: carries tensors and moments.
            ledger: counts the bytes of messages, over the time of the rank's clock.
            prices: of its actions.
            plan: what is carried out.
            rank: which rank this is.
            actions: its program.
        """
        self._inner, self._ledger, self._clock, self._prices = inner, ledger, ledger.clock, prices
        self._plan, self._rank, self._own = plan, rank, plan.ownership.ranks[rank]
        self._holders = [plan.ownership.copies(tied.stages)[0] for tied in plan.tied]
        """By shared parameter, the ranks that have it."""
        # What they take is charged by the actions that ask for them.
        self.all_reduce, self.all_gather = inner.all_reduce, inner.all_gather
        self.reduce_scatter, self.mesh = inner.reduce_scatter, inner.mesh
        self._actions = list(actions)
        self._seconds = [prices.seconds.get(price_key(action), 0.0) for action in self._actions]
        self._sent_bytes: list[int] = []
        self._last_backwards = last_backwards(self._actions, plan)
        self._count_messages()
        self.refill()

    def _count_messages(self) -> None:
        """Find the bytes of every tensor that is sent, by position, and received, by peer in their order."""
        flows = messages_by_action(self._plan, self._rank)
        received: dict[int, list[int]] = defaultdict(list)
        self._sizes: list[list[int]] = []
        for action in self._actions:
            self._sizes.append([])
            if action.peer >= 0:
                flow, indices = flows[action.kind, action.stage, action.peer, action.peer_stage]
                rows = int(flow.samples.rows)
                self._sizes[-1] = [rows * self._plan.tensors[index].bytes_per_sample for index in indices]
                if action.kind in RECEIVES:
                    received[action.peer] += self._sizes[-1]
        self._received_bytes = {peer: cycle(sizes) for peer, sizes in received.items()}

    def refill(self) -> None:
        """Begin with a pipeline that is empty."""
        self._free_s: dict[int, float] = {}
        """When the last message to a peer is through."""
        self._arrival_s = -math.inf
        """Of the message that is being sent."""
        self._backward_ends_s: dict[int, deque[float]] = defaultdict(deque)
        """By stage, of the last backwards of mini-batches whose gradients are not reduced yet."""
        self._shared_ends_s: dict[int, float] = {}
        """By shared parameter, when the sum before ended."""
        self._shared_moments: dict[int, deque[tuple[torch.Tensor, Pending]]] = defaultdict(deque)
        """By shared parameter, when each holder had its gradient of mini-batches whose sums are under way."""
        self._reduced_s = -math.inf
        """When the reduction before ended."""

    def charge(self, position: int) -> None:
        """Let what the action at a position takes pass, as it begins; all of a rank's are charged, in their order."""
        action, seconds, clock = self._actions[position], self._seconds[position], self._clock
        self._ledger.is_halved = action.kind == INPUT_BACKWARD
        if action.kind in SENDS:
            self._sent_bytes = list(self._sizes[position])
            self._arrival_s = max(clock.now_s, self._free_s.get(action.peer, -math.inf)) + seconds
            self._free_s[action.peer] = self._arrival_s
        elif action.kind == REDUCE:
            clock.wait_until(self._reduction_end_s(action, seconds))
        elif action.kind == REDUCE_TIED:
            if not self._plan.policy.reduces_at_backward:
                self._say_shared(action.micro_batch)
            clock.wait_until(self._shared_end_s(action.micro_batch, seconds))
        elif action.kind not in RECEIVES:
            clock.spend(seconds)
            if position in self._last_backwards:
                self._end_backward(action)

    def _end_backward(self, action: Action) -> None:
        """Note the end of a mini-batch's last backward, where sums may begin."""
        self._backward_ends_s[action.stage].append(self._clock.now_s)
        for index, tied in enumerate(self._plan.tied if self._plan.policy.reduces_at_backward else ()):
            if action.stage in tied.stages:
                self._say_shared(index)

    def _say_shared(self, index: int) -> None:
        """Begin the sum of a shared parameter's gradients."""
        self._shared_moments[index].append(self._say(self._holders[index], self._clock.now_s))

    def _shared_end_s(self, index: int, seconds: float) -> float:
        """Return when the next sum of a shared parameter's gradients ends."""
        moments, pending = self._shared_moments[index].popleft()
        pending.wait()
        begun_s = max(float(moments.max()), self._shared_ends_s.get(index, -math.inf))
        self._shared_ends_s[index] = begun_s + seconds
        return begun_s + seconds

    def _reduction_end_s(self, action: Action, seconds: float) -> float:
        """Return when a stage's gradients are reduced; its replicas ask for that together."""
        ends_s = self._backward_ends_s[action.stage]
        own_s = ends_s.popleft() if ends_s else self._clock.now_s
        own_s += self._prices.exposed_s.get(price_key(action), 0.0)
        latest_s = self._latest_s(self._own.copies, own_s)
        self._reduced_s = max(latest_s, self._reduced_s + seconds)
        return self._reduced_s

    def _latest_s(self, ranks: tuple[int, ...], moment_s: float) -> float:
        """Return the latest moment of some ranks, which say one each."""
        if len(ranks) == 1:
            return moment_s
        moments, pending = self._say(ranks, moment_s)
        pending.wait()
        return float(moments.max())

    def _say(self, ranks: tuple[int, ...], moment_s: float) -> tuple[torch.Tensor, Pending]:
        """Begin to tell some ranks a moment, and to be told theirs."""
        moments = torch.zeros(len(ranks), dtype=torch.float64)
        moments[ranks.index(self._rank)] = moment_s
        # Backwards begin to reduce gradients in an order that may be another than that of their ends.
        return moments, self._inner.all_reduce(moments, ranks, apart=True)

    def send(self, tensor: torch.Tensor, peer: int) -> Pending:
        """See :class:`autopar.runtime.messages.transport.Transport`."""
        self._ledger.count(tensor, self._sent_bytes.pop(0))
        moment = torch.tensor([self._arrival_s], dtype=torch.float64)
        return Later(self._inner.send(moment, peer).wait, self._inner.send(tensor, peer).wait)

    def receive(self, tensor: torch.Tensor, peer: int) -> Pending:
        """See :class:`autopar.runtime.messages.transport.Transport`."""
        self._ledger.count(tensor, next(self._received_bytes[peer]))
        moment = torch.zeros(1, dtype=torch.float64)
        begun = self._inner.receive(moment, peer), self._inner.receive(tensor, peer)
        return Later(*(each.wait for each in begun), lambda: self._clock.wait_until(float(moment)))
