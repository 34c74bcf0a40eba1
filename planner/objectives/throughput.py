"""Throughput: the asynchronous pipeline that takes least per mini-batch, by dynamic programming; exact.

With S what a stage takes per mini-batch by its layers first:stop, shape and devices, C what its messages to the next
shape take, and N the lanes (:class:`StageShape`) of it and all stages behind, from the last layer to the first:

    F(first, devices left, shape, N) = min over stop of  max( S, E(stop, devices left then, shape, N - lanes) )
    E(first, devices left, shape before, N) = min over shapes of  max( C, F(first, devices left, shape, N) )

N gives a stage's mini-batches in flight, hence its memory. As memory often does not bind, the first table is without N;
where what it finds does not fit, the whole one follows. Devices of a kind are taken in cluster order.

Mini-batches follow each other without a pause, and every stage is updated after each (Narayanan et al., "PipeDream:
Generalized Pipeline Parallelism for DNN Training", SOSP 2019). Once filled, the pipeline takes per mini-batch what the
busiest of these does:

    a device       forward, backward and update of its share; of replicas that take turns, each n-th mini-batch
    its reduction  one all-reduce of the stage's gradients; of n replicas that take turns, one in n mini-batches
    a queue        the largest message between two neighbours, forth or back, at the slowest link between them

Computing, reducing and sending go on at the same time. What skips a stage is handed on by it. With n replicas that take
turns (n = 1 where they split each mini-batch), and N of that stage and all behind it, a replica has k = ceil(N / n)
mini-batches in flight: PipeDream's NOAM for the first stage (its section 3.2), and as many as keep up with it behind.
It then holds k versions of its trained parameters, and k mini-batches' inputs and activations (section 3.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from operator import add
from typing import NamedTuple

import numpy as np

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.cluster import Cluster, Level
from autopar.formats.plan import Alternative, Division, Plan, Prediction
from autopar.formats.profile import Profile
from autopar.planner.assemble import plan_of, prediction, stage_record
from autopar.planner.candidate import Candidate, CandidateStage, Family, divisions_of, within
from autopar.planner.costs import memoize
from autopar.planner.costs.activations import Counts, Numbers
from autopar.planner.costs.memory import Parts, PeakTerms, peak_of
from autopar.planner.costs.model import UNLIMITED_BYTES, CostModel
from autopar.planner.infeasible import advice, any_plan_fits, size, throughput_remedies
from autopar.planner.options import PlanOptions
from autopar.planner.placement.pool import in_order


class StageShape(NamedTuple):
    """A stage but for its layers."""

    kind: int
    width: int
    division: Division = "split"

    @property
    def lanes(self) -> int:
        """How many mini-batches its replicas have at a time."""
        return self.width if self.division == "round-robin" else 1


def depths(lanes: Sequence[int]) -> list[int]:
    """Return the mini-batches in flight on a replica of every stage.

    >>> depths([3, 1, 2])
    [2, 3, 1]
    """
    return [-(-sum(lanes[index:]) // own) for index, own in enumerate(lanes)]


class StashCosts:
    """Prices of stages ``[first, stop]`` and boundaries of an asynchronous pipeline; a mini-batch is the batch."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self.reduced_bytes, self.trained_bytes = parameter_bytes(costs)
        """Of stages: gradients that its replicas reduce, and parameters that there are versions of."""

    def computing_s(self, shape: StageShape, first: int, recompute: frozenset[int] = frozenset()) -> Numbers:
        """Return what a device takes per mini-batch, of stages from a layer on, by their stop."""
        costs, adding = self.costs, self.costs.adding(1, shape.width)
        found = []
        for rows in sorted(set(costs.shares(costs.batch, shape.width, shape.division))):
            forward = np.array(costs.sums.forward(rows, kind=shape.kind))
            both = forward + np.array(costs.sums.backward(rows, adding, recompute, kind=shape.kind))
            found.append(both[first + 1 :] - both[first])
        own = np.maximum.reduce(found) + self._update_s(shape.kind, first)
        return np.asarray((costs.profile.step_overhead_s + own) / shape.lanes)

    def reducing_s(self, shape: StageShape, level: Level, first: int) -> Numbers:
        """Return what reductions take per mini-batch, of stages from a layer on, by their stop."""
        sizes = self.reduced_bytes[first, first + 1 :]
        return self.costs.links.collectives_s("all_reduce", sizes, shape.width, level) / shape.lanes

    def sending_s(self, cut: int, rows: Numbers, period: Numbers, level: Level) -> Numbers:
        """Return what messages of so many rows, one in ``period`` mini-batches, occupy the fullest queue at a cut."""
        seconds = np.zeros(rows.shape)
        for row_bytes in (each[cut] for each in self.costs.flows.crossing_bytes):
            if not np.isnan(row_bytes):
                sent = self.costs.links.messages_s((rows * row_bytes).ravel(), level).reshape(rows.shape)
                seconds = np.maximum(seconds, sent / period)
        return seconds

    def message(self, before: StageShape, after: StageShape) -> tuple[float, int]:
        """Return the rows of the largest message between two stages, and how many mini-batches there is one in."""
        costs = self.costs
        ends = [costs.shares(costs.batch, each.width, each.division) for each in (before, after)]
        period = int(np.lcm(before.lanes, after.lanes))
        if costs.divisible or before.division == after.division == "round-robin":
            return costs.batch, period
        split = [shares for shares, each in zip(ends, (before, after), strict=True) if each.division == "split"]
        edges = np.unique(np.concatenate([[0.0], *(np.cumsum(shares) for shares in split)]))
        return float(np.diff(edges).max()), period

    def stage_bytes(self, rows: float, kind: int, recompute: frozenset[int]) -> tuple[Numbers, Numbers]:
        """Return stages' bytes with one mini-batch in flight, and what each further one adds, ``[first, stop]``."""
        one, more = _bytes(self.costs.memory[kind].by_stop(rows, recompute), rows)
        return one, more + self.trained_bytes

    def peak_bytes(self, stage: CandidateStage) -> int:
        """Return the most that a replica of a stage holds."""
        first, stop, recompute = stage.first, stage.stop, frozenset(stage.recompute)
        kinds = [self.costs.kind_of[device] for device in stage.devices]
        found = []
        for rows, kind in sorted(set(zip(stage.shares, kinds, strict=True))):
            one, more = _bytes(self.costs.memory[kind].parts(first, stop, rows, recompute), rows)
            found.append(int(one) + (stage.warmup - 1) * (int(more) + int(self.trained_bytes[first, stop])))
        return max(found)

    def busy(self, candidate: Candidate) -> dict[str, float]:
        """Return the seconds per mini-batch of everything that may bind, by its name."""
        found: dict[str, float] = {}
        stages = candidate.stages
        for index, stage in enumerate(stages):
            level, at = self.costs.links.level(stage.devices), stage.stop - stage.first - 1
            shapes = self.shapes(stage)
            computing = [self.computing_s(shape, stage.first, frozenset(stage.recompute))[at] for shape in shapes]
            found[f"computing in stage {index}"] = float(max(computing))
            if len(stage.devices) > 1:
                reducing = self.reducing_s(shapes[0], level, stage.first)[at]
                found[f"gradients of stage {index}"] = float(reducing)
        for index, (before, after) in enumerate(pairwise(stages)):
            rows, period = self.message(self.shapes(before)[0], self.shapes(after)[0])
            level = self.costs.links.level((*before.devices, *after.devices))
            sent = self.sending_s(before.stop, np.array([float(rows)]), np.array([float(period)]), level)
            found[f"messages between stages {index} and {index + 1}"] = float(sent[0])
        for index, holders in self.costs.tied_between(stages):
            devices = [device for holder in holders for device in stages[holder].devices]
            often = min(self.shapes(stages[holder])[0].lanes for holder in holders)
            name = self.costs.profile.tied[index].parameter
            found[f"gradients of {name}"] = self.costs.tied_s(index, devices) / often
        return found

    def shapes(self, stage: CandidateStage) -> list[StageShape]:
        """Return a stage's shape, one for each kind of its devices."""
        kinds = sorted({self.costs.kind_of[device] for device in stage.devices})
        return [StageShape(kind, len(stage.devices), stage.division) for kind in kinds]

    def _update_s(self, kind: int, first: int) -> Numbers:
        sums = np.array(self.costs.layers[kind].update_sums)
        if not self.costs.flows.tied:
            return np.asarray(sums[first + 1 :] - sums[first])
        stops = range(first + 1, self.costs.layer_count + 1)
        return np.array([self.costs.updating_s(first, stop, 1, "node", "none", kind) for stop in stops])


