"""Operations: multiplications and additions of products of matrices, convolutions and attention, while they run.

Counts are torch's own (``torch.utils.flop_counter``), two operations for each multiplication, and ours where it has
none: of experts' grouped products, of the CPU's attention, and of attention with fewer heads of keys than of queries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from autopar.capture.model.effects import OperatorMode

_ATTENTION, _FUSED = "attention", "scaled_dot_product"


def _row_products(args: tuple[Any, ...], times: int = 1) -> tuple[int, int]:
    """Rows times the matrix of the group that each belongs to, as experts compute them."""
    return times * args[0].shape[0] * args[1].shape[-1], args[0].shape[-1]


PRODUCTS: dict[str, Callable[[tuple[Any, ...]], tuple[int, int]]] = {
    "_grouped_mm": _row_products,
    "grouped_mm_fallback": _row_products,
    "grouped_mm_fallback_backward": partial(_row_products, times=2),
}
"""Operators whose work torch does not count: of their arguments, how many numbers they compute by products, and how
many terms are added up in each."""
_ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}
"""The CPU's attention, which torch's own modules call without being asked, and what is counted of it: the GPU's."""


def operations_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> int:  # noqa: ANN401
    """Return the operations that torch counts for an operator: two for each multiplication of a product."""
    packet = func.overloadpacket
    count: Callable[..., Any] | None = flop_registry.get(_ON_CPU.get(packet, packet))
    if count is not None and _FUSED in func._schema.name:
        args = _with_as_many_heads(args)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def _with_as_many_heads(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of fused attention with as many heads of keys and values as of queries, each used by some.

    Torch counts no others.
    """
    at = [place for place, each in enumerate(args) if isinstance(each, torch.Tensor) and each.dim() == 4]
    heads = max((args[place].shape[1] for place in at), default=0)
    grouped = {place: args[place].shape for place in at if 0 < args[place].shape[1] < heads}
    found = {place: torch.empty((shape[0], heads, *shape[2:]), device="meta") for place, shape in grouped.items()}
    return tuple(found.get(place, each) for place, each in enumerate(args))


class OperationCount(OperatorMode):  # type: ignore[no-untyped-call]
    """Counts the operations of products while it is active.

    >>> import torch
    >>> with OperationCount() as count:
    ...     product = torch.ones(4, 8) @ torch.ones(8, 2)
    >>> count.products
    128
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.attention = 0

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        result = super().run(operator, args, kwargs)
        name = operator._schema.name.rpartition("::")[2]
        if name in PRODUCTS:
            outputs, depth = PRODUCTS[name](args)
            self.products += 2 * outputs * depth
        elif _ATTENTION in name:
            self.attention += operations_of(operator, args, kwargs, result)
        else:
            self.products += operations_of(operator, args, kwargs, result)
        return result
