"""Layers whose forward writes: one replica each in every plan, not recomputed where they run once, copies counted."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile, Writes
from autopar.planner import PlanOptions, plan, simulate
from autopar.planner.candidate import families
from autopar.planner.costs.model import CostModel
from autopar.planner.plan import compare
from autopar.planner.search.best_first import search
from autopar.planner.search.judge import Best
from autopar.planner.simulator.simulate import Simulator
from oracles.exhaustive import exhaust
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile, two_kinds

INSTANCES = 60
BUFFER, PARAMETER, STATE, INPUT = (
    Writes(buffers=("b",)),
    Writes(parameters=("p",)),
    Writes(state=("m.n",)),
    Writes(inputs=("x",)),
)


def written(profile: Profile, writes: dict[int, Writes]) -> Profile:
    """Return a profile of which some layers write; a buffer has 30 kB."""

    def of(layers: tuple) -> tuple:  # type: ignore[type-arg]
        return tuple(
            layer.model_copy(update={"writes": writes[at], "written_bytes": 30_000 if writes[at].buffers else 0})
            if at in writes
            else layer
            for at, layer in enumerate(layers)
        )

    others = tuple(each.model_copy(update={"layers": of(each.layers)}) for each in profile.others)
    return profile.model_copy(update={"layers": of(profile.layers), "others": others})


def singles(found: Plan, writes: dict[int, Writes], profile: Profile) -> list[int]:
    """Return the replicas of every layer that writes something that lasts."""
    width = {name: stage.replicas for stage in found.stages for name in stage.layers}
    return [width[profile.layers[at].name] for at, each in writes.items() if each.single]


@pytest.mark.slow
def test_an_exact_search_finds_the_oracles_step_where_layers_have_one_replica() -> None:
    differing = 0
    for seed in range(INSTANCES):
        rng = random.Random(seed)
        profile, cluster = random_profile(seed, most_layers=4, batches=(2, 4)), random_cluster(seed, 3)
        if seed % 3 == 0:
            profile, cluster = two_kinds(profile, cluster, seed)
        kinds = (BUFFER, PARAMETER, STATE, INPUT)
        writes = {at: rng.choice(kinds) for at in range(len(profile.layers)) if rng.random() < 0.4}
        plain, profile, options = profile, written(profile, writes), PlanOptions(gpus=3, gap=0.0, shard="auto")
        found = []
        for limit in (None, 2_500_000):
            asked = replace(options, memory_bytes=limit)
            costs = CostModel(profile, cluster, asked)
            best, oracle = Best(), Best()
            search(Simulator(costs), families(costs.batch, asked), asked, best)
            exhaust(Simulator(costs), asked, oracle)
            assert (best.fastest is None) == (oracle.fastest is None), f"seed {seed}"
            if best.fastest is not None and oracle.fastest is not None:
                assert best.step_s == pytest.approx(oracle.step_s, rel=1e-9), f"seed {seed}"
                found.append(best.fastest.candidate)
        for candidate in found:
            for stage in candidate.stages:
                held = [writes[at] for at in range(stage.first, stage.stop) if at in writes]
                assert len(stage.devices) == 1 or not any(each.single for each in held), f"seed {seed}"
                assert not any(at in writes and writes[at].once for at in stage.recompute), f"seed {seed}"
        free = plan(plain, cluster, options)
        differing += any(width > 1 for width in singles(free, writes, profile))
    assert differing >= INSTANCES / 6


def test_the_mixed_integer_program_keeps_to_one_replica() -> None:
    writes = {1: BUFFER}
    profile = written(gpt_profile(blocks=1, batch=4), writes)
    found = plan(profile, local_cluster(3), PlanOptions(gpus=3, gap=0.0, solver="milp", micro_batches=2))
    assert singles(found, writes, profile) == [1]


@pytest.mark.parametrize("schedule", ["auto", "gpipe", "interleaved"])
def test_plans_say_why_a_layer_has_one_replica_and_dictated_ones_are_refused(schedule: str) -> None:
    writes = {3: BUFFER, 5: PARAMETER}
    profile, cluster = written(gpt_profile(), writes), local_cluster(4)
    found = plan(profile, cluster, PlanOptions(gpus=4, schedule=schedule))
    assert singles(found, writes, profile) == [1, 1]
    assert any("layer h.2 has one replica, since its forward changes the buffer b" in note for note in found.notes)
    assert any("layer h.4 is not recomputed, since its forward changes the parameter p" in note for note in found.notes)
    chunked = schedule == "interleaved"
    stages = "0-3:2,4-6:2,7-9:2,10-13:2" if chunked else "0-3:2,4-13:1"
    with pytest.raises(UsageError, match=r"`stages`: layer h.2 has one replica.*`replicate_state='first'` or average"):
        plan(profile, cluster, PlanOptions(schedule=schedule, stages=stages))
    for row in found.alternatives:
        if "data parallelism" in row.name:
            assert row.step_s is None
            assert "has one replica" in str(row.infeasible)


def test_replicas_that_are_asked_for_are_planned_and_recorded_but_never_of_parameters_or_python_state() -> None:
    cluster, stages = local_cluster(3), PlanOptions(stages="0-6:2,7-13:1")
    found = plan(written(gpt_profile(), {3: BUFFER}), cluster, replace(stages, replicate_state="average"))
    assert found.replicate_state == "average"
    assert any("the mean of the replicas'" in caveat for caveat in found.caveats)
    assert (
        plan(written(gpt_profile(), {9: BUFFER}), cluster, replace(stages, replicate_state="first")).replicate_state
        is None
    )
    for kind in (PARAMETER, STATE):
        with pytest.raises(UsageError, match="has one replica"):
            plan(written(gpt_profile(), {3: kind}), cluster, replace(stages, replicate_state="first"))
    with pytest.raises(UsageError, match="`replicate_state` must be first or average"):
        PlanOptions(replicate_state="last")  # type: ignore[arg-type]


def test_peers_plan_around_layers_of_one_replica() -> None:
    writes = {4: BUFFER}
    profile = written(gpt_profile(), writes)
    rows = compare(profile, local_cluster(4), PlanOptions(gpus=4)).rows
    assert rows
    replicated = 0
    for row in rows:
        for text in (row.stages or "").split(","):
            layers, _, width = text.partition(":")
            first, _, last = layers.partition("-")
            if text and int(width.split()[0]) > 1:
                replicated += 1
                assert not int(first) <= 4 <= int(last or first), row.name
    assert replicated
    reasons = [row.infeasible for row in rows if row.infeasible]
    assert any("layer h.3 has one replica" in reason for reason in reasons)


def test_copies_of_what_is_written_are_counted_for_every_micro_batch_in_flight() -> None:
    plain, cluster = gpt_profile(), local_cluster(2)
    options = PlanOptions(stages="0-6:1,7-13:1", micro_batches=4, schedule="gpipe", recompute="full")
    profile = written(plain, {2: BUFFER})
    for asked in (options, replace(options, recompute="none")):
        before, after = (plan(each, cluster, asked).predicted.peak_bytes for each in (plain, profile))
        # All 4 micro-batches are in flight; at the peak, one is in its backward.
        assert 3 * 30_000 <= after[0] - before[0] <= 4 * 30_000
        assert after[1] == before[1]
    inputs = written(plain, {0: Writes(inputs=("tokens",))})
    before, after = (plan(each, cluster, options).predicted.peak_bytes for each in (plain, inputs))
    assert 3 * 4 * 1024 <= after[0] - before[0] <= 4 * 4 * 1024


def test_layers_that_run_once_are_left_out_of_full_recomputation() -> None:
    profile = written(gpt_profile(), {2: PARAMETER, 3: STATE, 4: BUFFER})
    found = plan(profile, local_cluster(2), PlanOptions(stages="0-6:1,7-13:1", recompute="full"))
    again = {name for stage in found.stages for name in stage.recompute}
    assert {"h.1", "h.2"}.isdisjoint(again)
    assert "h.3" in again


def test_devices_that_layers_of_one_replica_leave_idle_are_explained() -> None:
    profile = written(gpt_profile(blocks=1, batch=4), {0: BUFFER, 1: BUFFER, 2: BUFFER})
    with pytest.raises(InfeasibleError, match=r"no plan uses all 4 devices: layer wte has one replica"):
        plan(profile, local_cluster(4), PlanOptions(gpus=4, use_all=True))
    found = plan(profile, local_cluster(4), PlanOptions(gpus=4))
    assert simulate(found, profile, local_cluster(4)).end_s == pytest.approx(found.predicted.step_s)