def _bytes(parts: Parts, rows: float) -> tuple[Numbers, Numbers]:
    """Return what one mini-batch in flight takes, and what each further one adds, but for its version of parameters.

    The update goes on while others are in flight, so that what it holds counts as a mini-batch's peak. One mini-batch
    more than in flight has its inputs loaded.
    """
    inputs = np.ceil(rows * np.asarray(parts.inputs))
    steady = parts._replace(peak=np.maximum(parts.peak, parts.update), update=0, inputs=0)
    # Of more mini-batches than are in flight, so that gradients are always there; the stage before has one more.
    peak = np.asarray(peak_of(steady, PeakTerms(rows, 1, 3, 1, 1)), dtype=np.float64)
    return peak + 2 * inputs, np.asarray(parts.activations + inputs, dtype=np.float64)


def parameter_bytes(costs: CostModel) -> tuple[Numbers, Numbers]:
    """Return reduced and trained bytes, ``[first, stop]``."""
    sums = np.concatenate([[0.0], np.cumsum([float(layer.trainable_bytes) for layer in costs.profile.layers])])
    reduced = np.subtract.outer(sums, sums).T[:-1].copy()
    trained = reduced.copy()
    for tied in costs.flows.tied:
        if tied.trainable:
            held = np.zeros(costs.layer_count + 1)
            held[np.array(tied.layers) + 1] = 1
            counts = np.cumsum(held)
            within = np.maximum(0.0, np.subtract.outer(counts, counts).T[:-1])
            again = np.maximum(0.0, within - 1)
            trained -= tied.bytes * again
            # What other stages hold, too, is reduced with them.
            reduced -= tied.bytes * np.where(within < len(tied.layers), within, again)
    return np.maximum(0.0, reduced), np.maximum(0.0, trained)


