"""Buckets: gradients that are reduced together, laid out one behind the other in a buffer.

In come parameters; out come their gradients as views into buffers, with a mark for each that a backward has reached. A
parameter of which ranks have different parts has a buffer for all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import torch

from autopar.capture.split.sums import Summand
from autopar.runtime.messages.transport import Pending, Transport
from autopar.runtime.stage.parameters import local, sharded_ranges
from autopar.runtime.stage.team import Team
from autopar.schedules.route import buckets


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


class TeamSum:
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
    bounds = next((each[1:] for each in sharded_ranges(parameter) if each[0] == summand.dim), None)
    low, high = bounds or (0, gradient.shape[summand.dim])
    inside = [(max(start, low), min(stop, high)) for start, stop in summand.indices]
    return [gradient.narrow(summand.dim, start - low, stop - start) for start, stop in inside if start < stop]


def team_sums(team: Team, parameters: Mapping[str, torch.nn.Parameter]) -> list[TeamSum]:
    """Return what adds up the gradients that a rank has summands of, in the order in which its team does so.

    Args:
        team: the rank's.
        parameters: by the model's own names.
    """
    found: dict[tuple[int, tuple[int, ...], torch.dtype], TeamSum] = {}
    for name, summands in team.summands.items():
        parameter = parameters[name]
        for at, summand in enumerate(summands):
            # A parameter's second sum takes what its first one gives.
            key = at, team.ranks_of(summand.parts), parameter.dtype
            found.setdefault(key, TeamSum(key[1])).add(parameter, summand)
    return [found[key] for key in sorted(found, key=lambda key: key[0])]


class StageBuckets:
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


def gradients_in(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return the gradients that there are."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


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
