"""Find what a model does or keeps where no layer takes it along: hooks on gradients, shared memory, stale tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from autopar.capture.effects import Storages, written
from autopar.capture.graph import Layer, LayerGraph
from autopar.capture.traps import FALLBACK
from autopar.errors import CaptureError


def refuse_lost(model: nn.Module) -> None:
    """Check that parameters can be made anew, as every rank does from their names and values.

    Raises:
        CaptureError: a parameter has a hook on its gradient, or shares memory with another tensor; names it.
    """
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"the parameter {name} has a hook on its gradient, which ranks would train without; change gradients "
                "in the optimizer or the loss"
            )
    named = [*model.named_parameters(), *model.named_buffers()]
    parameters = {name for name, _ in model.named_parameters()}
    for names in _sharing(named):
        if parameters.intersection(names):
            raise CaptureError(
                f"{names[0]} and {names[1]} are two tensors that share memory, which ranks would hold apart; to tie "
                "parameters, assign the parameter itself, not nn.Parameter(...) of it"
            )


def refuse_backward_hooks(model: nn.Module) -> None:
    """Check that no module has a backward hook.

    Raises:
        CaptureError: one has, which a captured graph would not run; names the module.
    """
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"the module {name or 'itself'} has a backward hook, which cannot be captured; {FALLBACK}"
            )


def refuse_stale(graph: LayerGraph, replaced: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check that no layer holds, as a constant, a tensor that the forward ``replaced`` in its module.

    Raises:
        CaptureError: one does, so that every step would read the first one; names it.
    """
    memory = {tensor.data_ptr(): path for path, tensor in replaced if tensor.numel() and not _is_fake(tensor)}
    for layer in graph.layers:
        for attribute, constant in layer.module.named_buffers():
            path = memory.get(constant.data_ptr()) if attribute not in layer.buffers else None
            if path is not None:
                raise CaptureError(
                    f"{path} is replaced by a forward and read by the next, which cannot be captured; register it as a "
                    f"buffer and write into it (copy_), {FALLBACK}"
                )


def refuse_shared_writes(graph: LayerGraph, model: nn.Module) -> None:
    """Check that no layer writes memory of two buffers, as each of them is made anew on every rank.

    Raises:
        CaptureError: one does; names both.
    """
    pairs = _sharing(model.named_buffers())
    changed = {name for layer in graph.layers for name in _written_buffers(layer)} if pairs else set()
    for pair in pairs:
        if changed.intersection(pair):
            raise CaptureError(
                f"the buffers {pair[0]} and {pair[1]} share memory that the forward writes, which ranks would hold "
                "apart; keep one of them"
            )


def _written_buffers(layer: Layer) -> set[str]:
    assert isinstance(layer.module, fx.GraphModule)
    nodes = list(layer.module.graph.nodes)
    storages = Storages(nodes)
    roots = {storages.root(target) for node in nodes if node.op == "call_function" for target in written(node)}
    return {
        layer.buffers[str(node.target)]
        for node in nodes
        if node.op == "get_attr" and str(node.target) in layer.buffers and storages.root(node) in roots
    }


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


def _sharing(named: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, ...]]:
    """Return the names of tensors, two at a time, that have an element of memory in common."""
    holders: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in named:
        if tensor.device.type != "meta" and tensor.layout is torch.strided and tensor.numel():
            holders.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    pairs = [(one, other) for held in holders.values() for i, one in enumerate(held) for other in held[:i]]
    return [(other[0], one[0]) for one, other in pairs if _overlap(one[1], other[1])]


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype:
        return True
    size = one.untyped_storage().nbytes() // one.element_size()
    taken = torch.zeros(size, dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())
