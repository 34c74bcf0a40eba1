"""Truth: what the plain loop makes of a model file, and which models torch itself trains."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autopar.capture.cache.recall import build_and_capture
from autopar.capture.model.source import load
from autopar.capture.plain.loop import train_plainly
from autopar.capture.plain.mini_batch import PlainRun
from autopar.formats.plan import Plan
from autopar.runtime.stage.parameters import first_stages

__all__ = ["trains", "truth_of"]

ROWS = 4


def truth_of(path: Path, plan: Plan, steps: int, moved: float = 0.0) -> PlainRun:
    """Train what a plan trains in one process; of weights ``moved`` by that share of themselves.

    The file is loaded anew, so that what it keeps in Python is as at the start.

    Raises:
        UsageError: the loop does not know what the shares of a layer would be.
    """
    user = load(str(path))
    stage_of = None
    if plan.weight_policy != "sync":
        stage_of = first_stages(plan, build_and_capture(user, plan.seed)[1])
    same = replace(user, factory=lambda: _moved(user.build(plan.seed), moved))
    return train_plainly(same, plan, steps, stage_of=stage_of)


def _moved(model: nn.Module, share: float) -> nn.Module:
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters() if share else ():
            parameter.mul_(1 + share * torch.randn(parameter.shape, generator=chance, dtype=torch.float64))
    return model


def trains(text: str) -> bool:
    """Tell whether torch trains a model file: an optimizer may not take its gradients, a layer not its rows."""
    try:
        source = ModuleType("plain")
        exec(compile(text, "model.py", "exec"), source.__dict__)
        torch.manual_seed(0)
        model, data = source.model().train(), source.dataset()
        optimizer = _optimizer(source, model)
        losses = []
        for first in range(0, 8 * ROWS, 2 * ROWS):
            optimizer.zero_grad()
            for begin in (first, first + ROWS):
                batch = torch.utils.data.default_collate([data[index] for index in range(begin, begin + ROWS)])
                losses.append(_loss(source, model, batch))
                losses[-1].backward()
            optimizer.step()
    except Exception:
        return False
    return all(math.isfinite(float(each.detach())) for each in losses)


def _optimizer(source: ModuleType, model: nn.Module) -> torch.optim.Optimizer:
    named = "named_parameters" in inspect.signature(source.optimizer).parameters
    made: torch.optim.Optimizer = source.optimizer(model.named_parameters() if named else model.parameters())
    return made


def _loss(source: ModuleType, model: nn.Module, batch: Any) -> torch.Tensor:  # noqa: ANN401
    loss = source.loss(model(batch["x"] if isinstance(batch, dict) else batch[0]), batch)
    if isinstance(loss, dict):
        terms = [each[0] if isinstance(each, tuple) else each for name, each in loss.items() if name != "log"]
        return torch.stack(terms).sum()
    total: torch.Tensor = loss[0] if isinstance(loss, tuple) else loss
    return total
