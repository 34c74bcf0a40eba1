"""The truth that training is held against: one process, one model, an ordinary loop. Imports nothing of autopar."""

import hashlib
import importlib.util
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Trained(NamedTuple):
    """What five plain steps give."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    """Of the first step."""
    parameters: dict[str, torch.Tensor]
    """After the last."""
    buffers: dict[str, torch.Tensor]
    norms: list[float | None]
    """Of all gradients, step by step; none of an overflow."""


def load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"plain_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def seed_of(seed: int, layer: str, step: int, micro_batch: int, share: int) -> int:
    """As docs/howto/verify.md defines it."""
    text = f"{seed}/{layer}/{step}/{micro_batch}/{share}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def train(
    file: Path,
    micro_batches: int,
    rows: int,
    shares_of: Callable[[str], Sequence[int]],
    random_layers: Sequence[str] = (),
    steps: int = 5,
    seed: int = 0,
    model_seed: int | None = None,
    deferred: bool = False,
    device: str = "cpu",
    period_of: Callable[[str], int] = lambda name: 1,
    precision: str = "fp64",
    clip_norm: float | None = None,
    clipped: Sequence[Collection[str]] = (),
) -> Trained:
    """Train mini-batches of ``micro_batches`` x ``rows`` samples, adding gradients up micro-batch by micro-batch.

    ``shares_of`` says, for a module's name, how its stage divides a micro-batch: batch statistics and random numbers
    are per share, as the design says. ``deferred`` running statistics are those that torch takes of whole mini-batches.
    What is returned of a loop on another ``device`` is on the CPU. ``period_of`` says, for a module's name, how many
    replicas of its stage take turns: running statistics are those that the first one sees. In ``precision`` bf16 or
    fp16, forwards run under autocast, and losses of fp16 are scaled. Gradients are clipped to ``clip_norm`` by the norm
    of all, or by that of each of the sets of names ``clipped``.
    """
    source = load_file(file)
    torch.manual_seed(seed if model_seed is None else model_seed)
    model: nn.Module = source.model().train().to(device)
    moment = {"step": 0, "micro_batch": 0}
    seen: list[Callable[[int], None]] = []
    _divide_batch_norms(model, shares_of, seen if deferred else None, period_of, moment)
    for name in random_layers:
        _divide_random(model.get_submodule(name), name, shares_of(name), seed, moment, device)
    optimizer = source.optimizer(model.parameters())
    scheduler = source.scheduler(optimizer) if hasattr(source, "scheduler") else None
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")
    data = source.dataset()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    context = torch.autocast(device, dtype) if dtype else nullcontext()
    losses, norms, first = [], list[float | None](), {}
    for step in range(steps):
        optimizer.zero_grad()
        moment["step"] = step
        picked = order[step * micro_batches * rows : (step + 1) * micro_batches * rows].split(rows)
        batches = [torch.utils.data.default_collate([data[i] for i in part.tolist()]) for part in picked]
        batches = torch.utils._pytree.tree_map_only(torch.Tensor, lambda value: value.to(device), batches)
        total = _accumulate(model, source, batches, moment, context, scaler)
        scaler.unscale_(optimizer)
        total = _counted(model, *total)
        for track in seen:
            track(micro_batches)
        losses.append(total)
        if step == 0:
            first = {name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None}
        norms.append(_clip(model, clip_norm, clipped))
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None:
            scheduler.step(*[total] * isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau))
    parameters = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    return Trained(losses, first, parameters, {name: buffer.cpu() for name, buffer in model.named_buffers()}, norms)


def _clip(model: nn.Module, clip_norm: float | None, clipped: Sequence[Collection[str]]) -> float | None:
    parameters = {name: each for name, each in model.named_parameters() if each.grad is not None}
    norm = nn.utils.get_total_norm([each.grad for each in parameters.values()])
    if clip_norm is not None:
        for names in clipped or [parameters]:
            nn.utils.clip_grad_norm_([each for name, each in parameters.items() if name in names], clip_norm)
    return norm.item() if norm.isfinite() else None


def _accumulate(
    model: nn.Module,
    source: ModuleType,
    batches: Sequence[object],
    moment: dict[str, int],
    context: AbstractContextManager[object],
    scaler: torch.amp.GradScaler,
) -> tuple[float, float]:
    """Run every micro-batch forth and back; return the loss, and what it counted."""
    total = counted = 0.0
    for moment["micro_batch"], batch in enumerate(batches):
        with context:
            if isinstance(batch, dict):
                output = model(*(value for key, value in batch.items() if key not in ("targets", "mask")))
            else:
                output = model(*batch[:-1])
            loss = source.loss(output, batch)
        loss, count = loss if isinstance(loss, tuple) else (loss / len(batches), 0.0)
        counted += float(count)
        scaler.scale(loss).backward()
        total += loss.item()
    return total, counted


def _counted(model: nn.Module, total: float, counted: float) -> float:
    """Divide gradients by what losses counted, if they did; return the mini-batch's loss."""
    if not counted:
        return total
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= counted
    return total / counted


