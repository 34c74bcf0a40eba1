"""The best of what is judged, and of what is about as fast, against a list of everything that was."""

import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from autopar.errors import InfeasibleError
from autopar.formats.plan import Plan
from autopar.ownership import Replicas
from autopar.planner import PlanOptions, plan
from autopar.planner.assemble import candidate_of
from autopar.planner.candidate import Candidate, Family, equal_widths, place
from autopar.planner.costs.model import CostModel
from autopar.planner.search.judge import NEAR, Best, SimulatedPlan, simplicity, straddling, traits_of
from autopar.planner.simulator.simulate import Simulator
from autopar.report.plan import bound_rows
from autopar.report.table import duration, percentage
from drawn import random_candidate
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile


def _drawn(seed: int, memory_bytes: int | None) -> tuple[Simulator, list[Candidate]]:
    rng = random.Random(seed)
    profile = random_profile(seed, most_layers=5, batches=(2, 4, 6))
    costs = CostModel(profile, random_cluster(seed, 4), PlanOptions(gpus=4, memory_bytes=memory_bytes))
    return Simulator(costs), [random_candidate(rng, costs) for _ in range(40)]


def test_the_best_at_large_and_in_every_respect_is_the_first_of_the_quickest_that_fit() -> None:
    missed = compared = 0
    for seed in range(24):
        simulator, candidates = _drawn(seed, 6_000_000 if seed % 2 else None)
        best = Best()
        fitting: list[tuple[float, Candidate]] = []
        for candidate in candidates:
            judged_s, step_s = best.judge(simulator, candidate), simulator.step_s(candidate)
            assert (judged_s is None) == (max(simulator.costs.shortfalls(candidate)) > 0)
            missed += judged_s is None
            if judged_s is not None:
                assert judged_s <= step_s * (1 + 1e-12)
                fitting.append((step_s, candidate))
        for count, each in best.by_stages.items():
            own = [pair for pair in fitting if len(pair[1].stages) == count]
            assert each == min(own, key=lambda pair: pair[0]), f"seed {seed}: {count}"
            compared += 1
        assert {len(candidate.stages) for _, candidate in fitting} == set(best.by_stages)
        assert best.step_s == min((step_s for step_s, _ in fitting), default=float("inf"))
        lacking = {max(simulator.costs.shortfalls(candidate)): candidate for candidate in reversed(candidates)}
        shorts = [short for short in lacking if short > 0]
        assert best.closest == ((min(shorts), lacking[min(shorts)]) if shorts else None)
    assert min(missed, 2 * compared) > 60


def test_what_is_considered_is_kept_for_its_traits_and_while_it_is_about_as_fast_as_the_best() -> None:
    near = equal = 0
    for seed in range(30):
        rng = random.Random(seed)
        _, candidates = _drawn(seed, None)
        steps = [1.05, 2.0] if seed % 6 == 0 else [1.0, 1.005, 1.02, 2.0]
        every = [SimulatedPlan(rng.choice(steps), each) for each in dict.fromkeys(candidates)]
        best = Best(cap_s=1.03)
        for each in every:
            best.consider(each)
        for trait in {trait for each in every for trait in traits_of(each.candidate)}:
            own = [each for each in every if trait in traits_of(each.candidate)]
            assert best.by_trait[trait] is min(own, key=lambda each: each.step_s), f"seed {seed}: {trait}"
        alike = [each for each in every if equal_widths(each.candidate.stages)]
        assert best.equal == min(alike, key=lambda each: each.step_s, default=None)
        least_s = min(each.step_s for each in every)
        assert (best.step_s, best.fastest is None) == (min(least_s, 1.03), least_s > 1.03)
        limit_s = best.step_s * (1 + NEAR)
        assert {each.candidate for each in every if each.step_s <= limit_s} <= set(best.near)
        near += len(best.near)
        equal += best.equal is not None
    assert min(near / 6, equal) > 15


def _widths(made: Plan) -> set[tuple[object, ...]]:
    return {(len(stage.devices), stage.division, stage.shard, stage.shares) for stage in made.stages}


