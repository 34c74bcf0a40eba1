"""Comparisons: rows in order, and a search that goes on where a peer is faster within the gap."""

from __future__ import annotations

import pytest

from autopar.errors import InfeasibleError
from autopar.planner import PlanOptions, plan
from autopar.planner.compare import compare
from chunked import halved
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile

MIB = 2**20


def test_rows_are_the_plans_of_all_peers_and_autopars_own_fastest_first() -> None:
    found = compare(gpt_profile(), local_cluster(4), PlanOptions(gpus=4, bytes_per_s=3e8, memory_bytes=60 * MIB))
    assert {row.name for row in found.rows} >= {"autopar", "pure data parallelism", "equal split", "GPipe", "DAPPLE"}
    steps = [row.step_s for row in found.rows if row.step_s is not None]
    assert steps == sorted(steps)
    assert [row.step_s is None for row in found.rows] == sorted(row.step_s is None for row in found.rows)
    assert all((row.step_s is None) == (row.infeasible is not None) for row in found.rows)
    assert found.rows[0].name == "autopar"
    own = found.rows[0]
    assert own.step_s == found.plan.predicted.step_s
    assert own.peak_bytes == max(found.plan.predicted.peak_bytes)


@pytest.mark.slow
def test_every_plan_that_takes_devices_in_cluster_order_can_be_dictated_and_takes_as_long() -> None:
    found = compare(gpt_profile(), local_cluster(4), PlanOptions(gpus=4, bytes_per_s=3e8))
    for row in found.rows:
        assert row.step_s is not None
        options = PlanOptions(
            stages=row.stages,
            micro_batches=row.micro_batches,
            schedule=row.schedule or "auto",
            bytes_per_s=3e8,
            shard="parameters" if row.name == "sharded data parallelism" else "none",
        )
        assert plan(gpt_profile(), local_cluster(4), options).predicted.step_s == pytest.approx(row.step_s, rel=1e-12)


@pytest.mark.slow
def test_plan_and_compare_give_the_same_plan_and_no_peer_is_faster() -> None:
    for seed in range(40):
        profile, cluster = random_profile(seed), random_cluster(seed, 4)
        options = PlanOptions(gpus=4, exact=True, gap=1.0 if seed % 2 else 0.02)
        found = compare(profile, cluster, options)
        assert found.plan == plan(profile, cluster, options)
        assert all(row.step_s is None or row.step_s >= found.plan.predicted.step_s for row in found.rows)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_a_schedule_that_is_asked_for_stands_beside_the_usual_plans(schedule: str) -> None:
    for seed in range(4):
        profile, cluster = halved(gpt_profile(4), seed), random_cluster(seed, 3)
        found = compare(profile, cluster, PlanOptions(schedule=schedule, memory_bytes=2**40))
        assert found.plan.schedule == schedule
        usual = next(row for row in found.rows if row.name == "pure data parallelism")
        assert usual.schedule == "1f1b"


def test_where_nothing_fits_there_is_nothing_to_compare() -> None:
    with pytest.raises(InfeasibleError, match="nothing fits the memory"):
        compare(gpt_profile(), local_cluster(2), PlanOptions(memory_bytes=MIB))


def test_the_same_question_has_the_same_answer() -> None:
    first, second = (compare(gpt_profile(), local_cluster(3), PlanOptions(gpus=6)) for _ in range(2))
    assert first == second
