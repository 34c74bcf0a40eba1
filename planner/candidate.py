"""Candidate: a plan under consideration, without its numbers; and the families that candidates come in.

From a batch and options come families: micro-batch counts and schedules. Of a schedule it says how stages lie on
devices, and whether backwards are halved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, compress, pairwise
from math import isqrt, lcm
from typing import NamedTuple

from autopar.errors import UsageError
from autopar.formats.program import INPUT_BACKWARD
from autopar.formats.stage import group_of, groups_of, layers_text, layout_of
from autopar.options.plan import PLANNED, PlanOptions
from autopar.ownership import DIVISIONS, SINGLE, Division, Replicas, Samples, Shard, samples_of, shards_of
from autopar.schedules import SCHEDULES
from autopar.schedules.order import places

MOST_MICRO_BATCHES = 4096
"""Counts above are searched only when asked for: a step of theirs is mostly latency, and long to simulate."""


class Lead(NamedTuple):
    """By how much an earlier stage leads another one."""

    stop: int
    """The layer before which the earlier stage ends."""
    turns: int
    """See :meth:`CandidateStage.lead`."""


class CandidateStage(NamedTuple):
    """One stage of a candidate: layers ``first`` to ``stop - 1`` on ``devices``; fields as of a plan's stage."""

    first: int
    stop: int
    devices: tuple[int, ...]
    shares: tuple[float, ...]
    warmup: int
    recompute: tuple[int, ...] = ()
    """Positions of the layers that are run forward again, ascending."""
    shard: Shard = "none"
    division: Division = "split"
    team: int = 1
    """Devices that run a replica together: so many after each other."""
    sliced: bool = False
    """Whether these keep slices of tensors between layers, as far as layers can."""

    @classmethod
    def of(
        cls,
        first: int,
        stop: int,
        devices: tuple[int, ...],
        shares: tuple[float, ...],
        warmup: int,
        replicas: Replicas,
        recompute: tuple[int, ...] = (),
    ) -> CandidateStage:
        """Return the stage of some replicas."""
        _, division, shard, team, sliced = replicas
        return cls(first, stop, devices, shares, warmup, recompute, shard, division, team, sliced)

    @property
    def in_flight(self) -> int:
        """Most micro-batches in flight on all replicas together."""
        return self.warmup * self.period

    @property
    def replicas(self) -> Replicas:
        """How the stage is replicated."""
        return Replicas(len(self.devices) // self.team, self.division, self.shard, self.team, self.sliced)

    @property
    def teams(self) -> list[tuple[int, ...]]:
        """The devices of every replica."""
        return [self.devices[at : at + self.team] for at in range(0, len(self.devices), self.team)]

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first device of every replica."""
        return self.devices[:: self.team]

    @property
    def samples(self) -> Sequence[Samples]:
        """What each replica has of micro-batches."""
        return samples_of(self.shares, self.division)

    @property
    def period(self) -> int:
        """Micro-batches from one of a replica's to its next."""
        return self.replicas.period

    def layers_text(self) -> str:
        """Return the layers in the form that ``autopar plan --stages`` takes."""
        return layers_text(self.first, self.stop)

    def lead(self, before: CandidateStage, micro_batches: int) -> int:
        """Return for how many more turns than are in flight a gradient may be on its way to the stage ``before``.

        It has arrived when the replica that it went to sends the activations of a later micro-batch, as many behind
        as that stage has in flight. Where replicas take turns, the same two meet again after as many micro-batches as
        both numbers of replicas divide.

        >>> one = CandidateStage(0, 1, (0,), (4,), 7)
        >>> two = CandidateStage(1, 2, (1, 2), (4, 4), 2, division="round-robin")
        >>> two.lead(one, 9), one.lead(two, 9), one._replace(warmup=1).lead(two, 9)
        (2, 0, 3)
        """
        meeting = lcm(self.period, before.period)
        met = -(-min(before.in_flight, micro_batches) // meeting) * meeting
        return max(0, met // self.period - self.warmup)

    def leads(self, before: Sequence[CandidateStage], micro_batches: int) -> tuple[Lead, ...]:
        """Return :meth:`lead` to every stage before; tensors that pass some by come from earlier ones."""
        return tuple(Lead(each.stop, self.lead(each, micro_batches)) for each in before)


class Family(NamedTuple):
    """What the search's outer loop runs over: all but the stages."""

    micro_batches: int
    micro_batch_size: int
    schedule: str


class Candidate(NamedTuple):
    """A plan under consideration."""

    micro_batches: int
    micro_batch_size: int
    schedule: str
    stages: tuple[CandidateStage, ...]

    @property
    def family(self) -> Family:
        """All but the stages."""
        return Family(*self[:3])

    @property
    def cuts(self) -> tuple[int, ...]:
        """Layers before which the stages end."""
        return tuple(stage.stop for stage in self.stages)

    @property
    def widths(self) -> tuple[int, ...]:
        """Replicas, by stage."""
        return tuple(stage.replicas.width for stage in self.stages)

    @property
    def devices(self) -> tuple[int, ...]:
        """Of all stages, in their order; those that run several stages stand there several times."""
        return tuple(device for stage in self.stages for device in stage.devices)

    @property
    def used_devices(self) -> tuple[int, ...]:
        """Each once, in the order of the ranks."""
        return tuple(dict.fromkeys(self.devices))

    @property
    def all_in_flight(self) -> bool:
        """Whether every stage has all of its micro-batches in flight, as under `gpipe`."""
        return all(stage.warmup == stage.replicas.most(self.micro_batches) for stage in self.stages)

    def text(self) -> str:
        """Return the stages in the form that ``autopar plan --stages`` takes."""
        return ",".join(f"{stage.layers_text()}:{stage.replicas.text}" for stage in self.stages)

    def micro_batches_text(self) -> str:
        """Return how many micro-batches there are, in words."""
        return f"{self.micro_batches} micro-batch{'es' if self.micro_batches > 1 else ''}"


def devices_of(widths: Sequence[int], order: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the devices of groups of these widths, which take them in an order.

    >>> devices_of((2, 1), (3, 0, 1, 2))
    [(3, 0), (1,)]
    """
    return [tuple(order[stop - width : stop]) for width, stop in zip(widths, accumulate(widths), strict=True)]


def place(
    family: Family,
    cuts: Sequence[int],
    replicas: Iterable[Replicas],
    order: Sequence[int] | None = None,
    *,
    divisible: bool = False,
) -> tuple[CandidateStage, ...]:
    """Return stages that end before the layers ``cuts``, with all in flight, on groups of devices.

    Groups take devices in an order, that of the cluster if none is given; ``replicas`` are by group.

    >>> [stage.devices for stage in place(Family(2, 4, "1f1b"), (3, 5), [Replicas(2), Replicas(1)])]
    [(0, 1), (2,)]
    >>> [stage.devices for stage in place(Family(2, 4, "interleaved"), (1, 2, 3, 4), [Replicas()] * 2, order=(7, 5))]
    [(7,), (5,), (7,), (5,)]
    """
    every = list(replicas)
    widths = [each.devices for each in every]
    groups = devices_of(widths, range(sum(widths)) if order is None else order)
    layout, stages = layout_of(family.schedule), []
    for index, (first, stop) in enumerate(pairwise((0, *cuts))):
        at = group_of(layout, index, len(groups))
        shares = every[at].shares(family.micro_batch_size, divisible=divisible)
        depth = every[at].most(family.micro_batches)
        stages.append(CandidateStage.of(first, stop, groups[at], shares, depth, every[at]))
    return tuple(stages)


def within(layers: Iterable[int], first: int, stop: int) -> tuple[int, ...]:
    """Return those of some layers that a stage holds, ascending.

    >>> within({5, 1, 3}, 1, 4)
    (1, 3)
    """
    return tuple(sorted(layer for layer in layers if first <= layer < stop))


class Shape(NamedTuple):
    """Stages of a candidate, without what is in flight."""

    cuts: tuple[int, ...]
    """Layers before which the stages end."""
    replicas: tuple[Replicas, ...]
    """By group of devices."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Replicas, by group."""
        return tuple(each.width for each in self.replicas)

    @property
    def devices(self) -> tuple[int, ...]:
        """How many each group has."""
        return tuple(each.devices for each in self.replicas)

    @property
    def teams(self) -> tuple[Replicas, ...]:
        """A replica of every group; none where a device runs each."""
        every = tuple(SINGLE.run_by(each) for each in self.replicas)
        return every if any(each.team > 1 for each in every) else ()

    @property
    def chunks(self) -> int:
        """Stages of every group."""
        return len(self.cuts) // len(self.replicas)

    @classmethod
    def of(cls, candidate: Candidate) -> Shape:
        """Return the shape of a candidate with one stage on every group.

        >>> shape = Shape.of(Candidate(2, 4, "1f1b", place(Family(2, 4, "1f1b"), (3, 5), map(Replicas, (2, 1)))))
        >>> shape.cuts, shape.widths
        ((3, 5), (2, 1))
        """
        return cls(candidate.cuts, tuple(stage.replicas for stage in candidate.stages))

    def sharded(self, shard: Shard) -> tuple[Replicas, ...]:
        """Return its replicas, those of which there are several with a shard, that all split micro-batches."""
        every = (each._replace(shard=shard, division="split") for each in self.replicas)
        return tuple(each.so_many(each.width) for each in every)

    def with_devices(self, devices: tuple[int, ...]) -> Shape | None:
        """Return the shape with other numbers of devices; None where teams cannot have so many.

        Changed groups are run as the nearest ones that have replicas.
        """
        if any(count % own.team for own, count in zip(self.replicas, devices, strict=True)):
            return None
        replicas = [
            own if own.devices == count else self._nearest(at).run_by(own).so_many(count // own.team)
            for at, (own, count) in enumerate(zip(self.replicas, devices, strict=True))
        ]
        return Shape(self.cuts, tuple(replicas))

    def with_stages(self, at: int, count: int, stages: Shape) -> Shape:
        """Return the shape with other stages in place of so many, where every group has one."""
        parts = zip(self, stages, strict=True)
        return Shape(*((*own[:at], *others, *own[at + count :]) for own, others in parts))  # type: ignore[arg-type]

    def run(self, how: Replicas) -> Shape:
        """Return the shape with the replicas of all groups dividing micro-batches, and what they shard, in a way."""
        return self._replace(replicas=tuple(how.run_by(each).so_many(each.width) for each in self.replicas))

    def _nearest(self, at: int) -> Replicas:
        """Return those of the nearest group that has several."""
        every = sorted(range(len(self.replicas)), key=lambda other: abs(other - at))
        return next((self.replicas[other] for other in every if self.replicas[other].width > 1), SINGLE)


def with_depths(family: Family, stages: Sequence[CandidateStage], depths: Sequence[int]) -> Candidate:
    """Return the candidate of stages with so many micro-batches in flight."""
    deep = (stage._replace(warmup=depth) for stage, depth in zip(stages, depths, strict=True))
    return Candidate(*family, tuple(deep))


def with_depth(candidate: Candidate, index: int, depth: int) -> Candidate:
    """Return a candidate with one stage's depth in place of its own."""
    stages = candidate.stages
    return candidate._replace(stages=(*stages[:index], stages[index]._replace(warmup=depth), *stages[index + 1 :]))


def equal_widths(stages: Sequence[CandidateStage]) -> bool:
    """Whether all stages have as many replicas, with equal shares, that run and shard alike.

    >>> every = [map(Replicas, widths) for widths in ((2, 2), (2, 1), (3, 3))]
    >>> [equal_widths(place(Family(2, 4, "1f1b"), (3, 5), each)) for each in every]
    [True, False, False]
    """
    first = stages[0]
    alike = {(stage.replicas, *stage.shares) for stage in stages}
    return len(alike) == 1 and len(set(first.shares)) == 1


def divisors(batch: int) -> list[int]:
    """Return every micro-batch count of a batch, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [count for count in range(1, isqrt(batch) + 1) if batch % count == 0]
    return sorted({*small, *(batch // count for count in small)})


def counts_beside(batch: int, micro_batches: int) -> tuple[int, ...]:
    """Return the next smaller and the next larger micro-batch count of a batch, as far as there are such.

    >>> counts_beside(12, 4), counts_beside(12, 1)
    ((3, 6), (2,))
    """
    every = divisors(batch)
    at = every.index(micro_batches)
    return (*every[max(0, at - 1) : at], *every[at + 1 : at + 2])


def families(batch: int, options: PlanOptions) -> list[Family]:
    """Return every family that the options admit.

    `gpipe` is `1f1b` with all micro-batches in flight: where any schedule will do, the latter stands for both.

    Raises:
        UsageError: the micro-batches asked for do not divide the batch.
    """
    every = divisors(batch)
    if options.micro_batches is not None and options.micro_batches not in every:
        asked = options.micro_batches
        near = sorted(sorted(every, key=lambda count: abs(count - asked))[:3])
        raise UsageError(
            f"`micro_batches={asked}` does not divide the batch {batch}; near ones do: {', '.join(map(str, near))}"
        )
    counts = [count for count in every if count <= MOST_MICRO_BATCHES]
    if options.micro_batches is not None:
        counts = [options.micro_batches]
    schedule = "1f1b" if options.schedule == "auto" else options.schedule
    return [Family(count, batch // count, schedule) for count in counts]


def replicas_of(family: Family, count: int, shards: Sequence[Shard] = ("none",), *, divisible: bool) -> list[Replicas]:
    """Return how a stage may be replicated so often; in no way where not each replica would have something to do.

    >>> for family, count in ((Family(4, 2, "1f1b"), 2), (Family(2, 4, "1f1b"), 3)):
    ...     [each.division for each in replicas_of(family, count, divisible=False)]
    ['split', 'round-robin']
    ['split']
    """
    if count == 1:
        return [SINGLE]
    busy = divisible or count <= family.micro_batch_size, count <= family.micro_batches and not divisible
    divisions = compress(DIVISIONS, busy)
    return [Replicas(count, division, shard) for division in divisions for shard in shards_of(division, shards)]


def has_chunks(schedule: str) -> bool:
    """Whether a rank of a schedule runs several stages."""
    return layout_of(schedule) != "line"


@lru_cache(maxsize=64)
def splits_backward(schedule: str) -> bool:
    """Whether a schedule has backwards in two halves.

    >>> splits_backward("1f1b")
    False
    """
    chunks = 2 if has_chunks(schedule) else 1
    depths = next(iter(SCHEDULES[schedule].warmups(2, chunks, 4).values()))
    every = places(layout_of(schedule), 2, chunks, 4, depths)
    return any(kind == INPUT_BACKWARD for place in every for kind, _, _ in SCHEDULES[schedule].order(place))


def plain(schedule: str) -> bool:
    """Whether a schedule's order follows from the depths of its stages, by which tables find its plans."""
    return schedule in PLANNED


def groups(stages: Sequence[CandidateStage]) -> tuple[tuple[int, ...], ...]:
    """Return the stages of every group of devices."""
    return groups_of([stage.devices for stage in stages])


def chunk_counts(schedule: str) -> tuple[int, ...]:
    """Return how many stages a rank is tried to run by a schedule.

    >>> chunk_counts("1f1b"), chunk_counts("interleaved")
    ((1,), (2, 3, 4))
    """
    return {"line": (1,), "vee": (2,), "loop": (2, 3, 4)}[layout_of(schedule)]
