"""Batch normalisation of a rank's layers: as every layer does it, deferred, or synchronised.

In come a rank's layers, captured as graphs or listed as modules, and what the user asks for; out go layers that
normalise so, and what a step calls at its end. Left alone, every share of a micro-batch is normalised by its own
statistics.

Deferred, it still is, but running statistics take one step a mini-batch towards those of all its samples, over all
micro-batches and replicas, as they would in training without micro-batches (Kim et al., "torchgpipe", 2020; the
variance is the unbiased one that torch's own layer takes). Synchronised, a share is normalised by the statistics of its
whole micro-batch, however replicas divide it: what ``torch.nn.SyncBatchNorm`` computes, by sums over ranks alone, so
that it runs on CPUs, too.

Both pool moments, vectors of 2 channels + 1 numbers: the count, the means, and the sums of squared deviations from
them. Pooling is that of Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances", 1979, which does not lose digits where means are large, as sums of squares do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.autograd import Function
from torch.fx.node import Argument
from torch.nn.modules.batchnorm import _BatchNorm

from autopar.capture.graph import Layer
from autopar.errors import UsageError
from autopar.runtime.messages.transport import Transport, synced_groups
from autopar.runtime.stage.layers import rewritable
from autopar.runtime.stage.parameters import RankInputs


def normalizing(
    inputs: RankInputs, layers: dict[int, list[Layer]]
) -> tuple[dict[int, list[Layer]], Callable[[], None]]:
    """Return a rank's layers, with batch normalisation as it was asked for, and what is called at the end of a step.

    Layers of the captured model stay what they are.

    Raises:
        UsageError: something is asked for, and the model has no batch normalisation, or one that cannot be deferred.
    """
    plan, rank, settings = inputs.plan, inputs.rank, inputs.settings
    asked = [f"`{name}_batch_norm`" for name in ("deferred", "sync") if getattr(settings, f"{name}_batch_norm")]
    if not asked:
        return layers, lambda: None
    if not any(_calls_of(layer.module) or _modules_of(layer.module) for layer in inputs.graph.layers):
        raise UsageError(f"{asked[0]}: the model has no batch normalisation; leave the option out")
    layers = {index: [rewritable(layer) for layer in each] for index, each in layers.items()}
    mine = [layer for each in layers.values() for layer in each]
    replicas = _Replicas(inputs.transport, plan.ownership.ranks[rank].copies, rank)
    if settings.deferred_batch_norm:
        return layers, _defer(mine, replicas)
    if replicas.ranks in synced_groups(plan):
        _synchronize(mine, _SyncedBatchNorm(replicas))
    return layers, lambda: None


@dataclass(frozen=True)
class _Replicas:
    """What connects the replicas of a stage, of which this rank is one."""

    transport: Transport
    ranks: tuple[int, ...]
    rank: int

    def pool(self, own: torch.Tensor, sizes: Sequence[int], *, apart: bool = False) -> list[torch.Tensor]:
        """Return the pooled moments of all replicas, given this one's of several normalisations, one behind the other.

        With ``apart``, the sum over ranks is apart from those of gradients, which run meanwhile.
        """
        parts = own[None]
        if len(self.ranks) > 1:
            parts = own.new_zeros(len(self.ranks), own.numel())
            parts[self.ranks.index(self.rank)] = own
            self.transport.all_reduce(parts, self.ranks, apart=apart).wait()
        return [_pool_moments(columns) for columns in torch.split(parts, list(sizes), dim=1)]


def _calls_of(module: nn.Module) -> list[tuple[fx.GraphModule, fx.Node]]:
    """Return the nodes of a captured layer, sub-graphs included, that normalise by the statistics of their input."""
    graphs = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
    nodes = [(part, node) for part in graphs for node in part.graph.nodes]
    return [(part, node) for part, node in nodes if node.target is torch.ops.aten.batch_norm.default and node.args[5]]


def _modules_of(module: nn.Module) -> list[_BatchNorm]:
    """Return the modules of a layer of ``layers(model)`` that normalise by the statistics of their input."""
    return [each for each in module.modules() if isinstance(each, _BatchNorm) and each.training]


def _replace_call(
    module: fx.GraphModule, node: fx.Node, target: Callable[..., object] | str, args: tuple[Argument, ...]
) -> None:
    """Put the call of a function, or of a submodule by its name, in the place of a node."""
    graph = module.graph
    with graph.inserting_before(node):
        made = graph.call_module(target, args) if isinstance(target, str) else graph.call_function(target, args)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    module.graph.erase_node(node)


def _unpack_moments(moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return count, means and sums of squared deviations; of rows of moments, columns of them."""
    channels = moments.shape[-1] // 2
    count, means, squares = torch.split(moments, [1, channels, channels], dim=-1)
    return count, means, squares


