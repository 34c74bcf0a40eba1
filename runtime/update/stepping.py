"""Stepping: what must hold of the user's optimizer so that ranks, each with its own, step as one for all would."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from autopar.capture.graph import LayerGraph
from autopar.capture.optimizer import Settings, needs_all, settings_of
from autopar.capture.source import UserModel
from autopar.errors import ModelError, UsageError
from autopar.formats.plan import Plan


def whole_settings(user: UserModel, module: nn.Module) -> Settings | None:
    """Return what the user's optimizer gives every parameter when it is given all of the model's.

    None of a model without values, where the optimizer does not take parameters without.

    Raises:
        ModelError: ``optimizer()`` raises.
    """
    trained = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
    try:
        found = settings_of(user, trained)
        first = {id(each): name for name, each in trained}
        # Under any of its names, a tied parameter is found.
        names = [(name, first.get(id(each))) for name, each in module.named_parameters(remove_duplicate=False)]
        return {name: found[known] for name, known in names if known in found}
    except ModelError:
        if any(each.is_meta for _, each in trained):
            return None
        raise


def check_together(user: UserModel, module: nn.Module, graph: LayerGraph, plan: Plan) -> None:
    """Refuse an optimizer that needs all parameters at once where no rank has all of them.

    Raises:
        UsageError: says what to do.
    """
    holding = 0
    for chunks in plan.groups:
        layers = [graph.layer(name) for stage in chunks for name in plan.stages[stage].layers]
        holding += any(each.requires_grad for layer in layers for _, each in layer.named_parameters())
    trained = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
    why = needs_all(user, trained) if holding > 1 else None
    if why is not None:
        raise UsageError(
            f"{user.path}: the optimizer's step {why}, and the plan puts them on the ranks of {holding} groups of "
            "devices; plan with `max_stages=1` (or use `clip_norm` in place of a norm of the optimizer's own)"
        )


def left_out(
    optimizer: torch.optim.Optimizer, given: Mapping[str, nn.Parameter], user: UserModel, whole: Collection[str] | None
) -> list[str]:
    """Return the names of the parameters that an optimizer was given and does not step.

    Args:
        optimizer: a rank's.
        given: what it was made for.
        user: whose it is.
        whole: the names of those that one for the whole model steps, if that is known.

    Raises:
        ModelError: it steps something that it was not given.
    """
    names = {id(parameter): name for name, parameter in given.items()}
    stepped = [each for group in optimizer.param_groups for each in group["params"]]
    others = [each for each in stepped if id(each) not in names]
    if others:
        raise ModelError(
            f"{user.path}: optimizer() steps {len(others)} parameters that it was not given, the first of shape "
            f"{tuple(others[0].shape)}: ranks train copies of their own, so make it of its argument alone; where it "
            "goes by names, call the argument named_parameters to be given pairs (name, parameter)"
        )
    found = {names[id(each)] for each in stepped}
    return [name for name in given if name not in found and (whole is None or name not in whole)]


def check_settings(user: UserModel, given: Mapping[str, nn.Parameter], whole: Settings, rank: int) -> None:
    """Hold what a rank's optimizer gives its parameters against what one for all of the model's parameters does.

    Raises:
        ModelError: a parameter gets something else; names it and the setting.
    """
    own = settings_of(user, list(given.items()))
    for name in given:
        said = _difference(own.get(name), whole.get(name))
        if said is not None:
            raise ModelError(
                f"{user.path}: optimizer() {said.format(name=name, rank=rank)}; let it go by names, which are the same "
                "on all ranks: call its argument named_parameters to be given pairs (name, parameter)"
            )


def _difference(own: list[dict[str, object]] | None, whole: list[dict[str, object]] | None) -> str | None:
    if own is None or whole is None:
        if own is whole:
            return None
        here, there = ("steps", "does not") if whole is None else ("does not step", "does")
        return f"{here} {{name}} when it is given the parameters of rank {{rank}}, and {there} when it is given all"
    for step, (mine, other) in enumerate(zip(own, whole, strict=False)):
        for key in {**other, **mine}:
            if mine.get(key) != other.get(key):
                when = f" in step {step}" if step else ""
                return (
                    f"gives {{name}} {key}={_short(mine.get(key))}{when} when it is given the parameters of rank "
                    f"{{rank}}, and {key}={_short(other.get(key))} when it is given all of the model's"
                )
    return None


def _short(value: object) -> str:
    return str(value)[:60].replace("{", "{{").replace("}", "}}")
