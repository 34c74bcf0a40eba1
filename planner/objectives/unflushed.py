"""PolicyJudge: the pipeline of a weight policy whose mini-batches follow each other soonest.

A pipeline that is never flushed has a period, from one mini-batch to the next once it is filled. No rank does with less
than its own work of a mini-batch, its backwards, forwards, reduction and update:

    busy(stage) = T (forward + backward) + reduction behind the last backward + update

where an update that comes late has the reduction beside other micro-batches, which then takes no longer than a period;
and with micro-batches enough in flight the busiest rank has nothing to wait for. Partitions are therefore gone through
in the order of their busiest stage, best first: a table holds the least that is possible from each layer on with each
number of devices left. Each is simulated from fill to drain, with depths as deep as PA, PB and memory say; the first
one behind whose busiest stage no period is left to be won ends the search.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.plan import Plan
from autopar.planner.assemble import plan_of, prediction, stage_record
from autopar.planner.candidate import Candidate, CandidateStage, Family, within
from autopar.planner.constraints import Constraints, FixedStages
from autopar.planner.costs.durations import durations
from autopar.planner.costs.links import Traffic
from autopar.planner.costs.memory import PeakTerms, peak_of
from autopar.planner.infeasible import size
from autopar.planner.objectives.throughput import parameter_bytes, recompute_sets
from autopar.planner.options import PlanOptions
from autopar.planner.simulator.simulate import Simulator, skeleton
from autopar.planner.simulator.unflushed import PipelineTimes, pipeline_times, trace_unflushed
from autopar.policies import POLICIES, kept_versions, stage_depths
from autopar.schedules.expand import expand
from autopar.schedules.one_forward_one_backward import warmups

MOST_TRIED = 60
"""Partitions that are simulated, times the effort."""
ENOUGH = 1e-9
"""What the busiest stage may be below a period, relative, that is as good as its own."""


class _Verdict(NamedTuple):
    """A candidate that fits, and how it goes on."""

    times: PipelineTimes
    candidate: Candidate


class PolicyJudge:
    """Prices, fits and simulates candidates of one weight policy."""

    def __init__(self, simulator: Simulator, options: PlanOptions) -> None:
        """Judge by a simulator's cost model, under the options' policy."""
        self.simulator, self.costs, self.options = simulator, simulator.costs, options
        self.policy = POLICIES[options.policy]
        _, self.trained_bytes = parameter_bytes(self.costs)
        self.shortest: tuple[int, str] | None = None
        """By how many bytes the closest candidate does not fit, and where."""

    def busy_s(self, stage: CandidateStage, micro_batches: int) -> float:
        """Return what a stage's busiest replica does of every mini-batch, by itself."""
        costs, replicas = self.costs, range(len(stage.devices))
        computing = max(costs.forward_s(stage, at) + costs.backward_s(stage, at, micro_batches) for at in replicas)
        alone = len(stage.devices) == 1
        exposed = 0.0 if alone else max(costs.replica_exposed_s(stage, at) for at in replicas)
        updating = costs.update_s(stage) + costs.profile.step_overhead_s
        if self.policy.sums_gradients or costs.flows.tied:
            return max(micro_batches * computing + updating, exposed)
        return micro_batches * computing + exposed + updating

    def peak_bytes(self, candidate: Candidate) -> list[int]:
        """Return the most that a replica of every stage holds, versions of its weights included."""
        found, before = [], 0
        shared = [holders for _, holders in self.costs.tied_between(candidate.stages)]
        in_flight = [stage.warmup for stage in candidate.stages]
        every = stage_depths(self.policy, in_flight, candidate.micro_batches, shared, self.options.ahead or "counted")
        for stage, depths in zip(candidate.stages, every, strict=True):
            versions = kept_versions(self.policy, depths) - 1 + self.policy.buffers(depths) + depths.gradients - 1
            most = 0
            for rows, device in set(zip(stage.shares, stage.devices, strict=True)):
                parts = self.costs.memory[self.costs.kind_of[device]].parts(
                    stage.first, stage.stop, rows, frozenset(stage.recompute)
                )
                # An update goes on while others are in flight.
                steady = parts._replace(peak=np.maximum(parts.peak, parts.update), update=0)
                # The mini-batches of all that is in flight are loaded, and one more.
                loaded = stage.warmup + 2 * candidate.micro_batches
                lead = max(0, before - stage.warmup)
                terms = PeakTerms(rows, stage.warmup, loaded, len(stage.devices), lead, frozenset(stage.recompute))
                own = int(peak_of(steady, terms)) + versions * int(self.trained_bytes[stage.first, stage.stop])
                most = max(most, own)
            found.append(most)
            before = stage.warmup
        return found

    def judge(self, family: Family, frame: Sequence[CandidateStage], below_s: float = math.inf) -> _Verdict | None:
        """Return the best depths of a partition that fit and take less than ``below_s``; none if none do."""
        best: _Verdict | None = None
        for candidate in self._candidates(family, frame):
            limit = below_s if best is None else best.times.period_s * (1 - ENOUGH)
            judged = self.simulate(candidate)
            if judged.period_s < limit:
                best = _Verdict(judged, candidate)
        return best

    def simulate(self, candidate: Candidate) -> PipelineTimes:
        """Return how a candidate goes on."""
        times = durations(self.costs, candidate)
        flows = tuple(
            (producer, consumer, flow.gradients > 0)
            for producer, consumer, flow in self.costs.flows.exchanges(candidate.cuts)
        )
        tied = [holders for _, holders in self.costs.tied_between(candidate.stages)]
        how = {"weight_policy": self.options.policy, "ahead": self.options.ahead or "counted"}
        plan = skeleton(candidate, flows, tied).model_copy(update=how)
        traffic = Traffic(self.costs.sharing, candidate.devices) if self.costs.sharing else None
        return pipeline_times(trace_unflushed(plan, expand(plan), times, traffic), plan)

    def _candidates(self, family: Family, frame: Sequence[CandidateStage]) -> Iterator[Candidate]:
        """Yield a partition with depths that fit, the shallowest first: PA, PB, twice as deep."""
        shallow, deep = warmups(len(frame), 1, 2 * len(frame)).values()
        tried = set()
        for depths in (shallow, deep, tuple(2 * depth for depth in deep)):
            fitting = self._fitting(family, frame, depths)
            if fitting is not None and fitting not in tried:
                tried.add(fitting)
                yield fitting

    def _fitting(self, family: Family, frame: Sequence[CandidateStage], depths: Sequence[int]) -> Candidate | None:
        """Return a partition so deep, or as deep as its policy and memory admit; none where one in flight does not."""
        most = next((depth for depth in range(depths[0], 0, -1) if self._least(depth) <= family.micro_batches), 0)
        found = [min(depth, most) for depth in depths]
        while most:
            for recompute in recompute_sets(self.costs, family.micro_batch_size, self.options):
                stages = tuple(
                    stage._replace(
                        warmup=depth,
                        recompute=within(recompute[self.costs.kind_of[stage.devices[0]]], stage.first, stage.stop),
                    )
                    for stage, depth in zip(frame, found, strict=True)
                )
                candidate = Candidate(*family, stages)
                shorts = [
                    peak - self.costs.limit_bytes(stage.devices)
                    for peak, stage in zip(self.peak_bytes(candidate), stages, strict=True)
                ]
                if max(shorts) <= 0:
                    return candidate
            worst = max(range(len(shorts)), key=shorts.__getitem__)
            if found[worst] == 1:
                if self.shortest is None or shorts[worst] < self.shortest[0]:
                    self.shortest = shorts[worst], f"stage {worst} of {candidate.text()}"
                return None
            # Those behind may not be deeper.
            found = [min(depth, found[worst] - 1) if at >= worst else depth for at, depth in enumerate(found)]
        return None

    def _least(self, depth: int) -> int:
        return self.policy.least_micro_batches(depth)


