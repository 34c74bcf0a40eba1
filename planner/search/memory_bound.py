"""Memory bound: seconds that no plan undercuts, for what its micro-batches in flight hold.

It tells no stages apart, as tables do, and so is quick where devices, teams and layers are many. Of a plan that takes T
seconds, let M be its micro-batches, R(l) the seconds of one's way from layer l to the last one and back, and

    K(l) = M R(l) / T        micro-batches that are on this way, on average

A stage on n devices, each of which computes g(l) seconds of the step for a layer l together, keeps at least K of its
first layer in flight, and one. It idles while the first micro-batch comes to it and the last one goes back, for P: so
long as a micro-batch takes there, M P / T = K(1) - K of its first layer. Its own part of K is at most v: 1, or
its replicas, where these take turns. With S(l) bytes of state, A(l) of activations of a micro-batch, and O while some
layer is at work, on all of its devices together,

    n T >= sum of g(l) (1 + (K(1) - K(l) - v) / M)
    n L >= sum of S(l) + A(l) max(1, K(l)) + O g(l) / T        L: bytes of a device

Both are added over all stages, the second one at a price of bytes; what all devices have of time and memory is no less
in any plan. The least sum is found layer by layer, from the last to the first, over all ways to run each and all K(l),
which are rounded down. A T and a price at which it is more than there is rule out every plan of T or less. Gradients
must cross every boundary.

Backwards in halves keep micro-batches until the input half: R has no weight halves, and P only forwards. Of ranks with
several stages it is known that they keep as many micro-batches of every layer as are on the way behind it, on average,
and one of each before their first backward; their idle time and what is held at work are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.hardware.topology import Place
from autopar.options.plan import PlanOptions
from autopar.ownership import SCATTERING, Replicas, Shard, shards_of
from autopar.planner.bounds import work_s
from autopar.planner.candidate import Family, has_chunks, splits_backward
from autopar.planner.costs import memoize
from autopar.planner.costs.layers import Launches, Site, first_alike
from autopar.planner.costs.model import CostModel

Numbers = npt.NDArray[np.float64]
PRECISION = 1.01
"""Of the seconds that are found, how far those that are ruled out, and those that are not, may be apart."""
RANGES, PER_LAYER = 2000, 64
"""In which numbers of micro-batches in flight are told apart; and so many for a layer on its part of all devices."""
GRID = np.array([0.006, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05])
"""By number of a way, within what part of each other ways are alike."""
FARTHEST, NEAREST = 4.0, 1.1
"""Between multipliers that are tried, at first and in the end."""
ROUNDING = 1e-6
_LAUNCHES: tuple[Launches, ...] = ("forward_launch_s", "backward_launch_s", "backward_input_launch_s")


class Multipliers(NamedTuple):
    """Multipliers of what is added up."""

    byte_s: float = 0.0
    """Device seconds that a byte costs."""
    idle: float = 1.0
    """Of idle seconds, the part that counts. A stage's are no less than 0, and its term may be."""


class _Way(NamedTuple):
    """A way to run a layer: numbers over layers, and then over ways; bytes and work of all of a stage's devices."""

    work_s: Numbers
    """Of a step, in device seconds."""
    state: Numbers
    """Bytes that are there throughout."""
    kept: Numbers
    """Bytes of a micro-batch in flight."""
    least: Numbers
    """Micro-batches in flight at least."""
    trip_s: Numbers
    """Of a micro-batch, forward and backward."""
    at_work: Numbers
    """Bytes on a device while it computes some layer."""
    turns: Numbers
    """Replicas that take turns; 1 where they do not."""


