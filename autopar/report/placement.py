"""Picture of a plan: the cluster's devices with their stages, above the step that is predicted."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from autopar.report import timeline as timelines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from autopar.formats.cluster import Cluster
    from autopar.formats.plan import Plan
    from autopar.formats.timeline import Timeline


_INK, _FAINT, _IDLE = "#2b2f36", "#d9dce1", "#f4f5f7"
_IN_A_ROW = 8
"""Nodes beside each other."""
_AIR = 0.7
"""Between nodes; devices are one apart."""
_INCHES, _MOST_WIDE, _MOST_HIGH = 0.5, 9.0, 4.0
"""Of a device, and of all of them."""
MOST_NUMBERED, MOST_ARROWS = 256, 32
"""Devices whose stages are written on them, and stages between which arrows are drawn."""


class _Map(NamedTuple):
    """Where devices are drawn."""

    at: dict[int, tuple[float, float]]
    boxes: dict[str, tuple[float, float, float, float]]
    """By the text below it, a node's left, top, width and height."""

    @property
    def width(self) -> float:
        """Of all nodes."""
        return max(left + width for left, _, width, _ in self.boxes.values()) + _AIR

    @property
    def height(self) -> float:
        """Of all nodes, with the texts below."""
        return max(top + height for _, top, _, height in self.boxes.values()) + _AIR


def draw(plan: Plan, cluster: Cluster, timeline: Timeline) -> Figure:
    """Return a picture of a plan's stages on a cluster, and of the step that is predicted."""
    places = _places(cluster)
    inches = min(_INCHES, _MOST_HIGH / places.height, _MOST_WIDE / places.width)
    head = partial(_draw_places, plan, cluster, places, inches)
    return timelines.draw(timeline, head, inches * places.height)


def _places(cluster: Cluster) -> _Map:
    nodes: dict[tuple[int, int], list[int]] = {}
    for index, device in enumerate(cluster.devices):
        nodes.setdefault((device.rack, device.node), []).append(index)
    racks = len({rack for rack, _ in nodes}) > 1
    # As many in a row of a node as lets all nodes be about as wide as the picture.
    columns = max(2, min(8, 32 // min(_IN_A_ROW, len(nodes))))
    at: dict[int, tuple[float, float]] = {}
    boxes: dict[str, tuple[float, float, float, float]] = {}
    wide = float(min(columns, max(map(len, nodes.values()))))
    high = float(-(-max(map(len, nodes.values())) // columns))
    for number, ((rack, node), devices) in enumerate(nodes.items()):
        left, top = number % _IN_A_ROW * (wide + _AIR), number // _IN_A_ROW * (high + 2 * _AIR)
        for place, index in enumerate(devices):
            at[index] = left + place % columns + 0.5, top + place // columns + 0.5
        kinds = ", ".join(dict.fromkeys(cluster.devices[index].type for index in devices))
        name = f"node {node}: {kinds}"
        boxes[f"rack {rack}, {name}" if racks else name] = left, top, wide, high
    return _Map(at, boxes)


def _draw_places(plan: Plan, cluster: Cluster, places: _Map, inches: float, axes: Axes) -> None:
    import networkx as nx
    from matplotlib import colormaps
    from matplotlib.patches import FancyBboxPatch

    stages: dict[int, list[int]] = {device: [] for device in places.at}
    for index, stage in enumerate(plan.stages):
        for device in stage.devices:
            stages[device].append(index)
    axes.set(xlim=(-0.1, places.width), ylim=(places.height, -_AIR), aspect="equal", anchor="W")
    axes.axis("off")
    for text, (left, top, width, height) in places.boxes.items():
        edge = FancyBboxPatch((left, top), width, height, "round,pad=0.08", facecolor="none", edgecolor=_FAINT)
        axes.add_patch(edge)
        axes.text(left, top + height + 0.2, text, size=7, color=_INK, va="top")
    graph = nx.DiGraph()
    graph.add_nodes_from(places.at)
    if len(plan.stages) <= MOST_ARROWS:
        ends = ((one.devices[-1], other.devices[0]) for one, other in pairwise(plan.stages))
        # Stages that come round to the first devices again are known by their numbers.
        graph.add_edges_from((one, other) for one, other in ends if one < other)
    points = 0.8 * 72 * inches
    colours = [colormaps["tab20"](own[0] % 20) if own else _IDLE for own in stages.values()]
    shapes = {"node_size": points**2, "node_shape": "s"}
    nx.draw_networkx_nodes(graph, places.at, ax=axes, node_color=colours, edgecolors=_FAINT, **shapes)
    nx.draw_networkx_edges(
        graph, places.at, ax=axes, edge_color=_INK, width=0.8, arrowsize=8, connectionstyle="arc3,rad=-0.25", **shapes
    )
    if len(stages) <= MOST_NUMBERED:
        labels = {device: ",".join(map(str, own)) for device, own in stages.items() if own}
        size = min(8.0, points / 2, 1.5 * points / max(map(len, labels.values()), default=1))
        nx.draw_networkx_labels(graph, places.at, labels, ax=axes, font_size=size, font_color=_INK)
    used = sum(map(bool, stages.values()))
    axes.set_title(f"{len(plan.stages)} stages on {used} of {len(cluster.devices)} devices", loc="left", size=11)
