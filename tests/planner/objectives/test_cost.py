"""The cheapest plan against the cheapest of all plans."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar.errors import FileError, InfeasibleError, UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.profile import Profile
from autopar.planner import PlanOptions, plan
from autopar.planner.candidate import Candidate, families
from autopar.planner.costs.model import CostModel
from autopar.planner.objectives.cost import CheapestPlan, cheapest
from autopar.planner.simulator.simulate import Simulator
from autopar.report.plan import plan_text
from oracles.exhaustive import everything
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile, two_kinds


def _priced(cluster: Cluster, seed: int) -> Cluster:
    """One price of each type of device; at times, the last device has another one."""
    rng = random.Random(seed + 5_000_000)
    of = {name: rng.choice([1.0, 1.1, 1.4, 3.0]) for name in sorted({device.type for device in cluster.devices})}
    devices = [each.model_copy(update={"price_per_hour": of[each.type]}) for each in cluster.devices]
    return cluster.model_copy(update={"devices": tuple(devices)})


def _instance(seed: int) -> tuple[Profile, Cluster, PlanOptions]:
    rng = random.Random(seed)
    layers, devices, batches, asked = rng.choice(
        [
            (4, 3, (1, 2, 3, 4), {"recompute": "none"}),
            (3, 3, (2, 4), {"shard": "auto"}),
            (6, 3, (2, 3), {"recompute": "none"}),
            (3, 5, (2,), {"recompute": "full"}),
        ]
    )
    profile, cluster = random_profile(seed, most_layers=layers, batches=batches), random_cluster(seed, devices)
    if seed % 2:
        profile, cluster = two_kinds(profile, cluster, seed)
    options = PlanOptions(**{"gpus": devices, "gap": 0.0, "objective": "cost", **asked})
    return profile, _priced(cluster, seed), options


def _constrained(seed: int) -> tuple[Profile, Cluster, PlanOptions]:
    """An instance with a constraint that some sets of devices cannot obey."""
    profile, cluster, options = _instance(seed)
    names = [layer.name for layer in profile.layers]
    types = sorted({device.type for device in cluster.devices})
    given = (
        {"pin": (f"{names[0]},{names[-1]} different stages",)},
        {"pin": (f"{names[0]} on {types[0]}",)},
        {"max_stages": 1},
        {"forbid_cut": (names[0],), "min_stages": 2},
    )
    return profile, cluster, replace(options, **given[seed % 4])


def _price(cluster: Cluster, candidate: Candidate) -> float:
    used = [device for stage in candidate.stages for device in stage.devices]
    return sum(cluster.devices[device].price_per_hour or 0.0 for device in used) / 3600


def _least(profile: Profile, cluster: Cluster, options: PlanOptions) -> float:
    """The cheapest step of all plans, each simulated; infinite if none fits."""
    costs = CostModel(profile, cluster, options)
    simulator = Simulator(costs)
    return min(
        (
            simulator.step_s(candidate) * _price(cluster, candidate)
            for candidate in everything(costs, options)
            if max(costs.shortfalls(candidate)) <= 0
        ),
        default=float("inf"),
    )


def _cheapest(profile: Profile, cluster: Cluster, options: PlanOptions) -> CheapestPlan | None:
    costs = CostModel(profile, cluster, options)
    return cheapest(costs, families(costs.batch, options), options)


def _limited(seed: int) -> tuple[Profile, Cluster, PlanOptions]:
    """An instance, two in three with a memory limit that its cheapest plan without one does not fit."""
    profile, cluster, options = _instance(seed)
    free = _cheapest(profile, cluster, options)
    assert free is not None
    if seed % 3:
        peak = max(CostModel(profile, cluster, options).peak_bytes(free.simulated_plan.candidate))
        options = replace(options, memory_bytes=max(1, int(peak * (1.0, 0.95, 0.75)[seed % 3])))
    return profile, cluster, options


@pytest.mark.slow
def test_no_plan_is_cheaper() -> None:
    compared = several = mixed = 0
    for seed in range(110):
        profile, cluster, options = _limited(seed)
        least, found = _least(profile, cluster, options), _cheapest(profile, cluster, options)
        if found is None:
            assert least == float("inf"), seed
            continue
        assert found.cost == pytest.approx(least, rel=1e-9), seed
        assert found.lower_bound == pytest.approx(least, rel=1e-9), seed
        candidate = found.simulated_plan.candidate
        assert found.cost == pytest.approx(found.simulated_plan.step_s * _price(cluster, candidate), rel=1e-12)
        used = [device for stage in candidate.stages for device in stage.devices]
        compared += 1
        several += len(used) > 1
        mixed += len({cluster.devices[device].type for device in used}) > 1
    assert compared >= 70
    assert several >= 12
    assert mixed >= 2


@pytest.mark.parametrize("asked", [{"use_all": True}, {"min_stages": 2}, {"micro_batches": 2}, {"divisible": True}])
def test_no_plan_is_cheaper_under_constraints(asked: dict[str, object]) -> None:
    for seed in range(300, 315):
        profile = random_profile(seed, most_layers=4, batches=(2, 4))
        cluster = _priced(random_cluster(seed, 3), seed)
        options = PlanOptions(gpus=3, gap=0.0, objective="cost", **asked)  # type: ignore[arg-type]
        least, found = _least(profile, cluster, options), _cheapest(profile, cluster, options)
        if least < float("inf"):
            assert found is not None
            assert found.cost == pytest.approx(least, rel=1e-9), seed


def test_no_plan_that_obeys_the_rules_of_stages_is_cheaper() -> None:
    found = []
    for seed in range(500, 545):
        profile, cluster, options = _constrained(seed)
        if len(profile.layers) < 3:
            continue
        least = _least(profile, cluster, options)
        made = plan(profile, cluster, options) if least < float("inf") else None
        found.append(made)
        if made is not None and made.predicted.price is not None:
            assert made.predicted.price.per_step == pytest.approx(least, rel=1e-9), seed
            assert made.predicted.price.lower_bound_per_step == pytest.approx(least, rel=1e-9), seed
    assert sum(each is not None for each in found) >= 15


@pytest.mark.slow
def test_with_a_gap_the_bound_stays_below_the_least_cost_and_most_plans_are_within_the_gap() -> None:
    within = compared = 0
    for seed in range(400, 440):
        profile, cluster, options = _limited(seed)
        least, found = _least(profile, cluster, options), _cheapest(profile, cluster, replace(options, gap=0.1))
        if found is not None:
            assert found.lower_bound <= least * (1 + 1e-9)
            assert least <= found.cost * (1 + 1e-9), seed
            compared, within = compared + 1, within + (found.cost <= 1.1 * found.lower_bound)
    assert within >= 0.8 * compared >= 20


def test_of_equal_devices_the_cheaper_are_used() -> None:
    cluster = local_cluster(2)
    prices = (3.0, 1.0)
    devices = [
        each.model_copy(update={"price_per_hour": price}) for each, price in zip(cluster.devices, prices, strict=True)
    ]
    made = plan(gpt_profile(), cluster.model_copy(update={"devices": tuple(devices)}), PlanOptions(objective="cost"))
    assert made.devices == (1,)
    assert made.objective == "cost"
    price = made.predicted.price
    assert price is not None
    assert price.per_hour == 1.0
    assert price.per_step == pytest.approx(made.predicted.step_s / 3600)
    assert price.per_million_samples == pytest.approx(price.per_step / made.batch * 1e6)
    assert price.lower_bound_per_step <= price.per_step <= 1.02 * price.lower_bound_per_step
    assert made.predicted.lower_bound_s == pytest.approx(price.lower_bound_per_step * 3600)
    assert made.predicted.bounds is None
    assert sum(part.seconds for part in made.predicted.binding) <= made.predicted.step_s
    assert made.predicted.shares is not None
    assert made.notes[0] == "1 of 2 devices stay idle, and are not paid for (`use_all` forbids this)"


def test_a_device_without_a_price_is_named() -> None:
    cluster = _priced(local_cluster(3), 0)
    for price, said in ((None, "has no price of this one"), (0.0, "has 0 of this one")):
        devices = (*cluster.devices[:2], cluster.devices[2].model_copy(update={"price_per_hour": price}))
        with pytest.raises(FileError, match=rf"^\$\.devices\[2\]\.price_per_hour: .* {said}"):
            plan(gpt_profile(), cluster.model_copy(update={"devices": devices}), PlanOptions(objective="cost"))


def test_what_does_not_fit_and_what_contradicts_is_said() -> None:
    cluster = _priced(local_cluster(2), 0)
    with pytest.raises(InfeasibleError, match=r"nothing fits the memory.* a plan fits with `memory_bytes="):
        plan(gpt_profile(), cluster, PlanOptions(objective="cost", memory_bytes=1000))
    with pytest.raises(UsageError, match="`stages` does not go with `objective='cost'`"):
        plan(gpt_profile(), cluster, PlanOptions(objective="cost", stages="0-13:1"))


def test_sixty_four_devices_are_planned_with_a_certificate() -> None:
    cluster = _priced(local_cluster(64), 1)
    made = plan(gpt_profile(blocks=22, batch=128), cluster, PlanOptions(objective="cost", memory_bytes=400 * 2**20))
    assert made.predicted.price is not None
    assert made.predicted.price.per_step <= 1.03 * made.predicted.price.lower_bound_per_step


def _steps(profile: Profile, cluster: Cluster, options: PlanOptions) -> list[tuple[float, float]]:
    """The step and the cost of every plan that fits, each simulated."""
    costs = CostModel(profile, cluster, options)
    simulator = Simulator(costs)
    found = [each for each in everything(costs, options) if max(costs.shortfalls(each)) <= 0]
    return [(step_s, step_s * _price(cluster, each)) for each in found for step_s in [simulator.step_s(each)]]


@pytest.mark.slow
@pytest.mark.parametrize("make", [_instance, _limited, _constrained])
def test_no_plan_within_the_deadline_is_cheaper(
    make: Callable[[int], tuple[Profile, Cluster, PlanOptions]],
) -> None:
    dearer = missed = compared = 0
    for seed in range(600, 625):
        profile, cluster, options = make(seed)
        if make is _constrained and len(profile.layers) < 3:
            continue
        every = _steps(profile, cluster, options)
        if not every:
            continue
        fastest, free = min(every), min(cost for _, cost in every)
        if fastest[0] == 0:
            continue
        slowest = max(step_s for step_s, cost in every if cost == free)
        for deadline_s in (1.0001 * fastest[0], (fastest[0] + slowest) / 2, 0.999 * fastest[0]):
            asked = replace(options, deadline_s=deadline_s)
            least = min((cost for step_s, cost in every if step_s <= deadline_s), default=None)
            if least is None:
                with pytest.raises(InfeasibleError, match="has a step within `deadline_s=") as caught:
                    plan(profile, cluster, asked)
                named = re.search(r"the fastest step that was found takes (\S+) s", str(caught.value))
                typed = re.search(r"; a plan fits with `deadline_s=(\S+)`$", str(caught.value))
                assert named is not None
                assert typed is not None
                assert float(named[1]) == pytest.approx(fastest[0], rel=1e-5)
                assert plan(profile, cluster, replace(asked, deadline_s=float(typed[1]))).predicted.price is not None
                missed += 1
                continue
            price = plan(profile, cluster, asked).predicted.price
            assert price is not None
            assert price.deadline_s == deadline_s
            assert price.per_step == pytest.approx(least, rel=1e-9), seed
            assert price.lower_bound_per_step == pytest.approx(least, rel=1e-9), seed
            compared, dearer = compared + 1, dearer + (least > free * (1 + 1e-6))
    assert compared >= 15
    assert missed >= 5
    assert dearer >= 4


def test_with_a_gap_plans_meet_the_deadline_and_bounds_hold() -> None:
    for seed in range(700, 720):
        profile, cluster, options = _limited(seed)
        every = _steps(profile, cluster, options)
        if not every or min(every)[0] == 0:
            continue
        deadline_s = 1.05 * min(every)[0]
        made = plan(profile, cluster, replace(options, gap=0.1, deadline_s=deadline_s))
        least = min(cost for step_s, cost in every if step_s <= deadline_s)
        assert made.predicted.price is not None
        assert made.predicted.step_s <= deadline_s * (1 + 1e-9)
        assert made.predicted.price.lower_bound_per_step <= least * (1 + 1e-9), seed
        assert least <= made.predicted.price.per_step * (1 + 1e-9), seed


def test_alternatives_have_their_cost_and_only_where_it_is_the_objective() -> None:
    cluster = _priced(local_cluster(3), 2)
    made = plan(gpt_profile(), cluster, PlanOptions(objective="cost"))
    known = [each for each in made.alternatives if each.step_s is not None]
    assert known
    for each in known:
        assert each.stages is not None
        assert each.step_s is not None
        devices = sum(int(stage.rpartition(":")[2]) for stage in each.stages.split(","))
        per_hour = devices * (cluster.devices[0].price_per_hour or 0.0)
        assert each.price_per_step == pytest.approx(each.step_s * per_hour / 3600)
    assert "cost of" in plan_text(made)
    fastest = plan(gpt_profile(), cluster, PlanOptions())
    assert {each.price_per_step for each in fastest.alternatives} == {None}
    assert "cost of" not in plan_text(fastest)


def test_a_remedy_for_memory_meets_the_deadline_too() -> None:
    cluster = _priced(local_cluster(2), 0)
    free = plan(gpt_profile(), cluster, PlanOptions())
    options = PlanOptions(objective="cost", memory_bytes=30 * 2**20, deadline_s=1.1 * free.predicted.step_s)
    with pytest.raises(InfeasibleError) as caught:
        plan(gpt_profile(), cluster, options)
    found = re.search(r"with `memory_bytes='(\d+)MiB'`", str(caught.value))
    if found is not None:
        made = plan(gpt_profile(), cluster, replace(options, memory_bytes=int(found[1]) * 2**20))
        assert made.predicted.step_s <= 1.1 * free.predicted.step_s


def test_a_million_samples_cost_what_their_steps_do_whatever_batch_was_profiled() -> None:
    options = PlanOptions(gpus=2, batch=8, schedule="1f1b", objective="cost")
    price = plan(gpt_profile(blocks=2, batch=16), _priced(local_cluster(2), 0), options).predicted.price
    assert price is not None
    assert price.per_million_samples == pytest.approx(price.per_step / 8 * 1e6)
