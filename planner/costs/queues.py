"""Queues: seconds of stages' forwards and backwards, where a host launches kernels and a device runs them.

A layer takes a GPU's host some seconds to launch, and the device some to compute. In a run the host is ahead: it
launches a micro-batch while the device computes the one before it. The host waits for nothing, and a kernel for its
launch and for the kernel before it. So m micro-batches in a row that take the host L seconds each, and the device K,
take no less than m max(L, K), and no more than that and min(L, K), in which the second queue begins or ends.

A micro-batch of a stage is priced max(L, K), with L and K the sums over its layers' forwards and backwards. With l and
k those of a forward, and l' and k' those of a whole backward without recomputation,

    forward    max(k, l - max(0, k' - l'))      the host comes to it ahead by what it gained in the backward before
    backward   max(L, K) - forward

so that a forward takes as long whatever its backward does beside. Launches of half a backward are the backward's,
divided as the kernels are; the weight half takes what it takes of the longer queue, the input half the rest.

A device that computes itself has one queue, and sums of seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.planner.costs import memoize
from autopar.planner.costs.layers import Launches, LayerCosts, Site, StageSums

Numbers = npt.NDArray[np.float64]
Value = float | Numbers
Flag = bool | npt.NDArray[np.bool_]
Positions = int | npt.NDArray[np.int64]


class Queues(NamedTuple):
    """Seconds of the same work on a device, and on the host that launches it."""

    kernels: Value
    launches: Value

    def plus(self, other: Queues) -> Queues:
        """Return what both take together, queue by queue."""
        return Queues(self.kernels + other.kernels, self.launches + other.launches)

    @property
    def shorter(self) -> Value:
        """The seconds of the shorter queue."""
        return either(self.is_launching, self.kernels, self.launches)

    @property
    def is_launching(self) -> Flag:
        """Whether the host takes longer."""
        return self.launches > self.kernels

    def of(self, launching: Flag) -> Value:
        """Return the launches where ``launching``, else the kernels."""
        return either(launching, self.launches, self.kernels)

    @property
    def longer(self) -> Value:
        """The seconds of the longer queue."""
        return larger(self.kernels, self.launches)


NOTHING = Queues(0.0, 0.0)


class PassSeconds:
    """Prices forwards and backwards of layers ``first:stop``; positions are numbers, or arrays of them.

    ``rows`` are those of a micro-batch that the stage's replica takes; ``adding`` as in :meth:`StageSums.backward`.
    """

    def __init__(self, sums: StageSums) -> None:
        """Take the running sums of layers' seconds."""
        self.sums = sums

    def forward(self, first: Positions, stop: Positions, rows: float, site: Site) -> Value:
        """Return the seconds of a forward."""
        if not self._layers(site).has_launches:
            return _between(self.sums.forward(rows, site), first, stop)
        return _forward_s(*self._passes(first, stop, rows, site))

    def backward(
        self, first: Positions, stop: Positions, rows: float, adding: float, site: Site, again: Queues = NOTHING
    ) -> Value:
        """Return the seconds of a backward, with those of the forwards that it runs ``again``."""
        kernels = _between(self.sums.backward(rows, adding, site), first, stop) + again.kernels
        if not self._layers(site).has_launches:
            return kernels
        launches = _between(self._launch_sums("backward_launch_s", rows, adding, site), first, stop) + again.launches
        forward, plain = self._passes(first, stop, rows, site)
        return _rest(forward.plus(Queues(kernels, launches)), _forward_s(forward, plain))

    def halves(
        self,
        first: Positions,
        stop: Positions,
        rows: float,
        adding: float,
        site: Site,
        recompute: frozenset[int] = frozenset(),
    ) -> tuple[Value, Value]:
        """Return the seconds of a backward's input half, which runs some layers forward again, and of its weight half.

        The input half takes what the weight half leaves of both.
        """
        inputs_s, weights_s = (_between(each, first, stop) for each in self.sums.halves(rows, adding, site, recompute))
        if not self._layers(site).has_launches:
            return inputs_s, weights_s
        launched_s = _between(self._launch_sums("backward_input_launch_s", rows, 0.0, site), first, stop)
        again = Queues(0.0, self.again(sorted(recompute), rows, adding, site).launches)
        inputs = Queues(inputs_s, launched_s).plus(again)
        launched_s = _between(self._launch_sums("backward_weight_launch_s", rows, adding, site), first, stop)
        weights = Queues(weights_s, launched_s)
        forward, plain = self._passes(first, stop, rows, site)
        both_s = _rest(forward.plus(inputs).plus(weights), _forward_s(forward, plain))
        weight_s = -larger(-both_s, -weights.of(forward.plus(plain).is_launching))
        return both_s - weight_s, weight_s

    def least_weight_s(self, first: Positions, stop: Positions, rows: float, site: Site) -> Value:
        """Return the seconds of a weight half in the queue that is shorter there; those of more rows take no less."""
        kernels = _between(self.sums.halves(rows, 0.0, site)[1], first, stop)
        if not self._layers(site).has_launches:
            return kernels
        launches = _between(self._launch_sums("backward_weight_launch_s", rows, 0.0, site), first, stop)
        return Queues(kernels, launches).shorter

    def is_launching(self, first: Positions, stop: Positions, rows: float, site: Site) -> Flag:
        """Whether the host is the slower queue of a stage's micro-batch."""
        forward, backward = self._passes(first, stop, rows, site)
        return forward.plus(backward).is_launching

    @memoize
    def again_by_layer(self, rows: float, adding: float, site: Site) -> tuple[list[float], list[float]]:
        """Return what every layer's :meth:`again` takes, kernels and launches: those of its forward."""
        every = frozenset(range(self.sums.layer_count))
        sums, more = (self.sums.backward(rows, adding, site, each) for each in (frozenset[int](), every))
        kernels = [more[at + 1] - more[at] - (sums[at + 1] - sums[at]) for at in range(self.sums.layer_count)]
        if not self._layers(site).has_launches:
            return kernels, [0.0] * len(kernels)
        launched = self._launch_sums("forward_launch_s", rows, 0.0, site)
        return kernels, [behind - before for before, behind in pairwise(launched)]

    def again(self, layers: Sequence[int], rows: float, adding: float, site: Site) -> Queues:
        """Return what running some layers forward again takes longer in a backward."""
        return Queues(*(sum(each[layer] for layer in layers) for each in self.again_by_layer(rows, adding, site)))

    @memoize
    def running(self, rows: float, adding: float, form: int = 0) -> tuple[list[float], list[float]]:
        """Return, for every position, the seconds of forwards and of backwards of all layers before it.

        All in the queue that is the longer one of all layers together: for planners that add up layers.
        """
        sums, site = self.sums, Site(form=form)
        last = sums.layer_count
        if self._layers(site).has_launches and self.is_launching(0, last, rows, site):
            forward = self._launch_sums("forward_launch_s", rows, 0.0, site)
            return forward, self._launch_sums("backward_launch_s", rows, adding, site)
        return sums.forward(rows, site), sums.backward(rows, adding, site)

    def every(self, rows: float, adding: float, form: int) -> tuple[Numbers, Numbers]:
        """Return the forwards and backwards of all stages, ``[first, stop]``; infinite of no layers."""
        positions = np.arange(self.sums.layer_count + 1)
        first, stop, site = positions[:-1, None], positions[None, :], Site(form=form)
        both = self.forward(first, stop, rows, site), self.backward(first, stop, rows, adding, site)
        forward_s, backward_s = (np.where(stop > first, each, np.inf) for each in both)
        return forward_s, backward_s

    def by_queue(self, rows: float, adding: float, form: int, *, split: bool) -> list[list[list[float]]]:
        """Return running sums of forwards and of backwards, and with ``split`` of both halves: kernels, then launches.

        A stage's forward and backward take no less together than in either queue.
        """
        sums, site = self.sums, Site(form=form)
        kernels = [sums.forward(rows, site), sums.backward(rows, adding, site)]
        kernels += sums.halves(rows, adding, site) if split else ()
        if not self._layers(site).has_launches:
            return [kernels]
        fields = _HALF_LAUNCHES if split else _LAUNCHES
        return [kernels, [self._launch_sums(field, rows, more * adding, site) for field, more in fields.items()]]

    def _passes(self, first: Positions, stop: Positions, rows: float, site: Site) -> tuple[Queues, Queues]:
        """Return the queues of a forward, and of a plain backward: whole, of a step's first micro-batch."""
        fields: tuple[Launches, Launches] = ("forward_launch_s", "backward_launch_s")
        kernels = self.sums.forward(rows, site), self.sums.backward(rows, 0.0, site)
        launches = [self._launch_sums(field, rows, 0.0, site) for field in fields]
        forward, backward = (
            Queues(*(_between(each, first, stop) for each in queues)) for queues in zip(kernels, launches, strict=True)
        )
        return forward, backward

    def _launch_sums(self, field: Launches, rows: float, adding: float, site: Site) -> list[float]:
        return self._layers(site).sums(field, rows, site.adding(adding))

    def _layers(self, site: Site) -> LayerCosts:
        return self.sums.costs[site.form]


