"""Timetable: a schedule drawn as text, every computation one slot long and messages free.

Where backwards have halves, a whole one takes two slots.
"""

from __future__ import annotations

from autopar.formats.program import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD
from autopar.formats.stage import layout_of
from autopar.schedules import SCHEDULES
from autopar.schedules.order import Computation, Order, places


def draw(
    schedule: str | Order, stages: int, micro_batches: int, warmup: str | None = None, groups: int | None = None
) -> str:
    """Return one line per stage, or per group of several, one column per slot.

    ``schedule`` is a name of :data:`autopar.schedules.SCHEDULES`, or an order of your own, of one stage per rank.
    ``warmup`` names the depth, by default the shallowest. Of groups, a forward or backward names its stage, too.
    """
    rows = timetable(schedule, stages, micro_batches, warmup, groups)
    several = len(rows) < stages
    lines = [[_cell(slot, several) for slot in slots] for slots in rows]
    width = max(len(cell) for cells in lines for cell in cells)
    what = "group" if several else "stage"
    return "\n".join(
        f"{what} {index}: " + " ".join(cell.ljust(width) for cell in cells).rstrip()
        for index, cells in enumerate(lines)
    )


def _cell(slot: Computation | None, several: bool) -> str:
    if slot is None:
        return "."
    kind, stage, micro_batch = slot
    return f"{kind}{micro_batch}" + (f"@{stage}" if several else "")


def timetable(
    schedule: str | Order, stages: int, micro_batches: int, warmup: str | None = None, groups: int | None = None
) -> list[list[Computation | None]]:
    """Return what every group computes in every slot; None where it waits."""
    groups = groups or stages
    if isinstance(schedule, str):
        chosen, chunks = SCHEDULES[schedule], stages // groups
        choices = chosen.warmups(groups, chunks, micro_batches)
        depths = choices[warmup] if warmup else next(iter(choices.values()))
        order, all_places = chosen.order, places(layout_of(schedule), groups, chunks, micro_batches, depths)
    else:
        order, all_places = schedule, places("line", stages, 1, micro_batches, (micro_batches,) * stages)
    orders = _slots([list(order(place)) for place in all_places])
    done: set[Computation] = set()
    rows: list[list[Computation | None]] = [[] for _ in range(groups)]
    while any(orders):
        finished = []
        for row, slots in zip(rows, orders, strict=True):
            ready = bool(slots) and _ready(slots[-1], stages, done)
            row.append(slots.pop() if ready else None)
            if ready and row[-1] not in slots[-1:]:
                finished.append(row[-1])
        if all(row[-1] is None for row in rows):
            raise AssertionError(f"{schedule} is stuck at slot {len(rows[0])}")
        done.update(each for each in finished if each is not None)
    return rows


def _slots(orders: list[list[Computation]]) -> list[list[Computation]]:
    """Return orders, last slot first, with whole backwards in as many slots as halves of others."""
    halves = any(kind == WEIGHT_BACKWARD for order in orders for kind, *_ in order)
    return [[each for each in reversed(order) for _ in range(1 + (halves and each[0] == BACKWARD))] for order in orders]


def _ready(computation: Computation, stages: int, done: set[Computation]) -> bool:
    kind, stage, micro_batch = computation
    if kind == FORWARD:
        return stage == 0 or (FORWARD, stage - 1, micro_batch) in done
    if kind == WEIGHT_BACKWARD:
        return (INPUT_BACKWARD, stage, micro_batch) in done
    if stage == stages - 1:
        return (FORWARD, stage, micro_batch) in done
    return any((kind, stage + 1, micro_batch) in done for kind in (BACKWARD, INPUT_BACKWARD))
