"""Kernels: what a layer launches, found by running it on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

KernelKind = Literal["matmul", "convolution", "attention", "gather", "other"]


class Kernel(NamedTuple):
    """One launch."""

    op: str
    kind: KernelKind
    dtype: torch.dtype
    """Of what it computes with: of a product's first factor."""
    flops: int
    read_bytes: int
    written_bytes: int
    outputs: int = 0
    """Of products: numbers that are computed, independent of each other."""
    depth: int = 0
    """Of products: terms that are added up in each of them."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_GATHERS = _names("embedding index index_select gather nll_loss_forward nll_loss2d_forward")
_GROUPED = {"_grouped_mm": 1, "grouped_mm_fallback": 1, "grouped_mm_fallback_backward": 2}
"""Products of rows with the matrix of the group that each belongs to, as experts compute them: how many per row."""
_ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}
"""The CPU's attention, which torch's own modules call without being asked, and what is counted of it: the GPU's."""
_NOT_READ = _names("copy_ zero_ fill_ bernoulli_ normal_ uniform_ random_ exponential_")
"""In-place operators that overwrite without reading."""
_FREE = _names("empty empty_like empty_strided new_empty new_empty_strided lift_fresh set_ resize_")
"""Operators that allocate, and launch nothing."""


class KernelLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every kernel launched while it is active; views and allocations are none.

    Operators are taken as one kernel each, as PyTorch's eager mode nearly runs them. Bytes are those of the distinct
    tensors an operator reads and writes: caches are assumed to serve repeated reads within it, and nothing between
    kernels. Operations of products are torch's own counts (``torch.utils.flop_counter``).

    >>> a = torch.ones(4, 8)
    >>> with KernelLog() as log:
    ...     b = a @ a.t()
    >>> [(k.op, k.kind, k.flops, k.read_bytes, k.written_bytes, k.outputs, k.depth) for k in log.kernels]
    [('mm', 'matmul', 256, 128, 64, 16, 8)]
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        given = list(_distinct(_tensors((args, kwargs))))
        result = func(*args, **kwargs)
        name = func._schema.name.rpartition("::")[2]
        if func.is_view or name in _FREE:
            return result
        storages = {_storage(tensor) for tensor in given}
        made = [tensor for tensor in _distinct(_tensors(result)) if _storage(tensor) not in storages]
        changed = list(_distinct(_written(func, args, kwargs)))
        if made or changed:
            self.kernels.append(_describe(func, name, given, made, changed, args, kwargs, result))
        return result


def _describe(
    func: Any,  # noqa: ANN401
    name: str,
    given: Sequence[torch.Tensor],
    made: Sequence[torch.Tensor],
    changed: Sequence[torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: object,
) -> Kernel:
    if name in _NOT_READ:
        untouched = {id(tensor) for tensor in changed}
        given = [tensor for tensor in given if id(tensor) not in untouched]
    written = sum(map(_bytes, (*made, *changed)))
    read = sum(map(_bytes, given))
    kind = _kind(func, name)
    if kind == "gather" and given:
        # Of a table only the rows are read that are asked for.
        read = sum(map(_bytes, given[1:])) + min(_bytes(given[0]), sum(map(_bytes, made)))
    outputs, depth = _product(name, args, made) if kind in ("matmul", "convolution") else (0, 0)
    dtype = (given or made or changed)[0].dtype
    flops = 2 * outputs * depth if name in _GROUPED else _flops(func, args, kwargs, result)
    return Kernel(name, kind, dtype, flops, read, written, outputs, depth)


def _kind(func: Any, name: str) -> KernelKind:  # noqa: ANN401
    if "convolution" in name:
        return "convolution"
    if "attention" in name:
        return "attention"
    if func.overloadpacket in flop_registry or name in _GROUPED:
        return "matmul"
    return "gather" if name in _GATHERS else "other"


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> int:  # noqa: ANN401
    packet = func.overloadpacket
    count: Callable[..., Any] | None = flop_registry.get(_ON_CPU.get(packet, packet))
    if count is None:
        return 0
    flops = int(count(*args, **kwargs, out_val=result))
    # Blocks above the diagonal of a causal mask are skipped; the counts include them.
    return flops // 2 if _argument(func, "is_causal", args, kwargs) else flops


def _argument(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return kwargs.get(name, args[index] if index < len(args) else argument.default_value)
    return None


def _product(name: str, args: tuple[Any, ...], made: Sequence[torch.Tensor]) -> tuple[int, int]:
    """(numbers computed, terms in each) of a product of matrices, or of a convolution seen as one."""
    if "convolution" in name:
        # Backwards take the gradient of the output first.
        backward = name == "convolution_backward"
        weight: torch.Tensor = args[2] if backward else args[1]
        return (args[0] if backward else made[0]).numel(), prod(weight.shape[1:])
    if name in _GROUPED:
        rows, columns = args[0].shape[0], args[1].shape[-1]
        return _GROUPED[name] * rows * columns, args[0].shape[-1]
    left: torch.Tensor = args[1 if name in ("addmm", "baddbmm") else 0]
    return made[0].numel(), left.shape[-1]


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:  # noqa: ANN401
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(kwargs.get(argument.name, args[index] if index < len(args) else None))


def _distinct(tensors: Sequence[torch.Tensor] | Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Leave out a second view of the same numbers."""
    seen = set()
    for tensor in tensors:
        key = (_storage(tensor), tensor.storage_offset(), tensor.numel())
        if key not in seen:
            seen.add(key)
            yield tensor


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: torch.Tensor) -> int:
    # An expanded tensor is read once.
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