def memory_bound_s(
    costs: CostModel, families: Sequence[Family], options: PlanOptions, low_s: float, high_s: float
) -> float:
    """Return seconds that no plan of some families undercuts, from ``low_s``, which none does, up to ``high_s``.

    Where gradients do not cross every boundary, no more than ``low_s``. Of a schedule with several stages a rank, the
    bound holds for one stage a rank, too; and of one with halved backwards, for whole ones.
    """
    # What stages of several kinds hold and compute is not known of their layers one by one.
    if costs.mixes or np.isnan(costs.flows.crossing_bytes[1][1:-1]).any():
        return low_s
    numbers, bound_s, multipliers = _LayerNumbers(costs, options), high_s, Multipliers()
    known = {family: work_s(costs, family) for family in families}
    for family in sorted(known, key=known.__getitem__):
        low, high = max(low_s, known[family]), bound_s
        if low >= high:
            continue
        ways = _FamilyWays(numbers, family)
        # Most families are ruled out as soon as they are asked for what bounds the ones before.
        fits, multipliers = ways.fits(high, multipliers)
        while fits and high > PRECISION * low:
            middle = (low * high) ** 0.5
            found, multipliers = ways.fits(middle, multipliers)
            low, high = (low, middle) if found else (middle, high)
        bound_s = low if fits else bound_s
    return max(low_s, bound_s)


class _FamilyWays:
    """All ways to run the layers of a family's plans."""

    def __init__(self, numbers: _LayerNumbers, family: Family) -> None:
        self.family, self._numbers, self.costs = family, numbers, numbers.costs
        self._devices, self._bytes = len(self.costs.devices), float(sum(self.costs.limits_bytes))
        self.has_chunks = has_chunks(family.schedule)

    def fits(self, step_s: float, multipliers: Multipliers) -> tuple[bool, Multipliers]:
        """Whether plans of some seconds are not ruled out by multipliers near some; and those that ruled out such."""
        seconds = step_s - self.costs.profile.step_overhead_s
        if seconds <= 0:
            return False, multipliers
        for at_once in (False, True) if self.has_chunks else (False,):
            found = self._ruling_out(_Table(self, seconds, at_once=at_once), seconds, multipliers)
            if found is not None:
                return False, found
        return True, multipliers

    def _ruling_out(self, table: _Table, seconds: float, multipliers: Multipliers) -> Multipliers | None:
        """Return multipliers near some at which a table says that plans take more than there is, if any."""
        known = dict[Multipliers, float]()

        def missing(multipliers: Multipliers) -> float:
            if multipliers not in known:
                there = self._devices * seconds + multipliers.byte_s * self._bytes
                known[multipliers] = table.least(multipliers) * (1 - ROUNDING) / there - 1
            return known[multipliers]

        # At first all memory is worth as much as all time.
        best = multipliers if multipliers.byte_s else Multipliers(self._devices * seconds / self._bytes, 1.0)
        factor, part = FARTHEST, 0.5
        while factor > NEAREST:
            beside = [best._replace(byte_s=best.byte_s * each) for each in (factor, 1 / factor)]
            if not self.has_chunks:
                beside += [best._replace(idle=min(1.0, max(0.0, best.idle + each))) for each in (part, -part)]
            for found in (best, *beside):
                if missing(found) > 0:
                    return found
            found = max((best, *beside), key=missing)
            if found == best:
                factor, part = factor**0.5, part / 2
            best = found
        return None

    @cached_property
    def by_layer(self) -> tuple[list[int], dict[int, _Way]]:
        """By layer, the first one that is alike; and the ways to run that one that no other rules out."""
        rounded = _rounded_down(np.array([np.broadcast_arrays(*way) for way in self._every_way()]))
        layers = np.moveaxis(rounded, 2, 0)
        alike = first_alike(own.tobytes() for own in layers)
        return alike, {at: _Way(*_undominated_ways(np.unique(layers[at], axis=0)).T) for at in set(alike)}

    @cached_property
    def least_work_s(self) -> float:
        """Device seconds of all layers, each run as it takes least."""
        alike, ways = self.by_layer
        return float(sum(ways[at].work_s.min() for at in alike))

    @cached_property
    def ahead(self) -> float:
        """Of a micro-batch's way, the part that a stage behind waits for at least; of several a rank, not known."""
        if self.has_chunks:
            return 0.0
        # Known of the ways once these are.
        return self._numbers.least_forward if splits_backward(self.family.schedule) and self.by_layer else 1.0

    def _every_way(self) -> Iterator[_Way]:
        costs, rows, shards = self.costs, self.family.micro_batch_size, self._numbers.shards
        for kind, team in self._numbers.runners:
            most = costs.kind_of.count(kind) // team.team
            for width in range(1, most + 1) if costs.divisible else _widths(min(most, rows), rows):
                for shard in shards if width > 1 else shards[:1]:
                    yield from self._ways(kind, team, width, shard)
            turning = 1 if costs.divisible else min(most, self.family.micro_batches)
            for (low, high), shard in product(_doubling(turning), shards_of("round-robin", shards)):
                yield from self._in_turn(kind, team, low, high, shard)

    def _in_turn(self, kind: int, team: Replicas, low: int, high: int, shard: Shard) -> Iterator[_Way]:
        """Yield the ways of replicas that take turns, at least ``low`` and at most ``high``."""
        memory = self.costs.memory[self.costs.form(kind, team)]
        # Those that shard may have all of their micro-batches in flight when the first gradients are made.
        state = low * team.team * memory.state_of_layers(shard, low, gradients=shard == "none")
        for way in self._ways(kind, team, 1, "none"):
            yield way._replace(state=state, least=np.full(1, low), turns=np.full(1, high))

    def _ways(self, kind: int, team: Replicas, width: int, shard: Shard) -> Iterator[_Way]:
        """Yield the ways of some replicas, wherever they may stand, without recomputation and with."""
        family, numbers = self.family, self._numbers
        form, devices, one = self.costs.form(kind, team), width * team.team, np.ones(1)
        shares = self.costs.shares(family.micro_batch_size, Replicas(width))
        rows, fewest, halved = max(shares), min(shares), splits_backward(family.schedule)
        adding, memory = self.costs.adding(family.micro_batches, width), self.costs.memory[form]
        # Before the first backward, there are gradients only in buckets.
        has_gradients = shard == "none" and width > 1 if self.has_chunks else family.micro_batches > 1
        state = devices * memory.state_of_layers(shard, width, gradients=has_gradients)
        at_work = memory.activations.least_at_work(fewest, shard)
        update = numbers.update_s(form) / (1 if shard == "none" else width)
        for site in numbers.sites(width, devices, shard, form):
            work, trip = numbers.seconds(rows, adding, site, halved)
            if fewest < rows:
                trip = np.minimum(trip, numbers.seconds(fewest, adding, site, halved)[1])
            for again_s, kept in numbers.recomputing(rows, adding, site):
                step_s = family.micro_batches * (work + again_s) + update
                yield _Way(devices * step_s, state, devices * kept, one, trip, at_work, one)