def policy_plan(
    simulator: Simulator,
    families: Sequence[Family],
    constraints: Constraints,
    options: PlanOptions,
    fixed_stages: FixedStages | None,
) -> Plan:
    """Return the plan of the options' weight policy with the least period, or the one of dictated stages.

    Raises:
        UsageError: no partition obeys the options.
        InfeasibleError: none fits the memory.
    """
    judge = PolicyJudge(simulator, options)
    best: _Verdict | None = None
    tried, is_partial, least_s = 0, False, math.inf
    for position, family in enumerate(families):
        simulator.progress(f"searching {options.policy}", position / len(families))
        parts = _partitions(judge, family, constraints, options, fixed_stages)
        for number, (busiest_s, frame) in enumerate(parts):
            if not number:
                least_s = min(least_s, busiest_s)
            if best is not None and busiest_s >= best.times.period_s * (1 - ENOUGH):
                break
            if number == MOST_TRIED * options.effort:
                is_partial = True
                break
            tried += 1
            best = judge.judge(family, frame, math.inf if best is None else best.times.period_s) or best
    if best is None:
        raise _nothing(judge, tried)
    return _plan_of(judge, best, min(least_s, best.times.period_s), is_partial=is_partial)


def _partitions(
    judge: PolicyJudge,
    family: Family,
    constraints: Constraints,
    options: PlanOptions,
    fixed_stages: FixedStages | None,
) -> Iterator[tuple[float, tuple[CandidateStage, ...]]]:
    """Yield partitions and the seconds of their busiest stage, those of the least busy first."""
    table = _BusyTable(judge, family)
    if fixed_stages is not None:
        frame = table.frame(fixed_stages.cuts, fixed_stages.widths)
        if frame is not None:
            yield max(judge.busy_s(stage, family.micro_batches) for stage in frame), frame
        return
    for busiest_s, cuts, widths in table.in_order(options.max_stages):
        frame = table.frame(cuts, widths)
        if frame is None or (options.use_all and sum(widths) < len(judge.costs.devices)):
            continue
        if constraints.broken(frame, judge.costs.kind_of) is None:
            yield busiest_s, frame


