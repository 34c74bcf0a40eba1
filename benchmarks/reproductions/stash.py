"""StashCosts: what an asynchronous pipeline takes per mini-batch, priced as planners in papers do: by its busiest part.

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
autopar's own plans are simulated instead (:mod:`autopar.planner.objectives.unflushed`).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from autopar.formats.cluster import Level
from autopar.formats.plan import Plan
from autopar.formats.prediction import Prediction
from autopar.hardware.topology import Place
from autopar.options.plan import PlanOptions
from autopar.ownership import Division, Replicas
from autopar.planner.assemble import plan_of, prediction, stage_records
from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.costs.activations import Numbers
from autopar.planner.costs.layers import Site
from autopar.planner.costs.memory import Parts, PeakTerms, peak_of
from autopar.planner.costs.model import CostModel, Peak


class StageShape(NamedTuple):
    """A stage but for its layers."""

    kind: int
    width: int
    division: Division = "split"

    @property
    def lanes(self) -> int:
        """How many mini-batches its replicas have at a time."""
        return Replicas(self.width, self.division).period


class StashCosts:
    """Prices of stages ``[first, stop]`` and boundaries of an asynchronous pipeline; a mini-batch is the batch."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self.reduced_bytes, self.trained_bytes = parameter_bytes(costs)
        """Of stages: gradients that its replicas reduce, and parameters that there are versions of."""

    def computing_s(self, shape: StageShape, first: int, recompute: frozenset[int] = frozenset()) -> Numbers:
        """Return what a device takes per mini-batch, of stages from a layer on, by their stop."""
        costs, adding, site = self.costs, self.costs.adding(1, shape.width), Site(form=shape.kind)
        found = []
        for rows in sorted(set(costs.shares(costs.batch, Replicas(shape.width, shape.division)))):
            forward = np.array(costs.sums.forward(rows, site))
            both = forward + np.array(costs.sums.backward(rows, adding, site, recompute))
            found.append(both[first + 1 :] - both[first])
        own = np.maximum.reduce(found) + self._update_s(shape.kind, first)
        return np.asarray((costs.profile.step_overhead_s + own) / shape.lanes)

    def reducing_s(self, shape: StageShape, place: Place, first: int) -> Numbers:
        """Return what reductions take per mini-batch, of stages from a layer on, by their stop."""
        sizes = self.reduced_bytes[first, first + 1 :]
        return self.costs.links.collectives_s("all_reduce", sizes, place) / shape.lanes

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
        ends = [costs.shares(costs.batch, Replicas(each.width, each.division)) for each in (before, after)]
        period = int(np.lcm(before.lanes, after.lanes))
        if costs.divisible or before.division == after.division == "round-robin":
            return costs.batch, period
        split = [shares for shares, each in zip(ends, (before, after), strict=True) if each.division == "split"]
        edges = np.unique(np.concatenate([[0.0], *(np.cumsum(shares) for shares in split)]))
        return float(np.diff(edges).max()), period

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
            place, at = self.costs.links.place(stage.devices), stage.stop - stage.first - 1
            shapes = self.shapes(stage)
            computing = [self.computing_s(shape, stage.first, frozenset(stage.recompute))[at] for shape in shapes]
            found[f"computing in stage {index}"] = float(max(computing))
            if len(stage.devices) > 1:
                reducing = self.reducing_s(shapes[0], place, stage.first)[at]
                found[f"gradients of stage {index}"] = float(reducing)
        for index, (before, after) in enumerate(pairwise(stages)):
            rows, period = self.message(self.shapes(before)[0], self.shapes(after)[0])
            level = self.costs.links.level((*before.devices, *after.devices))
            sent = self.sending_s(before.stop, np.array([float(rows)]), np.array([float(period)]), level)
            found[f"messages between stages {index} and {index + 1}"] = float(sent[0])
        for index, holders in self.costs.tied_between(stages):
            sharing = [stages[holder] for holder in holders]
            often = min(self.shapes(stages[holder])[0].lanes for holder in holders)
            name = self.costs.profile.tied[index].parameter
            found[f"gradients of {name}"] = self.costs.tied_s(index, sharing) / often
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
        return np.array([self.costs.updating_s(first, stop, Place(), "none", kind) for stop in stops])


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


def stash_plan(
    prices: StashCosts, candidate: Candidate, options: PlanOptions, least_s: float, notes: Iterable[str] = ()
) -> Plan:
    """Return the plan of an asynchronous pipeline, priced by :class:`StashCosts`."""
    costs = prices.costs
    busy = prices.busy(candidate)
    peaks = [Peak(prices.peak_bytes(each), costs.limit_bytes(each.devices)) for each in candidate.stages]
    binding, step_s = max(busy.items(), key=lambda each: each[1])
    plan = plan_of(
        costs,
        candidate,
        options,
        stage_records(costs, candidate.stages),
        prediction(costs, candidate, peaks),
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
