"""Contests as tables and a picture: plans of one model that were trained side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import nan
from statistics import fmean, median
from typing import TYPE_CHECKING

from autopar.formats.contest import MEAN_OF, ContestRow, RunComparison
from autopar.report.style import INK, PALETTE, short, strip
from autopar.report.table import Part, Table, duration, figure, size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from autopar.formats.plan import Plan

_STYLES = ("-", "--", ":", "-.")


def render_contests(found: RunComparison) -> Iterator[Part]:
    """Yield what the contestants learned in which time, those in trouble first, and what they hold."""
    reached = () if found.loss is None else (f">time to {figure(found.loss)}",)
    seconds = (">simulated",) if found.cluster else (">predicted", ">measured")
    title = f"{found.model} trained" + (f", as on {found.cluster}" if found.cluster else "")
    learned = Table(title, ("contestant", ">loss", *reached, *seconds, "what happened"))
    held = Table("What they hold", ("contestant", ">predicted", ">measured", ">versions", ">delay", "stages"))
    for row in found.rows:
        learned.add_row(row.contestant.name, *_learning_cells(row, found), row.trouble or "")
        if row.contestant.plan is not None:
            held.add_row(row.contestant.name, *_memory_cells(row, row.contestant.plan))
    yield learned
    yield (
        f"Losses are means of the last {MEAN_OF} mini-batches and over seeds; seconds are those of a step: a "
        "mini-batch, or one of each pipeline. Versions are those of its weights that a stage keeps at most, and a "
        "delay counts updates from a forward to its own."
    )
    yield held
    if found.cluster:
        yield f"Processes of this host were trained by the plans for {found.cluster}, and seconds are simulated."
    yield from (f"note: {note}" for note in found.notes)


def _learning_cells(row: ContestRow, found: RunComparison) -> Iterator[str]:
    if row.spread is None:
        yield ""
    else:
        mean, least, most = row.spread
        yield f"{mean:.4f}" + (f" +/- {(most - least) / 2:.4f}" if len(row.losses) > 1 else "")
    if found.loss is not None:
        reached_s = row.seconds_to(found.loss)
        yield "" if row.trouble else "never" if reached_s is None else duration(reached_s)
    for seconds in (row.predicted_s,) if found.cluster else (row.predicted_s, row.measured_s):
        yield "" if seconds is None else duration(seconds)


def _memory_cells(row: ContestRow, plan: Plan) -> Iterator[str]:
    for held in (row.predicted_bytes, row.measured_bytes):
        yield "" if held is None else size(held)
    yield str(row.versions)
    yield figure(row.delay or 0.0)
    yield f"{row.contestant.stages} x {plan.micro_batches}"


def draw_contests(found: RunComparison) -> Figure:
    """Return the losses of all contestants by mini-batch, and by seconds: medians over seeds of running means."""
    from matplotlib.figure import Figure

    shown = [row for row in found.rows if any(each.loss for each in row.results)]
    figure = Figure(figsize=(10.0, 1.2 + max(3.0, 0.17 * len(shown))), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for at, row in enumerate(shown):
        losses = running_median([each.loss for each in row.results])
        counts = range(1, len(losses) + 1)
        look = {"color": PALETTE[at % len(PALETTE)], "linestyle": _STYLES[at // len(PALETTE) % len(_STYLES)]}
        left.plot(counts, losses, linewidth=1.2, label=short(row.contestant.name), **look)
        if row.period_s is not None:
            right.plot([count * row.period_s for count in counts], losses, linewidth=1.2, **look)
    for axes, name in ((left, "mini-batch"), (right, "simulated seconds" if found.cluster else "measured seconds")):
        axes.set_xlabel(name, size=9, color=INK)
        strip(axes, "y")
        if found.loss is not None:
            axes.axhline(found.loss, color=INK, linewidth=0.6)
    left.set_ylabel("loss", size=9, color=INK)
    legend = figure.legend(loc="outside right center", frameon=False, fontsize=7)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def running_median(seeds: Sequence[Sequence[float]]) -> list[float]:
    """Return the median over seeds of the mean of the last losses, mini-batch by mini-batch; nan where one has ended.

    >>> running_median([[2.0, 4.0], [4.0]])
    [3.0, nan]
    """
    means = [
        [fmean(each[max(0, count - MEAN_OF) : count]) for count in range(1, len(each) + 1)] for each in seeds if each
    ]
    longest = max(map(len, means), default=0)
    return [
        median(each[at] for each in means) if all(at < len(each) for each in means) else nan for at in range(longest)
    ]