class _LayerNumbers:
    """Seconds and bytes of layers, for all families."""

    def __init__(self, costs: CostModel, options: PlanOptions) -> None:
        self.costs, self._recompute = costs, options.recompute
        self.shards = tuple(dict.fromkeys(("none", *options.shards)))
        self.runners = list(product(sorted(set(costs.kind_of)), costs.teams))
        """Kinds of devices, and how many run a replica."""
        self.least_forward = 0.5
        """The least part of a forward in a micro-batch's way over a layer, of all that were asked for in halves."""
        topology = costs.links.topology
        room = {"node": topology.nodes, "rack": topology.racks}
        self._room = {each: max(Counter(room[each]).values()) for each in topology.levels if each in room}

    def sites(self, ranks: int, devices: int, shard: Shard, form: int) -> Iterator[Site]:
        """Yield what forwards and backwards depend on, wherever replicas on so many devices may stand best."""
        links = self.costs.links
        for level in links.topology.levels if shard in SCATTERING else ("node",):
            place = Place(ranks, level) if level == "node" else links.best_place(ranks, level)
            if shard not in SCATTERING or self._room.get(level, devices) >= devices:
                yield Site.of(shard, place, form)

    @memoize
    def update_s(self, form: int) -> Numbers:
        """Return the seconds of every layer's update."""
        return np.diff(self.costs.layers[form].update_sums)

    @memoize
    def recomputing(self, rows: float, adding: float, site: Site) -> list[tuple[Numbers, Numbers]]:
        """Return seconds by which recomputed layers take longer, and bytes that layers keep: of none, and of all."""
        again, none = np.array(self.costs.seconds.again_by_layer(rows, adding, site)[0]), frozenset[int]()
        some = [none, self.costs.every_layer - self.costs.once] if self._recompute == "auto" else [none]
        if self._recompute == "full":
            some = [self.costs.recompute_levels(rows, site.form)[-1]]
        found, memory = [], self.costs.memory[site.form]
        for layers in some:
            is_recomputed = np.isin(np.arange(len(again)), list(layers))
            found.append((is_recomputed * again, memory.activations.least_kept(rows, layers)))
        return found

    @memoize
    def seconds(self, rows: float, adding: float, site: Site, halved: bool) -> tuple[Numbers, Numbers]:
        """Return the seconds of every layer's forward and backward, and of a micro-batch's way over it."""
        sums = self.costs.sums
        forward, backward = (np.diff(each) for each in (sums.forward(rows, site), sums.backward(rows, adding, site)))
        if not halved:
            return forward + backward, forward + backward
        inputs, weights = (np.diff(each) for each in sums.halves(rows, adding, site))
        both, trip = forward + np.minimum(backward, inputs + weights), forward + np.minimum(backward, inputs)
        costs = self.costs.layers[site.form]
        if costs.has_launches:
            # A stage's halves are divided by the queue that is longer.
            launched, whole, first = (np.diff(costs.sums(each, rows)) for each in _LAUNCHES)
            if not (launched + whole < both).all():
                trip = np.minimum(trip, launched + first)
        self.least_forward = min(self.least_forward, float((forward / np.maximum(trip, 1e-30)).min()))
        return both, trip


