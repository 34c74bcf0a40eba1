"""Waves: plans of several pipelines that train a model together, each on devices of its own (weight policy wsp).

Each pipeline gets depths as if it were alone, within the memory that waves leave; then all are simulated together,
from their fill to their drain. Their period is the slowest one's: no pipeline can be ahead of it by more than its
staleness admits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from operator import add

from autopar.errors import UsageError
from autopar.formats.pipelines import joined
from autopar.formats.plan import Plan
from autopar.options.plan import PlanOptions
from autopar.ownership import SINGLE
from autopar.planner.assemble import plan_of, prediction, stage_records
from autopar.planner.candidate import Candidate, CandidateStage, Family, place
from autopar.planner.constraints import Question
from autopar.planner.costs.durations import plan_durations
from autopar.planner.infeasible import Fits, nothing_fits, remedies
from autopar.planner.objectives.unflushed import PolicyJudge
from autopar.planner.simulator.simulate import pipeline_times, trace_unflushed
from autopar.schedules.expand import expand


class WavesJudge(PolicyJudge):
    """Prices, fits and simulates pipelines of a plan that has several."""

    simulated_as = "stash"


def waves_plan(question: Question, fits: Fits) -> Plan:
    """Return the plan of dictated pipelines; ``fits`` says whether there is one with other options.

    Raises:
        UsageError: the model, or the options, have what several pipelines do not train.
        InfeasibleError: some pipeline does not fit the memory.
    """
    options, family, frames = _asked(question)
    judge = WavesJudge(question.simulator, options)
    found = [judge.judge(family, frame) for frame in frames]
    candidates = [each.candidate for each in found if each is not None]
    if len(candidates) < len(frames):
        at = next(at for at, each in enumerate(found) if each is None)
        raise _too_large(judge, family, at, frames[at], fits)
    return _plan_of(judge, candidates)


def waves_fit(question: Question) -> bool:
    """Whether dictated pipelines fit the memory."""
    options, family, frames = _asked(question)
    judge = WavesJudge(question.simulator, options)
    return all(next(judge.candidates(family, frame), None) is not None for frame in frames)


def _asked(question: Question) -> tuple[PlanOptions, Family, list[tuple[CandidateStage, ...]]]:
    """Return the options with all numbers, what a mini-batch is, and the stages of every pipeline on its devices."""
    costs, options, every = question.costs, question.options, question.pipelines
    options = replace(
        options,
        wave=options.wave or max(len(each.cuts) for each in every),
        staleness=options.staleness or 0,
    )
    family = next((each for each in question.families if each.micro_batches == 1), None)
    if family is None:
        raise UsageError(
            "`policy='wsp'` has whole mini-batches in flight, of `batch` samples each; plan with `micro_batches=1`"
        )
    order, frames = iter(question.device_order), list[tuple[CandidateStage, ...]]()
    for each in every:
        devices = [next(order) for _ in each.cuts]
        frames.append(place(family, each.cuts, [SINGLE] * len(each.cuts), devices))
        for tied, holders in costs.tied_between(frames[-1]):
            raise UsageError(
                f"`stages`: stages {' and '.join(map(str, holders))} of pipeline {len(frames) - 1} share "
                f"{costs.profile.tied[tied].parameter}; give all layers that use it to one stage of every pipeline"
            )
    for layer in costs.profile.layers:
        if layer.writes is not None and layer.writes.buffers:
            raise UsageError(
                f"layer {layer.name} writes buffers, which pipelines do not tell each other; plan with `policy='sync'`"
            )
    return options, family, frames


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


def _plan_of(judge: WavesJudge, candidates: Sequence[Candidate]) -> Plan:
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
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update=predicted), "notes": notes})


def _busy_s(judge: WavesJudge, candidate: Candidate) -> list[float]:
    """Return what every stage computes of a mini-batch."""
    costs = judge.costs
    return [
        costs.forward_s(stage, 0) + costs.backward_s(stage, 0, 1) + costs.update_s(stage) for stage in candidate.stages
    ]
