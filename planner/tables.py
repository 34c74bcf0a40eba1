"""Tables: the terms of all stages, and lower bounds of all suffixes, as arrays over (move, first, stop).

A move is one way of taking devices for a stage: a width, and one of its variants.

A suffix table holds, for the layers from ``first`` on, placed on the devices that a state of the pool leaves, the
component-wise minimum of their terms over all that fit: as :func:`autopar.planner.bounds.fold` never falls when one of
them grows, folding a prefix onto the minima never exceeds the bound of any completion. In flight is as much as fits;
recomputation, reductions and transfers are priced from below, and exactly once a plan is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from autopar.formats.plan import Division, turns
from autopar.planner.bounds import LinkTerms, StageTerms, Terms, fold, last
from autopar.planner.candidate import Family
from autopar.planner.choices import Choice, choices
from autopar.planner.costs import CostModel
from autopar.planner.links import Collective, Level
from autopar.planner.memory import Held, Parts, peak_of
from autopar.planner.moves import Moves
from autopar.planner.options import PlanOptions
from autopar.planner.pool import Pool
from autopar.schedules.route import Divide, routes

__all__ = ["StageTables", "SuffixTables", "table_bytes"]

MOST_ELEMENTS = 20_000_000
"""Of the arrays that make a family's tables; about a tenth of a second for so many."""

Numbers = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


