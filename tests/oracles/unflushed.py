"""Training without flushes, in one process: every version of the weights is kept, and chosen by the policy's rule.

Nothing here knows of programs, ranks or depths in time: for micro-batch j of mini-batch t on stage s the rule says how
many updates the weights have that it sees, by a closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import floor
from typing import NamedTuple

import torch
from torch import nn


class Question(NamedTuple):
    """Which micro-batch on which stage asks for weights."""

    mini_batch: int
    micro_batch: int
    stage: int


Rule = Callable[[Question], int]
"""How many updates the weights have that a forward and its backward see."""


def stash(depths: Sequence[int], micro_batches: int) -> Rule:
    """PipeDream: max(0, floor((tT + j - K_s + 1) / T))."""

    def rule(asked: Question) -> int:
        number = asked.mini_batch * micro_batches + asked.micro_batch
        return max(0, floor((number - depths[asked.stage] + 1) / micro_batches))

    return rule


def vertical_sync(depths: Sequence[int], micro_batches: int) -> Rule:
    """The same with the first stage's depth, on every stage."""
    return stash([depths[0]] * len(depths), micro_batches)


def two_buffers(depths: Sequence[int], micro_batches: int) -> Rule:
    """PipeDream-2BW: max(0, t - 1)."""
    return lambda asked: max(0, asked.mini_batch - 1)


RULES: dict[str, Callable[[Sequence[int], int], Rule]] = {
    "stash": stash,
    "vertical-sync": vertical_sync,
    "2bw": two_buffers,
}


class Trained(NamedTuple):
    losses: list[float]
    parameters: dict[str, torch.Tensor]


def train(
    module: nn.Module,
    stage_of: Mapping[str, int],
    rule: Rule,
    batches: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]],
    loss: Callable[[torch.Tensor, tuple[torch.Tensor, torch.Tensor]], torch.Tensor],
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler],
) -> Trained:
    """Train on mini-batches of micro-batches; ``stage_of`` says whose every parameter is."""
    parameters = dict(module.named_parameters())
    stepping = optimizer(list(parameters.values()))
    scheduling = scheduler(stepping)
    history = [{name: each.detach().clone() for name, each in parameters.items()}]
    losses = []
    for mini_batch, parts in enumerate(batches):
        total, means = {name: torch.zeros_like(each) for name, each in parameters.items()}, 0.0
        for micro_batch, batch in enumerate(parts):
            seen = {
                name: history[rule(Question(mini_batch, micro_batch, stage))][name].clone().requires_grad_()
                for name, stage in stage_of.items()
            }
            mean = loss(torch.func.functional_call(module, seen, (batch[0],)), batch)
            gradients = torch.autograd.grad(mean / len(parts), list(seen.values()))
            for name, gradient in zip(seen, gradients, strict=True):
                total[name] += gradient
            means += float(mean.detach()) / len(parts)
        for name, parameter in parameters.items():
            parameter.grad = total[name]
        stepping.step()
        scheduling.step()
        losses.append(means)
        history.append({name: each.detach().clone() for name, each in parameters.items()})
    return Trained(losses, history[-1])
