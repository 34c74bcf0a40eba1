"""Degrees: why stages have the tensor degrees that they have, and when they would have others."""

from __future__ import annotations

from itertools import groupby, pairwise

from autopar.ownership import Replicas
from autopar.planner.candidate import Candidate, CandidateStage, groups
from autopar.planner.costs.model import CostModel
from autopar.planner.infeasible import size
from autopar.planner.search.judge import TEAM, Best
from autopar.planner.simulator.simulate import Simulator


def degree_notes(simulator: Simulator, best: Best, candidate: Candidate) -> list[str]:
    """Return why devices run replicas together in a plan, or do not, where a search looked at both."""
    if len(simulator.costs.teams) == 1:
        return []
    step_s = simulator.step_s(candidate)
    known = {at: each for (name, at), each in best.by_trait.items() if name == TEAM}
    if all(stage.team == 1 for stage in candidate.stages):
        others = [each.step_s for at, each in known.items() if at > 1]
        if not others or step_s <= 0:
            return []
        more = _more(min(others), step_s)
        return [f"no devices run a replica together: the fastest plan met in which some do takes {more}"]
    reasons = [_reason(simulator, candidate, at, step_s) for at in range(len(candidate.stages))]
    notes = [f"{_stages_text(list(own))} {reason}" for reason, own in _alike(reasons)]
    if 1 in known:
        notes.append(
            f"with one device a replica everywhere, the fastest plan met takes {_more(known[1].step_s, step_s)}"
        )
        factor = _slower(simulator.costs, candidate, known[1].step_s - step_s)
        if factor is not None:
            notes.append(f"so it stays as long as what devices sum takes less than about {factor:.3g} times as long")
    else:
        notes.append("with one device a replica everywhere, no plan was met that fits the memory")
    return notes


def _more(other_s: float, step_s: float) -> str:
    return f"{other_s / step_s - 1:+.1%}"


def _alike(reasons: list[str | None]) -> list[tuple[str, list[int]]]:
    """Return reasons with the neighbouring stages that have each."""
    every = groupby(range(len(reasons)), key=lambda at: reasons[at])
    return [(reason, list(own)) for reason, own in every if reason is not None]


def _stages_text(stages: list[int]) -> str:
    """Return stages in words.

    >>> _stages_text([0]), _stages_text([1, 2, 3])
    ('stage 0:', 'stages 1-3:')
    """
    return f"stage {stages[0]}:" if len(stages) == 1 else f"stages {stages[0]}-{stages[-1]}:"


def _reason(simulator: Simulator, candidate: Candidate, at: int, step_s: float) -> str | None:
    """Return why several devices run each replica of a stage; None where one does."""
    stage, rows = candidate.stages[at], candidate.micro_batch_size
    if stage.team == 1:
        return None
    width, together = stage.replicas.devices, f"{stage.team} devices run each replica, since"
    if stage.division == "split" and width > rows and not simulator.costs.divisible:
        return (
            f"{together} a micro-batch of {rows} sample{'s' if rows > 1 else ''} has none for each of {width} replicas"
        )
    alone = _on_single_devices(simulator.costs, candidate, at)
    if alone is None:
        return f"{together} its layers cannot be so many replicas"
    short = max(simulator.costs.shortfalls(alone))
    if short > 0:
        return f"{together} with one each it would lack {size(short)} of memory"
    return f"{together} with one each a step would take {_more(simulator.step_s(alone), step_s)}"


def _on_single_devices(costs: CostModel, candidate: Candidate, at: int) -> Candidate | None:
    """Return a candidate with a replica on every device that runs a stage; None where such would wait for ever."""
    stage, own = candidate.stages[at], next(each for each in groups(candidate.stages) if at in each)
    replicas = Replicas(division=stage.division, shard=stage.shard).so_many(stage.replicas.devices)
    if replicas.width > candidate.micro_batches and replicas.period > 1:
        return None
    shares, most = costs.shares(candidate.micro_batch_size, replicas), replicas.most(candidate.micro_batches)
    stages = tuple(
        CandidateStage.of(*each[:3], shares, min(each.warmup, most), replicas, each.recompute) if index in own else each
        for index, each in enumerate(candidate.stages)
    )
    few = any(after.in_flight > before.in_flight for before, after in pairwise(stages))
    return None if few and replicas.period > 1 else candidate._replace(stages=stages)


def _slower(costs: CostModel, candidate: Candidate, room_s: float) -> float | None:
    """Return how many times as long sums may take until a step is longer by ``room_s``; None: they take nothing."""
    free, most_s = costs.without(links=True), 0.0
    for stage in candidate.stages:
        own, turns = stage._replace(shard="none"), stage.replicas.most(candidate.micro_batches)
        both = [each.forward_s(own, 0) + each.backward_s(own, 0, turns) for each in (costs, free)]
        most_s = max(most_s, turns * (both[0] - both[1]))
    return 1 + room_s / most_s if most_s > 0 and room_s >= 0 else None
