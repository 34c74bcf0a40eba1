"""Charts of a page: bars of layers, stages and planners, and lines of losses; each a specification for Vega-Lite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from autopar.errors import printable
from autopar.formats.program import BACKWARD, FORWARD, UPDATE
from autopar.report.folding import evenly
from autopar.report.style import COLOURS, GREEN, GREY, PALETTE, PURPLE, VERMILION, byte_unit, short

if TYPE_CHECKING:
    from autopar.formats.plan import Plan
    from autopar.formats.profile import Profile
    from autopar.formats.report import ComparisonRow, Report

Spec = Mapping[str, Any]
"""As https://vega.github.io/vega-lite/docs/spec.html has it."""
_MOST_POINTS, _MOST_SERIES, _FEW_STEPS = 2_000, 12, 10
_LONGEST = 40
_NEAR = 3
"""Times what is held: limits that are farther away are not drawn."""
_HEIGHT, _ROW = 170, 22
_MOST_APART = 128
"""Bars with air between them."""


class Key(NamedTuple):
    """What a colour means."""

    colour: str
    text: str


class Chart(NamedTuple):
    """A drawing with a heading; in the page, Vega-Lite makes it as wide as there is room for."""

    title: str
    spec: Spec
    legends: tuple[tuple[Key, ...], ...] = ()
    about: str = ""
    """A sentence below."""


class Bars(NamedTuple):
    """Of a colour, a number for every place along an axis."""

    name: str
    colour: str
    values: Sequence[float]


def view(height: int, **spec: object) -> dict[str, Any]:
    """Return a specification that fills its page's width."""
    sizes = {"labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal"}
    axis = {
        **sizes,
        "domainColor": GREY,
        "tickColor": GREY,
        "gridColor": GREY,
        "gridOpacity": 0.25,
        "labelOverlap": True,
    }
    config = {"view": {"stroke": None}, "axis": axis, "background": None}
    return {
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "config": config,
        **spec,
    }


def loss(report: Report) -> Chart:
    """Return the loss of every step, and the terms that have names."""
    every = {"loss": report.loss, **report.losses}
    series = dict(list(every.items())[:_MOST_SERIES])
    names = {name: short(name, _LONGEST) for name in series}
    at = evenly(len(report.loss), _MOST_POINTS)
    rows = [
        {"step": report.first_step + 1 + index, "value": values[index], "name": names[name]}
        for name, values in series.items()
        for index in at
    ]
    few = {"values": [report.first_step + 1 + index for index in at]} if len(at) <= _FEW_STEPS else {}
    colours = [PALETTE[number % len(PALETTE)] for number in range(len(series))]
    encoding = {
        "x": {"field": "step", "type": "quantitative", "axis": {"format": ",d", "grid": False} | few},
        "y": {"field": "value", "type": "quantitative", "title": None, "scale": {"zero": False}},
        "color": {
            "field": "name",
            "type": "nominal",
            "legend": None,
            "scale": {"domain": list(dict.fromkeys(names.values())), "range": colours},
        },
        "tooltip": [{"field": name} for name in ("name", "step", "value")],
    }
    point = {"size": 40, "opacity": 1 if len(at) == 1 else 0}
    spec = view(_HEIGHT, data={"values": rows}, mark={"type": "line", "point": point}, encoding=encoding)
    left = "" if len(at) == len(report.loss) else f"{len(at):,} of {len(report.loss):,} steps are drawn."
    more = "" if len(series) == len(every) else f"{len(every) - len(series)} terms are left out."
    legend = tuple(map(Key, colours, names.values()))
    return Chart("Loss", spec, (legend,) if len(series) > 1 else (), " ".join(filter(None, (left, more))))


def causes(report: Report) -> Chart:
    """Return what the measured and the predicted step were spent on."""
    colours = {"measured": COLOURS[BACKWARD], "predicted": COLOURS[FORWARD]}
    rows = [
        {"cause": each.cause, "step": name, "ms": getattr(each, f"{name}_s") * 1e3}
        for each in report.causes
        for name in colours
    ]
    encoding = {
        "y": {"field": "cause", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 110}},
        "yOffset": {"field": "step", "sort": list(colours)},
        "x": {"field": "ms", "type": "quantitative"},
        "color": _colour("step", colours),
        "tooltip": [{"field": name} for name in ("cause", "step", "ms")],
    }
    height = 2 * _ROW * len(report.causes)
    spec = view(height, data={"values": rows}, mark="bar", encoding=encoding)
    return Chart("What the step is spent on, where nothing is waited for", spec, (keys(colours),))


def planners(rows: Sequence[ComparisonRow]) -> Chart:
    """Return a bar per plan that can be run: how long its step takes."""
    values = [
        {"planner": f"{at}: {short(row.name, _LONGEST)}", "ms": row.step_s * 1e3, "own": row.name == "autopar"}
        for at, row in enumerate(rows, 1)
        if row.step_s is not None and row.priced is None
    ]
    encoding = {
        "y": {"field": "planner", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 140}},
        "x": {"field": "ms", "type": "quantitative", "title": "step, ms"},
        "color": {"condition": {"test": "datum.own", "value": COLOURS[FORWARD]}, "value": COLOURS[UPDATE]},
        "tooltip": [{"field": name} for name in ("planner", "ms")],
    }
    spec = view(_ROW * max(len(values), 1), data={"values": values}, mark="bar", encoding=encoding)
    return Chart("Steps of the plans that can be run", spec)