class StageTables:
    """Terms of all stages and of the boundaries behind them, for one family."""

    def __init__(self, costs: CostModel, pool: Pool, family: Family, options: PlanOptions) -> None:
        self.costs, self.pool, self.family = costs, pool, family
        self.layers = costs.layer_count
        self._parts: dict[tuple[float, int, int], Parts] = {}
        self._depths: dict[tuple[Choice, int, int, int], Counts] = {}
        self._stacks: dict[tuple[Choice, int], tuple[StageTerms, Numbers]] = {}
        self._boundaries: dict[tuple[Division, int], LinkTerms] = {}
        self._links: dict[tuple[int, Level, Division], LinkTerms] = {}
        self._sizes = _crossing_bytes(costs)
        self._ordered = np.triu(np.ones((self.layers, self.layers + 1), dtype=bool), 1)
        self.choices = {
            kind: choices(costs, options, family.micro_batch_size, kind, self._binding(kind)) for kind in pool.kinds
        }
        self.moves = {kind: Moves(costs, pool, kind, self._widest(kind)) for kind in pool.kinds}
        """Of every kind."""

    def widths(self, state: int, kind: int) -> int:
        """Return the most replicas of a stage: as many as are left and have something to do."""
        return min(self.pool.left(state, kind), self._widest(kind))

    def _widest(self, kind: int) -> int:
        rows, count = self.family.micro_batch_size, self.family.micro_batches
        return max(choice.widths(count, rows, self.costs.divisible).stop - 1 for choice in self.choices[kind])

    def stages(self, state: int, kind: int, choice: Choice) -> tuple[StageTerms, Numbers]:
        """Return the terms of all stages, ``[move, first, stop]``, and 0 where they fit, infinity elsewhere."""
        if (choice, kind) not in self._stacks:
            self._stacks[choice, kind] = self._stacked(choice, kind)
        terms, fits = self._stacks[choice, kind]
        at = self.moves[kind].places.at(state)
        return terms.at((at,)), fits[at]

    def depth(self, choice: Choice, kind: int, width: int, limit: int) -> Counts:
        """Return the most micro-batches in flight that fit, ``[first, stop]``; 0 where none does."""
        key = (choice, kind, width, limit)
        if key not in self._depths:
            rows = {max(self._shares(choice, width)), min(self._shares(choice, width))}
            count = self._turns(choice, width)
            if self.costs.memory[kind].most(max(rows), count) <= limit:
                self._depths[key] = np.full((self.layers, self.layers + 1), count)
                return self._depths[key]
            found = [
                self._deepest(self._parts_of(each, level, kind), self._held(choice, each, width), limit)
                for each in rows
                for level in {choice.first_level, choice.last_level}
            ]
            # Of the range's levels the one that holds least, of unequal shares the largest.
            pairs = len({choice.first_level, choice.last_level})
            by_rows = [np.maximum.reduce(found[at : at + pairs]) for at in range(0, len(found), pairs)]
            self._depths[key] = np.minimum.reduce(by_rows)
        return self._depths[key]

    def shortfall(self, state: int, kind: int, choice: Choice, width: int) -> Counts:
        """Return by how many bytes stages exceed their devices with least in flight, ``[first, stop]``."""
        limit = self.costs.limit_bytes(self.pool.devices(state, kind, width))
        parts = self._parts_of(max(self._shares(choice, width)), choice.last_level, kind)
        held = self._held(choice, max(self._shares(choice, width)), width)
        if self.family.schedule != "gpipe":
            held = held._replace(warmup=1)
        return np.asarray(peak_of(parts, held)) - limit

    def links(self, state: int, kind: int, choice: Choice) -> LinkTerms:
        """Return the least transfers behind all stages, ``[move, first, stop]``.

        Least, because the next stage is taken to end after one layer, and to be as wide and as near as suits.
        """
        division = choice.division
        if (division, kind) not in self._boundaries:
            found = [self._link(*way, division) for way in self.moves[kind].ways.different]
            stacks = (np.stack(each) for each in zip(*found, strict=True))
            self._boundaries[division, kind] = LinkTerms(*stacks)
        return self._boundaries[division, kind].at((self.moves[kind].ways.at(state),))

    def _binding(self, kind: int) -> bool:
        """Whether some stage of one replica does not fit with all micro-batches in flight."""
        plain = Choice("split", "none", 0, 0)
        limits = [limit for limit, own in zip(self.costs.limits_bytes, self.costs.kind_of, strict=True) if own == kind]
        depth = self.depth(plain, kind, 1, min(limits))
        return bool((depth[self._ordered] < self.family.micro_batches).any())

    def _shares(self, choice: Choice, width: int) -> tuple[float, ...]:
        return self.costs.shares(self.family.micro_batch_size, width, choice.division)

    def _turns(self, choice: Choice, width: int) -> int:
        return len(turns(choice.division, width, 0, self.family.micro_batches))

    def _held(self, choice: Choice, rows: float, width: int) -> Held:
        count = self._turns(choice, width)
        return Held(rows, count, count, width, 0, frozenset(), choice.shard)

    def _parts_of(self, rows: float, level: int, kind: int) -> Parts:
        key = (rows, level, kind)
        if key not in self._parts:
            recompute = self.costs.recompute_levels(self.family.micro_batch_size, kind)[level]
            self._parts[key] = self.costs.memory[kind].arrays(rows, recompute)
        return self._parts[key]

    def _deepest(self, parts: Parts, held: Held, limit: int) -> Counts:
        """Most in flight that fit: all, or as many as the bytes that each takes leave room for."""
        count = held.micro_batches
        deepest = np.where(peak_of(parts, held) <= limit, count, 0)
        if self.family.schedule == "gpipe" or count == 1:
            return deepest
        one = held._replace(warmup=1)
        # Without the update's moment, which has nothing in flight.
        steady = peak_of(parts._replace(update=-(2**60)), one)
        more = np.maximum(0, limit - steady) // np.maximum(1, parts.activations)
        some = np.where(peak_of(parts, one) <= limit, np.minimum(count - 1, 1 + more), 0)
        return np.maximum(deepest, some)

    def _stacked(self, choice: Choice, kind: int) -> tuple[StageTerms, Numbers]:
        places = self.moves[kind].places.different
        asked = choice.widths(self.family.micro_batches, self.family.micro_batch_size, self.costs.divisible)
        shape = (len(places), self.layers, self.layers + 1)
        terms = [np.ones(shape) for _ in range(5)]
        fits = np.full(shape, np.inf)
        for index, (width, level, limit) in enumerate(places):
            if width in asked:
                one = self._stage(choice, kind, width, level, limit)
                for stack, each in zip(terms, one, strict=True):
                    stack[index] = each
                deep = self.depth(choice, kind, width, limit) > 0
                fits[index] = np.where(self._ordered & deep, 0.0, np.inf)
        return StageTerms(*terms), fits

    def _stage(self, choice: Choice, kind: int, width: int, level: Level, limit: int) -> StageTerms:
        depth, count = self.depth(choice, kind, width, limit), self._turns(choice, width)
        there, back, both = self._times(choice, kind, width, level)
        closing = self._closing(choice, kind, width, level)
        return StageTerms(there, back, count * both, closing, count / np.maximum(depth, 1))

    def _times(self, choice: Choice, kind: int, width: int, level: Level) -> tuple[Numbers, Numbers, Numbers]:
        forward, backward, both = [], [], []
        adding = self.costs.adding(self._turns(choice, width), width)
        recompute = self.costs.recompute_levels(self.family.micro_batch_size, kind)[choice.first_level]
        for rows in sorted(set(self._shares(choice, width))):
            where = (choice.shard, width, level, kind)
            sums = (
                self.costs.sums.forward(rows, *where),
                self.costs.sums.backward(rows, adding, recompute, *where),
            )
            there, back = (_differences(each) for each in sums)
            forward.append(there)
            backward.append(back)
            both.append(there + back)
        return np.minimum.reduce(forward), np.minimum.reduce(backward), np.maximum.reduce(both)

    def _closing(self, choice: Choice, kind: int, width: int, level: Level) -> Numbers:
        """From below: reductions at the best rate of any size, as far as they outlast the last backward."""
        costs = self.costs
        update = _differences(costs.layers[kind].update_sums)
        if width == 1:
            return update
        trained = (float(layer.trainable_bytes) for layer in costs.profile.layers)
        sizes = _differences(list(accumulate(trained, initial=0.0)))
        if choice.shard != "none":
            update = update / width
        if choice.shard in ("optimizer", "gradients"):
            update = update + sizes * costs.links.least_per_byte("all_gather", width, level)
        if choice.shard in ("gradients", "parameters"):
            return update
        rows = max(self._shares(choice, width))
        tied = sum(each.bytes * len(each.layers) for each in costs.flows.tied)
        operation: Collective = "all_reduce" if choice.shard == "none" else "reduce_scatter"
        reduced = np.maximum(0.0, sizes - tied) * costs.links.least_per_byte(operation, width, level)
        hidden = 0.0 if costs.divisible else _differences(costs.layers[kind].backward_sums(rows, 1.0))
        exposed: Numbers = np.maximum(0.0, reduced - hidden)
        return update + exposed

    def _link(self, width: int, levels: frozenset[Level], division: Division) -> LinkTerms:
        """Return what is least over the levels: a nearer one need not be the quicker."""
        found = [self._link_at(width, level, division) for level in sorted(levels)]
        forth, back, *_ = found[0]
        return LinkTerms(
            forth, back, *(np.minimum.reduce(each) for each in zip(*(one[2:] for one in found), strict=True))
        )

    def _link_at(self, width: int, level: Level, division: Division) -> LinkTerms:
        key = (width, level, division)
        if key not in self._links:
            forth, back = self._sizes
            least, fullest = self._rows(width, division)
            quickest = [self._messages(sizes * least, sizes > 0, level) for sizes in (forth, back)]
            busy = [
                np.minimum.reduce([count * self._messages(sizes * rows, sizes > 0, level) for count, rows in fullest])
                for sizes in (forth, back)
            ]
            self._links[key] = LinkTerms(forth > 0, back > 0, *quickest, *busy)
        return self._links[key]

    def _messages(self, sizes: Numbers, there: npt.NDArray[np.bool_], level: Level) -> Numbers:
        return np.where(there, self.costs.links.messages_s(sizes, level), 0.0)

    def _rows(self, width: int, division: Division) -> tuple[float, set[tuple[int, float]]]:
        """The fewest rows of any message, and (messages, rows) of the fullest queue, by the next stage's width."""
        rows, count = self.family.micro_batch_size, self.family.micro_batches
        if self.costs.divisible:
            return rows, {(count, rows)}
        sending = Divide(self.costs.shares(rows, width, division), division)
        least, fullest = float(rows), set()
        most = min(sum(self.pool.left(0, kind) for kind in self.pool.kinds), max(rows, count))
        for next_width in range(1, most + 1):
            receivers = []
            if next_width <= rows:
                receivers.append(Divide(self.costs.shares(rows, next_width)))
            if 1 < next_width <= count:
                receivers.append(Divide(self.costs.shares(rows, next_width, "round-robin"), "round-robin"))
            for receiving in receivers:
                found = [(route.count(count), route.stop - route.start) for route in routes(sending, receiving)]
                least = min(least, *(each for _, each in found))
                fullest.add(max(found, key=lambda pair: pair[0] * pair[1]))
        return least, fullest


