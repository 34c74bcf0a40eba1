"""Cut: plans of a benchmark's own making, so that all contestants of a race train in the same pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from autopar.capture.graph import LayerGraph
from autopar.capture.model.source import UserModel
from autopar.formats.plan import Plan
from autopar.formats.prediction import Prediction
from autopar.formats.profile import ModelSource
from autopar.formats.stage import Stage, group_of, layout_of
from autopar.ownership import Shard, even_shares
from autopar.runtime.stage.layers import crossings
from autopar.schedules import SCHEDULES

__all__ = ["cut"]


def cut(
    graph: LayerGraph,
    user: UserModel,
    schedule: str,
    widths: Sequence[int],
    micro_batches: int,
    rows: int,
    chunks: int = 1,
    depth: str | None = None,
    edges: Sequence[int] | None = None,
    shard: Shard = "none",
) -> Plan:
    """Cut layers evenly into ``chunks`` stages for every group of devices, or before the layers ``edges``.

    ``widths`` are the replicas of the groups; ``depth`` names one of the schedule's, by default its first.
    """
    names = [layer.name for layer in graph.layers]
    groups, stages = len(widths), len(widths) * chunks
    bounds = [0, *(edges or [len(names) * index // stages for index in range(1, stages)]), len(names)]
    choices = SCHEDULES[schedule].warmups(groups, chunks, micro_batches)
    depths = choices[depth] if depth else next(iter(choices.values()))
    starts = [0, *accumulate(widths)]
    placed = []
    for index, (start, stop) in enumerate(pairwise(bounds)):
        group = group_of(layout_of(schedule), index, groups)
        placed.append(
            Stage(
                layers=tuple(names[start:stop]),
                devices=tuple(range(starts[group], starts[group + 1])),
                shares=even_shares(rows, widths[group]),
                warmup=depths[index],
                shard=shard,
            )
        )
    stage_of = {name: index for index, stage in enumerate(placed) for name in stage.layers}
    return Plan(
        model=ModelSource(source=user.spec, sha256=user.sha256),
        batch=micro_batches * rows,
        precision="fp32",
        schedule=schedule,  # type: ignore[arg-type]
        micro_batches=micro_batches,
        micro_batch_size=rows,
        stages=tuple(placed),
        tensors=crossings(graph.tensors, stage_of),
        predicted=Prediction(step_s=0.0, lower_bound_s=0.0, bubble=0.0, peak_bytes=(0,) * stages),
    )