_LAUNCHES: dict[Launches, float] = {"forward_launch_s": 0.0, "backward_launch_s": 1.0}
"""By field, whether adding to gradients is part of it."""
_HALF_LAUNCHES: dict[Launches, float] = {**_LAUNCHES, "backward_input_launch_s": 0.0, "backward_weight_launch_s": 1.0}


def _forward_s(forward: Queues, backward: Queues) -> Value:
    """Return a forward's seconds: its kernels', or its launches' beyond what the host gains in a backward."""
    gained = larger(0.0, backward.kernels - backward.launches)
    return larger(forward.kernels, forward.launches - gained)


def _rest(work: Queues, before_s: Value) -> Value:
    """Return what is left of the longer queue; rounding makes it no less than 0."""
    return larger(0.0, work.longer - before_s)


def _between(sums: Sequence[float], first: Positions, stop: Positions) -> Value:
    if isinstance(first, int) and isinstance(stop, int):
        return sums[stop] - sums[first]
    values = np.array(sums)
    return np.asarray(values[stop] - values[first])


def larger(one: Value, other: Value) -> Value:
    """Return the larger of two numbers, or of each two; of numbers, comparing takes a tenth of what numpy does."""
    if isinstance(one, float) and isinstance(other, float):
        return one if one >= other else other
    return np.maximum(one, other)


def either(flag: Flag, one: Value, other: Value) -> Value:
    """Return the first where the flag holds, else the second."""
    if isinstance(flag, bool):
        return one if flag else other
    return np.where(flag, one, other)
