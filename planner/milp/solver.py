"""Solvers of mixed-integer linear programs, through PuLP: the only module that imports it, and only when it solves."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from autopar.planner.milp.linear import Linear

if TYPE_CHECKING:
    import pulp


GAP = 1e-9
"""Relative, at which a solver calls a solution the least one."""
NEARLY = 0.9
"""Of the seconds allowed: who stops without an answer after so many was stopped by them."""


class Solution(NamedTuple):
    """What a solver says."""

    status: Literal["least", "none", "time"]
    """The values are least; there are none; or time was up."""
    values: tuple[float, ...]
    least: float
    """What it says that no solution is below."""
    seconds: float
    """That it says it took."""


class Failed(NamedTuple):
    """Why there is no answer, in a few words."""

    reason: str


class Solver(NamedTuple):
    """A solver, by the name that its users know."""

    name: str
    solve: Callable[[Linear, float], Solution | Failed]
    """Solve a program within about so many seconds; whatever it raises is a failure, too."""


def highs(linear: Linear, seconds: float) -> Solution | Failed:
    """Solve with HiGHS, in this process and one thread."""
    # HiGHS 1.13 has called a solution the least one that was not, after a restart.
    return _solve("HiGHS", linear, seconds, {"gapAbs": 0.0, "threads": 1, "random_seed": 0, "mip_allow_restart": False})


def cbc(linear: Linear, seconds: float) -> Solution | Failed:
    """Solve with CBC, a program that PuLP brings along."""
    return _solve("PULP_CBC_CMD", linear, seconds, {"threads": 1})


SOLVERS: Sequence[Solver] = (Solver("HiGHS", highs), Solver("CBC", cbc))
"""The second is asked where the first one fails."""


def _solve(name: str, linear: Linear, seconds: float, options: dict[str, Any]) -> Solution | Failed:
    with warnings.catch_warnings():
        # PuLP warns of what its next major version, which is not admitted, does otherwise.
        warnings.simplefilter("ignore", DeprecationWarning)
        import pulp

        if name not in pulp.listSolvers(onlyAvailable=True):
            return Failed("it is not installed, or cannot be executed")
        problem, columns = _problem(pulp, linear)
        problem.solve(pulp.getSolver(name, msg=False, timeLimit=seconds, gapRel=GAP, **options))
        return _answer(pulp, problem, columns, seconds)


def _problem(pulp: Any, linear: Linear) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:  # noqa: ANN401
    problem = pulp.LpProblem("plan", pulp.LpMinimize)
    columns = [
        pulp.LpVariable(f"x{index}", 0, 1, pulp.LpBinary) if index < linear.whole else pulp.LpVariable(f"x{index}", 0)
        for index in range(linear.columns)
    ]
    if linear.most < math.inf:
        columns[-1].upBound = linear.most
    problem.setObjective(pulp.LpAffineExpression({columns[-1]: 1.0}))
    for row in linear.rows:
        terms = pulp.LpAffineExpression([(columns[at], each) for at, each in row.terms])
        sense = pulp.LpConstraintEQ if row.equal else pulp.LpConstraintGE
        problem.addConstraint(pulp.LpConstraint(terms, sense, rhs=row.least))
    return problem, columns


def _answer(
    pulp: Any,  # noqa: ANN401
    problem: pulp.LpProblem,
    columns: Sequence[pulp.LpVariable],
    allowed_s: float,
) -> Solution | Failed:
    seconds = float(problem.solutionTime)
    if problem.status == pulp.LpStatusInfeasible:
        return Solution("none", (), math.inf, seconds)
    if problem.sol_status == pulp.LpSolutionOptimal:
        values = tuple(float(column.varValue or 0.0) for column in columns)
        return Solution("least", values, _proven(problem, values[-1]), seconds)
    # PuLP does not say whether it was time that ended a solver.
    if seconds >= NEARLY * allowed_s:
        return Solution("time", (), 0.0, seconds)
    return Failed(f"it ended as {pulp.LpStatus[problem.status]!r}")


def _proven(problem: pulp.LpProblem, found: float) -> float:
    """Return the bound that the solver proved; CBC does not hand it over, but ends within its gap."""
    info = getattr(getattr(problem, "solverModel", None), "getInfo", None)
    return float(info().mip_dual_bound) if info is not None else found * (1 - GAP)
