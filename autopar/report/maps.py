"""Maps: a cluster's devices in their nodes with the links between them, and the stages of a plan on them.

Nodes that hold the same are drawn once, "nodes 0-31 (x 32)", and so are devices of a large node; of more nodes than are
read, some evenly chosen ones are drawn. A stage has a colour of :data:`autopar.report.style.PALETTE`, and its number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from autopar.report.folding import Alike, TimeAxis, alike, evenly, ranges
from autopar.report.pictures import draw_timeline
from autopar.report.style import BLUE, FAINT, INK, LANE, POINTS, VERMILION, colour_of, ink_on, short, text_points
from autopar.report.table import bandwidth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from autopar.formats.cluster import Cluster, Link
    from autopar.formats.plan import Plan
    from autopar.formats.stage import Stage
    from autopar.formats.timeline import Timeline

MOST_NODES = 32
"""Nodes that are drawn."""
MOST_DEVICES = 16
"""Devices of a node that are drawn each for itself."""
MOST_SQUARES, MOST_ARROWS = 64, 32
"""Unlike devices of a node, and stages between which arrows are drawn."""
_IN_A_ROW = 8
"""Nodes beside each other."""
_AIR = 0.7
"""Between nodes; devices are one apart."""
_INCHES, _MOST_WIDE, _MOST_HIGH, _LEAST_WIDE = 0.5, 9.0, 4.0, 8.0
"""Of a device, of all of them, and of the picture at least."""
_HEAD_INCHES = 0.5
_LEGIBLE = 5.0  # points
_BUS = 0.45
"""How far above its nodes what connects them is drawn."""


class _Square(NamedTuple):
    """Devices that are drawn as one."""

    places: Alike
    """In its node, from 0."""
    devices: tuple[int, ...]
    """Of all nodes that the node stands for."""
    stages: tuple[int, ...]
    at: tuple[float, float]
    rows: float = 0
    """Of a micro-batch, that each has where kinds of devices have unlike shares; else 0."""

    @property
    def label(self) -> str:
        """What is written on it."""
        rows = f"{self.rows:g} rows" if self.rows else ""
        return "\n".join(line for line in (ranges(self.stages), rows, self.places.times) if line)


class _Node(NamedTuple):
    """A node, or several that hold the same."""

    name: str
    kinds: str
    left: float
    top: float
    squares: tuple[_Square, ...]


class DeviceMap(NamedTuple):
    """Where devices are drawn."""

    nodes: tuple[_Node, ...]
    wide: float
    high: float
    """Of every node."""

    @property
    def width(self) -> float:
        """Of all nodes."""
        return max(node.left for node in self.nodes) + self.wide + _AIR

    @property
    def height(self) -> float:
        """Of all nodes, with the texts below and the links above."""
        return self.above + max(node.top for node in self.nodes) + self.high + _AIR

    @property
    def above(self) -> float:
        """What stands above the first nodes: links to others."""
        return _AIR if len(self.nodes) > 1 else 0.25

    @property
    def inches(self) -> float:
        """Of a device."""
        return min(_INCHES, _MOST_HIGH / self.height, _MOST_WIDE / self.width)

    @property
    def squares(self) -> list[_Square]:
        """Of all nodes."""
        return [square for node in self.nodes for square in node.squares]


def draw_placement(plan: Plan, cluster: Cluster, timeline: Timeline) -> Figure:
    """Return a picture of a plan's stages on a cluster, and of the step that is predicted."""
    places = device_map(cluster, plan.stages)

    def head(time: TimeAxis, axes: Axes) -> None:
        _draw_places(cluster, plan.stages, places, axes)

    return draw_timeline(timeline, head, places.inches * places.height)


def draw_devices(cluster: Cluster, stages: Sequence[Stage] = ()) -> Figure:
    """Return a picture of a cluster's devices in their nodes, and of what stages they hold."""
    from matplotlib.figure import Figure

    places = device_map(cluster, stages)
    wide, high = places.inches * places.width, places.inches * places.height
    across, down = max(wide + 0.4, _LEAST_WIDE), high + _HEAD_INCHES
    figure = Figure(figsize=(across, down), dpi=150)
    _draw_places(cluster, stages, places, figure.add_axes((0.2 / across, 0, 1 - 0.2 / across, high / down)))
    return figure


