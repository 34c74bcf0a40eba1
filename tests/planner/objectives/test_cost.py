"""The cheapest plan against the cheapest of all plans."""

import random
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf

import pytest

from autopar.errors import FileError, InfeasibleError, UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.planner import PlanOptions, plan
from autopar.planner.candidate import Candidate, families
from autopar.planner.costs.model import CostModel
from autopar.planner.objectives import cost
from autopar.planner.objectives.cost import cheapest, prices_of
from autopar.planner.order import canonical
from autopar.planner.simulator.simulate import Simulator
from autopar.report.plan import render
from autopar.report.table import as_text
from chunked import halved
from mixed_problems import three_kinds_problem
from oracles.exhaustive import everything
from random_problems import gpt_profile, launched, local_cluster, random_cluster, random_profile, two_kinds
from team_problems import placed_team_problem


def _priced(cluster: Cluster, seed: int) -> Cluster:
    """One price of each type of device; at times, the last device has another one."""
    rng = random.Random(seed + 5_000_000)
    of = {name: rng.choice([1.0, 1.1, 1.4, 3.0]) for name in sorted({device.type for device in cluster.devices})}
    devices = [each.model_copy(update={"price_per_hour": of[each.type]}) for each in cluster.devices]
    return cluster.model_copy(update={"devices": tuple(devices)})