def test_plans_are_near_the_fastest_and_neighbours_few() -> None:
    simpler = 0
    for seed in range(5):
        profile, cluster = random_profile(seed, most_layers=8), random_cluster(seed, seed % 4 + 2)
        options = PlanOptions(gpus=seed % 4 + 2)
        costs = CostModel(profile, cluster, options)
        made, exact = plan(profile, cluster, options), plan(profile, cluster, replace(options, exact=True))
        assert exact.predicted.step_s <= made.predicted.step_s <= exact.predicted.step_s * 1.01 * (1 + 1e-9)
        own, other = (simplicity(costs, candidate_of(each, profile)) for each in (made, exact))
        assert own <= other, f"seed {seed}"
        simpler += own < other
        said = any("`exact=True` plans it" in note for note in made.notes)
        assert said or own == other or made.predicted.step_s == exact.predicted.step_s
    assert simpler >= 1
    made = plan(
        gpt_profile(), local_cluster(4), PlanOptions(gpus=4, memory_bytes=60 * 2**20, shard="none", schedule="1f1b")
    )
    found = {each.name: each for each in made.alternatives}
    assert len(found) <= 8
    assert list(found)[:3] == ["pure data parallelism", "sharded data parallelism", "equal split"]
    steps = [each.step_s for each in made.alternatives[3:] if each.step_s is not None]
    assert len(steps) == len(made.alternatives) - 3 >= 3
    assert steps == sorted(steps)
    # Fewer devices are not offered where all must be used.
    made = plan(gpt_profile(blocks=4), local_cluster(3), PlanOptions(gpus=3, use_all=True))
    assert not any(re.fullmatch(r"\d devices?", each.name) for each in made.alternatives)
    cluster = local_cluster(6)
    nodes = tuple(each.model_copy(update={"node": at // 2}) for at, each in enumerate(cluster.devices))
    costs = CostModel(gpt_profile(), cluster.model_copy(update={"devices": nodes}), PlanOptions(gpus=6))
    family = Family(2, 8, "1f1b")
    for widths, expected in (((2, 2, 2), []), ((2, 4), []), ((1, 2, 3), [1, 2]), ((3, 3), [0, 1]), ((1, 1, 4), [])):
        stages = place(family, (*range(1, len(widths)), 14), map(Replicas, widths))
        assert straddling(costs, stages) == expected, widths
        assert simplicity(costs, Candidate(*family, stages))[1] == len(expected)


@pytest.mark.some(1)
@pytest.mark.parametrize("exact", [False, True])
def test_no_stage_keeps_more_in_flight_than_the_plan_needs(exact: bool) -> None:
    slower = 0
    for seed in range(12):
        rng = random.Random(seed)
        devices, count = rng.randint(1, 4), rng.choice([4, 8, 12])
        profile = random_profile(seed, most_layers=8, batches=(24,))
        fewest = min(len(profile.layers), rng.randint(1, devices))
        options = PlanOptions(schedule="1f1b", micro_batches=count, min_stages=fewest, exact=exact)
        cluster = random_cluster(seed, devices)
        made = plan(profile, cluster, options)
        simulator, candidate = Simulator(CostModel(profile, cluster, options)), candidate_of(made, profile)
        for index, stage in enumerate(candidate.stages):
            other = stage._replace(warmup=stage.warmup - 1)
            behind = candidate.stages[index + 1 : index + 2]
            if other.warmup == 0 or any(other.in_flight < min(each.in_flight, count) for each in behind):
                continue
            slower += 1
            shallower = candidate._replace(stages=(*candidate.stages[:index], other, *candidate.stages[index + 1 :]))
            assert simulator.step_s(shallower) > made.predicted.step_s * (1 + 1e-9), f"seed {seed}, stage {index}"
    assert slower >= 2


def test_the_best_plan_of_equal_widths_is_a_row_and_is_planned_when_asked_for() -> None:
    compared = 0
    for seed in range(4):
        profile, cluster = random_profile(seed, most_layers=8), random_cluster(seed, seed % 4 + 2)
        options = PlanOptions(gpus=seed % 4 + 2)
        equal = plan(profile, cluster, replace(options, equal_widths=True))
        assert len(_widths(equal)) == 1, f"seed {seed}"
        made = plan(profile, cluster, options)
        if len(_widths(made)) > 1:
            row = next(each for each in made.alternatives if each.name == "equal widths")
            assert row.step_s is not None
            assert any("`equal_widths=True` plans them" in note for note in made.notes)
            compared += 1
        assert equal.predicted.step_s >= equal.predicted.lower_bound_s
    assert compared >= 1
    with pytest.raises(InfeasibleError):
        plan(gpt_profile(), local_cluster(2), PlanOptions(gpus=2, memory_bytes=2**20, equal_widths=True))


def _layers(stages: str) -> list[str]:
    return [each.rpartition(":")[0] for each in stages.split(",")]


@pytest.mark.slow
def test_neighbours_change_one_thing_under_the_schedule_of_the_plan() -> None:
    counted = Counter[str]()
    for seed in (2, 4, 7, 8):
        rng, devices = random.Random(seed), 4 + 2 * (seed % 3)
        profile, cluster = gpt_profile(blocks=rng.randint(6, 14), batch=16), local_cluster(devices)
        tight = {"memory_bytes": rng.choice([30, 45, 60]) * 2**20} if seed % 2 else {}
        asked = {"min_stages": rng.choice([1, 2, devices // 2]), "bytes_per_s": rng.choice([1e8, 1e9]), **tight}
        options = PlanOptions(gpus=devices, **asked)  # type: ignore[arg-type]
        try:
            made = plan(profile, cluster, options)
        except InfeasibleError:
            continue
        own = candidate_of(made, profile)
        counted[own.schedule] += 1
        for row in made.alternatives[3:]:
            kind = re.sub(r"\d+ ", "", row.name).rstrip("s")
            if kind in ("fastest", "equal width", "1f1b") or row.step_s is None:
                continue
            assert row.schedule == own.schedule, f"seed {seed}: {row.name}"
            counted[kind] += 1
            if kind.startswith("micro-batch"):
                assert (row.stages, row.micro_batches) == (own.text(), int(row.name.split()[0]))
                continue
            assert row.micro_batches == own.micro_batches
            if kind == "device":
                assert _layers(row.stages) == _layers(own.text())
                widths = dict(zip(_layers(row.stages), row.stages.split(","), strict=True))
                chunks = len(made.groups[0])
                used = sum(int(each.rpartition(":")[2]) for each in widths.values()) // chunks
                assert used == len(made.devices) - 1 == int(row.name.split()[0])
            elif kind == "stage":
                assert len(row.stages.split(",")) == int(row.name.split()[0])
            else:
                assert row.stages == own.text()
    assert counted["interleaved"] >= 2, counted
    assert counted["1f1b"] >= 2
    assert min(counted["micro-batche"] + counted["micro-batch"], counted["device"], counted["stage"]) >= 2, counted


def test_a_plan_shows_the_lower_bound_of_its_file() -> None:
    """Also one with several stages a device, which others' bounds do not bound."""
    chunked = 0
    for options in (PlanOptions(gpus=4, min_stages=4, micro_batches=8), PlanOptions(gpus=4)):
        made = plan(gpt_profile(blocks=12, batch=8), local_cluster(4), options)
        predicted = made.predicted
        known = dict(bound_rows(made))
        last = "bound of any plan: work alone" if len(made.groups[0]) > 1 else "+ memory: their lower bound"
        assert known[last] == duration(predicted.lower_bound_s)
        gap = predicted.step_s / predicted.lower_bound_s - 1
        assert known["gap to it"] == percentage(gap)
        for note in made.notes:
            found = re.match(r"the search ended ([\d.]+)% above its lower bound", note)
            assert found is None or float(found[1]) == pytest.approx(100 * gap, abs=0.06)
        chunked += len(made.groups[0]) > 1
    assert chunked == 1
