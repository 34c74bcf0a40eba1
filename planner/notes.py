"""Notes: what is said of a plan, and what was not searched."""

from __future__ import annotations

from autopar.planner.alternatives import straddling
from autopar.planner.candidate import MOST_MICRO_BATCHES, Candidate
from autopar.planner.placement.places import pool_of
from autopar.planner.question import Question
from autopar.planner.search.judge import ENOUGH, Best, SimulatedPlan, equal_widths


def notes_on(question: Question, best: Best, simulated_plan: SimulatedPlan, lower_bound_s: float) -> list[str]:
    """Return what is said of the plan that is chosen of the best ones."""
    return [
        *_simplicity(question, best, simulated_plan),
        *_search(question, simulated_plan.candidate),
        *placement_notes(question, simulated_plan.candidate),
        *_gap(question, simulated_plan.step_s, lower_bound_s),
    ]


def _simplicity(question: Question, best: Best, simulated_plan: SimulatedPlan) -> list[str]:
    """Say what is given up for a simpler plan, and what one that is not simple costs to do without."""
    assert best.fastest is not None
    notes = []
    if simulated_plan.candidate != best.fastest.candidate and not question.options.equal_widths:
        faster = 1 - best.step_s / simulated_plan.step_s
        notes.append(f"a plan that is harder to use is {faster:.1%} faster; `exact=True` plans it")
    across = straddling(question.costs, simulated_plan.candidate.stages)
    if across:
        named = ", ".join(map(str, across))
        notes.append(
            f"stage{'s' if len(across) > 1 else ''} {named} cross from one node to another without filling them"
        )
    if best.equal is not None and not equal_widths(simulated_plan.candidate.stages):
        more = best.equal.step_s / simulated_plan.step_s - 1
        notes.append(f"stages of equal widths take {more:+.1%}; `equal_widths=True` plans them")
    return notes


def _search(question: Question, candidate: Candidate) -> list[str]:
    """Say which numbers of micro-batches were not searched, and which devices are of no use."""
    notes, devices = [], len(question.costs.devices)
    if question.options.micro_batches is None and question.costs.batch > MOST_MICRO_BATCHES:
        notes.append(f"micro-batch counts above {MOST_MICRO_BATCHES} were not searched; `micro_batches` asks for one")
    idle = devices - len(set(candidate.devices))
    if idle:
        notes.append(
            f"{idle} of {devices} devices stay idle: no plan simulated with them is faster (`use_all` forbids this)"
        )
    return notes


def placement_notes(question: Question, candidate: Candidate) -> list[str]:
    """Say which placements were not searched, and where ranks are to be started that are not in cluster order."""
    notes, costs, options = [], question.costs, question.options
    exact = options.gap == 0
    if options.solver == "dp" and not pool_of(costs, exact=exact, use_all=options.use_all).complete:
        remedy = "" if exact else "; `gap=0` leaves out fewer"
        notes.append(f"not all placements on nodes were searched; the lower bound is of those that were{remedy}")
    devices = list(dict.fromkeys(candidate.devices))
    nodes = {costs.devices[device].node for device in devices}
    if len(nodes) > 1 and devices != sorted(devices):
        notes.append("stages are not placed in cluster order: start rank i on the i-th device of $.stages[].devices")
    return notes


def _gap(question: Question, step_s: float, lower_bound_s: float) -> list[str]:
    """Say how far a step is from its lower bound."""
    options = question.options
    if step_s < lower_bound_s:
        return [f"it is faster than any plan with one stage on every device, by {1 - step_s / lower_bound_s:.1%}"]
    if lower_bound_s > 0 and step_s > (1 + max(ENOUGH, options.gap)) * lower_bound_s * (1 + 1e-9):
        more = f"`effort={10 * options.effort}` searches on"
        return [f"the search ended {step_s / lower_bound_s - 1:.1%} above its lower bound; {more}"]
    return []
