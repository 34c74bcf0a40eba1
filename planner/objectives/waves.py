"""Waves: plans of several pipelines that train a model together, each on devices of its own (weight policy wsp).

Where they are not dictated, HetPipe's policies deal devices to them, and each one's partitions are gone through, those
of the least busy stage first, from HetPipe's own on. Each pipeline gets depths as if it were alone, within the memory
that waves leave; then all are simulated together, from their fill to their drain. Their period is the slowest one's:
no pipeline can be ahead of it by more than its staleness admits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from operator import add
from typing import NamedTuple

from autopar.errors import UsageError
from autopar.formats.pipelines import joined
from autopar.formats.plan import Plan
from autopar.formats.prediction import Alternative
from autopar.options.plan import MOST_WAVE, PlanOptions
from autopar.ownership import SINGLE
from autopar.planner.assemble import plan_of, prediction, stage_records
from autopar.planner.candidate import Candidate, CandidateStage, Family, place
from autopar.planner.constraints import Question
from autopar.planner.costs.durations import plan_durations
from autopar.planner.infeasible import Fits, nothing_fits, remedies
from autopar.planner.objectives.partitions import PartitionTable
from autopar.planner.objectives.unflushed import MOST_SEEN, PolicyJudge
from autopar.planner.peers import hetpipe
from autopar.planner.peers.prices import Prices
from autopar.planner.simulator.simulate import pipeline_times, trace_unflushed
from autopar.policies import WRITTEN_BUFFERS
from autopar.schedules.expand import expand


class WavesJudge(PolicyJudge):
    """Prices, fits and simulates pipelines of a plan that has several."""

    simulated_as = "stash"


class _Pipelines(NamedTuple):
    """Pipelines that fit, and how they go on together."""

    name: str
    plan: Plan
    candidates: tuple[Candidate, ...]

    @property
    def sample_s(self) -> float:
        """Seconds for as many samples as one pipeline's mini-batch has."""
        return self.plan.predicted.step_s / len(self.candidates)


def waves_plan(question: Question, fits: Fits) -> Plan:
    """Return the plan of dictated pipelines, or of those that train most samples per second.

    Devices are dealt to pipelines by HetPipe's policies (:mod:`autopar.planner.peers.hetpipe`). Each pipeline is cut as
    HetPipe does, and as is found by going through its partitions, those of the least busy stage first.

    Args:
        question: what is asked.
        fits: says whether there is a plan with other options.

    Raises:
        UsageError: the model, or the options, have what several pipelines do not train.
        InfeasibleError: no pipelines fit the memory.
    """
    family = _family(question)
    if question.pipelines:
        options, frames = _dictated(question, family)
        judge = WavesJudge(question.simulator, options)
        verdicts = [judge.judge(family, frame) for frame in frames]
        lacking = [at for at, each in enumerate(verdicts) if each is None]
        if lacking:
            raise _too_large(judge, family, lacking[0], frames[lacking[0]], fits)
        return _joined(judge, "dictated", [each.candidate for each in verdicts if each is not None]).plan
    every = list(_dealt(question, family))
    if not every:
        raise nothing_fits(
            "no pipelines of policy wsp fit the memory, however HetPipe would deal the devices",
            remedies(question.costs, question.options, fits, None),
        )
    best = min(every, key=lambda each: each.sample_s)
    rows = [
        Alternative(
            name=each.name,
            step_s=each.plan.predicted.step_s,
            stages="/".join(own.text() for own in each.candidates),
            micro_batches=1,
        )
        for each in every
        if each is not best
    ]
    dealt = f"devices are dealt to pipelines by {best.name}; other ways than HetPipe's were not tried"
    notes = (*best.plan.notes, dealt, "the lower bound is that of these pipelines")
    return best.plan.model_copy(update={"alternatives": tuple(rows), "notes": notes})


def waves_fit(question: Question) -> bool:
    """Whether dictated pipelines, or some of those that are tried, fit the memory."""
    family = _family(question)
    if not question.pipelines:
        return any(True for _ in _dealt(question, family))
    options, frames = _dictated(question, family)
    judge = WavesJudge(question.simulator, options)
    return all(next(judge.candidates(family, frame), None) is not None for frame in frames)


