"""Closest: the plan whose worst stage exceeds its memory least, by dynamic programming over stages from the last on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.formats.plan import Division, Shard, shards_of, turns
from autopar.planner.candidate import Candidate, CandidateStage, Family, divisions_of, within
from autopar.planner.constraints import Constraints, limits_met
from autopar.planner.costs import memoize
from autopar.planner.costs.activations import Numbers
from autopar.planner.costs.memory import Parts, PeakTerms, peak_of
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions
from autopar.planner.placement import in_order

MOST_EDGES = 64
FEW_EDGES = 24
"""Up to so many layers all families and more levels of recomputation are looked at."""
MOST_WIDTHS = 32
MOST_LEVELS = 4
"""Of recomputation, besides none: what one micro-batch holds may be least between none and all."""

Known = dict[tuple[tuple[int, ...], int, float, frozenset[int]], Parts]
"""What stages hold, by edges, kind of device, rows and the layers that are recomputed: the same for all options."""


class _StageWay(NamedTuple):
    """How a stage's replicas divide its work and its state, and which layers they recompute."""

    division: Division
    shard: Shard
    recompute: frozenset[int]


class _ClosestStage(NamedTuple):
    """A stage of the plan sought, by positions among the edges."""

    kind: int
    width: int
    stop: int
    after: int
    lead: int
    """How many more micro-batches it has in flight than the stage behind it."""


