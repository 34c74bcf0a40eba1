"""Clusters: which links their devices need, and files whose parts do not agree."""

import itertools
import json
from pathlib import Path

import pytest

from autopar.errors import FileError
from autopar.formats.cluster import Cluster


def _text(**changes: object) -> str:
    link = {"level": "node", "latency_s": 0.0, "bytes_per_s": 1e9}
    devices = [{"type": "cpu", "memory_bytes": 1024}]
    return json.dumps({"format": "autopar.cluster", "version": 1, "devices": devices, "links": [link], **changes})


def _cluster(places: list[tuple[int, int]], *levels: str) -> str:
    """A cluster of devices of (node, rack) with links of some levels."""
    devices = [{"type": "cpu", "memory_bytes": 1, "node": node, "rack": rack} for node, rack in places]
    return _text(devices=devices, links=[{"level": level, "latency_s": 0, "bytes_per_s": 1} for level in levels])


def _curve(level: str) -> dict[str, object]:
    return {"kind": "all_reduce", "ranks": 2, "level": level, "sizes": [1], "seconds": [1.0]}


MORE = ((), ("rack",), ("network",), ("rack", "network"), ("network", "network", "node"))


@pytest.mark.parametrize("levels", [("node", *more) for more in MORE])
def test_a_cluster_is_read_where_every_two_devices_have_a_link(levels: tuple[str, ...]) -> None:
    for nodes in itertools.product(range(3), repeat=3):
        # Nodes 0 and 1 are in one rack, node 2 is in another.
        places, needed = [(node, node // 2) for node in nodes], set()
        for (node, rack), (other, its_rack) in itertools.combinations(places, 2):
            needed.add("node" if node == other else "rack" if rack == its_rack and "rack" in levels else "network")
        text = _cluster(places, *levels)
        if needed <= set(levels):
            cluster = Cluster.parse(text, Path("c.json"))
            assert [device.node for device in cluster.devices] == list(nodes)
            assert [link.level for link in cluster.links] == list(levels)
        else:
            with pytest.raises(FileError, match=r"c\.json: \$\.links: devices .* need a link of level \"network\""):
                Cluster.parse(text, Path("c.json"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_text(links=[{"level": "network", "latency_s": 0, "bytes_per_s": 1}]), ': $.links: no link of level "node"'),
        (_cluster([(0, 0), (1, 0)], "node"), ': $.links: devices on several nodes need a link of level "network"'),
        (_cluster([(0, 0), (1, 1)], "node", "rack"), ": $.links: devices in several racks need a link of level"),
        (_cluster([(0, 0), (0, 1)], "node", "network"), ": $.devices[1].rack: node 0 is in rack 0 by the"),
        (_text(curves=[_curve("rack")]), ': $.curves[0].level: there is a curve, but no link, of level "rack"'),
        (_text(curves=[_curve("node"), _curve("node")]), ": $.curves[1]: curves[0] is of the same operation"),
        (
            _text(curves=[{**_curve("node"), "kind": "p2p", "ranks": each} for each in (2, 3)]),
            ": $.curves[1]: curves[0]",
        ),
        (_text(overlaps=[{"level": "node", "compute": 1.5, "communication": 1.0}] * 2), ": $.overlaps[1].level: l"),
        (_text(curves=[{**_curve("node"), "sizes": [2, 1], "seconds": [1.0, 2.0]}]), ": $.curves[0].sizes: sizes"),
        (_text(curves=[{**_curve("node"), "seconds": []}]), ": $.curves[0].seconds: "),
        (_text(curves=[{**_curve("node"), "nodes": 2}]), ': $.curves[0].nodes: 2 nodes of 2 ranks at level "node"'),
        (
            _text(curves=[{**_curve("network"), "nodes": 1}]),
            ': $.curves[0].nodes: 1 nodes of 2 ranks at level "network"',
        ),
        (
            _text(curves=[{**_curve("network"), "nodes": 3}]),
            ': $.curves[0].nodes: 3 nodes of 2 ranks at level "network"',
        ),
        (
            _text(curves=[{**_curve("node"), "nodes": 1}] * 2),
            ": $.curves[1]: curves[0] is of the same operation, ranks, level and nodes; keep one",
        ),
        (_text(curves=[{**_curve("node"), "seconds": [1, 2]}]), ": $.curves[0].seconds: 2 seconds for 1 sizes"),
    ],
)
def test_a_cluster_whose_parts_do_not_agree_is_refused_with_its_path(text: str, message: str) -> None:
    with pytest.raises(FileError) as caught:
        Cluster.parse(text, Path("c.json"))
    assert str(caught.value).startswith(f"c.json{message}")
    assert "\n" not in str(caught.value)
