"""Transformers as it trains, while it is captured: attention without masks that mask nothing, autocast turned off.

    with as_in_training():
        torch.export.export(model, ...)

While it is traced, Transformers makes masks that it leaves out in training, where it looks at values and finds that
nothing is masked: a graph with such masks has no fused causal attention, and on a GPU takes twice as long. Here it
leaves out what depends on no sample, so that training would leave it out whatever the sample is.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

from autopar.capture.model.effects import draws_random_numbers

__all__ = ["as_in_training"]


@contextlib.contextmanager
def as_in_training() -> Iterator[None]:
    """Let Transformers, if it is imported, take the ways of training inside the block."""
    with contextlib.ExitStack() as stack:
        masks, generic = (sys.modules.get(f"transformers.{name}") for name in ("masking_utils", "utils.generic"))
        for name, stand_in in _of_masks(masks).items() if masks is not None else ():
            stack.enter_context(patch.object(masks, name, stand_in))
        asks: CodeType | None = getattr(getattr(generic, "maybe_autocast", None), "__code__", None)
        if asks is not None:
            stack.enter_context(patch.object(torch, "is_autocast_enabled", _always_for(asks)))
        yield


def _always_for(asks: CodeType) -> Callable[..., bool]:
    """Stand in for ``torch.is_autocast_enabled``.

    ``maybe_autocast(device_type, enabled=False)`` is nothing unless autocast is on. A graph is captured without
    autocast and may train with it: regions in which positions and scores are to be of float32 have to be known.
    """
    known = torch.is_autocast_enabled
    return lambda *device_type: sys._getframe(1).f_code is asks or known(*device_type)


def _of_masks(masks: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return what stands in for functions of ``transformers.masking_utils``, by name."""
    is_tracing: Callable[..., bool] = masks.is_tracing
    find: Callable[..., torch.Tensor | None] = masks.find_packed_sequence_indices

    def find_packed(position_ids: torch.Tensor) -> torch.Tensor | None:
        """Return none if positions are the same for any batch, and those of one sequence a sample."""
        return None if holds_for_any_batch(position_ids, _packs_nothing) else find(position_ids)

    def is_read_traced(tensor: object = None) -> bool:
        """Tell whether a mask of padding is traced; there may be none."""
        return tensor is not None and is_tracing(tensor)

    stand_ins: dict[str, Callable[..., Any]] = {
        "is_tracing": is_read_traced,
        "is_torchdynamo_exporting": lambda: False,
        "find_packed_sequence_indices": find_packed,
    }
    return {name: stand_in for name, stand_in in stand_ins.items() if hasattr(masks, name)}


def _packs_nothing(position_ids: torch.Tensor) -> bool:
    return bool((position_ids.diff(dim=-1) == 1).all())


def holds_for_any_batch(tensor: torch.Tensor, holds: Callable[[torch.Tensor], bool]) -> bool:
    """Tell whether something holds of a tensor that a graph is being captured with, whatever the batch.

    It does if the tensor follows from sizes, which are the example's, and from no sample, parameter or buffer.
    """
    mode = get_proxy_mode()
    slot: Any = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    if slot is None:
        return False
    nodes = _constant_nodes(slot.proxy.node)
    values: dict[fx.Node, Any] = {}
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        for node in nodes:
            if _is_size(node):
                values[node] = node.meta["val"].node.hint
            else:
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return bool(nodes) and holds(values[nodes[-1]])


def _constant_nodes(last: fx.Node) -> list[fx.Node]:
    """Return what a node is computed of, in order, itself last; nothing if that is more than sizes."""
    needed, pending = set[fx.Node](), [last]
    while pending:
        node = pending.pop()
        if node not in needed and not _is_size(node):
            if node.op != "call_function" or draws_random_numbers(node):
                return []
            pending += node.all_input_nodes
        needed.add(node)
    return [node for node in last.graph.nodes if node in needed]


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)
