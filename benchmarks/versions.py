"""What do weight versions cost a step? A rank with a policy beside the same rank that flushes, in turn.

    python benchmarks/versions.py --json benchmarks/results/versions.json

One rank trains the example GPT, four micro-batches of two samples, with one thread: `sync`, whose steps see the newest
weights; `stash` and `2bw` with a first stage's depth, three in flight, which keep versions, copy one in every step and
pack what autograd saves. All three make a step each, round after round; a row gives the median step, and the median,
10th and 90th percentile of the ratio to `sync` in the same round. Micro-batches in flight change no work. Wants an
otherwise idle machine.

`soak` is the small network of examples/mlp.py on three ranks under every policy, for 200 and for 2,000 mini-batches:
the most memory that each rank held, and the actions of all ranks' programs.

`busy` is the example GPT on three ranks that are processes and sleep as long as their actions take: the share of the
time between two updates, with the pipeline filled, in which each computes, beside what is simulated. `sync` is what a
flush leaves of it; `pipemare` has no parameters that stages share, as this model does.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

import autopar
from autopar.capture.layers.export import capture
from autopar.capture.model.source import load
from autopar.formats.plan import Plan
from autopar.formats.prediction import Prediction
from autopar.formats.profile import ModelSource
from autopar.formats.program import BACKWARD, CORRECT, FORWARD, PREDICT, UPDATE
from autopar.formats.stage import Stage
from autopar.formats.timeline import Timeline
from autopar.planner import action_prices, simulate
from autopar.planner.simulator.simulate import mini_batches
from autopar.runtime.job import Job
from autopar.runtime.messages.transport import Exchange, InProcessTransport
from autopar.runtime.rehearsal.steps import rehearse_steps
from autopar.schedules.expand import expand
from machine import Watch

MODEL = Path(__file__).parents[1] / "examples" / "gpt.py"
MICRO_BATCHES, ROWS, DEPTH = 4, 2, 3
POLICIES = ("stash", "vertical-sync", "2bw", "predict", "pipemare")
COMPUTING = (FORWARD, BACKWARD, UPDATE, PREDICT, CORRECT)
SOAKED = (200, 2000)
"""Mini-batches."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    watch, jobs = Watch(), {policy: _job(policy) for policy in ("sync", "stash", "2bw")}
    took: dict[str, list[float]] = {policy: [] for policy in jobs}
    stop = arguments.rounds + 3
    for policy, job in jobs.items():
        for step in range(-job.plan.lead, 0):
            job.step(step, stop)
        assert policy == job.plan.weight_policy
    for step in range(stop - 3):
        for policy, job in jobs.items():
            began_s = time.perf_counter()
            job.step(step, stop)
            took[policy].append(time.perf_counter() - began_s)
    # The first steps make what is kept.
    rows = [_row(policy, took[policy][3:], took["sync"][3:]) for policy in jobs]
    busy = [_busy(policy) for policy in ("sync", *POLICIES) if policy != "pipemare"]
    soak = [_soak(policy) for policy in POLICIES]
    watch.record({"rounds": arguments.rounds, "rows": rows, "busy": busy, "soak": soak}, arguments.json)


def _busy(policy: str) -> dict[str, Any]:
    """Return the share of the time in which ranks compute, as they do and as it was simulated."""
    more: dict[str, Any] = {} if policy == "sync" else {"policy": policy}
    more |= {"micro_batches": 4, "min_stages": 3, "max_stages": 3, "use_all": True}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        plan = autopar.plan(autopar.profile(shutil.copy(MODEL, "."), 16, device="cpu"), gpus=3, **more)
        assert plan.origin is not None
        prices, simulated = action_prices(plan, *plan.origin), simulate(plan, *plan.origin)
        steps = mini_batches(plan) if policy != "sync" else 8
        found = rehearse_steps(plan, plan.origin[0], prices, steps, real_time=True, threads=False)
    shares = [_shares(each, plan) for each in (found.timeline, simulated)]
    return {"policy": policy, "busy": shares[0], "simulated": shares[1]}


def _shares(timeline: Timeline, plan: Plan) -> list[float]:
    """Return by rank the share of the time in which it computes: of a step, or from one update to another."""
    shares = []
    for rank in range(len(plan.devices)):
        own = sorted((each for each in timeline if each.rank == rank), key=lambda each: each.start_s)
        ends = [each.end_s for each in own if each.action.kind == UPDATE]
        start_s, stop_s = 0.0, timeline.end_s
        if plan.weight_policy != "sync":
            start_s, stop_s = ends[plan.lead], ends[-plan.lead - 1]
        computing = (each for each in own if each.action.kind in COMPUTING and start_s <= each.start_s < stop_s)
        shares.append(round(sum(each.end_s - each.start_s for each in computing) / (stop_s - start_s), 4))
    return shares


def _soak(policy: str) -> dict[str, Any]:
    """Return what ranks hold after some mini-batches, and after many."""
    more = {"anneal_steps": 100} if policy == "pipemare" else {}
    # Plans name their model within the folder of the command.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        profile = autopar.profile(shutil.copy(MODEL.with_name("mlp.py"), "."), 16, device="cpu")
        plan = autopar.plan(
            profile, gpus=3, min_stages=3, max_stages=3, micro_batches=4, use_all=True, policy=policy, **more
        )
        peaks = {steps: autopar.train(plan, steps=steps).report.peak_bytes for steps in SOAKED}
    actions = sum(map(len, expand(plan).ranks))
    return {"policy": policy, "actions": actions, **{f"peak_bytes_{steps}": peaks[steps] for steps in SOAKED}}


def _job(policy: str) -> Job:
    user = load(str(MODEL))
    module = user.build(0)
    graph = capture(user, module)
    stage = Stage(
        layers=tuple(layer.name for layer in graph.layers),
        devices=(0,),
        shares=(ROWS,),
        warmup=1 if policy == "sync" else DEPTH,
        division="split",
    )
    plan = Plan(
        model=ModelSource(source=str(user.path), sha256=user.sha256),
        batch=MICRO_BATCHES * ROWS,
        precision="fp32",
        seed=0,
        schedule="1f1b",
        weight_policy=policy,  # type: ignore[arg-type]
        micro_batches=MICRO_BATCHES,
        micro_batch_size=ROWS,
        stages=(stage,),
        predicted=Prediction(step_s=0.0, lower_bound_s=0.0, bubble=0.0, peak_bytes=(0,)),
    )
    state = {name: each.detach().clone() for name, each in (*module.named_parameters(), *module.named_buffers())}
    place = (InProcessTransport(Exchange(), 0), torch.device("cpu"), lambda step, position: None)
    return Job(plan, expand(plan), 0, graph, user, lambda names: {name: state[name] for name in names}, *place)


def _row(policy: str, took: list[float], plain: list[float]) -> dict[str, Any]:
    ratios = [one / other for one, other in zip(took, plain, strict=True)]
    tenths = quantiles(ratios, n=10)
    return {
        "policy": policy,
        "step_s": round(median(took), 5),
        "over_sync": round(median(ratios), 4),
        "over_sync_p10": round(tenths[0], 4),
        "over_sync_p90": round(tenths[-1], 4),
    }


if __name__ == "__main__":
    main()
