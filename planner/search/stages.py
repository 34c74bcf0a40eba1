"""StageTables: the terms of all stages, and of the boundaries behind them, for one family.

In flight is as much as fits; recomputation, reductions and transfers are priced from below, and exactly once a plan is
whole. Where stages of similar length or width are taken together, every term is the least of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.errors import UsageError
from autopar.formats.cluster import Level
from autopar.formats.plan import SCATTERING, Division
from autopar.planner.bounds.chain import LinkTerms, StageTerms, beside_s, last
from autopar.planner.candidate import Family, splits_backward
from autopar.planner.constraints import Constraints, limits_met
from autopar.planner.costs.activations import Area, Areas, Counts
from autopar.planner.costs.links import Collective
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions
from autopar.planner.placement.places import Places, StateMove
from autopar.planner.placement.pool import Pool
from autopar.planner.search.depth_limits import DepthLimits
from autopar.planner.search.variants import Choice, Fineness, Queues, Variant, choices, lengths_of, queues, ways_of

MOST_BYTES = 8 * 2**30

Numbers = npt.NDArray[np.float64]


class NextStages(NamedTuple):
    """Every stage that may begin with a layer; arrays over them."""

    way: Counts
    length: Counts
    """Layers, at least."""
    longest: Counts
    """Layers, at most: those of all lengths between are taken together."""
    stages: Numbers
    """``[term, place, stage]``; the work of one that does not fit is infinite."""
    links: Numbers
    """``[term, levels, stage]``, of the boundary behind."""

    def some(self, indices: Counts) -> NextStages:
        """Return some of the stages."""
        own = self.way[indices], self.length[indices], self.longest[indices]
        return NextStages(*own, np.take(self.stages, indices, axis=2), np.take(self.links, indices, axis=2))

    def stage_at(self, place: Counts) -> StageTerms:
        """Return the terms of the stages where they stand; ``place`` by way."""
        return StageTerms(*self.stages[:, place[self.way], np.arange(len(self.way))])

    def link_at(self, near: Counts) -> LinkTerms:
        """Return those of the boundaries behind them; ``near`` by way."""
        forth, back, *seconds = self.links[:, near[self.way], np.arange(len(self.way))]
        return LinkTerms(forth > 0, back > 0, *seconds)


class Spans(NamedTuple):
    """Stages by what they take up; arrays over them."""

    first: Counts
    column: Counts
    """Into the numbers of layers."""
    width: Counts
    alone_s: Numbers
    """The seconds of a step of nothing else, where that is quickest."""


class StageTables:
    """Prices all stages, as closely told apart as is asked for.

    Of backwards in halves there are two views, and each bounds the step. Either all of a stage's work counts, and
    nobody waits for it; or, with ``late``, what others wait for counts, and behind the last of that one weight half.
    The first stage's may be whole.
    """

    def __init__(
        self,
        costs: CostModel,
        pool: Pool,
        family: Family,
        options: PlanOptions,
        *,
        fineness: Fineness | None = None,
        late: bool = False,
        places: Places | None = None,
    ) -> None:
        """Price all stages.

        ``fineness`` says how many are told apart (none: those of every width and length); ``places`` are those of the
        pool, which other families may have looked up before.
        """
        self.costs, self.pool, self.family, self.layers = costs, pool, family, costs.layer_count
        self.apart, self._has_halves, self._late = fineness is None, splits_backward(family.schedule), late
        self._next: dict[int, NextStages] = {}
        self._alone_s: dict[int, Numbers] = {}
        self.depth_limits = DepthLimits(costs, family, pool)
        self.choices = {kind: choices(costs, options, self.depth_limits.binding(kind), fineness) for kind in pool.kinds}
        self.longest = self.layers if self.apart else self.depth_limits.reach(self.choices)
        places = places or Places(costs, pool)
        every = list(self._ways_and_moves(places, None if fineness is None else fineness.classes))
        self.ways, self.moves = [way for way, _ in every], [move for _, move in every]
        self.places, self.nears = tuple(places.stage_places), tuple(places.nears)
        self.lengths = np.array(lengths_of(self.longest, fineness))
        self.constraints = Constraints.of(costs, options)
        self.depth_limits.look_at(self.lengths)
        self._firsts = np.arange(self.layers)[:, None]
        self._ends = np.append(self.lengths[1:] - 1, self.longest)
        self._check_size()
        self._stages = self._stacked_stages()
        self._links, self._key_of = self._stacked_links()

    def _ways_and_moves(self, places: Places, most: int | None) -> Iterator[tuple[Variant, StateMove]]:
        """Yield the ways to run a stage, each wherever it stands; of at most so many widths, where not all."""
        for kind in self.pool.kinds:
            for way in ways_of(self.costs, self.family, kind, self.choices[kind], most):
                for variant, move in enumerate(places.moves(way.kind, way.width)):
                    yield way._replace(variant=variant), move

    def _check_size(self) -> None:
        """Refuse tables that no ordinary machine holds, instead of dying of them."""
        numbers = len(StageTerms._fields) * len(self.places) + len(LinkTerms._fields) * len(self.nears)
        size = 8 * numbers * len(self.ways) * self.layers * len(self.lengths)
        if size > MOST_BYTES:
            raise UsageError(
                f"searching plans of {self.layers} layers on {len(self.costs.devices)} devices takes about "
                f"{size / 2**30:.0f} GiB of tables; narrow it with fewer `gpus`, one `schedule` or one `micro_batches`"
            )

    @property
    def chain(self) -> bool:
        """Whether activations and gradients cross every boundary."""
        between = self._firsts + self.lengths < self.layers
        return all(bool((np.asarray(each)[:, :, between]).all()) for each in (self._links.forth, self._links.back))

    @property
    def size(self) -> int:
        """How many stages there are in all states of the pool, of those that are told apart."""
        return self.pool.states * len(self.ways) * self.layers * len(self.lengths)

    def next(self, first: int) -> NextStages:
        """Return every stage that may begin with a layer, of those that fit somewhere."""
        if first not in self._next:
            self._next[first] = self._from(first)
        return self._next[first]

    def alone_s(self, first: int) -> Numbers:
        """Return the seconds of a step of nothing else than a stage that may begin with a layer, ``[place, stage]``."""
        if first not in self._alone_s:
            self._alone_s[first] = np.asarray(last(StageTerms(*self.next(first).stages)).step_s)
        return self._alone_s[first]

    @cached_property
    def spans(self) -> Spans:
        """Every stage that fits somewhere, whatever it begins with."""
        every = [self.next(first) for first in range(self.layers)]
        found = (
            np.repeat(np.arange(self.layers), [len(each.way) for each in every]),
            np.concatenate([np.searchsorted(self.lengths, each.length) for each in every]),
            np.array([way.width for way in self.ways])[np.concatenate([each.way for each in every])],
            np.concatenate([self.alone_s(first).min(axis=0, initial=np.inf) for first in range(self.layers)]),
        )
        return Spans(*found)

    def recompute_range(self, way: int, first: int, stop: int) -> tuple[int, int]:
        """Return the fewest and the most layers that one stage recomputes."""
        order = self.depth_limits.layer_order(self.ways[way].kind)
        low, high = self.ways[way].choice.recompute_range(np.array([order.counts[first, self._column(stop - first)]]))
        return int(low[0]), int(high[0])

    def depth_of(self, way: int, first: int, stop: int, limit: int) -> int:
        """Return the most micro-batches in flight on one stage that fit; 0 where none does."""
        each = self.ways[way]
        return int(
            self.depth_limits.depth(each.choice, each.kind, each.width, limit)[first, self._column(stop - first)]
        )

    def sure_depth(self, ways: Counts, first: int, lengths: Counts) -> tuple[Counts, Numbers]:
        """Return micro-batches in flight that fit for sure on stages of one length each, on devices of least memory.

        And how many gradients on their way back hold as much as each (:meth:`.room.DepthLimits.exchange`).
        """
        depths, exchanges = self._sure
        columns = np.searchsorted(self.lengths, lengths, side="right") - 1
        return depths[ways, first, columns], exchanges[ways, first, columns]

    @cached_property
    def _sure(self) -> tuple[Counts, Numbers]:
        limits = {kind: min(self.costs.limits_bytes[at] for at in self.pool.all_of(kind)) for kind in self.pool.kinds}
        # Variants of a way stand elsewhere, and hold the same.
        alike = {(each.kind, each.number, each.width): each for each in self.ways}
        depths = {
            key: self.depth_limits.sure_depth(each.choice, each.kind, each.width, limits[each.kind])
            for key, each in alike.items()
        }
        exchanges = {key: self.depth_limits.exchange(each.choice, each.kind, each.width) for key, each in alike.items()}
        keys = [(each.kind, each.number, each.width) for each in self.ways]
        return np.stack([depths[key] for key in keys]), np.stack([exchanges[key] for key in keys])

    def link(self, way: int, first: int, stop: int, state: int) -> LinkTerms:
        """Return the least transfers behind one stage.

        Least, because the next stage is taken to end after one layer, and to be as wide and as near as suits.
        """
        near = int(self.moves[way].near[state])
        return self._links.at((near, int(self._key_of[way]), first, self._column(stop - first)))

    def _column(self, length: int) -> int:
        return int(np.searchsorted(self.lengths, length, side="right")) - 1

    def _from(self, first: int) -> NextStages:
        columns = int((self.lengths <= self.layers - first).sum())
        way = np.repeat(np.arange(len(self.ways)), columns)
        stage = self._stages.at((slice(None), slice(None), first, slice(columns)))
        stage = stage.reshape((len(self.places), -1))
        link = self._links.at((slice(None), self._key_of, first, slice(columns)))
        link = link.reshape((len(self.nears), -1))
        fitting = np.flatnonzero(np.isfinite(stage.work_s).any(axis=0))
        column = np.tile(np.arange(columns), len(self.ways))[fitting]
        longest = np.minimum(self._ends[column], self.layers - first)
        some = (slice(None), fitting)
        stages = np.stack([np.asarray(each)[some] for each in stage])
        links = np.stack([np.asarray(each)[some].astype(np.float64) for each in link])
        return NextStages(way[fitting], self.lengths[column], longest, stages, links)

    def _stacked_stages(self) -> StageTerms:
        """Terms ``[place, way, first, length]``."""
        shape = (len(self.places), len(self.ways), self.layers, len(self.lengths))
        terms = [np.ones(shape) for _ in StageTerms._fields]
        terms[2][:] = np.inf
        allowed: dict[tuple[object, ...], npt.NDArray[np.bool_]] = {}
        for at, (way, move) in enumerate(zip(self.ways, self.moves, strict=True)):
            for place in sorted(set(move.place[move.after < self.pool.states].tolist())):
                level, limit = self.places[place]
                found = [self._stage(way, width, level, limit) for width in way.widths]
                for stack, each in zip(terms, zip(*found, strict=True), strict=True):
                    stack[place, at] = np.minimum.reduce(each)
                terms[2][place, at][~self._allowed_mask(way, allowed)] = np.inf
        return StageTerms(*terms)

    def _allowed_mask(
        self, way: Variant, masks: dict[tuple[object, ...], npt.NDArray[np.bool_]]
    ) -> npt.NDArray[np.bool_]:
        """The stages that constraints allow to be run in a way, ``[first, length]``; any taken together."""
        shares = self.depth_limits.shares(way.choice, way.width)
        key = way.kind, len(shares) > 1, limits_met(self.costs, shares)
        if key not in masks:
            stops = self._firsts + np.arange(1, self.longest + 1)
            mask = self.constraints.mask(way.kind, shares)
            own = mask[self._firsts, np.minimum(stops, self.layers)] & (stops <= self.layers)
            masks[key] = np.logical_or.reduceat(own, self.lengths - 1, axis=1)
        return masks[key]

    def _stage(self, way: Variant, width: int, level: Level, limit: int) -> StageTerms:
        choice, kind = way.choice, way.kind
        depth, count = self.depth_limits.depth(choice, kind, width, limit), self.depth_limits.turns(choice, width)
        forward, backward = self._times(choice, kind, width, level)
        closing = self._closing(choice, kind, width, level)
        low, high = choice.recompute_range(self.depth_limits.layer_order(kind).counts)
        work = np.where((depth > 0) & (low <= high), count * (forward + backward), np.inf)
        beside = np.asarray(beside_s(forward, backward, count, np.maximum(depth, 1)))
        return StageTerms(forward, backward, work, closing, count / np.maximum(depth, 1), beside)

    def _times(self, choice: Choice, kind: int, width: int, level: Level) -> tuple[Numbers, Numbers]:
        rows, where = max(self.depth_limits.shares(choice, width)), (choice.shard, width, level, kind)
        adding = self.costs.adding(self.depth_limits.turns(choice, width), width)
        forward = self._over(self.costs.sums.forward(rows, *where))
        sums = self.costs.sums.backward(rows, adding, frozenset(), *where)
        backward = self._over(sums)
        if self._has_halves:
            first, second = (self._over(each) for each in self.costs.sums.halves(rows, adding, frozenset(), *where))
            halved = first if self._late else first + second
            halved[0] = np.minimum(halved[0], backward[0])
            backward = halved
        if choice.recomputes:
            order = self.depth_limits.layer_order(kind)
            every = self.costs.sums.backward(rows, adding, self.costs.every_layer, *where)
            again = np.diff(np.array(every)) - np.diff(np.array(sums))
            backward = backward + order.sums(again, choice.recompute_range(order.counts)[0])
        return forward, backward

    def _closing(self, choice: Choice, kind: int, width: int, level: Level) -> Numbers:
        """From below: reductions at the best rate of any size, as far as they outlast the last backward."""
        return self._reducing(choice, kind, width, level) + self._weighing(choice, kind, width, level)

    def _weighing(self, choice: Choice, kind: int, width: int, level: Level) -> Numbers | float:
        """Return the seconds of the weight half behind the last that others wait for."""
        if not (self._has_halves and self._late):
            return 0.0
        rows, where = min(self.depth_limits.shares(choice, width)), (choice.shard, width, level, kind)
        seconds = self._over(self.costs.sums.halves(rows, 0.0, frozenset(), *where)[1])
        seconds[0] = 0.0
        return seconds

    @cached_property
    def _trainable_bytes(self) -> Numbers:
        sizes = (float(layer.trainable_bytes) for layer in self.costs.profile.layers)
        return self._over(list(accumulate(sizes, initial=0.0)))

    def _reducing(self, choice: Choice, kind: int, width: int, level: Level) -> Numbers:
        costs = self.costs
        update = self._over(costs.layers[kind].update_sums)
        if width == 1:
            return update
        sizes = self._trainable_bytes
        if choice.shard != "none":
            update = update / width
        if choice.shard in ("optimizer", "gradients"):
            update = update + sizes * costs.links.least_per_byte("all_gather", width, level)
        if choice.shard in SCATTERING:
            return update
        rows = max(self.depth_limits.shares(choice, width))
        tied = sum(each.bytes * len(each.layers) for each in costs.flows.tied)
        operation: Collective = "all_reduce" if choice.shard == "none" else "reduce_scatter"
        reduced = np.maximum(0.0, sizes - tied) * costs.links.least_per_byte(operation, width, level)
        # Halves hide no more than the larger of all that a backward may be.
        hiding = [costs.layers[kind].backward_sums(rows, 1.0)]
        if self._has_halves:
            hiding.append(costs.layers[kind].weight_sums(rows, 1.0))
        hidden = 0.0 if costs.divisible else np.maximum.reduce([self._over(each, self._ends) for each in hiding])
        exposed: Numbers = np.maximum(0.0, reduced - hidden)
        return update + exposed

    def _over(self, sums: Sequence[float], lengths: Counts | None = None) -> Numbers:
        """Differences of sums, ``[first, length]``; of stages that end behind the last layer, up to it."""
        stops = np.arange(self.layers)[:, None] + (self.lengths if lengths is None else lengths)
        values = np.array(sums)
        return np.asarray(values[np.minimum(stops, self.layers)] - values[:-1, None])

    def _crossing_bytes(self, gradient: bool) -> Numbers:
        """Least bytes per sample from a stage to the layer behind it, ``[first, length]``."""
        areas = Areas(
            self.layers,
            (
                Area(0, tensor.producer, consumer, consumer, tensor.bytes_per_sample)
                for tensor in self.costs.flows.crossing
                if tensor.gradient or not gradient
                for consumer in tensor.consumers
            ),
        )
        found = areas.window(self.longest).astype(np.float64)
        # A stage that ends with the model has nothing behind it.
        stops = np.arange(self.layers)[:, None] + np.arange(1, self.longest + 1)
        found[stops >= self.layers] = np.inf
        least = np.minimum.reduceat(found, self.lengths - 1, axis=1)
        return np.where(np.isfinite(least), least, 0.0)

    def _stacked_links(self) -> tuple[LinkTerms, Counts]:
        """Terms ``[levels, key, first, length]``, and every way's key: what ways of the same terms have in common."""
        key_of = [(way.choice.division, way.widths) for way in self.ways]
        keys = list(dict.fromkeys(key_of))
        crossing = [self._crossing_bytes(gradient) for gradient in (False, True)]
        rows = [[self._link(widths, levels, division, *crossing) for division, widths in keys] for levels in self.nears]
        terms = (np.stack([np.stack([each[term] for each in row]) for row in rows]) for term in range(6))
        return LinkTerms(*terms), np.array([keys.index(each) for each in key_of])

    def _link(
        self, widths: Sequence[int], levels: frozenset[Level], division: Division, forth: Numbers, back: Numbers
    ) -> LinkTerms:
        most = max(len(self.pool.all_of(kind)) for kind in self.pool.kinds)
        found = [self._passing(width, division, most) for width in (widths[0], widths[-1])]
        least = min(each.least_rows for each in found)
        fullest = sorted({pair for each in found for pair in each.fullest})
        quickest = [self._messages(sizes * least, sizes > 0, levels) for sizes in (forth, back)]
        busy = [
            np.minimum.reduce([count * self._messages(sizes * rows, sizes > 0, levels) for count, rows in fullest])
            for sizes in (forth, back)
        ]
        return LinkTerms(forth > 0, (back > 0) & (self._late or not self._has_halves), *quickest, *busy)

    def _passing(self, width: int, division: Division, most: int) -> Queues:
        rows, count = self.family.micro_batch_size, self.family.micro_batches
        if self.costs.divisible:
            return Queues(rows, ((count, rows),))
        return queues(self.family, width, division, most)

    def _messages(self, sizes: Numbers, there: npt.NDArray[np.bool_], levels: frozenset[Level]) -> Numbers:
        every = [self.costs.links.messages_s(sizes, level) for level in sorted(levels)]
        return np.where(there, np.minimum.reduce(every), 0.0)