MOST_WORK = 2 * 10**9
"""Array elements; about ten seconds."""
_LOOKING_UP = 500
"""What finding a level takes, in the time of array elements."""


class FastestPipeline(NamedTuple):
    """The best candidate, and what no plan takes less than per mini-batch, but for tied parameters' reductions."""

    candidate: Candidate
    least_s: float


def quickest(prices: StashCosts, options: PlanOptions) -> FastestPipeline | None:
    """Return the best candidate that fits; none if none does.

    Raises:
        UsageError: the tables would take too long.
    """
    found = _StageTable(prices, options, with_memory_limit=False).best()
    stages = () if found is None else found.candidate.stages
    if any(prices.peak_bytes(stage) > prices.costs.limit_bytes(stage.devices) for stage in stages):
        return _StageTable(prices, options, with_memory_limit=True).best()
    return found


def recompute_sets(costs: CostModel, rows: int, options: PlanOptions) -> list[dict[int, frozenset[int]]]:
    """Return the sets of layers to recompute, by kind: none, all that free memory, or both."""
    every = {kind: costs.recompute_levels(rows, kind) for kind in sorted(set(costs.kind_of))}
    ends = {"none": (0,), "full": (-1,), "auto": (0, -1)}[options.recompute]
    return [{kind: levels[end] for kind, levels in every.items()} for end in ends]


