"""How well are layers estimated? Profiles that were measured on a GPU, beside estimates for the same GPU.

    python benchmarks/estimated.py KEPT/*/profile.json --json benchmarks/results/estimated.json

`benchmarks/gpu.py --keep KEPT` leaves such profiles, with their models beside them. A row is a distinct layer, or a
part of one, at its largest micro-batch that both have: seconds of kernels and of launches, forward and backward, each
measured and estimated. Nothing is fitted.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import autopar
from autopar.formats.profile import Cost, Profile
from machine import Watch

__all__ = ["rows_of"]

COLUMNS = ("forward_s", "backward_s", "forward_launch_s", "backward_launch_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("profiles", type=Path, nargs="+", metavar="PROFILE")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    watch, models = Watch(), []
    for path in arguments.profiles:
        measured = Profile.load(path)
        rows = list(rows_of(measured, _estimated(path, measured)))
        models.append({"model": path.parent.name, "gpu": measured.device.name, **_errors(rows), "rows": rows})
    watch.record({"models": models}, arguments.json)


def _estimated(path: Path, measured: Profile) -> Profile:
    """Return an estimate of the same model, with as many tokens a sample."""
    sequence, precision = measured.model.sequence, measured.precision
    with contextlib.chdir(path.parent):
        return autopar.profile(
            measured.model.source, measured.batch, sequence=sequence, precision=precision, device=measured.device.name
        )


def rows_of(measured: Profile, estimated: Profile) -> Iterator[dict[str, Any]]:
    """Yield distinct layers and their parts, the time of each beside its estimate."""
    others = {layer.name: layer for layer in estimated.layers}
    for layer in measured.layers:
        if layer.measured_as is None and layer.name in others:
            other = others[layer.name]
            yield from _row(layer.name, 1, False, layer.costs, other.costs)
            for one, two in zip(layer.splits, other.splits, strict=True):
                for sliced, mine, its in ((False, one.part, two.part), (True, one.sliced, two.sliced)):
                    if mine is not None and its is not None:
                        yield from _row(layer.name, one.count, sliced, mine.costs, its.costs)


def _row(
    name: str, ranks: int, sliced: bool, costs: tuple[Cost, ...], others: tuple[Cost, ...]
) -> Iterator[dict[str, Any]]:
    known = {cost.micro_batch: cost for cost in others}
    for cost in [each for each in costs if each.micro_batch in known][-1:]:
        pairs = {column: (getattr(cost, column), getattr(known[cost.micro_batch], column)) for column in COLUMNS}
        yield {"layer": name, "ranks": ranks, "sliced": sliced, "micro_batch": cost.micro_batch, **pairs}


def _errors(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median error of kernels, forward with backward, and how many times longer launches were."""
    kernels, launches = ([(row[f"forward{end}"], row[f"backward{end}"]) for row in rows] for end in ("_s", "_launch_s"))
    errors = [abs(f[1] + b[1] - f[0] - b[0]) / (f[0] + b[0]) for f, b in kernels]
    longer = [(f[0] + b[0]) / (f[1] + b[1]) for f, b in launches if None not in (*f, *b)]
    return {"median_error": statistics.median(errors), "launches_longer": statistics.median(longer)}


if __name__ == "__main__":
    main()
