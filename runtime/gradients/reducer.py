"""Reducer: a rank's gradients, summed over the replicas of its stages and over stages that share parameters.

In comes what backwards leave in parameters, bucket by bucket while the last backward runs; out come gradients that are
equal on all ranks that hold a parameter. Buffers that forwards write are made equal on all replicas after every step,
as the plan asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, cast
from weakref import ref

import torch

from autopar.capture.graph import Layer
from autopar.formats.plan import Plan, ReplicatedState
from autopar.runtime.messages.transport import Pending, Transport, replica_ranks
from autopar.runtime.stage.layers import used_by_several
from autopar.runtime.stage.parameters import LocalParameters
from autopar.runtime.stage.stage import Stage
from autopar.schedules.continuing import depths_of
from autopar.schedules.route import buckets

if TYPE_CHECKING:
    from autopar.runtime.stage.sharded import ShardedStage


class _Bucket:
    """Parameters whose gradients are views into one buffer and are reduced together."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        sample = self.parameters[0]
        total = sum(parameter.numel() for parameter in self.parameters)
        # Behind the gradients, a mark for each parameter: on how many ranks a backward reached it.
        self.buffer = torch.zeros(total + len(self.parameters), dtype=sample.dtype, device=sample.device)
        self._marks = self.buffer[total:]
        self._all_reached = False
        self.missing = len(self.parameters)

    def attach(self) -> None:
        """Zero the buffer and make every gradient a view into it."""
        self.buffer.zero_()
        offset = 0
        for parameter in self.parameters:
            parameter.grad = self.buffer[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        self._all_reached = False
        self.missing = len(self.parameters)

    def mark(self, reached_ids: set[int]) -> None:
        """Mark the parameters that a backward of this rank reached, just before the buffer is reduced."""
        reached = [float(id(parameter) in reached_ids) for parameter in self.parameters]
        self._all_reached = all(reached)
        if self._all_reached:
            # Copying a list would make the host wait for a GPU.
            self._marks.fill_(1.0)
        else:
            self._marks.copy_(torch.tensor(reached, dtype=self.buffer.dtype))

    def release_untouched(self) -> None:
        """Take the gradient from parameters that no rank's backward reached."""
        if self._all_reached:
            return
        for parameter, reached in zip(self.parameters, self._marks.tolist(), strict=True):
            if not reached:
                parameter.grad = None


class _StageBuckets:
    """The buckets of one stage of a rank, and how far their reduction is."""

    def __init__(self, stage_buckets: list[_Bucket]) -> None:
        self.buckets = stage_buckets
        self.begin()

    def begin(self) -> None:
        self.pending: list[Pending] = []
        self.last_backward, self.began = False, cast(object, None)

    @property
    def remaining_buckets(self) -> list[_Bucket]:
        return self.buckets[len(self.pending) :]


class _Gradients:
    """The gradients of one mini-batch, and how far their reductions are."""

    def __init__(
        self,
        stages: Mapping[int, Sequence[Sequence[torch.nn.Parameter]]],
        shared_parameters: Mapping[int, tuple[torch.nn.Parameter, tuple[int, ...]]],
        plain: list[torch.nn.Parameter],
    ) -> None:
        """Lay them out: of the layers of stages, of what is shared between stages, and what no other rank holds."""
        self.stages = {index: _StageBuckets(_fill(layers)) for index, layers in stages.items()}
        self.shared_buckets = {
            index: (_Bucket([parameter]), ranks) for index, (parameter, ranks) in shared_parameters.items()
        }
        self.shared_pending: dict[int, Pending] = {}
        self.reached_ids: set[int] = set()
        own = [bucket for stage in self.stages.values() for bucket in stage.buckets]
        self.buckets = own + [bucket for bucket, _ in self.shared_buckets.values()]
        self._plain = plain
        self._parameters = [*plain, *(each for bucket in self.buckets for each in bucket.parameters)]
        self._kept: list[torch.Tensor | None] = []

    def begin(self) -> None:
        """Clear them, and let backwards add to them."""
        self._kept.clear()
        for parameter in self._plain:
            parameter.grad = None
        for bucket in self.buckets:
            bucket.attach()
        self.reached_ids.clear()
        self.shared_pending.clear()
        for stage in self.stages.values():
            stage.begin()

    def detach(self) -> None:
        """Keep what is there, before parameters are given the gradients of another mini-batch."""
        self._kept = [parameter.grad for parameter in self._parameters]

    def attach(self) -> None:
        """Give parameters what was kept."""
        for parameter, gradient in zip(self._parameters, self._kept, strict=True):
            parameter.grad = gradient


class Reducer:
    """Keeps a rank's gradients, and adds those of other ranks to them.

    Parameters that only this rank holds accumulate as autograd does it. Those of a replicated stage lie in buckets,
    reduced in reverse layer order as the last backward completes them. A parameter shared between stages on several
    ranks has a bucket of its own, reduced among all ranks that hold it. Stages whose replicas divide parameters reduce
    the gradients of these themselves.

    Where updates come late, there are gradients of several mini-batches. Those that backwards add to are the
    parameters'; others are so while their update runs (:meth:`gradients_of`).
    """

    def __init__(
        self,
        stages: Mapping[int, Sequence[Sequence[torch.nn.Parameter]]],
        sharded_stages: Mapping[int, ShardedStage],
        replicas: tuple[int, ...],
        shared_parameters: Mapping[int, tuple[torch.nn.Parameter, tuple[int, ...]]],
        transport: Transport,
        mark: Callable[[], object],
        rank: int,
        mini_batches: int = 1,
    ) -> None:
        """Lay the gradients out.

        Args:
            stages: every layer's whole parameters, in layer order, of each stage of the rank.
            sharded_stages: those whose replicas divide other parameters.
            replicas: the ranks of these stages, this one among them.
            shared_parameters: plan index of a parameter shared between stages -> it, and all ranks that hold it.
            transport: carries the sums.
            mark: marks the present moment, for :meth:`finish` to return.
            rank: which rank this is.
            mini_batches: of how many there are gradients at a time.
        """
        self._rank = rank
        self._replicas, self._sharded_stages, self._transport, self._mark = replicas, sharded_stages, transport, mark
        groups = _group_by_layer(stages, {id(parameter) for parameter, _ in shared_parameters.values()})
        alone, none = len(replicas) == 1, {index: list[list[torch.nn.Parameter]]() for index in groups}
        plain, reduced = (groups, none) if alone else (none, groups)
        self._plain_of = {index: [each for layer in layers for each in layer] for index, layers in plain.items()}
        self._gradients = [_Gradients(reduced, shared_parameters, self._plain) for _ in range(mini_batches)]
        self._current = self._updated = self._gradients[0]
        """Those that backwards add to, and those that are asked for."""
        # Layers that share one may each run a backward of their own: its gradient is complete when all have.
        self._used_by_several = {id(each) for layers in stages.values() for each in used_by_several(layers)}
        self._hook_all()

    @property
    def _plain(self) -> list[torch.nn.Parameter]:
        """Parameters that no other rank holds."""
        return [each for parameters in self._plain_of.values() for each in parameters]

    def _hook_all(self) -> None:
        """Note what backwards reach, and which buckets they complete."""
        for index, stage in self._current.stages.items():
            for at, bucket in enumerate(stage.buckets):
                self._hook(bucket.parameters, partial(Reducer._note_bucket, index=index, at=at))
        for bucket, _ in self._current.shared_buckets.values():
            self._hook(bucket.parameters, Reducer._note)

    def begin_step(self, step: int = 0) -> None:
        """Clear the gradients of a mini-batch, for its backwards to add to."""
        before, self._current = self._current, self._of(step)
        if before is not self._current:
            before.detach()
        self._updated = self._current
        self._current.begin()
        for sharded in self._sharded_stages.values():
            sharded.begin_step()

    @contextmanager
    def gradients_of(self, step: int) -> Iterator[None]:
        """Return the context in which parameters have the gradients of a mini-batch, maybe not that of backwards."""
        asked = self._of(step)
        if asked is self._current:
            yield
            return
        self._current.detach()
        asked.attach()
        self._updated = asked
        try:
            yield
        finally:
            asked.detach()
            self._current.attach()
            self._updated = self._current

    def _of(self, step: int) -> _Gradients:
        return self._gradients[step % len(self._gradients)]

    def begin_last_backward(self, index: int) -> None:
        """Say that the next backward completes a stage's gradients: buckets are reduced as they fill."""
        if index in self._sharded_stages:
            # What it reduces, and what is reduced here, would meet in another order on each replica.
            self._sharded_stages[index].begin_last_backward()
        else:
            self._current.stages[index].last_backward = True

    def weight_backward(self, index: int) -> AbstractContextManager[None]:
        """Return the context of the second half of a backward."""
        return self._sharded_stages[index].weight_backward() if index in self._sharded_stages else nullcontext()

    def begin_reductions(self, index: int) -> None:
        """Begin whatever is to be reduced of the gradients that a stage's last backward has completed."""
        stage = self._current.stages[index]
        while stage.remaining_buckets:
            self._launch(self._current, stage)
        for shared in self._current.shared_buckets:
            self._begin_shared(self._current, shared)

    def finish(self, index: int, step: int = 0) -> object:
        """Wait until a stage's replicas have each other's gradients; return the mark of the first one's beginning."""
        if index in self._sharded_stages:
            self._sharded_stages[index].finish()
        gradients = self._of(step)
        stage = gradients.stages[index]
        while stage.remaining_buckets:
            self._launch(gradients, stage)
        for pending in stage.pending:
            pending.wait()
        return None if index in self._sharded_stages else stage.began

    def finish_shared(self, index: int, step: int = 0) -> None:
        """Wait until one shared parameter's gradient is summed over all ranks that hold it."""
        gradients = self._of(step)
        if index not in gradients.shared_pending:
            self._begin_shared(gradients, index)
        gradients.shared_pending[index].wait()

    def _begin_shared(self, gradients: _Gradients, index: int) -> None:
        bucket, ranks = gradients.shared_buckets[index]
        bucket.mark(gradients.reached_ids)
        gradients.shared_pending[index] = self._transport.all_reduce(bucket.buffer, ranks)

    def scale(self, factor: float, index: int | None = None) -> None:
        """Multiply all gradients, or those of one stage."""
        for gradient in self.complete(index):
            gradient.mul_(factor)

    def complete(self, index: int | None = None) -> list[torch.Tensor]:
        """Return what holds all gradients of this rank, or of one of its stages, which then shares none with others."""
        plain, buckets = self._plain, self._updated.buckets
        if index is not None:
            plain, buckets = self._plain_of[index], self._updated.stages[index].buckets
        return [*_gradients_in(plain), *(bucket.buffer for bucket in buckets), *self._divided_gradients(index)]

    def owned_gradients(self) -> list[torch.Tensor]:
        """Return gradients for a norm over all ranks: every element of the model's is owned by one rank."""
        shared = [bucket for bucket, ranks in self._updated.shared_buckets.values() if self._rank == ranks[0]]
        own = [each for index in self._updated.stages for each in self.owned_gradients_of(index)]
        return [*_gradients_in(parameter for bucket in shared for parameter in bucket.parameters), *own]

    def owned_gradients_of(self, index: int) -> list[torch.Tensor]:
        """Return those of one stage, for a norm over its replicas."""
        first = self._rank == self._replicas[0]
        return self.gradients_of_stage(index) if first else self._divided_gradients(index)

    def gradients_of_stage(self, index: int) -> list[torch.Tensor]:
        """Return all gradients of one stage that this replica has, those included that the others have, too."""
        parameters = [each for bucket in self._updated.stages[index].buckets for each in bucket.parameters]
        return [*_gradients_in((*self._plain_of[index], *parameters)), *self._divided_gradients(index)]

    def release_untouched(self) -> None:
        """Take the gradient from parameters that no backward reached: plain training would not update them.

        All ranks decide alike, whichever of them reached a parameter, or its copies would differ from then on.
        """
        for bucket in self._updated.buckets:
            bucket.release_untouched()

    def _divided_gradients(self, index: int | None = None) -> list[torch.Tensor]:
        asked = [sharded for at, sharded in self._sharded_stages.items() if index in (None, at)]
        return [each for sharded in asked for each in sharded.gradients()]

    def _hook(self, parameters: Sequence[torch.nn.Parameter], note: Callable[[Reducer, torch.Tensor], None]) -> None:
        """Have gradients noted; a hook that held the reducer would keep both for good: no collector sees into it."""
        owner = ref(self)

        def noting(parameter: torch.Tensor) -> None:
            reducer = owner()
            if reducer is not None:
                note(reducer, parameter)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(noting)  # type: ignore[no-untyped-call]

    def _note(self, parameter: torch.Tensor) -> None:
        self._current.reached_ids.add(id(parameter))

    def _note_bucket(self, parameter: torch.Tensor, index: int, at: int) -> None:
        self._note(parameter)
        stage = self._current.stages[index]
        if stage.last_backward and id(parameter) not in self._used_by_several:
            stage.buckets[at].missing -= 1
            # In order, so that all replicas begin the same reductions in the same order.
            while stage.remaining_buckets and not stage.remaining_buckets[0].missing:
                self._launch(self._current, stage)

    def _launch(self, gradients: _Gradients, stage: _StageBuckets) -> None:
        if stage.began is None:
            stage.began = self._mark()
        bucket = stage.remaining_buckets[0]
        bucket.mark(gradients.reached_ids)
        stage.pending.append(self._transport.all_reduce(bucket.buffer, self._replicas))


def _gradients_in(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _group_by_layer(
    stages: Mapping[int, Sequence[Sequence[torch.nn.Parameter]]], known_ids: set[int]
) -> dict[int, list[list[torch.nn.Parameter]]]:
    """Return the trained parameters of every stage's layers, each with the first layer, but for those ``known_ids``."""
    groups: dict[int, list[list[torch.nn.Parameter]]] = {}
    for index, layers in stages.items():
        groups[index] = []
        for layer in layers:
            groups[index].append([each for each in layer if each.requires_grad and id(each) not in known_ids])
            known_ids |= {id(parameter) for parameter in groups[index][-1]}
    return groups


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


def reducer_of(
    plan: Plan,
    rank: int,
    stages: Mapping[int, Stage],
    local_parameters: LocalParameters,
    transport: Transport,
    mark: Callable[[], object],
) -> Reducer:
    """Return what reduces a rank's gradients.

    Args:
        plan: what is carried out.
        rank: which rank this is.
        stages: its stages, by index.
        local_parameters: theirs.
        transport: carries the sums.
        mark: marks the present moment, for :meth:`Reducer.finish` to return.
    """
    sharding = {index: stage for index, stage in stages.items() if plan.stages[index].shard != "none"}
    sharded = cast("dict[int, ShardedStage]", sharding)
    # Of what a stage's replicas divide, it takes care itself.
    parts = {each for stage in sharded.values() for each in stage.parts}
    layers = {
        index: [[each for each in layer.module.parameters() if each not in parts] for layer in stages[index].layers]
        for index in sorted(stages)
    }
    shared = {}
    for i, tied in enumerate(plan.tied):
        ranks = replica_ranks(plan, tied.stages)
        if stages.keys() & set(tied.stages) and len(ranks) > 1:
            shared[i] = local_parameters.parameters[tied.parameter], ranks
    replicas = replica_ranks(plan, stages)
    kept = 1 if plan.weight_policy == "sync" else max(depths_of(plan, index).gradients for index in stages)
    return Reducer(layers, sharded, replicas, shared, transport, mark, rank, kept)


class ReplicatedBuffers:
    """The written buffers of one rank's layers."""

    def __init__(
        self,
        layers: Iterable[Layer],
        local_parameters: LocalParameters,
        how: ReplicatedState | None,
        transport: Transport,
        ranks: tuple[int, ...],
        rank: int,
    ) -> None:
        """Find them.

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
        self._buffers = [local_parameters.buffers[name] for name in names]
        self._how, self._transport, self._ranks, self._first = how, transport, ranks, rank == ranks[0]

    @torch.no_grad()
    def settle(self) -> None:
        """Make the buffers alike; every replica does so at once."""
        for buffer in self._buffers:
            mean = self._how == "average" and (buffer.is_floating_point() or buffer.is_complex())
            # Backends do not add up booleans; of these and of integers, the first replica's are taken.
            sent = buffer.to(torch.int64) if buffer.dtype is torch.bool else buffer.clone()
            if not mean and not self._first:
                sent.zero_()
            self._transport.all_reduce(sent, self._ranks).wait()
            buffer.copy_(sent / len(self._ranks) if mean else sent)
