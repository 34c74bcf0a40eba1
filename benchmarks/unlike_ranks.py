"""Unlike ranks: two ranks with a core each, of which one core is shared with a process that never rests.

Each rank profiles the model, told as a device of a kind of its own; both profiles are joined as a user joins them. Then
the planned shares and equal ones train step by step in turn.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypedDict

import torch

import autopar
from autopar.capture import load
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.options.profile import ProfileOptions
from autopar.profiler import local_cluster, probe, profile
from autopar.profiler.probe import LinkMeasurements, Probe
from autopar.ranks.context import RankContext
from autopar.ranks.pool import RankPool
from autopar.runtime.start.workspace import Workspace
from race import Field, Real, computing, real
from score import steps_s

__all__ = ["measured", "pinned", "shares_at_work"]

MODEL = Path(__file__).parent / "models" / "transformer.py"
KINDS = "left alone", "disturbed"
ROWS, MICRO_BATCHES = 12, 2
BUDGET_S = 20.0
"""Of a profile, in seconds."""


class Measured(TypedDict):
    """What a rank found before plans are made."""

    profile: str
    """As JSON text."""
    links: LinkMeasurements


class Race(TypedDict):
    """A race, and each rank's core."""

    cores: list[int]
    field: Field


def shares_at_work(steps: int, warm_up: int) -> dict[str, Any]:
    """Return what shares by speed gain over equal ones: measured, and simulated from what the ranks measured before."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    user = load(str(MODEL))
    with tempfile.TemporaryDirectory() as folder, RankPool(2) as pool, _disturbed(cores[1]):
        found: Any = pool.run("unlike_ranks:measured", cores)
        plans, priced = _plans(found, Path(folder))
        Workspace(Path(folder)).prepare(user, plans["by speed"], None)
        arguments = argparse.Namespace(steps=steps, warm_up=warm_up, bare=True)
        field = computing(arguments, plans, [], MICRO_BATCHES, ROWS, MODEL, folder)
        # Ranks are counted as the plan lists its devices.
        own = [cores[device] for device in plans["by speed"].stages[0].devices]
        ran: list[Real] = list(pool.run("unlike_ranks:pinned", {"cores": own, "field": field}))
    laps = {name: steps_s([each["laps"][name] for each in ran]) for name in plans}
    gains = [1 - mine / equal for mine, equal in zip(laps["by speed"], laps["equal"], strict=True)]
    simulated = 1 - priced["by speed"] / priced["equal"]
    return {
        "shares": list(plans["by speed"].stages[0].shares),
        "steps": steps,
        "step_s": {name: _spread(seconds) for name, seconds in laps.items()},
        "predicted_s": priced,
        "gain": _spread(gains),
        "simulated_gain": simulated,
        "points_apart": 100 * (median(gains) - simulated),
    }


def measured(context: RankContext, cores: list[int]) -> Measured:
    """Profile on a core of the rank's own, all ranks at once, then measure links between them."""
    _pin(cores[context.rank])
    user = load(str(MODEL))
    options = ProfileOptions(batch=ROWS * MICRO_BATCHES, budget_s=BUDGET_S, threads=1, tensor=1)
    found = profile(user, options)
    context.barrier()
    return {"profile": found.dumps(), "links": probe.measure(context, asdict(Probe(quick=True)))}


def pinned(context: RankContext, race: Race) -> Real:
    """Race on a core of the rank's own."""
    _pin(race["cores"][context.rank])
    return real(context, race["field"])


def _plans(found: list[Measured], folder: Path) -> tuple[dict[str, Plan], dict[str, float]]:
    files = []
    for kind, each in zip(KINDS, found, strict=True):
        one = Profile.parse(each["profile"], Path("profile.json"))
        files.append(folder / f"{kind}.json")
        device = one.device.model_copy(update={"name": kind})
        files[-1].write_text(one.model_copy(update={"device": device}).dumps())
    joined = autopar.import_profiles(files)
    local = local_cluster(found[0]["links"], joined.device, 2)
    devices = tuple(device.model_copy(update={"type": kind}) for kind, device in zip(KINDS, local.devices, strict=True))
    cluster = local.model_copy(update={"devices": devices})
    last = len(joined.layers) - 1
    stages = f"0-{last}:" + "+".join(f"1@{kind}" for kind in KINDS)
    planned = autopar.plan(joined, cluster, stages=stages, micro_batches=MICRO_BATCHES, batch=ROWS * MICRO_BATCHES)
    even = planned.stages[0].model_copy(update={"shares": (ROWS // 2, ROWS // 2)})
    plans = {"by speed": planned, "equal": planned.model_copy(update={"stages": (even,)})}
    return plans, {name: autopar.simulate(plan, joined, cluster).end_s for name, plan in plans.items()}


def _pin(core: int) -> None:
    torch.set_num_threads(1)
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


@contextmanager
def _disturbed(core: int) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(process.pid, {core})
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _spread(values: list[float]) -> dict[str, float]:
    tenths = quantiles(values, n=10)
    return {"median": median(values), "p10": tenths[0], "p90": tenths[-1]}
