"""Histories: every version of the weights of a plain loop that trains by a weight policy's rule.

In come a plan without flushes and the parameters of the whole model; out comes, for every micro-batch, which weights
its forward and its backward see on each stage. Nothing is known of programs or of time: versions are counted by the
policy's own rule (:mod:`autopar.policies`), and parameters are overwritten in place, so that backwards read whatever is
there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.depths import StageDepths, delay, updates_ahead
from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.policies import DECAY, POLICIES, rate_factor

_Tensors = dict[str, torch.Tensor]


def check_comparable(plan: Plan) -> None:
    """Refuse a plan whose rule no single process can follow.

    Raises:
        UsageError: says what to do.
    """
    # By its rule, 2BW has all stages see one version.
    if plan.tied and not POLICIES[plan.weight_policy].sums_gradients:
        raise UsageError(
            f"{plan.tied[0].parameter} is shared between stages that see different versions of it, which one process "
            "does not; plan with `policy='2bw'` or `policy='sync'` to compare"
        )
    if POLICIES[plan.weight_policy].prepares and any(stage.recompute for stage in plan.stages):
        raise UsageError(
            f"under weight policy {plan.weight_policy}, numbers depend on what is recomputed, and the plain loop "
            "recomputes nothing; plan with `recompute='none'` to compare"
        )


def most_versions(plan: Plan) -> int:
    """Return how many versions of a model's weights are kept at a time, at most."""
    if not plan.policy.keeps_versions:
        return 0
    every = zip(plan.stages, plan.depths, strict=True)
    return 2 + max(-(-(each.depth + each.lag) // each.micro_batches) * stage.period for stage, each in every)


class _Version(NamedTuple):
    """The weights after some updates, and what is made of them."""

    weights: _Tensors
    prediction: _Tensors
    correction: _Tensors


class WeightHistories:
    """The versions of a model's trained parameters, counted from 0.

    Where replicas of a stage take turns, its weights change after as many mini-batches.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        stage_of: Mapping[str, int],
        optimizers: Mapping[int, torch.optim.Optimizer],
        plan: Plan,
    ) -> None:
        """Begin with the parameters as they are; ``optimizers`` are those of stages."""
        self._optimizers = optimizers
        self._plan, self._policy = plan, POLICIES[plan.weight_policy]
        self._parameters = {name: each for name, each in parameters.items() if name in stage_of and each.requires_grad}
        self._stage_of = stage_of
        self._depths, self._periods = plan.depths, [stage.period for stage in plan.stages]
        first = self._copies()
        self._versions = {0: _Version(first, first, first)}
        self._differences = {name: torch.zeros_like(each) for name, each in first.items()}
        self._kept = most_versions(plan)

    def under_versions(self, step: int, micro_batch: int, parts: Iterator[Any]) -> Iterator[Any]:
        """Yield what ``parts`` does: each is made under the weights of forwards, and used under those of backwards."""
        while True:
            for name, parameter in self._parameters.items():
                parameter.data.copy_(self._of_forward(name, step, micro_batch))
            part = next(parts, None)
            if part is None:
                break
            for name, parameter in self._parameters.items():
                parameter.data.copy_(self._of_backward(name, step, micro_batch))
            yield part
        for name, parameter in self._parameters.items():
            parameter.data.copy_(self._versions[step].weights[name])

    def step(self, step: int, stages: Iterable[int]) -> None:
        """Update some stages for a mini-batch."""
        for stage in stages:
            optimizer = self._optimizers[stage]
            rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self._rate_factor(self._depths[stage], step)
            optimizer.step()
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def add(self, step: int) -> None:
        """Take in the weights after the update of a mini-batch, rates being those of the next one."""
        weights, prepares = self._copies(), self._policy.prepares
        prediction = correction = weights
        if prepares == "predict":
            ahead = {name: updates_ahead(self._depths[self._stage_of[name]]) for name in weights}
            prediction = {name: self._predict(name, ahead[name].forward) for name in weights}
            correction = {name: self._predict(name, ahead[name].backward) for name in weights}
        elif prepares == "correct":
            correction = {name: self._correct(name, step) for name in weights}
        self._versions[step + 1] = _Version(weights, prediction, correction)
        self._versions.pop(step + 1 - self._kept, None)

    def _copies(self) -> _Tensors:
        return {name: each.detach().clone() for name, each in self._parameters.items()}

    def _place(self, step: int, micro_batch: int) -> tuple[int, int]:
        """Return the mini-batch from which versions are counted, and the micro-batch counted from there."""
        first = self._plan.synchronous_steps if step >= self._plan.synchronous_steps else step
        return first, (step - first) * self._plan.micro_batches + micro_batch

    def _of_forward(self, name: str, step: int, micro_batch: int) -> torch.Tensor:
        depths, period = self._depths[self._stage_of[name]], self._periods[self._stage_of[name]]
        predicts = self._policy.prepares == "predict"
        first, number = self._place(step, 0 if predicts else micro_batch)
        updates = max(0, self._policy.forward_version(depths, number // period))
        version = self._versions[first + updates * period]
        return (version.prediction if predicts else version.weights)[name]

    def _of_backward(self, name: str, step: int, micro_batch: int) -> torch.Tensor:
        depths, period = self._depths[self._stage_of[name]], self._periods[self._stage_of[name]]
        first, number = self._place(step, micro_batch)
        updates = max(0, self._policy.backward_version(depths, number // period))
        return self._versions[first + updates * period].correction[name]

    def _rate_factor(self, depths: StageDepths, step: int) -> float:
        counted = step - self._plan.synchronous_steps
        if self._plan.anneal_steps is None or counted < 0:
            return 1.0
        return rate_factor(delay(depths), counted, self._plan.anneal_steps)

    def _predict(self, name: str, ahead: int) -> torch.Tensor:
        """Return a parameter as so many updates are expected to leave it, all alike."""
        parameter, stage = self._parameters[name], self._stage_of[name]
        state = self._optimizers[stage].state.get(parameter, {})
        if not state or not ahead:
            return parameter.detach().clone()
        groups = self._optimizers[stage].param_groups
        group = next(each for each in groups if any(own is parameter for own in each["params"]))
        if {"exp_avg", "exp_avg_sq", "step"} <= state.keys():
            count, (first, second) = float(state["step"]), group["betas"]
            mean, square = state["exp_avg"] / (1 - first**count), state["exp_avg_sq"] / (1 - second**count)
            move: torch.Tensor = mean / (square.sqrt() + group["eps"])
        elif state.get("momentum_buffer") is not None:
            move = state["momentum_buffer"]
        else:
            # Of another optimizer, whose ranks refuse it.
            return parameter.detach().clone()
        rate: float | torch.Tensor = group["lr"]
        return parameter.detach() - ahead * rate * move

    def _correct(self, name: str, step: int) -> torch.Tensor:
        """Return a parameter less what it has changed by, after the update of a mini-batch."""
        tau, newest = delay(self._depths[self._stage_of[name]]), self._parameters[name].detach()
        if tau and step >= self._plan.synchronous_steps:
            keep, change = DECAY ** (1 / tau), newest - self._versions[step].weights[name]
            self._differences[name] = keep * self._differences[name] + (1 - keep) * change
        return newest - tau * self._differences[name]
