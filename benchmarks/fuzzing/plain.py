"""Plain: the truth that training is held against, one process, one model, an ordinary loop.

Imports nothing of the runtime. What a plan means for numbers is how it divides mini-batches into micro-batches and
shares; seeds are those of docs/seeds.md.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from autopar.formats.plan import Plan, Stage
from fuzzing.captured import Captured

__all__ = ["IndivisibleError", "PlainRun", "train_plainly", "trains"]

NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


class IndivisibleError(Exception):
    """This loop does not know what the shares of a layer would be."""


class PlainRun(NamedTuple):
    """What some plain steps give."""

    losses: list[float]
    gradients: dict[str, torch.Tensor | None]
    """Of the first step."""
    parameters: dict[str, torch.Tensor]
    """After the last."""
    buffers: dict[str, torch.Tensor]


def executed(text: str) -> ModuleType:
    """Execute a model file under no name, so that two of them share nothing."""
    module = ModuleType("plain")
    exec(compile(text, "model.py", "exec"), module.__dict__)
    return module


def trains(text: str) -> bool:
    """Tell whether torch trains a model file: an optimizer may not take its gradients, a layer not its rows."""
    try:
        source = executed(text)
        torch.manual_seed(0)
        model, data = source.model().train(), source.dataset()
        optimizer = _optimizer(source, model)
        for first in (0, 8, 16, 24):
            halves = [[data[index] for index in range(begin, begin + 4)] for begin in (first, first + 4)]
            optimizer.zero_grad()
            batches = [torch.utils.data.default_collate(half) for half in halves]
            finite = math.isfinite(_accumulate(model, source, batches, _Moment(0)))
            optimizer.step()
    except Exception:
        return False
    return finite


def train_plainly(path: Path, plan: Plan, captured: Captured, steps: int, moved: float = 0.0) -> PlainRun:
    """Train what a plan trains, micro-batch by micro-batch; with weights ``moved`` by that share of themselves.

    Raises:
        IndivisibleError: replicas draw random numbers in a layer that is no single module.
    """
    source = executed(path.read_text())
    torch.manual_seed(plan.seed)
    model: nn.Module = source.model().train()
    _move(model, moved)
    moment = _Moment(plan.seed)
    _divide(model, plan, captured, moment)
    optimizer = _optimizer(source, model)
    scheduler = source.scheduler(optimizer) if hasattr(source, "scheduler") else None
    losses, first = list[float](), dict[str, torch.Tensor | None]()
    for step, batches in zip(range(steps), _mini_batches(source, plan), strict=False):
        optimizer.zero_grad()
        moment.step = step
        losses.append(_accumulate(model, source, batches, moment))
        if step == 0:
            first = {name: _dense(parameter.grad) for name, parameter in model.named_parameters()}
        optimizer.step()
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(losses[-1])
        elif scheduler is not None:
            scheduler.step()
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return PlainRun(losses, first, parameters, {name: buffer.clone() for name, buffer in model.named_buffers()})


class _Moment:
    """Which micro-batch of which step runs, and which share of it; what was called so far in its forward."""

    def __init__(self, seed: int) -> None:
        self.seed, self.step, self.micro_batch, self.share = seed, 0, 0, 0
        self.calls: Counter[str] = Counter()

    def begin(self, micro_batch: int) -> None:
        self.micro_batch, self.share = micro_batch, 0
        self.calls.clear()

    def call(self, path: str) -> str:
        """Return the name of a layer that begins with a call of this module."""
        self.calls[path] += 1
        return path if self.calls[path] == 1 else f"{path}@{self.calls[path]}"

    def draw(self, layer: str, share: int) -> None:
        """Seed torch's generator as before a share's forward of the layer."""
        torch.default_generator.manual_seed(_seed_of(f"{self.seed}/{layer}/{self.step}/{self.micro_batch}/{share}"))


def _seed_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _move(model: nn.Module, share: float) -> None:
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters() if share else ():
            parameter.mul_(1 + share * torch.randn(parameter.shape, generator=chance, dtype=torch.float64))


def _optimizer(source: ModuleType, model: nn.Module) -> torch.optim.Optimizer:
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    made: torch.optim.Optimizer
    if "named_parameters" in inspect.signature(source.optimizer).parameters:
        made = source.optimizer(named)
    else:
        made = source.optimizer([parameter for _, parameter in named])
    return made


def _mini_batches(source: ModuleType, plan: Plan) -> Iterator[list[Any]]:
    """Give mini-batches as lists of micro-batches, epoch after epoch."""
    collate = getattr(source, "collate", torch.utils.data.default_collate)
    _seed_data(plan.seed, "dataset")
    data = source.dataset()
    epochs, steps = 0, 0
    while len(data) >= plan.batch:
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(plan.seed + epochs))
        for picked in torch.split(order, plan.batch):
            if len(picked) == plan.batch:
                made = list[Any]()
                for micro_batch, part in enumerate(torch.split(picked, plan.micro_batch_size)):
                    samples = [_sample(data, index, plan.seed, epochs) for index in part.tolist()]
                    _seed_data(plan.seed, "collate", steps, micro_batch)
                    made.append(collate(samples))
                yield made
                steps += 1
        epochs += 1


def _sample(data: Any, index: int, seed: int, epoch: int) -> object:  # noqa: ANN401
    _seed_data(seed, "sample", epoch, index)
    return data[index]


def _seed_data(seed: int, *what: object) -> None:
    number = _seed_of("/".join(map(str, (seed, *what))))
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)


def _accumulate(model: nn.Module, source: ModuleType, batches: Sequence[Any], moment: _Moment) -> float:
    """Run every micro-batch forth and back; return the mini-batch's loss."""
    total, counted = 0.0, 0.0
    for micro_batch, batch in enumerate(batches):
        moment.begin(micro_batch)
        loss = source.loss(model(batch["x"] if isinstance(batch, dict) else batch[0]), batch)
        if isinstance(loss, tuple):
            loss, count = loss
            counted += float(count)
        else:
            loss = loss / len(batches)
        loss.backward()
        total += loss.item()
    if counted:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= counted
    return total / counted if counted else total


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return None
    return gradient.to_dense() if gradient.is_sparse else gradient.clone()


