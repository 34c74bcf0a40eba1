"""The mixed-integer program against search and oracle, and solvers that are missing, crash, dawdle or lie."""

from __future__ import annotations

import math
import random
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
from autopar.planner.milp.solve import SOLVERS, MilpResult, Solution, Solver, search_by_milp
from autopar.planner.search.best_first import search
from autopar.planner.search.judge import Best
from autopar.planner.simulator.simulate import Simulator
from oracles.exhaustive import Exhausted, exhaust
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


def _exhausted(costs: CostModel, options: PlanOptions) -> Exhausted:
    return exhaust(Simulator(costs), options, Best())


def _programmed(costs: CostModel, options: PlanOptions, solvers: Sequence[Solver]) -> tuple[Best, MilpResult]:
    best = Best()
    return best, search_by_milp(Simulator(costs), families(costs.batch, options), options, best, solvers)


@pytest.mark.slow
@pytest.mark.reliability(52)
def test_program_search_and_oracle_agree_on_the_best_step_and_the_least_bound() -> None:
    compared = bounds = constrained = recomputing = sharding = 0
    for seed in range(160):
        made = _limited(seed)
        if made is None:
            continue
        costs, options = made
        oracle = _exhausted(costs, options)
        best, found = _programmed(costs, options, [HIGHS] if seed % 8 else [CBC])
        assert found.notes == (), f"seed {seed}"
        assert best.step_s == pytest.approx(oracle.step_s, rel=1e-9), f"seed {seed}"
        assert found.lower_bound_s == pytest.approx(oracle.step_s, rel=1e-6), f"seed {seed}"
        if best.fastest is None:
            continue
        compared += 1
        recomputed = [stage.recompute for stage in best.fastest.candidate.stages]
        assert options.recompute != "none" or not any(recomputed)
        # Where a first candidate is no worse than any bound, no bound is met.
        if found.least_bound_s < best.step_s * (1 - 1e-6):
            bounds += 1
            assert found.least_bound_s == pytest.approx(oracle.least_bound_s, rel=1e-6), f"seed {seed}"
            assert _searched(costs, options)[1] == pytest.approx(oracle.least_bound_s, rel=1e-6), f"seed {seed}"
        constrained += bool(options.pin)
        recomputing += options.recompute == "auto" and any(recomputed)
        sharding += any(stage.shard != "none" for stage in best.fastest.candidate.stages)
    assert compared >= 90
    assert bounds >= 15
    assert min(constrained, sharding) >= 15
    assert recomputing >= 3


def test_the_first_path_asked_for_has_the_least_bound_of_all() -> None:
    """With a gap that anything certifies, one path is asked for, of the one family."""
    met = 0
    for seed in range(500, 560):
        profile = random_profile(seed, most_layers=5, batches=(2,), skips=0.0)
        cluster = random_cluster(seed, 3)
        options = PlanOptions(gpus=3, gap=1e6, micro_batches=2, recompute="none", shard="auto")
        costs = CostModel(profile, cluster, options)
        _, found = _programmed(costs, options, [HIGHS])
        met += 1
        assert found.lower_bound_s == pytest.approx(_exhausted(costs, options).least_bound_s, rel=1e-6), f"seed {seed}"
    assert met == 60


def test_a_program_proves_no_less_than_the_search_where_memory_binds() -> None:
    options = PlanOptions(gpus=3, memory_bytes=22 * 2**20, micro_batches=8)
    costs = CostModel(gpt_profile(blocks=6), local_cluster(2), options)
    best, found = _programmed(costs, options, [HIGHS])
    searched = Best()
    proved = search(Simulator(costs), families(costs.batch, options), options, searched)
    assert found.notes == ()
    assert best.fastest is not None
    assert searched.fastest is not None
    assert any(stage.recompute for stage in best.fastest.candidate.stages)
    assert proved.lower_bound_s <= found.lower_bound_s * (1 + 1e-6)
    assert found.lower_bound_s <= min(best.step_s, searched.step_s)


def test_a_plan_made_by_programs_is_as_fast_and_the_same_each_time() -> None:
    profile, cluster = gpt_profile(blocks=4), local_cluster(2)
    asked = PlanOptions(gpus=3, gap=0.0, min_stages=2, max_stages=2, pin=("h.1,h.2 same stage",), schedule="gpipe")
    steps = plan(profile, cluster, asked).predicted
    made = plan(profile, cluster, replace(asked, solver="milp"))
    assert made.predicted.step_s == pytest.approx(steps.step_s, rel=1e-9)
    assert made.predicted.lower_bound_s == pytest.approx(steps.lower_bound_s, rel=1e-6)
    assert made.dumps() == plan(profile, cluster, replace(asked, solver="milp")).dumps()


def _crashes(linear: Linear, seconds: float) -> Solution:
    raise RuntimeError("out of\nmemory")


def _dawdles(linear: Linear, seconds: float) -> Solution:
    return Solution("time", (), 0.0, seconds)


def _honest(linear: Linear) -> Solution:
    return HIGHS.solve(linear, 1e4)


def _boasts(linear: Linear, seconds: float) -> Solution:
    """Call a plan faster than it is."""
    answer = _honest(linear)
    return answer._replace(values=(*answer.values[:-1], answer.values[-1] * 0.9))


def _overrates(linear: Linear, seconds: float) -> Solution:
    """Claim a bound above the plan's own."""
    answer = _honest(linear)
    return answer._replace(least=answer.least * 1.1)


def _denies(linear: Linear, seconds: float) -> Solution:
    return Solution("none", (), math.inf, 0.0)


