"""Timetable: a schedule drawn as text, every computation one slot long and messages free."""

from __future__ import annotations

from autopar.formats.layout import layout_of
from autopar.formats.program import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD
from autopar.schedules import SCHEDULES
from autopar.schedules.place import Computation, places

__all__ = ["draw"]


def draw(schedule: str, stages: int, micro_batches: int, warmup: str | None = None, groups: int | None = None) -> str:
    """Return one line per stage, or per group of several, one column per slot.

    ``warmup`` names the depth, by default the shallowest. Of groups, a forward or backward names its stage, too.
    """
    groups = groups or stages
    chosen, chunks = SCHEDULES[schedule], stages // groups
    choices = chosen.warmups(groups, chunks, micro_batches)
    depths = choices[warmup] if warmup else next(iter(choices.values()))
    all_places = list(places(layout_of(schedule), groups, chunks, micro_batches, depths))
    orders = [list(chosen.order(place)) for place in all_places]
    done: set[Computation] = set()
    lines: list[list[str]] = [[] for _ in range(groups)]
    position = [0] * groups
    while any(at < len(order) for at, order in zip(position, orders, strict=True)):
        finished = []
        for group, order in enumerate(orders):
            cell = "."
            if position[group] < len(order) and _ready(order[position[group]], stages, done):
                kind, stage, micro_batch = order[position[group]]
                cell = f"{kind}{micro_batch}" + (f"@{stage}" if chunks > 1 else "")
                finished.append(order[position[group]])
                position[group] += 1
            lines[group].append(cell)
        if not finished:
            raise AssertionError(f"{schedule} is stuck at slot {len(lines[0])}")
        done.update(finished)
    width = max(len(cell) for cells in lines for cell in cells)
    what = "stage" if chunks == 1 else "group"
    return "\n".join(
        f"{what} {index}: " + " ".join(cell.ljust(width) for cell in cells).rstrip()
        for index, cells in enumerate(lines)
    )


def _ready(computation: Computation, stages: int, done: set[Computation]) -> bool:
    kind, stage, micro_batch = computation
    if kind == FORWARD:
        return stage == 0 or (FORWARD, stage - 1, micro_batch) in done
    if kind == WEIGHT_BACKWARD:
        return (INPUT_BACKWARD, stage, micro_batch) in done
    if stage == stages - 1:
        return (FORWARD, stage, micro_batch) in done
    return any((kind, stage + 1, micro_batch) in done for kind in (BACKWARD, INPUT_BACKWARD))
