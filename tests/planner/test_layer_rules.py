"""What layers allow, and plans obey: shares of so many samples, one replica each, and to be run once."""

import contextlib
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.plan import Plan
from autopar.formats.profile import Layer, Profile, Writes
from autopar.formats.report import ComparisonRow
from autopar.planner import PlanOptions, plan, simulate
from autopar.planner.candidate import Candidate
from autopar.planner.comparison import compare
from autopar.planner.constraints import crossed_limit
from autopar.planner.costs.model import CostModel
from autopar.planner.search.judge import Best
from random_problems import gpt_profile, local_cluster, problem
from searched import agreed, exhausted, searched

INSTANCES = 6
BUFFER, PARAMETER, STATE, INPUT = (Writes(**{name: ("b",)}) for name in ("buffers", "parameters", "state", "inputs"))
Limits = dict[int, tuple[int, int | None]]
"""By layer: the fewest and the most samples."""


def changed(profile: Profile, updates: Mapping[int, dict[str, object]]) -> Profile:
    """Return a profile of which some layers, on all kinds of devices, have other fields."""

    def of(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
        return tuple(layer.model_copy(update=updates.get(at, {})) for at, layer in enumerate(layers))

    others = tuple(each.model_copy(update={"layers": of(each.layers)}) for each in profile.others)
    return profile.model_copy(update={"layers": of(profile.layers), "others": others})


def limited(profile: Profile, limits: Limits) -> Profile:
    """Return a profile of which some layers take no other numbers of samples."""
    names = ("least_samples", "most_samples")
    return changed(profile, {at: dict(zip(names, limit, strict=True)) for at, limit in limits.items()})


def written(profile: Profile, writes: dict[int, Writes]) -> Profile:
    """Return a profile of which some layers write; a buffer has 30 kB."""
    sizes = {at: 30_000 if each.buffers else 0 for at, each in writes.items()}
    return changed(profile, {at: {"writes": each, "written_bytes": sizes[at]} for at, each in writes.items()})


def obeys(found: Plan, profile: Profile) -> bool:
    shares = {name: stage.rows for stage in found.stages for name in stage.layers}
    return all(
        layer.least_samples <= min(shares[layer.name])
        and max(shares[layer.name]) <= (layer.most_samples or found.batch)
        for layer in profile.layers
    )


@pytest.mark.some(1)
@pytest.mark.parametrize("part", range(2, 4))
def test_an_exact_search_finds_the_oracles_step_where_layers_have_limits(part: int) -> None:
    differing = 0
    for seed in range(3 * part, 3 * (part + 1)):
        rng = random.Random(seed)
        profile, cluster = problem(seed, 3, 3, most_layers=3, batches=(4, 6))
        limits: Limits = {
            at: rng.choice([(2, None), (1, 1), (2, 2), (3, None), (1, 3)])
            for at in range(len(profile.layers))
            if rng.random() < 0.5
        }
        options = PlanOptions(gpus=3, gap=0.0, shard="auto")
        found: list[Candidate | None] = []
        for kind in (profile, limited(profile, limits)):
            oracle, best = exhausted(kind, cluster, options)[0], Best()
            with contextlib.suppress(UsageError):
                best, _ = searched(kind, cluster, options)
            assert (best.fastest is None) == (oracle.fastest is None), f"seed {seed}"
            if best.fastest is not None:
                assert best.step_s == pytest.approx(oracle.step_s, rel=1e-9), f"seed {seed}"
                assert crossed_limit(CostModel(kind, cluster, options), best.fastest.candidate.stages) is None
            found.append(best.fastest.candidate if best.fastest is not None else None)
        differing += found[0] != found[1]
    assert differing >= 1


@pytest.mark.some(4)
@pytest.mark.parametrize("asked", [{}, {"schedule": "gpipe"}, {"schedule": "interleaved"}, {"solver": "milp"}], ids=str)
@pytest.mark.parametrize("limit", [(2, None), (2, 3), (1, 1), (4, None)])
def test_plans_of_every_schedule_and_solver_obey(asked: dict[str, Any], limit: tuple[int, int | None]) -> None:
    small = asked.get("solver") == "milp"
    profile = gpt_profile(blocks=1 if small else 8, batch=8)
    profile = limited(profile, {1: limit} if small else dict.fromkeys(range(10), limit))
    assert obeys(plan(profile, local_cluster(4), PlanOptions(gpus=4, **asked)), profile)


@pytest.mark.parametrize(
    ("limits", "asked", "said"),
    [
        ({3: (2, None)}, {"stages": "0-13:8"}, "`stages`: layer h.2 takes at least 2 samples of a micro-batch at once"),
        ({5: (1, 4)}, {"stages": "0-13:1", "micro_batches": 1}, "h.4 takes 1 to 4 samples.*give more `micro_batches`"),
        ({3: (2, None)}, {"micro_batches": 8}, "layer h.2 takes at least 2 samples.*give fewer `micro_batches`"),
        ({3: (1, 2)}, {"micro_batches": 1}, "layer h.2 takes 1 to 2 samples.*give more `micro_batches`"),
    ],
)
def test_stages_or_micro_batches_that_give_too_few_or_too_many_are_refused_with_the_layer(
    limits: Limits, asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        plan(limited(gpt_profile(batch=8), limits), local_cluster(2), PlanOptions(**asked))


def placed(rows: Iterable[ComparisonRow]) -> list[tuple[range, int]]:
    """Return the layers and the replicas of every stage of all rows."""
    found = re.findall(r"(\d+)(?:-(\d+))?:(\d+)", ",".join(row.stages or "" for row in rows))
    return [(range(int(first), int(last or first) + 1), int(width)) for first, last, width in found]


def test_one_replica_binds_plans_and_their_peers_and_is_explained() -> None:
    profile = limited(gpt_profile(blocks=6, batch=8), dict.fromkeys(range(8), (8, None)))
    rows = compare(profile, local_cluster(4), PlanOptions(gpus=4)).rows
    parallel = next(row for row in rows if row.name == "pure data parallelism")
    assert "takes at least 8 samples" in str(parallel.infeasible)
    assert {width for _, width in placed(rows)} == {1}
    rows = compare(written(gpt_profile(blocks=6), {4: BUFFER}), local_cluster(4), PlanOptions(gpus=4)).rows
    wide = [layers for layers, width in placed(rows) if width > 1]
    assert wide
    assert not any(4 in layers for layers in wide)
    assert any("layer h.3 has one replica" in str(row.infeasible) for row in rows)
    writes = {1: BUFFER}
    profile = written(gpt_profile(blocks=1, batch=4), writes)
    found, searched = (
        plan(profile, local_cluster(3), PlanOptions(gpus=3, gap=0.0, solver=solver, micro_batches=2))  # type: ignore[arg-type]
        for solver in ("milp", "dp")
    )
    assert singles(found, writes, profile) == [1]
    assert found.predicted.step_s == pytest.approx(searched.predicted.step_s, rel=1e-9)
    profile = written(gpt_profile(blocks=1, batch=4), {0: BUFFER, 1: BUFFER, 2: BUFFER})
    with pytest.raises(InfeasibleError, match=r"no plan uses all 4 devices: layer wte has one replica"):
        plan(profile, local_cluster(4), PlanOptions(gpus=4, use_all=True))
    found = plan(profile, local_cluster(4), PlanOptions(gpus=4))
    assert simulate(found, profile, local_cluster(4)).end_s == pytest.approx(found.predicted.step_s)


def singles(found: Plan, writes: dict[int, Writes], profile: Profile) -> list[int]:
    """Return the replicas of every layer that writes something that lasts."""
    width = {name: stage.replicas for stage in found.stages for name in stage.layers}
    return [width[profile.layers[at].name] for at, each in writes.items() if each.single]


def test_an_exact_search_finds_the_oracles_step_where_layers_have_one_replica() -> None:
    differing = 0
    for seed in range(INSTANCES):
        rng = random.Random(seed)
        profile, cluster = problem(seed, 3, 3, most_layers=3, batches=(2, 4))
        kinds = (BUFFER, PARAMETER, STATE, INPUT)
        writes = {at: rng.choice(kinds) for at in range(len(profile.layers)) if rng.random() < 0.4}
        plain, profile, options = profile, written(profile, writes), PlanOptions(gpus=3, gap=0.0, shard="auto")
        found = []
        for limit in (None, 2_500_000):
            asked = replace(options, memory_bytes=limit)
            best = agreed(profile, cluster, asked, seed)
            found += [] if best.fastest is None else [best.fastest.candidate]
        for candidate in found:
            for stage in candidate.stages:
                held = [writes[at] for at in range(stage.first, stage.stop) if at in writes]
                assert len(stage.devices) == 1 or not any(each.single for each in held), f"seed {seed}"
                assert not any(at in writes and writes[at].once for at in stage.recompute), f"seed {seed}"
        differing += any(width > 1 for width in singles(plan(plain, cluster, options), writes, profile))
    assert differing >= 1


@pytest.mark.parametrize("schedule", ["auto", "gpipe", "interleaved"])
def test_plans_say_why_a_layer_has_one_replica_and_dictated_ones_are_refused(schedule: str) -> None:
    writes = {3: BUFFER, 5: PARAMETER}
    profile, cluster = written(gpt_profile(), writes), local_cluster(4)
    found = plan(profile, cluster, PlanOptions(gpus=4, schedule=schedule))
    assert singles(found, writes, profile) == [1, 1]
    assert any("layer h.2 has one replica, since its forward changes the buffer b" in note for note in found.notes)
    assert any("layer h.4 is not recomputed, since its forward changes the parameter b" in note for note in found.notes)
    accumulated = "layer h.2 trains as with gradients accumulated over {} micro-batches, since its forward changes"
    assert any(accumulated.format(found.micro_batches) in note for note in found.notes)
    whole = plan(profile, cluster, PlanOptions(gpus=4, schedule=schedule, micro_batches=1))
    assert not any("accumulated" in note for note in whole.notes)
    stages = "0-3:2,4-6:2,7-9:2,10-13:2" if schedule == "interleaved" else "0-3:2,4-13:1"
    with pytest.raises(UsageError, match=r"`stages`: layer h.2 has one replica.*`replicate_state='first'` or average"):
        plan(profile, cluster, PlanOptions(schedule=schedule, stages=stages))
    for row in found.alternatives:
        if "data parallelism" in row.name:
            assert row.step_s is None
            assert "has one replica" in str(row.infeasible)


def test_written_copies_are_counted_and_asked_for_only_of_buffers() -> None:
    cluster, stages = local_cluster(3), PlanOptions(stages="0-6:2,7-13:1")
    found = plan(written(gpt_profile(), {3: BUFFER}), cluster, replace(stages, replicate_state="average"))
    assert found.replicate_state == "average"
    assert any("the mean of the replicas'" in caveat for caveat in found.caveats)
    other = plan(written(gpt_profile(), {9: BUFFER}), cluster, replace(stages, replicate_state="first"))
    assert other.replicate_state is None
    for kind in (PARAMETER, STATE):
        with pytest.raises(UsageError, match="has one replica"):
            plan(written(gpt_profile(), {3: kind}), cluster, replace(stages, replicate_state="first"))
    with pytest.raises(UsageError, match="`replicate_state` must be one of first, average; found"):
        PlanOptions(replicate_state="last")  # type: ignore[arg-type]
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
    profile = written(gpt_profile(), {2: PARAMETER, 3: STATE, 4: BUFFER})
    found = plan(profile, local_cluster(2), PlanOptions(stages="0-6:1,7-13:1", recompute="full"))
    again = {name for stage in found.stages for name in stage.recompute}
    assert {"h.1", "h.2"}.isdisjoint(again)
    assert "h.3" in again