def _divide(model: nn.Module, plan: Plan, captured: Captured, moment: _Moment) -> None:
    """Have modules run share by share where that makes a difference, and seed layers that draw random numbers."""
    stage_of = {name: stage for stage in plan.stages for name in stage.layers}
    of_module: dict[str, dict[str, Stage]] = {}
    for name, modules, is_random in captured.layers:
        stage = stage_of[name]
        if is_random and len(_shares(stage)) > 1 and len(modules) > 1:
            raise IndivisibleError(name)
        for call in dict.fromkeys((name, *modules)):
            of_module.setdefault(_path(call), {}).setdefault(call, stage)
    drawing = {name for name, _, is_random in captured.layers if is_random}
    for path, stages in of_module.items():
        module = model.get_submodule(path)
        normed = any(isinstance(part, NORMS) for part in module.modules())
        if normed or drawing & stages.keys():
            _run_by_shares(module, path, stages, drawing, moment)
    for path, module in model.named_modules():
        if isinstance(module, NORMS):
            _track_first(module, _held(path, of_module), moment)


def _path(call: str) -> str:
    """Return the module of a call; ``path@2`` is the second one of the module at ``path``."""
    path, _, count = call.rpartition("@")
    return path if path and count.isdigit() else call


def _held(path: str, of_module: dict[str, dict[str, Stage]]) -> Stage:
    while path not in of_module:
        path = path.rpartition(".")[0]
    return next(iter(of_module[path].values()))


def _shares(stage: Stage) -> tuple[int, ...]:
    return stage.rows if stage.division == "split" else stage.rows[:1]


def _run_by_shares(module: nn.Module, path: str, stages: dict[str, Stage], drawing: set[str], moment: _Moment) -> None:
    inner: Callable[..., torch.Tensor] = module.forward
    first = next(iter(stages.values()))

    def forward(x: torch.Tensor) -> torch.Tensor:
        name = moment.call(path)
        parts = []
        for moment.share, part in enumerate(torch.split(x, _shares(stages.get(name, first)))):
            if name in drawing:
                moment.draw(name, moment.share)
            parts.append(inner(part))
        moment.share = 0
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    module.forward = forward


def _track_first(module: nn.Module, stage: Stage, moment: _Moment) -> None:
    """Have running statistics be those that the stage's first replica sees."""
    inner: Callable[..., torch.Tensor] = module.forward
    period = stage.replicas if stage.division == "round-robin" else 1

    def forward(x: torch.Tensor) -> torch.Tensor:
        if moment.share == 0 and moment.micro_batch % period == 0:
            return inner(x)
        own = dict(module._buffers)
        module._buffers.update({name: None if each is None else each.clone() for name, each in own.items()})
        try:
            return inner(x)
        finally:
            module._buffers.update(own)

    module.forward = forward
