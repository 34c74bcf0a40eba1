"""Plans of the GPT example on four ranks, exported to torch, trained for a step, and held against the plain loop."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

import autopar
from autopar.formats.profile import Profile
from autopar.formats.stage import chunks_of, layout_of
from autopar.schedules import SCHEDULES
from exported_ranks import RANKS, SAMPLES, plain_gradients

REPLICATED = "1f1b of two replicas"
SCRIPT = Path(__file__).with_name("exported_ranks.py")


def largest_differences(
    example: Path, folder: Path, schedules: Sequence[str] = tuple(SCHEDULES), seconds: float = 240.0
) -> dict[str, float]:
    """Return how far gradients are from the plain loop's, relative to a parameter's largest, by schedule.

    Every schedule is planned for, exported and trained by torch's pipelining, on processes of this host.
    """
    file = Path(shutil.copy(example, folder))
    profile = autopar.estimate(str(file), SAMPLES, device="H100")
    for schedule in schedules:
        chunks = chunks_of(layout_of(schedule)) or 2
        _export(
            profile, folder / schedule, [0, 4, 7, 10, 14] if chunks == 1 else [0, 2, 3, 5, 7, 9, 10, 12, 14], schedule
        )
    _export(profile, folder / REPLICATED, [0, 6, 14], "1f1b", 2)
    arguments = [str(folder), str(folder / "store"), str(file)]
    ranks = [subprocess.Popen([sys.executable, str(SCRIPT), str(rank), *arguments]) for rank in range(RANKS)]
    try:
        codes = [rank.wait(seconds) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * RANKS, codes
    truth = plain_gradients(file)
    return {name: _difference(folder / name, truth) for name in (*schedules, REPLICATED)}


def _export(profile: Profile, folder: Path, cuts: Sequence[int], schedule: str, replicas: int = 1) -> None:
    """Plan stages and export them into a folder of their own."""
    stages = ",".join(f"{first}-{stop - 1}:{replicas}" for first, stop in pairwise(cuts))
    options = {"schedule": schedule, "stages": stages, "micro_batches": 4, "recompute": "none", "shard": "none"}
    plan = autopar.plan(profile, f"{RANKS}xH100", **options)
    folder.mkdir()
    for each in autopar.export(plan, "torch", output=folder / "schedule.csv").files:
        (folder / each.name).write_text(each.text)


def _difference(folder: Path, truth: dict[str, torch.Tensor]) -> float:
    found = [torch.load(folder / f"gradients-{rank}.pt") for rank in range(RANKS)]
    assert {name for each in found for name in each} >= truth.keys() - {"head.weight"}
    return max(
        float((gradient - truth[name]).abs().max() / truth[name].abs().max())
        for each in found
        for name, gradient in each.items()
    )
