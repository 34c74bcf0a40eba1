"""The mixed-integer program against search and oracle, and solvers that are missing, crash, dawdle or lie."""

import math
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from autopar.errors import UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.profile import Profile
from autopar.planner import PlanOptions, plan
from autopar.planner.bounds import candidate_bound_s
from autopar.planner.candidate import families
from autopar.planner.constraints import Constraints
from autopar.planner.costs.model import CostModel
from autopar.planner.milp.program import Linear
from autopar.planner.milp.solve import SOLVERS, Solution, Solver, search_by_milp
from autopar.planner.search.best_first import SearchResult, search
from autopar.planner.search.judge import Best
from autopar.planner.simulator.simulate import Simulator
from oracles.exhaustive import exhaust
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile, two_kinds

HIGHS, CBC = SOLVERS
Answer = Callable[[Linear, float], Solution]


def _instance(seed: int) -> tuple[Profile, Cluster, PlanOptions]:
    """Few layers with every option, or more with fewer; half on two kinds of device, half with constraints."""
    rng = random.Random(seed)
    layers, devices, batches, asked = rng.choice(
        [
            (4, 2, (4,), {}),
            (4, 2, (2, 4), {}),
            (4, 3, (2,), {"shard": "none"}),
            (6, 3, (2,), {"recompute": "none", "shard": "none"}),
            (3, 4, (2,), {"shard": "optimizer", "recompute": "full"}),
            (3, 3, (2, 3), {"schedule": "gpipe"}),
            (4, 3, (2,), {"use_all": True, "recompute": "none"}),
        ]
    )
    profile, cluster = random_profile(seed, most_layers=layers, batches=batches), random_cluster(seed, devices)
    if seed % 2:
        profile, cluster = two_kinds(profile, cluster, seed)
    options = PlanOptions(**{"gpus": devices, "gap": 0.0, "shard": "auto", "solver_seconds": 1e4, **asked})
    names = [layer.name for layer in profile.layers]
    if rng.random() < 0.5 and len(names) > 2:
        one, other = rng.sample(names, 2)
        pin = rng.choice([f"{one},{other} same stage", f"{one},{other} different stages", f"{one} on test"])
        cuts = (rng.choice(names[:-1]),) if rng.random() < 0.5 else ()
        options = replace(options, pin=(pin,), forbid_cut=cuts, max_stages=rng.choice([None, 2, 3]))
    return profile, cluster, options


def _limited(seed: int) -> tuple[CostModel, PlanOptions] | None:
    """An instance whose memory binds more often than not; none where its constraints contradict each other."""
    profile, cluster, options = _instance(seed)
    costs = CostModel(profile, cluster, options)
    try:
        Constraints.of(costs, options)
    except UsageError:
        return None
    free, _ = _searched(costs, options)
    if free.fastest is not None and seed % 3:
        limit = max(1, int(max(costs.peak_bytes(free.fastest.candidate)) * (0.999, 0.95, 0.9, 0.8)[seed % 4]))
        options = replace(options, memory_bytes=limit)
    return CostModel(profile, cluster, options), options


def _searched(costs: CostModel, options: PlanOptions) -> tuple[Best, float]:
    best = Best()
    return best, search(Simulator(costs), families(costs.batch, options), options, best).least_bound_s


def _programmed(costs: CostModel, options: PlanOptions, solvers: Sequence[Solver]) -> tuple[Best, SearchResult]:
    best = Best()
    return best, search_by_milp(Simulator(costs), families(costs.batch, options), options, best, solvers)


