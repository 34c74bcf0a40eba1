"""Reducer: a rank's gradients, summed over the replicas of its stages and over stages that share parameters.

In comes what backwards leave in parameters, bucket by bucket while the last backward runs; out come gradients that are
equal on all ranks that hold a parameter. A bucket has gradients that are reduced together as views into one buffer, one
behind the other, with a mark for each that a backward has reached. A parameter of which ranks have different parts has
a buffer for all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast
from weakref import ref

import torch

from autopar.capture.split.sums import Summand
from autopar.formats.plan import Plan
from autopar.runtime.messages.transport import Pending, Transport, sharing_groups
from autopar.runtime.stage.layers import used_by_several
from autopar.runtime.stage.parameters import LocalParameters, Team, local, sharded_bounds
from autopar.runtime.stage.stage import Stage
from autopar.schedules.buckets import buckets

if TYPE_CHECKING:
    from autopar.runtime.stage.sharded import ShardedStage


class Bucket:
    """Parameters whose gradients are views into one buffer and are reduced together."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], total: int | None = None) -> None:
        """Lay them out; ``total`` are the numbers that are reduced, by default theirs."""
        self.parameters = list(parameters)
        sample = self.parameters[0]
        self._total = sum(parameter.numel() for parameter in self.parameters) if total is None else total
        # Behind the gradients, a mark for each parameter: on how many ranks a backward reached it.
        size = self._total + len(self.parameters)
        self.buffer = torch.zeros(size, dtype=sample.dtype, device=sample.device)
        self._marks = self.buffer[self._total :]
        self._all_reached = False
        self.missing = len(self.parameters)

    def attach(self) -> None:
        """Zero the buffer and make every gradient a view into it."""
        self.buffer.zero_()
        self._place()
        self._all_reached = False
        self.missing = len(self.parameters)

    def _place(self) -> None:
        offset = 0
        for parameter in self.parameters:
            parameter.grad = self.buffer[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    @property
    def gradients(self) -> list[torch.Tensor]:
        """What holds all its gradients."""
        return [self.buffer]

    def mark(self, reached_ids: set[int]) -> None:
        """Mark the parameters that a backward of this rank reached, just before the buffer is reduced."""
        reached = [float(id(parameter) in reached_ids) for parameter in self.parameters]
        self._all_reached = all(reached)
        if self._all_reached:
            # Copying a list would make the host wait for a GPU.
            self._marks.fill_(1.0)
        else:
            self._marks.copy_(torch.tensor(reached, dtype=self.buffer.dtype))

    def collect(self) -> None:
        """Have the gradients in the buffer, which is about to be reduced."""

    def spread(self) -> None:
        """Have the gradients that have been reduced."""

    def release_untouched(self) -> None:
        """Take the gradient from parameters that no rank's backward reached."""
        if self._all_reached:
            return
        for parameter, reached in zip(self.parameters, self._marks.tolist(), strict=True):
            if not reached:
                parameter.grad = None


class WholeBucket(Bucket):
    """A parameter of which ranks have different parts: the gradient of all of it is reduced among them.

    Each part is given by the first rank of every team that has it.
    """

    def __init__(self, parameter: torch.nn.Parameter, name: str, team: Team) -> None:
        """Lay it out; ``team`` knows the parameter by its name in the model."""
        self._name, self._team, self._shape = name, team, torch.Size(team.shape(name, parameter.shape))
        super().__init__([parameter], self._shape.numel())

    def _place(self) -> None:
        # The parameter may have that of another mini-batch when this one is reduced.
        self.parameters[0].grad = self._gradient = torch.zeros_like(self.parameters[0])

    @property
    def gradients(self) -> list[torch.Tensor]:
        """See :class:`Bucket`."""
        return [self._gradient]

    def collect(self) -> None:
        """See :class:`Bucket`."""
        self._team.put(self._name, self._gradient, self._whole)

    def spread(self) -> None:
        """See :class:`Bucket`."""
        self._gradient.copy_(self._team.take(self._name, self._whole))

    @property
    def _whole(self) -> torch.Tensor:
        return self.buffer[: self._total].view(self._shape)


class SharedGradient(NamedTuple):
    """A parameter that stages share, and who adds up its gradients."""

    parameter: torch.nn.Parameter
    ranks: tuple[int, ...]
    """Those that reduce together, this one among them."""
    owners: tuple[int, ...]
    """Those that answer for it where every element counts once."""
    name: str = ""
    """In the model."""
    team: Team | None = None
    """This rank's, where others have other parts of the parameter."""

    def bucket(self) -> Bucket:
        """Return a bucket for its gradient."""
        if self.team is None:
            return Bucket([self.parameter])
        return WholeBucket(self.parameter, self.name, self.team)


class _TeamSum:
    """Gradients of which the ranks of a team have summands, added up together once a mini-batch is complete.

    Those of parameters that every rank has as a whole, and reads where it computes a part only.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        """Begin without any; ``ranks`` add up."""
        self._ranks = ranks
        self._places: list[tuple[torch.nn.Parameter, Summand]] = []

    def add(self, parameter: torch.nn.Parameter, summand: Summand) -> None:
        """Take a parameter's gradient, or some of it."""
        self._places.append((parameter, summand))

    def reduce(self, transport: Transport) -> None:
        """Add up what there is; all ranks do so at once, of the same parameters."""
        views = [view for parameter, summand in self._places for view in _views_of_summands(parameter, summand)]
        if not views:
            return
        buffer = torch.cat([view.flatten() for view in views])
        transport.all_reduce(buffer, self._ranks).wait()
        for view, total in zip(views, torch.split(buffer, [view.numel() for view in views]), strict=True):
            view.copy_(total.view_as(view))


def _views_of_summands(parameter: torch.nn.Parameter, summand: Summand) -> list[torch.Tensor]:
    """Return views of those entries of a gradient that are summands, if there is a gradient.

    Replicas may divide it: the ranks of a team that add up have the same indices.
    """
    if parameter.grad is None:
        return []
    gradient = local(parameter.grad)
    if summand.indices is None:
        return [gradient]
    low, high = sharded_bounds(parameter, summand.dim)
    inside = [(max(start, low), min(stop, high)) for start, stop in summand.indices]
    return [gradient.narrow(summand.dim, start - low, stop - start) for start, stop in inside if start < stop]


def team_sums(team: Team, parameters: Mapping[str, torch.nn.Parameter]) -> list[_TeamSum]:
    """Return what adds up the gradients that a rank has summands of, in the order in which its team does so.

    Args:
        team: the rank's.
        parameters: by the model's own names.
    """
    found: dict[tuple[int, tuple[int, ...], torch.dtype], _TeamSum] = {}
    for name, summands in team.summands.items():
        parameter = parameters[name]
        for at, summand in enumerate(summands):
            # A parameter's second sum takes what its first one gives.
            key = at, team.ranks_of(summand.parts), parameter.dtype
            found.setdefault(key, _TeamSum(key[1])).add(parameter, summand)
    return [found[key] for key in sorted(found, key=lambda key: key[0])]


class _StageBuckets:
    """The buckets of one stage of a rank, and how far their reduction is."""

    def __init__(self, stage_buckets: list[Bucket]) -> None:
        self.buckets = stage_buckets
        self.begin()

    def begin(self) -> None:
        """Begin anew."""
        self.pending: list[Pending] = []
        self.last_backward, self.began = False, cast(object, None)

    @property
    def remaining_buckets(self) -> list[Bucket]:
        """Those whose reduction has not begun."""
        return self.buckets[len(self.pending) :]


def fill_buckets(groups: Sequence[Sequence[torch.nn.Parameter]]) -> list[Bucket]:
    """Return buckets for the parameters of a stage's layers, in the order in which backwards complete them."""
    sizes = [sum(p.numel() * p.element_size() for p in group) for group in groups]
    filled = []
    for indices in buckets(sizes):
        parameters = [parameter for index in indices for parameter in groups[index]]
        # One buffer holds one type; models of mixed types get a buffer each.
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            alike = [parameter for parameter in parameters if parameter.dtype == dtype]
            filled.append(Bucket(alike))
    return filled


_OwnedViews = Callable[[torch.nn.Parameter, torch.Tensor], list[torch.Tensor]]
"""Gives views of what a rank answers for of a parameter's gradient, of all of its team that have it."""


class _BatchGradients:
    """The gradients of one mini-batch, and how far their reductions are."""

    def __init__(
        self,
        stages: Mapping[int, Sequence[Sequence[torch.nn.Parameter]]],
        shared_parameters: Mapping[int, SharedGradient],
        plain: list[torch.nn.Parameter],
    ) -> None:
        """Lay them out: of the layers of stages, of what is shared between stages, and what no other rank holds."""
        self.stages = {index: _StageBuckets(fill_buckets(layers)) for index, layers in stages.items()}
        self.shared_buckets = {index: (shared.bucket(), shared) for index, shared in shared_parameters.items()}
        self.shared_pending: dict[int, Pending] = {}
        self.reached_ids: set[int] = set()
        self.is_complete = False
        """Whether those that a team has summands of are added up."""
        own = [bucket for stage in self.stages.values() for bucket in stage.buckets]
        self.buckets = own + [bucket for bucket, _ in self.shared_buckets.values()]
        self._plain = plain
        self._parameters = [*plain, *(each for bucket in self.buckets for each in bucket.parameters)]
        self._kept: list[torch.Tensor | None] = []
        self.step: int | None = None
        """The mini-batch whose backwards add to them; None where it has ended."""
        self.is_clear = False

    def begin(self) -> None:
        """Clear them, and let backwards add to them."""
        self.is_clear = True
        self._kept.clear()
        self.is_complete = False
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
        shared_parameters: Mapping[int, SharedGradient],
        transport: Transport,
        mark: Callable[[], object],
        rank: int,
        mini_batches: int = 1,
        owned_views: _OwnedViews = lambda parameter, gradient: [gradient],
        team_sums: Sequence[_TeamSum] = (),
    ) -> None:
        """Lay the gradients out.

        Args:
            stages: every layer's whole parameters, in layer order, of each stage of the rank.
            sharded_stages: those whose replicas divide other parameters.
            replicas: the ranks of these stages, this one among them.
            shared_parameters: by their indices in the plan, those that other stages hold, too.
            transport: carries the sums.
            mark: marks the present moment, for :meth:`finish` to return.
            rank: which rank this is.
            mini_batches: of how many there are gradients at a time.
            owned_views: gives what of a gradient no other rank of the team answers for.
            team_sums: add up gradients that the ranks of the team have summands of.
        """
        self._team_sums = team_sums
        self._owned_views = owned_views
        self._rank = rank
        self._replicas, self._sharded_stages, self._transport, self._mark = replicas, sharded_stages, transport, mark
        groups = _group_by_layer(stages, {id(shared.parameter) for shared in shared_parameters.values()})
        single, none = len(replicas) == 1, {index: list[list[torch.nn.Parameter]]() for index in groups}
        plain, reduced = (groups, none) if single else (none, groups)
        self._plain_of = {index: [each for layer in layers for each in layer] for index, layers in plain.items()}
        self._gradients = [_BatchGradients(reduced, shared_parameters, self._plain) for _ in range(mini_batches)]
        self._current = self._updated = self._gradients[0]
        """Those that backwards add to, and those that are asked for."""
        # Layers that share one may each run a backward of their own: its gradient is complete when all have.
        self._used_by_several = {id(each) for layers in stages.values() for each in used_by_several(layers)}
        for index, stage in self._current.stages.items():
            for at, bucket in enumerate(stage.buckets):
                self._hook(bucket.parameters, partial(Reducer._note_bucket, index=index, at=at))
        for shared_bucket, _ in self._current.shared_buckets.values():
            self._hook(shared_bucket.parameters, Reducer._note)

    @property
    def _plain(self) -> list[torch.nn.Parameter]:
        """Parameters that no other rank holds."""
        return [each for parameters in self._plain_of.values() for each in parameters]

    def clear_ended(self) -> None:
        """Clear the gradients that backwards have added to, if their mini-batch has ended."""
        if self._current.step is None and not self._current.is_clear:
            self._clear(self._current)

    def begin(self, step: int) -> None:
        """Have backwards add to the gradients of a mini-batch, which are clear when its first one comes."""
        asked = self._of(step)
        if asked.step == step:
            return
        if asked is not self._current:
            self._current.detach()
        self._current = self._updated = asked
        if not asked.is_clear:
            self._clear(asked)
        asked.step, asked.is_clear = step, False

    def end(self, step: int) -> None:
        """Say that the gradients of a mini-batch have been applied; they stay until others are added up."""
        self._of(step).step = None

    def _clear(self, gradients: _BatchGradients) -> None:
        gradients.begin()
        for sharded in self._sharded_stages.values():
            sharded.begin_step()

    @contextmanager
    def gradients_of(self, step: int) -> Iterator[None]:
        """Return the context in which parameters have the gradients of a mini-batch, maybe not that of backwards."""
        asked = self._of(step)
        if asked is self._updated:
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

    def _of(self, step: int) -> _BatchGradients:
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
        gradients.shared_buckets[index][0].spread()

    def _begin_shared(self, gradients: _BatchGradients, index: int) -> None:
        bucket, shared = gradients.shared_buckets[index]
        bucket.mark(gradients.reached_ids)
        bucket.collect()
        gradients.shared_pending[index] = self._transport.all_reduce(bucket.buffer, shared.ranks)

    def sum_in_team(self, step: int) -> None:
        """Add up what the ranks of the team have summands of, once in a mini-batch; replicas have each other's."""
        gradients = self._of(step)
        if gradients.is_complete:
            return
        gradients.is_complete = True
        with self.gradients_of(step):
            for each in self._team_sums:
                each.reduce(self._transport)

    def scale(self, factor: float, index: int | None = None) -> None:
        """Multiply all gradients, or those of one stage."""
        for gradient in self.complete(index):
            gradient.mul_(factor)

    def complete(self, index: int | None = None) -> list[torch.Tensor]:
        """Return what holds all gradients of this rank, or of one of its stages, which then shares none with others."""
        plain, buckets = self._plain, self._updated.buckets
        if index is not None:
            plain, buckets = self._plain_of[index], self._updated.stages[index].buckets
        return [
            *(each.grad for each in plain if each.grad is not None),
            *(each for bucket in buckets for each in bucket.gradients),
            *self._divided_gradients(index),
        ]

    def owned_gradients(self) -> list[torch.Tensor]:
        """Return gradients for a norm over all ranks: every element of the model's is owned by one rank."""
        shared = [bucket for bucket, each in self._updated.shared_buckets.values() if self._rank in each.owners]
        own = [each for index in self._updated.stages for each in self.owned_gradients_of(index)]
        return [*self._answered_gradients(each for bucket in shared for each in bucket.parameters), *own]

    def owned_gradients_of(self, index: int) -> list[torch.Tensor]:
        """Return those of one stage, for a norm over its replicas."""
        first = self._rank == self._replicas[0]
        return self.gradients_of_stage(index) if first else self._divided_gradients(index, self._owned_views)

    def gradients_of_stage(self, index: int) -> list[torch.Tensor]:
        """Return all gradients of one stage that this replica has, those included that the others have, too.

        Of a team's, they are those that this rank answers for.
        """
        parameters = [each for bucket in self._updated.stages[index].buckets for each in bucket.parameters]
        own = self._answered_gradients((*self._plain_of[index], *parameters))
        return [*own, *self._divided_gradients(index, self._owned_views)]

    def _answered_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
        found = ((each, each.grad) for each in parameters if each.grad is not None)
        return [view for parameter, gradient in found for view in self._owned_views(parameter, gradient)]

    def release_untouched(self) -> None:
        """Take the gradient from parameters that no backward reached: plain training would not update them.

        All ranks decide alike, whichever of them reached a parameter, or its copies would differ from then on.
        """
        for bucket in self._updated.buckets:
            bucket.release_untouched()

    def _divided_gradients(
        self, index: int | None = None, owned_views: _OwnedViews | None = None
    ) -> list[torch.Tensor]:
        asked = [sharded for at, sharded in self._sharded_stages.items() if index in (None, at)]
        return [each for sharded in asked for each in sharded.gradients(owned_views)]

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

    def _launch(self, gradients: _BatchGradients, stage: _StageBuckets) -> None:
        if stage.began is None:
            stage.began = self._mark()
        bucket = stage.remaining_buckets[0]
        bucket.mark(gradients.reached_ids)
        stage.pending.append(self._transport.all_reduce(bucket.buffer, self._replicas))


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


