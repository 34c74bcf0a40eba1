"""The case of `benchmarks/runtime.py` that computes on a GPU."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from autopar.capture import load
from autopar.capture.layers.export import capture
from autopar.ranks.monitor import Watch
from autopar.ranks.pool import RankPool
from autopar.runtime.start.workspace import Workspace
from cut import cut
from race import computing
from real_case import MICRO_BATCHES, MODEL, ROWS
from score import row, steps_s

__all__ = ["rows"]

CONTESTANTS = ("autopar", "autopar, loading", "plain")


def rows(arguments: argparse.Namespace, device_type: str = "cuda", model: Path = MODEL) -> list[dict[str, Any]]:
    """Race a transformer on one device: autopar given mini-batches, autopar loading them, and the plain loop."""
    user = load(str(model))
    plan = cut(capture(user, user.build(0)), user, "gpipe", (1,), MICRO_BATCHES, ROWS)
    plan = plan.model_copy(update={"device_type": device_type})
    with tempfile.TemporaryDirectory() as folder, RankPool(1, device_type=device_type) as pool:
        Workspace(Path(folder)).prepare(user, plan, None)
        field = computing(arguments, {"autopar": plan}, ["plain"], MICRO_BATCHES, ROWS, model, folder)
        told = pool.run(
            "race:alone", field, watch=Watch(on_message=lambda rank, said: sys.stderr.write(f"cuda: {said}\n"))
        )
    results: list[Any] = list(told)
    laps = {name: [result[name] for result in results] for name in CONTESTANTS}
    single_s, actions = steps_s(laps["plain"]), 2 * MICRO_BATCHES
    return [row("cuda", name, laps, actions, None, single_s) for name in CONTESTANTS]
