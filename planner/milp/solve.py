"""MILP: the search's question as a mixed-integer linear program, answered by solvers that nothing takes at their word.

Family by family, the path of the least bound is asked for and decoded, and its depths are tried as the search tries
them; then that path is forbidden, and the next one asked for, as long as it may matter. What a solver says is held
against the bound of the plan that it names. Where no solver answers in time, the search does. PuLP is imported here
only, when a program is solved.

Why: docs/design/decisions.md, "Search: Solvers are not believed".
"""

from __future__ import annotations

import heapq
import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from autopar.options.plan import PlanOptions
from autopar.planner.bounds import last_row_bound_s, work_s
from autopar.planner.candidate import Candidate, CandidateStage, Family
from autopar.planner.constraints import Constraints
from autopar.planner.costs.layers import Span
from autopar.planner.costs.model import CostModel
from autopar.planner.milp.program import MOST_ARCS, Arc, ArcNetwork, Linear, linear, network
from autopar.planner.pool import pool_of
from autopar.planner.search.best_first import DepthSearch, SearchResult, search
from autopar.planner.search.judge import Best
from autopar.planner.simulator.simulate import Simulator

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


class SolverError(Exception):
    """Says in a few words why a solver has no answer."""


class Solver(NamedTuple):
    """A solver, by the name that its users know."""

    name: str
    solve: Callable[[Linear, float], Solution]
    """Solve a program within about so many seconds; whatever it raises is a failure, too."""


def highs(linear: Linear, seconds: float) -> Solution:
    """Solve with HiGHS, in this process and one thread."""
    # HiGHS 1.13 has called a solution the least one that was not, after a restart.
    return _solve("HiGHS", linear, seconds, {"gapAbs": 0.0, "threads": 1, "random_seed": 0, "mip_allow_restart": False})


def cbc(linear: Linear, seconds: float) -> Solution:
    """Solve with CBC, a program that PuLP brings along."""
    return _solve("PULP_CBC_CMD", linear, seconds, {"threads": 1})


SOLVERS: Sequence[Solver] = (Solver("HiGHS", highs), Solver("CBC", cbc))
"""The second is asked where the first one fails."""


def _solve(name: str, linear: Linear, seconds: float, options: dict[str, Any]) -> Solution:
    with warnings.catch_warnings():
        # PuLP warns of what its next major version, which is not admitted, does otherwise.
        warnings.simplefilter("ignore", DeprecationWarning)
        import pulp

        if name not in pulp.listSolvers(onlyAvailable=True):
            raise SolverError("it is not installed, or cannot be executed")
        problem, columns = _problem(pulp, linear)
        problem.solve(pulp.getSolver(name, msg=False, timeLimit=seconds, gapRel=GAP, **options))
        return _answer(pulp, problem, columns, seconds)


def _problem(pulp: Any, linear: Linear) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:  # noqa: ANN401
    problem = pulp.LpProblem("plan", pulp.LpMinimize)
    sorts = [(1, pulp.LpBinary)] * linear.whole + [(None, pulp.LpContinuous)] * (linear.columns - linear.whole)
    columns = [pulp.LpVariable(f"x{index}", 0, *sort) for index, sort in enumerate(sorts)]
    if linear.most < math.inf:
        columns[-1].upBound = linear.most
    problem.setObjective(pulp.LpAffineExpression({columns[-1]: 1.0}))
    for row in linear.rows:
        terms = pulp.LpAffineExpression([(columns[at], each) for at, each in row.terms])
        sense = pulp.LpConstraintEQ if row.equal else pulp.LpConstraintGE
        problem.addConstraint(pulp.LpConstraint(terms, sense, rhs=row.least))
    return problem, columns


def _answer(pulp: Any, problem: pulp.LpProblem, columns: Sequence[pulp.LpVariable], allowed_s: float) -> Solution:  # noqa: ANN401
    seconds = float(problem.solutionTime)
    if problem.status == pulp.LpStatusInfeasible:
        return Solution("none", (), math.inf, seconds)
    if problem.sol_status == pulp.LpSolutionOptimal:
        values = tuple(float(column.varValue or 0.0) for column in columns)
        # CBC does not hand over the bound that it proved, but ends within its gap.
        info = getattr(getattr(problem, "solverModel", None), "getInfo", None)
        least = float(info().mip_dual_bound) if info is not None else values[-1] * (1 - GAP)
        return Solution("least", values, least, seconds)
    # PuLP does not say whether it was time that ended a solver.
    if seconds >= NEARLY * allowed_s:
        return Solution("time", (), 0.0, seconds)
    raise SolverError(f"it ended as {pulp.LpStatus[problem.status]!r}")


TOLERANCE = 1e-6
"""Relative, for what solvers compute in floating point; lower bounds hold as exactly as that."""
PATHS = 20
"""Asked for after every family's first, where a gap is allowed; with no gap, as many as it takes."""


class _UnansweredError(Exception):
    """No solver answers; says why."""


