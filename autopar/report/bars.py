"""Bars of a profile: time, activations and parameters along the model, and what a cut behind each layer would send."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from autopar.report.profile import title_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from autopar.formats.profile import Profile


_INK, _FAINT = "#2b2f36", "#d9dce1"
_FORWARD, _BACKWARD, _SAVED, _PEAK, _PARAMETERS, _CROSSING = (
    "#4f86c6",
    "#f0a63c",
    "#3a9d7c",
    "#d8ece5",
    "#9a6fb8",
    "#d1495b",
)
_MOST_NAMES, _LONGEST_NAME = 60, 29
_LEAST_PLACES = 8
"""Bars of a model with fewer layers stay as narrow as these."""
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


class _Part(NamedTuple):
    """One colour of a panel: a number per layer, drawn on top of the parts before it, or in front of them."""

    label: str
    colour: str
    values: Sequence[float]
    stacked: bool = False


def draw(profile: Profile) -> Figure:
    """Return four panels over the same axis of layers: time, activations, parameters, bytes across boundaries."""
    from matplotlib.figure import Figure

    count = len(profile.layers)
    costs = [layer.costs[-1] for layer in profile.layers]
    rows = costs[0].micro_batch
    figure = Figure(figsize=(min(max(8.0, 2.5 + 0.16 * count), 20.0), 8.2), dpi=150, layout="constrained")
    time, saved, parameters, crossing = figure.subplots(4, 1, sharex=True, height_ratios=(3, 2, 2, 1.4))
    _panel(
        time,
        "ms",
        [
            _Part("forward", _FORWARD, [cost.forward_s * 1e3 for cost in costs]),
            _Part("backward", _BACKWARD, [cost.backward_s * 1e3 for cost in costs], stacked=True),
        ],
    )
    _bytes_panel(
        saved,
        [
            _Part("peak of forward and backward", _PEAK, [cost.peak_bytes for cost in costs]),
            _Part("saved activations", _SAVED, [cost.saved_bytes for cost in costs]),
        ],
    )
    _bytes_panel(parameters, [_Part("parameters", _PARAMETERS, [layer.parameters_bytes for layer in profile.layers])])
    _boundaries(crossing, [each * rows for each in profile.crossing_bytes()[:-1]])
    _name_layers(crossing, [layer.name for layer in profile.layers])
    figure.align_ylabels()
    known = ", ".join(dict.fromkeys(cost.provenance for cost in costs))
    title = f"{title_of(profile)}\nmicro-batch of {rows}, times {known}"
    figure.suptitle(title, size=10, color=_INK, x=0.01, ha="left", parse_math=False)
    return figure


def _bytes_panel(axes: Axes, parts: Sequence[_Part]) -> None:
    unit, factor = _unit([value for part in parts for value in part.values])
    _panel(axes, unit, [part._replace(values=[value / factor for value in part.values]) for part in parts])


def _unit(values: Sequence[float]) -> tuple[str, int]:
    largest = max(values, default=0)
    return next(((unit, factor) for unit, factor in _UNITS if largest >= factor), ("bytes", 1))


def _panel(axes: Axes, unit: str, parts: Sequence[_Part]) -> None:
    count = len(parts[0].values)
    below = [0.0] * count
    for part in parts:
        bottom = below if part.stacked else [0.0] * count
        axes.bar(range(count), part.values, bottom=bottom, width=0.8, color=part.colour, label=part.label, zorder=2)
        below = [base + value for base, value in zip(bottom, part.values, strict=True)]
    _finish(axes, unit)


def _boundaries(axes: Axes, values: Sequence[float]) -> None:
    """Draw what crosses where it crosses: between two layers."""
    unit, factor = _unit(values)
    places = [index + 0.5 for index in range(len(values))]
    heights = [value / factor for value in values]
    label = "bytes that a cut here would send"
    if heights:
        axes.vlines(places, 0, heights, color=_CROSSING, linewidth=1.2, zorder=2)
        axes.plot(places, heights, "o", color=_CROSSING, markersize=3, label=label, zorder=3)
    else:
        axes.plot([], [], "o", color=_CROSSING, markersize=3, label="one layer: no boundary")
        axes.set_yticks([])
    _finish(axes, unit if heights else "")


def _finish(axes: Axes, unit: str) -> None:
    axes.set_ylabel(unit, size=9, color=_INK)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=_FAINT, linewidth=0.6, zorder=0)
    axes.tick_params(colors=_INK, labelsize=8, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
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