class _StageTable:
    def __init__(self, prices: StashCosts, options: PlanOptions, *, with_memory_limit: bool) -> None:
        self.prices, self.costs, self.with_memory_limit = prices, prices.costs, with_memory_limit
        self.recompute = recompute_sets(self.costs, self.costs.batch, options)[: None if with_memory_limit else 1]
        self.pool = in_order(self.costs.kind_of)
        self.layers = self.costs.layer_count
        self.shapes = [
            StageShape(kind, width, division)
            for kind in self.pool.kinds
            for width in range(1, self.pool.kind_devices_left(0, kind) + 1)
            for division in stash_divisions(self.costs, width)
        ]
        self.lanes = len(self.costs.devices) + 1 if with_memory_limit else 1
        self.one_node = self.costs.links.level(range(len(self.costs.devices))) == "node"
        self._check()
        self.levels: list[Level] = []
        moves = [self.pool.moves(shape.kind, shape.width)[0] for shape in self.shapes]
        self.states = [np.flatnonzero(after >= 0) for after in moves]
        """Those in which a shape's devices are left, ascending; by shape, as all that follows."""
        self.after = [after[after >= 0] for after in moves]
        each = zip(self.shapes, self.states, strict=True)
        self.taken = [[self.pool.devices(at, *shape[:2]) for at in states.tolist()] for shape, states in each]
        self.stage_level = [np.array([self._level(devices) for devices in taken]) for taken in self.taken]
        self.link_level = self._link_levels()
        messages = [[prices.message(before, after) for after in self.shapes] for before in self.shapes]
        self.rows, self.periods = np.array(messages, dtype=np.float64).transpose(2, 0, 1)
        self.depth = list(map(self._depths, self.shapes, self.taken)) if with_memory_limit else []
        shape = (self.layers, self.pool.states, len(self.shapes), self.lanes)
        self.stages = np.full(shape, np.inf)
        """F."""
        self.behind = np.full((self.layers + 1, *shape[1:]), np.inf)
        """E, by the shape before."""
        ended = slice(self.pool.empty, None) if options.use_all else slice(None)
        self.behind[self.layers, ended, :, 0] = 0.0
        for first in reversed(range(self.layers)):
            self._fill(first)

    def best(self) -> FastestPipeline | None:
        """Return the best candidate; none if nothing fits."""
        least = float(self.stages[0, 0].min())
        if not np.isfinite(least):
            return None
        number, lanes = map(int, np.unravel_index(self.stages[0, 0].argmin(), self.stages[0, 0].shape))
        first = state = 0
        placed: list[CandidateStage] = []
        while True:
            shape, at = self.shapes[number], int(np.searchsorted(self.states[number], state))
            left = lanes - shape.lanes if self.with_memory_limit else 0
            stop = first + 1 + int(self._ending(first, number)[:, at, left].argmin())
            placed.append(self._stage(first, stop, shape, state))
            if stop == self.layers:
                break
            first, state, lanes = stop, int(self.after[number][at]), left
            number = int(self._with_messages(stop)[state, number, :, left].argmin())
        flights = depths([stage.turning for stage in placed])
        stages = tuple(self._recomputing(*each) for each in zip(placed, flights, strict=True))
        return FastestPipeline(Candidate(1, self.costs.batch, "1f1b", stages), least)

    def _stage(self, first: int, stop: int, shape: StageShape, state: int) -> CandidateStage:
        """Return a stage of a shape on the next devices in a state, with one mini-batch in flight."""
        shares = self.costs.shares(self.costs.batch, shape.width, shape.division)
        devices = self.pool.devices(state, shape.kind, shape.width)
        return CandidateStage(first, stop, devices, shares, 1, division=shape.division)

    def _recomputing(self, stage: CandidateStage, depth: int) -> CandidateStage:
        """Return a stage so deep with the least recomputation that fits, or the first."""
        kind = self.costs.kind_of[stage.devices[0]]
        sets = (within(every[kind], stage.first, stage.stop) for every in self.recompute)
        ways = [stage._replace(warmup=depth, recompute=recompute) for recompute in sets]
        limit = self.costs.limit_bytes(stage.devices)
        return next((way for way in ways if self.prices.peak_bytes(way) <= limit), ways[0])

    def _fill(self, first: int) -> None:
        for number, shape in enumerate(self.shapes):
            own, least = shape.lanes if self.with_memory_limit else 0, self._ending(first, number).min(axis=0)
            self.stages[first, self.states[number], number, own:] = least[:, : self.lanes - own]
        self.behind[first] = self._with_messages(first).min(axis=2)

    def _ending(self, first: int, number: int) -> Numbers:
        """Return, for a stage from a layer on, ``[stop, state, lanes behind]``."""
        shape, levels = self.shapes[number], self.stage_level[number]
        behind = self.behind[first + 1 :, self.after[number], number]
        stages = np.full(behind.shape, np.inf)
        reducing = np.stack([self.prices.reducing_s(shape, level, first) for level in self.levels])
        for way, recompute in enumerate(self.recompute):
            computing = self.prices.computing_s(shape, first, recompute[shape.kind])
            own = np.maximum(computing, reducing)[levels].T[:, :, np.newaxis]
            if self.with_memory_limit:
                needed = -(-(np.arange(self.lanes) + shape.lanes) // shape.lanes)
                deepest = self.depth[number][way][:, first, first + 1 :].T[:, :, np.newaxis]
                own = np.where(needed <= deepest, own, np.inf)
            stages = np.minimum(stages, own)
        return np.asarray(np.maximum(stages, behind))

    def _with_messages(self, first: int) -> Numbers:
        """Return, for all that begins with a layer, ``[state, shape before, shape, lanes]``."""
        sent = np.stack([self.prices.sending_s(first, self.rows, self.periods, level) for level in self.levels])
        shapes = np.arange(len(self.shapes))
        between = sent[self.link_level, shapes[:, np.newaxis], shapes]
        return np.asarray(np.maximum(between[..., np.newaxis], self.stages[first][:, np.newaxis]))

    @memoize
    def _level(self, devices: tuple[int, ...]) -> int:
        """Return the number of the level that connects some devices."""
        level = self.costs.links.level(devices)
        if level not in self.levels:
            self.levels.append(level)
        return self.levels.index(level)

    def _link_levels(self) -> Counts:
        """Return the slowest level between two stages, ``[state between, shape before, shape]``."""
        found = np.zeros((self.pool.states, len(self.shapes), len(self.shapes)), dtype=np.int64)
        if self.one_node:
            return found
        for one, every in enumerate(self.taken):
            for taken, after in zip(every, self.after[one].tolist(), strict=True):
                for other, (kind, width, _) in enumerate(self.shapes):
                    if self.pool.kind_devices_left(after, kind) >= width:
                        found[after, one, other] = self._level((*taken, *self.pool.devices(after, kind, width)))
        return found

    def _depths(self, shape: StageShape, groups: Sequence[tuple[int, ...]]) -> list[Numbers]:
        """Return, for each way to recompute, the most in flight that fit, ``[state, first, stop]``."""
        limits = np.array([self.costs.limit_bytes(devices) for devices in groups])
        found = []
        for recompute in self.recompute:
            deepest = []
            for rows in sorted(set(self.costs.shares(self.costs.batch, shape.width, shape.division))):
                one, more = self.prices.stage_bytes(rows, shape.kind, recompute[shape.kind])
                room = limits[:, np.newaxis, np.newaxis] - one
                deepest.append(np.where(room >= 0, 1 + np.maximum(0.0, room) // np.maximum(1.0, more), 0.0))
            found.append(np.minimum.reduce(deepest))
        return found

    def _check(self) -> None:
        shapes, states = len(self.shapes), self.pool.states
        work = self.layers * states * shapes * self.lanes * (self.layers / 2 + shapes)
        work += _LOOKING_UP * states * shapes**2 * (not self.one_node)
        if work > MOST_WORK:
            within = " within their memory" if self.with_memory_limit else ""
            raise UsageError(
                f"`objective='throughput'`: {self.layers} layers on {len(self.costs.devices)} devices{within} take "
                f"tables of {work:.0e} numbers, more than {MOST_WORK:.0e}; narrow it with fewer `gpus`"
            )


def stash_divisions(costs: CostModel, width: int) -> list[Division]:
    """Return how so many replicas may divide mini-batches, of which there are always enough to take turns."""
    return divisions_of(Family(width, costs.batch, "1f1b"), width, divisible=costs.divisible)


def throughput_plan(profile: Profile, cluster: Cluster, options: PlanOptions) -> Plan:
    """Return the asynchronous pipeline that takes least per mini-batch, within the memory of every device.

    Raises:
        UsageError: the tables would take too long.
        InfeasibleError: nothing fits the memory, or uses all devices.
    """
    costs = CostModel(profile, cluster, replace(options, gpus=options.gpus or len(cluster.devices)))
    prices = StashCosts(costs)
    found = quickest(prices, options)
    if found is None:
        raise _infeasible(costs, options)
    made = stash_plan(prices, found.candidate, options, found.least_s)
    return made.model_copy(update={"alternatives": tuple(_alternatives(prices))})


def stash_plan(
    prices: StashCosts, candidate: Candidate, options: PlanOptions, least_s: float, notes: Iterable[str] = ()
) -> Plan:
    """Return the plan of an asynchronous pipeline, priced by :class:`StashCosts`."""
    costs = prices.costs
    busy = prices.busy(candidate)
    binding, step_s = max(busy.items(), key=lambda each: each[1])
    plan = plan_of(
        costs,
        candidate,
        options,
        (stage_record(costs, stage) for stage in candidate.stages),
        prediction(costs, candidate, map(prices.peak_bytes, candidate.stages)),
        (*notes, f"bound by {binding}", *_latency_notes(prices, candidate, step_s)),
        schedule="1f1b",
        objective="throughput",
        weight_policy="stash",
    )
    bubble = _bubble(plan.predicted, candidate, step_s)
    known = {"step_s": step_s, "lower_bound_s": min(least_s, step_s), "bubble": bubble}
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update=known)})