def _divide_batch_norms(
    model: nn.Module,
    shares_of: Callable[[str], Sequence[int]],
    deferred: list[Callable[[int], None]] | None,
    period_of: Callable[[str], int],
    moment: dict[str, int],
) -> None:
    """Normalise every share by its own statistics; the running ones are those of the first share, or deferred."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            shares = shares_of(name)
            if deferred is not None:
                module.forward, track = _deferred_norm(module, shares)  # type: ignore[method-assign]
                deferred.append(track)
            elif len(shares) > 1 or period_of(name) > 1:
                module.forward = _divided_norm(module, shares, period_of(name), moment)  # type: ignore[method-assign]


def _deferred_norm(
    module: nn.modules.batchnorm._BatchNorm, shares: Sequence[int]
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[int], None]]:
    """Keep what is normalised, and have torch's own layer look at all of it in the end, call by call."""
    seen: list[torch.Tensor] = []
    own = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.detach().clone())
        weights = module.weight, module.bias
        return torch.cat(
            [F.batch_norm(part, None, None, *weights, True, 0.0, module.eps) for part in x.split(list(shares))]
        )

    def track(micro_batches: int) -> None:
        calls = len(seen) // micro_batches
        with torch.no_grad():
            for call in range(calls):
                own(torch.cat(seen[call::calls]))
        seen.clear()

    return forward, track


def _divided_norm(
    module: nn.modules.batchnorm._BatchNorm, shares: Sequence[int], period: int, moment: dict[str, int]
) -> Callable[..., torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        parts, alone = [], moment.get("share")
        sees = not alone and moment["micro_batch"] % period == 0
        for index, part in enumerate(x.split(list(shares)) if alone is None else [x]):
            running = (module.running_mean, module.running_var) if index == 0 and sees else (None, None)
            momentum = module.momentum if module.momentum is not None else 0.0
            parts.append(F.batch_norm(part, *running, module.weight, module.bias, True, momentum, module.eps))
        if module.num_batches_tracked is not None and sees:
            module.num_batches_tracked += 1
        return torch.cat(parts)

    return forward


def _divide_random(
    module: nn.Module, name: str, shares: Sequence[int], seed: int, moment: dict[str, int], device: str
) -> None:
    """Run a layer that draws random numbers share by share, seeded before each."""
    inner = module.forward
    generator = torch.default_generator if device == "cpu" else torch.cuda.default_generators[0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        parts = []
        for moment["share"], part in enumerate(x.split(list(shares))):
            generator.manual_seed(seed_of(seed, name, moment["step"], moment["micro_batch"], moment["share"]))
            parts.append(inner(part))
        del moment["share"]
        return torch.cat(parts)

    module.forward = forward  # type: ignore[method-assign]