def device_map(cluster: Cluster, stages: Sequence[Stage] = ()) -> DeviceMap:
    """Return where devices are drawn, with the stages that they hold."""
    held: dict[int, list[int]] = defaultdict(list)
    for index, stage in enumerate(stages):
        for device in stage.devices:
            held[device].append(index)
    rows = _unlike_rows(stages)
    nodes: dict[tuple[int, int], list[int]] = {}
    for index, here in enumerate(cluster.devices):
        nodes.setdefault((here.rack, here.node), []).append(index)
    kinds = [(each.type, each.memory_bytes) for each in cluster.devices]
    keys, own = list(nodes), list(nodes.values())
    contents = [[(kinds[device], rows.get(device), *held[device]) for device in devices] for devices in own]
    groups = alike(dict(enumerate(map(tuple, contents))))
    drawn = [groups[at] for at in evenly(len(groups), MOST_NODES)]
    folded = [_fold(contents[group.members[0]]) for group in drawn]
    # As many in a row of a node as lets all nodes be about as wide as the picture.
    columns = max(2, min(8, 32 // min(_IN_A_ROW, len(drawn))))
    wide = float(min(columns, max(map(len, folded))))
    high = float(-(-max(map(len, folded)) // columns))
    found = []
    for number, (group, places) in enumerate(zip(drawn, folded, strict=True)):
        left, top = number % _IN_A_ROW * (wide + _AIR), number // _IN_A_ROW * (high + 2 * _AIR)
        squares = []
        for at, each in enumerate(places):
            devices = tuple(own[node][place] for node in group.members for place in each.members)
            middle = left + at % columns + 0.5, top + at // columns + 0.5
            squares.append(_Square(each, devices, tuple(held[devices[0]]), middle, rows.get(devices[0], 0)))
        types = ", ".join(dict.fromkeys(cluster.devices[square.devices[0]].type for square in squares))
        found.append(_Node(_name([keys[at] for at in group.members], cluster), types, left, top, tuple(squares)))
    return DeviceMap(tuple(found), wide, high)


def _unlike_rows(stages: Sequence[Stage]) -> dict[int, float]:
    """Return the rows of devices whose stage has several kinds with unlike shares."""
    found = {}
    for stage in (each for each in stages if len(each.types) > 1 and len(set(each.shares)) > 1):
        for at, device in enumerate(stage.devices):
            found[device] = stage.shares[at // stage.tensor_parallel]
    return found


def _fold(contents: Sequence[Hashable]) -> list[Alike]:
    """Return what is drawn of a node: its devices, or of many those once that hold the same."""
    if len(contents) <= MOST_DEVICES:
        return [Alike((place,)) for place in range(len(contents))]
    groups = alike(dict(enumerate(contents)))
    return [groups[at] for at in evenly(len(groups), MOST_SQUARES)]


def _name(nodes: Sequence[tuple[int, int]], cluster: Cluster) -> str:
    """Return what nodes are called, each given by its rack and its number."""
    group = Alike(tuple(sorted({node for _, node in nodes})))
    racks = Alike(tuple(sorted({rack for rack, _ in nodes})))
    where = f"{racks.label('rack')}, " if len({each.rack for each in cluster.devices}) > 1 else ""
    times = f" (x {len(nodes):,})" if len(nodes) > 1 else ""
    return f"{where}{group.label('node')}{times}"


def _draw_places(cluster: Cluster, stages: Sequence[Stage], places: DeviceMap, axes: Axes) -> None:
    across, down = axes.bbox.width / axes.figure.dpi / places.inches, axes.bbox.height / axes.figure.dpi / places.inches
    axes.set(xlim=(-0.2, across - 0.2), ylim=(down - places.above, -places.above))
    axes.axis("off")
    _draw_links(cluster, places, axes)
    _draw_nodes(places, axes)
    _draw_squares(stages, places, axes)
    used = {device for stage in stages for device in stage.devices}
    of = f"{len(stages)} stage{'s' if len(stages) > 1 else ''} on {len(used):,} of " if stages else ""
    count = len(cluster.devices)
    title = f"{of}{count:,} device{'s' if count > 1 else ''}"
    drawn = sum(len(square.devices) for square in places.squares)
    if drawn < count:
        title += f"; {drawn:,} are drawn"
    axes.set_title(title, loc="left", size=11, color=INK, pad=18)


def _draw_links(cluster: Cluster, places: DeviceMap, axes: Axes) -> None:
    """Draw what connects nodes, and say what every level of links carries."""
    from matplotlib.lines import Line2D

    for top in sorted({node.top for node in places.nodes}):
        row = [node for node in places.nodes if node.top == top]
        middles = [node.left + places.wide / 2 for node in row]
        if len(places.nodes) > 1:
            axes.hlines(top - _BUS, 0, middles[-1], color=VERMILION, linewidth=1.0)
            axes.vlines(middles, top - _BUS, top - 0.1, color=VERMILION, linewidth=1.0)
    if len({node.top for node in places.nodes}) > 1:
        axes.vlines(0, -_BUS, max(node.top for node in places.nodes) - _BUS, color=VERMILION, linewidth=1.0)
    where = {"node": "within a node", "rack": "within a rack", "network": "between nodes"}
    if any(link.level == "rack" for link in cluster.links):
        where["network"] = "between racks"
    nodes = len({(each.rack, each.node) for each in cluster.devices})
    levels = [link for link in cluster.links if nodes > 1 or link.level == "node"]
    colours = {"node": BLUE, "rack": VERMILION, "network": VERMILION}
    handles = [
        Line2D([], [], color=colours[link.level], label=f"{where[link.level]}: {_rate(link)}") for link in levels
    ]
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.1, ncols=3, frameon=False, fontsize=8
    )


def _rate(link: Link) -> str:
    shared = f" shared by {link.shared_by}" if link.shared_by > 1 else ""
    return f"{bandwidth(link.bytes_per_s)}{shared}"


def _draw_nodes(places: DeviceMap, axes: Axes) -> None:
    from matplotlib.patches import FancyBboxPatch

    for node in places.nodes:
        edge = FancyBboxPatch(
            (node.left, node.top), places.wide, places.high, "round,pad=0.08", facecolor="none", edgecolor=BLUE, lw=0.8
        )
        axes.add_patch(edge)
    room, high = (places.wide + 0.8 * _AIR) * places.inches * POINTS, 0.55 * _AIR * places.inches * POINTS
    texts = [f"{node.name}: {short(node.kinds, 20)}" for node in places.nodes]
    if 7.0 * room / max(text_points(text, 7.0) for text in texts) < _LEGIBLE:
        texts = [node.name for node in places.nodes]
    letters = min(7.0, high, 7.0 * room / max(text_points(text, 7.0) for text in texts))
    for node, text in zip(places.nodes, texts, strict=True):
        if letters >= _LEGIBLE:
            at = node.left, node.top + places.high + 0.15
            axes.text(*at, text, size=letters, color=INK, va="top", parse_math=False)


def _draw_squares(stages: Sequence[Stage], places: DeviceMap, axes: Axes) -> None:
    """Draw devices in the colours of their stages, and arrows from the last of one to the first of the next."""
    squares = places.squares
    points = 0.8 * POINTS * places.inches
    colours = [colour_of(square.stages[0]) if square.stages else LANE for square in squares]
    across, down = zip(*(square.at for square in squares), strict=True)
    axes.scatter(across, down, points**2, color=colours, marker="s", edgecolors=FAINT, zorder=2)
    square_of = {device: square for square in squares for device in square.devices}
    ends = ((one.devices[-1], other.devices[0]) for one, other in pairwise(stages))
    for one, other in ends if len(stages) <= MOST_ARROWS else ():
        tail, head = (square_of.get(device) for device in (one, other))
        # Stages in the next line, or that come round to the first devices again, are known by their numbers.
        if tail is not None and head is not None and tail.at[0] < head.at[0]:
            shape = {"arrowstyle": "-|>", "color": INK, "linewidth": 0.8, "connectionstyle": "arc3,rad=-0.4"}
            begin, end = ((square.at[0], square.at[1] - 0.4) for square in (tail, head))
            axes.annotate("", end, begin, arrowprops={**shape, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 8})
    labels = [square.label for square in squares]
    longest = max((len(line) for label in labels for line in label.split("\n")), default=1)
    letters = min(8.0, points / 2.4, 1.5 * points / max(longest, 1))
    for square, label, colour in zip(squares, labels, colours, strict=True):
        axes.text(*square.at, label, size=letters, color=ink_on(colour), ha="center", va="center", zorder=4)
