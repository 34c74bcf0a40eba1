"""LossTally: a rank's losses of every step under way, kept on the device until it closes; a step's record; and the
scale of float16.

In come the losses of micro-batches; out comes their sum, and whether it and the gradients are finite numbers (at the
cost of a norm). The scale keeps small gradients of float16 from vanishing. Its rule and numbers are those of
torch.amp.GradScaler (Micikevicius et al., "Mixed Precision Training", 2018, section 3.2): losses are multiplied by a
scale before the backward, gradients divided by it before the update. A step whose gradients overflow changes nothing
but the scale.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from autopar.capture.model.terms import Term
from autopar.formats.document import MOST_RANKS
from autopar.ranks.failure import NonFiniteError
from autopar.runtime.data import StepLoading
from autopar.runtime.device import Copies, HostCopy, value_of


@dataclass
class StepRecord:
    """What one step of one rank gave."""

    step: int = 0
    """Which one it is, from 0."""
    loss: float = 0.0
    """This rank's part of the mini-batch's mean loss, or the plain sum that goes with ``count``."""
    count: float = 0.0
    """What the loss counted, where it returns a sum and a count."""
    terms: dict[str, float] = field(default_factory=dict)
    """This rank's part of the terms of a loss that has several, by name."""
    total_loss: float | None = None
    """The mini-batch's loss, where all ranks had to know it."""
    gradient_norm: float | None = None
    """Of all gradients of the model before clipping, where it was asked for."""
    scale: float = 1.0
    """What its losses were multiplied by before their backward."""
    overflow: bool = False
    """Whether scaled gradients were not finite: nothing was updated."""
    learning_rates: tuple[float, ...] = ()
    """Of the rank's groups of parameters, as its optimizer took them."""
    has_loss: bool = False
    """Whether ``loss`` and ``count`` are there."""
    pending_times: Callable[[], list[tuple[float, float]]] | None = None
    """Tells ``times_s``, where nobody has asked yet."""
    loading: StepLoading | None = None
    """What loading took of the rank, where it loads by itself."""
    others: tuple[StepRecord, ...] = ()
    """Of further mini-batches of the same repetition, which have no times of their own."""

    @property
    def every(self) -> tuple[StepRecord, ...]:
        """This one and ``others``."""
        return (self, *self.others)

    @cached_property
    def times_s(self) -> list[tuple[float, float]]:
        """Start and end of every action of the program; waits until the device is done with the step."""
        tell, self.pending_times = self.pending_times, None
        return [] if tell is None else tell()