def _bubble(prediction: Prediction, candidate: Candidate, step_s: float) -> float:
    """Return the share of the replicas' time in which they compute nothing."""
    computed = sum(
        (forward_s + backward_s) * (1 if stage.division == "round-robin" else len(stage.devices))
        for forward_s, backward_s, stage in zip(
            prediction.forward_s, prediction.backward_s, candidate.stages, strict=True
        )
    )
    return max(0.0, 1 - computed / (len(candidate.devices) * step_s)) if step_s > 0 else 0.0


def _latency_notes(prices: StashCosts, candidate: Candidate, step_s: float) -> list[str]:
    """Say where transfers take so long that what is in flight does not cover a mini-batch's way there and back."""
    trip_s, longest = 0.0, 0.0
    busy = prices.busy(candidate)
    for index in reversed(range(len(candidate.stages))):
        stage = candidate.stages[index]
        lanes = prices.shapes(stage)[0].lanes
        trip_s += busy[f"computing in stage {index}"] * lanes
        if index + 1 < len(candidate.stages):
            after = prices.shapes(candidate.stages[index + 1])[0]
            _, period = prices.message(prices.shapes(stage)[0], after)
            trip_s += 2 * period * busy[f"messages between stages {index} and {index + 1}"]
        longest = max(longest, trip_s / (stage.warmup * lanes))
    if longest <= step_s * (1 + 1e-9):
        return []
    return [f"with so few in flight, a mini-batch's way there and back may make it {longest:.4g} s per mini-batch"]


