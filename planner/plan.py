"""Planning: a question of a profile, a cluster and options becomes a plan.

In this order: its answer, by objective, schedule and dictated stages; notes: what is said of a plan, and what was not
searched; and the plan beside those that its peers' planners would choose.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.prediction import Alternative, Bounds
from autopar.formats.profile import Profile
from autopar.hardware.kinds import check_times_of
from autopar.options.plan import PlanOptions, admissible_options, check_flags, check_policy
from autopar.ownership import SINGLE
from autopar.planner.assemble import assemble, schedule_of
from autopar.planner.bounds import candidate_bound_s, stages_work_s, work_s
from autopar.planner.candidate import (
    MOST_MICRO_BATCHES,
    Candidate,
    Family,
    equal_widths,
    has_chunks,
    place,
    plain,
    splits_backward,
)
from autopar.planner.constraints import Question, refusal_of_all, shape_of, too_wide
from autopar.planner.costs.model import CostModel
from autopar.planner.degrees import degree_notes
from autopar.planner.dictated import FixedStages
from autopar.planner.infeasible import any_plan_fits, closest, infeasible, needed_bytes, nothing_fits, remedies
from autopar.planner.milp.solve import search_by_milp
from autopar.planner.objectives.cost import CheapestSimulated, cheapest_plan
from autopar.planner.objectives.unflushed import policy_fits, policy_plan
from autopar.planner.objectives.waves import waves_fit, waves_plan
from autopar.planner.peers import peers
from autopar.planner.pool import pool_of
from autopar.planner.search import other_schedules
from autopar.planner.search.best_first import SearchResult, bounds_of_families, least_bound_s, search
from autopar.planner.search.judge import (
    ENOUGH,
    Best,
    GivenStages,
    Met,
    Reference,
    SimulatedPlan,
    neighbours,
    references,
    shallowest,
    simplest,
    straddling,
    tell,
    try_stages,
)
from autopar.planner.search.kinds import judge_splits_by_kind
from autopar.planner.search.local import judge_even_splits, search_locally
from autopar.planner.search.memory_bound import memory_bound_s
from autopar.planner.throughput import check_length, plan_throughput, with_throughput
from autopar.planner.uniform import CHUNKED, uniform_layouts
from autopar.policies import POLICIES
from autopar.progress import Progress, no_progress

_NO_EQUAL = "no plan was found whose stages are equally wide and fit the memory"
_WITHOUT_EQUAL = "without `equal_widths`"
DICTATED_NOTE = "the stages were dictated; the lower bound is that of these stages"


def starting_plans(question: Question) -> tuple[list[Reference], list[Reference]]:
    """Return what anyone would try first; and with it what peers' planners find, as far as that is soon known."""
    simulator, options = question.simulator, question.options
    simulator.progress("trying usual plans", 0.05)
    compared = [*references(simulator, question.families, options), *_uniform_layouts(question)]
    # What is proved is proved of the plans that are searched, and some of a peer's are none of these.
    return compared, peers(simulator, options, compared, quickly=True) if options.gap > 0 else compared


def _uniform_layouts(question: Question) -> list[Reference]:
    """Return the best layouts that are alike on all devices, where plans with teams are searched."""
    chunked = other_schedules.are_admitted(question) or question.options.schedule == CHUNKED
    return uniform_layouts(question.simulator, question.families, question.options, chunked=chunked)


def plan(
    profile: Profile,
    cluster: Cluster,
    options: PlanOptions | None = None,
    progress: Progress = no_progress,
    met: Met | None = None,
) -> Plan:
    """Return the fastest plan found, or the dictated one, with its lower bound and alternatives.

    Pure: the same arguments give the same plan, everywhere. ``progress`` is told what is done, ``met`` what was met.

    Raises:
        UsageError: the options contradict the profile or each other.
        InfeasibleError: nothing fits the memory; names the stage and by how much.
    """
    options = options or PlanOptions()
    check_length(profile, options)
    found = _answer(profile, cluster, options, progress, met)
    if not options.says_length:
        return found
    return with_throughput(found, plan_throughput(found, profile, cluster, options))