class LossTerms:
    """Of the terms of a loss, by what each is multiplied in a mini-batch, so that gradients of all add up.

    A mean over the rank's share counts for as much as the share's part of the mini-batch; a sum is divided by its count
    over all micro-batches and replicas, which is known before the first backward.
    """

    def __init__(
        self,
        terms: Sequence[Term],
        share: float,
        count: Callable[[Sequence[Mapping[str, torch.Tensor]]], list[float]] | None,
    ) -> None:
        """Take how they are counted.

        Args:
            terms: of the loss.
            share: the rank's part of the mini-batch in a micro-batch.
            count: gives the counts of a mini-batch on all replicas, which ask together, of the terms that have one,
                from this rank's inputs of its micro-batches; None if none do, or nobody reads values.
        """
        self.terms, self._share, self._count = list(terms), share, count
        self._weights: dict[int, dict[str, float]] = {}

    def begin_step(self, step: int) -> None:
        """Forget the steps before."""
        for before in [each for each in self._weights if each < step]:
            del self._weights[before]

    def weights(self, step: int, inputs: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
        """Return the weight of every term's value, by the name of its output; of one that nothing counts for, 0.

        Args:
            step: the mini-batch.
            inputs: of its micro-batches; empty of those that are other replicas'.
        """
        if step not in self._weights:
            self._weights[step] = self._weigh(inputs)
        return self._weights[step]

    def _weigh(self, inputs: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
        counts = iter(() if self._count is None else self._count(inputs))
        divisors = [None if term.divisor is None or self._count is None else next(counts) for term in self.terms]
        return {
            term.value: self._share if divisor is None else 1.0 / divisor if divisor else 0.0
            for term, divisor in zip(self.terms, divisors, strict=True)
        }


class LossTally:
    """Adds up the loss outputs of a rank's micro-batches.

    From a device that is behind the host, each is brought to the host as soon as it is made: whoever asks for their
    total waits for the last forward, not for the backward behind it.
    """

    def __init__(
        self,
        rows: int,
        batch: int,
        terms: Sequence[Term] = (),
        copies: Copies | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin with nothing.

        Args:
            rows: of every micro-batch.
            batch: samples of a mini-batch.
            terms: with names, whose outputs are added as they are weighted.
            copies: of a device that is behind the host; None of others.
            meanwhile: done before the device is waited for.
        """
        self._share, self._terms, self._copies, self._meanwhile = rows / batch, list(terms), copies, meanwhile
        self.terms: dict[str, float] = {}
        """Of the mini-batch whose total was asked for last, this rank's part of every term, by name."""
        self._parts: dict[int, list[torch.Tensor | HostCopy]] = defaultdict(list)

    def begin_step(self, step: int) -> None:
        """Forget the steps before."""
        for before in [each for each in self._parts if each < step]:
            del self._parts[before]

    def add(self, step: int, outputs: list[torch.Tensor]) -> None:
        """Note one micro-batch's loss outputs: its mean, or its sum and count."""
        part = torch.stack([output.detach().double() for output in outputs])
        self._parts[step].append(part if self._copies is None else self._copies.to_host(part))

    def total(self, step: int, *, finite: bool = True) -> tuple[float, float]:
        """Return this rank's part of the mini-batch's mean and 0, or its sum and count; zeros without any loss.

        Raises:
            NonFiniteError: a loss is not a finite number, and has to be; whatever stage gave the like is before it.
        """
        self._meanwhile()
        parts, self.terms = [_brought(each) for each in self._parts.pop(step, [])], {}
        if not parts:
            return 0.0, 0.0
        total = torch.stack(parts).sum(0).tolist()
        if self._terms:
            self.terms = {term.name: value for term, value in zip(self._terms, total, strict=True)}
            trained = [index for index, term in enumerate(self._terms) if not term.logged]
            total, parts = [sum(total[index] for index in trained), 0.0], [part[trained] for part in parts]
        elif len(total) == 1:
            total = [total[0] * self._share, 0.0]
        if finite and not all(map(math.isfinite, total)):
            bad = [index for index, loss in enumerate(parts) if not bool(torch.isfinite(loss).all())]
            said = f"the loss is not finite in micro-batch {bad[0]}; nothing was updated on this rank"
            raise NonFiniteError(said, MOST_RANKS, forward=True)
        return total[0], total[1]


def _brought(part: torch.Tensor | HostCopy) -> torch.Tensor:
    if isinstance(part, torch.Tensor):
        return part
    part.wait()
    return part.tensor


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether every element is finite; a device is waited for once.

    >>> all_finite([torch.tensor([1.0, 2.0]), torch.tensor([1e30, 3e38])]), all_finite([torch.tensor([math.nan])])
    (True, False)
    """
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor.detach())
    norms = (value_of(torch.stack(torch._foreach_norm(own)).sum()) for own in by_device.values())
    # Squares of finite numbers may overflow.
    return all(map(math.isfinite, norms)) or first_not_finite(("", tensor) for tensor in tensors) is None


def first_not_finite(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Return the name of the first tensor that has an element that is not finite; None where all are."""
    return next((name for name, tensor in named_tensors if not bool(torch.isfinite(tensor).all())), None)


class LossScale:
    """The scale of a run's losses; every rank keeps the same one, for all see the same overflows.

    >>> scale = LossScale(growth_interval=2)
    >>> [scale.update(overflow) or scale.value for overflow in (True, False, False)]
    [32768.0, 32768.0, 65536.0]
    """

    def __init__(self, value: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.value, self._interval = value, growth_interval
        self.sound_steps = 0
        """Since the last overflow, or since it grew."""

    def update(self, overflow: bool) -> None:
        """Take note of a step: shrink after an overflow, grow after enough steps without one."""
        self.sound_steps = 0 if overflow else self.sound_steps + 1
        if overflow:
            self.value /= 2
        elif self.sound_steps == self._interval:
            self.value *= 2
            self.sound_steps = 0
