"""Compared plans as a table; virtual workers below it."""

from __future__ import annotations

from autopar.formats.report import ComparisonRow, VirtualStage, VirtualWorker, VirtualWorkers
from autopar.report.plan import render_comparison
from shown import shown


def worker(devices: tuple[int, int], kinds: tuple[str, str], cut: int) -> VirtualWorker:
    stages = (
        VirtualStage(f"0-{cut - 1}", devices[0], kinds[0], 3, 0.002, 2**20),
        VirtualStage(f"{cut}-9", devices[1], kinds[1], 1, 0.001, 2**21),
    )
    return VirtualWorker(stages, 500.0)


def test_workers_that_cut_differently_are_told_apart_and_those_alike_share_rows() -> None:
    workers = (worker((0, 1), ("V", "Q"), 4), worker((2, 3), ("V", "Q"), 4), worker((4, 5), ("R", "R"), 5))
    found = VirtualWorkers("HD", 3, workers, 1500.0)
    rows = [
        ComparisonRow("autopar", "0-9:6", 4, "1f1b", 0.5, 2**20),
        ComparisonRow("HetPipe", None, 4, "1f1b", 0.6, 2**21, None, found),
        ComparisonRow("GPipe", infeasible="too large"),
    ]
    lines = shown(lambda console: render_comparison(rows, 0.5, console), 160)
    assert "HetPipe 600 ms +20.0 % 1f1b 4 2 MiB cut differently, see below" in lines
    assert "GPipe too large" in lines
    title = "HetPipe's virtual workers (HD, 3 micro-batches in flight, 1500 samples per second at most)"
    assert title in " ".join(lines)
    assert "note: no plan says virtual workers that cut differently; their step is that of each one's own" in " ".join(
        lines
    )
    assert "0, 1 500 0 0-3 0, 2 (V) 3 2 ms 1 MiB" in lines
    assert "1 4-9 1, 3 (Q) 1 1 ms 2 MiB" in lines
    assert "2 500 0 0-4 4 (R) 3 2 ms 1 MiB" in lines
