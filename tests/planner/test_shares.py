"""Rows by speed against every other division of them, on devices of several kinds."""

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from autopar.formats.cluster import Cluster
from autopar.formats.profile import DeviceCosts, DeviceKind, Layer, Profile
from autopar.planner import PlanOptions, plan
from autopar.planner.candidate import CandidateStage, Family
from autopar.planner.costs.memory import peak_of
from autopar.planner.costs.model import CostModel
from autopar.planner.costs.rank_memory import peak_terms_of
from autopar.planner.shares import by_speed, most_rows, rows_by_speed
from random_problems import cost, local_cluster, profile_of, random_cluster, random_profile, two_kinds


def test_no_other_whole_rows_have_a_slowest_replica_that_ends_sooner() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        counts = [rng.randint(1, 2) for _ in range(rng.randint(2, 3))]
        least = rng.choice((1, 1, 2))
        rows = least * sum(counts) + rng.randint(0, 4)
        seconds = []
        for kind in range(len(counts)):
            each = np.cumsum([rng.choice((0.0, rng.random())) for _ in range(most_rows(counts, rows, kind))])
            each[max(least, rng.randint(1, 9)) :] = np.inf if rng.random() < 0.3 else each[-1]
            seconds.append(each)
        totals = [int(each) for each in rows_by_speed(seconds, counts, rows, least)]
        assert sum(totals) == rows
        assert all(total >= least * count for total, count in zip(totals, counts, strict=True))
        slowest = max(own[-(-total // count) - 1] for own, total, count in zip(seconds, totals, counts, strict=True))
        every = product(
            *(range(least, len(own) + 1) for own, count in zip(seconds, counts, strict=True) for _ in range(count))
        )
        kinds = [kind for kind, count in enumerate(counts) for _ in range(count)]
        best = min(
            max(seconds[kind][own - 1] for kind, own in zip(kinds, each, strict=True))
            for each in every
            if sum(each) == rows
        )
        assert slowest == best, f"seed {seed}"


def test_shares_are_the_best_of_a_stage_within_every_replica_s_own_memory() -> None:
    unequal = bound = 0
    for seed in range(80):
        rng = random.Random(seed)
        profile, cluster = two_kinds(random_profile(seed, batches=(6, 8)), random_cluster(seed, 3), seed)
        costs = CostModel(profile, cluster, PlanOptions())
        family = Family(1, costs.batch, "1f1b")
        stage = CandidateStage(0, costs.layer_count, (0, 1, 2), (1, 1, costs.batch - 2), 1)
        if len(set(costs.kind_of)) == 1:
            continue
        if seed % 2:
            limit = int(rng.uniform(0.6, 1.0) * _held(costs, by_speed(costs, stage, family), family)[1])
            costs.limits_bytes[rng.randrange(3)] = limit
        shared = by_speed(costs, stage, family)
        every = (each for each in product(range(1, costs.batch - 1), repeat=3) if sum(each) == costs.batch)
        others = [stage._replace(shares=each) for each in every]
        fitting = [each for each in others if _held(costs, each, family)[0]]
        if not fitting:
            continue
        bound += len(fitting) < len(others)
        unequal += max(shared.shares) > min(shared.shares) + 1
        assert _held(costs, shared, family)[0], f"seed {seed}"
        assert _slowest_s(costs, shared) <= min(_slowest_s(costs, each) for each in fitting) * (1 + 1e-8), (
            f"seed {seed}"
        )
        assert shared.shares[-1] == max(shared.shares)
        assert by_speed(costs, shared, family) == shared
    assert min(unequal, bound) >= 10


def _held(costs: CostModel, stage: CandidateStage, family: Family) -> tuple[bool, int]:
    """Whether all replicas fit, with all run again that may be; and what the largest holds."""
    fits, most = True, 0
    for replica, (form, rows) in enumerate(zip(costs.forms_of(stage), stage.shares, strict=True)):
        again = tuple(sorted(costs.recompute_levels(family.micro_batch_size, form)[-1]))
        terms = peak_terms_of(stage._replace(recompute=again), family.micro_batches, 0, rows)
        peak = int(peak_of(costs.memory[form].parts(stage.first, stage.stop, rows, terms.recompute), terms))
        limit = costs.limit_of(stage, form)
        fits, most = fits and peak <= limit, max(most, peak)
        assert costs.limits_bytes[stage.devices[replica]] >= limit
    return fits, most


def _slowest_s(costs: CostModel, stage: CandidateStage) -> float:
    return max(costs.forward_s(stage, at) + costs.backward_s(stage, at, 1) for at in range(len(stage.shares)))


def _unlike(devices: tuple[int, int], rows: int, factor: float) -> tuple[Profile, Cluster]:
    """A model of which each row takes as long, on some devices and on others that are so many times as slow."""

    def layers(each_s: float) -> tuple[Layer, ...]:
        return tuple(
            Layer(
                name=f"l{at}",
                modules=(f"l{at}",),
                parameters_bytes=64,
                trainable_bytes=64,
                gradient_bytes=64,
                optimizer_bytes=0,
                costs=tuple(
                    cost(count, each_s * count, 2 * each_s * count, {f"l{at}": 100 * count}, 100 * count, 8 * count)
                    for count in (1, rows)
                ),
            )
            for at in range(4)
        )

    kind = DeviceKind(type="cpu", name="slow", memory_bytes=2**34)
    other = DeviceCosts(device=kind, layers=layers(factor * 1e-3))
    profile = profile_of(list(layers(1e-3)), [], rows).model_copy(update={"others": (other,)})
    cluster, types = local_cluster(sum(devices)), ("test",) * devices[0] + ("slow",) * devices[1]
    own = (each.model_copy(update={"type": name}) for each, name in zip(cluster.devices, types, strict=True))
    return profile, cluster.model_copy(update={"devices": tuple(own)})


@pytest.mark.parametrize(("devices", "rows"), [((4, 4), 48), ((3, 5), 44), ((1, 7), 36)])
def test_two_kinds_take_as_long_as_shares_in_proportion_to_their_speed(devices: tuple[int, int], rows: int) -> None:
    profile, cluster = _unlike(devices, rows, 2.0)
    options = PlanOptions(max_stages=1, micro_batches=1, recompute="none", shard="none")
    found = plan(profile, cluster, options)
    ideal_s = rows * 4 * 3e-3 / (devices[0] + devices[1] / 2)
    assert found.predicted.forward_s[0] + found.predicted.backward_s[0] == pytest.approx(ideal_s, rel=1e-2)
    each = rows // (2 * devices[0] + devices[1])
    assert found.stages[0].shares == (each,) * devices[1] + (2 * each,) * devices[0]
    assert found.stages[0].types == ("slow", "test")
    rounded = plan(profile, cluster, replace(options, stages=f"0-3:{devices[1]}@slow+{devices[0]}@test"))
    assert rounded.stages == found.stages


def test_kinds_that_are_as_fast_are_planned_as_one() -> None:
    for devices, rows in (((2, 2), 7), ((1, 3), 10)):
        profile, cluster = _unlike(devices, rows, 1.0)
        one = cluster.model_copy(
            update={"devices": tuple(each.model_copy(update={"type": "test"}) for each in cluster.devices)}
        )
        found, alone = (plan(profile, each, PlanOptions(gap=0.0)) for each in (cluster, one))
        assert found.predicted.step_s == pytest.approx(alone.predicted.step_s, rel=1e-12)
        assert [sorted(stage.shares) for stage in found.stages] == [sorted(stage.shares) for stage in alone.stages]
