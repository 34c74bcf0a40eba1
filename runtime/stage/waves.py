"""Waves: what several pipelines change of the weights of a rank's layers, told each other and added up.

In come a rank's trained parameters, and the ranks of other pipelines that hold the same ones. A push begins the sum of
what a wave has changed over all of them; a pull ends the oldest sum, and adds to the weights what is in it of others.
See :class:`autopar.policies.Waves`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from autopar.capture.graph import LayerGraph
from autopar.formats.plan import Plan
from autopar.runtime.messages.transport import Pending, Transport
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
        self._common = self._flat()
        """The weights that all have, but for waves that this rank has not taken yet."""
        self._waves: deque[_Wave] = deque()

    def _flat(self) -> torch.Tensor:
        return torch.cat([each.detach().flatten() for each in self._parameters])

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
        for parameter, others in self._split(wave.total.sub_(wave.own)):
            parameter.add_(others)

    def drain(self) -> None:
        """Take what is left of all waves, and have the weights that all have, to the last bit."""
        while self._waves:
            wave = self._waves.popleft()
            wave.pending.wait()
            self._common += wave.total
        for parameter, weights in self._split(self._common):
            parameter.copy_(weights)

    def _split(self, flat: torch.Tensor) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        parts = torch.split(flat, [each.numel() for each in self._parameters])
        return ((each, part.view_as(each)) for each, part in zip(self._parameters, parts, strict=True))


class WaveWeights(WeightVersions):
    """The versions of a rank's trained parameters, of which other pipelines train copies.

    No forward comes between an update and the pull behind it: what a pull adds is part of that version.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        graph: LayerGraph,
        local: LocalParameters,
        transport: Transport,
        version_count: int,
        recomputes: bool,
    ) -> None:
        """Prepare.

        Args:
            plan: what is carried out.
            rank: which rank this is.
            graph: the captured model.
            local: the rank's parameters.
            transport: carries the sums.
            version_count: how many versions are needed at a time, the newest among them.
            recomputes: whether layers run forward again in their backward, or may read parameters there.
        """
        super().__init__(local.parameters.values(), version_count, recomputes=recomputes)
        trained, self._shared = local.trainable_parameters(), list[_SharedWeights]()
        for each in plan.shared_layers:
            layers = map(graph.layer, each.layers) if rank in each.ranks else ()
            # Those of several layers go with the first.
            named = {
                name: trained.pop(name) for layer in layers for name in layer.parameters.values() if name in trained
            }
            for dtype in dict.fromkeys(parameter.dtype for parameter in named.values()):
                alike = [parameter for parameter in named.values() if parameter.dtype == dtype]
                self._shared.append(_SharedWeights(alike, each.ranks, transport))
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

    def pull(self) -> None:
        """See :class:`.versions.NewestWeights`."""
        with torch.no_grad():
            for each in self._shared:
                each.pull()

    def drain(self) -> None:
        """See :class:`.versions.NewestWeights`: what the last wave, which may not be whole, has changed is pushed."""
        if self.newest > self._pushed:
            self.push()
        with torch.no_grad():
            for each in self._shared:
                each.drain()
