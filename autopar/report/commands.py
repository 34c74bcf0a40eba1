"""Commands: what to type to make a document again from the files that it names, and what can be done with it.

Files are named as documents do: relative to the folder of the document's own.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from autopar.formats.profile import is_model
from autopar.formats.stage import layers_text

if TYPE_CHECKING:
    from autopar.formats.plan import Plan
    from autopar.formats.profile import Profile
    from autopar.formats.timeline import Origin


def profile_commands(profile: Profile, file: str) -> Iterator[str]:
    """Yield what profiles the model again; nothing where the profile is not of a model that autopar runs."""
    model, device = profile.model, profile.device
    if not is_model(model.source):
        return
    is_estimate = all(cost.provenance == "estimated" for layer in profile.layers for cost in layer.costs)
    yield _line(
        ("profile", model.source, "--batch", profile.batch, "--precision", profile.precision),
        ("--data", model.data) if model.data else (),
        ("--sequence", model.sequence) if model.sequence else (),
        ("--compile",) if profile.compiled else (),
        ("--device", device.name) if is_estimate else (),
        ("-o", file),
    )


def plan_commands(plan: Plan, file: str) -> Iterator[str]:
    """Yield what plans the same stages, and what is done with a plan."""
    if plan.objective in ("step", "throughput", "cost") and plan.profile is not None:
        yield _line(
            ("plan", plan.profile.path, "--batch", plan.batch),
            ("--cluster", plan.cluster_name) if plan.cluster_name else (),
            ("--cluster", plan.cluster.path) if plan.cluster else (),
            ("--schedule", plan.schedule, "--micro-batches", plan.micro_batches, "--stages", stages_text(plan)),
            ("--division", "round-robin") if any(each.division == "round-robin" for each in plan.stages) else (),
            _unusual(plan),
            ("-o", file),
        )
    for command in ("simulate", "run"):
        yield _line((command, file))


def _unusual(plan: Plan) -> tuple[object, ...]:
    """Return the flags of what the plan has that others have not."""
    flags: dict[str, object] = {}
    if plan.objective != "step":
        flags["--objective"] = plan.objective
    if plan.weight_policy != "sync":
        flags["--policy"] = plan.weight_policy
    if plan.bytes_per_s is not None:
        flags["--bandwidth"] = f"{plan.bytes_per_s / 1e9:g}GB/s"
    if plan.seed:
        flags["--seed"] = plan.seed
    for name in ("wave", "staleness", "anneal_steps", "synchronous_steps", "ema_decay", "replicate_state", "times_of"):
        if getattr(plan, name):
            flags[f"--{name.replace('_', '-')}"] = getattr(plan, name)
    return (
        *(word for flag in flags.items() for word in flag),
        *(f"--{name}" for name in ("eager", "divisible") if getattr(plan, name)),
    )


def stages_text(plan: Plan) -> str:
    """Return a plan's stages as ``--stages`` takes them, by the layers' indices."""
    if plan.pipelines:
        return "/".join(map(stages_text, plan.separate))
    edges = accumulate((len(stage.layers) for stage in plan.stages), initial=0)
    return ",".join(
        f"{layers_text(*ends)}:{stage.replication.text}"
        for ends, stage in zip(pairwise(edges), plan.stages, strict=True)
    )


def trace_command(origin: Origin, file: str) -> str:
    """Return what writes such a trace of the plan in the folder."""
    doing = {"simulated": ("simulate",), "measured": ("run",), "rehearsed": ("rehearse", "--steps", 1)}[origin]
    return _line((*doing, "--trace", file))


def run_command(steps: int, file: str) -> str:
    """Return what trains as many steps by the plan in the folder, and writes their report."""
    return _line(("run", "--steps", steps, "--report", file))


def show_command(file: str, over: str | None = None) -> str:
    """Return what writes a page of a file."""
    page = f"{file.removesuffix('.json')}.html"
    return _line(("show", file), ("--over", over) if over else (), ("--html", page))


def _line(*words: tuple[object, ...]) -> str:
    return shlex.join(["autopar", *(str(word) for some in words for word in some)])