@pytest.mark.some(1)
@pytest.mark.parametrize("part", range(16))
@pytest.mark.reliability(52)
def test_program_search_and_oracle_agree_on_the_best_step_and_the_least_bound(part: int) -> None:
    compared = 0
    for seed in range(12 * part, 12 * (part + 1)):
        made = _limited(seed)
        if made is None:
            continue
        costs, options = made
        oracle = exhaust(Simulator(costs), options, Best())
        best, found = _programmed(costs, options, [HIGHS] if seed % 8 else [CBC])
        assert found.notes == (), f"seed {seed}"
        assert best.step_s == pytest.approx(oracle.step_s, rel=1e-9), f"seed {seed}"
        assert found.lower_bound_s == pytest.approx(oracle.step_s, rel=1e-6), f"seed {seed}"
        if best.fastest is None:
            continue
        compared += 1
        assert options.recompute != "none" or not any(stage.recompute for stage in best.fastest.candidate.stages)
        # Where a first candidate is no worse than any bound, no bound is met.
        if found.least_bound_s < best.step_s * (1 - 1e-6):
            assert found.least_bound_s == pytest.approx(oracle.least_bound_s, rel=1e-6), f"seed {seed}"
            assert _searched(costs, options)[1] == pytest.approx(oracle.least_bound_s, rel=1e-6), f"seed {seed}"
    assert compared >= 3


def _crashes(linear: Linear, seconds: float) -> Solution:
    raise RuntimeError("out of\nmemory")


def _says(state: str, value: float | None, least: float, columns: int | None = None) -> Answer:
    """Answer the same whatever is asked; with a value, so many times or for every column."""

    def solve(linear: Linear, seconds: float) -> Solution:
        values = () if value is None else (value,) * (columns or linear.columns)
        return Solution(state, values, least, seconds if state == "time" else 0.0)  # type: ignore[arg-type]

    return solve


def _altered(value: float = 1.0, last: float = 1.0, least: float = 1.0) -> Answer:
    """Answer what is true, times these factors."""

    def solve(linear: Linear, seconds: float) -> Solution:
        answer = HIGHS.solve(linear, 1e4)
        values = tuple(each / value for each in answer.values)
        return answer._replace(values=(*values[:-1], values[-1] * last), least=answer.least * least)

    return solve


def _settles() -> Answer:
    """Call the second-best path the least one."""
    hidden: list[int] = []

    def solve(linear: Linear, seconds: float) -> Solution:
        if hidden:
            return HIGHS.solve(linear, 1e4)
        values = HIGHS.solve(linear, 1e4).values
        hidden.extend(index for index in range(linear.whole) if values[index] > 0.5)
        return HIGHS.solve(linear.without(hidden), 1e4)

    return solve


def _repeats() -> Answer:
    """Answer what was answered before."""
    said: list[Solution] = []

    def solve(linear: Linear, seconds: float) -> Solution:
        said.extend([] if said else [HIGHS.solve(linear, 1e4)])
        return said[0]

    return solve


_denies = _says("none", None, math.inf)
FAULTS: list[tuple[str, Answer, str]] = [
    ("crashes", _crashes, "Odd failed: RuntimeError out of memory"),
    ("dawdles", _says("time", None, 0.0), "Odd was not done within `solver_seconds=1000`"),
    ("calls a plan faster than it is", _altered(last=0.9), "of a plan whose bound is"),
    ("claims a bound above the plan's own", _altered(least=1.1), "of a plan whose bound is"),
    ("denies", _denies, "it said that there is no plan, but there are"),
    ("mumbles", _says("least", 0.0, 0.0), "what it found is no plan"),
    ("halves", _altered(value=1.5), "what it found is no plan"),
    ("errs", _says("least", math.nan, math.nan), "it solved another program"),
    ("misreads", _says("least", 1.0, 1.0, 1), "it solved another program"),
    ("settles", _settles(), "but it said that none is below"),
    ("repeats", _repeats(), "it found a forbidden plan"),
]


@pytest.mark.parametrize(("fault", "note"), [row[1:] for row in FAULTS], ids=[what for what, *_ in FAULTS])
@pytest.mark.reliability(51)
def test_a_solver_that_fails_leaves_the_plan_to_the_search(fault: Answer, note: str) -> None:
    options = PlanOptions(gpus=3, micro_batches=4, gap=0.0, max_stages=2, solver_seconds=1000)
    costs = CostModel(gpt_profile(blocks=4), local_cluster(2), options)
    expected, _ = _searched(costs, options)
    best, found = _programmed(costs, options, [Solver("Odd", fault)])
    assert best.fastest == expected.fastest
    assert note in found.notes[0]
    assert found.notes[0].startswith("`solver='milp'`: Odd ")
    assert found.notes[0].endswith("the plan is that of `solver='dp'`, 0.0% above its lower bound")
    assert found.lower_bound_s == pytest.approx(expected.step_s)