def _alternatives(prices: StashCosts) -> list[Alternative]:
    """Return pure data parallelism, for comparison."""
    costs = prices.costs
    width = len(costs.devices)
    found = []
    for division in stash_divisions(costs, width):
        shares = costs.shares(costs.batch, width, division)
        stage = CandidateStage(0, costs.layer_count, tuple(range(width)), shares, 1, division=division)
        candidate = Candidate(1, costs.batch, "1f1b", (stage,))
        short = prices.peak_bytes(stage) - costs.limit_bytes(stage.devices)
        name = f"pure data parallelism{', in turns' if division == 'round-robin' else ''}"
        if short > 0:
            found.append(Alternative(name=name, infeasible=f"needs {size(short)} more"))
        else:
            step_s = max(prices.busy(candidate).values())
            found.append(Alternative(name=name, step_s=step_s, stages=candidate.text(), micro_batches=1))
    return found


def _infeasible(costs: CostModel, options: PlanOptions) -> InfeasibleError:
    every = " on all of them" if options.use_all else ""
    ample = CostModel(costs.profile, costs.cluster, replace(options, memory_bytes=UNLIMITED_BYTES))
    prices = StashCosts(ample)
    found, needed = quickest(prices, options), None
    if found is not None:
        stages = found.candidate.stages
        reserved = (max(ample.kinds[ample.kind_of[each]].reserved_bytes for each in stage.devices) for stage in stages)
        needed = max(map(add, map(prices.peak_bytes, stages), reserved))
    return InfeasibleError(
        f"no asynchronous pipeline of {costs.layer_count} layers fits {len(costs.devices)} devices{every}, with the "
        f"weight versions that it keeps; {advice(throughput_remedies(costs, options, partial(_fits, costs), needed))}"
    )


def _fits(costs: CostModel, options: PlanOptions) -> bool:
    """Whether a plan fits with other options, or a synchronous one if that is the objective."""
    if options.objective == "step":
        return any_plan_fits(costs, options)
    return quickest(StashCosts(CostModel(costs.profile, costs.cluster, options)), options) is not None