class ShortfallTables:
    """The least shortfalls of one family's plans, with least in flight.

    Exact up to 24 layers, widths of 32 and 4 layers that are recomputed. Of more, recomputation is none or all, widths
    double, and of more than 64 layers these are taken in groups. Replicas take turns in the first stage only: behind
    it, all stages before would need as much in flight, which takes more, except where those in turns divide much state.
    The stage behind such a first one has gradients on their way to all of its replicas. What a stage sends to several
    later stages is counted once, so that a plan may lack more than the tables say: :func:`closest` asks the cost model.
    """

    def __init__(
        self, costs: CostModel, family: Family, options: PlanOptions, parts_cache: Known | None = None
    ) -> None:
        """``parts_cache`` is filled, and spares the next family what it holds."""
        self.costs, self.family, self.options = costs, family, options
        self._parts: Known = {} if parts_cache is None else parts_cache
        self.pool = in_order(costs.kind_of)
        self.constraints = Constraints.of(costs, options)
        self.edges = self.constraints.edges(MOST_EDGES)
        self._masks: dict[tuple[object, ...], npt.NDArray[np.bool_]] = {}
        self.exact = self.constraints.most_stages < min(costs.layer_count, len(costs.devices))
        """Whether stages are limited in number: then suffixes have exactly so many, else at least."""

    def candidate(self) -> Candidate | None:
        """Return the candidate that lacks least; none where there is none."""
        fewest = self.constraints.least_stages
        counts = self.constraints.most_stages if self.exact else fewest
        least = np.full((counts, self.pool.states, len(self.edges)), np.inf)
        for state in reversed(range(self.pool.empty)):
            for kind, width, lead in self._widths(state):
                short = self._short(state, kind, width, turning=lead > 0)
                after = self.pool.take(state, kind, width)
                for count in range(counts):
                    worst = np.maximum(short, self._ends(least, count, after, lead)).min(axis=1)
                    np.minimum(least[count, state, :-1], worst, out=least[count, state, :-1])
        if counts < fewest or not least[fewest - 1 :, 0, 0].min() < np.inf:
            return None
        placed = []
        state = first = lead = 0
        count = fewest - 1 + int(least[fewest - 1 :, 0, 0].argmin())
        while first < len(self.edges) - 1:
            stage = self._best(least, count, state, first, lead)
            placed.append(self._candidate_stage(state, first, stage, lead))
            state, first, count, lead = stage.after, stage.stop, max(0, count - 1), stage.lead
        return Candidate(*self.family, tuple(placed))

    def alone(self) -> Numbers:
        """Return by how much every layer exceeds the device that suits it best, as a stage of its own."""
        widths = self._widths(0)
        found = [self._short(0, kind, width, turning=lead > 0).diagonal(1) for kind, width, lead in widths]
        return np.asarray(np.minimum.reduce(found))

    def _widths(self, state: int) -> Iterator[tuple[int, int, int]]:
        """Yield the kinds and widths that a stage may have in a state, and its lead: none, or of replicas in turn."""
        for kind in self.pool.kinds:
            left, width = self.pool.kind_devices_left(state, kind), 1
            while width <= left:
                for division in divisions_of(self.family, width, divisible=self.costs.divisible):
                    if division == "split" or not state:
                        yield kind, width, 0 if division == "split" else width - 1
                width += 1 if width < MOST_WIDTHS else width

    def _ends(self, least: Numbers, count: int, after: int, lead: int) -> Numbers:
        """Return what the stages behind lack, by where they begin, if ``count`` follow; minus infinity for none."""
        if self.exact and count == 0:
            ends = np.full(len(self.edges), np.inf)
        elif lead and self.family.schedule != "gpipe":
            ends = self._ends_with_lead(least, max(0, count - 1), after, lead)
        else:
            ends = least[max(0, count - 1), after].copy()
        done = count == 0 and (not self.options.use_all or after == self.pool.empty)
        ends[-1] = -np.inf if done else np.inf
        return ends

    def _ends_with_lead(self, least: Numbers, count: int, state: int, lead: int) -> Numbers:
        """Return what stages lack, by where they begin, of which the first has so many gradients more on their way."""
        found = np.full(len(self.edges), np.inf)
        for kind, width, _ in self._widths(state):
            ends = self._ends(least, count, self.pool.take(state, kind, width), 0)
            worst = np.maximum(self._short(state, kind, width, lead), ends).min(axis=1)
            np.minimum(found[:-1], worst, out=found[:-1])
        return found

    def _best(self, least: Numbers, count: int, state: int, first: int, lead: int) -> _ClosestStage:
        """Return the first stage of the best suffix; the narrowest and shortest of equals."""
        sought = (self._ends_with_lead(least, count, state, lead) if lead else least[count, state])[first]
        for kind, width, own in self._widths(state):
            after = self.pool.take(state, kind, width)
            ends = self._ends(least, count, after, own)
            worst = np.maximum(self._short(state, kind, width, lead, turning=own > 0)[first], ends)
            if worst.min() <= sought:
                return _ClosestStage(kind, width, int(worst.argmin()), after, own)
        raise AssertionError("a suffix without a first stage")

    def _short(self, state: int, kind: int, width: int, lead: int = 0, *, turning: bool = False) -> Numbers:
        limit = self.costs.limit_bytes(self.pool.devices(state, kind, width))
        return self._least_peaks(kind, width, lead, turning=turning)[0] - limit

    @memoize
    def _least_peaks(self, kind: int, width: int, lead: int, *, turning: bool) -> tuple[Numbers, list[_StageWay]]:
        """Return the least peaks of all stages over all ways to run them, ``[first, stop]``, and these ways."""
        ways = list(self._ways(kind, width, turning=turning))
        allowed = self._mask(kind, width, turning=turning)
        peaks = [self._peak(kind, width, way, lead) for way in ways]
        return np.where(allowed, np.minimum.reduce([np.full(allowed.shape, np.inf), *peaks]), np.inf), ways

    def _mask(self, kind: int, width: int, *, turning: bool) -> npt.NDArray[np.bool_]:
        """Return which stages between edges the constraints allow, ``[first, stop]``."""
        shares = self.costs.shares(self.family.micro_batch_size, width, "round-robin" if turning else "split")
        key = kind, width > 1, limits_met(self.costs, shares)
        if key not in self._masks:
            self._masks[key] = self.constraints.mask(kind, shares)[np.ix_(self.edges[:-1], self.edges)]
        return self._masks[key]

    def _peak(self, kind: int, width: int, way: _StageWay, lead: int) -> Numbers:
        count = len(turns(way.division, width, 0, self.family.micro_batches))
        rows = max(self.costs.shares(self.family.micro_batch_size, width, way.division))
        held = PeakTerms(rows, self._depth(count), count, width, lead, frozenset(), way.shard)
        return np.asarray(peak_of(self._parts_of(kind, rows, way.recompute), held), dtype=np.float64)

    def _depth(self, turns: int) -> int:
        return turns if self.family.schedule == "gpipe" else 1

    def _ways(self, kind: int, width: int, *, turning: bool) -> Iterator[_StageWay]:
        levels = self.costs.recompute_levels(self.family.micro_batch_size, kind)
        last = len(levels) - 1
        steps = min(last, MOST_LEVELS if self.costs.layer_count <= FEW_EDGES else 1)
        some = [round(index * last / steps) for index in range(steps + 1)] if last else [0]
        asked = {"auto": some, "none": [0], "full": [last]}[self.options.recompute]
        division: Division = "round-robin" if turning else "split"
        for shard in shards_of(division, self.options.shards) if width > 1 else ("none",):
            for level in asked:
                yield _StageWay(division, shard, levels[level])

    def _parts_of(self, kind: int, rows: float, recompute: frozenset[int]) -> Parts:
        key = (tuple(self.edges), kind, rows, recompute)
        if key not in self._parts:
            memory, last = self.costs.memory[kind], len(self.edges) - 1
            found = np.zeros((len(Parts._fields), last, last + 1), dtype=np.int64)
            for at, first in enumerate(self.edges[:-1]):
                for stop in range(at + 1, last + 1):
                    found[:, at, stop] = memory.parts(first, self.edges[stop], rows, recompute)
            self._parts[key] = Parts(*found)
        return self._parts[key]

    def _candidate_stage(self, state: int, first: int, stage: _ClosestStage, lead: int) -> CandidateStage:
        ways = self._least_peaks(stage.kind, stage.width, lead, turning=stage.lead > 0)[1]
        way = min(ways, key=lambda each: self._peak(stage.kind, stage.width, each, lead)[first, stage.stop])
        begin, end = self.edges[first], self.edges[stage.stop]
        devices = self.pool.devices(state, stage.kind, stage.width)
        shares = self.costs.shares(self.family.micro_batch_size, stage.width, way.division)
        placed = CandidateStage(
            begin, end, devices, shares, 1, within(way.recompute, begin, end), way.shard, way.division
        )
        return placed._replace(warmup=self._depth(placed.turns(0, self.family.micro_batches)))


