"""Training without flushes, in one process: every version of the weights is kept, and chosen by the policy's rule.

Nothing here knows of programs, ranks or depths in time: for micro-batch j of mini-batch t on stage s the rule says by
closed forms which weights its forward and its backward see. Between the two, weights are replaced behind autograd's
back, as PipeDream's code does. A parameter that stages share is as many parameters here as stages hold it, whose
gradients are added up; an update that comes some micro-batches late makes all that a stage sees older.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from math import ceil, floor
from typing import Any, NamedTuple

import torch
from torch import nn


class Question(NamedTuple):
    """Which micro-batch on which stage asks for weights."""

    mini_batch: int
    micro_batch: int
    stage: int


Rule = Callable[[Question], int]
"""How many updates the weights have that a forward sees."""


def stash(depths: Sequence[int], micro_batches: int) -> Rule:
    """PipeDream: max(0, floor((tT + j - K_s + 1) / T)); depths have in them by how much updates are late."""

    def rule(asked: Question) -> int:
        number = asked.mini_batch * micro_batches + asked.micro_batch
        return max(0, floor((number - depths[asked.stage] + 1) / micro_batches))

    return rule


def first_of_mini_batch(depths: Sequence[int], micro_batches: int) -> Rule:
    """XPipe: what is the newest when the mini-batch's first forward comes, from which all T are predicted."""
    newest = stash(depths, micro_batches)
    return lambda asked: newest(asked._replace(micro_batch=0))


RULES: dict[str, Callable[[Sequence[int], int], Rule]] = {
    "stash": stash,
    # The same with the first stage's depth, on every stage.
    "vertical-sync": lambda depths, micro_batches: stash([depths[0]] * len(depths), micro_batches),
    # PipeDream-2BW.
    "2bw": lambda depths, micro_batches: lambda asked: max(0, asked.mini_batch - 1),
    "predict": first_of_mini_batch,
    "pipemare": stash,
}
SAME_BACKWARD = ("stash", "vertical-sync", "2bw")
"""Policies whose backwards see what their forwards saw; others' see the newest weights, or what is made of them."""


class Trained(NamedTuple):
    losses: list[float]
    parameters: dict[str, torch.Tensor]


class Asked(NamedTuple):
    """What training is asked for, all but the model and its data."""

    policy: str
    depths: Sequence[int]
    micro_batches: int
    stage_of: Mapping[str, int]
    """Whose every parameter is."""
    anneal_steps: int = 1
    synchronous_steps: int = 0
    recomputes: bool = False
    """Whether each layer of a sequence runs forward again, under the weights of its backward."""
    lags: Sequence[int] = ()
    """By how many micro-batches each stage's updates are late; empty where none is."""
    shared: Sequence[tuple[str, str]] = ()
    """Parameters that are one, on two stages."""
    clip_norm: float | None = None
    """Of all gradients, those of shared parameters counted once."""
    skips: bool = False
    """Whether gradients that are not finite are no error: nothing is updated then."""
    seed: int | None = None
    """Of the run; None where no layer draws."""
    clips_stages: bool = False
    """Whether ``clip_norm`` bounds each stage's norm, by its own gradients."""
    xpipe: bool = False
    """Whether predictions are as many updates ahead as XPipe says."""
    rate_factors: Sequence[float] = ()
    """What each stage's rates are multiplied by from the start; empty: nothing."""

    def late(self, stage: int) -> int:
        return self.lags[stage] if self.lags else 0


class _Histories:
    """Weights by the number of their updates, and what is made of them."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], asked: Asked) -> None:
        depths = [depth + asked.late(stage) for stage, depth in enumerate(asked.depths)]
        self._asked, self._rule = asked, RULES[asked.policy](depths, asked.micro_batches)
        self.weights = [_copies(parameters)]
        self._predicted, self._corrected = [_copies(parameters)], [_copies(parameters)]
        self._differences = {name: torch.zeros_like(each) for name, each in parameters.items()}

    def forward(self, name: str, question: Question) -> torch.Tensor:
        """Return what a forward sees."""
        every = self._predicted if self._asked.policy == "predict" else self.weights
        return every[self._version(question)][name]

    def backward(self, name: str, question: Question) -> torch.Tensor:
        """Return what its backward sees."""
        if self._asked.policy in SAME_BACKWARD:
            return self.forward(name, question)
        made = self._asked.policy == "pipemare" or self._asked.xpipe
        every = self._corrected if made else self.weights
        number = question.mini_batch * self._asked.micro_batches + question.micro_batch
        return every[max(0, (number - self._asked.late(question.stage)) // self._asked.micro_batches)][name]

    def _version(self, question: Question) -> int:
        first = self._asked.synchronous_steps
        if question.mini_batch < first:
            return question.mini_batch
        return first + self._rule(question._replace(mini_batch=question.mini_batch - first))

    def add(self, parameters: Mapping[str, nn.Parameter], steppers: Mapping[int, torch.optim.Optimizer]) -> None:
        """Take in the weights after another update."""
        self.weights.append(_copies(parameters))
        forward, backward = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for name, each in parameters.items():
            move = _move(self._asked, each, name, steppers)
            ahead = _ahead(self._asked, self._asked.stage_of[name])
            forward[name], backward[name] = (each.detach() - count * move for count in ahead)
        self._predicted.append(forward)
        self._corrected.append(backward if self._asked.xpipe else self._correct(len(self.weights) - 2))

    def _correct(self, step: int) -> dict[str, torch.Tensor]:
        """PipeMare's T2, after the update of a step."""
        found = {}
        for name, stage in self._asked.stage_of.items():
            tau, newest = delay_of(self._asked, stage), self.weights[-1][name]
            if tau and step >= self._asked.synchronous_steps:
                keep = 0.135 ** (1 / tau)
                change = newest - self.weights[-2][name]
                self._differences[name] = keep * self._differences[name] + (1 - keep) * change
            found[name] = newest - tau * self._differences[name]
        return found