@pytest.mark.reliability(52)
def test_programs_prove_no_less_than_the_search_and_denials_are_exposed() -> None:
    options = PlanOptions(gpus=3, micro_batches=4, gap=0.0, max_stages=2, solver_seconds=1000)
    costs = CostModel(gpt_profile(blocks=4), local_cluster(2), options)
    expected, _ = _searched(costs, options)
    for fault in (_crashes, _denies):
        best, found = _programmed(costs, options, [Solver("Odd", fault), CBC])
        assert best.step_s == pytest.approx(expected.step_s)
        assert found.lower_bound_s == pytest.approx(expected.step_s, rel=1e-6)
        assert len(found.notes) == 1
        assert found.notes[0].startswith("Odd failed: ")
    _, found = _programmed(costs, options, [Solver("Odd", _crashes), Solver("Even", _denies)])
    assert found.notes[0].startswith("`solver='milp'`: Odd failed: RuntimeError out of memory; Even failed: it said")
    options = PlanOptions(gpus=2, micro_batches=4, min_stages=2, bytes_per_s=1e8, gap=0.0)
    costs = CostModel(gpt_profile(blocks=4), local_cluster(2), options)
    best, _ = _searched(costs, options)
    assert candidate_bound_s(costs, best.fastest.candidate) < 0.995 * best.step_s
    found = search_by_milp(Simulator(costs), families(costs.batch, options), options, best, [Solver("Odd", _denies)])
    assert "but a known plan's is" in found.notes[0]
    options = PlanOptions(gpus=3, memory_bytes=22 * 2**20, micro_batches=8)
    costs = CostModel(gpt_profile(blocks=6), local_cluster(2), options)
    best, found = _programmed(costs, options, [HIGHS])
    searched = Best()
    proved = search(Simulator(costs), families(costs.batch, options), options, searched)
    assert found.notes == ()
    assert any(stage.recompute for stage in best.fastest.candidate.stages)
    assert proved.lower_bound_s <= found.lower_bound_s * (1 + 1e-6)
    assert found.lower_bound_s <= min(best.step_s, searched.step_s)


@pytest.mark.reliability(51)
def test_solvers_that_fail_or_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, cluster = gpt_profile(blocks=4), local_cluster(3)
    hurried = plan(profile, cluster, PlanOptions(gpus=3, solver="milp", solver_seconds=1e-9))
    expected = plan(profile, cluster, PlanOptions(gpus=3))
    assert hurried.stages == expected.stages
    assert "`solver_seconds=1e-09`" in hurried.notes[0]
    monkeypatch.setitem(sys.modules, "pulp", None)
    without = plan(profile, cluster, PlanOptions(gpus=3, solver="milp"))
    assert (without.stages, without.predicted) == (expected.stages, expected.predicted)
    assert re.search("HiGHS failed: ModuleNotFoundError.* CBC failed: ModuleNotFoundError", without.notes[0])

    def notes() -> tuple[str, ...]:
        options = PlanOptions(gpus=2, solver="milp", min_stages=2)
        return plan(gpt_profile(blocks=2), local_cluster(2), options).notes

    pulp, failed = pytest.importorskip("pulp"), "HiGHS failed: it is not installed, or cannot be executed"
    monkeypatch.setattr(pulp, "listSolvers", lambda onlyAvailable: ["PULP_CBC_CMD"])  # noqa: N803
    assert failed in notes()
    monkeypatch.setattr(pulp, "listSolvers", lambda onlyAvailable: [])  # noqa: N803
    assert notes()[0].startswith(f"`solver='milp'`: {failed}; CBC")
    monkeypatch.setattr("autopar.planner.milp.program.MOST_ARCS", 5)
    assert "stages to choose from; the plan is that of `solver='dp'`" in notes()[0]