class _LayerTable(NamedTuple):
    """Of a layer; ways by its own part of those in flight."""

    behind: npt.NDArray[np.int64]
    """In which range those of the layer behind are, ``[own part, micro-batches in flight]``."""
    own: npt.NDArray[np.int64]
    """The own parts, in ranges."""
    starts: npt.NDArray[np.int64]
    """The first way of each."""
    work_s: Numbers
    """Device seconds, ``[way, micro-batches in flight]``; infinite where fewer are in flight than the own part."""
    own_idle_s: Numbers
    """By how much less its devices idle than those of stages before which nothing is in flight."""
    held: Numbers
    """Bytes."""


class _Table:
    """The least of time and memory of all layers, for steps of some seconds."""

    def __init__(self, family_ways: _FamilyWays, seconds: float, *, at_once: bool) -> None:
        """Count what is held on average of several stages a rank, or ``at_once``, before its first backward."""
        costs, self._has_chunks, self._at_once = family_ways.costs, family_ways.has_chunks, at_once
        self._width = len(costs.devices) / costs.layer_count / PER_LAYER
        self._in_flight = np.arange(RANGES) * self._width
        self._micro_batches = family_ways.family.micro_batches
        self._ahead, self._least_work_s = family_ways.ahead / self._micro_batches, family_ways.least_work_s
        self._alike, ways = family_ways.by_layer
        self._parts = {at: self._of(way, seconds) for at, way in ways.items()}

    def _of(self, way: _Way, seconds: float) -> _LayerTable:
        every = np.floor(self._micro_batches * way.trip_s / seconds / self._width * (1 - ROUNDING)).astype(np.int64)
        order = np.argsort(every, kind="stable")
        way, (own, starts) = _Way(*(each[order] for each in way)), np.unique(every[order], return_index=True)
        behind = np.arange(len(self._in_flight)) - own[:, None]
        at_work = 0.0 if self._has_chunks else way.at_work * way.work_s / seconds
        held = (way.state + at_work)[:, None] + way.kept[:, None] * self._flights(way, every[order])
        work_s = np.where(np.arange(len(self._in_flight)) >= every[order][:, None], way.work_s[:, None], np.inf)
        own_idle_s = way.work_s[:, None] * self._ahead * (self._in_flight + way.turns[:, None])
        last = len(self._in_flight) - 1
        return _LayerTable(np.maximum(behind, 0), np.minimum(own, last), starts, work_s, own_idle_s, held)

    def _flights(self, way: _Way, own: npt.NDArray[np.int64]) -> Numbers:
        """Return how many micro-batches are kept, ``[way, micro-batches in flight]``; ``own`` are layers' own parts."""
        if self._at_once:
            return np.ones((len(own), 1))
        if self._has_chunks:
            return np.maximum(0.0, self._in_flight - own[:, None] * self._width)
        most = max(1, self._micro_batches - 1)
        return np.asarray(np.minimum(most, np.maximum(way.least[:, None], self._in_flight)))

    def least(self, multipliers: Multipliers) -> float:
        """Return the least device seconds, and bytes at their price, of all layers together."""
        sums = {
            at: np.minimum.reduceat(
                each.work_s - multipliers.idle * each.own_idle_s + multipliers.byte_s * each.held, each.starts
            )
            for at, each in self._parts.items()
        }
        least = np.full(len(self._in_flight), np.inf)
        least[0] = 0.0
        for at in reversed(self._alike):
            part, each = self._parts[at], sums[at]
            found = (least[part.behind] + each).min(axis=0)
            # The last range is that of so many, or more.
            tail = np.minimum.accumulate(least[::-1])[part.own]
            found[-1] = (tail + each[:, -1]).min()
            least = found
        return float((least + multipliers.idle * self._ahead * self._least_work_s * self._in_flight).min())