class _FamilyProgram:
    """One family's program, and what is known of it."""

    def __init__(
        self, costs: CostModel, paths: ArcNetwork, constraints: Constraints, bound_s: float, most_s: float
    ) -> None:
        self.costs, self.network, self.constraints, self.bound_s = costs, paths, constraints, bound_s
        self.overhead_s = costs.profile.step_overhead_s
        self.linear = linear(paths, constraints, most_s - self.overhead_s)
        self.forbidden: set[tuple[int, ...]] = set()
        self.places = {_place(arc.stage) for arc in paths.arcs}

    def stages(self, path: Sequence[int]) -> tuple[CandidateStage, ...]:
        """Return a path's stages, with as much in flight as fits."""
        return tuple(self.network.arcs[arc].stage for arc in path)

    def forbid(self, path: Sequence[int]) -> None:
        """Ask for other paths from now on."""
        self.forbidden.add(tuple(path))
        self.linear = self.linear.without(path)

    def below(self, step_s: float) -> None:
        """Ask for no path that cannot beat a step time."""
        self.linear = self.linear.below(step_s - self.overhead_s)

    def check_answer(self, answer: Solution, best: Best) -> list[int] | None:
        """Return the path that a solver found, and raise the family's bound; none where there is no path.

        Raises:
            SolverError: that cannot be right.
        """
        path, said_s = None, best.step_s
        if answer.status == "none" and not math.isfinite(said_s) and not self.forbidden:
            if self._any():
                raise SolverError("it said that there is no plan, but there are")
            return None
        if answer.status == "least":
            path = self._path(answer.values)
            said_s = self._seconds(answer.least)
            own_s = last_row_bound_s(self.costs, Candidate(*self.network.family, self.stages(path)))
            named_s = self._seconds(answer.values[-1])
            if not math.isclose(own_s, named_s, rel_tol=TOLERANCE) or not said_s <= own_s * (1 + TOLERANCE):
                raise SolverError(
                    f"it said {named_s:.9g} s, at least {said_s:.9g} s, of a plan whose bound is {own_s:.9g} s"
                )
            if own_s < self.bound_s * (1 - TOLERANCE):
                raise SolverError(
                    f"its plan's bound is {own_s:.9g} s, but it said that none is below {self.bound_s:.9g} s"
                )
            said_s = own_s if said_s >= own_s * (1 - TOLERANCE) else said_s
        known_s = self._known_s(best)
        if known_s < said_s * (1 - TOLERANCE):
            raise SolverError(f"it said that no bound is below {said_s:.9g} s, but a known plan's is {known_s:.9g} s")
        self.bound_s = max(self.bound_s, min(said_s, best.step_s))
        return path

    def _seconds(self, value: float) -> float:
        return self.overhead_s + value * self.linear.unit_s

    def _path(self, values: Sequence[float]) -> list[int]:
        arcs = self.network.arcs
        if len(values) != self.linear.columns or not all(map(math.isfinite, values)):
            raise SolverError("it solved another program")
        path = [index for index in range(len(arcs)) if values[index] > 0.5]
        path.sort(key=lambda index: arcs[index].begin)
        ends = [(0, 0), *(arcs[index].end for index in path)]
        linked = [arcs[index].begin for index in path] == ends[:-1] and ends[-1][0] == self.network.layers
        if not linked or any(0.1 < value < 0.9 for value in values[: len(arcs)]):
            raise SolverError("what it found is no plan")
        if tuple(path) in self.forbidden:
            raise SolverError("it found a forbidden plan")
        return path

    def _any(self) -> bool:
        """Whether some path has as many stages as are allowed."""
        # By node, the numbers of stages that may lead there, as the bits of an integer.
        counts: dict[tuple[int, int], int] = {(0, 0): 1}
        for arc in sorted(self.network.arcs, key=lambda each: each.begin):
            counts[arc.end] = counts.get(arc.end, 0) | counts.get(arc.begin, 0) << 1
        ended = [each for (layers, _), each in counts.items() if layers == self.network.layers]
        numbers = range(self.constraints.least_stages, self.constraints.most_stages + 1)
        return any(each >> number & 1 for each in ended for number in numbers)

    def _known_s(self, best: Best) -> float:
        """The bound of the best plan so far, where the program should have found it; else infinite."""
        if best.fastest is None or best.fastest.candidate[:3] != self.network.family:
            return math.inf
        places = [_place(stage) for stage in best.fastest.candidate.stages]
        seen = any(list(map(_place, self.stages(path))) == places for path in self.forbidden)
        missing = seen or not self.places.issuperset(places)
        return math.inf if missing else last_row_bound_s(self.costs, best.fastest.candidate)


def _place(stage: CandidateStage) -> tuple[object, ...]:
    """A stage but for what it has in flight and recomputes."""
    return stage.first, stage.stop, stage.devices, stage.shares, stage.shard, stage.division


