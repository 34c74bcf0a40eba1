"""Waves: plans of several pipelines that train a model together, each on devices of its own (weight policy wsp).

Where they are not dictated, HetPipe's policies and a search deal devices to them, and each one's partitions are gone
through (:mod:`autopar.planner.objectives.dealings`). Each pipeline gets depths as if it were alone, within the memory
that waves leave; then all are simulated together, from their fill to their drain. Their period is the slowest one's:
no pipeline can be ahead of it by more than its staleness admits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.plan import Plan
from autopar.formats.prediction import Alternative
from autopar.options.plan import PlanOptions
from autopar.ownership import SINGLE
from autopar.planner.candidate import Candidate, CandidateStage, Family, place
from autopar.planner.constraints import Question
from autopar.planner.costs.durations import plan_durations
from autopar.planner.infeasible import Fits, nothing_fits, remedies
from autopar.planner.objectives.dealings import Cutter, DealingSearch, WavesJudge, with_waves
from autopar.planner.peers.hetpipe import Allocation, allocate_workers
from autopar.planner.peers.prices import Prices
from autopar.planner.simulator.simulate import pipeline_times, trace_repetitions
from autopar.policies import WRITTEN_BUFFERS
from autopar.schedules.expand import expand

MOST_SEARCHED = 6
"""Found dealings whose pipelines are cut as well as can be, times the effort."""


class _Pipelines(NamedTuple):
    """Pipelines that fit, and how they go on together."""

    name: str
    plan: Plan
    candidates: tuple[Candidate, ...]


def waves_plan(question: Question, fits: Fits) -> Plan:
    """Return the plan of dictated pipelines, or of those that train most samples per second.

    Devices are dealt to pipelines by HetPipe's policies (:mod:`autopar.planner.peers.hetpipe`), and as is found from
    there on (:mod:`autopar.planner.objectives.dealings`), which cuts each pipeline, too.

    Args:
        question: what is asked.
        fits: says whether there is a plan with other options.

    Raises:
        UsageError: the model, or the options, have what several pipelines do not train.
        InfeasibleError: no pipelines fit the memory.
    """
    family = _family(question)
    if question.pipelines:
        options, frames = _dictated_frames(question, family)
        judge = WavesJudge(question.simulator, options, len(frames))
        verdicts = [judge.judge(family, frame) for frame in frames]
        lacking = [at for at, each in enumerate(verdicts) if each is None]
        if lacking:
            raise _too_large(judge, family, lacking[0], frames[lacking[0]], fits)
        return _join(judge, "dictated", [each.candidate for each in verdicts if each is not None]).plan
    every = list(_deal(question, family))
    if not every:
        raise nothing_fits(
            "no pipelines of policy wsp fit the memory, however devices were dealt to them",
            remedies(question.costs, question.options, fits, None),
        )
    name, best = _best_of(every)
    dealt = f"devices are dealt to pipelines by {name}; not all other ways were tried"
    return best.model_copy(update={"notes": (*best.notes, dealt, "the lower bound is that of these pipelines")})


def _best_of(every: Sequence[_Pipelines]) -> tuple[str, Plan]:
    """Return the plan that trains most samples per second, with the others beside it, and how its devices are dealt."""
    best = min(every, key=_sample_s)
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
    return best.name, best.plan.model_copy(update={"alternatives": tuple(rows)})


def hetpipe_plan(question: Question) -> tuple[str, Plan]:
    """Return the plan that HetPipe would make, which deals and cuts by its own rules only, and how it deals.

    Raises:
        UsageError: the model has what several pipelines do not train, or HetPipe deals all devices to one.
        InfeasibleError: no pipelines fit the memory.
    """
    family = _family(question)
    every = list(_deal(question, family, as_hetpipe=True))
    if not every:
        costs = question.costs
        dealt = ((own, len(each.workers)) for each in allocate_workers(Prices(costs, 1)) for own in each.workers)
        frames = (Cutter(question, family, len(own), pipelines).as_hetpipe(own) for own, pipelines in dealt)
        tied = next((at for frame in frames if frame for at, _ in costs.tied_between(frame)), None)
        shared = "" if tied is None else f"its stages share {costs.profile.tied[tied].parameter}"
        raise InfeasibleError(shared or "no pipelines that it cuts fit the memory")
    return _best_of(every)


def _sample_s(pipelines: _Pipelines) -> float:
    """Return the seconds for as many samples as one pipeline's mini-batch has."""
    return pipelines.plan.predicted.step_s / len(pipelines.candidates)


