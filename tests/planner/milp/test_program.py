"""Networks of arcs and their programs against the bounds of all paths, one by one."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from scipy.optimize import LinearConstraint, milp

from autopar.planner import PlanOptions
from autopar.planner.bounds import candidate_bound_s, last_row_bound_s
from autopar.planner.candidate import Candidate, families
from autopar.planner.constraints import Constraints
from autopar.planner.costs.model import CostModel
from autopar.planner.milp.program import ArcNetwork, Linear, linear, network
from autopar.planner.pool import pool_of
from oracles.exhaustive import everything
from random_problems import problem

Problem = tuple[CostModel, PlanOptions, ArcNetwork, Linear]


def _problems(seeds: range) -> Iterator[Problem]:
    for seed in seeds:
        profile, cluster = problem(seed, 3, 3, most_layers=4, batches=(2, 4))
        memory_bytes = 5_000_000 if seed % 2 else None
        options = PlanOptions(gpus=3, memory_bytes=memory_bytes, micro_batches=2, schedule="1f1b", shard="optimizer")
        costs = CostModel(profile, cluster, options)
        rules, pool = Constraints.of(costs, options), pool_of(costs, exact=True)
        (family,) = families(costs.batch, options)
        found = network(costs, pool, family, options, rules)
        if found.arcs:
            yield costs, options, found, linear(found, rules, float("inf"))


def _paths(found: ArcNetwork) -> list[tuple[int, ...]]:
    """All paths through a network."""
    whole, open_paths = [], [((), (0, 0))]
    while open_paths:
        path, node = open_paths.pop()
        if node[0] == found.layers:
            whole.append(path)
            continue
        open_paths += [((*path, at), arc.end) for at, arc in enumerate(found.arcs) if arc.begin == node]
    return whole


def _candidate(found: ArcNetwork, path: tuple[int, ...]) -> Candidate:
    return Candidate(*found.family, tuple(found.arcs[at].stage for at in path))


def _least_s(program: Linear, path: tuple[int, ...] | None = None) -> float:
    """The least solution, or the one whose arcs are a path's."""
    matrix, low = np.zeros((len(program.rows), program.columns)), np.zeros(program.columns)
    for at, row in enumerate(program.rows):
        for column, factor in row.terms:
            matrix[at, column] = factor
    least = np.array([row.least for row in program.rows])
    most = np.array([row.least if row.equal else np.inf for row in program.rows])
    high = np.full(program.columns, np.inf)
    high[: program.whole], high[-1] = 1.0, program.most
    if path is not None:
        high[: program.whole] = 0.0
        low[list(path)] = high[list(path)] = 1.0
    goal, whole = np.zeros(program.columns), np.zeros(program.columns)
    goal[-1], whole[: program.whole] = 1.0, 1
    answer = milp(goal, integrality=whole, bounds=(low, high), constraints=LinearConstraint(matrix, least, most))  # type: ignore[arg-type]
    return float("inf") if answer.x is None else float(answer.x[-1]) * program.unit_s


def test_programs_and_paths_hold_the_least_bounds() -> None:
    several = 0
    for costs, _, found, program in _problems(range(40)):
        overhead_s, paths = costs.profile.step_overhead_s, _paths(found)
        bounds = [last_row_bound_s(costs, _candidate(found, path)) for path in paths]
        for path, bound_s in list(zip(paths, bounds, strict=True))[:: max(1, len(paths) // 8)]:
            assert _least_s(program, path) + overhead_s == pytest.approx(bound_s, rel=1e-5)
        assert _least_s(program) + overhead_s == pytest.approx(min(bounds), rel=1e-5)
        several += len(paths) > 8
    assert several >= 4
    compared = 0
    for costs, _, found, program in _problems(range(100, 124)):
        paths = _paths(found)
        bounds = sorted((last_row_bound_s(costs, _candidate(found, path)), path) for path in paths)
        overhead_s = costs.profile.step_overhead_s
        for (_, path), (after_s, _) in list(pairwise(bounds))[:3]:
            program = program.without(path)
            assert _least_s(program) + overhead_s == pytest.approx(after_s, rel=1e-5)
            compared += 1
        assert _least_s(program.below(0.9 * (bounds[0][0] - overhead_s))) == float("inf")
    assert compared > 18
    compared = 0
    for costs, options, found, _ in _problems(range(40, 60)):
        plans = [each for each in everything(costs, options) if max(costs.shortfalls(each)) <= 0]
        if plans:
            compared += 1
            least_s = min(last_row_bound_s(costs, _candidate(found, path)) for path in _paths(found))
            assert least_s <= min(candidate_bound_s(costs, each) for each in plans) * (1 + 1e-9)
    assert compared > 10
