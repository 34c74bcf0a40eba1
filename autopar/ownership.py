"""Ownership: what every rank has of a plan, made once of it, and what two of them have in common.

    plan.ownership.ranks[3]        # what rank 3 has: stages, rows, micro-batches, a part of parameters
    plan.ownership.replicas[1][0]  # the ranks of stage 1's first replica: one, or a team that runs it together
    meet(one, other)               # the samples that two have in common: what one hands the other

Replicas split every micro-batch among them, or take whole ones in turn. Of either, a replica has some rows of every
``period``-th micro-batch from a first one on, and nobody who is told its :class:`Samples` needs to know which it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, starmap
from math import ceil, gcd, lcm
from typing import Literal, NamedTuple, Protocol

Division = Literal["split", "round-robin"]
DIVISIONS: tuple[Division, ...] = ("split", "round-robin")
Shard = Literal["none", "optimizer", "gradients", "parameters"]
SHARDS: tuple[Shard, ...] = ("none", "optimizer", "gradients", "parameters")
SCATTERING: tuple[Shard, ...] = ("gradients", "parameters")
"""Where every backward leaves a replica with its part of the gradients, scattered while others are computed."""
_SLIVER = 1e-9
"""Fractions of a row that are rounding, of shares that divide freely."""


def shards_of(division: Division, shards: Sequence[Shard] = SHARDS) -> tuple[Shard, ...]:
    """Return what replicas may divide of what is asked.

    Those that take turns are at different micro-batches, and may not wait for each other in the course of one.

    >>> shards_of("round-robin")
    ('none', 'optimizer')
    """
    return tuple(shard for shard in shards if division == "split" or shard in ("none", "optimizer"))


class Samples(NamedTuple):
    """Rows ``start:stop`` of every ``period``-th micro-batch from ``first`` on."""

    start: float
    stop: float
    first: int = 0
    period: int = 1

    @property
    def rows(self) -> float:
        """How many rows there are of a micro-batch."""
        return self.stop - self.start

    def of(self, micro_batches: int) -> range:
        """Return those of so many micro-batches that they are of.

        >>> Samples(0, 8, first=1, period=3).of(5)
        range(1, 5, 3)
        """
        return range(self.first, micro_batches, self.period)

    def has(self, micro_batch: int) -> bool:
        """Whether they are of a micro-batch."""
        return micro_batch % self.period == self.first


def even_shares(rows: int, replicas: int) -> tuple[int, ...]:
    """Divide rows among replicas as evenly as whole rows allow: replica i owns [rows i / r, rows (i + 1) / r).

    >>> even_shares(8, 3)
    (2, 3, 3)
    """
    edges = [rows * index // replicas for index in range(replicas + 1)]
    return tuple(after - before for before, after in pairwise(edges))


@lru_cache(maxsize=2**12)
def samples_of(shares: Sequence[float], division: Division) -> tuple[Samples, ...]:
    """Return what each replica has, of which they take so many rows.

    >>> for samples in (*samples_of((2, 3), "split"), *samples_of((5, 5), "round-robin")):
    ...     print(*samples)
    0 2 0 1
    2 5 0 1
    0 5 0 2
    0 5 1 2
    """
    if division == "round-robin":
        return tuple(Samples(0, rows, turn, len(shares)) for turn, rows in enumerate(shares))
    return tuple(starmap(Samples, pairwise((0, *accumulate(shares)))))


def meet(one: Samples, other: Samples) -> Samples | None:
    """Return what two have in common; None where it is nothing.

    >>> meet(Samples(0, 4, 1, 2), Samples(3, 6, 2, 3)), meet(Samples(0, 4, 0, 2), Samples(0, 4, 1, 4))
    (Samples(start=3, stop=4, first=5, period=6), None)
    """
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    if stop - start <= _SLIVER:
        return None
    common = _common(one.first, one.period, other.first, other.period)
    return None if common is None else Samples(start, stop, *common)


@lru_cache(maxsize=2**16)
def _common(first: int, period: int, other_first: int, other_period: int) -> tuple[int, int] | None:
    """(first, period) of the numbers that leave two remainders; None where there are none.

    >>> _common(1, 2, 2, 3), _common(0, 2, 1, 4)
    ((5, 6), None)
    """
    divisor = gcd(period, other_period)
    if (other_first - first) % divisor:
        return None
    # The Chinese remainder theorem.
    own, other = period // divisor, other_period // divisor
    times = (other_first - first) // divisor * pow(own, -1, other) % other
    return first + period * times, lcm(period, other_period)


class Meeting(NamedTuple):
    """What ``sender`` and ``receiver`` of two stages have in common: replicas of theirs, or ranks."""

    sender: int
    receiver: int
    samples: Samples


class Replicas(NamedTuple):
    """How a stage is replicated: by how many, how they divide micro-batches, what they shard, and who runs each."""

    width: int = 1
    division: Division = "split"
    shard: Shard = "none"
    team: int = 1
    """Devices that run each together."""
    sliced: bool = False
    """Whether these keep slices of what is between layers, as far as layers can."""

    @property
    def devices(self) -> int:
        """How many devices run all of them."""
        return self.width * self.team

    @property
    def period(self) -> int:
        """How many micro-batches a replica's next one is further on: 1 where all have a share of each.

        >>> Replicas(3).period, Replicas(3, "round-robin").period
        (1, 3)
        """
        return self.width if self.division == "round-robin" else 1

    @property
    def lanes(self) -> int:
        """Among how many ranks of a team the rows of what a replica receives are divided; slices have all rows."""
        return 1 if self.sliced else self.team

    @property
    def text(self) -> str:
        """How many they are in the form that ``autopar plan --stages`` takes: 2, or 2x4, each run by 4 devices."""
        return f"{self.width}x{self.team}" if self.team > 1 else str(self.width)

    def run_by(self, other: Replicas) -> Replicas:
        """Return these, each run by as many devices as one of others, and as these do."""
        return self._replace(team=other.team, sliced=other.sliced)

    def so_many(self, width: int) -> Replicas:
        """Return so many, run like these; a single one divides nothing."""
        return self._replace(width=width) if width > 1 else Replicas(team=self.team, sliced=self.sliced)

    def most(self, micro_batches: int) -> int:
        """Return how many of a step's micro-batches the first of them has: no other has more.

        >>> Replicas(3).most(5), Replicas(3, "round-robin").most(5)
        (5, 2)
        """
        return -(-micro_batches // self.period)

    def shares(self, rows: int, *, divisible: bool = False) -> tuple[float, ...]:
        """Return the rows of a micro-batch that each takes.

        >>> Replicas(3).shares(8), Replicas(3, "round-robin").shares(8)
        ((2, 3, 3), (8, 8, 8))
        """
        if self.division == "round-robin":
            return (rows,) * self.width
        return (rows / self.width,) * self.width if divisible else even_shares(rows, self.width)


SINGLE = Replicas()
"""One replica, on one device."""


class _Divided(Protocol):
    """A stage, as far as its samples go."""

    @property
    def shares(self) -> Sequence[float]:
        """Rows of a micro-batch that each replica takes."""

    @property
    def division(self) -> Division:
        """Whether the replicas split every micro-batch, or take whole ones in turn."""


def meetings(sending: _Divided, receiving: _Divided) -> Sequence[Meeting]:
    """Return what the replicas of two stages have in common: what travels between them.

    >>> from types import SimpleNamespace as Stage
    >>> for sender, receiver, samples in meetings(
    ...     Stage(shares=(4, 4), division="round-robin"), Stage(shares=(1, 3), division="split")
    ... ):
    ...     print(sender, receiver, *samples)
    0 0 0 1 0 2
    0 1 1 4 0 2
    1 0 0 1 1 2
    1 1 1 4 1 2
    """
    return _meetings(tuple(sending.shares), sending.division, tuple(receiving.shares), receiving.division)


@lru_cache(maxsize=32)
def _meetings(
    shares: tuple[float, ...], division: Division, other_shares: tuple[float, ...], other_division: Division
) -> Sequence[Meeting]:
    """Return :func:`meetings`, found once for all stages that divide alike."""
    others = samples_of(other_shares, other_division)
    # Rows of replicas that split ascend: who ends before this sender begins has nothing of it.
    stops = [] if other_division == "round-robin" else [other.stop for other in others]
    found = []
    for sender, one in enumerate(samples_of(shares, division)):
        for receiver in range(bisect_right(stops, one.start), len(others)):
            if others[receiver].start >= one.stop:
                break
            common = meet(one, others[receiver])
            if common is not None:
                found.append(Meeting(sender, receiver, common))
    return found


class Turn(NamedTuple):
    """Which micro-batches a replica has, and of which mini-batches."""

    micro_batches: range
    """Of each of its mini-batches."""
    turn: int = 0
    """Its first mini-batch. It has every one, unless replicas take turns and there is no flush between mini-batches."""
    turns: int = 1
    """How many mini-batches further on its next one is."""


class Share(NamedTuple):
    """What a rank has: a replica of its stages, or a part of one."""

    rank: int
    group: int
    """Of devices, in the order of their first stages."""
    stages: tuple[int, ...]
    """One, or the chunks that it runs in turn; what follows is of each."""
    replica: int
    samples: Samples
    """Of a step's micro-batches; without flushes, of all, counted from the pipeline's last fill."""
    micro_batches: range
    """As of a :class:`Turn`."""
    turn: int
    turns: int
    part: int
    """Which part of its stages' parameters it has."""
    team: tuple[int, ...]
    """The ranks that run the replica together, by part, this one among them; it alone in most plans."""
    copies: tuple[int, ...]
    """The ranks that have the same part, by replica, this one among them."""

    def has(self, mini_batch: int, first: int) -> bool:
        """Whether it has micro-batches of a mini-batch, of those since the last fill, which began with ``first``."""
        return (mini_batch - first - self.turn) % self.turns == 0

    @property
    def rows(self) -> range:
        """Its rows of every micro-batch that it has."""
        return range(int(self.samples.start), int(self.samples.stop))

    @property
    def stage(self) -> int:
        """Its first stage."""
        return self.stages[0]

    @property
    def place(self) -> int:
        """Which of the replicas that split a micro-batch it is; 0 of one that takes whole ones."""
        return self.replica // self.samples.period


