"""Gradients: summed over a stage's replicas while the last backward runs, and over stages that share parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from autopar.runtime.transport import Pending, Transport
from autopar.schedules.buckets import buckets

__all__ = ["Reducer"]


class _Bucket:
    """Parameters whose gradients are views into one buffer and are reduced together."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        sample = self.parameters[0]
        total = sum(parameter.numel() for parameter in self.parameters)
        # Behind the gradients, a mark for each parameter: on how many ranks a backward reached it.
        self.buffer = torch.zeros(total + len(self.parameters), dtype=sample.dtype, device=sample.device)
        self._marks = self.buffer[total:]
        self.missing = len(self.parameters)

    def attach(self) -> None:
        """Zero the buffer and make every gradient a view into it."""
        self.buffer.zero_()
        offset = 0
        for parameter in self.parameters:
            parameter.grad = self.buffer[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        self.missing = len(self.parameters)

    def mark(self, touched: set[int]) -> None:
        """Mark the parameters that a backward of this rank reached, just before the buffer is reduced."""
        reached = [float(id(parameter) in touched) for parameter in self.parameters]
        self._marks.copy_(torch.tensor(reached, dtype=self.buffer.dtype))

    def release_untouched(self) -> None:
        """Take the gradient from parameters that no rank's backward reached."""
        for parameter, reached in zip(self.parameters, self._marks.tolist(), strict=True):
            if not reached:
                parameter.grad = None


class Reducer:
    """Keeps a rank's gradients, and adds those of other ranks to them.

    Parameters that only this rank holds accumulate as autograd does it. Those of a replicated stage lie in buckets,
    reduced in reverse layer order as the last backward completes them. A parameter shared between stages has a bucket
    of its own, reduced among all ranks that hold it.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[torch.nn.Parameter]],
        replicas: tuple[int, ...],
        shared: Mapping[int, tuple[torch.nn.Parameter, tuple[int, ...]]],
        transport: Transport,
        mark: Callable[[], object],
    ) -> None:
        """Lay the gradients out.

        Args:
            layers: every layer's parameters, in layer order.
            replicas: the ranks of this stage, this one among them.
            shared: plan index of a parameter shared between stages -> the parameter and all ranks that hold it.
            transport: carries the sums.
            mark: marks the present moment, for :meth:`finish` to return.
        """
        self._replicas, self._transport, self._mark = replicas, transport, mark
        apart = {id(parameter) for parameter, _ in shared.values()}
        seen: set[int] = set()
        groups: list[list[torch.nn.Parameter]] = []
        for layer in layers:
            fresh = [p for p in layer if p.requires_grad and id(p) not in apart and id(p) not in seen]
            seen |= {id(parameter) for parameter in fresh}
            groups.append(fresh)
        self._plain = [p for group in groups for p in group] if len(replicas) == 1 else []
        self._buckets = [] if len(replicas) == 1 else _fill(groups)
        self._shared = {index: (_Bucket([parameter]), ranks) for index, (parameter, ranks) in shared.items()}
        self._touched: set[int] = set()
        self._pending: list[Pending] = []
        self._last_backward = False
        self._began: object = None
        owner = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        for bucket in [*self._buckets, *(bucket for bucket, _ in self._shared.values())]:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._hook(owner.get(id(parameter))))  # type: ignore[no-untyped-call]

    def begin_step(self) -> None:
        """Clear all gradients."""
        for parameter in self._plain:
            parameter.grad = None
        for bucket in self._all_buckets():
            bucket.attach()
        self._touched.clear()
        self._pending.clear()
        self._last_backward, self._began = False, None

    def begin_last_backward(self) -> None:
        """Say that the next backward completes the gradients: buckets are reduced as they fill."""
        self._last_backward = True

    def finish(self) -> object:
        """Wait until the stage's replicas have each other's gradients; return the mark of the first one's beginning."""
        while len(self._pending) < len(self._buckets):
            self._launch()
        for pending in self._pending:
            pending.wait()
        return self._began

    def reduce_shared(self, index: int) -> None:
        """Sum one shared parameter's gradient over all ranks that hold it."""
        bucket, ranks = self._shared[index]
        bucket.mark(self._touched)
        self._transport.all_reduce(bucket.buffer, ranks).wait()

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for parameter in self._plain:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        for bucket in self._all_buckets():
            bucket.buffer.mul_(factor)

    def release_untouched(self) -> None:
        """Take the gradient from parameters that no backward reached: plain training would not update them.

        All ranks decide alike, whichever of them reached a parameter, or its copies would differ from then on.
        """
        for bucket in self._all_buckets():
            bucket.release_untouched()

    def _all_buckets(self) -> list[_Bucket]:
        return [*self._buckets, *(bucket for bucket, _ in self._shared.values())]

    def _hook(self, bucket: _Bucket | None) -> _GradientHook:
        def note(parameter: torch.Tensor) -> None:
            self._touched.add(id(parameter))
            if bucket is not None and self._last_backward:
                bucket.missing -= 1
                # In order, so that all replicas begin the same reductions in the same order.
                while len(self._pending) < len(self._buckets) and not self._buckets[len(self._pending)].missing:
                    self._launch()

        return note

    def _launch(self) -> None:
        if self._began is None:
            self._began = self._mark()
        bucket = self._buckets[len(self._pending)]
        bucket.mark(self._touched)
        self._pending.append(self._transport.all_reduce(bucket.buffer, self._replicas))


class _GradientHook(Protocol):
    def __call__(self, parameter: torch.Tensor) -> None: ...


def _fill(groups: Sequence[Sequence[torch.nn.Parameter]]) -> list[_Bucket]:
    sizes = [sum(p.numel() * p.element_size() for p in group) for group in groups]
    filled = []
    for indices in buckets(sizes):
        parameters = [parameter for index in indices for parameter in groups[index]]
        # One buffer holds one type; models of mixed types get a buffer each.
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            alike = [parameter for parameter in parameters if parameter.dtype == dtype]
            filled.append(_Bucket(alike))
    return filled
