"""PolicyJudge: the pipeline of a weight policy whose mini-batches follow each other soonest.

A pipeline that is never flushed has a period, from one mini-batch to the next once it is filled. No rank does with less
than its own work, and with micro-batches enough in flight the busiest one has nothing to wait for. Partitions are
therefore gone through in the order of their busiest stage, best first (:mod:`.partitions`). Each is simulated from fill
to drain, with depths as deep as PA, PB and memory say; the first one behind whose busiest stage no period is left to be
won ends the search. An update that comes late has its reduction beside other micro-batches, and it then takes no longer
than a period.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.plan import Division, Plan
from autopar.planner.assemble import plan_of, prediction, stage_record
from autopar.planner.candidate import Candidate, CandidateStage, Family, within
from autopar.planner.constraints import Constraints, FixedStages
from autopar.planner.costs.durations import durations
from autopar.planner.costs.links import Traffic
from autopar.planner.costs.memory import PeakTerms, peak_of
from autopar.planner.infeasible import size
from autopar.planner.objectives.partitions import PartitionTable
from autopar.planner.objectives.throughput import parameter_bytes, recompute_sets
from autopar.planner.options import PlanOptions
from autopar.planner.simulator.simulate import Simulator, skeleton
from autopar.planner.simulator.unflushed import PipelineTimes, pipeline_times, trace_unflushed
from autopar.policies import POLICIES, kept_versions, stage_depths
from autopar.schedules.check import ProgramError, check
from autopar.schedules.expand import expand

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
        costs = self.costs
        # Replicas on alike devices with as many rows are alike.
        kinds = map(costs.kind_of.__getitem__, stage.devices)
        replicas = {key: at for at, key in enumerate(zip(stage.shares, kinds, strict=True))}.values()
        computing = max(costs.forward_s(stage, at) + costs.backward_s(stage, at, micro_batches) for at in replicas)
        alone = len(stage.devices) == 1
        exposed = 0.0 if alone else max(costs.replica_exposed_s(stage, at) for at in replicas)
        updating = costs.update_s(stage) + costs.profile.step_overhead_s
        if self.policy.sums_gradients or costs.flows.tied:
            return max(micro_batches * computing + updating, exposed)
        return (micro_batches * computing + exposed + updating) / stage.turning

    def peak_bytes(self, candidate: Candidate) -> list[int]:
        """Return the most that a replica of every stage holds, versions of its weights included."""
        found, before = [], candidate.stages[0]
        shared = [holders for _, holders in self.costs.tied_between(candidate.stages)]
        in_flight = [stage.warmup for stage in candidate.stages]
        every = stage_depths(self.policy, in_flight, candidate.micro_batches, shared)
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
                lead = stage.lead(before, before.in_flight)
                terms = PeakTerms(rows, stage.warmup, loaded, len(stage.devices), lead, frozenset(stage.recompute))
                own = int(peak_of(steady, terms)) + versions * int(self.trained_bytes[stage.first, stage.stop])
                most = max(most, own)
            found.append(most)
            before = stage
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
        """Return how a candidate goes on; for ever, where replicas that take turns wait for each other."""
        times = durations(self.costs, candidate)
        flows = tuple(
            (producer, consumer, flow.gradients > 0)
            for producer, consumer, flow in self.costs.flows.exchanges(candidate.cuts)
        )
        tied = [holders for _, holders in self.costs.tied_between(candidate.stages)]
        plan = skeleton(candidate, flows, tied).model_copy(update={"weight_policy": self.options.policy})
        traffic = Traffic(self.costs.sharing, candidate.devices) if self.costs.sharing else None
        program = expand(plan)
        if any(stage.turning > 1 for stage in candidate.stages):
            try:
                check(program, plan)
            except ProgramError:
                return PipelineTimes(math.inf, math.inf, math.inf)
        return pipeline_times(trace_unflushed(plan, program, times, traffic), plan)

    def divisions(self, family: Family, width: int) -> list[Division]:
        """Return how so many replicas may divide micro-batches."""
        found: list[Division] = ["split"] if width <= family.micro_batch_size or self.costs.divisible else []
        if self.policy.takes_turns and width > 1 and family.micro_batches == 1 and not self.costs.flows.tied:
            found.append("round-robin")
        return found

    def _candidates(self, family: Family, frame: Sequence[CandidateStage]) -> Iterator[Candidate]:
        """Yield a partition with depths that fit, the shallowest first: PA, PB, twice as deep.

        Replicas that take turns count as so many stages, and divide among them what is in flight.
        """
        turning = [stage.turning for stage in frame]
        behind = [sum(turning[at:]) for at in range(len(turning))]
        shallow = tuple(-(-most // own) for most, own in zip(behind, turning, strict=True))
        deep = tuple(-(-(2 * most - turning[-1]) // own) for most, own in zip(behind, turning, strict=True))
        tried = set()
        for depths in (shallow, deep, tuple(2 * depth for depth in deep)):
            fitting = self._fitting(family, frame, depths)
            if fitting is not None and fitting not in tried:
                tried.add(fitting)
                yield fitting

    def _fitting(self, family: Family, frame: Sequence[CandidateStage], depths: Sequence[int]) -> Candidate | None:
        """Return a partition so deep, or as deep as its policy and memory admit; none where one in flight does not."""
        most = next((depth for depth in range(max(depths), 0, -1) if self._least(depth) <= family.micro_batches), 0)
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
            # Those behind may not have more in flight.
            most_in_flight = (found[worst] - 1) * frame[worst].turning
            fewer = [
                max(1, min(depth, most_in_flight // stage.turning)) for depth, stage in zip(found, frame, strict=True)
            ]
            found = [*found[:worst], *fewer[worst:]]
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
    costs = judge.costs
    divisions, busy_s = partial(judge.divisions, family), partial(judge.busy_s, micro_batches=family.micro_batches)
    table = PartitionTable(costs, family, divisions, busy_s, fixed_stages)
    for partition in table.in_order(options.max_stages):
        if options.use_all and partition.width < len(costs.devices):
            continue
        stages = table.stages(partition)
        shares_parameter = costs.tied_between(stages) and not judge.policy.shares_parameters
        if shares_parameter or costs.replicated_single(stages):
            continue
        if fixed_stages is not None or constraints.broken(stages, costs.kind_of) is None:
            yield partition.busiest_s, stages


def _plan_of(judge: PolicyJudge, best: _Verdict, least_s: float, *, is_partial: bool) -> Plan:
    costs, candidate, how = judge.costs, best.candidate, best.times
    predicted = prediction(costs, candidate, judge.peak_bytes(candidate))
    seconds = zip(predicted.forward_s, predicted.backward_s, candidate.stages, strict=True)
    computed = sum(
        len(stage.devices)
        / stage.turning
        * (candidate.micro_batches * (forward_s + backward_s) + costs.update_s(stage))
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
