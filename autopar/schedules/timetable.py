"""Timetable: a schedule drawn as text, every forward and backward one slot long and messages free."""

from __future__ import annotations

from autopar.formats.program import FORWARD
from autopar.schedules import SCHEDULES

__all__ = ["draw"]


def draw(schedule: str, stages: int, micro_batches: int, warmup: str | None = None) -> str:
    """Return one line per stage, one column per slot; ``warmup`` names the depth, by default the shallowest."""
    chosen = SCHEDULES[schedule]
    depths = chosen.warmups(stages, micro_batches)
    depth = depths[warmup] if warmup else next(iter(depths.values()))
    orders = [list(chosen.order(micro_batches, depth[stage])) for stage in range(stages)]
    done: dict[tuple[str, int, int], int] = {}
    lines: list[list[str]] = [[] for _ in range(stages)]
    position = [0] * stages
    for slot in range(4 * stages * micro_batches):
        finished = []
        for stage in range(stages):
            cell = ". "
            if position[stage] < len(orders[stage]):
                kind, micro_batch = orders[stage][position[stage]]
                if _ready(kind, stage, micro_batch, stages, done):
                    cell = f"{kind}{micro_batch}"
                    finished.append((kind, stage, micro_batch))
                    position[stage] += 1
            lines[stage].append(cell)
        if not finished:
            break
        done.update(dict.fromkeys(finished, slot))
    return "\n".join(f"stage {stage}: " + " ".join(cells[:-1]).rstrip() for stage, cells in enumerate(lines))


def _ready(kind: str, stage: int, micro_batch: int, stages: int, done: dict[tuple[str, int, int], int]) -> bool:
    if kind == FORWARD:
        return stage == 0 or (kind, stage - 1, micro_batch) in done
    if stage == stages - 1:
        return (FORWARD, stage, micro_batch) in done
    return (kind, stage + 1, micro_batch) in done