def waves_fit(question: Question) -> bool:
    """Whether dictated pipelines, or some of those that are tried, fit the memory."""
    family = _family(question)
    if not question.pipelines:
        return any(True for _ in _deal(question, family, searches=False))
    options, frames = _dictated_frames(question, family)
    judge = WavesJudge(question.simulator, options, len(frames))
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


def _dictated_frames(question: Question, family: Family) -> tuple[PlanOptions, list[tuple[CandidateStage, ...]]]:
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
    return with_waves(question.options, max(len(each.cuts) for each in every)), frames


def _deal(
    question: Question, family: Family, *, as_hetpipe: bool = False, searches: bool = True
) -> Iterator[_Pipelines]:
    """Yield, for ways to deal devices to several pipelines, HetPipe's and those found, the best of these that fit."""
    costs = question.costs
    own = allocate_workers(Prices(costs, 1))
    if not (own or as_hetpipe or searches):
        own = [Allocation("ED", tuple((device,) for device in range(len(costs.devices))))]
    if as_hetpipe and not own:
        raise UsageError(
            f"HetPipe deals {len(costs.devices)} devices of these nodes to one, or to more stages than "
            f"{costs.layer_count} layers"
        )
    if len(costs.devices) == 1:
        raise UsageError("`policy='wsp'` trains several pipelines, and there is one device; plan with `gpus=2`")
    search = DealingSearch(question, family)
    for each in own:
        name, cutter = f"HetPipe's {each.policy}", search.cutter(max(map(len, each.workers)), len(each.workers))
        yield from pipelines_on(cutter, name, each.workers, as_hetpipe=as_hetpipe)
    if as_hetpipe or not searches:
        return
    found = search.go([each.workers for each in own])
    cutters = [search.cutter(max(map(len, each)), len(each)) for each in found]
    joint_s = [
        min(map(_sample_s, pipelines_on(cutter, "", each, as_hetpipe=True)), default=math.inf)
        for cutter, each in zip(cutters, found, strict=True)
    ]
    for at in sorted(range(len(found)), key=joint_s.__getitem__)[: MOST_SEARCHED * question.options.effort]:
        yield from pipelines_on(cutters[at], "search", found[at])


def pipelines_on(
    cutter: Cutter, name: str, dealt: Sequence[Sequence[int]], *, as_hetpipe: bool = False
) -> Iterator[_Pipelines]:
    """Yield the pipelines of some devices each, cut as HetPipe does or as each is quickest alone; none if some fit not.

    Those that are quickest alone may not be together, where they cut apart what is then summed.
    """
    both = list[_Pipelines]()
    for way in dict.fromkeys((True, as_hetpipe)):
        fitting = [each.candidate for devices in dealt if (each := cutter.cut(devices, as_hetpipe=way)) is not None]
        if len(fitting) == len(dealt):
            both.append(_join(cutter.judge, f"{name}, of {len(fitting)} pipelines", fitting))
    yield from sorted(both, key=_sample_s)[:1]


def _too_large(judge: WavesJudge, family: Family, at: int, frame: Sequence[CandidateStage], fits: Fits) -> Exception:
    """Return why there is no plan of a pipeline whose every stage has one mini-batch in flight."""
    costs, options = judge.costs, judge.options
    candidate = Candidate(*family, tuple(stage._replace(warmup=1) for stage in frame))
    return nothing_fits(
        f"pipeline {at} of policy {options.weight_policy} does not fit its devices, with the waves that it keeps",
        remedies(costs, options, fits, judge.needed_bytes(candidate)),
    )


def _join(judge: WavesJudge, name: str, candidates: Sequence[Candidate]) -> _Pipelines:
    """Return the plan of some pipelines."""
    costs, options = judge.costs, judge.options
    plans = [judge.plan_of(candidate, "stash") for candidate in candidates]
    waves = {"wave": options.wave, "staleness": options.staleness, "eager": options.eager}
    plan = Plan.joined(plans, weight_policy=options.weight_policy, **waves)
    used = [device for candidate in candidates for device in candidate.used_devices]
    times, sharing = plan_durations(costs, candidates, plan), costs.sharing.among(used)
    period_s, fill_s, drain_s = pipeline_times(trace_repetitions(plan, expand(plan), times, sharing), plan)
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
