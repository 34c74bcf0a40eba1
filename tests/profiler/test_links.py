"""Links: what ranks measure of them becomes a cluster."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest

from autopar.planner.costs.communication import LinkModel
from autopar.profiler.device import choose, describe
from autopar.profiler.links import local_cluster, measure_links, measured_cluster
from autopar.profiler.probe import LinkMeasurements, MeasuredCurve


def test_nodes_of_one_rank_have_no_links_of_their_own() -> None:
    curve = MeasuredCurve(kind="p2p", ranks=2, level="network", sizes=[1024, 2048], seconds=[1e-3, 2e-3])
    memory = [2**30, 2**31]
    measured = LinkMeasurements(
        curves=[curve], overlaps=[], nodes=[0, 1], memory_bytes=memory, names=["one", "other"], notes=["seen"]
    )
    cluster = measured_cluster(measured, "cpu", "two")
    assert {device.type for device in cluster.devices} == {"cpu"}
    assert [device.type for device in measured_cluster(measured, "cuda", "two").devices] == ["one", "other"]
    measured["names"] = ["one", "one"]
    assert {device.type for device in measured_cluster(measured, "cuda", "two").devices} == {"cuda"}
    assert [(link.level, link.provenance) for link in cluster.links] == [("node", "estimated"), ("network", "measured")]
    assert [(device.node, device.memory_bytes) for device in cluster.devices] == [(0, 2**30), (1, 2**31)]
    assert cluster.notes == ("seen",)


@pytest.mark.parametrize("seconds", [[1e-3, 4e-3, 3e-3], [2e-3, 2e-3, 2e-3]])
def test_messages_beyond_a_curve_that_ends_flat_go_at_the_links_bandwidth(seconds: list[float]) -> None:
    sizes = [1024, 10**6, 3 * 10**6]
    curves = [MeasuredCurve(kind="p2p", ranks=2, level="node", sizes=sizes, seconds=seconds)]
    curves.append(MeasuredCurve(kind="all_reduce", ranks=4, level="node", sizes=sizes, seconds=seconds))
    same = {"nodes": [0] * 4, "memory_bytes": [2**30] * 4, "names": ["one"] * 4}
    measured = LinkMeasurements(curves=curves, overlaps=[], notes=[], **same)  # type: ignore[typeddict-item]
    cluster = measured_cluster(measured, "cpu", "four")
    (link,) = cluster.links
    assert link.bytes_per_s < 2e9
    last_s = cluster.curves[0].seconds[-1]
    assert last_s == pytest.approx((seconds[1] + seconds[2]) / 2, rel=1e-3)
    model = LinkModel(cluster, cluster.devices)
    for more in (10**6, 10**9):
        beyond_s = more / link.bytes_per_s
        assert model.message_s(sizes[-1] + more, "node") == pytest.approx(last_s + beyond_s, rel=1e-6)
        line = model._lines["all_reduce", 4, "node"]
        # A ring of four sends every byte one and a half times.
        assert float(line(np.array([sizes[-1] + more]))[0]) == pytest.approx(last_s + 1.5 * beyond_s, rel=1e-3)


def test_links_between_two_ranks_make_a_cluster() -> None:
    measured = measure_links(2, "cpu", 1)
    kind = describe(choose("cpu"), 1)
    cluster = local_cluster(measured, kind, 4)
    assert [curve.kind for curve in cluster.curves] == ["p2p", "all_reduce", "all_gather", "reduce_scatter"]
    for curve in cluster.curves:
        assert list(curve.seconds) == sorted(curve.seconds)
        assert curve.seconds[0] > 0
        assert (len(curve.sizes), curve.sizes[0], curve.sizes[-1]) == (12, 1024, 64 * 2**20)
    assert len(cluster.devices) == 4
    assert "estimated" in cluster.notes[0]


def test_times_that_fall_are_made_the_nearest_that_rise() -> None:
    draw = random.Random(4)
    for _ in range(30):
        count = draw.randint(2, 9)
        seconds = [draw.uniform(1e-3, 2e-3) for _ in range(count)]
        curve = MeasuredCurve(
            kind="p2p", ranks=2, level="node", sizes=[1024 * 2**place for place in range(count)], seconds=seconds
        )
        same = {"nodes": [0, 0], "memory_bytes": [2**30] * 2, "names": ["one"] * 2}
        measured = LinkMeasurements(curves=[curve], overlaps=[], notes=[], **same)  # type: ignore[typeddict-item]
        (found,) = measured_cluster(measured, "cpu", "two").curves
        # Isotonic regression in closed form: the largest, over beginnings, of the least mean of what follows.
        expected = [
            max(
                min(statistics.fmean(seconds[first : last + 1]) for last in range(place, count))
                for first in range(place + 1)
            )
            for place in range(count)
        ]
        assert found.seconds == pytest.approx(expected)
