"""Depths: how many micro-batches the stages of a plan keep in flight, and what they recompute for it.

:class:`DepthLimits` says how many fit on all stages of one family, with some layers recomputed. A stage recomputes the
first so many of its layers in their order; what it then keeps of each micro-batch is what it keeps without, less what
these layers free. Devices hold as many as the bytes of each leave room for.

:func:`depth_choices` says which of them are worth trying for the stages of one plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise, takewhile
from math import ceil, log, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.options.plan import PlanOptions
from autopar.ownership import SINGLE, Replicas
from autopar.planner.bounds import link_terms, round_trips
from autopar.planner.candidate import Candidate, CandidateStage, Family, with_depths
from autopar.planner.costs import memoize, memoize_weakly
from autopar.planner.costs.activations import Counts, Numbers, Sharded, rows_bytes, running
from autopar.planner.costs.layers import Levels, Span
from autopar.planner.costs.memory import POSTED_AHEAD, Parts, PeakTerms, lengths_swept, moments_of, peak_of
from autopar.planner.costs.model import UNLIMITED_BYTES, CostModel
from autopar.planner.pool import Pool
from autopar.planner.search.configs import RecomputeRange, StageConfig

MOST_KEPT = 20_000_000
"""Numbers that tell which layers are summed, and are remembered."""


class LayerOrder:
    """Layers of every stage that may be recomputed, in their order, and sums over the first ones.

    >>> ordered = LayerOrder(Levels([2, 0]), 3, np.array([1, 3]))
    >>> ordered.counts.tolist(), ordered.sums(np.array([1.0, 5.0, 2.0]), np.array([[1, 1], [0, 0], [0, 1]])).tolist()
    ([[1, 2], [0, 1], [1, 1]], [[1.0, 2.0], [0.0, 0.0], [0.0, 2.0]])
    """

    def __init__(self, levels: Levels, layers: int, lengths: Counts) -> None:
        """Sort the layers of stages of some ``lengths``, ascending; none goes on behind the last layer."""
        ranks = np.full(layers + 1, layers)
        ranks[list(levels.order)] = np.arange(len(levels.order))
        longest = int(lengths[-1])
        inside = np.arange(longest) < lengths[:, None]
        own = np.minimum(np.arange(layers)[:, None] + np.arange(longest), layers)
        ranked = np.where(inside, ranks[own][:, None, :], layers)
        self._rank = np.argsort(np.argsort(ranked, axis=2, kind="stable"), axis=2)
        """Of every layer among those of a stage, ``[first, length, layer]``."""
        self._layers = own
        self.counts: Counts = (ranked < layers).sum(axis=2)
        """How many may be recomputed, ``[first, length]``."""
        self._masks: dict[bytes, Numbers] = {}

    def sums(self, values: Numbers, counts: Counts) -> Numbers:
        """Return sums of the values of so many layers of every stage, ``[first, length]``."""
        key = counts.tobytes()
        if key not in self._masks:
            if self._rank.size * (1 + len(self._masks)) > MOST_KEPT:
                self._masks.clear()
            self._masks[key] = (self._rank < counts[:, :, None]).astype(np.float64)
        padded = np.append(values, 0.0)
        return np.asarray((self._masks[key] @ padded[self._layers][:, :, None])[:, :, 0])


MANY_LAYERS = 200
LEAD = 3
"""For how many more micro-batches than are in flight a gradient is on its way, where that is not known."""


class DepthLimits:
    """The memory of all stages of some lengths, ``[first, length]``."""

    def __init__(self, costs: CostModel, family: Family, pool: Pool) -> None:
        self.costs, self.family, self.pool = costs, family, pool
        self.layers = costs.layer_count
        self.lengths: Counts = np.arange(1, self.layers + 1)
        """Numbers of layers of the stages that are looked at, ascending; to be set before these are asked for."""
        self._parts: dict[tuple[object, ...], Parts] = {}

    def reach(self, configs: Iterable[StageConfig]) -> int:
        """Return the layers of the longest stage that fits, or a few more."""
        widest: dict[tuple[int, Replicas, bool], int] = {}
        for config in configs:
            # The most that any recomputation frees is that of all layers.
            for kind in config.kinds:
                key = kind, config.replicas._replace(width=0), config.recompute.recomputes
                widest[key] = max(widest.get(key, 0), *config.widths)
        every = [(kind, how._replace(width=width), recomputes) for (kind, how, recomputes), width in widest.items()]
        for longest in lengths_swept(self.layers):
            fits = np.logical_or.reduce([self._fitting(*each, longest) for each in every])
            if not fits[-1]:
                return int(np.flatnonzero(fits).max(initial=0)) + 1
        return self.layers

    def _fitting(self, kind: int, replicas: Replicas, recomputes: bool, longest: int) -> npt.NDArray[np.bool_]:
        """Whether any stage fits, by its number of layers."""
        limit = max(self.costs.limits_bytes[device] for device in self.pool.all_of(kind))
        # Of several kinds, any may have one row.
        terms = self.peak_terms(replicas, 1 if self.costs.mixes else min(self.shares(replicas)))
        terms = terms if self.family.schedule == "gpipe" else terms._replace(warmup=1)
        form = self.costs.form(kind, replicas)
        levels = self.costs.recompute_levels(self.family.micro_batch_size, form)
        every = (levels[level] for level in ((0, -1) if recomputes else (0,)))
        memory = self.costs.memory[form]
        peaks = [peak_of(memory.arrays(terms.rows, level, longest, terms.sharded), terms) for level in every]
        fits = np.minimum.reduce([np.asarray(peak) for peak in peaks]) <= limit
        return np.asarray((fits & self._within_model(longest)).any(axis=0))

    def _within_model(self, longest: int) -> npt.NDArray[np.bool_]:
        """Which stages end with the last layer at the latest, ``[first, length - 1]``."""
        return np.tri(self.layers, longest, dtype=bool)[::-1]

    def binding(self, kind: int, one: Replicas = SINGLE) -> bool:
        """Whether some stage of one replica may not fit with all micro-batches in flight."""
        limit, form = self.costs.limit_bytes(self.pool.all_of(kind)), self.costs.form(kind, one)
        rows, count = self.family.micro_batch_size, self.family.micro_batches
        if self._holds_all(form, rows, count, limit):
            return False
        if self.layers > MANY_LAYERS:
            return True
        parts = self.costs.memory[form].arrays(rows, frozenset(), self.layers)
        short = np.asarray(peak_of(parts, self.peak_terms(one, rows))) > limit
        return bool((short & self._within_model(self.layers)).any())

    def _holds_all(self, form: int, rows: float, count: int, limit: int) -> bool:
        """Whether a limit is above what any stage may hold."""
        return limit >= UNLIMITED_BYTES or self.costs.memory[form].most(rows, count) <= limit

    def depth_of_rows(
        self, form: int, replicas: Replicas, recompute: RecomputeRange, limit: int, rows: float, leading: int
    ) -> Counts:
        """Return :meth:`depth` of a replica of so many rows, layers run again in the order of form ``leading``."""
        count = replicas.most(self.family.micro_batches)
        if self._holds_all(form, rows, count, limit):
            return np.full((self.layers, len(self.lengths)), count)
        terms = self.peak_terms(replicas, rows)
        return self._deepest(self._parts_of(recompute, terms, form, leading=leading), terms, limit)

    def holds(self, form: int, replicas: Replicas, rows: int, limit: int) -> npt.NDArray[np.bool_] | bool:
        """Whether a replica has room for so many rows of one micro-batch, all run again that may be."""
        terms = self.peak_terms(replicas, rows)
        if self._holds_all(form, rows, terms.micro_batches, limit):
            return True
        parts = self._whole_parts(rows, self.costs.recomputes, form, terms.sharded)
        return np.asarray(peak_of(parts, terms._replace(warmup=1)) <= limit)

    @memoize_weakly
    def depth(self, form: int, replicas: Replicas, recompute: RecomputeRange, limit: int) -> Counts:
        """Return the most micro-batches in flight that fit, ``[first, length]``; 0 where none does."""
        shares = self.shares(replicas)
        ends, asked = {max(shares), min(shares)}, (form, replicas, recompute, limit)
        return np.asarray(np.minimum.reduce([self.depth_of_rows(*asked, rows, form) for rows in ends]))

    def sure_depth(self, kind: int, replicas: Replicas, recompute: RecomputeRange) -> tuple[Counts, Numbers]:
        """Return micro-batches in flight that fit on any devices while the fewest layers of a range are recomputed.

        With what a recomputed layer holds while it is at work, and what a stage holds for one that leads it by a few;
        :meth:`depth` takes both to be free. And how many gradients sent back hold as much as one micro-batch in flight.
        """
        rows = max(self.shares(replicas))
        terms = self.peak_terms(replicas, rows)._replace(lead=LEAD)
        parts = self._parts_of(recompute, terms, self.costs.form(kind, replicas), sure=True)
        answered = np.maximum(1.0, np.asarray(rows_bytes(rows, parts.sent_gradients), dtype=np.float64))
        limit = self.costs.limit_bytes(self.pool.all_of(kind))
        return self._deepest(parts, terms, limit), np.asarray(parts.activations) / answered

    def shares(self, replicas: Replicas) -> tuple[float, ...]:
        """Return the rows that each replica takes."""
        return self.costs.shares(self.family.micro_batch_size, replicas)

    def peak_terms(self, replicas: Replicas, rows: float) -> PeakTerms:
        """Return what the memory of a replica depends on, with all micro-batches in flight."""
        count = replicas.most(self.family.micro_batches)
        return PeakTerms(rows, count, count, replicas.width, shard=replicas.shard, lanes=replicas.lanes)

    @memoize_weakly
    def layer_order(self, form: int) -> LayerOrder:
        """Return the layers of all stages in the order in which they are recomputed."""
        return LayerOrder(self.costs.recompute_levels(self.family.micro_batch_size, form), self.layers, self.lengths)

    def _parts_of(
        self, recompute: RecomputeRange, terms: PeakTerms, form: int, *, sure: bool = False, leading: int | None = None
    ) -> Parts:
        """What stages' peaks are made of, with as many layers recomputed as the range allows.

        Where these are some of a stage's layers, all that each of them saves by itself is taken to be free; with
        ``sure``, as few are recomputed as the range allows, and what the largest frees is held while it is at work.
        """
        rows, sharded = terms.rows, terms.sharded
        none = self._whole_parts(rows, False, form, sharded)
        if not recompute.recomputes:
            return none
        leading = form if leading is None else leading
        key = (sure, rows, recompute, form, sharded, leading)
        if key not in self._parts:
            order, every = self.layer_order(leading), self._whole_parts(rows, True, form, sharded)
            low, high = recompute.of(order.counts)
            freed = np.array([self.costs.memory[form].freed_bytes(layer, rows) for layer in range(self.layers)])
            # Sums of bytes are whole numbers that floats hold exactly.
            saved = np.rint(order.sums(freed.astype(np.float64), low if sure else high)).astype(np.int64)
            largest = running(freed, int(self.lengths[-1]), np.maximum)[:, self.lengths - 1]
            passing, whole = saved - largest if sure else saved, low == order.counts
            self._parts[key] = none._replace(
                activations=np.where(whole, every.activations, none.activations - saved),
                peak=np.where(whole, every.peak, none.peak - passing),
                first_peak=np.where(whole, every.first_peak, none.first_peak - passing),
            )
        return self._parts[key]

    @memoize_weakly
    def _whole_parts(self, rows: float, every: bool, form: int, sharded: Sharded) -> Parts:
        levels = self.costs.recompute_levels(self.family.micro_batch_size, form)
        parts = self.costs.memory[form].arrays(rows, levels[-1 if every else 0], int(self.lengths[-1]), sharded)
        return Parts(*(np.asarray(each)[:, self.lengths - 1] for each in parts))

    def _deepest(self, parts: Parts, terms: PeakTerms, limit: int) -> Counts:
        """Most in flight that fit: all, or as many as the bytes that each takes leave room for."""
        count = terms.micro_batches
        deepest = np.where(peak_of(parts, terms) <= limit, count, 0)
        if self.family.schedule == "gpipe" or count == 1:
            return deepest
        # With few in flight, fewer receives are posted.
        for first, last in ((1, POSTED_AHEAD), (POSTED_AHEAD + 1, count)):
            begin, stop = min(first, count - 1), min(last, count - 1)
            computing, updating = moments_of(parts, terms._replace(warmup=begin))
            more = np.maximum(0, limit - computing) // np.maximum(1, parts.activations)
            some = np.where(np.maximum(computing, updating) <= limit, np.minimum(stop, begin + more), 0)
            deepest = np.maximum(deepest, some)
        return deepest


MANY_SETS = 32
MANY_STAGES = 32
AHEAD = (1.0, 1.5, 2.0, 3.0)
FINER = 1.02
ROUNDS = 3
ROUNDING = 1e-9
MOST_VECTORS = 20_000
SLOPES = (2.0, 3.0, 1.5, 4.0, 1.0)
"""How many more than the stage behind a stage keeps in flight; 1 and 2 are DAPPLE's PA and PB."""