def _answer(
    profile: Profile, cluster: Cluster, options: PlanOptions, progress: Progress, met: Met | None = None
) -> Plan:
    """Return the plan without the length of a training."""
    check_flags(options)
    check_times_of(profile, cluster, options.times_of, options.gpus)
    options = check_policy(admissible_options(options, profile))
    policy = POLICIES[options.weight_policy]
    with _without_collection():
        question = Question.of(profile, cluster, options, progress)
        if policy.minimises == "period":
            single = question.with_teams((SINGLE,))
            return (waves_plan if policy.has_pipelines else policy_plan)(single, partial(_fits, question))
        if options.schedule != "auto" and not plain(options.schedule):
            return _plan_schedule(question, met)
        if options.objective == "cost":
            return _plan_cheapest(question)
        fixed = question.fixed_stages
        return _plan_best(question, met) if fixed is None else _plan_stages(question, fixed, met)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause the collector of cycles: to look for the few that planning makes takes a tenth of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _plan_best(question: Question, met: Met | None) -> Plan:
    """Return the simplest of the best plans, with what bounds them, and what stands near them."""
    best, (compared, known) = Best(), starting_plans(question)
    found = _search(question, best, known)
    if best.fastest is None:
        _judge_closest(question, best)
    if best.fastest is None:
        fits = partial(_fits, question)
        raise infeasible(question.costs, question.families, question.options, best.closest, fits)
    _find_equal(question, best)
    question.simulator.progress("bounding plans from below", 0.8)
    least = least_bound_s(question.costs, question.options)
    bounds = bounds_of_families(question.costs, question.families, least, best.step_s, found.linked_s)
    bounds, least_s, schedule_notes = _try_schedules(question, best, bounds, max(found.lower_bound_s, bounds.linked_s))
    if other_schedules.are_admitted(question):
        _consider_known(question, best, known)
    chosen, near = _choose_beside(question, best)
    chunks, plain_s = has_chunks(chosen.candidate.schedule), least_s
    # What bounds plans with one stage on every device does not bound one with several.
    least_s = _bounded_by_memory(question, best, bounds.work_s, chunks=True) if chunks else plain_s
    tell(met, question.costs, best)
    notes = [
        *found.notes,
        *(() if chunks else schedule_notes),
        *_schedule_notes(question, chosen.candidate),
        *_simplicity(question, best, chosen),
        *degree_notes(question.simulator, best, chosen.candidate),
        *_search_notes(question, chosen.candidate),
        *_placement_notes(question, chosen.candidate),
        *_gap(question, chosen.step_s, least_s, plain_s),
    ]
    rows = _alternatives(question, compared, near)
    return assemble(question.costs, chosen.candidate, question.options, least_s, rows, notes, bounds, chosen.step_s)


def _plan_cheapest(question: Question) -> Plan:
    """Return the cheapest plan, none of those met on the way to the fastest being cheaper."""
    met = CheapestSimulated(question)
    watched, best = replace(question, simulator=met), Best()
    compared, known = starting_plans(watched)
    found = _search(watched, best, known)
    if best.fastest is None:
        _judge_closest(watched, best)
    least_s = 0.0 if best.fastest is None else found.lower_bound_s
    other_schedules.meet(watched, best)
    if best.fastest is not None and question.options.gap > 0:
        _choose_beside(watched, best)
    return cheapest_plan(watched, met, compared, best.fastest, least_s)


def _search(question: Question, best: Best, known: Sequence[Reference]) -> SearchResult:
    """Search from what others would run on.

    So the plan is never worse than one of these that is admitted.
    """
    simulator, every, options = question.simulator, question.families, question.options
    _consider_known(question, best, [each for each in known if each.candidate and plain(each.candidate.schedule)])
    if options.solver == "milp":
        return search_by_milp(simulator, every, options, best)
    if options.gap > 0 and question.costs.mixes:
        # First on one kind a stage, and on single devices: others are many more plans, among which the same work may
        # miss what it finds there.
        _search(question.with_kinds_apart(), best, known)
    elif options.gap > 0 and options.exact and SINGLE in question.costs.teams[:-1]:
        _search_by_dp(question.with_teams((SINGLE,)), best, options)
    if options.gap > 0 and options.effort > 1:
        # First as with an effort of one: from other seeds, local moves may lead elsewhere, to a slower plan.
        first = _search_by_dp(question, best, replace(options, effort=1, exact=False))
        then = _search_by_dp(question, best, options)
        return then._replace(lower_bound_s=max(first.lower_bound_s, then.lower_bound_s))
    return _search_by_dp(question, best, options)