def stages(plan: Plan) -> tuple[Chart, ...]:
    """Return the time of a micro-batch on every stage, where it is known, and its memory with the limit."""
    predicted, names = plan.predicted, [f"stage {at}" for at in range(len(plan.stages))]
    times = [
        Bars(name, COLOURS[kind], [each * 1e3 for each in seconds])
        for name, kind, seconds in (
            ("forward", FORWARD, predicted.forward_s),
            ("backward", BACKWARD, predicted.backward_s),
        )
        if seconds
    ]
    most = max(predicted.peak_bytes, default=0)
    near = max(predicted.limit_bytes, default=0) < _NEAR * most
    factor, unit = byte_unit(max((most, *predicted.limit_bytes)) if near else most)
    peaks = Bars("peak memory", GREEN, [each / factor for each in predicted.peak_bytes])
    limits = [each / factor for each in predicted.limit_bytes] if near else []
    memory = bars("Peak memory of each stage", "stage", names, [peaks], unit, limits)
    return *([bars("Time of a micro-batch on each stage", "stage", names, times, "ms")] if times else []), memory


def layers(profile: Profile) -> tuple[Chart, ...]:
    """Return time and bytes along a profile's layers, and what a cut behind each would send."""
    costs, names = [layer.costs[-1] for layer in profile.layers], [layer.name for layer in profile.layers]
    rows = costs[0].micro_batch
    times = [
        Bars("forward", COLOURS[FORWARD], [cost.forward_s * 1e3 for cost in costs]),
        Bars("backward", COLOURS[BACKWARD], [cost.backward_s * 1e3 for cost in costs]),
    ]
    kept = [cost.saved_bytes for cost in costs], [layer.parameters_bytes for layer in profile.layers]
    crossing = [each * rows for each in profile.crossing_bytes()[:-1]]
    factor, unit = byte_unit(max(*map(sum, zip(*kept, strict=True)), 0))
    sent, sent_unit = byte_unit(max(crossing, default=0))
    memory = [
        Bars(name, colour, [each / factor for each in values])
        for name, colour, values in zip(("saved activations", "parameters"), (GREEN, PURPLE), kept, strict=True)
    ]
    cuts = [Bars("sent", VERMILION, [each / sent for each in crossing])]
    return (
        bars(f"Time of each layer (micro-batch of {rows})", "layer", names, times, "ms"),
        bars("Activations that a forward saves, and parameters", "layer", names, memory, unit),
        bars("What a cut behind each layer would send", "layer", names, cuts, sent_unit),
    )


def bars(
    title: str, axis: str, names: Sequence[str], parts: Sequence[Bars], unit: str, limits: Sequence[float] = ()
) -> Chart:
    """Return numbers along an axis, on top of each other, with the limit of each where there is one."""
    values = [
        {"at": at, "name": printable(names[at]), "part": part.name, "value": value}
        for part in parts
        for at, value in enumerate(part.values)
    ]
    colours = {part.name: part.colour for part in parts}
    across: dict[str, Any] = {
        "field": "at",
        "type": "ordinal",
        "title": axis,
        "axis": {"labelAngle": 0, "grid": False, "ticks": False},
    }
    if len(names) > _MOST_APART:
        across["scale"] = {"padding": 0}
    along = {"type": "quantitative", "title": unit}
    drawn: dict[str, Any] = {
        "data": {"values": values},
        "mark": "bar",
        "encoding": {
            "x": across,
            "y": {**along, "field": "value"},
            "color": _colour("part", colours),
            "order": {"field": "order"},
            "tooltip": [{"field": "name"}, {"field": "part"}, {"field": "value", "title": unit, "format": ".4~g"}],
        },
        "transform": [{"calculate": f"indexof({list(colours)}, datum.part)", "as": "order"}],
    }
    limit = {
        "data": {"values": [{"at": at, "limit": each} for at, each in enumerate(limits)]},
        "mark": {"type": "tick", "thickness": 2, "color": VERMILION, "bandSize": 30},
        "encoding": {
            "x": across,
            "y": {**along, "field": "limit"},
            "tooltip": [{"field": "limit", "title": f"limit, {unit}"}],
        },
    }
    spec = view(_HEIGHT, layer=[drawn, limit] if limits else [drawn])
    legend = keys(colours | ({"limit": VERMILION} if limits else {}))
    return Chart(title, spec, (legend,) if len(legend) > 1 else ())


def keys(colours: Mapping[str, str]) -> tuple[Key, ...]:
    """Return a legend of names and their colours."""
    return tuple(Key(colour, name) for name, colour in colours.items())


def _colour(field: str, colours: Mapping[str, str]) -> dict[str, Any]:
    scale = {"domain": list(colours), "range": list(colours.values())}
    return {"field": field, "type": "nominal", "legend": None, "scale": scale}
