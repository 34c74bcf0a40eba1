"""How well are parts of layers estimated? Blocks of a Transformer on an H100, each part measured alone.

    python benchmarks/blocks.py ../shared/data/h100/measured.csv

A rank of a team has a part of the block, and no sums are made: float32 parameters under autocast to bfloat16. Launches
are those that were measured of a linear layer on the same host; nothing is fitted to blocks.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture import LayerGraph
from autopar.capture.layers.export import capture_module
from autopar.capture.model.meta import parameters_on_meta
from autopar.capture.split.analysis import analyse
from autopar.hardware.gpus import find
from autopar.profiler.estimate import LayerWork, graph_work, part_work
from autopar.profiler.kernels import Constants, KernelLog, KernelTable, default_constants, seconds
from autopar.profiler.parts import PartKind, lone_part, part_kinds
from autopar.profiler.subject import SplitSurvey

GPU = "H100"


class MeasuredBlock(nn.Module):
    """Attention and two matrices, each behind a norm and beside a residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.first(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class BlockSeconds(NamedTuple):
    """What a forward takes, and a forward with its backward."""

    forward_s: float
    both_s: float
    launches_s: float
    """Of both, what the host needs to launch the kernels: where it is longer than they take, it counts."""
    kernels_s: float


def block_seconds(
    width: int, heads: int, sequence: int, rows: int, ranks: int, constants: Constants | None = None
) -> BlockSeconds:
    """Return what a rank of a team takes for its part of a block, without sums; constants are those of an H100."""
    gpu = find(GPU)
    chosen = constants or default_constants(gpu)
    work = _work(width, heads, sequence, rows, ranks)
    table = KernelTable.of([work.forward, work.backward], gpu)
    kernels_s = seconds(table, gpu, chosen)
    launches_s = table.launches * [chosen.forward_launch_s, chosen.backward_launch_s]
    forward_s, both_s = max(kernels_s[0], launches_s[0]), max(kernels_s.sum(), launches_s.sum())
    return BlockSeconds(float(forward_s), float(both_s), float(launches_s.sum()), float(kernels_s.sum()))


@cache
def _blocks(width: int, heads: int, sequence: int) -> tuple[LayerGraph, list[PartKind]]:
    """Return three blocks, without values, and the parts of them."""
    with parameters_on_meta():
        model = nn.Sequential(*(MeasuredBlock(width, heads) for _ in range(3)))
    batch = {"input": torch.zeros(2, sequence, width)}
    graph = capture_module(model, batch, lambda output, batch: output.square().mean())
    return graph, part_kinds(graph, SplitSurvey(graph), 8)


@cache
def _work(width: int, heads: int, sequence: int, rows: int, ranks: int) -> LayerWork:
    """Return what the middle one of three blocks does."""
    graph, kinds = _blocks(width, heads, sequence)
    gpu, name = find(GPU), graph.layers[1].name
    whole = graph_work(graph, rows, gpu, "bf16")
    if ranks == 1:
        return whole.layers[1]
    kind = next(
        each
        for each in kinds
        if each.count == ranks and not each.sequence and name in [layer.name for layer in each.layers]
    )
    lone = lone_part(kind, partial(kind.make, analyse(kind.layer), True), 0)
    return part_work(kind, lone, graph, whole, rows, gpu, "bf16")


def compare(path: Path, constants: Constants | None = None) -> list[tuple[dict[str, str], BlockSeconds]]:
    """Return the measured parts of a file, each with its estimate, by constants or by the launches of its host."""
    constants = constants or measured_launches(path)
    with path.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["what"] == "part"]
    names = ("width", "heads", "sequence", "rows", "t")
    return [(row, block_seconds(*(int(row[name]) for name in names), constants=constants)) for row in rows]


def measured_launches(path: Path) -> Constants:
    """Return the constants of an H100, with a launch's time of a linear layer on the host that a file is of."""
    with path.open(encoding="utf-8") as file:
        known = {row["what"]: row["seconds_each"] for row in csv.DictReader(file)}
    layer, given = nn.Linear(8, 8), torch.ones(8, 8, requires_grad=True)
    with KernelLog() as log:
        layer(given).sum().backward()
    forward_s, both_s = float(known["launch_linear_module"]), float(known["launch_linear_fwd_bwd"])
    # A forward is one kernel, and what is summed after it another.
    backward_s = (both_s - forward_s - float(known["launch"])) / (len(log.kernels) - 2)
    return replace(default_constants(find(GPU)), forward_launch_s=forward_s, backward_launch_s=backward_s)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    errors: dict[str, list[float]] = {"launches": [], "kernels": []}
    path = parser.parse_args(arguments).path
    constants = measured_launches(path)
    launches = f"{constants.forward_launch_s * 1e6:.1f} us forward, {constants.backward_launch_s * 1e6:.1f} backward"
    print(f"a launch takes {launches}")  # noqa: T201
    for row, found in compare(path, constants):
        measured_s = float(row["forward_backward_s"])
        bound = "launches" if found.launches_s > found.kernels_s else "kernels"
        errors[bound].append(abs(found.both_s / measured_s - 1))
        print(  # noqa: T201
            f"{row['width']:>5} x {row['sequence']:>4} x {row['rows']} t {row['t']}: "
            f"forward {found.forward_s * 1e3:6.2f} "
            f"({float(row['forward_s']) * 1e3:6.2f}), both {found.both_s * 1e3:6.2f} ({measured_s * 1e3:6.2f}) ms, "
            f"{found.both_s / measured_s - 1:+.1%}, bound by {bound}"
        )
    for bound, each in errors.items():
        print(f"bound by {bound}: mean error {statistics.mean(each or [0]):.1%} of {len(each)}")  # noqa: T201


if __name__ == "__main__":
    main()
