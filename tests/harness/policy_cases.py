"""Cases of training without flushes: a chain of layers under some policy, and how far it is from the policy's rule."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from autopar.capture.plain.loop import train_plainly
from autopar.formats.plan import Plan
from autopar.formats.program import Program
from autopar.options.train import TrainSettings
from autopar.ranks.pool import RankPool
from autopar.runtime.loss import StepRecord
from in_teams import in_teams
from oracles.unflushed import Asked, Trained, delay_of
from oracles.unflushed import train as train_unflushed
from paths import MODELS
from training_cases import bits, make_case, own_part, train

ROWS, STEPS = 2, 20

TOLD = """

untold = optimizer


def optimizer(parameters, *, delay, replicas):
    made = untold(parameters)
    for group in made.param_groups:
        group["lr"] *= replicas / (1 + delay)
    return made
"""
"""An optimizer whose rates go by the stage."""


def planned(
    folder: Path,
    optimizer: str,
    policy: str,
    depths: Sequence[int],
    micro_batches: int,
    synchronous_steps: int = 0,
    special: Mapping[str, object] | None = None,
    precision: str = "fp64",
    model: str = "tanh_chain",
    ahead: str = "counted",
    told: bool = False,
    **more: Any,  # noqa: ANN401
) -> Plan:
    """Write the folder's ``model.py``, and return a plan for it."""
    text = (MODELS / f"{model}.py").read_text().replace('OPTIMIZER = "sgd"', f'OPTIMIZER = "{optimizer}"')
    for name, value in (special or {}).items():
        text = re.sub(f"(?m)^{name} = [^#]*", f"{name} = {value}  ", text)
    case = make_case(folder / "model.py", text + (TOLD if told else ""))
    widths, sizes = more.pop("widths", [1] * len(depths)), more.pop("team_sizes", None)
    plan = case.plan(widths, micro_batches, ROWS, warmup=[1] * len(depths), **more)
    if sizes is not None:
        plan = in_teams(case.graph, plan, sizes)
    stages = [stage.model_copy(update={"warmup": depth}) for stage, depth in zip(plan.stages, depths, strict=True)]
    settings: dict[str, object] = {}
    if policy == "pipemare":
        settings = {"anneal_steps": 8, "synchronous_steps": synchronous_steps}
    settings |= {"stages": tuple(stages), "weight_policy": policy, "precision": precision}
    content = plan.model_copy(update=settings | ({"ahead": ahead} if policy == "predict" else {}))
    return Plan.parse(content.dumps(), Path("plan.json"))


def trained(folder: Path, plan: Plan, **settings: Any) -> dict[str, torch.Tensor]:  # noqa: ANN401
    """Return all that ranks have kept in the end."""
    make_case(folder / "model.py").train(plan, folder, STEPS, TrainSettings(**settings))
    return bits(plan, folder)


def differs(
    folder: Path,
    plan: Plan,
    *,
    losses: bool = True,
    lags: Sequence[int] = (),
    program: Program | None = None,
    pool: RankPool | None = None,
    **clipping: Any,  # noqa: ANN401
) -> float:
    """Return how far parameters are from the rule's, relative to the largest; ``losses`` are to be the rule's, too.

    Gradients are clipped as settings say; ``program`` is run in place of the plan's own. Ranks are threads of this
    process, or those of the pool, whose losses are means.
    """
    case = make_case(folder / "model.py")
    user, graph, module = case.model, case.graph, case.model.build(0)
    records: dict[int, list[StepRecord]] = {}
    settings = TrainSettings(**clipping)
    if pool is None:
        found_losses = case.train(plan, folder, STEPS, settings, records, program)
        counts = [sum(each.count for each in parts) for parts in zip(*records.values(), strict=True)]
    else:
        found_losses, counts = train(pool, case, plan, folder, STEPS), [0.0] * STEPS
    found_losses = [total / (count or 1.0) for total, count in zip(found_losses, counts, strict=True)]
    layers = {layer: index for index, stage in enumerate(plan.stages) for layer in stage.layers}
    frozen = [name for name, each in module.named_parameters() if not each.requires_grad]
    held = ((name, layers[layer.name]) for layer in graph.layers for name in layer.parameters.values())
    stage_of = {name: stage for name, stage in held if name not in frozen}
    shared = [("0.0.weight", "4.0.weight")] if plan.tied else []
    if shared:
        module[4][0].weight = torch.nn.Parameter(module[0][0].weight.detach().clone())
        stage_of |= {"0.0.weight": 0, "4.0.weight": len(plan.stages) - 1}
    functions = user.functions
    asked = Asked(
        plan.weight_policy,
        [stage.warmup for stage in plan.stages],
        plan.micro_batches,
        stage_of,
        plan.anneal_steps or 1,
        plan.synchronous_steps,
        any(stage.recompute for stage in plan.stages),
        lags,
        shared,
        settings.clip_norm,
        plan.precision == "fp16",
        plan.seed if any(layer.random for layer in graph.layers) else None,
        settings.clip == "stage",
        plan.ahead == "xpipe",
    )
    if user.optimizer_options:
        factors = [stage.replicas / (1 + delay_of(asked, at)) for at, stage in enumerate(plan.stages)]
        asked = asked._replace(rate_factors=factors)
        functions = functions | {"optimizer": partial(functions["optimizer"], delay=0.0, replicas=1)}
    own: list[Any] = [functions[name] for name in ("loss", "optimizer", "scheduler")]
    if plan.span > 1:
        how = {"clip_norm": settings.clip_norm, "clips_stages": asked.clips_stages, "stage_of": stage_of}
        found = train_plainly(user, plan, STEPS, **how)  # type: ignore[arg-type]
        truth = Trained(found.losses, {name: each for name, each in found.parameters.items() if name in stage_of})
    else:
        truth = train_unflushed(module, asked, _batches(functions["dataset"](), plan), *own)
        truth.losses[:] = [loss / (count or 1.0) for loss, count in zip(truth.losses, counts, strict=True)]
    assert not losses or found_losses == pytest.approx(truth.losses, rel=1e-12, nan_ok=True)
    largest = max(float(each.abs().max()) for each in truth.parameters.values())
    apart, seen = 0.0, set[str]()
    for rank in range(len(plan.devices)):
        for name, each in load_file(folder / f"parameters-{rank}").items():
            # The last stage has what it shares under the first one's name.
            is_last = plan.ownership.ranks[rank].stages != (0,)
            known = "4.0.weight" if shared and name == "0.0.weight" and is_last else name
            if known in frozen:
                continue
            seen.add(known)
            expected = own_part(plan, rank, name, truth.parameters[known])
            apart = max(apart, float((each - expected).abs().max()))
    assert seen == truth.parameters.keys()
    return apart / largest


def _batches(data: Any, plan: Plan) -> list[list[tuple[torch.Tensor, ...]]]:  # noqa: ANN401
    """Return mini-batches as docs/howto/verify.md has them; no test gets to the end of the first epoch."""
    order, batches = torch.randperm(len(data), generator=torch.Generator().manual_seed(plan.seed)), []
    for step in range(STEPS):
        samples = [data[int(row)] for row in order[step * plan.batch : (step + 1) * plan.batch]]
        parts = [samples[at : at + ROWS] for at in range(0, plan.batch, ROWS)]
        batches.append([tuple(torch.stack(each) for each in zip(*part, strict=True)) for part in parts])
    return batches