def _search_by_dp(question: Question, best: Best, options: PlanOptions) -> SearchResult:
    """Search by the dynamic program and, but for a gap of 0, by local moves."""
    simulator, every = question.simulator, question.families
    if options.gap > 0:
        simulator.progress("trying even splits", 0.15)
        judge_even_splits(simulator, every, options, best)
        if len(set(question.costs.kind_of)) > 1 and not question.costs.mixes:
            judge_splits_by_kind(simulator, every, options, best)
    simulator.progress(f"searching {len(every)} families of plans", 0.2)
    found = search(simulator, every, options, best)
    if options.gap > 0:
        simulator.progress("moving on from the best plans", 0.6)
        search_locally(simulator, options, best, found.lower_bound_s)
    return found._replace(lower_bound_s=min(found.lower_bound_s, best.step_s))


def _judge_closest(question: Question, best: Best) -> None:
    """Judge the plan that needs least memory, and move on from there; a search of few paces may not meet it."""
    found = closest(question.costs, question.families, question.options)
    if found is not None and found[0] <= 0:
        best.judge(question.simulator, found[1])
        search_locally(question.simulator, question.options, best, 0.0)


def _consider_known(question: Question, best: Best, known: Sequence[Reference]) -> None:
    """Consider those of some plans that the question admits."""
    for found in (each.simulated_plan for each in known):
        if found is not None and question.excluding_option(found.candidate) is None:
            best.consider(found)


def _bounded_by_memory(question: Question, best: Best, least_s: float, *, chunks: bool = False) -> float:
    """Return what no plan falls below where teams are searched and no table says it; with ``chunks``, under any."""
    costs, options = question.costs, question.options
    if len(costs.teams) == 1 or not _is_wide(options, best.step_s, least_s):
        return least_s
    tried = other_schedules.tried_beside(costs) if other_schedules.are_admitted(question) else []
    # What bounds halved backwards bounds whole ones.
    schedule = max((each for each in tried if has_chunks(each) == chunks), key=splits_backward, default=None)
    families = [each if schedule is None else each._replace(schedule=schedule) for each in question.families]
    return memory_bound_s(costs, families, options, least_s, best.step_s)


def _try_schedules(
    question: Question, best: Best, bounds: Bounds, least_s: float
) -> tuple[Bounds, float, tuple[str, ...]]:
    """Try schedules that no table bounds; return what bounds all plans with theirs, and what is to be noted."""
    costs, options = question.costs, question.options
    if not other_schedules.are_admitted(question) or best.fastest is None:
        return bounds, _bounded_by_memory(question, best, least_s), ()
    if not other_schedules.meet(question, best):
        note = "of so many devices and micro-batches no other schedules than gpipe and 1f1b were tried; `schedule` does"
        return bounds, _bounded_by_memory(question, best, least_s), (note,)
    # Bounds know of a schedule whether a rank runs several stages, and whether backwards are halved.
    tried, plain_s = other_schedules.tried_beside(costs), least_s
    for schedule in {(has_chunks(each), splits_backward(each)): each for each in tried}.values():
        asked = replace(options, schedule=schedule, chunks=None)
        own = other_schedules.bounds_of(costs, asked, best.step_s, quickly=True)
        if has_chunks(schedule):
            bounds = bounds.model_copy(update={"work_s": min(bounds.work_s, own.work_s)})
        else:
            bounds = Bounds(**{name: min(each, getattr(own, name)) for name, each in bounds})
            teams = len(costs.teams) > 1
            own_s = own.linked_s if teams else other_schedules.lower_bound_s(costs, asked, own, best.fastest)
            least_s = min(least_s, own_s)
    least_s = _bounded_by_memory(question, best, least_s)
    if least_s < plain_s and _is_wide(options, best.step_s, least_s):
        note = (
            "the lower bound is that of schedules whose backwards are halved, of which no closer one is known; no plan "
            f"of gpipe or 1f1b takes less than {plain_s:.4g} s"
        )
        return bounds, least_s, (note,)
    return bounds, least_s, ()


def _find_equal(question: Question, best: Best) -> None:
    """Look for a plan of equal widths among even splits alone, where one is asked for and none was met.

    Raises:
        InfeasibleError: there is none.
    """
    options = question.options
    if not options.equal_widths or best.equal is not None:
        return
    own = _even_splits(question)
    if own.equal is None:
        needed = needed_bytes(question.costs, options, 1 if own.closest is None else own.closest[0])
        others = remedies(question.costs, options, partial(_fits, question), needed)
        raise nothing_fits(_NO_EQUAL, [_WITHOUT_EQUAL, *others])
    best.consider(own.equal)


