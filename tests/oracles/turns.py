"""PipeDream with replicas that take whole mini-batches in turn, in one process: every version of every stage is kept.

With n replicas of a stage and K in flight on each, mini-batch m sees max(0, floor(m / n) - K + 1) updates of the stage,
in its forward and in its backward. An update is by the mean of the gradients of n mini-batches, or of those that there
are behind the last whole n; a scheduler goes on by as many. Nothing here knows of programs, ranks or time.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from oracles.unflushed import Trained, seeded


def train_in_turns(
    module: nn.Module,
    depths: Sequence[int],
    replicas: Sequence[int],
    stage_of: Mapping[str, int],
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    loss: Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]],
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler],
    seed: int | None = None,
    clip_norm: float | None = None,
) -> Trained:
    """Train on mini-batches of one micro-batch; ``replicas`` take turns, 1 for a stage whose replicas do not.

    Each stage clips the mean by its own norm.
    Losses are means, or the sums that counts go with.
    """
    parameters = {name: each for name, each in module.named_parameters() if name in stage_of}
    names = [[name for name, at in stage_of.items() if at == stage] for stage in range(len(depths))]
    steppers = {at: optimizer([parameters[name] for name in own]) for at, own in enumerate(names) if own}
    schedulers = {at: scheduler(each) for at, each in steppers.items()}
    versions = {name: [each.detach().clone()] for name, each in parameters.items()}
    sums = {name: torch.zeros_like(each) for name, each in parameters.items()}
    losses, moment = [], seeded(module, seed)
    for number, batch in enumerate(batches):
        moment[:] = [number, 0]
        for name, parameter in parameters.items():
            stage = stage_of[name]
            parameter.data.copy_(versions[name][max(0, number // replicas[stage] - depths[stage] + 1)])
        made = loss(module(batch[0]), batch)
        value = made[0] / made[1] if isinstance(made, tuple) else made
        losses.append(float(made[0].detach() if isinstance(made, tuple) else made.detach()))
        for name, gradient in zip(parameters, torch.autograd.grad(value, list(parameters.values())), strict=True):
            sums[name] += gradient
        for stage, stepper in steppers.items():
            count = number % replicas[stage] + 1
            if count < replicas[stage] and number + 1 < len(batches):
                continue
            for name in names[stage]:
                parameters[name].data.copy_(versions[name][-1])
                parameters[name].grad = sums[name] / count
                sums[name] = torch.zeros_like(sums[name])
            if clip_norm is not None:
                squares = sum(float((parameters[name].grad ** 2).sum()) for name in names[stage])
                for name in names[stage]:
                    parameters[name].grad *= min(1.0, clip_norm / (squares**0.5 + 1e-6))
            stepper.step()
            for _ in range(count):
                schedulers[stage].step()
            for name in names[stage]:
                versions[name].append(parameters[name].detach().clone())
    return Trained(losses, {name: each[-1] for name, each in versions.items()})