class DepthChoices(NamedTuple):
    """Candidates that differ in depths."""

    candidates: list[Candidate]
    complete: bool
    """Whether no other depths are possible."""
    closest: tuple[int, Candidate] | None
    """Of the candidates that do not fit, the one that lacks least, and how many bytes."""


def depth_choices(
    costs: CostModel,
    family: Family,
    stages: Sequence[CandidateStage],
    spans: Sequence[Span],
    *,
    exact: bool,
    few: bool = False,
) -> DepthChoices:
    """Return the candidates whose stages keep at most their ``warmup`` in flight, and fit; all, if ``exact``, of few.

    ``spans`` are, by stage, the levels of recomputation of which the least that fits is taken.
    """
    vectors, complete = _vectors(costs, family, stages, spans, exact=exact, few=few)
    found: list[Candidate] = []
    closest: tuple[int, Candidate] | None = None
    least = _least(stages, family.micro_batches)
    spare = [] if family.schedule == "gpipe" or least in vectors else [least]
    for vector in (*vectors, *spare):
        if found and vector in spare:
            # What holds least is for plans that fit no other way: a stage that leads another holds more messages.
            continue
        candidate, short = least_recomputed(costs, family, with_depths(family, stages, vector).stages, spans)
        if short <= 0:
            found.append(candidate)
        elif closest is None or short < closest[0]:
            closest = (short, candidate)
    return DepthChoices(found, complete, closest)