def _even_splits(question: Question) -> Best:
    best = Best()
    judge_even_splits(question.simulator, question.families, question.options, best)
    return best


def _fits(question: Question, options: PlanOptions) -> bool:
    """Whether there is a plan with other options, looked for as :func:`plan` does."""
    if POLICIES[options.weight_policy].minimises == "period":
        other = Question.of(question.costs.profile, question.costs.cluster, options)
        return (waves_fit if POLICIES[options.weight_policy].has_pipelines else policy_fits)(other)
    other, fixed_stages = question.under(options), question.fixed_stages
    if options.schedule != "auto" and not plain(options.schedule):
        try:
            if fixed_stages is not None:
                found = other_schedules.dictated_best(other.simulator, other.options, fixed_stages)
            else:
                beside, best = replace(other, options=other_schedules.usual(other.options)), Best()
                _search(beside, best, references(other.simulator, beside.families, beside.options))
                found = other_schedules.tried_best(other.simulator, other.options, best)
        except InfeasibleError:
            return False
        return (found.equal if options.equal_widths else found.fastest) is not None
    if fixed_stages is not None:
        return _refusal(other, fixed_stages) is None and _try_dictated(other, fixed_stages).fastest is not None
    return _even_splits(other).equal is not None if options.equal_widths else any_plan_fits(question.costs, options)


def _choose(question: Question, best: Best) -> SimulatedPlan:
    """Return the plan of equal widths where that is asked for; else the simplest about as fast, or the fastest.

    Each with as few micro-batches in flight as cost it no time. Where links are shared, fewer may save some, so that of
    the simplest and the fastest plan either may be the faster one.
    """
    simulator, options = question.simulator, question.options
    if options.equal_widths:
        assert best.equal is not None
        return shallowest(simulator, best.equal)
    assert best.fastest is not None
    simple = shallowest(simulator, simplest(simulator, best))
    if options.simple or simple.candidate == best.fastest.candidate:
        return simple
    return min(shallowest(simulator, best.fastest), simple, key=lambda each: each.step_s)


def _choose_beside(question: Question, best: Best) -> tuple[SimulatedPlan, list[Reference]]:
    """Return the plan to choose, and those near it, none of which is faster than the fastest one."""
    while True:
        chosen = _choose(question, best)
        every = neighbours(question.simulator, best, chosen.candidate)
        near = [each for each in every if each.candidate and question.excluding_option(each.candidate) is None]
        known_s = (chosen.step_s if question.options.equal_widths else best.step_s) * (1 - 1e-9)
        faster = [each.simulated_plan for each in near if each.simulated_plan and each.simulated_plan.step_s < known_s]
        if not faster or question.options.gap == 0:
            # What is proved is proved of the plans that are searched, and these may be none of them.
            return chosen, [each for each in near if each.simulated_plan not in faster]
        for found in faster:
            best.consider(found)


def _plan_schedule(question: Question, met: Met | None) -> Plan:
    """Return the best plan of a schedule that is found by trying, beside the best one of `1f1b`."""
    simulator, costs, options = question.simulator, question.costs, question.options
    beside, fits = replace(question, options=other_schedules.usual(options)), partial(_fits, question)
    uniform = _uniform_layouts(question)
    compared = [*references(simulator, beside.families, beside.options), *uniform]
    fixed_stages = question.fixed_stages
    own = None if fixed_stages is None else other_schedules.dictated_best(simulator, options, fixed_stages, fits)
    best = Best()
    _search(beside, best, compared)
    if own is None or fixed_stages is None:
        simulator.progress(f"trying plans of {options.schedule}", 0.7)
        own = other_schedules.tried_best(simulator, options, best, fits)
        _consider_known(question, own, uniform)
        if options.equal_widths and own.equal is None:
            raise nothing_fits(f"{_NO_EQUAL} under {options.schedule}", [_WITHOUT_EQUAL])
        bounds = other_schedules.bounds_of(costs, options, own.step_s)
        chosen = _choose(question, own).candidate
        assert own.fastest is not None
        least_s = other_schedules.lower_bound_s(costs, options, bounds, own.fastest)
        note = f"plans of {options.schedule} were found by trying; no better one is ruled out but by the lower bound"
    else:
        assert own.fastest is not None
        bounds, chosen = _bounds_of_shape(question, fixed_stages, own.step_s), own.fastest.candidate
        least_s, note = bounds.linked_s, DICTATED_NOTE
    beside_it = Reference("1f1b", None, None, "no plan of 1f1b fits the memory")
    if best.fastest is not None:
        beside_it = Reference("1f1b", best.fastest.candidate, best.fastest.step_s)
    rows = _alternatives(question, [*compared, beside_it])
    tell(met, costs, best, own)
    notes = [note, *_placement_notes(question, chosen)]
    return assemble(costs, chosen, options, least_s, rows, notes, bounds)