def _pool_moments(parts: torch.Tensor) -> torch.Tensor:
    """Return the moments of all samples together, given those of parts as rows; parts may be empty."""
    counts, means, squares = _unpack_moments(parts)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count.clamp(min=1)
    return torch.cat([count, mean, (squares + counts * (means - mean) ** 2).sum(0)])


def _track(running_mean: torch.Tensor, running_var: torch.Tensor, moments: torch.Tensor, momentum: float) -> None:
    """Move running statistics towards new ones, as ``torch.nn.BatchNorm`` does; the variance is the unbiased one."""
    count, mean, squares = _unpack_moments(moments)
    variance = squares / (count - 1).clamp(min=1)
    running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
    running_var.mul_(1 - momentum).add_(variance.to(running_var.dtype), alpha=momentum)


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
        moments.copy_(_pool_moments(torch.stack([moments, torch.cat(parts)])))
    return output


@dataclass
class _RunningStatistics:
    """Running statistics, and the moments of the present mini-batch: names of buffers of a module."""

    module: nn.Module
    moments: str
    mean: str
    variance: str
    counter: str | None
    momentum: float | None

    def own(self) -> torch.Tensor:
        return self.module.get_buffer(self.moments)

    def update(self, moments: torch.Tensor) -> None:
        """Update the running statistics by those of a mini-batch, and begin the next one."""
        momentum = self.momentum
        if self.counter is not None:
            counter = self.module.get_buffer(self.counter).add_(1)
            momentum = 1.0 / float(counter) if momentum is None else momentum
        _track(self.module.get_buffer(self.mean), self.module.get_buffer(self.variance), moments, momentum or 0.0)
        self.own().zero_()


def _defer(layers: Iterable[Layer], replicas: _Replicas) -> Callable[[], None]:
    """Let layers collect moments, which live in buffers so that recomputation leaves them as they are.

    Returns:
        What updates all running statistics by those of the mini-batch that ends; every replica calls it at once.

    Raises:
        UsageError: a normalisation is out of reach.
    """
    found: list[_RunningStatistics] = []
    for layer in layers:
        for graph, node in _calls_of(layer.module):
            if node.args[3] is not None:
                found.append(_deferred_call(layer, graph, node, len(found)))
        found += [_deferred_module(each) for each in _modules_of(layer.module) if each.running_mean is not None]

    @torch.no_grad()
    def update() -> None:
        if found:
            own = [each.own() for each in found]
            pooled = replicas.pool(torch.cat(own), [each.numel() for each in own])
            for each, moments in zip(found, pooled, strict=True):
                each.update(moments)

    return update


def _deferred_call(layer: Layer, module: fx.GraphModule, node: fx.Node, index: int) -> _RunningStatistics:
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
    _replace_call(module, node, deferred_batch_norm, (x, weight, bias, mean, moments, eps, cudnn))
    counter = _remove_counter_updates(layer, module, attribute)
    module.recompile()
    assert isinstance(momentum, float)
    return _RunningStatistics(module, name, attribute, str(variance.target), counter, momentum)