def _differences(sums: Sequence[float]) -> Numbers:
    return np.asarray(np.subtract.outer(np.array(sums), np.array(sums)).T[:-1])


def _crossing_bytes(costs: CostModel) -> tuple[Numbers, Numbers]:
    """Bytes per sample from layers ``first:stop`` to layer ``stop``, forth and back, ``[first, stop]``."""
    forth, back = (np.zeros((costs.layer_count, costs.layer_count + 1)) for _ in range(2))
    for tensor in costs.flows.crossing:
        for consumer in tensor.consumers:
            forth[: tensor.producer + 1, consumer] += tensor.bytes_per_sample
            if tensor.gradient:
                back[: tensor.producer + 1, consumer] += tensor.bytes_per_sample
    return forth, back


def table_bytes(layers: int, devices: int, micro_batch_size: int, choices: int) -> int:
    """Return about how many bytes one family's tables take."""
    return 8 * min(devices, micro_batch_size) * layers**2 * (6 * choices + 40)


class SuffixTables:
    """Least terms of all suffixes, for one family, by how many stages they have.

    Those of many stages are lumped together, so that tables of large problems stay small.
    """

    def __init__(self, stages: StageTables, options: PlanOptions) -> None:
        self.stages, self._use_all = stages, options.use_all
        pool, layers = stages.pool, stages.layers
        self.counts = self._distinguished(options.min_stages)
        """Suffixes of fewer stages than this are told apart; the last entry is for those of so many, and more."""
        self.least = np.full((self.counts, 4, pool.states, layers + 1), np.inf)
        """``[stages - 1, term, state, first]``."""
        for state in reversed(range(pool.empty)):
            for behind in range(self.counts):
                found = [
                    np.min(self.terms(state, kind, choice, behind), axis=(1, 3))
                    for kind in pool.kinds
                    if pool.left(state, kind)
                    for choice in stages.choices[kind]
                ]
                self.least[behind, :, state, :layers] = np.minimum.reduce(found)

    def behinds(self, stages: int | None) -> slice:
        """Return how many stages may follow the first of ``stages``, as :meth:`terms` takes them; none: any number."""
        if stages is None:
            return slice(self.counts)
        return slice(max(0, stages - 1), stages + (stages == self.counts - 1))

    def terms(self, state: int, kind: int, choice: Choice, behind: int, first: int | None = None) -> Numbers:
        """Return the least terms of suffixes with ``behind`` stages after their first one, by what this one is.

        The largest number that is told apart stands for all larger ones. The terms are arrays ``[term, move,
        first, stop]``; with ``first``, of suffixes from that layer on only, without its axis.
        """
        tables, pool = self.stages, self.stages.pool
        stage, fits = tables.stages(state, kind, choice)
        link = tables.links(state, kind, choice)
        after = [move.after for move in tables.moves[kind].of(state)]
        if first is not None:
            stage, link, fits = stage.at((slice(None), first)), link.at((slice(None), first)), fits[:, first]
        if behind == 0 and self.counts > 1:
            found = np.full((4, *fits.shape), np.inf)
        else:
            rows = self.least[self.behinds(behind)].min(axis=0)
            suffix = rows[:, after] if first is not None else rows[:, after, None, :]
            found = np.stack(np.broadcast_arrays(*fold(stage, link, Terms(*suffix)))) + fits
            found[..., -1] = np.inf
        if behind == 0:
            closed = np.stack(np.broadcast_arrays(*last(stage.at((..., -1))))) + fits[..., -1]
            ended = np.array([not self._use_all or each == pool.empty for each in after])
            found[..., -1] = np.where(ended if first is not None else ended[None, :, None], closed, np.inf)
        return found

    def _distinguished(self, least: int) -> int:
        tables, pool = self.stages, self.stages.pool
        choices = sum(map(len, tables.choices.values()))
        devices = sum(pool.left(0, kind) for kind in pool.kinds)
        elements = sum(map(len, tables.moves.values())) * tables.layers**2 * choices
        return max(1, least, min(tables.layers, devices, MOST_ELEMENTS // elements))
