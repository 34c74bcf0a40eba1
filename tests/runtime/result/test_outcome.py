"""What ranks bring back becomes a report: where time went, and measured over predicted, of results made by hand."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from autopar.formats.plan import Crossing, Plan, Prediction, Stage
from autopar.formats.profile import ModelSource
from autopar.formats.program import Action
from autopar.formats.timeline import compare_times
from autopar.recalibration import planned_times
from autopar.runtime.result.outcome import RankResult, outcome_of
from autopar.schedules import SCHEDULES
from autopar.schedules.expand import expand, stages_of

MICRO_BATCHES = 4


def plan_of(schedule: str, groups: tuple[tuple[int, ...], ...], chunks: int = 1) -> Plan:
    """Return a plan of one layer per stage, whose stages go round groups of devices."""
    count = len(groups) * chunks
    depths = next(iter(SCHEDULES[schedule].warmups(len(groups), chunks, MICRO_BATCHES).values()))
    return Plan.model_validate(
        {
            "model": ModelSource(source="model.py", sha256="0" * 64),
            "batch": 4 * MICRO_BATCHES,
            "precision": "fp32",
            "schedule": schedule,
            "micro_batches": MICRO_BATCHES,
            "micro_batch_size": 4,
            "stages": tuple(
                Stage(
                    layers=(f"layer{stage}",),
                    devices=groups[stage % len(groups)],
                    shares=(4 // len(groups[stage % len(groups)]),) * len(groups[stage % len(groups)]),
                    warmup=depths[stage],
                )
                for stage in range(count)
            ),
            "tensors": tuple(
                Crossing(
                    name=f"t{i}", producer=i, consumers=(i + 1,), bytes_per_sample=8, dtype="float32", gradient=True
                )
                for i in range(count - 1)
            ),
            "predicted": Prediction(
                step_s=10.0,
                lower_bound_s=0.0,
                bubble=0.0,
                peak_bytes=tuple(range(100, 100 + count)),
                forward_s=(0.5,) * count,
                backward_s=(2.0,) * count,
            ),
        }
    )


def results_of(plan: Plan, steps: int, length: Callable[[int, int, Action], float]) -> list[RankResult]:
    """Return what ranks would bring back that do one action after the other without waiting, a second between steps."""
    program, found = expand(plan), []
    for rank, actions in enumerate(program.ranks):
        stages, replica = stages_of(plan, rank)
        starts, ends, times, now = [], [], {}, 0.0
        for step in range(steps):
            starts.append(now)
            now, spans = now + 1.0, []
            for action in actions:
                spans.append((now, now + length(step, rank, action)))
                now = spans[-1][1]
            times[str(step)] = spans
            ends.append(now)
        found.append(
            RankResult(
                rank=rank,
                stages=list(stages),
                replica=replica,
                loss=[1.0] * steps,
                count=[0.0] * steps,
                starts_s=starts,
                ends_s=ends,
                times_s=times,
                backend="gloo",
                peak_bytes=7,
                peak_kind="resident",
                gradient_norm=[None] * steps,
                overflow=[False] * steps,
                layers_s={},
                forward_flops=10**12,
                peak_flops_per_s=None,
                samples=16,
                saved_files={},
            )
        )
    return found


@pytest.mark.parametrize(
    ("schedule", "groups", "chunks"),
    [("1f1b", ((0, 1), (2,)), 1), ("interleaved", ((0,), (1,)), 2), ("zb-h1", ((0,), (1,), (2,)), 1)],
)
def test_every_ranks_times_sum_to_the_step_they_are_of(
    schedule: str, groups: tuple[tuple[int, ...], ...], chunks: int
) -> None:
    plan, draw = plan_of(schedule, groups, chunks), random.Random(0)
    results = results_of(plan, 5, lambda step, rank, action: draw.uniform(0.1, 1.0))
    outcome = outcome_of(plan, expand(plan), results, "drawn")
    ends = [max(result["ends_s"][step] for result in results) for step in range(5)]
    lengths = [end - before for before, end in zip([0.0, *ends], ends, strict=False)]
    report = outcome.report
    for times in report.rank_times:
        total = times.compute_s + times.update_s + times.reduce_s + times.waiting_s + times.transfer_s + times.idle_s
        assert min(abs(total - length) for length in lengths[1:]) < 1e-9
        assert times.in_flight == times.predicted_in_flight
        assert report.predicted_peak_bytes[times.rank] == 100 + max(times.stages)


def test_the_first_step_counts_for_nothing_and_an_outlier_moves_no_median() -> None:
    plan = plan_of("1f1b", ((0,), (1,)))
    slow = {0: 100.0, 7: 10.0}
    results = results_of(plan, 10, lambda step, rank, action: slow.get(step, 1.0))
    outcome = outcome_of(plan, expand(plan), results, "drawn")
    actions = max(len(rank) for rank in expand(plan).ranks)
    times = outcome.report.step_s
    assert times.median == pytest.approx(actions + 1)
    assert times.p90 < times.longest == pytest.approx(10 * actions + 1)
    assert times.first == pytest.approx(100 * actions + 1)
    assert all(times == pytest.approx(1.0) for (_, action), times in outcome.own_times.items() if action.kind in "FBU")


def test_without_a_profile_a_stages_slowest_replica_is_compared_with_the_plans_own_times() -> None:
    plan = plan_of("1f1b", ((0, 1), (2,)))
    speeds = {("F", 0): 0.25, ("F", 1): 1.0, ("F", 2): 1.0, ("B", 0): 3.0, ("B", 1): 1.0, ("B", 2): 3.0}
    results = results_of(plan, 4, lambda step, rank, action: speeds.get((action.kind, rank), 0.125))
    outcome = outcome_of(plan, expand(plan), results, "drawn")
    kinds = compare_times(outcome.own_times, planned_times(plan, outcome))
    assert [(each.kind, each.actions, round(each.ratio, 9)) for each in kinds] == [("F", 8, 2.0), ("B", 8, 1.5)]


def test_operations_are_held_against_the_devices_peak_where_that_is_known() -> None:
    plan = plan_of("1f1b", ((0,), (1,)))
    results = results_of(plan, 3, lambda step, rank, action: 1.0)
    report = outcome_of(plan, expand(plan), results, "drawn").report
    assert report.model_flops is report.flops_utilisation is None
    for result in results:
        result["peak_flops_per_s"] = 2e12
    report = outcome_of(plan, expand(plan), results, "drawn").report
    assert report.model_flops == 6e12
    assert report.flops_utilisation == pytest.approx(6e12 / (4e12 * report.step_s.median))