def _vectors(
    costs: CostModel,
    family: Family,
    stages: Sequence[CandidateStage],
    spans: Sequence[Span],
    *,
    exact: bool,
    few: bool,
) -> tuple[list[tuple[int, ...]], bool]:
    """Return the depths to try, and whether no others are possible."""
    possible = prod(stage.warmup for stage in stages)
    if family.schedule == "gpipe":
        return [tuple(stage.replicas.most(family.micro_batches) for stage in stages)], True
    if exact and possible <= MOST_VECTORS:
        return _all(stages, family.micro_batches), True
    pacing = _Pacing(costs, family, stages, spans)
    timed = pacing.vectors()
    if not few or not timed:
        timed = [*pacing.round_trip_vectors(), *timed]
    steady = not timed or (len(stages) <= MANY_STAGES and not few)
    usual = _steady_depths(stages, family.micro_batches) if steady else ()
    return list(dict.fromkeys((*usual, *timed))), possible <= 1


def span_of(costs: CostModel, family: Family, options: PlanOptions, stage: CandidateStage) -> Span:
    """Return how many layers of a stage the options let be recomputed."""
    levels = costs.recompute_levels(family.micro_batch_size, costs.leading_form(stage))
    whole = stage.stop - stage.first
    return Span(levels, whole if options.recompute == "full" else 0, 0 if options.recompute == "none" else whole)