def _bounds_of_shape(question: Question, fixed_stages: FixedStages, step_s: float) -> Bounds:
    """Return what bounds the plans of dictated stages under a schedule that is found by trying."""
    costs, options = question.costs, question.options
    trials = other_schedules.Trials(question.simulator, options.schedule, options, question.device_order)
    shape = shape_of(fixed_stages, options)

    def bound_s(model: CostModel, family: Family, below_s: float) -> float:
        return min(below_s, trials.bound_s(model, family, shape))

    work_of = trials.shape_work_s(shape) if fixed_stages.has_teams else work_s
    return bounds_of_families(costs, question.families, bound_s, step_s, work=work_of)


def _plan_stages(question: Question, fixed_stages: FixedStages, met: Met | None) -> Plan:
    """Return the best plan of dictated stages, beside the best one of any."""
    own, costs, best = _judge_stages(question, fixed_stages), question.costs, Best()
    compared, known = starting_plans(question)
    _search(question, best, known)
    assert own.fastest is not None
    given = _given_stages(question, fixed_stages)

    def least(model: CostModel, family: Family, below_s: float) -> float:
        found = given.frames(model, family, question.options)
        return min((candidate_bound_s(model, Candidate(*family, frame)) for frame in found), default=below_s)

    def work(model: CostModel, family: Family) -> float:
        found = given.frames(model, family, question.options)
        return min((stages_work_s(model, Candidate(*family, frame)) for frame in found), default=math.inf)

    work_of = work if fixed_stages.has_teams else work_s
    bounds = bounds_of_families(costs, question.families, least, own.step_s, work=work_of)
    fastest = own if own.step_s < best.step_s else best
    tell(met, costs, best, own)
    rows = _alternatives(question, [*compared, Reference.of("best", fastest, costs, "")])
    chosen = shallowest(question.simulator, own.fastest).candidate
    notes = [DICTATED_NOTE, *_schedule_notes(question, chosen)]
    return assemble(costs, chosen, question.options, bounds.linked_s, rows, notes, bounds)


def _judge_stages(question: Question, fixed_stages: FixedStages) -> Best:
    """Judge dictated stages; refuse them before anything is searched for them to be compared with."""
    refusal = _refusal(question, fixed_stages)
    if refusal is not None:
        raise UsageError(refusal)
    own = _try_dictated(question, fixed_stages)
    if own.fastest is None and own.closest is None:
        raise too_wide(fixed_stages, question.costs.batch, question.options)
    if own.fastest is None:
        raise infeasible(question.costs, (), question.options, own.closest, partial(_fits, question))
    return own


def _try_dictated(question: Question, fixed_stages: FixedStages) -> Best:
    return try_stages(question.simulator, question.families, question.options, _given_stages(question, fixed_stages))


def _given_stages(question: Question, fixed_stages: FixedStages) -> GivenStages:
    teams = fixed_stages.teams if fixed_stages.has_teams else ()
    return GivenStages(*fixed_stages[:2], question.device_order, (question.options.division,), teams)


def _refusal(question: Question, fixed_stages: FixedStages) -> str | None:
    """Return which constraint dictated stages do not obey with any number of micro-batches; none where they may."""
    # What shares are given depends on the number of micro-batches.
    fixed, order = (fixed_stages.cuts, fixed_stages.replicas), question.device_order
    every = (place(family, *fixed, order, divisible=True) for family in question.families)
    rules = question.constraints(1).dictated()
    return refusal_of_all([rules.broken(stages, question.costs.kind_of) for stages in every])


def _alternatives(
    question: Question, reference_plans: Sequence[Reference], near: Sequence[Reference] = ()
) -> list[Alternative]:
    """Return what is listed beside a plan: what anyone would try first, and neighbours that are none of these."""
    rows = []
    for each in reference_plans:
        own = None if each.simulated_plan is None else question.excluding_option(each.simulated_plan.candidate)
        rows.append(each.record(question.costs).model_copy(update={"excluded": own}))
    known = {(row.step_s, row.stages, row.infeasible) for row in rows}
    others = (each.record(question.costs) for each in near)
    return [*rows, *(row for row in others if (row.step_s, row.stages, row.infeasible) not in known)]