def closest(
    costs: CostModel,
    families: Sequence[Family],
    options: PlanOptions,
    *,
    any_fits: bool = False,
) -> tuple[int, Candidate] | None:
    """Return the least shortfall of all plans of some families, and a plan that lacks it; none if there is no plan.

    With ``any_fits``, the first plan that fits will do; small micro-batches, which hold least, are tried first.
    """
    found: tuple[int, Candidate] | None = None
    parts_cache: Known = {}
    for family in _few(costs, families):
        candidate = ShortfallTables(costs, family, options, parts_cache).candidate()
        if candidate is not None:
            short = max(costs.shortfalls(candidate))
            if found is None or short < found[0]:
                found = (short, candidate)
            if any_fits and short <= 0:
                break
    return found


def _few(costs: CostModel, families: Sequence[Family]) -> list[Family]:
    """Return families by falling micro-batch count; of many layers, the two that hold least, and a single one's."""
    ordered = sorted(families, key=lambda each: -each.micro_batches)
    return ordered if costs.layer_count <= FEW_EDGES or len(ordered) <= 3 else [*ordered[:2], ordered[-1]]


def oversized_layer(costs: CostModel, families: Sequence[Family], options: PlanOptions) -> int | None:
    """Return the first layer that fits no device even as a stage of its own; none where there is none, or too many."""
    options = replace(options, min_stages=1, max_stages=None, forbid_cut=(), pin=())
    if costs.layer_count > MOST_EDGES or not families:
        return None
    least = np.min([ShortfallTables(costs, family, options).alone() for family in _few(costs, families)], axis=0)
    return int(least.argmax()) if least.max() > 0 else None