def train(
    module: nn.Module,
    asked: Asked,
    batches: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]],
    loss: Callable[[torch.Tensor, tuple[torch.Tensor, torch.Tensor]], torch.Tensor],
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler],
) -> Trained:
    """Train on mini-batches of micro-batches."""
    parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
    # Rates are of stages.
    steppers = {
        stage: optimizer([parameters[name] for name, at in asked.stage_of.items() if at == stage])
        for stage in sorted(set(asked.stage_of.values()))
    }
    for stage, stepper in steppers.items() if asked.rate_factors else ():
        for group in stepper.param_groups:
            group["lr"] *= asked.rate_factors[stage]
    schedulers = [scheduler(each) for each in steppers.values()]
    histories, losses, moment = _Histories(parameters, asked), [], seeded(module, asked.seed)
    for step, parts in enumerate(batches):
        total = {name: torch.zeros_like(each) for name, each in parameters.items()}
        mean_loss = counted = 0.0
        for micro_batch, batch in enumerate(parts):
            moment[:] = [step, micro_batch]
            questions = {name: Question(step, micro_batch, stage) for name, stage in asked.stage_of.items()}
            for name, question in questions.items():
                parameters[name].data.copy_(histories.forward(name, question))
            inputs, value, count = _forward(module, batch, loss, len(parts), apart=asked.recomputes)
            for name, question in questions.items():
                parameters[name].data.copy_(histories.backward(name, question))
            again = partial(_loss_part, batch, loss, len(parts))
            gradients = _gradients(module, inputs, value, again, list(parameters.values()))
            for name, gradient in zip(parameters, gradients, strict=True):
                total[name] += gradient
            mean_loss += float(value.detach())
            counted += float(count)
        for name, parameter in parameters.items():
            parameter.data.copy_(histories.weights[-1][name])
            parameter.grad = total[name] / (counted or 1.0)
        _share(parameters, asked)
        _clip(parameters, asked)
        if not asked.skips or all(bool(each.grad.isfinite().all()) for each in parameters.values()):
            for stage, stepper in steppers.items():
                _step(stepper, _rate_factor(asked, stage, step))
        for each in schedulers:
            each.step()
        losses.append(mean_loss)
        histories.add(parameters, steppers)
    return Trained(losses, histories.weights[-1])


def seeded(module: nn.Module, seed_of_run: int | None) -> list[int]:
    """Seed every layer as docs/howto/verify.md says, when it runs in the step and micro-batch that is set."""
    moment = [0, 0]

    def seeding(name: str) -> Callable[..., None]:
        def seed(*_: object) -> None:
            digest = hashlib.sha256(f"{seed_of_run}/{name}/{moment[0]}/{moment[1]}/0".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)

        return seed

    for name, layer in module.named_children() if seed_of_run is not None else ():
        layer.register_forward_pre_hook(seeding(name))
    return moment


def _forward(
    module: nn.Module,
    batch: tuple[torch.Tensor, torch.Tensor],
    loss: Callable[..., Any],
    micro_batches: int,
    *,
    apart: bool,
) -> tuple[list[torch.Tensor], torch.Tensor, float]:
    """Return the inputs of all layers, if they are run apart, and of the loss; its part of a mean, or sum and count."""
    if not apart:
        return [], *_counted(loss(module(batch[0]), batch), micro_batches)
    assert isinstance(module, nn.Sequential)
    inputs = [batch[0]]
    for layer in module:
        inputs.append(layer(inputs[-1]).detach().requires_grad_())
    return inputs, *_counted(loss(inputs[-1], batch), micro_batches)