class _Placed(_Divided, Protocol):
    """A stage of a plan."""

    @property
    def devices(self) -> Sequence[int]:
        """Where its replicas are, part by part."""

    @property
    def tensor_parallel(self) -> int:
        """Devices that run a replica together."""


class Ownership:
    """What all ranks have of a plan; they count groups of stages in order, their replicas, and parts of these."""

    def __init__(
        self,
        stages: Sequence[_Placed],
        groups: Sequence[tuple[int, ...]],
        turn_of: Callable[[Samples], Turn],
        by_parts: Collection[tuple[int, int]] = (),
    ) -> None:
        """Find it.

        Args:
            stages: of the plan.
            groups: the stages of every group of devices.
            turn_of: returns which micro-batches a replica has, given its samples.
            by_parts: (producer, consumer) of stages of which a part hands its tensors to the same one of the other's.
        """
        self._stages, self._by_parts = stages, by_parts
        self.groups = len(groups)
        """Of devices."""
        self.replicas: list[Sequence[tuple[int, ...]]] = [()] * len(stages)
        """By stage, the ranks of every replica, by part."""
        found: list[Share] = []
        for group, chunks in enumerate(groups):
            first = stages[chunks[0]]
            parts, ranks = first.tensor_parallel, range(len(found), len(found) + len(first.devices))
            teams = [tuple(ranks[at : at + parts]) for at in range(0, len(ranks), parts)]
            copies = [tuple(ranks[part::parts]) for part in range(parts)]
            for stage in chunks:
                self.replicas[stage] = teams
            every = zip(teams, samples_of(first.shares, first.division), strict=True)
            for replica, (team, samples) in enumerate(every):
                turn = turn_of(samples)
                for part, rank in enumerate(team):
                    found.append(Share(rank, group, chunks, replica, samples, *turn, part, team, copies[part]))
        self.ranks = tuple(found)

    def holders(self, stage: int) -> list[Share]:
        """Return what the ranks of a stage have."""
        return [self.ranks[rank] for team in self.replicas[stage] for rank in team]

    def copies(self, stages: Sequence[int]) -> list[tuple[int, ...]]:
        """Return, by part, the ranks that have it of any of some stages, which have as many parts, each rank once."""
        teams = dict.fromkeys(team for stage in stages for team in self.replicas[stage])
        return list(zip(*teams, strict=True))

    def joins(self, producer: int, consumer: int) -> bool:
        """Whether ranks of a team are handed some rows each of what goes between two stages, and join them."""
        one, other = self._stages[producer], self._stages[consumer]
        return one.devices != other.devices and (producer, consumer) not in self._by_parts

    def handovers(self, producer: int, consumer: int) -> Iterator[Meeting]:
        """Yield what ranks of one stage hand those of another.

        A team hands itself all rows. From one to another each row goes once, to and from as many ranks as there are:
        ranks of a team exchange what they have received; but what is in parts goes from each to that with the same one.
        """
        sending, receiving = self.replicas[producer], self.replicas[consumer]
        joins = self.joins(producer, consumer)
        for sender, receiver, samples in meetings(self._stages[producer], self._stages[consumer]):
            team, other = sending[sender], receiving[receiver]
            start, stop = int(samples.start), ceil(samples.stop)
            slices = max(len(team), len(other))
            for index, rows in enumerate(even_shares(stop - start, slices) if joins else (stop - start,) * slices):
                if rows:
                    own = Samples(start, start + rows, *samples[2:])
                    yield Meeting(team[index % len(team)], other[index % len(other)], own)
                start += rows if joins else 0