def _asked(seed: int) -> tuple[Profile, Cluster, PlanOptions]:
    """An instance with a constraint that some devices cannot obey, or little memory for its cheapest plan."""
    layers, devices, batches, asked = random.Random(seed).choice(
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
    cluster, names = _priced(cluster, seed), [layer.name for layer in profile.layers]
    options = PlanOptions(**{"gpus": devices, "gap": 0.0, "objective": "cost", "schedule": "1f1b", **asked})
    given = (
        {"pin": (f"{names[0]},{names[-1]} different stages",)},
        {"pin": (f"{names[0]} on {min(device.type for device in cluster.devices)}",)},
        {"max_stages": 1},
        {"forbid_cut": (names[0],), "min_stages": 2},
        {"use_all": True},
        {"micro_batches": profile.batch},
        {"divisible": True, "recompute": "none"},
    )
    if seed % 4 > 1 and len(names) > 2:
        return profile, cluster, replace(options, **given[seed // 4 % len(given)])
    costs = CostModel(profile, cluster, options)
    free = cheapest(costs, families(costs.batch, options), options)
    peak = max(costs.peak_bytes(free.simulated_plan.candidate))
    return profile, cluster, replace(options, memory_bytes=max(1, int(peak * (2.0, 0.95, 0.75)[seed % 3])))


def _steps(profile: Profile, cluster: Cluster, options: PlanOptions) -> list[tuple[float, float]]:
    """The step and the cost of every plan that fits, each simulated."""
    costs = canonical(CostModel(profile, cluster, options))
    simulator = Simulator(costs)
    prices = [device.price_per_hour or 0.0 for device in costs.devices]
    found = [each for each in everything(costs, options) if max(costs.shortfalls(each)) <= 0]
    steps = [(simulator.step_s(each), sum(prices[device] for device in each.devices)) for each in found]
    return [(step_s, step_s * per_hour / 3600) for step_s, per_hour in steps]


def _is_mixed(made: Plan) -> bool:
    """Whether a stage is on devices of several kinds."""
    return any(len(stage.types) > 1 for stage in made.stages)


def _remedied(asked: PlanOptions, profile: Profile, cluster: Cluster, fastest_s: float) -> None:
    """See that the error of a deadline before the fastest step names that step, and a deadline that can be met."""
    try:
        assert _is_mixed(plan(profile, cluster, asked))
    except InfeasibleError as error:
        said = str(error)
    else:
        return
    assert "has a step within `deadline_s=" in said
    named = re.search(r"the fastest step that was found takes (\S+) s", said)
    typed = re.search(r"; a plan fits with `deadline_s=(\S+)`$", said)
    assert float(named[1]) == pytest.approx(fastest_s, rel=1e-5)
    assert plan(profile, cluster, replace(asked, deadline_s=float(typed[1]))).predicted.price is not None


@pytest.mark.some(1)
@pytest.mark.parametrize("part", range(12))
def test_no_plan_within_the_deadline_is_cheaper(part: int) -> None:
    """Nor is one without a deadline."""
    dearer = compared = several = 0
    for seed in range(600 + 9 * part, 609 + 9 * part):
        profile, cluster, options = _asked(seed)
        profile = profile if seed % 3 else launched(profile, seed)
        every = _steps(profile, cluster, options)
        if not every:
            with suppress(InfeasibleError, UsageError):
                # Stages on several kinds are not among them.
                assert _is_mixed(plan(profile, cluster, options))
            continue
        fastest, free = min(every), min(cost for _, cost in every)
        if fastest[0] == 0:
            continue
        slowest_s = max(step_s for step_s, cost in every if cost == free)
        _remedied(replace(options, deadline_s=0.999 * fastest[0]), profile, cluster, fastest[0])
        soon_s = 1.0001 * fastest[0]
        for deadline_s in (None, soon_s, max(soon_s, (fastest[0] + slowest_s) / 2)):
            least = min(cost for step_s, cost in every if deadline_s is None or step_s <= deadline_s)
            made = plan(profile, cluster, replace(options, deadline_s=deadline_s))
            price = made.predicted.price
            assert price.deadline_s == deadline_s
            if _is_mixed(made):
                # What anyone would try first, and no search does.
                assert price.lower_bound_per_step <= price.per_step <= least * (1 + 1e-9), seed
                continue
            assert price.per_step == pytest.approx(least, rel=1e-9), seed
            assert price.lower_bound_per_step == pytest.approx(least, rel=1e-9), seed
            compared, dearer = compared + 1, dearer + (least > free * (1 + 1e-6))
            several += len(made.devices) > 1
    assert min(compared / 6, dearer, several) >= 1


def _cheapest_of(every: Sequence[tuple[float, float]], asked: tuple[Profile, Cluster, PlanOptions], seed: int) -> Plan:
    """Return the cheapest plan, which costs as little as any of those, as does its bound."""
    made, least = plan(*asked), min(cost for _, cost in every)
    price = made.predicted.price
    assert price.per_step == pytest.approx(least, rel=1e-9), seed
    assert price.lower_bound_per_step == pytest.approx(least, rel=1e-9), seed
    return made


@pytest.mark.some(1)
@pytest.mark.parametrize("part", range(4))
def test_no_plan_with_teams_is_cheaper(part: int) -> None:
    """Nor where teams are asked for, which some sets of devices have no room for."""
    compared = with_teams = 0
    for seed in range(10 * part, 10 * part + 10):
        profile, cluster, options = placed_team_problem(seed)
        if seed % 2 and not profile.others:
            profile, cluster = two_kinds(profile, cluster, seed)
        cluster, options = _priced(cluster, seed), replace(options, objective="cost", tensor=("auto", 2)[seed % 3 > 0])
        try:
            every = _steps(profile, cluster, options)
        except UsageError:
            # No layer splits, or no node has two of a kind.
            continue
        if not every:
            with pytest.raises(InfeasibleError):
                plan(profile, cluster, options)
            continue
        made = _cheapest_of(every, (profile, cluster, options), seed)
        compared, with_teams = compared + 1, with_teams + (max(stage.tensor_parallel for stage in made.stages) > 1)
    assert compared >= 2
    assert with_teams >= 1


def test_no_plan_of_three_kinds_is_cheaper() -> None:
    several = 0
    for seed in range(8):
        profile, cluster, options = three_kinds_problem(seed)
        cluster, use_all = _priced(cluster, seed), seed % 2 > 0
        options = replace(options, objective="cost", schedule="1f1b", use_all=use_all)
        every = _steps(profile, cluster, options)
        if every:
            made = _cheapest_of(every, (profile, cluster, options), seed)
            several += len({each for stage in made.stages for each in stage.types}) > 1
    assert several >= 1


def test_with_a_gap_plans_meet_the_deadline_and_bounds_hold() -> None:
    within = compared = 0
    for seed in range(700, 712):
        profile, cluster, options = _asked(seed)
        every = _steps(profile, cluster, options)
        if not every or min(every)[0] == 0:
            continue
        for deadline_s in (None, 1.05 * min(every)[0]):
            made = plan(profile, cluster, replace(options, gap=0.1, deadline_s=deadline_s))
            found = made.predicted
            least = min(cost for step_s, cost in every if deadline_s is None or step_s <= deadline_s)
            assert deadline_s is None or found.step_s <= deadline_s * (1 + 1e-9)
            bound, cost = found.price.lower_bound_per_step, found.price.per_step
            assert bound <= least * (1 + 1e-9), seed
            assert _is_mixed(made) or least <= cost * (1 + 1e-9), seed
            compared, within = compared + 1, within + (cost <= 1.1 * bound)
    assert within >= 0.8 * compared >= 8


@pytest.mark.parametrize("most_by_nodes", [0, 2_000])
def test_of_equal_devices_the_cheaper_are_used(most_by_nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "MOST_BY_NODES", most_by_nodes)
    cluster = local_cluster(2)
    devices = tuple(cluster.devices[0].model_copy(update={"price_per_hour": price}) for price in (3.0, 1.0))
    made = plan(gpt_profile(), cluster.model_copy(update={"devices": devices}), PlanOptions(objective="cost", batch=8))
    assert made.devices == (1,)
    assert made.objective == "cost"
    price = made.predicted.price
    assert price.per_hour == 1.0
    assert price.per_step == pytest.approx(made.predicted.step_s / 3600)
    assert price.per_million_samples == pytest.approx(price.per_step / 8 * 1e6)
    assert price.lower_bound_per_step <= price.per_step <= 1.02 * price.lower_bound_per_step
    assert made.predicted.lower_bound_s == pytest.approx(price.lower_bound_per_step * 3600)
    assert made.predicted.bounds is None
    assert sum(part.seconds for part in made.predicted.binding) <= made.predicted.step_s * (1 + 1e-9)
    assert made.predicted.shares is not None
    assert made.notes[0] == "1 of 2 devices stay idle, and are not paid for (`use_all` forbids this)"


def test_alternatives_have_their_cost_and_what_lacks_a_price_is_named() -> None:
    cluster = _priced(local_cluster(3), 2)
    made = plan(gpt_profile(blocks=4), cluster, PlanOptions(objective="cost"))
    known = [each for each in made.alternatives if each.step_s is not None]
    assert known
    for each in known:
        devices = sum(int(stage.rpartition(":")[2]) for stage in each.stages.split(","))
        per_hour = devices * (cluster.devices[0].price_per_hour or 0.0)
        assert each.price_per_step == pytest.approx(each.step_s * per_hour / 3600)
    assert "cost of" in as_text(render(made))
    fastest = plan(gpt_profile(blocks=4), cluster, PlanOptions())
    assert {each.price_per_step for each in fastest.alternatives} == {None}
    assert "cost of" not in as_text(render(fastest))
    cluster = _priced(local_cluster(3), 0)
    for price, said in ((None, "has no price of this one"), (0.0, "has 0 of this one")):
        devices = (*cluster.devices[:2], cluster.devices[2].model_copy(update={"price_per_hour": price}))
        with pytest.raises(FileError, match=rf"^\$\.devices\[2\]\.price_per_hour: .* {said}"):
            plan(gpt_profile(blocks=4), cluster.model_copy(update={"devices": devices}), PlanOptions(objective="cost"))
    with pytest.raises(InfeasibleError, match=r"nothing fits the memory.* a plan fits with `memory_bytes="):
        plan(gpt_profile(blocks=4), _priced(local_cluster(2), 0), PlanOptions(objective="cost", memory_bytes=1000))
    options = PlanOptions(gpus=2, batch=8, schedule="1f1b", objective="cost")
    price = plan(gpt_profile(blocks=2, batch=16), _priced(local_cluster(2), 0), options).predicted.price
    assert price.per_million_samples == pytest.approx(price.per_step / 8 * 1e6)


def _cost(prices: Sequence[float], devices: Iterable[int], step_s: float) -> float:
    return step_s * sum(prices[device] for device in set(devices)) / 3600


@pytest.mark.some(1)
@pytest.mark.parametrize("part", range(8))
def test_nothing_met_on_the_way_to_the_fastest_plan_is_cheaper_nor_any_row(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On clusters of two kinds with unlike prices; of larger batches, where sets of devices are many."""
    simulated: list[tuple[Candidate, float]] = []
    plainly = Simulator.step_s

    def watch(simulator: Simulator, candidate: Candidate, below_s: float = inf) -> float:
        simulated.append((candidate, plainly(simulator, candidate)))
        return plainly(simulator, candidate, below_s)

    dearer = 0
    for seed in range(902 + 3 * part, 905 + 3 * part):
        devices = 4 + seed % 2
        profile = random_profile(seed, most_layers=8, batches=(8, 12))
        profile = halved(profile, seed) if seed % 3 == 0 else profile
        profile, cluster = two_kinds(profile, random_cluster(seed, devices), seed)
        cluster, options = _priced(cluster, seed), PlanOptions(gpus=devices)
        costs = canonical(CostModel(profile, cluster, options))
        prices = prices_of(costs)
        with monkeypatch.context() as patched:
            patched.setattr(Simulator, "step_s", watch)
            simulated.clear()
            fastest = plan(profile, cluster, options)
        met = [(step_s, _cost(prices, each.devices, step_s)) for each, step_s in simulated]
        listed = [device.price_per_hour or 0.0 for device in cluster.devices]
        own = fastest.predicted.step_s, _cost(listed, fastest.devices, fastest.predicted.step_s)
        met.append(own)
        for deadline_s in (None, 1.2 * fastest.predicted.step_s):
            made = plan(profile, cluster, replace(options, objective="cost", deadline_s=deadline_s))
            price, soon_s = made.predicted.price, deadline_s or inf
            cost = price.per_step * (1 + 1e-9)
            assert cost >= price.lower_bound_per_step
            assert price.per_step == pytest.approx(_cost(listed, made.devices, made.predicted.step_s))
            assert all(each >= price.per_step * (1 - 1e-9) for step_s, each in met if step_s <= soon_s), seed
            rows = [each for each in made.alternatives if each.step_s is not None and each.step_s <= soon_s]
            assert all(each.excluded or each.price_per_step * (1 + 1e-9) >= price.per_step for each in rows), seed
            dearer += own[1] > cost
    assert dearer >= 1
