"""Synchronised batch normalisation: by the statistics of a whole micro-batch, however replicas divide it.

What ``torch.nn.SyncBatchNorm`` computes, by sums over ranks alone, so that it runs on CPUs, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm

from autopar.capture.graph import Layer
from autopar.runtime.batch_norm import calls_of, modules_of, override
from autopar.runtime.moments import gathered, pooled, track, unpacked
from autopar.runtime.transport import Transport

__all__ = ["SyncedBatchNorm", "synchronize"]


class SyncedBatchNorm(nn.Module):
    """Called in place of ``aten.batch_norm``, on all replicas of a stage in the same order.

    Its reductions are apart from those of gradients, which run meanwhile.
    """

    def __init__(self, transport: Transport, ranks: tuple[int, ...], rank: int) -> None:
        """Take what connects the replicas ``ranks``, of which ``rank`` is this one."""
        super().__init__()
        self._transport, self._ranks, self._rank = transport, ranks, rank

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn: bool,
    ) -> torch.Tensor:
        """Normalise a share, and track the whole micro-batch's statistics."""
        output, moments = _Normalize.apply(x, weight, bias, eps, self)  # type: ignore[no-untyped-call]
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                track(running_mean, running_var, moments, momentum)
        result: torch.Tensor = output
        return result

    def pool(self, moments: torch.Tensor) -> torch.Tensor:
        """Return the moments of all shares together."""
        return pooled(gathered(moments, self._transport, self._ranks, self._rank, apart=True))

    def add(self, sums: torch.Tensor) -> None:
        """Replace sums over a share by those over all."""
        self._transport.all_reduce(sums, self._ranks, apart=True).wait()


class _Normalize(Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        replicas: SyncedBatchNorm,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = _wide(x)
        variance, mean = torch.var_mean(wide, _all_but_channels(x), correction=0)
        count = x.numel() // x.shape[1]
        own = torch.cat([mean.new_full((1,), count), mean, variance * count])
        moments = replicas.pool(own.double())
        count_of_all, mean, squares = (each.to(wide.dtype) for each in unpacked(moments))
        variance = squares / count_of_all
        ctx.save_for_backward(x, weight, mean, (variance + eps).rsqrt(), count_of_all)
        ctx.replicas, ctx.types = replicas, [None if each is None else each.dtype for each in (weight, bias)]
        ctx.mark_non_differentiable(moments)
        return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, False), moments

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        x, weight, mean, scale, count = ctx.saved_tensors
        dims = _all_but_channels(x)
        wide = _wide(gradient)
        normal = (_wide(x) - _along(mean, x)) * _along(scale, x)
        sums = torch.stack([wide.sum(dims), (wide * normal).sum(dims)])
        of_bias, of_weight = sums.clone()
        of_x = None
        if ctx.needs_input_grad[0]:
            ctx.replicas.add(sums)
            mean_gradient, mean_product = (_along(each, x) for each in sums / count)
            factor = scale if weight is None else scale * weight
            of_x = ((wide - mean_gradient - normal * mean_product) * _along(factor, x)).to(x.dtype)
        return (
            of_x,
            of_weight.to(ctx.types[0]) if ctx.needs_input_grad[1] else None,
            of_bias.to(ctx.types[1]) if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in a type that sums can be taken in."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _along(channels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return channels.view(1, -1, *[1] * (x.dim() - 2))


def synchronize(layers: Sequence[Layer], norm: SyncedBatchNorm) -> None:
    """Let all batch normalisations of layers be done by ``norm``; changes their modules."""
    for layer in layers:
        changed = {}
        for module, node in calls_of(layer.module):
            module.add_submodule("batch_norm", norm)
            with module.graph.inserting_before(node):
                synced = module.graph.call_module("batch_norm", node.args)
            synced.meta = dict(node.meta)
            node.replace_all_uses_with(synced)
            module.graph.erase_node(node)
            changed[id(module)] = module
        for module in changed.values():
            module.recompile()
        for norm_module in modules_of(layer.module):
            _synchronize_module(norm_module, norm)


def _synchronize_module(module: _BatchNorm, norm: SyncedBatchNorm) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        module._check_input_dim(x)  # type: ignore[no-untyped-call]
        momentum = module.momentum or 0.0
        if module.num_batches_tracked is not None:
            counter = module.num_batches_tracked.add_(1)
            momentum = 1.0 / float(counter) if module.momentum is None else momentum
        running = module.running_mean, module.running_var
        output: torch.Tensor = norm(x, module.weight, module.bias, *running, True, momentum, module.eps, False)
        return output

    override(module, forward)
