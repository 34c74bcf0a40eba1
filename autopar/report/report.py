"""Report of a training run as tables: the loss, prediction against measurement, and where each rank's step went."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.report.quantity import duration, percentage, size
from autopar.report.table import new_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from autopar.formats.report import Report

__all__ = ["render"]

_SHOWN_LOSSES = 8


def render(report: Report, console: Console) -> None:
    """Print a report's loss, step times and ranks."""
    where = f"{report.ranks} ranks on {report.device} with {report.backend}, torch {report.torch}"
    console.print(f"{report.model}: {report.steps} steps by {where}", highlight=False, markup=False)
    console.print(_loss(report))
    console.print(_times(report))
    console.print(_ranks(report))
    console.print(f"initial weights: {report.initial_weights}", highlight=False, markup=False)
    for note in report.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def _loss(report: Report) -> Table:
    shown = _spread(len(report.loss), _SHOWN_LOSSES)
    table = new_table("Loss", ("step", *(f">{index + 1}" for index in shown)))
    table.add_row("loss", *(f"{report.loss[index]:.4g}" for index in shown))
    if report.gradient_norm:
        norms = (report.gradient_norm[index] for index in shown)
        table.add_row("gradient norm", *("overflow" if norm is None else f"{norm:.4g}" for norm in norms))
    return table


def _times(report: Report) -> Table:
    table = new_table("Prediction and measurement", ("", ""))
    spread = f"(p10 {duration(report.step_s.p10)}, p90 {duration(report.step_s.p90)})"
    table.add_row("measured step (median)", f"{duration(report.step_s.median)} {spread}")
    table.add_row("predicted step", f"{duration(report.predicted_step_s)}{_known(report)}")
    table.add_row("error", percentage(report.error, signed=True))
    table.add_row("samples per second", f"{report.samples_per_s:.4g}")
    table.add_row("bubble", percentage(report.bubble))
    return table


def _known(report: Report) -> str:
    """Return, in brackets, where the numbers came from that the prediction used."""
    known = (("computing", report.predicted_compute), ("communication", report.predicted_communication))
    parts = [f"{what} {each}" for what, each in known if each is not None]
    return f" ({', '.join(parts)})" if parts else ""


def _ranks(report: Report) -> Table:
    heads = (">rank", ">stage", ">replica", ">compute", ">update", ">waiting", f">peak ({report.peak_kind})")
    table = new_table("Ranks, in the median step", heads)
    for times in report.rank_times:
        spent = [duration(seconds) for seconds in (times.compute_s, times.update_s, times.waiting_s)]
        peak = size(report.peak_bytes[times.rank]) if times.rank < len(report.peak_bytes) else ""
        table.add_row(str(times.rank), ", ".join(map(str, times.stages)), str(times.replica), *spent, peak)
    return table


def _spread(count: int, most: int) -> list[int]:
    """Return at most ``most`` indices below ``count``, evenly spread, first and last included.

    >>> _spread(3, 8), _spread(21, 5)
    ([0, 1, 2], [0, 5, 10, 15, 20])
    """
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]
