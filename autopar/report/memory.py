"""Memory: what ranks hold over a step, by cause, with what they have.

A panel for ranks that are alike, all in one scale; of more than are read, some evenly chosen ones and the fullest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from autopar.formats.prediction import HELD_FOR
from autopar.report.folding import Alike, TimeAxis, evenly, ranges
from autopar.report.pictures import mark_gaps
from autopar.report.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    byte_unit,
    shade,
    strip,
)
from autopar.report.table import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from autopar.formats.plan import Plan
    from autopar.formats.prediction import HeldBytes

MOST_PANELS = 8
HELD_COLOURS = dict(
    zip(HELD_FOR, (BLUE, SKY, GREY, ORANGE, shade(GREY, 0.5), YELLOW, GREEN, VERMILION, PURPLE), strict=True)
)
_LEFT, _RIGHT, _ABOVE, _BELOW = 2.6, 0.3, 0.5, 1.05
_PANEL = 1.0
"""Inches of a panel, and around all of them."""
_NEAR = 3
"""Times what is held: limits that are farther away are only said."""


def draw_memory(held: Mapping[str, HeldBytes], time: TimeAxis, title: str) -> Figure:
    """Return what ranks hold over a step, by cause, a panel for those that are alike, by what these are called."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    width, high = 11.0, _PANEL * len(held)
    total = high + _ABOVE + _BELOW
    figure = Figure(figsize=(width, total), dpi=150)
    most = max(max(each.totals) for each in held.values())
    near = [each.limit_bytes for each in held.values() if each.limit_bytes and each.limit_bytes < _NEAR * most]
    unit, of_unit = byte_unit(most)
    panels: list[Axes] = []
    for at, (name, each) in enumerate(held.items()):
        bottom = (_BELOW + high - (at + 1) * _PANEL) / total
        place = _LEFT / width, bottom, 1 - (_LEFT + _RIGHT) / width, 0.78 * _PANEL / total
        axes = figure.add_axes(place, sharex=panels[0] if panels else None)
        _draw_panel(axes, name, each, time, unit)
        axes.set_ylim(0, 1.08 * max(most, *near) / unit if near else 1.08 * most / unit)
        axes.tick_params(labelbottom=at + 1 == len(held), length=0)
        panels.append(axes)
    panels[-1].set_xlabel("time since the step began (ms)", color=INK, size=9)
    figure.text(0.2 / width, 1 - 0.3 / total, f"{title}, in {of_unit}", size=11, color=INK)
    present = [cause for cause in HELD_FOR if any(cause in each.causes for each in held.values())]
    handles = [Patch(color=HELD_COLOURS[cause], label=cause) for cause in present]
    figure.legend(handles=handles, loc="lower center", ncols=5, frameon=False, fontsize=9, handlelength=1.2)
    return figure


def ranks_shown(plan: Plan, groups: Sequence[Alike]) -> dict[int, str]:
    """Return whose memory is drawn, and what they are called: of many some, the fullest as planned among them."""
    fullness, ranks = plan.predicted.fullness, plan.ownership.ranks

    def share(group: Alike) -> float:
        return max(fullness[at] for at in ranks[group.members[0]].stages)

    chosen = evenly(len(groups), MOST_PANELS)
    fullest = max(range(len(groups)), key=lambda at: (share(groups[at]), -at))
    if fullest not in chosen:
        nearest = min(range(1, len(chosen) - 1), key=lambda at: abs(chosen[at] - fullest))
        chosen[nearest] = fullest
    firsts = {groups[at].members[0]: groups[at].name() for at in chosen}
    return {rank: f"{name}\nstage {ranges(ranks[rank].stages)}" for rank, name in firsts.items()}


def _draw_panel(axes: Axes, name: str, held: HeldBytes, time: TimeAxis, unit: int) -> None:
    from matplotlib.ticker import MaxNLocator

    seen = [at for at, moment in enumerate(held.times_s) if time.shows(moment)]
    times_ms = [*(time.place(held.times_s[at]) * 1e3 for at in seen), time.length_s * 1e3]
    below: Sequence[float] = [0.0] * len(times_ms)
    for cause, sizes in held.causes.items():
        own = [sizes[at] / unit for at in (*seen, seen[-1])]
        tops = [one + two for one, two in zip(below, own, strict=True)]
        axes.fill_between(times_ms, below, tops, step="post", color=HELD_COLOURS[cause], linewidth=0, zorder=2)
        below = tops
    if held.limit_bytes is not None:
        axes.axhline(held.limit_bytes / unit, color=INK, linestyle="--", linewidth=1.0, zorder=3)
    axes.set_xlim(0, time.length_s * 1.02e3 or 1.0)
    axes.yaxis.set_major_locator(MaxNLocator(3))
    strip(axes, "y")
    mark_gaps(axes, time)
    of = "" if held.limit_bytes is None else f" of {size(held.limit_bytes)}"
    text = f"{name}\nmost: {size(max(held.totals))}{of}"
    axes.annotate(
        text, (0, 0.5), (-42, 0), "axes fraction", "offset points", ha="right", va="center", size=8, color=INK
    )