class _BusyTable:
    """What stages of a family are busy with, and the least that is possible from a layer on."""

    def __init__(self, judge: PolicyJudge, family: Family) -> None:
        self._judge, self._family, self.costs = judge, family, judge.costs
        self._layers, self._devices = judge.costs.layer_count, len(judge.costs.devices)
        self._busy: dict[tuple[int, int, int, int], float] = {}
        # From a layer on, with so many devices used before it.
        self._least = np.full((self._layers + 1, self._devices + 1), np.inf)
        self._least[self._layers] = 0.0
        for first in reversed(range(self._layers)):
            for start in range(self._devices):
                self._least[first, start] = min(
                    max(busy_s, self._least[stop, start + width]) for stop, width, busy_s in self._stages(first, start)
                )

    def frame(self, cuts: Sequence[int], widths: Sequence[int]) -> tuple[CandidateStage, ...] | None:
        """Return stages of one micro-batch in flight; none where replicas have no rows, or may not be."""
        starts = [0, *accumulate(widths)]
        found = []
        for first, stop, start, width in zip([0, *cuts[:-1]], cuts, starts, widths, strict=False):
            stage = self._stage(first, stop, start, width)
            if stage is None:
                return None
            found.append(stage)
        shared = self.costs.tied_between(found) and not self._judge.policy.shares_parameters
        return None if self.costs.replicated_single(found) or shared else tuple(found)

    def in_order(self, most_stages: int | None) -> Iterator[tuple[float, tuple[int, ...], tuple[int, ...]]]:
        """Yield the busiest stage's seconds, cuts and widths of partitions, those of the least busy first.

        Of those alike, such with fewer stages and devices come first.
        """
        serial = 0
        ahead: list[tuple[float, int, int, int, tuple[int, ...], tuple[int, ...], float]] = []
        heappush(ahead, (float(self._least[0, 0]), 0, 0, serial, (), (), 0.0))
        while ahead:
            bound_s, count, start, _, cuts, widths, busiest_s = heappop(ahead)
            first = cuts[-1] if cuts else 0
            if math.isinf(bound_s):
                return
            if first == self._layers:
                yield bound_s, cuts, widths
                continue
            if count == most_stages or start == self._devices:
                continue
            for stop, width, busy_s in self._stages(first, start):
                worst_s = max(busiest_s, busy_s)
                bound = max(worst_s, float(self._least[stop, start + width]))
                serial += 1
                heappush(ahead, (bound, count + 1, start + width, serial, (*cuts, stop), (*widths, width), worst_s))

    def _stages(self, first: int, start: int) -> Iterator[tuple[int, int, float]]:
        """Yield (stop, width, seconds) of the stages from a layer on, behind so many devices."""
        for stop in range(first + 1, self._layers + 1):
            for width in range(1, self._devices - start + 1):
                yield stop, width, self._busy_s(first, stop, start, width)

    def _busy_s(self, first: int, stop: int, start: int, width: int) -> float:
        key = first, stop, start, width
        if key not in self._busy:
            stage = self._stage(*key)
            self._busy[key] = math.inf if stage is None else self._judge.busy_s(stage, self._family.micro_batches)
        return self._busy[key]

    def _stage(self, first: int, stop: int, start: int, width: int) -> CandidateStage | None:
        if width > self._family.micro_batch_size and not self.costs.divisible:
            return None
        shares = self.costs.shares(self._family.micro_batch_size, width)
        return CandidateStage(first, stop, tuple(range(start, start + width)), shares, 1)


