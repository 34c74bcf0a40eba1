"""Charts: bars and lines along a profile's layers, a plan's stages, a run's steps, and the planners of a comparison.

Of a profile: time, activations and parameters along the model, and what a cut behind each layer would send; of a plan,
where it is cut; of a search, the plans that were met, and the bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from autopar.formats.prediction import SIMPLICITY
from autopar.formats.program import BACKWARD, FORWARD, UPDATE
from autopar.report.inputs import title_of
from autopar.report.plan import title_of as plan_title
from autopar.report.style import (
    BLUE,
    COLOURS,
    FAINT,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALETTE,
    POINTS,
    PURPLE,
    SKY,
    VERMILION,
    byte_unit,
    colour_of,
    fitting,
    ink_on,
    legend_above,
    shade,
    short,
    strip,
    text_points,
)
from autopar.report.table import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from autopar.formats.plan import Plan
    from autopar.formats.prediction import MetPlan
    from autopar.formats.profile import Cost, Layer, Profile
    from autopar.formats.report import ComparisonRow, Report


_SAVED, _PEAK, _PARAMETERS, _CROSSING = GREEN, shade(GREEN, 0.75), PURPLE, VERMILION
_MOST_NAMES, _NAME_POINTS = 60, 125
_LEAST_PLACES = 8
"""Bars of a model with fewer layers stay as narrow as these."""
_MOST_BARS = 200
"""Drawn apart from each other; more are one shape, which is soon drawn."""
_FAR = 3
"""Times the memory that is held: a limit that is farther away is only said."""
_MOST_CUTS = 128
"""Of a plan, that are drawn through all panels."""


_Parts = Mapping[str, tuple[str, Sequence[float]]]
"""Colours of a panel by their names: a number per layer."""


def draw_profile(profile: Profile) -> Figure:
    """Return four panels over the same axis of layers: time, activations, parameters, bytes across boundaries."""
    from matplotlib.figure import Figure

    count = len(profile.layers)
    costs = [layer.costs[-1] for layer in profile.layers]
    rows = costs[0].micro_batch
    figure = Figure(figsize=(_width(count), 8.2), dpi=150, layout="constrained")
    time, saved, parameters, crossing = figure.subplots(4, 1, sharex=True, height_ratios=(3, 2, 2, 1.4))
    _times(time, costs)
    peaks, kept = [cost.peak_bytes for cost in costs], [cost.saved_bytes for cost in costs]
    of_memory = {"peak of forward and backward": (_PEAK, peaks), "saved activations": (_SAVED, kept)}
    _panel(saved, of_memory, *byte_unit(max(*peaks, *kept)))
    own = [layer.parameters_bytes for layer in profile.layers]
    _panel(parameters, {"parameters": (_PARAMETERS, own)}, *byte_unit(max(own)))
    _boundaries(crossing, [each * rows for each in profile.crossing_bytes()[:-1]])
    _name_layers(crossing, [layer.name for layer in profile.layers])
    figure.align_ylabels()
    known = ", ".join(dict.fromkeys(cost.provenance for cost in costs))
    _title(figure, f"{title_of(profile)}\nmicro-batch of {rows}, times {known}")
    return figure


def _width(count: int) -> float:
    """Return inches for so many layers."""
    return min(max(8.0, 2.5 + 0.16 * count), 20.0)


def _title(figure: Figure, text: str) -> None:
    """Write a title in as many letters as a line has room for."""
    lines = []
    for line in text.split("\n"):
        room = figure.get_figwidth() * POINTS * 0.97
        whole = text_points(line, 10)
        lines.append(line if whole <= room else short(line, int(len(line) * room / whole) - 3))
    figure.suptitle("\n".join(lines), size=10, color=INK, x=0.01, ha="left", parse_math=False)


def _times(axes: Axes, costs: Sequence[Cost]) -> None:
    """Draw forwards and backwards."""
    times_ms = {name: [getattr(cost, f"{name}_s") * 1e3 for cost in costs] for name in ("forward", "backward")}
    colours = {"forward": COLOURS[FORWARD], "backward": COLOURS[BACKWARD]}
    _panel(axes, {name: (colours[name], values) for name, values in times_ms.items()}, 1, "ms", is_stacked=True)


def _panel(axes: Axes, parts: _Parts, factor: float, unit: str, *, is_stacked: bool = False) -> None:
    """Draw a number per layer in every colour, on top of the parts before it, or in front of them."""
    count = len(next(iter(parts.values()))[1])
    below = [0.0] * count
    for label, (colour, values) in parts.items():
        tops = [base + value / factor for base, value in zip(below, values, strict=True)]
        if count <= _MOST_BARS:
            heights = [top - base for top, base in zip(tops, below, strict=True)]
            axes.bar(range(count), heights, bottom=below, width=0.8, color=colour, label=label, zorder=2)
        else:
            edges = [at - 0.5 for at in range(count + 1)]
            axes.stairs(tops, edges, baseline=below, fill=True, color=colour, label=label, zorder=2)
        if is_stacked:
            below = tops
    _finish_bars(axes, unit)


def _boundaries(axes: Axes, values: Sequence[float], cuts: Sequence[int] = ()) -> None:
    """Draw what crosses where it crosses: between two layers; ``cuts`` stand out."""
    factor, unit = byte_unit(max(values, default=0))
    places = [index + 0.5 for index in range(len(values))]
    heights = [value / factor for value in values]
    label = "bytes that a cut here would send"
    cuts = cuts if len(cuts) <= _MOST_CUTS else ()
    colour = shade(_CROSSING, 0.6) if cuts else _CROSSING
    if heights:
        axes.vlines(places, 0, heights, color=colour, linewidth=1.2, zorder=2)
        axes.plot(places, heights, "o", color=colour, markersize=3, label=label, zorder=3)
    else:
        axes.plot([], [], "o", color=_CROSSING, markersize=3, label="one layer: no boundary")
        axes.set_yticks([])
    if cuts:
        cut = [cut - 0.5 for cut in cuts], [heights[cut - 1] for cut in cuts]
        axes.plot(*cut, "D", color=_CROSSING, markersize=5, label="a cut of the plan", zorder=4, clip_on=False)
    _finish_bars(axes, unit if heights else "")


def _finish_bars(axes: Axes, unit: str) -> None:
    axes.set_ylabel(unit, size=9, color=INK)
    axes.set_ylim(bottom=0)
    axes.tick_params(length=0)
    strip(axes, "y")
    legend_above(axes)


def _name_layers(axes: Axes, names: Sequence[str]) -> None:
    """Name every layer, or every so many that names stay legible."""
    every = -(-len(names) // _MOST_NAMES)
    places = list(range(0, len(names), every))
    # Names are no formulas, whatever is in them.
    labels = [fitting(names[place], _NAME_POINTS, 7) for place in places]
    axes.set_xticks(places, labels, rotation=90, size=7, parse_math=False)
    air = max(0.0, (_LEAST_PLACES - len(names)) / 2)
    axes.set_xlim(-0.6 - air, len(names) - 0.4 + air)


def draw_layers(plan: Plan, profile: Profile) -> Figure:
    """Return a plan's cuts along the model's layers: time, bytes, and what crosses."""
    from matplotlib.figure import Figure

    layers = profile.layers
    rows = round(max(max(stage.shares) for stage in plan.stages))
    costs = [min(layer.costs, key=lambda cost: abs(cost.micro_batch - rows)) for layer in layers]
    figure = Figure(figsize=(_width(len(layers)), 7.6), dpi=150, layout="constrained")
    band, *panels = figure.subplots(4, 1, sharex=True, height_ratios=(0.5, 3, 3, 1.4))
    time, memory, crossing = panels
    _times(time, costs)
    _bytes(memory, layers, costs)
    every = [list(accumulate(len(plan.stages[at].layers) for at in own)) for own in plan.stages_by_pipeline]
    stops = sorted({stop for own in every for stop in own})
    _boundaries(crossing, [each * costs[0].micro_batch for each in profile.crossing_bytes()[:-1]], stops[:-1])
    _name_layers(crossing, [layer.name for layer in layers])
    figure.align_ylabels()
    for axes in panels if len(stops) <= _MOST_CUTS else ():
        axes.vlines([stop - 0.5 for stop in stops[:-1]], 0, 1, transform=axes.get_xaxis_transform(), color=INK, lw=0.8)
    for at, own in enumerate(every):
        _name_stages(band, plan, at, own)
    band.axis("off")
    _title(figure, f"{plan_title(plan)}\nlayers with a micro-batch of {costs[0].micro_batch}")
    return figure


def _bytes(axes: Axes, layers: Sequence[Layer], costs: Sequence[Cost]) -> None:
    """Draw what layers hold: their state, and what one micro-batch keeps."""
    kept = {
        "parameters": (_PARAMETERS, [float(layer.parameters_bytes) for layer in layers]),
        "gradients": (ORANGE, [float(layer.gradient_bytes) for layer in layers]),
        "optimizer state": (SKY, [float(layer.optimizer_bytes) for layer in layers]),
        "saved activations": (_SAVED, [float(cost.saved_bytes) for cost in costs]),
    }
    most = max(map(sum, zip(*(values for _, values in kept.values()), strict=True)))
    _panel(axes, kept, *byte_unit(most), is_stacked=True)


def _name_stages(axes: Axes, plan: Plan, pipeline: int, stops: Sequence[int]) -> None:
    """Draw the extent of a pipeline's stages in their colours, with numbers and replicas where there is room."""
    starts, own, low_y = [0, *stops[:-1]], plan.stages_by_pipeline[pipeline], -float(pipeline)
    spans = [(start - 0.5, stop - start) for start, stop in zip(starts, stops, strict=True)]
    colours = [colour_of(at) for at in own]
    width = min(1.0, 60 / len(plan.stages))
    axes.broken_barh(spans, (low_y, 1), facecolors=colours, edgecolors="white", linewidth=width)
    low, high = axes.get_xlim()
    room = 0.9 * (axes.figure.get_figwidth() - 1.0) * POINTS / (high - low)  # type: ignore[union-attr]  # a figure
    for at, colour, (start, width) in zip(own, colours, spans, strict=True):
        replicas = plan.stages[at].replicas
        texts = (f"stage {at} x {replicas}" if replicas > 1 else f"stage {at}", f"{at} x {replicas}", str(at))
        fitting = (text for text in texts[: 3 if replicas == 1 else 2] if text_points(text, 8) < width * room)
        place = start + width / 2, low_y + 0.5
        axes.text(*place, next(fitting, ""), size=8, color=ink_on(colour), ha="center", va="center_baseline")


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
    factor, unit = byte_unit(max(predicted.peak_bytes))
    most, label = max(predicted.peak_bytes), "peak memory"
    if predicted.limit_bytes and min(predicted.limit_bytes) > _FAR * most:
        label += f", limit {size(min(predicted.limit_bytes))}"
    elif predicted.limit_bytes:
        limits = [limit / factor for limit in predicted.limit_bytes]
        lefts, rights = ([at + side for at in range(count)] for side in (-0.45, 0.45))
        memory.hlines(limits, lefts, rights, color=INK, linewidth=1.2, label="limit", zorder=3)
    _panel(memory, {label: (_SAVED, predicted.peak_bytes)}, factor, unit)
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
    every = {"loss": report.loss, **report.losses}
    for (name, values), colour in zip(every.items(), PALETTE, strict=False):
        axes.plot(steps, values, label=short(name), color=colour, marker="" if len(steps) > 1 else "o", linewidth=1.2)
    axes.set_xlabel("step", size=9, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    strip(axes, "y")
    legend_above(axes, 2)
    return figure


def draw_planners(rows: Sequence[ComparisonRow]) -> Figure:
    """Return a bar per plan that can be run: how long its step takes."""
    from matplotlib.figure import Figure

    shown = [(row.name, row.step_s * 1e3) for row in rows if row.step_s is not None and row.priced is None]
    figure = Figure(figsize=(6.0, 0.9 + 0.22 * len(shown)), dpi=150, layout="constrained")
    axes = figure.subplots()
    colours = [COLOURS[FORWARD] if name == "autopar" else COLOURS[UPDATE] for name, _ in shown]
    axes.barh(range(len(shown)), [step_ms for _, step_ms in shown], color=colours, zorder=2)
    axes.set_yticks(range(len(shown)), [short(name) for name, _ in shown], parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel("step (ms)", size=9, color=INK)
    strip(axes, "x")
    return figure


_SIMPLE = "stages alike"
"""What plans are called that have nothing of :data:`SIMPLICITY` but stages."""


def draw_search(plan: Plan, met: Sequence[MetPlan] = ()) -> Figure:
    """Return the steps of the plans that a search met, by what makes them hard to use, of its alternatives, and bounds.

    Without ``met``, as of a plan that was read from a file, only alternatives.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    rows = [("this plan", [plan.predicted.step_s])]
    rows += [(short(each.name), [] if each.step_s is None else [each.step_s]) for each in plan.alternatives]
    of_kinds: dict[str, list[float]] = {}
    for each in sorted(met, key=lambda each: each.simplicity):
        of_kinds.setdefault(_kind(each), []).append(each.step_s)
    rows += [(f"met, {kind}", steps) for kind, steps in of_kinds.items()]
    figure = Figure(figsize=(8.0, 1.3 + 0.22 * len(rows)), dpi=150, layout="constrained")
    axes = figure.subplots()
    bounds_s = _bounds(plan)
    for (name, bound_s), colour in zip(bounds_s.items(), (GREY, SKY, BLUE, VERMILION), strict=False):
        axes.axvline(bound_s * 1e3, color=colour, linewidth=1.2, label=name, zorder=1)
    every = [step_s for _, steps in rows for step_s in steps]
    for at, (_, steps) in enumerate(rows):
        marker, points, colour = ("*", 90, VERMILION) if at == 0 else ("o", 16, BLUE)
        steps_ms = [step_s * 1e3 for step_s in steps]
        axes.scatter(steps_ms, [at] * len(steps), points, color=colour, marker=marker, alpha=0.7, zorder=3)
    for at, (_, steps) in enumerate(rows):
        if not steps:
            place = axes.get_yaxis_transform()
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            axes.text(0.01, at, "does not fit", transform=place, size=7, color=INK, va="center", bbox=box)
    if min(every) > 0 and max(every) > 4 * min(every):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:,.4g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], parse_math=False)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("step (ms)", size=9, color=INK)
    strip(axes, "x")
    legend_above(axes)
    return figure


def _bounds(plan: Plan) -> dict[str, float]:
    """Return the bounds that are known, weakest first, by what they know of."""
    predicted, bounds = plan.predicted, plan.predicted.bounds
    found = {} if bounds is None else {"bound: work alone": bounds.work_s}
    if bounds is not None and len(plan.groups[0]) == 1:
        found |= {"stages": bounds.contiguous_s, "stages and links": bounds.linked_s}
    return {
        name: bound_s for name, bound_s in (found | {"lower bound": predicted.lower_bound_s}).items() if bound_s > 0
    }


def _kind(met: MetPlan) -> str:
    """Return what most makes a plan hard to use."""
    least = {"unequal widths": 1}
    hard = ((name, count > least.get(name, 0)) for name, count in zip(SIMPLICITY, met.simplicity, strict=True))
    return next((name for name, is_hard in hard if is_hard and name != "stages"), _SIMPLE)
