"""Deferred batch normalisation: running statistics that are updated once per mini-batch.

Every share of a micro-batch is normalised by its own statistics, as ever. Running statistics take one step a mini-batch
towards those of all its samples, over all micro-batches and replicas, as they would in training without micro-batches
(Kim et al., "torchgpipe", 2020; the variance is the unbiased one that torch's own layer takes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from autopar.capture.graph import Layer
from autopar.errors import UsageError
from autopar.runtime.batch_norm import calls_of, modules_of, override
from autopar.runtime.moments import gathered, pooled, track
from autopar.runtime.transport import Transport

__all__ = ["DeferredBatchNorms", "deferred_batch_norm"]


def deferred_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    moments: torch.Tensor,
    eps: float,
    cudnn: bool,
) -> torch.Tensor:
    """Normalise by the input's own statistics, and pool its moments with ``moments`` in place."""
    # A momentum of 1 makes of the running statistics those of the input, which the kernel computes anyway.
    mean, variance = torch.zeros_like(running_mean), torch.zeros_like(running_mean)
    output = torch.batch_norm(x, weight, bias, mean, variance, True, 1.0, eps, cudnn)
    count = x.numel() // x.shape[1]
    with torch.no_grad():
        squares = variance * (count - 1) if count > 1 else torch.zeros_like(variance)
        parts = [torch.full_like(moments[:1], count), mean.to(moments.dtype), squares.to(moments.dtype)]
        moments.copy_(pooled(torch.stack([moments, torch.cat(parts)])))
    return output


@dataclass
class _Tracked:
    """Running statistics, and the moments of the present mini-batch: names of buffers of a module."""

    module: nn.Module
    moments: str
    mean: str
    variance: str
    counter: str | None
    momentum: float | None

    def own(self) -> torch.Tensor:
        return self.module.get_buffer(self.moments)

    def settle(self, moments: torch.Tensor) -> None:
        """Update the running statistics by those of a mini-batch, and begin the next one."""
        momentum = self.momentum
        if self.counter is not None:
            counter = self.module.get_buffer(self.counter).add_(1)
            momentum = 1.0 / float(counter) if momentum is None else momentum
        track(self.module.get_buffer(self.mean), self.module.get_buffer(self.variance), moments, momentum or 0.0)
        self.own().zero_()


class DeferredBatchNorms:
    """The batch normalisations of a rank's layers that keep running statistics."""

    def __init__(self, layers: Sequence[Layer], transport: Transport, ranks: tuple[int, ...], rank: int) -> None:
        """Let them collect moments, which live in buffers so that recomputation leaves them as they are.

        Args:
            layers: the rank's, whose modules are changed.
            transport: carries moments between replicas.
            ranks: the replicas, this rank among them.
            rank: which rank this is.

        Raises:
            UsageError: one is out of reach.
        """
        self._transport, self._ranks, self._rank = transport, ranks, rank
        self._tracked: list[_Tracked] = []
        for layer in layers:
            for graph, node in calls_of(layer.module):
                if node.args[3] is not None:
                    self._tracked.append(_deferred_call(layer, graph, node, len(self._tracked)))
            for module in modules_of(layer.module):
                if module.running_mean is not None:
                    self._tracked.append(_deferred_module(module))

    @torch.no_grad()
    def settle(self) -> None:
        """Update all running statistics by those of the mini-batch that ends; every replica does so at once."""
        if not self._tracked:
            return
        own = torch.cat([each.own() for each in self._tracked])
        replicated = len(self._ranks) > 1
        parts = gathered(own, self._transport, self._ranks, self._rank) if replicated else own[None]
        sizes = [each.own().numel() for each in self._tracked]
        for each, columns in zip(self._tracked, torch.split(parts, sizes, dim=1), strict=True):
            each.settle(pooled(columns))


def _deferred_call(layer: Layer, module: fx.GraphModule, node: fx.Node, index: int) -> _Tracked:
    x, weight, bias, mean, variance, _, momentum, eps, cudnn = node.args
    known = isinstance(mean, fx.Node) and isinstance(variance, fx.Node) and mean.op == variance.op == "get_attr"
    if module is not layer.module or not known:
        raise UsageError(
            f"`deferred_batch_norm`: layer {layer.name} normalises inside a block (of autocast, of no gradients) or by "
            "buffers that it computes, which cannot be deferred; leave the option out"
        )
    assert isinstance(mean, fx.Node)
    assert isinstance(variance, fx.Node)
    name, attribute = f"moments_{index}", str(mean.target)
    module.register_buffer(name, _no_moments(module.get_buffer(attribute)))
    with module.graph.inserting_before(node):
        moments = module.graph.get_attr(name)
        deferred = module.graph.call_function(deferred_batch_norm, (x, weight, bias, mean, moments, eps, cudnn))
    deferred.meta = dict(node.meta)
    node.replace_all_uses_with(deferred)
    module.graph.erase_node(node)
    counter = _uncounted(layer, module, attribute)
    module.recompile()
    assert isinstance(momentum, float)
    return _Tracked(module, name, attribute, str(variance.target), counter, momentum)


def _uncounted(layer: Layer, module: fx.GraphModule, mean: str) -> str | None:
    """Take the counting of micro-batches out of a graph; return the attribute of the counter, if there is one."""
    full_name = f"{layer.buffers[mean].rpartition('.')[0]}.num_batches_tracked"
    counter = next((attribute for attribute, name in layer.buffers.items() if name == full_name), None)
    for node in reversed(list(module.graph.nodes)):
        if counter is not None and _counts(node, counter) and not node.users:
            module.graph.erase_node(node)
    return counter


def _counts(node: fx.Node, counter: str) -> bool:
    """Whether a node adds one to the counter, or to what such a node returns."""
    if node.target is not torch.ops.aten.add_.Tensor or node.args[1] != 1:
        return False
    counted = node.args[0]
    return isinstance(counted, fx.Node) and (counted.target == counter or _counts(counted, counter))


def _deferred_module(module: _BatchNorm) -> _Tracked:
    assert module.running_mean is not None
    module.register_buffer("moments", _no_moments(module.running_mean), persistent=False)

    def forward(x: torch.Tensor) -> torch.Tensor:
        module._check_input_dim(x)  # type: ignore[no-untyped-call]
        assert module.running_mean is not None
        cudnn = torch.backends.cudnn.enabled
        affine = module.weight, module.bias
        return deferred_batch_norm(x, *affine, module.running_mean, module.get_buffer("moments"), module.eps, cudnn)

    override(module, forward)
    counter = None if module.num_batches_tracked is None else "num_batches_tracked"
    return _Tracked(module, "moments", "running_mean", "running_var", counter, module.momentum)


def _no_moments(running_mean: torch.Tensor) -> torch.Tensor:
    return torch.zeros(2 * running_mean.numel() + 1, dtype=torch.float64, device=running_mean.device)