def _plan_of(judge: PolicyJudge, best: _Verdict, least_s: float, *, is_partial: bool) -> Plan:
    costs, candidate, how = judge.costs, best.candidate, best.times
    predicted = prediction(costs, candidate, judge.peak_bytes(candidate))
    seconds = zip(predicted.forward_s, predicted.backward_s, candidate.stages, strict=True)
    computed = sum(
        len(stage.devices) * (candidate.micro_batches * (forward_s + backward_s) + costs.update_s(stage))
        for forward_s, backward_s, stage in seconds
    )
    bubble = max(0.0, 1 - computed / (len(candidate.devices) * how.period_s)) if how.period_s > 0 else 0.0
    notes = [f"the pipeline fills in {how.fill_s:.3g} s and drains in {how.drain_s:.3g} s, once"]
    if is_partial:
        notes.append("not all partitions were simulated; `effort=10` goes on")
    return plan_of(
        costs,
        candidate,
        judge.options,
        (stage_record(costs, stage) for stage in candidate.stages),
        predicted.model_copy(update={"step_s": how.period_s, "lower_bound_s": least_s, "bubble": bubble}),
        notes,
        schedule="1f1b",
        weight_policy=judge.options.policy,
        anneal_steps=judge.options.anneal_steps,
        synchronous_steps=judge.options.synchronous_steps,
        ahead=judge.options.ahead or "counted",
    )


def _nothing(judge: PolicyJudge, count: int) -> Exception:
    policy = judge.options.policy
    if judge.shortest is not None:
        short, where = judge.shortest
        return InfeasibleError(
            f"no pipeline of policy {policy} fits, with the weight versions that it keeps: {where} needs "
            f"{size(short)} more; plan with `policy='sync'`, or with more `memory_bytes`"
        )
    if count:
        return UsageError(
            f"policy {policy} needs more micro-batches than the options admit; leave out `micro_batches`, or plan with "
            "fewer stages"
        )
    return UsageError(
        f"no pipeline of policy {policy} obeys the options: replicas of its stages split micro-batches"
        f"{'' if judge.policy.shares_parameters else ', and stages share no parameters'}; plan with `policy='sync'`"
    )


_UNKNOWN = ("schedule", "chunks", "solver", "exact", "equal_widths", "deadline_s", "divisible", "max_candidates")


def check_policy(options: PlanOptions) -> PlanOptions:
    """Return the options with what a weight policy decides.

    Raises:
        UsageError: they ask for what no pipeline without flushes has.
    """
    usual = PlanOptions()
    for name in _UNKNOWN:
        value = getattr(options, name)
        if value != getattr(usual, name) and (name, value) != ("schedule", "1f1b"):
            raise UsageError(f"`{name}` does not go with `policy={options.policy!r}`; leave out one of them")
    if options.objective != "step":
        other = f"`objective={options.objective!r}`"
        raise UsageError(f"`policy={options.policy!r}` does not go with {other}; leave out one of them")
    if options.shard not in ("auto", "none"):
        raise UsageError(f"`shard={options.shard!r}`: no versions are kept of what replicas divide; leave out `shard`")
    return replace(options, shard="none", schedule="1f1b")
