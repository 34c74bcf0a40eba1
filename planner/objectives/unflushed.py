"""Unflushed: the pipeline of a weight policy whose mini-batches follow each other soonest.

A pipeline that is never flushed has a period, from one mini-batch to the next once it is filled. No rank does with less
than its own work, and with micro-batches enough in flight the busiest one has nothing to wait for. Partitions are
therefore gone through in the order of their busiest stage, best first. Each is simulated from fill to drain, with
depths as deep as PA, PB and memory say; the first one behind whose busiest stage no period is left to be won ends the
search. An update that comes late has its reduction beside other micro-batches, and it then takes no longer than a
period.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, product
from typing import Any, ClassVar, NamedTuple

import numpy as np

from autopar.depths import Ahead, StageDepths
from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.formats.prediction import Alternative
from autopar.options.plan import PlanOptions
from autopar.ownership import Division, Replicas
from autopar.planner.assemble import plan_of, prediction, stage_records
from autopar.planner.candidate import Candidate, CandidateStage, Family, Lead, within
from autopar.planner.constraints import Question
from autopar.planner.costs import memoize
from autopar.planner.costs.durations import durations
from autopar.planner.costs.memory import Bytes, Parts, PeakTerms, peak_of
from autopar.planner.costs.model import CostModel, Peak
from autopar.planner.costs.rank_memory import peak_terms_of
from autopar.planner.infeasible import Fits, nothing_fits, remedies, size
from autopar.planner.objectives.partitions import PartitionTable
from autopar.planner.order import orders_by_kind
from autopar.planner.shares import by_speed
from autopar.planner.simulator.contention import DeadlockError
from autopar.planner.simulator.simulate import PipelineTimes, Simulator, outline, pipeline_times, trace_repetitions
from autopar.policies import POLICIES, Policy
from autopar.schedules.expand import expand

MOST_TRIED = 60
"""Partitions that are simulated, times the effort."""
MOST_SEEN = 10_000
"""Partitions that are held against the options, times the effort."""
MOST_IN_SPAN = 64
"""Mini-batches after which replicas that take turns on several stages have had equally many; programs are as long."""
ENOUGH = 1e-9
"""What the busiest stage may be below a period, relative, that is as good as its own."""


class Verdict(NamedTuple):
    """A candidate that fits, and how it goes on."""

    times: PipelineTimes
    candidate: Candidate


class _Search(NamedTuple):
    """What a search has found."""

    best: Verdict | None
    least_s: float
    """No partition's busiest stage does less."""
    attempts: int
    """Partitions that were simulated, or whose micro-batches were too few."""
    is_partial: bool