class _Rounds(DepthSearch):
    """Paths and candidates in the order of their bounds, of all families together."""

    def __init__(self, simulator: Simulator, families: Sequence[Family], options: PlanOptions, best: Best) -> None:
        super().__init__(simulator, options, best)
        self.families = families
        self.pool = pool_of(self.costs, exact=self.exact)
        self.constraints = Constraints.of(self.costs, options)
        self.programs: dict[int, _FamilyProgram] = {}
        self.heap: list[tuple[float, int, int | Candidate]] = []
        """Families that may hold better plans, and candidates: the least bound is first, the earliest of equals."""
        self.sequence = self.paths = 0

    def go(self, solver: Solver, seconds: float) -> SearchResult:
        """Ask and try until the best is best, or near enough, or as much was tried as the options allow."""
        self.solver, self.seconds = solver, seconds
        for index, family in enumerate(self.families):
            self._push(work_s(self.costs, family), index)
        while self.heap and self.candidates < self.options.candidate_limit:
            ahead_s = self.heap[0][0]
            near = self.paths > 0 and self.best.step_s <= (1 + self.options.gap) * min(ahead_s, self.floor_s)
            spent = not self.exact and self.paths >= len(self.families) + PATHS
            if near or spent or self.best.step_s <= ahead_s:
                break
            bound_s, _, what = heapq.heappop(self.heap)
            if isinstance(what, Candidate):
                self.judge(bound_s, what)
            else:
                self._ask(bound_s, what)
        ahead_s = self.heap[0][0] if self.heap else math.inf
        lower_bound_s = min(self.best.step_s, self.floor_s, ahead_s)
        return SearchResult(lower_bound_s, self.least_bound_s, {})

    def _push(self, bound_s: float, what: int | Candidate) -> None:
        self.sequence += 1
        heapq.heappush(self.heap, (bound_s, self.sequence, what))

    def _ask(self, bound_s: float, index: int) -> None:
        """Ask a family for its least path, and try that."""
        if index not in self.programs:
            paths = network(self.costs, self.pool, self.families[index], self.options, self.constraints)
            if paths is None:
                raise _UnansweredError(f"there are more than {MOST_ARCS} stages to choose from")
            if not paths.arcs:
                return
            self.programs[index] = _FamilyProgram(self.costs, paths, self.constraints, bound_s, self.best.step_s)
        program = self.programs[index]
        program.below(self.best.step_s)
        self.paths += 1
        path = program.check_answer(self._solve(program.linear), self.best)
        if path is not None:
            self._try(program, path)
            program.forbid(path)
            self._push(program.bound_s, index)

    def _solve(self, linear: Linear) -> Solution:
        allowed = f"`solver_seconds={self.options.solver_seconds:g}`"
        if self.seconds <= 0:
            raise _UnansweredError(f"{allowed} were over")
        try:
            answer = self.solver.solve(linear, self.seconds)
        except SolverError:
            raise
        # Whatever a solver dies of, the plan does not.
        except Exception as error:
            raise SolverError(" ".join(f"{type(error).__name__} {error}".split())) from error
        self.seconds -= answer.seconds
        if answer.status == "time":
            raise _UnansweredError(f"{self.solver.name} was not done within {allowed}")
        return answer

    def _try(self, program: _FamilyProgram, path: Sequence[int]) -> None:
        """Try the depths of a path: with no gap all of them, in the order of their bounds; else a few at once."""
        family = program.network.family
        spans = [self._span(family, program.network.arcs[arc]) for arc in path]
        for bound_s, candidate in self.try_depths(Candidate(*family, program.stages(path)), spans):
            self._push(bound_s, candidate)

    def _span(self, family: Family, arc: Arc) -> Span:
        """What a stage may recompute, from the least that lets it fit by itself."""
        levels = self.costs.recompute_levels(family.micro_batch_size, self.costs.form_of(arc.stage))
        low = len(arc.stage.recompute)
        return Span(levels, low, low if self.options.recompute == "none" else None)


def search_by_milp(
    simulator: Simulator,
    families: Sequence[Family],
    options: PlanOptions,
    best: Best,
    solvers: Sequence[Solver] = SOLVERS,
) -> SearchResult:
    """Improve on ``best`` by mixed-integer programs, or by the search where no solver answers.

    The bound holds for every plan of the families. Notes say which solver failed, and why the search took over.
    """
    seconds, failures = options.solver_seconds, list[str]()
    try:
        for solver in solvers:
            # What was simulated for a solver that failed is known to the next.
            rounds = _Rounds(simulator, families, options, best)
            try:
                return rounds.go(solver, seconds)._replace(notes=tuple(failures))
            except SolverError as failure:
                failures.append(f"{solver.name} failed: {failure}")
            seconds = rounds.seconds
        raise _UnansweredError("; ".join(failures) or "there is no solver")
    except _UnansweredError as ended:
        found = search(simulator, families, options, best)
        gap = best.step_s / found.lower_bound_s - 1 if found.lower_bound_s > 0 else 0.0
        said = f", {gap:.1%} above its lower bound" if best.fastest is not None else ""
        note = f"`solver='milp'`: {ended}; the plan is that of `solver='dp'`{said}"
        return found._replace(notes=(note,))