def _mumbles(linear: Linear, seconds: float) -> Solution:
    return Solution("least", (0.0,) * linear.columns, 0.0, 0.0)


def _halves(linear: Linear, seconds: float) -> Solution:
    answer = _honest(linear)
    return answer._replace(values=tuple(value / 1.5 for value in answer.values))


def _errs(linear: Linear, seconds: float) -> Solution:
    return Solution("least", (math.nan,) * linear.columns, math.nan, 0.0)


def _misreads(linear: Linear, seconds: float) -> Solution:
    return Solution("least", (1.0,), 1.0, 0.0)


def _settles() -> Answer:
    """Call the second-best path the least one."""
    hidden: list[int] = []

    def solve(linear: Linear, seconds: float) -> Solution:
        if not hidden:
            values = _honest(linear).values
            hidden.extend(index for index in range(linear.whole) if values[index] > 0.5)
            return _honest(linear.without(hidden))
        return _honest(linear)

    return solve


def _repeats() -> Answer:
    """Answer what was answered before."""
    said: list[Solution] = []

    def solve(linear: Linear, seconds: float) -> Solution:
        said.append(_honest(linear) if not said else said[0])
        return said[0]

    return solve


FAULTS: list[tuple[Answer, str]] = [
    (_crashes, "Odd failed: RuntimeError out of memory"),
    (_dawdles, "Odd was not done within `solver_seconds=60`"),
    (_boasts, "of a plan whose bound is"),
    (_overrates, "of a plan whose bound is"),
    (_denies, "it said that there is no plan, but there are"),
    (_mumbles, "what it found is no plan"),
    (_halves, "what it found is no plan"),
    (_errs, "it solved another program"),
    (_misreads, "it solved another program"),
    (_settles(), "but it said that none is below"),
    (_repeats(), "it found a forbidden plan"),
]


@pytest.mark.parametrize(("fault", "note"), FAULTS, ids=[note for _, note in FAULTS])
@pytest.mark.reliability(51)
def test_a_solver_that_fails_leaves_the_plan_to_the_search(fault: Answer, note: str) -> None:
    options = PlanOptions(gpus=3, micro_batches=4, gap=0.0, max_stages=2)
    costs = CostModel(gpt_profile(blocks=4), local_cluster(2), options)
    expected, _ = _searched(costs, options)
    best, found = _programmed(costs, options, [Solver("Odd", fault)])
    assert best.fastest == expected.fastest
    assert note in found.notes[0]
    assert found.notes[0].startswith("`solver='milp'`: Odd ")
    assert found.notes[0].endswith("the plan is that of `solver='dp'`, 0.0% above its lower bound")
    assert found.lower_bound_s == pytest.approx(expected.step_s)


def test_the_second_solver_is_asked_where_the_first_fails() -> None:
    options = PlanOptions(gpus=3, micro_batches=4, gap=0.0, max_stages=2)
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


@pytest.mark.reliability(52)
def test_a_known_plan_exposes_a_solver_that_denies_it() -> None:
    options = PlanOptions(gpus=2, micro_batches=4, min_stages=2, bytes_per_s=1e8, gap=0.0)
    costs = CostModel(gpt_profile(blocks=4), local_cluster(2), options)
    best, _ = _searched(costs, options)
    assert best.fastest is not None
    assert candidate_bound_s(costs, best.fastest.candidate) < 0.995 * best.step_s
    found = search_by_milp(Simulator(costs), families(costs.batch, options), options, best, [Solver("Odd", _denies)])
    assert "but a known plan's is" in found.notes[0]


@pytest.mark.reliability(51)
def test_without_pulp_or_time_a_plan_is_the_searchs_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, cluster = gpt_profile(blocks=4), local_cluster(3)
    hurried = plan(profile, cluster, PlanOptions(gpus=3, solver="milp", solver_seconds=1e-9))
    expected = plan(profile, cluster, PlanOptions(gpus=3))
    assert hurried.stages == expected.stages
    assert "`solver_seconds=1e-09`" in hurried.notes[0]
    monkeypatch.setitem(sys.modules, "pulp", None)
    without = plan(profile, cluster, PlanOptions(gpus=3, solver="milp"))
    assert without.stages == expected.stages
    assert without.predicted == expected.predicted
    assert "HiGHS failed: ModuleNotFoundError" in without.notes[0]
    assert "CBC failed: ModuleNotFoundError" in without.notes[0]


@pytest.mark.reliability(51)
def test_a_solver_that_cannot_be_executed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pulp = pytest.importorskip("pulp")
    monkeypatch.setattr(pulp, "listSolvers", lambda onlyAvailable: ["PULP_CBC_CMD"])  # noqa: N803
    made = plan(gpt_profile(blocks=2), local_cluster(2), PlanOptions(gpus=2, solver="milp", min_stages=2))
    assert "HiGHS failed: it is not installed, or cannot be executed" in made.notes
    monkeypatch.setattr(pulp, "listSolvers", lambda onlyAvailable: [])  # noqa: N803
    made = plan(gpt_profile(blocks=2), local_cluster(2), PlanOptions(gpus=2, solver="milp", min_stages=2))
    assert made.notes[0].startswith(
        "`solver='milp'`: HiGHS failed: it is not installed, or cannot be executed; CBC failed"
    )


def test_more_stages_than_a_program_takes_are_left_to_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.planner.milp.program.MOST_ARCS", 10)
    made = plan(gpt_profile(blocks=4), local_cluster(2), PlanOptions(gpus=2, solver="milp", min_stages=2))
    assert "stages to choose from; the plan is that of `solver='dp'`" in made.notes[0]
