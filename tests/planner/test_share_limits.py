"""Layers that take so many samples at once, not fewer nor more: every plan obeys, and says so where none can."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.planner import PlanOptions, plan
from autopar.planner.candidate import Candidate
from autopar.planner.constraints import crossed_limit, runnable
from autopar.planner.costs.model import CostModel
from autopar.planner.plan import compare
from autopar.planner.search.best_first import search
from autopar.planner.search.judge import Best
from autopar.planner.simulator.simulate import Simulator
from oracles.exhaustive import exhaust
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile, two_kinds

INSTANCES = 36
Limits = dict[int, tuple[int, int | None]]
"""By layer: the fewest and the most samples."""


def limited(profile: Profile, limits: Limits) -> Profile:
    """Return a profile of which some layers take no other numbers of samples."""

    def of(layers: tuple) -> tuple:  # type: ignore[type-arg]
        return tuple(
            layer.model_copy(update=dict(zip(("least_samples", "most_samples"), limits[at], strict=True)))
            if at in limits
            else layer
            for at, layer in enumerate(layers)
        )

    others = tuple(each.model_copy(update={"layers": of(each.layers)}) for each in profile.others)
    return profile.model_copy(update={"layers": of(profile.layers), "others": others})


def obeys(found: Plan, profile: Profile) -> bool:
    shares = {name: stage.rows for stage in found.stages for name in stage.layers}
    return all(
        layer.least_samples <= min(shares[layer.name])
        and max(shares[layer.name]) <= (layer.most_samples or found.batch)
        for layer in profile.layers
    )


@pytest.mark.slow
def test_an_exact_search_finds_the_oracles_step_where_layers_have_limits() -> None:
    differing = empty = 0
    for seed in range(INSTANCES):
        rng = random.Random(seed)
        profile, cluster = random_profile(seed, most_layers=4, batches=(4, 6)), random_cluster(seed, 3)
        if seed % 3 == 0:
            profile, cluster = two_kinds(profile, cluster, seed)
        limits: Limits = {
            at: rng.choice([(2, None), (1, 1), (2, 2), (3, None), (1, 3)])
            for at in range(len(profile.layers))
            if rng.random() < 0.5
        }
        options = PlanOptions(gpus=3, gap=0.0, shard="auto")
        found: list[Candidate | None] = []
        for kind in (profile, limited(profile, limits)):
            costs = CostModel(kind, cluster, options)
            best, oracle = Best(), Best()
            try:
                every = runnable(costs, options)
            except UsageError:
                every = []
            if every:
                search(Simulator(costs), every, options, best)
            exhaust(Simulator(costs), options, oracle)
            assert (best.fastest is None) == (oracle.fastest is None), f"seed {seed}"
            if best.fastest is not None and oracle.fastest is not None:
                assert best.step_s == pytest.approx(oracle.step_s, rel=1e-9), f"seed {seed}"
                assert crossed_limit(costs, best.fastest.candidate.stages) is None
            empty += oracle.fastest is None
            found.append(best.fastest.candidate if best.fastest is not None else None)
        differing += found[0] != found[1]
    assert differing >= INSTANCES / 4
    assert empty >= 1


@pytest.mark.parametrize("solver", ["dp", "milp"])
@pytest.mark.parametrize("limit", [(3, None), (1, 2)])
def test_every_solver_obeys(solver: str, limit: tuple[int, int | None]) -> None:
    profile = limited(gpt_profile(blocks=1, batch=8), {1: limit})
    found = plan(profile, local_cluster(3), PlanOptions(gpus=3, gap=0.0, solver=solver, micro_batches=2))  # type: ignore[arg-type]
    assert obeys(found, profile)


@pytest.mark.parametrize("schedule", ["auto", "gpipe", "interleaved"])
@pytest.mark.parametrize("limit", [(2, None), (2, 3), (1, 1), (5, None)])
def test_plans_obey_with_every_schedule(schedule: str, limit: tuple[int, int | None]) -> None:
    profile, cluster = limited(gpt_profile(), dict.fromkeys(range(14), limit)), local_cluster(4)
    assert obeys(plan(profile, cluster, PlanOptions(gpus=4, schedule=schedule)), profile)


@pytest.mark.parametrize("seed", range(20))
def test_wide_clusters_and_many_layers_obey(seed: int) -> None:
    rng = random.Random(seed)
    profile = gpt_profile(blocks=rng.choice([6, 24, 40]), batch=rng.choice([24, 64, 96]))
    count = len(profile.layers)
    limits: Limits = {at: rng.choice([(2, None), (3, 8), (1, 5)]) for at in rng.sample(range(count), 3)}
    profile = limited(profile, limits)
    found = plan(profile, local_cluster(rng.choice([3, 8, 12])), PlanOptions(shard=rng.choice(["none", "auto"])))
    assert obeys(found, profile)


def test_dictated_stages_that_give_too_few_or_too_many_are_refused_with_the_layer() -> None:
    profile, cluster = limited(gpt_profile(batch=8), {3: (2, None), 5: (1, 4)}), local_cluster(8)
    stages = "0-13:8"
    with pytest.raises(UsageError, match=r"`stages`: layer h.2 takes at least 2 samples of a micro-batch at once"):
        plan(profile, cluster, PlanOptions(stages=stages))
    with pytest.raises(UsageError, match=r"layer h.4 takes 1 to 4 samples.*give more `micro_batches`"):
        plan(profile, cluster, PlanOptions(stages="0-13:1", micro_batches=1))
    assert obeys(plan(profile, cluster, PlanOptions(stages="0-13:2")), profile)


def test_micro_batches_with_which_no_plan_obeys_are_refused_with_what_to_give() -> None:
    profile, cluster = limited(gpt_profile(batch=8), {3: (2, None)}), local_cluster(2)
    with pytest.raises(UsageError, match=r"layer h.2 takes at least 2 samples.*give fewer `micro_batches`"):
        plan(profile, cluster, PlanOptions(micro_batches=8))
    profile = limited(gpt_profile(batch=8), {3: (1, 2)})
    with pytest.raises(UsageError, match=r"layer h.2 takes 1 to 2 samples.*give more `micro_batches`"):
        plan(profile, cluster, PlanOptions(micro_batches=1))


def test_peers_and_references_that_do_not_obey_say_why() -> None:
    profile = limited(gpt_profile(batch=8), dict.fromkeys(range(14), (8, None)))
    rows = compare(profile, local_cluster(4), PlanOptions(gpus=4)).rows
    parallel = next(row for row in rows if row.name == "pure data parallelism")
    assert "takes at least 8 samples" in str(parallel.infeasible)
    for row in rows:
        for text in (row.stages or "").split(","):
            assert not text or text.partition(":")[2].split()[0] == "1", row.name


def test_a_plan_without_limits_is_what_it_was() -> None:
    profile, cluster = gpt_profile(), local_cluster(4)
    options = PlanOptions(gpus=4, micro_batches=4)
    wide = limited(profile, {3: (1, 1000)})
    one, other = (plan(each, cluster, replace(options)) for each in (profile, wide))
    assert one.stages == other.stages
