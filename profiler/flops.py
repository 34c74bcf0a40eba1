"""Flops: the operations of a layer's forward and backward, counted while whatever device there is runs them.

Counted are products of matrices, convolutions and attention, two operations for each multiplication, as torch counts
them. An attention's backward runs its first product again; that is left out, since a recomputation is none of the
model's own work: its other four products are twice those of its forward.
"""

from __future__ import annotations

from typing import Any

from autopar.capture.model.effects import OperatorMode
from autopar.profiler.kernels import PRODUCTS, kind_of, operations_of
from autopar.profiler.layer_runs import LayerPass


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
        elif kind_of(operator, name) == "attention":
            self.attention += operations_of(operator, args, kwargs, result)
        else:
            self.products += operations_of(operator, args, kwargs, result)
        return result


def flops_of(forward: OperationCount, backward: OperationCount) -> int:
    """Return the operations of a forward and a backward that were counted."""
    attention = 2 * forward.attention if backward.attention else 0
    return forward.products + forward.attention + backward.products + attention


def pass_flops(work: LayerPass) -> int:
    """Run a layer forward and backward; return the operations of both."""
    with OperationCount() as forward:
        work.forward()
    work.prepare_backward()
    with OperationCount() as backward:
        work.backward()
    return flops_of(forward, backward)