def _family(question: Question) -> Family:
    """Return what a mini-batch is, of a model that several pipelines can train."""
    for layer in question.costs.profile.layers:
        if layer.writes is not None and layer.writes.buffers:
            raise UsageError(f"layer {layer.name} {WRITTEN_BUFFERS}")
    family = next((each for each in question.families if each.micro_batches == 1), None)
    if family is None:
        raise UsageError(
            "`policy='wsp'` has whole mini-batches in flight, of `batch` samples each; plan with `micro_batches=1`"
        )
    return family


def _with_waves(options: PlanOptions, stages: int) -> PlanOptions:
    """Return options with all numbers, of pipelines the longest of which has so many stages."""
    return replace(options, wave=options.wave or min(stages, MOST_WAVE), staleness=options.staleness or 0)


def _dictated(question: Question, family: Family) -> tuple[PlanOptions, list[tuple[CandidateStage, ...]]]:
    """Return the options with all numbers, and the stages of every dictated pipeline on its devices."""
    costs, every = question.costs, question.pipelines
    order, frames = iter(question.device_order), list[tuple[CandidateStage, ...]]()
    for each in every:
        devices = [next(order) for _ in each.cuts]
        frames.append(place(family, each.cuts, [SINGLE] * len(each.cuts), devices))
        for tied, holders in costs.tied_between(frames[-1]):
            raise UsageError(
                f"`stages`: stages {' and '.join(map(str, holders))} of pipeline {len(frames) - 1} share "
                f"{costs.profile.tied[tied].parameter}; give all layers that use it to one stage of every pipeline"
            )
    return _with_waves(question.options, max(len(each.cuts) for each in every)), frames


def _dealt(question: Question, family: Family) -> Iterator[_Pipelines]:
    """Yield, for every way in which HetPipe deals devices to several pipelines, the best of these that fit."""
    costs, prices = question.costs, Prices(question.costs, 1)
    given = hetpipe.allocate_workers(prices, len(costs.devices))
    several = [] if isinstance(given, str) else [each for each in given if len(each.workers) > 1]
    if not several:
        raise UsageError(
            f"`policy='wsp'` has several pipelines, and HetPipe deals {len(costs.devices)} devices of these nodes to "
            f"one, or to more stages than {costs.layer_count} layers; give the stages of each in `stages`, apart by "
            "slashes"
        )
    partitioner = hetpipe.Partitioner(prices)
    for allocation in several:
        options = _with_waves(question.options, max(map(len, allocation.workers)))
        judge, known = WavesJudge(question.simulator, options), dict[hetpipe.Makeup, Candidate | None]()
        found = list[Candidate]()
        for makeup, sorts in allocation.makeups:
            devices = [device for sort in sorts for device in sort]
            if makeup not in known:
                started = _as_hetpipe(partitioner, family, makeup, sorts, options, len(allocation.workers))
                best = _best(judge, question, family, devices, started)
                known[makeup] = None if best is None else _on(best, {own: at for at, own in enumerate(devices)})
            own = known[makeup]
            if own is None:
                break
            # Devices of one sort could change places unnoticed.
            found.append(_on(own, dict(enumerate(devices))))
        if len(found) == len(allocation.workers):
            yield _joined(judge, f"HetPipe's {allocation.policy}, of {len(found)} pipelines", found)


def _on(candidate: Candidate, devices: Mapping[int, int]) -> Candidate:
    """Return a candidate with other devices in place of its own."""
    stages = (each._replace(devices=tuple(map(devices.__getitem__, each.devices))) for each in candidate.stages)
    return candidate._replace(stages=tuple(stages))


def _as_hetpipe(
    partitioner: hetpipe.Partitioner,
    family: Family,
    makeup: hetpipe.Makeup,
    sorts: Sequence[Sequence[int]],
    options: PlanOptions,
    workers: int,
) -> tuple[CandidateStage, ...] | None:
    """Return the stages that HetPipe gives some devices; none where it finds that none fit."""
    assert options.wave is not None
    found = partitioner.partition(makeup, hetpipe.PipelineCounts(options.wave, options.wave, workers))
    if not found.cuts:
        return None
    left = [iter(sort) for sort in sorts]
    return place(family, found.cuts, [SINGLE] * len(found.cuts), [next(left[sort]) for sort in found.sorts])


