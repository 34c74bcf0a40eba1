"""Waves: what several pipelines change of the weights of a rank's layers, told each other and added up.

In come a rank's trained parameters, and the ranks of other pipelines that hold the same ones. A push begins the sum of
what a wave has changed over all of them; a pull ends the oldest sum, and adds to the weights what is in it of others.
Eager pipelines send each other every wave by itself, for a pull takes as many of each as have come, or as a log says.
See :class:`autopar.policies.Waves`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch

from autopar.capture.graph import LayerGraph
from autopar.formats.plan import Plan
from autopar.formats.pulls import Taken
from autopar.policies import most_buffered
from autopar.runtime.messages.transport import Done, Pending, Transport
from autopar.runtime.stage.parameters import LocalParameters
from autopar.runtime.stage.versions import WeightVersions


class _Wave(NamedTuple):
    """A wave whose sum has begun."""

    own: torch.Tensor
    """What this pipeline has changed."""
    total: torch.Tensor
    """What all have, once it is there."""
    pending: Pending


class _SharedWeights:
    """Parameters of one type that the same ranks hold, one of each pipeline."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], ranks: tuple[int, ...], transport: Transport) -> None:
        self._parameters, self._ranks, self._transport = parameters, ranks, transport

    def _flat(self) -> torch.Tensor:
        return torch.cat([each.detach().flatten() for each in self._parameters])

    def _add(self, changes: torch.Tensor) -> None:
        for parameter, part in self._split(changes):
            parameter.add_(part)

    def _fill(self, weights: torch.Tensor) -> None:
        for parameter, part in self._split(weights):
            parameter.copy_(part)

    def _split(self, flat: torch.Tensor) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        parts = torch.split(flat, [each.numel() for each in self._parameters])
        return ((each, part.view_as(each)) for each, part in zip(self._parameters, parts, strict=True))


class _SummedWeights(_SharedWeights):
    """Those whose changes are added up over all pipelines."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], ranks: tuple[int, ...], transport: Transport) -> None:
        super().__init__(parameters, ranks, transport)
        self._common = self._flat()
        """The weights that all have, but for waves that this rank has not taken yet."""
        self._waves: deque[_Wave] = deque()

    def refill(self) -> None:
        """Begin with the parameters as they are."""
        torch.cat([each.detach().flatten() for each in self._parameters], out=self._common)

    def push(self) -> None:
        """Begin the sum of what has been changed since the push before."""
        own = self._flat().sub_(self._common)
        for wave in self._waves:
            own -= wave.own
        total = own.clone()
        self._waves.append(_Wave(own, total, self._transport.all_reduce(total, self._ranks)))

    def pull(self) -> None:
        """Add what others have changed in the oldest wave."""
        wave = self._waves.popleft()
        wave.pending.wait()
        self._common += wave.total
        self._add(wave.total.sub_(wave.own))

    def drain(self) -> None:
        """Take what is left of all waves, and have the weights that all have, to the last bit."""
        while self._waves:
            wave = self._waves.popleft()
            wave.pending.wait()
            self._common += wave.total
        self._fill(self._common)


class _SentWeights(_SharedWeights):
    """Those whose changes pipelines send each other whole, through the hosts' memory."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        ranks: tuple[int, ...],
        pipeline: int,
        transport: Transport,
        most_sent: int,
    ) -> None:
        """Begin, as that pipeline's of ``ranks``, with waves of which others have taken all but so many."""
        super().__init__(parameters, ranks, transport)
        self._pipeline, self._most_sent = pipeline, most_sent
        self._before = self._flat()
        """The parameters as they were at the last push, and what was taken since."""
        self._sent: deque[list[Pending]] = deque()
        """By wave that may not have been taken."""

    def refill(self) -> None:
        """Begin with the parameters as they are."""
        self._before = self._flat()

    def push(self) -> None:
        """Begin to send what has been changed since the push before."""
        now = self._flat()
        changes = (now - self._before).cpu()
        self._before = now
        while len(self._sent) >= self._most_sent:
            self._end_first()
        self._send(changes, (rank for rank in self._ranks if rank != self._ranks[self._pipeline]))

    def has_arrived(self, pipeline: int) -> bool:
        """Whether the next wave of another pipeline is there."""
        return self._transport.has_arrived(self._ranks[pipeline])

    def take(self, pipeline: int) -> None:
        """Add what another pipeline has changed in its next wave, once that is there."""
        changes = self._receive(pipeline)
        self._before += changes
        self._add(changes)

    def level(self) -> None:
        """Have the weights of the first pipeline, all of which have all waves: to the last bit."""
        if self._pipeline == 0:
            weights = self._flat().cpu()
            self._send(weights, self._ranks[1:])
        else:
            self._fill(self._receive(0))
        while self._sent:
            self._end_first()

    def _send(self, tensor: torch.Tensor, ranks: Iterable[int]) -> None:
        begun = [self._transport.send(tensor, rank) for rank in ranks]
        # What was copied is not kept.
        self._sent.append([each for each in begun if not isinstance(each, Done)])

    def _end_first(self) -> None:
        for pending in self._sent.popleft():
            pending.wait()

    def _receive(self, pipeline: int) -> torch.Tensor:
        into = torch.empty(self._before.shape, dtype=self._before.dtype)
        self._transport.receive(into, self._ranks[pipeline]).wait()
        return into.to(self._before.device)


