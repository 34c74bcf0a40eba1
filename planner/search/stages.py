"""StageTables: the terms of all stages, and of the boundaries behind them, for one family.

In flight is as much as fits; recomputation, reductions and transfers are priced from below, and exactly once a plan is
whole. Where stages of similar length or width are taken together, every term is the least of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property, partial
from itertools import accumulate, product
from typing import NamedTuple
from weakref import proxy

import numpy as np
import numpy.typing as npt

from autopar.errors import UsageError
from autopar.formats.cluster import Level
from autopar.hardware.topology import Place
from autopar.options.plan import PlanOptions
from autopar.ownership import SCATTERING, Division, Replicas, Shard
from autopar.planner.bounds import LinkTerms, StageTerms, beside_s, last, placed_terms
from autopar.planner.candidate import CandidateStage, Family, splits_backward
from autopar.planner.constraints import Constraints, limits_met
from autopar.planner.costs import memoize_weakly
from autopar.planner.costs.activations import Area, Areas, Counts, Numbers
from autopar.planner.costs.curves import Collective
from autopar.planner.costs.layers import Site, Span
from autopar.planner.costs.model import CostModel
from autopar.planner.costs.queues import Value
from autopar.planner.placement import Places, StateMove
from autopar.planner.search.configs import Fineness, RecomputeRange, StageConfig, configs_of, lengths_of, queues
from autopar.planner.search.depths import DepthLimits
from autopar.planner.search.judge import MOST_TABLED, TABLED, TABLED_APART
from autopar.planner.search.mixed import MixedStages
from autopar.planner.shares import by_speed

MOST_BYTES = 8 * 2**30


class Step(NamedTuple):
    """A stage of a plan, without its depth."""

    first: int
    stop: int
    way: int
    state: int
    """Of the pool, before."""


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
    alone_s: Numbers
    """The seconds of a step of nothing else, ``[place, stage]``."""

    def some(self, indices: Counts) -> NextStages:
        """Return some of the stages."""
        return NextStages._make(np.take(each, indices, axis=-1) for each in self)


class StageTables:
    """Prices all stages.

    Of backwards in halves, others wait for the input halves alone: these are the work that a way back follows, and one
    weight half comes behind the last; all that a stage does counts beside. The first stage's backwards may be whole.
    """

    def __init__(
        self, costs: CostModel, places: Places, family: Family, options: PlanOptions, fineness: Fineness | None = None
    ) -> None:
        """Price all stages: those of every width and length, unless ``fineness`` says which."""
        self.costs, self.pool, self.family, self.layers = costs, places.pool, family, costs.layer_count
        self.apart, self.has_halves = fineness is None, splits_backward(family.schedule)
        self.depth_limits = DepthLimits(costs, family, self.pool)
        every, apart = list[StageConfig](), [(kind,) for kind in self.pool.kinds]
        for kinds, team in product([*apart, self.pool.kinds] if costs.mixes else apart, costs.teams):
            binding = any(self.depth_limits.binding(kind, team) for kind in kinds)
            every += configs_of(costs, family, options, kinds, binding, fineness, team)
        self.longest = self.layers if self.apart else self.depth_limits.reach(every)
        self.ways, self.moves = zip(*_placements(every, places), strict=True)
        self.places = {ranks: tuple(known) for ranks, known in places.stage_places.items()}
        """By how many replicas there are, and how many devices run each."""
        self.most_places, self.nears = max(map(len, self.places.values())), tuple(places.nears)
        self.lengths = self.depth_limits.lengths = np.array(lengths_of(self.longest, fineness))
        self.constraints = Constraints.of(costs, options)
        self._firsts = np.arange(self.layers)[:, None]
        self._stops = self._firsts + np.arange(1, self.longest + 1)
        """Of stages of every number of layers, ``[first, length - 1]``; some are behind the last layer."""
        self.ends = np.append(self.lengths[1:] - 1, self.longest)
        self._check_size()

    def _check_size(self) -> None:
        """Refuse tables that no ordinary machine holds, instead of dying of them."""
        numbers = len(StageTerms._fields) * self.most_places + len(LinkTerms._fields) * len(self.nears)
        size = 8 * numbers * len(self.ways) * self.layers * len(self.lengths)
        if size > MOST_BYTES:
            raise UsageError(
                f"searching plans of {self.layers} layers on {len(self.costs.devices)} devices takes about "
                f"{size / 2**30:.0f} GiB of tables; narrow it with fewer `gpus`, one `schedule` or one `micro_batches`"
            )

    @cached_property
    def _mixed_stages(self) -> MixedStages:
        return MixedStages(proxy(self))

    @property
    def chain(self) -> bool:
        """Whether activations and gradients cross every boundary."""
        between = self._firsts + self.lengths < self.layers
        return bool(self._links[0][:2, :, :, between].all())

    @property
    def size(self) -> int:
        """How many stages there are in all states of the pool, of those that are told apart."""
        return self.pool.states * len(self.ways) * self.layers * len(self.lengths)

    @property
    def table_us(self) -> float:
        """The work of a table of suffixes."""
        return self.size * (TABLED if self.chain else TABLED_APART)

    @property
    def is_tabled(self) -> bool:
        """Whether tables of suffixes are made of the stages, and do not take too long."""
        return self.chain or self.table_us <= MOST_TABLED

    def next(self, first: int) -> NextStages:
        """Return every stage that may begin with a layer, of those that fit somewhere; priced when first asked."""
        return self._next[first]

    @cached_property
    def _next(self) -> list[NextStages]:
        stages = self._stacked_stages()
        return [self._fitting(first, stages) for first in range(self.layers)]

    def _fitting(self, first: int, every: Numbers) -> NextStages:
        stages = every[:, :, :, first].reshape(len(every), self.most_places, -1)
        every_link, key_of = self._links
        links = every_link[:, :, key_of, first].reshape(len(LinkTerms._fields), len(self.nears), -1)
        fitting = np.flatnonzero(np.isfinite(stages[2]).any(axis=0))
        way, column = np.divmod(fitting, len(self.lengths))
        longest = np.minimum(self.ends[column], self.layers - first)
        stages, links = np.take(stages, fitting, axis=2), np.take(links, fitting, axis=2)
        alone_s = np.asarray(last(StageTerms.from_array(stages)).step_s)
        return NextStages(way, self.lengths[column], longest, stages, links, alone_s)

    @cached_property
    def alone_s(self) -> Numbers:
        """The seconds of a step of a stage alone, of so many devices or fewer, ``[devices - 1, first, length]``."""
        found = np.full((len(self.costs.devices), self.layers, len(self.lengths)), np.inf)
        widths = np.array([way.replicas.devices for way in self.ways])
        for first in range(self.layers):
            following = self.next(first)
            at = widths[following.way] - 1, np.searchsorted(self.lengths, following.length)
            np.minimum.at(found[:, first], at, following.alone_s.min(axis=0))
        return np.asarray(np.minimum.accumulate(found))

    def span(self, step: Step) -> Span:
        """Return how many of its layers one stage recomputes."""
        form, recompute = self._form(step), self.ways[step.way].recompute
        count = self.depth_limits.layer_order(form).counts[step.first, self._column(step)]
        low, high = recompute.of(count)
        return Span(self.costs.recompute_levels(self.family.micro_batch_size, form), int(low), int(high))

    def _form(self, step: Step) -> int:
        """Return the number of the form that runs a step's replicas; of several, the first."""
        kinds, replicas, *_ = self.ways[step.way]
        place = self.places[replicas.width, replicas.team][int(self.moves[step.way].place[step.state])]
        return self.costs.form(kinds[0], replicas, place.team)

    def place(self, step: Step) -> CandidateStage:
        """Return a stage with as much in flight as fits, 0 where nothing does, and its way's least recomputation."""
        way = self.ways[step.way]
        replicas, recompute = way.replicas, way.recompute
        shares, again = self.depth_limits.shares(replicas), self.span(step).within(step.first, step.stop)[0]
        devices = self.pool.devices(step.state, way.taken, way.variant)
        if way.is_mixed:
            stage = CandidateStage.of(step.first, step.stop, devices, shares, 1, replicas, again)
            return self._mixed_stages.deepest(by_speed(self.costs, stage, self.family), recompute, self._column(step))
        depths = self.depth_limits.depth(self._form(step), replicas, recompute, self.costs.limit_bytes(devices))
        depth = int(depths[step.first, self._column(step)])
        return CandidateStage.of(step.first, step.stop, devices, shares, depth, replicas, again)

    @memoize_weakly
    def placed_stage(self, step: Step) -> tuple[CandidateStage, StageTerms | None]:
        """Return :meth:`place`'s stage and its terms, which it has none of where nothing fits."""
        stage = self.place(step)
        return stage, placed_terms(self.costs, stage, self.family.micro_batches) if stage.warmup else None

    def sure_depth(self, ways: Counts, first: int, lengths: Counts) -> tuple[Counts, Numbers]:
        """Return :meth:`DepthLimits.sure_depth` of stages of one length each."""
        depths, exchanges = self._sure
        columns = np.searchsorted(self.lengths, lengths, side="right") - 1
        return depths[ways, first, columns], exchanges[ways, first, columns]

    @cached_property
    def _sure(self) -> tuple[Counts, Numbers]:
        # Variants of a way stand elsewhere, and hold the same.
        sure_depth = cache(self.depth_limits.sure_depth)
        found = [
            [np.minimum.reduce(each) for each in zip(*own, strict=True)]
            for own in ([sure_depth(kind, *way[1:3]) for kind in way.kinds] for way in self.ways)
        ]
        depths, exchanges = zip(*found, strict=True)
        return np.stack(depths), np.stack(exchanges)

    def link(self, step: Step) -> LinkTerms:
        """Return the least transfers behind one stage: the next one ends after a layer, as wide and near as suits."""
        every, key_of = self._links
        where = self.moves[step.way].near[step.state], key_of[step.way], step.first, self._column(step)
        # Scalars of numpy, by which what is folded with them is in double precision; Python's would leave it in single.
        forth, back, *seconds = every[:, *where]
        return LinkTerms(forth > 0, back > 0, *seconds)

    def _column(self, step: Step) -> int:
        return int(np.searchsorted(self.lengths, step.stop - step.first, side="right")) - 1

    def _stacked_stages(self) -> Numbers:
        """Terms ``[term, place, way, first, length]``; work is infinite where a stage does not fit, or may not be."""
        count = 8 if self.has_halves else 6
        terms = np.ones((count + self.costs.mixes, self.most_places, len(self.ways), self.layers, len(self.lengths)))
        terms[2] = np.inf
        terms[count:] = 0.0
        allowed: dict[tuple[object, ...], npt.NDArray[np.bool_]] = {}
        for at, (way, move) in enumerate(zip(self.ways, self.moves, strict=True)):
            mask = self._allowed_mask(way, allowed)
            stage = cache(partial(self._stage, cache(self._computing)))
            for place in np.unique(move.place[move.after < self.pool.states]).tolist():
                where, limit, team = self.places[way.replicas.width, way.replicas.team][place]
                form, found = self.costs.form(way.kinds[0], way.replicas, team), []
                # Places are those of devices whose memory may be taken to have no limit.
                limit = max(limit, self.costs.limit_bytes(self.pool.all_of(way.kinds[0])))
                for counts in way.counts:
                    wide = way.so_wide(sum(counts))
                    # Where more devices than the least stand is not known.
                    own = where if sum(counts) == where.ranks else self.costs.links.best_place(sum(counts), where.level)
                    found.append(
                        self._mixed_stages.terms(wide, counts, own, team)
                        if way.is_mixed
                        else stage(wide, own, form, limit)
                    )
                some = ([term for term in own if term is not None] for own in found)
                for term, each in enumerate(zip(*some, strict=True)):
                    terms[term, place, at] = np.minimum.reduce(each)
                terms[2, place, at, ~mask] = np.inf
        return terms

    def _allowed_mask(
        self, way: StageConfig, masks: dict[tuple[object, ...], npt.NDArray[np.bool_]]
    ) -> npt.NDArray[np.bool_]:
        """The stages that constraints allow to be run in a way, ``[first, length]``; any taken together."""
        shares = self.depth_limits.shares(way.replicas)
        key = way.kinds, len(shares) > 1, limits_met(self.costs, shares), way.replicas.team, way.replicas.sliced
        if key not in masks:
            # Replicas on several kinds take other shares than even ones.
            mask = self.constraints.mask(way.kinds, () if way.is_mixed else shares, way.replicas)
            own = mask[self._firsts, np.minimum(self._stops, self.layers)] & (self._stops <= self.layers)
            masks[key] = np.logical_or.reduceat(own, self.lengths - 1, axis=1)
        return masks[key]

    def _stage(
        self,
        computing: Callable[[StageConfig, Site, int], StageTerms],
        way: StageConfig,
        place: Place,
        form: int,
        limit: int,
    ) -> StageTerms:
        replicas, site = way.replicas, Site.of(way.replicas.shard, place, form)
        # From below: reductions at the best rate of any size, as far as they outlast the last backward.
        most_rows = max(self.depth_limits.shares(replicas))
        reduction = self.reducing(replicas.shard, most_rows, form, place)
        found = computing(way, site, limit)
        found = found._replace(closing_s=reduction + self._weighing(replicas, site))
        if found.total_s is None or found.rest_s is None:
            return found
        total = found.total_s + reduction
        return found._replace(total_s=total, rest_s=total - found.rest_s - found.backward_s)

    def _computing(self, way: StageConfig, site: Site, limit: int) -> StageTerms:
        """Return the terms of a stage that reduces nothing; of halves, the rest is what may begin before."""
        _, replicas, recompute, *_ = way
        depth = self.depth_limits.depth(site.form, replicas, recompute, limit)
        count = replicas.most(self.family.micro_batches)
        rows = max(self.depth_limits.shares(replicas))
        adding = self.costs.adding(count, replicas.width)
        forward, backward, whole = self.times(rows, adding, recompute, site)
        low, high = recompute.of(self.depth_limits.layer_order(site.form).counts)
        work = np.where((depth > 0) & (low <= high), count * (forward + backward), np.inf)
        beside = np.asarray(beside_s(forward, backward, count, np.maximum(depth, 1)))
        found = StageTerms(forward, backward, work, 0.0, count / np.maximum(depth, 1), beside)
        if not self.has_halves:
            return found
        started = np.minimum(np.maximum(depth, 1), count)
        return found._replace(total_s=count * (forward + whole), rest_s=started * forward)

    def times(
        self, rows: float, adding: float, recompute: RecomputeRange, site: Site, leading: int | None = None
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Return the seconds of a forward, of what others wait for of a backward, and of a whole one.

        Layers run again in the order of the form ``leading``, or else of the site's.
        """
        forward, backward, whole = self._times_without_recomputation(rows, adding, site)
        if recompute.recomputes:
            order = self.depth_limits.layer_order(site.form if leading is None else leading)
            queues = self.costs.seconds.again_by_layer(rows, adding, site)
            least = recompute.of(order.counts)[0]
            kernels, launches = (order.sums(np.array(each), least) for each in queues)
            # What a backward takes longer is at least what it adds to the shorter queue.
            again = np.minimum(kernels, launches) if self.costs.layers[site.form].has_launches else kernels
            backward, whole = backward + again, whole + again
        return forward, backward, whole

    @memoize_weakly
    def _times_without_recomputation(self, rows: float, adding: float, site: Site) -> tuple[Numbers, Numbers, Numbers]:
        forward, whole = self.plain_times(rows, adding, site)
        if not self.has_halves:
            return forward, whole, whole
        stage, least = self._every(site)
        input_s, weight_s = self.costs.seconds.halves(*stage, rows, adding, site)
        first, both = least(input_s), least(input_s + weight_s)
        for halves in (first, both):
            halves[0] = np.minimum(halves[0], whole[0])
        return forward, first, both

    @memoize_weakly
    def plain_times(self, rows: float, adding: float, site: Site) -> tuple[Numbers, Numbers]:
        """Return the seconds of a forward and of a backward that is not in halves, where nothing runs again."""
        seconds, (stage, least) = self.costs.seconds, self._every(site)
        return least(seconds.forward(*stage, rows, site)), least(seconds.backward(*stage, rows, adding, site))

    def _every(self, site: Site) -> tuple[tuple[Counts, Counts], Callable[[Value], Numbers]]:
        """Return the layers of all stages, and what makes those that are taken together one.

        Of a longer stage, each may take less where the host's queue gives way to the device's.
        """
        launched = self.costs.layers[site.form].has_launches
        stops = np.minimum(self._stops if launched else self._firsts + self.lengths, self.layers)
        return (self._firsts, stops), self._least if launched else np.asarray

    def _weighing(self, replicas: Replicas, site: Site) -> Numbers | float:
        """Return the seconds of the weight half behind the last that others wait for."""
        if not self.has_halves:
            return 0.0
        rows = min(self.depth_limits.shares(replicas))
        stops = np.minimum(self._firsts + self.lengths, self.layers)
        seconds = np.array(self.costs.seconds.least_weight_s(self._firsts, stops, rows, site))
        seconds[0] = 0.0
        return seconds

    @memoize_weakly
    def _trainable_bytes(self, form: int) -> Numbers:
        sizes = (float(layer.trainable_bytes) for layer in self.costs.forms.layers[form])
        return self.over(list(accumulate(sizes, initial=0.0)))

    @memoize_weakly
    def reducing(self, shard: Shard, rows: float, form: int, place: Place) -> Numbers:
        """Return the least seconds of a replica's reduction that nothing hides, and of its update."""
        costs = self.costs
        update = self.over(costs.layers[form].update_sums)
        if place.ranks == 1:
            return update
        sizes = self._trainable_bytes(form)
        if shard != "none":
            update = update / place.ranks
        if shard in ("optimizer", "gradients"):
            update = update + sizes * costs.links.least_per_byte("all_gather", place)
        if shard in SCATTERING:
            return update
        tied = sum(each.bytes * len(each.layers) for each in costs.forms.flows[form].tied)
        operation: Collective = "all_reduce" if shard == "none" else "reduce_scatter"
        reduced = np.maximum(0.0, sizes - tied) * costs.links.least_per_byte(operation, place)
        # Halves hide no more than the larger of all that a backward may be.
        layers = costs.layers[form]
        hiding = [costs.sums.computing("backward_s", rows, form, 1.0)]
        if self.has_halves:
            hiding.append(costs.sums.computing("backward_weight_s", rows, form, 1.0))
        if layers.has_launches:
            hiding += [layers.sums(each, rows, 1.0) for each in ("backward_launch_s", "backward_weight_launch_s")]
        hidden = 0.0 if costs.divisible else np.maximum.reduce([self.over(each, self.ends) for each in hiding])
        exposed: Numbers = np.maximum(0.0, reduced - hidden)
        return update + exposed

    def _least(self, values: Value) -> Numbers:
        """Return the least of stages that are taken together, ``[first, length]``, of values of every length."""
        return np.asarray(np.minimum.reduceat(values, self.lengths - 1, axis=1))

    def over(self, sums: Sequence[float], lengths: Counts | None = None) -> Numbers:
        """Differences of sums, ``[first, length]``; of stages that end behind the last layer, up to it."""
        stops = np.minimum(self._firsts + (self.lengths if lengths is None else lengths), self.layers)
        values = np.array(sums)
        return np.asarray(values[stops] - values[:-1, None])

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
        found[self._stops >= self.layers] = np.inf
        least = np.minimum.reduceat(found, self.lengths - 1, axis=1)
        return np.where(np.isfinite(least), least, 0.0)

    @cached_property
    def _links(self) -> tuple[Numbers, Counts]:
        """Terms ``[term, levels, key, first, length]``, and every way's key: what ways of the same terms share."""
        key_of = [(way.widths, way.replicas.division, way.replicas.team) for way in self.ways]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(key_of))}
        crossing = self._crossing_bytes(gradient=False), self._crossing_bytes(gradient=True)
        terms = np.zeros((len(LinkTerms._fields), len(self.nears), len(numbers), self.layers, len(self.lengths)))
        for near, levels in enumerate(self.nears):
            for key, number in numbers.items():
                for term, each in enumerate(self._link(*key, levels, *crossing)):
                    terms[term, near, number] = each
        return terms, np.array([numbers[key] for key in key_of])

    def _link(
        self,
        widths: Sequence[int],
        division: Division,
        team: int,
        levels: frozenset[Level],
        forth: Numbers,
        back: Numbers,
    ) -> LinkTerms:
        # The next stage may have larger teams, of which each rank takes its part of a message.
        lanes = max(team, *(each.team for each in self.costs.teams))
        forth, back = forth / lanes, back / lanes
        rows, count = self.family.micro_batch_size, self.family.micro_batches
        every = [len(self.pool.all_of(kind)) for kind in self.pool.kinds]
        most = sum(every) if self.costs.mixes else max(every)
        ends = (Replicas(width, division) for width in (widths[0], widths[-1]))
        fullest = {pair for replicas in ends for pair in queues(self.family, replicas, most)}
        fullest = {(count, rows)} if self.costs.divisible else fullest
        least = min(each for _, each in fullest)
        quickest = [self._messages(sizes * least, sizes > 0, levels) for sizes in (forth, back)]
        busy = [
            np.minimum.reduce([count * self._messages(sizes * rows, sizes > 0, levels) for count, rows in fullest])
            for sizes in (forth, back)
        ]
        return LinkTerms(forth > 0, back > 0, *quickest, *busy)

    def _messages(self, sizes: Numbers, there: npt.NDArray[np.bool_], levels: frozenset[Level]) -> Numbers:
        every = [self.costs.links.messages_s(sizes, level) for level in sorted(levels)]
        return np.where(there, np.minimum.reduce(every), 0.0)


def _placements(every: Iterable[StageConfig], places: Places) -> Iterator[tuple[StageConfig, StateMove]]:
    """Yield the ways to run a stage, each wherever it may stand."""
    for way in every:
        for variant, move in enumerate(places.moves(way.taken, way.replicas.team)):
            if way.replicas.team == 1 or (move.after < places.pool.states).any():
                yield way._replace(variant=variant), move
