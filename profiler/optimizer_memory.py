"""What an optimizer keeps for parameters, and what its step holds for a while, found on tensors without data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.capture import UserModel
from autopar.capture.source import NamedParameters, user_code
from autopar.capture.storages import StorageTracker


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes of an optimizer, by kind of layer."""

    state: Mapping[str, int]
    workspace: Mapping[str, int]
    """Beside parameters, gradients and state, while the optimizer steps."""
    at_once: bool
    """Whether it works on all parameters at once, so that layers' workspaces add up."""


def optimizer_memory(user: UserModel, layers: Mapping[str, NamedParameters], device: torch.device) -> OptimizerMemory:
    """Return the bytes of the user's optimizer for every layer's trained parameters, whose shapes alone matter.

    On CUDA, optimizers of torch work on many parameters at once unless told otherwise; here they are told so, because
    tensors without data lie on no device. An optimizer that reads values is stepped on real ones, layer by layer.
    """
    found = {kind: _stepped(user, [parameters], device) for kind, parameters in layers.items()}
    some = [kind for kind, parameters in layers.items() if parameters]
    # Of a single kind there can be several layers, too.
    several = some if len(some) > 1 else 2 * some
    total = _stepped(user, [layers[kind] for kind in several], device)[1]
    each = [found[kind][1] for kind in several]
    return OptimizerMemory(
        state={kind: state for kind, (state, _) in found.items()},
        workspace={kind: workspace for kind, (_, workspace) in found.items()},
        at_once=2 * total > max(each, default=0) + sum(each),
    )


def work_at_once(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of torch work on many parameters at once unless told otherwise, as it would on CUDA."""
    for group in optimizer.param_groups:
        if group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True


def _stepped(user: UserModel, groups: Iterable[NamedParameters], device: torch.device) -> tuple[int, int]:
    """Return the bytes of state and of workspace; the optimizer makes its state in its first step."""
    parameters = [(name, parameter) for group in groups for name, parameter in group if parameter.requires_grad]
    if not parameters:
        return 0, 0
    try:
        return _step_twice(user, parameters, device, FakeTensorMode())
    except Exception:
        # Fake tensors have no values that the optimizer could read; whatever it does wrong, it does with real ones too.
        with user_code(user.path, "the optimizer's step() raised"):
            return _step_twice(user, parameters, device, nullcontext())


def _step_twice(
    user: UserModel, parameters: NamedParameters, device: torch.device, mode: AbstractContextManager[object]
) -> tuple[int, int]:
    with mode:
        # Not zeros: an optimizer may divide by a norm.
        copies = [(name, nn.Parameter(torch.full(each.shape, 0.5, dtype=each.dtype))) for name, each in parameters]
        for _, copy in copies:
            copy.grad = torch.full_like(copy, 1e-3)
        with StorageTracker() as tracker:
            optimizer = user.make_optimizer(copies)
            if device.type == "cuda":
                work_at_once(optimizer)
            optimizer.step()
            tracker.peak_bytes = tracker.alive_bytes
            optimizer.step()
        held: dict[int, int] = {}
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    held[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
        return sum(held.values()), int(tracker.peak_bytes - tracker.alive_bytes)