def _counted(made: torch.Tensor | tuple[torch.Tensor, torch.Tensor], micro_batches: int) -> tuple[torch.Tensor, float]:
    return (made[0], float(made[1])) if isinstance(made, tuple) else (made / micro_batches, 0.0)


def _loss_part(
    batch: tuple[torch.Tensor, torch.Tensor], loss: Callable[..., Any], micro_batches: int, output: torch.Tensor
) -> torch.Tensor:
    return _counted(loss(output, batch), micro_batches)[0]


def _share(parameters: Mapping[str, nn.Parameter], asked: Asked) -> None:
    for one, other in asked.shared:
        total = parameters[one].grad + parameters[other].grad
        parameters[one].grad, parameters[other].grad = total, total.clone()


def _clip(parameters: Mapping[str, nn.Parameter], asked: Asked) -> None:
    again = {other for _, other in asked.shared}
    stages = sorted(set(asked.stage_of.values())) if asked.clips_stages else [None]
    for stage in stages if asked.clip_norm is not None else ():
        own = {name: each for name, each in parameters.items() if stage in (None, asked.stage_of[name])}
        squares = sum(float((each.grad**2).sum()) for name, each in own.items() if name not in again)
        factor = min(1.0, asked.clip_norm / (squares**0.5 + 1e-6))
        for each in own.values():
            each.grad.mul_(factor)


def _gradients(
    module: nn.Module,
    inputs: list[torch.Tensor],
    value: torch.Tensor,
    of_output: Callable[[torch.Tensor], torch.Tensor],
    parameters: list[nn.Parameter],
) -> Sequence[torch.Tensor]:
    """Return the parameters' gradients; layers that were run apart run again, under the weights that are there.

    The last one does so together with the loss, ``of_output``.
    """
    if not inputs:
        return torch.autograd.grad(value, parameters)
    assert isinstance(module, nn.Sequential)
    found, gradient = list[torch.Tensor](), None
    for layer, given in zip(reversed(module), reversed(inputs[:-1]), strict=True):
        own, leaf = list(layer.parameters()), given.detach().requires_grad_()
        made = layer(leaf) if found else of_output(layer(leaf))
        gradient, *gradients = torch.autograd.grad(made, [leaf, *own], gradient)
        found = [*gradients, *found]
    return found


def _copies(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in parameters.items()}


def _step(stepper: torch.optim.Optimizer, factor: float) -> None:
    rates = [group["lr"] for group in stepper.param_groups]
    for group in stepper.param_groups:
        group["lr"] *= factor
    stepper.step()
    for group, rate in zip(stepper.param_groups, rates, strict=True):
        group["lr"] = rate


def delay_of(asked: Asked, stage: int) -> float:
    """PipeMare's tau: the mean of updates between a forward and its own update."""
    count = asked.micro_batches
    if asked.policy == "2bw":
        # Every update is as late as that.
        return 1.0
    return sum(max(0, ceil((asked.depths[stage] - 1 - index) / count)) for index in range(count)) / count


def _rate_factor(asked: Asked, stage: int, step: int) -> float:
    if asked.policy != "pipemare" or step < asked.synchronous_steps:
        return 1.0
    share = min((step - asked.synchronous_steps) / asked.anneal_steps, 1.0)
    return float(max(1.0, delay_of(asked, stage)) ** -(1 - share))


def _ahead(asked: Asked, stage: int) -> tuple[int, int]:
    """Return how many updates ahead forwards and backwards are predicted."""
    count, stages = asked.micro_batches, len(asked.depths)
    if not asked.xpipe:
        return ceil((asked.depths[stage] + asked.late(stage) - 1) / count), 0
    exact = (stages + count - Fraction(stage, 2) - 2) / count, Fraction(count + stage // 2 - 1, count)
    # Halves are rounded up.
    forward, backward = (floor(each + Fraction(1, 2)) for each in exact)
    return forward, backward


def _move(asked: Asked, parameter: nn.Parameter, name: str, steppers: Mapping[int, torch.optim.Optimizer]) -> Any:  # noqa: ANN401
    """Return what an update is expected to take from a parameter."""
    stage = asked.stage_of[name]
    state, group = steppers[stage].state[parameter], steppers[stage].param_groups[0]
    move: Any = 0.0
    if state.get("momentum_buffer") is not None:
        move = group["lr"] * state["momentum_buffer"]
    elif "exp_avg" in state:
        count, (one, two) = float(state["step"]), group["betas"]
        move = group["lr"] * (state["exp_avg"] / (1 - one**count))
        move = move / ((state["exp_avg_sq"] / (1 - two**count)).sqrt() + group["eps"])
    return move
