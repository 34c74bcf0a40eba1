"""What ranks would bring back of a run whose actions take times that a test says, without a run."""

from __future__ import annotations

from collections.abc import Callable

from autopar.formats.plan import Crossing, Plan, Stage
from autopar.formats.prediction import Prediction
from autopar.formats.profile import ModelSource
from autopar.formats.program import Action
from autopar.runtime.outcome import RankResult
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
                checkpoints=[],
                buffers_bytes=0,
                saved_files={},
            )
        )
    return found