def _held_alike(
    plan: Plan, rank: int, graph: LayerGraph, local: LocalParameters
) -> Iterator[tuple[list[torch.nn.Parameter], tuple[int, ...]]]:
    """Yield a rank's trained parameters that are of one type, and that the same ranks hold."""
    trained = local.trainable_parameters()
    for each in plan.shared_layers:
        layers = map(graph.layer, each.layers) if rank in each.ranks else ()
        # Those of several layers go with the first.
        named = {name: trained.pop(name) for layer in layers for name in layer.parameters.values() if name in trained}
        for dtype in dict.fromkeys(parameter.dtype for parameter in named.values()):
            yield [parameter for parameter in named.values() if parameter.dtype == dtype], each.ranks


_Shared = TypeVar("_Shared", _SummedWeights, _SentWeights)


class _PushedWeights(WeightVersions, Generic[_Shared]):
    """The versions of a rank's trained parameters, of which other pipelines train copies.

    No forward comes between an update and the pull behind it: what a pull adds is part of that version.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        version_count: int,
        shared: Sequence[_Shared],
        *,
        recomputes: bool,
    ) -> None:
        """Prepare, as :class:`.versions.WeightVersions`; ``shared`` is what it shares with other pipelines."""
        super().__init__(parameters, version_count, recomputes=recomputes)
        self._shared: Sequence[_Shared] = shared
        self._pushed = 0
        """The version that was pushed last."""

    def refill(self, start: int) -> None:
        """See :class:`.versions.NewestWeights`."""
        super().refill(start)
        self._pushed = 0
        for each in self._shared:
            each.refill()

    def push(self) -> None:
        """See :class:`.versions.NewestWeights`."""
        self._pushed = self.newest
        with torch.no_grad():
            for each in self._shared:
                each.push()

    def _push_rest(self) -> None:
        """Push what the last wave, which may not be whole, has changed."""
        if self.newest > self._pushed:
            self.push()


class _WaveWeights(_PushedWeights[_SummedWeights]):
    """Those whose pulls take one more wave, of which the changes of all pipelines are added up."""

    def pull(self) -> None:
        """See :class:`.versions.NewestWeights`."""
        with torch.no_grad():
            for each in self._shared:
                each.pull()

    def drain(self) -> None:
        """See :class:`.versions.NewestWeights`."""
        self._push_rest()
        with torch.no_grad():
            for each in self._shared:
                each.drain()


class EagerWaveWeights(_PushedWeights[_SentWeights]):
    """Those whose pulls take all waves of other pipelines that have come, and at least those that the staleness says.

    What is taken is added pipeline by pipeline, and each one's waves in their order. So the weights follow, bit by bit,
    from how many each pull took. In the end all take what is left, and then the weights of the first pipeline: all have
    the same ones, which differ by what rounding changes.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        version_count: int,
        shared: Sequence[_SentWeights],
        plan: Plan,
        pipeline: int,
        *,
        recomputes: bool,
    ) -> None:
        """Prepare, as :class:`.versions.WeightVersions`, to train a plan's pipeline; see :class:`_PushedWeights`."""
        super().__init__(parameters, version_count, shared, recomputes=recomputes)
        assert plan.wave is not None
        assert plan.staleness is not None
        self._wave, self._staleness = plan.wave, plan.staleness
        self._counts = {at: 0 for at in range(len(plan.pipelines)) if at != pipeline}
        """By other pipeline, of how many waves the changes are in the weights."""
        self._replayed: Mapping[int, Sequence[Taken]] = {}
        self._wanted: Sequence[Taken] | None = None
        self.taken: list[Taken] = []
        """By pull since the last fill, these counts behind it."""

    def follow(self, taken: Mapping[int, Sequence[Taken]]) -> None:
        """Take as many waves as a log says, by the mini-batch before which the pipeline is filled."""
        self._replayed = taken

    def refill(self, start: int) -> None:
        """See :class:`.versions.NewestWeights`."""
        super().refill(start)
        self._counts, self.taken = dict.fromkeys(self._counts, 0), []
        self._wanted = self._replayed[start] if self._replayed else None

    def pull(self) -> None:
        """See :class:`.versions.NewestWeights`."""
        number = len(self.taken)
        for at, pipeline in enumerate(self._counts):
            if self._wanted is None:
                self._take(pipeline, number + 1 - self._staleness)
                while self._shared and all(each.has_arrived(pipeline) for each in self._shared):
                    self._take(pipeline, self._counts[pipeline] + 1)
            else:
                self._take(pipeline, self._wanted[number][at])
        self.taken.append(tuple(self._counts.values()))

    def _take(self, pipeline: int, count: int) -> None:
        """Have the changes of so many waves of another pipeline, waiting for those that have not come."""
        with torch.no_grad():
            while self._counts[pipeline] < count:
                self._counts[pipeline] += 1
                for each in self._shared:
                    each.take(pipeline)

    def drain(self) -> None:
        """See :class:`.versions.NewestWeights`: a wave that is not whole is pushed when all others are taken."""
        self._take_of_all(self.newest // self._wave)
        self._push_rest()
        self._take_of_all(-(-self.newest // self._wave))
        with torch.no_grad():
            for each in self._shared:
                each.level()

    def _take_of_all(self, count: int) -> None:
        for pipeline in self._counts:
            self._take(pipeline, count)


def wave_weights(
    plan: Plan,
    rank: int,
    graph: LayerGraph,
    local: LocalParameters,
    transport: Transport,
    version_count: int,
    *,
    recomputes: bool,
) -> WeightVersions:
    """Return the versions of a rank's trained parameters, of which other pipelines train copies.

    Args:
        plan: what is carried out.
        rank: which rank this is.
        graph: the captured model.
        local: the rank's parameters.
        transport: carries what pipelines tell each other.
        version_count: how many versions are needed at a time, the newest among them.
        recomputes: whether layers run forward again in their backward, or may read parameters there.
    """
    held, every = _held_alike(plan, rank, graph, local), local.parameters.values()
    if not plan.eager:
        summed = [_SummedWeights(*each, transport) for each in held]
        return _WaveWeights(every, version_count, summed, recomputes=recomputes)
    pipeline, most = plan.pipeline_of(plan.ownership.ranks[rank].stage), most_buffered(plan.staleness or 0)
    sent = [_SentWeights(*each, pipeline, transport, most) for each in held]
    return EagerWaveWeights(every, version_count, sent, plan, pipeline, recomputes=recomputes)
