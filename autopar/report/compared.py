"""Compared plans as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.formats.compared import Compared, VirtualWorkers
from autopar.report.plan import few_stages
from autopar.report.quantity import duration, figure, percentage, size
from autopar.report.table import Table, say

if TYPE_CHECKING:
    from rich.console import Console


_ESTIMATE = (
    "note: no plan says virtual workers that cut differently; their step is that of each one's own simulated pipeline, "
    "and the reduction of gradients behind it"
)


def render(rows: Sequence[Compared], own_step_s: float, console: Console) -> None:
    """Print the plans of a comparison against the one that takes ``own_step_s``."""
    columns = (
        "planner",
        ">step",
        ">over autopar",
        "schedule",
        ">micro-batches",
        ">peak memory",
        "stages, or why not",
    )
    table = Table("Planners", columns)
    for row in rows:
        count = "" if row.micro_batches is None else str(row.micro_batches)
        peak = "" if row.peak_bytes is None else size(row.peak_bytes)
        ending = (
            row.schedule or "",
            count,
            peak,
            row.infeasible or few_stages(row.stages or "cut differently, see below"),
        )
        table.add_row(row.name, *_times(row, own_step_s), *ending)
    console.print(table)
    for row in rows:
        if row.virtual_workers is not None:
            console.print(_workers(row.name, row.virtual_workers))
            if row.stages is None:
                say(console, _ESTIMATE)


def _workers(name: str, found: VirtualWorkers) -> Table:
    """Return virtual workers stage by stage; workers with the same layers on the same kinds as one."""
    each = f"{found.in_flight} micro-batch{'es' if found.in_flight > 1 else ''} in flight"
    title = (
        f"{name}'s virtual workers ({found.policy}, {each}, {figure(found.samples_per_s)} samples per second at most)"
    )
    columns = (">worker", ">samples/s", ">stage", "layers", "devices", ">in flight", ">stage time", ">peak memory")
    table = Table(title, columns)
    groups: dict[object, list[int]] = {}
    for index, worker in enumerate(found.workers):
        groups.setdefault(tuple((stage.layers, stage.type) for stage in worker.stages), []).append(index)
    for members in groups.values():
        for at, stage in enumerate(found.workers[members[0]].stages):
            devices = ", ".join(str(found.workers[member].stages[at].device) for member in members)
            first = (
                (", ".join(map(str, members)), figure(found.workers[members[0]].samples_per_s)) if not at else ("", "")
            )
            times = (str(stage.in_flight), duration(stage.stage_s), size(stage.peak_bytes))
            table.add_row(*first, str(at), stage.layers, f"{devices} ({stage.type})", *times)
    return table


def _times(row: Compared, own_step_s: float) -> tuple[str, str]:
    if row.step_s is None:
        return "", ""
    over = percentage(row.step_s / own_step_s - 1, signed=True) if own_step_s > 0 and row.name != "autopar" else ""
    return duration(row.step_s), over
