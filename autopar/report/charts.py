"""Charts: bars and lines along a profile's layers, a plan's stages, a run's steps, and the planners of a comparison.

Of a profile: time, activations and parameters along the model, and what a cut behind each layer would send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from autopar.formats.program import BACKWARD, FORWARD, UPDATE
from autopar.report.inputs import title_of
from autopar.report.style import COLOURS, FAINT, INK, byte_unit, strip

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from autopar.formats.plan import Plan
    from autopar.formats.profile import Profile
    from autopar.formats.report import ComparisonRow, Report


_SAVED, _PEAK, _PARAMETERS, _CROSSING = "#3a9d7c", "#d8ece5", "#9a6fb8", "#d1495b"
_MOST_NAMES, _LONGEST_NAME = 60, 29
_LEAST_PLACES = 8
"""Bars of a model with fewer layers stay as narrow as these."""


_Parts = Mapping[str, tuple[str, Sequence[float]]]
"""Colours of a panel by their names: a number per layer."""


def draw_profile(profile: Profile) -> Figure:
    """Return four panels over the same axis of layers: time, activations, parameters, bytes across boundaries."""
    from matplotlib.figure import Figure

    count = len(profile.layers)
    costs = [layer.costs[-1] for layer in profile.layers]
    rows = costs[0].micro_batch
    figure = Figure(figsize=(min(max(8.0, 2.5 + 0.16 * count), 20.0), 8.2), dpi=150, layout="constrained")
    time, saved, parameters, crossing = figure.subplots(4, 1, sharex=True, height_ratios=(3, 2, 2, 1.4))
    times_ms = {name: [getattr(cost, f"{name}_s") * 1e3 for cost in costs] for name in ("forward", "backward")}
    colours = {"forward": COLOURS[FORWARD], "backward": COLOURS[BACKWARD]}
    _panel(time, {name: (colours[name], values) for name, values in times_ms.items()}, 1, "ms", is_stacked=True)
    peaks, kept = [cost.peak_bytes for cost in costs], [cost.saved_bytes for cost in costs]
    of_memory = {"peak of forward and backward": (_PEAK, peaks), "saved activations": (_SAVED, kept)}
    _panel(saved, of_memory, *byte_unit(max(*peaks, *kept)))
    own = [layer.parameters_bytes for layer in profile.layers]
    _panel(parameters, {"parameters": (_PARAMETERS, own)}, *byte_unit(max(own)))
    _boundaries(crossing, [each * rows for each in profile.crossing_bytes()[:-1]])
    _name_layers(crossing, [layer.name for layer in profile.layers])
    figure.align_ylabels()
    known = ", ".join(dict.fromkeys(cost.provenance for cost in costs))
    title = f"{title_of(profile)}\nmicro-batch of {rows}, times {known}"
    figure.suptitle(title, size=10, color=INK, x=0.01, ha="left", parse_math=False)
    return figure


def _panel(axes: Axes, parts: _Parts, factor: float, unit: str, *, is_stacked: bool = False) -> None:
    """Draw a number per layer in every colour, on top of the parts before it, or in front of them."""
    below = [0.0] * len(next(iter(parts.values()))[1])
    for label, (colour, values) in parts.items():
        heights = [value / factor for value in values]
        axes.bar(range(len(heights)), heights, bottom=below, width=0.8, color=colour, label=label, zorder=2)
        if is_stacked:
            below = [base + height for base, height in zip(below, heights, strict=True)]
    _finish_bars(axes, unit)


def _boundaries(axes: Axes, values: Sequence[float]) -> None:
    """Draw what crosses where it crosses: between two layers."""
    factor, unit = byte_unit(max(values, default=0))
    places = [index + 0.5 for index in range(len(values))]
    heights = [value / factor for value in values]
    label = "bytes that a cut here would send"
    if heights:
        axes.vlines(places, 0, heights, color=_CROSSING, linewidth=1.2, zorder=2)
        axes.plot(places, heights, "o", color=_CROSSING, markersize=3, label=label, zorder=3)
    else:
        axes.plot([], [], "o", color=_CROSSING, markersize=3, label="one layer: no boundary")
        axes.set_yticks([])
    _finish_bars(axes, unit if heights else "")


def _finish_bars(axes: Axes, unit: str) -> None:
    axes.set_ylabel(unit, size=9, color=INK)
    axes.set_ylim(bottom=0)
    axes.tick_params(length=0)
    strip(axes, "y")
    # Above the panel, where no bar can be in the way.
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.1, ncols=2, frameon=False, fontsize=8)


def _name_layers(axes: Axes, names: Sequence[str]) -> None:
    """Name every layer, or every so many that names stay legible."""
    every = -(-len(names) // _MOST_NAMES)
    places = list(range(0, len(names), every))
    # Names are no formulas, whatever is in them.
    labels = [_short(names[place]) for place in places]
    axes.set_xticks(places, labels, rotation=90, size=7, parse_math=False)
    air = max(0.0, (_LEAST_PLACES - len(names)) / 2)
    axes.set_xlim(-0.6 - air, len(names) - 0.4 + air)


def _short(name: str) -> str:
    """Return a name's end, which tells layers apart, where the whole would leave no room for the bars.

    >>> _short("head"), _short("model.decoder.transformer.layers.12")
    ('head', '...oder.transformer.layers.12')
    """
    return name if len(name) <= _LONGEST_NAME else f"...{name[3 - _LONGEST_NAME :]}"


def draw_stages(plan: Plan) -> Figure:
    """Return two panels over the same axis of stages: the time of a micro-batch, and the memory with its limit."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    predicted, count = plan.predicted, len(plan.stages)
    figure = Figure(figsize=(min(max(6.0, 2.0 + 0.3 * count), 20.0), 4.0), dpi=150, layout="constrained")
    time, memory = figure.subplots(2, 1, sharex=True)
    times_s = {
        "forward": (COLOURS[FORWARD], predicted.forward_s),
        "backward": (COLOURS[BACKWARD], predicted.backward_s),
    }
    known = {name: (colour, [each * 1e3 for each in own]) for name, (colour, own) in times_s.items() if own}
    _panel(time, known or {"not known": (FAINT, [0.0] * count)}, 1, "ms", is_stacked=True)
    factor, unit = byte_unit(max(*predicted.peak_bytes, *predicted.limit_bytes, 0))
    for at, limit in enumerate(predicted.limit_bytes):
        memory.hlines(limit / factor, at - 0.45, at + 0.45, color=INK, linewidth=1.2, label="" if at else "limit")
    _panel(memory, {"peak memory": (_SAVED, predicted.peak_bytes)}, factor, unit)
    memory.set_xlabel("stage", size=9, color=INK)
    memory.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def draw_losses(report: Report) -> Figure:
    """Return the loss of every step, and the terms that have names."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6.0, 3.0), dpi=150, layout="constrained")
    axes = figure.subplots()
    steps = range(report.first_step + 1, report.first_step + 1 + len(report.loss))
    for name, values in {"loss": report.loss, **report.losses}.items():
        axes.plot(steps, values, label=_short(name), marker="" if len(steps) > 1 else "o")
    axes.set_xlabel("step", size=9, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    strip(axes, "y")
    for text in axes.legend(frameon=False, fontsize=8).get_texts():
        text.set_parse_math(False)
    return figure


def draw_planners(rows: Sequence[ComparisonRow]) -> Figure:
    """Return a bar per plan that can be run: how long its step takes."""
    from matplotlib.figure import Figure

    shown = [(row.name, row.step_s * 1e3) for row in rows if row.step_s is not None]
    figure = Figure(figsize=(6.0, 0.9 + 0.22 * len(shown)), dpi=150, layout="constrained")
    axes = figure.subplots()
    for at, (name, step_ms) in enumerate(shown):
        axes.barh(at, step_ms, color=COLOURS[FORWARD] if name == "autopar" else COLOURS[UPDATE], zorder=2)
    axes.set_yticks(range(len(shown)), [_short(name) for name, _ in shown], parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel("step, ms", size=9, color=INK)
    strip(axes, "x")
    return figure