class PolicyMemory:
    """What candidates hold under one weight policy."""

    def __init__(self, costs: CostModel, policy: Policy, ahead: Ahead = "counted") -> None:
        """Count by a cost model; ``ahead`` is how far a policy that predicts does so."""
        self.costs, self.policy, self.ahead = costs, policy, ahead

    def peak_bytes(self, candidate: Candidate) -> list[int]:
        """Return the most that a replica of every stage holds, versions of its weights included."""
        found, stages = [], candidate.stages
        for at, (terms, leads, versions_bytes, passing_bytes) in enumerate(self.in_flight(candidate)):
            cuts, (first, stop, *_) = [later.stop for later in stages[at + 1 :]], stages[at]
            most = 0
            for rows, form in self.costs.unlike_replicas(stages[at]):
                memory, own = self.costs.memory[form], terms._replace(rows=rows)
                parts = steady(memory.parts(first, stop, rows, own.recompute, own.sharded), passing_bytes)
                most = max(most, int(peak_of(parts, own)) + memory.further(first, stop, own, cuts, leads))
            found.append(most + versions_bytes)
        return found

    def in_flight(self, candidate: Candidate) -> Iterator[tuple[PeakTerms, Sequence[Lead], int, int]]:
        """Yield what stages' memory depends on, leads to those before, and bytes of older versions and passing ones."""
        stages, micro_batches, periods = candidate.stages, candidate.micro_batches, [s.period for s in candidate.stages]
        shared = [holders for _, holders in self.costs.tied_between(stages)]
        every = self.policy.stage_depths([each.warmup for each in stages], micro_batches, shared, self.ahead)
        # Sends that nothing answers are waited for when their receivers are surely done.
        patience = self.policy.lead(periods, every) + self.policy.span(periods)
        most_in_flight = max(stage.in_flight for stage in stages)
        for at, (stage, depths) in enumerate(zip(stages, every, strict=True)):
            leads = stage.leads(stages[:at], most_in_flight)
            # The mini-batches of all that is in flight are loaded, and one more.
            loaded, waiting = stage.warmup + 2 * micro_batches, patience * micro_batches // stage.period
            terms = peak_terms_of(stage, micro_batches, leads[-1].turns if leads else 0, max(stage.shares))
            terms = terms._replace(micro_batches=loaded, patience=waiting)
            trained_bytes = self.trained_bytes(stage.first, stage.stop, self.costs.form_of(stage))
            kept, passing = self.versions(depths), self.policy.passing_buffers(depths)
            yield terms, leads, kept * trained_bytes, passing * trained_bytes

    def versions(self, depths: StageDepths) -> int:
        """Return how often a stage keeps the bytes of its trained parameters beside the newest and their gradients."""
        return self.policy.kept_versions(depths) - 1 + self.policy.buffers(depths) + depths.gradients - 1

    def peaks(self, candidate: Candidate) -> list[Peak]:
        """Return what every stage's largest replica holds, and its smallest device."""
        limits = (self.costs.limit_bytes(stage.devices) for stage in candidate.stages)
        return list(map(Peak, self.peak_bytes(candidate), limits))

    def shortfalls(self, candidate: Candidate) -> list[int]:
        """Return by how many bytes every stage exceeds its smallest device; at most 0 where it fits."""
        return [peak.short for peak in self.peaks(candidate)]

    @memoize
    def trained_bytes(self, first: int, stop: int, form: int) -> int:
        """Return the bytes of a stage's trained parameters."""
        return self.costs.trained_bytes(range(first, stop), form)

    def needed_bytes(self, candidate: Candidate) -> int:
        """Return the memory of a device with which every stage fits, what the process itself takes included."""
        costs = self.costs
        kinds = [[costs.kinds[costs.kind_of[device]] for device in stage.devices] for stage in candidate.stages]
        reserved = [max(kind.reserved_bytes for kind in own) for own in kinds]
        return max(peak + more for peak, more in zip(self.peak_bytes(candidate), reserved, strict=True))