def _best(
    judge: WavesJudge,
    question: Question,
    family: Family,
    devices: Sequence[int],
    started: tuple[CandidateStage, ...] | None,
) -> Candidate | None:
    """Return the pipeline of least period on some devices, of a given one and of partitions that are gone through."""
    costs, options, constraints = judge.costs, judge.options, question.constraints
    best = None

    def is_admitted(stages: tuple[CandidateStage, ...]) -> bool:
        idle = options.use_all and len(stages) < len(devices)
        return not (idle or costs.tied_between(stages) or constraints.broken(stages, costs.kind_of))

    if started is not None and is_admitted(started):
        best = judge.judge(family, started)
    by_kind = tuple(sorted(devices, key=lambda device: (costs.kind_of[device], device)))
    for order in dict.fromkeys((tuple(devices), by_kind, by_kind[::-1])):
        busy_s = partial(judge.busy_s, family)
        table = PartitionTable(costs, family, order, lambda width: [SINGLE] if width == 1 else [], busy_s)
        every = islice(table.in_order(options.max_stages, 1), MOST_SEEN * options.effort)
        placed = ((partition.busiest_s, table.stages(partition)) for partition in every)
        best = judge.go_through(family, (each for each in placed if is_admitted(each[1])), best).best
    return None if best is None else best.candidate


def _too_large(judge: WavesJudge, family: Family, at: int, frame: Sequence[CandidateStage], fits: Fits) -> Exception:
    """Return why there is no plan of a pipeline whose every stage has one mini-batch in flight."""
    costs, options = judge.costs, judge.options
    candidate = Candidate(*family, tuple(stage._replace(warmup=1) for stage in frame))
    reserved = (max(costs.kinds[costs.kind_of[each]].reserved_bytes for each in stage.devices) for stage in frame)
    needed = max(map(add, judge.peak_bytes(candidate), reserved))
    return nothing_fits(
        f"pipeline {at} of policy {options.weight_policy} does not fit its devices, with the waves that it keeps",
        remedies(costs, options, fits, needed),
    )


def _joined(judge: WavesJudge, name: str, candidates: Sequence[Candidate]) -> _Pipelines:
    """Return the plan of some pipelines."""
    costs, options = judge.costs, judge.options
    plans = [
        plan_of(
            costs,
            candidate,
            options,
            stage_records(costs, candidate.stages),
            prediction(costs, candidate, judge.peaks(candidate)),
            (),
            schedule="1f1b",
            objective=options.objective,
            weight_policy="stash",
        )
        for candidate in candidates
    ]
    plan = joined(plans, weight_policy=options.weight_policy, wave=options.wave, staleness=options.staleness)
    used = [device for candidate in candidates for device in candidate.used_devices]
    times, sharing = plan_durations(costs, candidates, plan.shared_layers), costs.sharing.among(used)
    period_s, fill_s, drain_s = pipeline_times(trace_unflushed(plan, expand(plan), times, sharing), plan)
    busy_s = [_busy_s(judge, candidate) for candidate in candidates]
    total_s = len(plan.devices) * period_s
    predicted = {
        "step_s": period_s,
        "lower_bound_s": min(period_s, max(chain.from_iterable(busy_s))),
        "bubble": max(0.0, 1 - sum(map(sum, busy_s)) / total_s) if total_s > 0 else 0.0,
    }
    count = len(plan.pipelines)
    notes = (
        *plan.notes,
        f"a mini-batch is one pipeline's, and a step {count} of them: {count} x {plan.batch} samples",
        f"all pipelines fill in {fill_s:.3g} s and drain in {drain_s:.3g} s, once",
    )
    found = {"predicted": plan.predicted.model_copy(update=predicted), "notes": notes}
    return _Pipelines(name, plan.model_copy(update=found), tuple(candidates))


def _busy_s(judge: WavesJudge, candidate: Candidate) -> list[float]:
    """Return what every stage computes of a mini-batch."""
    costs = judge.costs
    return [
        costs.forward_s(stage, 0) + costs.backward_s(stage, 0, 1) + costs.update_s(stage) for stage in candidate.stages
    ]