def _shared_gradients(
    plan: Plan, rank: int, stages: Collection[int], local_parameters: LocalParameters, team: Team
) -> Iterator[tuple[int, SharedGradient]]:
    """Yield, by its index in the plan, every parameter of the rank's stages that other ranks' stages hold, too."""
    for i, tied in enumerate(plan.tied):
        if any(stage in stages for stage in tied.stages):
            ranks = next(each for each in sharing_groups(plan, tied) if rank in each)
            if len(ranks) > 1:
                parameter, alike = local_parameters.parameters[tied.parameter], plan.cuts_alike(tied)
                owners = plan.ownership.replicas[tied.stages[0]][0]
                yield i, SharedGradient(parameter, ranks, owners, tied.parameter, None if alike else team)


def reducer_of(
    plan: Plan,
    rank: int,
    stages: Mapping[int, Stage],
    local_parameters: LocalParameters,
    transport: Transport,
    mark: Callable[[], object],
    team: Team,
) -> Reducer:
    """Return what reduces a rank's gradients.

    Args:
        plan: what is carried out.
        rank: which rank this is.
        stages: its stages, by index.
        local_parameters: theirs.
        transport: carries the sums.
        mark: marks the present moment, for :meth:`Reducer.finish` to return.
        team: with whom it runs its replica.
    """
    sharding = {index: stage for index, stage in stages.items() if plan.stages[index].shard != "none"}
    sharded = cast("dict[int, ShardedStage]", sharding)
    # Of what a stage's replicas divide, it takes care itself.
    parts = {each for stage in sharded.values() for each in stage.parts}
    layers = {
        index: [[each for each in layer.module.parameters() if each not in parts] for layer in stages[index].layers]
        for index in sorted(stages)
    }
    shared = dict(_shared_gradients(plan, rank, stages.keys(), local_parameters, team))
    replicas = plan.ownership.ranks[rank].copies
    kept = max(plan.depths[index].gradients for index in stages)
    names = {id(parameter): name for name, parameter in local_parameters.parameters.items()}

    def owned_views(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> list[torch.Tensor]:
        return team.owned_views(names[id(parameter)], parameter, gradient)

    sums = team_sums(team, local_parameters.parameters)
    return Reducer(layers, sharded, replicas, shared, transport, mark, rank, kept, owned_views, sums)