def _remove_counter_updates(layer: Layer, module: fx.GraphModule, mean: str) -> str | None:
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


def _deferred_module(module: _BatchNorm) -> _RunningStatistics:
    assert module.running_mean is not None
    module.register_buffer("moments", _no_moments(module.running_mean), persistent=False)

    def forward(x: torch.Tensor) -> torch.Tensor:
        module._check_input_dim(x)  # type: ignore[no-untyped-call]
        assert module.running_mean is not None
        cudnn = torch.backends.cudnn.enabled
        affine = module.weight, module.bias
        return deferred_batch_norm(x, *affine, module.running_mean, module.get_buffer("moments"), module.eps, cudnn)

    module.forward = forward  # type: ignore[assignment, method-assign]
    counter = None if module.num_batches_tracked is None else "num_batches_tracked"
    return _RunningStatistics(module, "moments", "running_mean", "running_var", counter, module.momentum)


def _no_moments(running_mean: torch.Tensor) -> torch.Tensor:
    return torch.zeros(2 * running_mean.numel() + 1, dtype=torch.float64, device=running_mean.device)


class _SyncedBatchNorm(nn.Module):
    """Called in place of ``aten.batch_norm``, on all replicas of a stage in the same order.

    Its reductions are apart from those of gradients, which run meanwhile.
    """

    def __init__(self, replicas: _Replicas) -> None:
        """Take what connects the replicas."""
        super().__init__()
        self._replicas = replicas
        # Here and not above the function: it takes a second to import.
        self._uncompiled = torch.compiler.disable(self._normalize)  # type: ignore[no-untyped-call]

    def forward(self, *arguments: Any) -> torch.Tensor:  # noqa: ANN401
        """Normalise a share, and track the whole micro-batch's statistics; takes what ``aten.batch_norm`` does."""
        result: torch.Tensor = self._uncompiled(*arguments)
        return result

    def _normalize(
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
        output, moments = _Normalize.apply(x, weight, bias, eps, self._replicas)  # type: ignore[no-untyped-call]
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                _track(running_mean, running_var, moments, momentum)
        result: torch.Tensor = output
        return result


class _Normalize(Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        replicas: _Replicas,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = _wide(x)
        variance, mean = torch.var_mean(wide, _all_but_channels(x), correction=0)
        count = x.numel() // x.shape[1]
        own = torch.cat([mean.new_full((1,), count), mean, variance * count])
        (moments,) = replicas.pool(own.double(), [own.numel()], apart=True)
        count_of_all, mean, squares = (each.to(wide.dtype) for each in _unpack_moments(moments))
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
            ctx.replicas.transport.all_reduce(sums, ctx.replicas.ranks, apart=True).wait()
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


def _synchronize(layers: Iterable[Layer], norm: _SyncedBatchNorm) -> None:
    """Let all batch normalisations of layers be done by ``norm``; changes their modules."""
    for layer in layers:
        calls = _calls_of(layer.module)
        for module, node in calls:
            module.add_submodule("batch_norm", norm)
            _replace_call(module, node, "batch_norm", node.args)
        for module in dict.fromkeys(module for module, _ in calls):
            module.recompile()
        for norm_module in _modules_of(layer.module):
            _synchronize_module(norm_module, norm)


def _synchronize_module(module: _BatchNorm, norm: _SyncedBatchNorm) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        module._check_input_dim(x)  # type: ignore[no-untyped-call]
        momentum = module.momentum or 0.0
        if module.num_batches_tracked is not None:
            counter = module.num_batches_tracked.add_(1)
            momentum = 1.0 / float(counter) if module.momentum is None else momentum
        running = module.running_mean, module.running_var
        output: torch.Tensor = norm(x, module.weight, module.bias, *running, True, momentum, module.eps, False)
        return output

    module.forward = forward  # type: ignore[assignment, method-assign]