def _widths(most: int, rows: int) -> list[int]:
    """Return numbers of replicas, up to the most: of those of one largest share, the two fewest and the most.

    All but the fewest have a smaller share, too.

    >>> _widths(12, 12), _widths(4, 12)
    ([1, 2, 3, 4, 5, 6, 7, 11, 12], [1, 2, 3, 4])
    """
    by_share: dict[int, list[int]] = {}
    for width in range(1, most + 1):
        by_share.setdefault(-(-rows // width), []).append(width)
    return sorted({end for same in by_share.values() for end in (*same[:2], same[-1])})


def _doubling(most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of the numbers from 2 to the most, each of twice as many as the one before.

    >>> list(_doubling(9))
    [(2, 3), (4, 7), (8, 9)]
    """
    low = 2
    while low <= most:
        yield low, min(most, 2 * low - 1)
        low *= 2


def _rounded_down(ways: Numbers) -> Numbers:
    """Return ``[way, number, layer]`` rounded down to numbers that are few; turns, which count against, are not."""
    steps = GRID[: ways.shape[1], None]
    with np.errstate(divide="ignore"):
        found = np.exp(np.floor(np.log(ways) / np.log1p(steps)) * np.log1p(steps)) * (1 - ROUNDING)
    found = np.where(ways > 0, found, 0.0)
    exact = [_Way._fields.index(name) for name in ("least", "turns")]
    found[:, exact] = ways[:, exact]
    return np.asarray(found)


def _undominated_ways(ways: Numbers) -> Numbers:
    """Return the ways, ``[way, number]``, none of whose numbers all are at least as large as another's; turns apart."""
    signs = np.where(np.array(_Way._fields) == "turns", -1.0, 1.0)
    ways = ways[np.lexsort((ways * signs).T[::-1])]
    kept = np.empty((0, ways.shape[1]))
    for way in ways:
        if not ((kept * signs <= way * signs).all(axis=1)).any():
            kept = np.vstack((kept, way))
    return kept