def _all(stages: Sequence[CandidateStage], micro_batches: int) -> list[tuple[int, ...]]:
    """Every choice of depths; no stage has more in flight than the stage before, which would deadlock."""
    found: list[tuple[tuple[int, ...], int]] = [((), 0)]
    for stage in reversed(stages):
        own = [(depth, min(micro_batches, depth * stage.period)) for depth in range(1, stage.warmup + 1)]
        found = [((depth, *others), flying) for others, behind in found for depth, flying in own if flying >= behind]
    return [vector for vector, _ in found]


def _steady_depths(stages: Sequence[CandidateStage], micro_batches: int) -> Iterator[tuple[int, ...]]:
    """Depths that grow steadily from the last stage to the first, as far as they fit; and as deep as fits."""
    for slope in (*SLOPES, float(micro_batches)):
        vector: list[int] = []
        allowed = micro_batches
        for behind, stage in zip(reversed(range(len(stages))), stages, strict=True):
            wanted = allowed if slope == micro_batches else min(allowed, 1 + int(slope * behind))
            # Replicas that take turns keep as many between them as one that does not.
            depth = min(stage.warmup, -(-wanted // stage.period))
            if min(micro_batches, depth * stage.period) > allowed:
                depth = allowed // stage.period
            if depth == 0:
                # Replicas that take turns have one each in flight at least: more than the stage before has.
                break
            vector.append(depth)
            allowed = min(allowed, depth * stage.period)
        else:
            yield tuple(vector)


def _quickest(pace_s: float, slowdown: float, keeping: Callable[[float], tuple[int, ...]]) -> float | None:
    """Return the quickest pace that is kept, from one to another so many times as slow; None where none is."""
    paces = [pace_s * FINER**power for power in range(2 + int(log(slowdown, FINER)))]
    at = bisect_left(paces, True, key=lambda each: bool(keeping(each)))
    return None if at == len(paces) else paces[at]


class _Behind(NamedTuple):
    """What the stages behind ask of the depth of the next one before them.

    From stage a, of k in flight, to stage b, of l: b begins the backward of a micro-batch behind the forward of the one
    that is l - 1 later, which a has sent behind the backward of the one that is k earlier. A micro-batch's way from a
    to b and back hence takes no more than k - l + 1 micro-batches' time.
    """

    in_flight: int = 1
    ahead: float = 0.0

    def depth(self, family: Family, stage: CandidateStage, trips: float) -> int:
        """Return with how many in flight a stage keeps the pace, of which its round trip takes so many times."""
        wanted = max(self.in_flight, min(family.micro_batches, ceil((trips + self.ahead) * (1 - ROUNDING))))
        return min(-(-wanted // stage.period), stage.replicas.most(family.micro_batches))

    def before(self, family: Family, stage: CandidateStage, depth: int, waiting: float) -> _Behind:
        """Return what a stage asks, too, which waits for those behind as many paces as ``waiting`` is below 0."""
        in_flight = min(family.micro_batches, depth * stage.period)
        return _Behind(in_flight, max(self.ahead, in_flight - 1 + waiting))


class _Pacing:
    """Depths with which stages keep a pace; none, (), where they cannot."""

    def __init__(
        self, costs: CostModel, family: Family, stages: Sequence[CandidateStage], spans: Sequence[Span]
    ) -> None:
        self.costs, self.family, self.stages, self.spans = costs, family, stages, spans
        self.frame = Candidate(*family, tuple(stages))
        self.turns = [stage.replicas.most(family.micro_batches) for stage in stages]
        self.free_s = [self._own_s(index, stage) for index, stage in enumerate(stages)]
        """What each stage computes of a micro-batch with nothing recomputed."""
        self.pace_s = max(self._paced_s(index, own_s) for index, own_s in enumerate(self.free_s))
        """The busiest stage's."""

    def round_trip_vectors(self) -> list[tuple[int, ...]]:
        """Depths for which stages do not wait: as many in flight as the busiest one runs in a micro-batch's round trip.

        More are in flight where that helps against uneven stages. Where they do not fit, the stages' pace is taken as
        much slower as it must be: with so many in flight they cannot keep the quicker one anyway.
        """
        if self.pace_s <= 0:
            return []
        trips = round_trips(self.costs, self.frame)
        most = [span.within(each.first, each.stop)[-1] for each, span in zip(self.stages, self.spans, strict=True)]
        least = [stage._replace(recompute=each) for stage, each in zip(self.stages, most, strict=True)]
        keeping = partial(self._trip_depths, trips, least)
        paces = [self.pace_s / more for more in AHEAD]
        found = [*takewhile(bool, map(keeping, paces))]
        if len(found) < len(paces):
            slower_s = _quickest(paces[len(found)], trips[0] / paces[len(found)], keeping)
            found += [] if slower_s is None else [keeping(slower_s)]
        return found

    def _trip_depths(self, trips: Sequence[float], least: Sequence[CandidateStage], pace_s: float) -> tuple[int, ...]:
        """Return depths for round trips, with which the stages fit that hold ``least``."""
        vector: list[int] = []
        behind = _Behind()
        for stage, trip_s, own_s in zip(reversed(self.stages), reversed(trips), reversed(self.free_s), strict=True):
            depth = behind.depth(self.family, stage, trip_s / pace_s)
            if depth > stage.warmup:
                return ()
            vector.insert(0, depth)
            behind = behind.before(self.family, stage, depth, (own_s - trip_s) / pace_s)
        candidate = with_depths(self.family, least, vector)
        fits = all(self.costs.shortfall(candidate, index) <= 0 for index in range(len(least)))
        return tuple(vector) if fits else ()

    def vectors(self) -> list[tuple[int, ...]]:
        """Return the depths of the quickest pace that can be kept, then deeper ones that still keep it.

        Each stage has as many in flight as the pace needs, and recomputes as little as fits that.
        """
        if self.pace_s <= 0:
            return []
        links = [link_terms(self.costs, *pair, self.frame) for pair in pairwise(self.stages)]
        links_s = [*(float(each.forth_s + each.back_s) if each.back else None for each in links), None]
        # Slower than one micro-batch after the other, with everything recomputed, is no pace.
        slowest_s = sum(self.free_s) + sum(link_s or 0.0 for link_s in links_s)
        keeping = partial(self._keeping, links_s)
        pace_s = _quickest(self.pace_s, max(1.0, 4 * slowest_s / self.pace_s), lambda each: keeping(each, each))
        if pace_s is None:
            return []
        return [*takewhile(bool, (keeping(pace_s / more, pace_s) for more in AHEAD))]

    def _keeping(self, links_s: Sequence[float | None], pace_s: float, most_s: float) -> tuple[int, ...]:
        """Return depths with which stages keep a pace, each computing no longer than ``most_s``.

        ``links_s`` are over the boundary behind each, forth and back; None where no gradient returns.
        """
        vector: list[int] = []
        behind, trip_s = _Behind(), 0.0
        for index in reversed(range(len(self.stages))):
            stage, link_s = self.stages[index], links_s[index]
            around_s = 0.0 if link_s is None else link_s + trip_s
            # How long the stage takes depends on what it recomputes, and that on its depth: a few rounds settle it.
            own_s = self.free_s[index]
            for _ in range(ROUNDS):
                depth = behind.depth(self.family, stage, (own_s + around_s) / pace_s)
                fitted_s = self._fitted_s(index, depth)
                if fitted_s is None or self._paced_s(index, fitted_s) > most_s * (1 + ROUNDING):
                    return ()
                if fitted_s <= own_s:
                    break
                own_s = fitted_s
            vector.insert(0, depth)
            trip_s = own_s + around_s
            behind = behind.before(self.family, stage, depth, (own_s - trip_s) / pace_s)
        return tuple(vector)

    @memoize
    def _fitted_s(self, index: int, depth: int) -> float | None:
        """Return a stage's seconds with so many in flight, recomputing as little as fits; None where nothing fits."""
        near = list(self.stages)
        if depth > near[index].warmup:
            return None
        near[index] = near[index]._replace(warmup=depth)
        if index:
            # How much the stage before leads is not known yet.
            most = -(-(near[index].in_flight + LEAD) // near[index - 1].period)
            near[index - 1] = near[index - 1]._replace(warmup=min(self.turns[index - 1], most))
        short = recompute_least(self.costs, self.family, near, index, self.spans[index])
        return self._own_s(index, near[index]) if short <= 0 else None

    def _own_s(self, index: int, stage: CandidateStage) -> float:
        at = self.costs.slowest(stage)
        return self.costs.forward_s(stage, at) + self.costs.backward_s(stage, at, self.turns[index])

    def _paced_s(self, index: int, own_s: float) -> float:
        return own_s * self.turns[index] / self.family.micro_batches


def _least(stages: Sequence[CandidateStage], micro_batches: int) -> tuple[int, ...]:
    """Return the least depths that do not deadlock."""
    vector: list[int] = []
    behind = 1
    for stage in reversed(stages):
        vector.insert(0, -(-behind // stage.period))
        behind = min(micro_batches, vector[0] * stage.period)
    return tuple(vector)


def least_recomputed(
    costs: CostModel, family: Family, stages: Sequence[CandidateStage], spans: Sequence[Span]
) -> tuple[Candidate, int]:
    """Return the candidate that recomputes least, and by how many bytes it does not fit."""
    chosen = list(stages)
    short = [recompute_least(costs, family, chosen, index, span) for index, span in enumerate(spans)]
    return Candidate(*family, tuple(chosen)), max(short)


def recompute_least(costs: CostModel, family: Family, stages: list[CandidateStage], index: int, span: Span) -> int:
    """Have a stage recompute the least that fits, or else the most; return by how many bytes it does not fit."""
    stage = stages[index]
    sets = span.within(stage.first, stage.stop)

    def short(at: int) -> int:
        stages[index] = stage._replace(recompute=sets[at])
        return costs.shortfall(Candidate(*family, tuple(stages)), index)

    if len(sets) > MANY_SETS:
        # Larger sets hold less, or next to nothing more.
        return short(bisect_left(range(len(sets) - 1), True, key=lambda at: short(at) <= 0))
    for at in range(len(sets)):
        if (found := short(at)) <= 0:
            break
    return found