def _schedule_notes(question: Question, candidate: Candidate) -> list[str]:
    """Say of a plan of 1f1b that it is one of gpipe, too."""
    if question.options.schedule != "1f1b" or schedule_of(candidate) != "gpipe":
        return []
    return [
        "all micro-batches are in flight on all stages, as under `gpipe`: of the plans of `1f1b`, this is the fastest"
    ]


def _simplicity(question: Question, best: Best, simulated_plan: SimulatedPlan) -> list[str]:
    """Say what is given up for a simpler plan, and what one that is not simple costs to do without."""
    assert best.fastest is not None
    notes = []
    faster = 1 - best.step_s / simulated_plan.step_s if simulated_plan.step_s > 0 else 0.0
    if faster > 0 and simulated_plan.candidate != best.fastest.candidate and not question.options.equal_widths:
        notes.append(f"a plan that is harder to use is {faster:.1%} faster; `exact=True` plans it")
    across = straddling(question.costs, simulated_plan.candidate.stages)
    if across:
        named = ", ".join(map(str, across))
        what = f"stages {named} cross" if len(across) > 1 else f"stage {named} crosses"
        notes.append(f"{what} from one node to another without filling them")
    if best.equal is not None and not equal_widths(simulated_plan.candidate.stages):
        more = best.equal.step_s / simulated_plan.step_s - 1
        how = "; `equal_widths=True` plans them" if _is_admitted(question.options, equal_widths=True) else ""
        notes.append(f"stages of equal widths take {more:+.1%}{how}")
    return notes


def _search_notes(question: Question, candidate: Candidate) -> list[str]:
    """Say which numbers of micro-batches were not searched, and which devices are of no use."""
    notes, devices = [], len(question.costs.devices)
    if question.options.micro_batches is None and question.costs.batch > MOST_MICRO_BATCHES:
        notes.append(f"micro-batch counts above {MOST_MICRO_BATCHES} were not searched; `micro_batches` asks for one")
    idle = devices - len(set(candidate.devices))
    if idle:
        notes.append(
            f"{idle} of {devices} devices stay idle: of the plans that were tried, none with them is faster; "
            "`use_all=True` plans one that uses all"
        )
    return notes


def _placement_notes(question: Question, candidate: Candidate) -> list[str]:
    """Say which placements were not searched, and where ranks are to be started that are not in cluster order."""
    notes, costs, options = [], question.costs, question.options
    exact = options.gap == 0
    if options.solver == "dp" and not pool_of(costs, exact=exact).complete:
        remedy = "" if exact or not _is_admitted(options, gap=0.0) else "; `gap=0` leaves out fewer"
        notes.append(f"not all placements on nodes were searched; the lower bound is of those that were{remedy}")
    nodes = {costs.devices[device].node for device in candidate.devices}
    devices = [costs.listed[device] for device in candidate.used_devices]
    if len(nodes) > 1 and devices != sorted(devices):
        notes.append("stages are not placed in cluster order: start rank i on the i-th device of $.stages[].devices")
    return notes


def _gap(question: Question, step_s: float, lower_bound_s: float, plain_s: float) -> list[str]:
    """Say how far a step is from its lower bound, or from that of plans with one stage on every device."""
    options = question.options
    if step_s < plain_s:
        return [f"it is faster than any plan with one stage on every device, by {1 - step_s / plain_s:.1%}"]
    if lower_bound_s > 0 and _is_wide(options, step_s, lower_bound_s):
        effort = 10 * options.effort
        more = f"; `effort={effort}` searches on" if _is_admitted(options, effort=effort) else ""
        return [f"the search ended {step_s / lower_bound_s - 1:.1%} above its lower bound{more}"]
    return []


def _is_wide(options: PlanOptions, step_s: float, lower_bound_s: float) -> bool:
    """Whether a step is so far above a lower bound that the user is told."""
    return step_s > (1 + max(ENOUGH, options.gap)) * lower_bound_s * (1 + 1e-9)


def _is_admitted(options: PlanOptions, **changes: float) -> bool:
    """Whether options so changed do not contradict each other."""
    try:
        check_flags(replace(options, **changes))  # type: ignore[arg-type]  # of the options' own kinds
    except UsageError:
        return False
    return True