class PolicyJudge(PolicyMemory):
    """Prices, fits and simulates candidates of one weight policy."""

    simulated_as: ClassVar[str | None] = None
    """The policy whose programs are simulated, if it is another."""

    def __init__(self, simulator: Simulator, options: PlanOptions, pipelines: int = 1) -> None:
        """Judge by a simulator's cost model, under the options' policy, those of a plan that has so many."""
        # On GPUs, waves that are sent whole wait in the memory of hosts.
        waiting = pipelines - 1 if simulator.costs.profile.device.type == "cpu" else 0
        policy = POLICIES[options.weight_policy]
        policy = policy.with_waves(options.wave, options.staleness, eager=options.eager, buffered_of=waiting)
        super().__init__(simulator.costs, policy, options.ahead or "counted")
        self.simulator, self.options, self.most_in_flight = simulator, options, options.wave

    def busy_s(self, family: Family, stage: CandidateStage) -> float:
        """Return what a stage's busiest replica does of every mini-batch; infinity where it fits in no way."""
        ways = (stage._replace(recompute=each) for each in self._recompute_sets(family, stage))
        if all(self.shortfalls(Candidate(*family, (way,)))[0] > 0 for way in ways):
            return math.inf
        costs, micro_batches = self.costs, family.micro_batches
        replicas = self.costs.unlike_replicas(stage).values()
        computing = max(costs.forward_s(stage, at) + costs.backward_s(stage, at, micro_batches) for at in replicas)
        alone = stage.replicas.width == 1
        exposed = 0.0 if alone else max(costs.replica_exposed_s(stage, at) for at in replicas)
        updating = costs.update_s(stage) + costs.profile.step_overhead_s
        if self.policy.sums_gradients or costs.flows.tied:
            return max(micro_batches * computing + updating, exposed)
        return (micro_batches * computing + exposed + updating) / stage.period

    def _recompute_sets(self, family: Family, stage: CandidateStage) -> Iterator[tuple[int, ...]]:
        """Yield the layers that a stage may recompute, fewest first: none, all that free memory, or both."""
        levels = self.costs.recompute_levels(family.micro_batch_size, self.costs.form_of(stage))
        for end in {"none": (0,), "full": (-1,), "auto": (0, -1)}[self.options.recompute]:
            yield within(levels[end], stage.first, stage.stop)

    def judge(self, family: Family, frame: Sequence[CandidateStage], below_s: float = math.inf) -> Verdict | None:
        """Return the best depths of a partition that fit and take less than ``below_s``; none if none do."""
        best: Verdict | None = None
        for candidate in self.candidates(family, frame):
            self.simulator.progress.again()
            limit = below_s if best is None else best.times.period_s * (1 - ENOUGH)
            judged = self.simulate(candidate)
            if judged.period_s < limit:
                best = Verdict(judged, candidate)
        return best

    def go_through(
        self, family: Family, partitions: Iterable[tuple[float, Sequence[CandidateStage]]], best: Verdict | None
    ) -> _Search:
        """Judge partitions, with the seconds of their busiest stage, the least of them first, as long as that pays."""
        least_s, tried = math.inf, 0
        for busiest_s, frame in partitions:
            least_s = min(least_s, busiest_s)
            if best is not None and busiest_s >= best.times.period_s * (1 - ENOUGH):
                break
            if tried == MOST_TRIED * self.options.effort:
                return _Search(best, least_s, tried, is_partial=True)
            tried += 1
            best = self.judge(family, frame, math.inf if best is None else best.times.period_s) or best
        return _Search(best, least_s, tried, is_partial=False)

    def simulate(self, candidate: Candidate) -> PipelineTimes:
        """Return how a candidate goes on; for ever, where replicas that take turns wait for each other."""
        times = durations(self.costs, candidate)
        settings = {"weight_policy": self.simulated_as or self.options.weight_policy, "ahead": self.ahead}
        plan = outline(self.costs, candidate).model_copy(update=settings)
        sharing = self.costs.sharing.among(candidate.used_devices)
        try:
            return pipeline_times(trace_repetitions(plan, expand(plan), times, sharing), plan)
        except DeadlockError:
            return PipelineTimes(math.inf, math.inf, math.inf)

    def plan_of(
        self,
        candidate: Candidate,
        weight_policy: str,
        notes: Sequence[str] = (),
        **differing: Any,  # noqa: ANN401
    ) -> Plan:
        """Return a candidate's plan under a weight policy, before it is predicted how that goes on."""
        records = stage_records(self.costs, candidate.stages)
        known, asked = prediction(self.costs, candidate, self.peaks(candidate)), self.options
        differing |= {"schedule": self.policy.schedule, "objective": asked.objective, "weight_policy": weight_policy}
        return plan_of(self.costs, candidate, asked, records, known, notes, **differing)

    def ways(self, family: Family, width: int) -> list[Replicas]:
        """Return how so many replicas may be run."""
        found = [Replicas(width)] if width <= family.micro_batch_size or self.costs.divisible else []
        if self.policy.takes_turns and width > 1 and family.micro_batches == 1 and not self.costs.flows.tied:
            found.append(Replicas(width, "round-robin"))
        if self.options.stages is None or width == 1:
            return found
        return [each for each in found if each.division == self.options.division]

    def candidates(self, family: Family, frame: Sequence[CandidateStage]) -> Iterator[Candidate]:
        """Yield a partition with depths that fit, the shallowest first: PA, PB, twice as deep.

        Replicas that take turns count as so many stages, and divide among them what is in flight.
        """
        periods = [stage.period for stage in frame]
        behind = [sum(periods[at:]) for at in range(len(periods))]
        shallow = tuple(shallow_depths(periods))
        deep = tuple(-(-(2 * most - periods[-1]) // own) for most, own in zip(behind, periods, strict=True))
        tried = set()
        for depths in (shallow, deep, tuple(2 * depth for depth in deep)):
            most = self.most_in_flight or max(depths)
            fitting = self._fitting(family, frame, [min(depth, most) for depth in depths])
            if fitting is not None and fitting not in tried:
                tried.add(fitting)
                yield fitting

    def _fitting(self, family: Family, frame: Sequence[CandidateStage], depths: Sequence[int]) -> Candidate | None:
        """Return a partition so deep, or as deep as its policy and memory admit; none where one in flight does not."""
        least = self.policy.least_micro_batches
        most = next((depth for depth in range(max(depths), 0, -1) if least(depth) <= family.micro_batches), 0)
        found = [min(depth, most) for depth in depths]
        ways = [tuple(self._recompute_sets(family, stage)) for stage in frame]
        while most:
            for again in zip(*ways, strict=True):
                placed = zip(frame, found, again, strict=True)
                stages = (stage._replace(warmup=depth, recompute=each) for stage, depth, each in placed)
                candidate = Candidate(*family, tuple(stages))
                shorts = self.shortfalls(candidate)
                if max(shorts) <= 0:
                    return candidate
            worst = max(range(len(shorts)), key=shorts.__getitem__)
            if found[worst] == 1:
                return None
            # Those behind may not have more in flight.
            most_in_flight = (found[worst] - 1) * frame[worst].period
            fewer = [
                max(1, min(depth, most_in_flight // stage.period)) for depth, stage in zip(found, frame, strict=True)
            ]
            found = [*found[:worst], *fewer[worst:]]
        return None


def steady(parts: Parts, passing_bytes: Bytes) -> Parts:
    """Return what a stage's peak is made of whose update goes on while others are in flight."""
    return parts._replace(peak=np.maximum(parts.peak, np.maximum(parts.update, passing_bytes)), update=0)


def policy_plan(question: Question, fits: Fits) -> Plan:
    """Return the plan of the options' weight policy with the least period, or the one of dictated stages.

    ``fits`` says whether there is a plan with other options.

    Raises:
        UsageError: no partition obeys the options.
        InfeasibleError: none fits the memory.
    """
    judge = PolicyJudge(question.simulator, question.options)
    found = _search(judge, question)
    if found.best is None:
        ample = Simulator(judge.costs.without(memory=True), progress=judge.simulator.progress)
        without_limit = PolicyJudge(ample, judge.options)
        raise _nothing(without_limit, _search(without_limit, question), fits)
    return _plan_of(judge, found)


def policy_fits(question: Question) -> bool:
    """Whether some pipeline of the options' weight policy fits the memory."""
    judge = PolicyJudge(question.simulator, question.options)
    parts = (
        (family, frame)
        for family, devices in product(question.families, _orders(judge, question))
        for _, frame in islice(_partitions(judge, question, family, devices), MOST_TRIED)
    )
    return any(next(judge.candidates(family, frame), None) is not None for family, frame in parts)


def _search(judge: PolicyJudge, question: Question) -> _Search:
    best: Verdict | None = None
    tried, is_partial, least_s = 0, False, math.inf
    asked = list(product(question.families, _orders(judge, question)))
    for position, (family, devices) in enumerate(asked):
        judge.simulator.progress(f"searching {judge.options.weight_policy}", position / len(asked))
        found = judge.go_through(family, _partitions(judge, question, family, devices), best)
        best, least_s = found.best, min(least_s, found.least_s)
        tried, is_partial = tried + found.attempts, is_partial or found.is_partial
    return _Search(best, least_s, tried, is_partial)


def _orders(judge: PolicyJudge, question: Question) -> list[tuple[int, ...]]:
    """Return the orders in which stages take devices; teams, and stages whose kinds are said, take those that suit."""
    fixed = question.fixed_stages
    suits = fixed is not None and (fixed.has_teams or fixed.types)
    return [tuple(question.device_order)] if suits else orders_by_kind(judge.costs)


def _partitions(
    judge: PolicyJudge, question: Question, family: Family, devices: Sequence[int]
) -> Iterator[tuple[float, tuple[CandidateStage, ...]]]:
    """Yield partitions and the seconds of their busiest stage, those of the least busy first."""
    costs, options = judge.costs, judge.options
    constraints, fixed_stages = question.constraints(1), question.fixed_stages
    ways, busy_s = partial(judge.ways, family), partial(judge.busy_s, family)
    table = PartitionTable(costs, family, devices, ways, busy_s, fixed_stages)
    for partition in islice(table.in_order(options.max_stages, MOST_IN_SPAN), MOST_SEEN * options.effort):
        if options.use_all and partition.width < len(costs.devices):
            continue
        stages = table.stages(partition)
        shares_parameter = costs.tied_between(stages) and not judge.policy.shares_parameters
        if shares_parameter or costs.replicated_single(stages):
            continue
        if fixed_stages is not None or constraints.broken(stages, costs.kind_of) is None:
            yield partition.busiest_s, stages


def _plan_of(judge: PolicyJudge, search: _Search) -> Plan:
    assert search.best is not None
    costs, candidate, how = judge.costs, search.best.candidate, search.best.times
    least_s = min(search.least_s, how.period_s)
    notes = [f"the pipeline fills in {how.fill_s:.3g} s and drains in {how.drain_s:.3g} s, once"]
    if search.is_partial:
        notes.append("not all partitions were simulated; `effort=10` goes on")
    plan = judge.plan_of(
        candidate,
        judge.options.weight_policy,
        notes,
        anneal_steps=judge.options.anneal_steps,
        synchronous_steps=judge.options.synchronous_steps,
        ahead=judge.ahead,
        alternatives=tuple(_data_parallelism(judge, candidate)),
    )
    seconds = zip(plan.predicted.forward_s, plan.predicted.backward_s, candidate.stages, strict=True)
    computed = sum(
        stage.replicas.width
        / stage.period
        * (candidate.micro_batches * (forward_s + backward_s) + costs.update_s(stage))
        for forward_s, backward_s, stage in seconds
    )
    bubble = max(0.0, 1 - computed / (len(candidate.devices) * how.period_s)) if how.period_s > 0 else 0.0
    found = {"step_s": how.period_s, "lower_bound_s": least_s, "bubble": bubble}
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update=found)})


def _data_parallelism(judge: PolicyJudge, candidate: Candidate) -> Iterator[Alternative]:
    """Yield one stage on all devices, with as many micro-batches, for comparison."""
    costs, family = judge.costs, candidate.family
    width = len(costs.devices)
    for replicas in judge.ways(family, width):
        shares = costs.shares(family.micro_batch_size, replicas)
        stage = CandidateStage.of(0, costs.layer_count, tuple(range(width)), shares, 1, replicas)
        stage = by_speed(costs, stage, family)
        if costs.replicated_single([stage]):
            continue
        name = f"pure data parallelism{', in turns' if replicas.period > 1 else ''}"
        best = judge.judge(family, [stage])
        if best is None:
            (short,) = judge.shortfalls(Candidate(*family, (stage,)))
            yield Alternative(name=name, infeasible=f"needs {size(short)} more")
        else:
            step_s, text = best.times.period_s, best.candidate.text()
            yield Alternative(name=name, step_s=step_s, stages=text, micro_batches=family.micro_batches)


def _nothing(judge: PolicyJudge, search: _Search, fits: Fits) -> Exception:
    """Return why there is no plan, given what there would be without a limit of memory."""
    options, costs, policy = judge.options, judge.costs, judge.options.weight_policy
    if search.best is not None:
        every = " on all of them" if options.use_all else ""
        return nothing_fits(
            f"no pipeline of policy {policy} of {costs.layer_count} layers fits {len(costs.devices)} devices{every}, "
            "with the weight versions that it keeps",
            remedies(costs, options, fits, judge.needed_bytes(search.best.candidate)),
        )
    if search.attempts:
        return UsageError(
            f"policy {policy} needs more micro-batches than the options admit; leave out `micro_batches`, or plan with "
            "fewer stages"
        )
    other: Division = "split" if options.division == "round-robin" else "round-robin"
    admits_other = options.stages is not None and fits(replace(options, division=other))
    or_otherwise = f", or `division={other!r}`" if admits_other else ""
    return UsageError(
        f"no pipeline of policy {policy} obeys the options"
        f"{'' if judge.policy.shares_parameters else ': its stages share no parameters'}; plan with `policy='sync'`"
        f"{or_otherwise}"
    )


def shallow_depths(periods: Sequence[int]) -> list[int]:
    """Return the mini-batches in flight on a replica of every stage, of which so many take turns.

    As many as keep all replicas from there on busy: PA, and PipeDream's NOAM (its section 3.2) where they take turns.

    >>> shallow_depths([3, 1, 2]), shallow_depths([1, 1, 1])
    ([2, 3, 1], [3, 2, 1])
    """
    return [-(-sum(periods[index:]) // own) for index, own in enumerate(periods)]
