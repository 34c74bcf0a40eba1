"""Products of matrices, and convolutions: what they multiply is summed over, all other dimensions are kept.

Where a part has only some of what is summed over, it gives a summand of the product; the bias is added to the sum. Of a
convolution, input channels are summed over, and output channels are kept; in depthwise ones both are one. What goes
over the edge of one position is in the next, so that places are not split.
"""

from __future__ import annotations

import torch

from autopar.capture.split.names import Dim, MismatchError, block
from autopar.capture.split.rules.rule import (
    Dims,
    LocalCall,
    OperatorCall,
    Part,
    broadcast,
    rule,
    unite_or_block,
    whole_dim,
)

_ADD = torch.ops.aten.add.Tensor


def _local_linear(call: OperatorCall, part: Part) -> LocalCall | None:
    bias = call.argument("bias")
    if bias is None or not part.splits(call.dims("input")[-1]):
        return None
    return LocalCall(call.node.target, *call.replace_arguments(bias=None), _ADD, (bias,), then_broadcasts=True)


@rule("linear.default", local=_local_linear)
def _linear(call: OperatorCall) -> Dims:
    """Sum over the input's last dimension, which is the weight's columns."""
    given, weight = call.dims("input"), call.dims("weight")
    call.summed.append(unite_or_block(given[-1], weight[1]))
    if call.argument("bias") is not None:
        unite_or_block(call.dims("bias")[0], weight[0])
    return (*given[:-1], weight[0])


def _local_sum_with_product(call: OperatorCall, part: Part) -> LocalCall | None:
    one, other = _factors(call)
    if not part.splits(call.dims(one)[-1]):
        return None
    product = torch.ops.aten.mm.default if one == "mat1" else torch.ops.aten.bmm.default
    factors, summand = (call.argument(one), call.argument(other)), _summand(call)
    return LocalCall(product, factors, {}, _add_scaled, summand, then_broadcasts=True)


def _factors(call: OperatorCall) -> tuple[str, str]:
    """Return the names of the arguments that are multiplied."""
    return ("mat1", "mat2") if call.node.target is torch.ops.aten.addmm.default else ("batch1", "batch2")


def _add_scaled(product: torch.Tensor, summand: torch.Tensor, beta: float, alpha: float) -> torch.Tensor:
    """Add something to a product, either times a factor."""
    return (summand if beta == 1 else summand * beta) + (product if alpha == 1 else product * alpha)


def _summand(call: OperatorCall) -> tuple[object, ...]:
    return call.argument("self"), call.argument("beta"), call.argument("alpha")


@rule("addmm.default", "baddbmm.default", local=_local_sum_with_product)
def _sum_with_product(call: OperatorCall) -> Dims:
    """Multiply two matrices, or as many pairs as there are, and add something to the product."""
    return broadcast([_product_dims(call, *map(call.dims, _factors(call))), call.dims("self")])


@rule("einsum.default")
def _einsum(call: OperatorCall) -> Dims:
    """Sum over the dimensions whose letters are not in what comes out."""
    inputs, arrow, output = call.argument("equation").replace(" ", "").partition("->")
    if not arrow or "." in inputs:
        raise MismatchError("its equation leaves dimensions out")
    found: dict[str, Dim] = {}
    for letters, node in zip(inputs.split(","), call.argument("tensors"), strict=True):
        if len(set(letters)) < len(letters):
            raise MismatchError("it takes a diagonal")
        for letter, dim in zip(letters, call.dims_of(node), strict=True):
            (found[letter],) = broadcast([(found.get(letter, ()),), (dim,)])
    call.summed += [dim for letter, dim in found.items() if letter not in output]
    return tuple(found[letter] for letter in output)


@rule("bmm.default", "matmul.default", "mm.default")
def product(call: OperatorCall) -> Dims:
    """Sum over the dimension between matrices; those before the last two are broadcast."""
    other = "other" if call.node.target is torch.ops.aten.matmul.default else "mat2"
    return _product_dims(call, call.dims("self"), call.dims(other))


def _product_dims(call: OperatorCall, one: Dims, other: Dims) -> Dims:
    if min(len(one), len(other)) < 2:
        raise MismatchError("it multiplies a vector")
    call.summed.append(unite_or_block(one[-1], other[-2]))
    return (*broadcast([one[:-2], other[:-2]]), one[-2], other[-1])


_NEIGHBOURS = "a convolution reads neighbours"


def _add_channels(total: torch.Tensor, bias: torch.Tensor, places: int) -> torch.Tensor:
    """Add a number to every channel, behind which are dimensions of places."""
    return total + bias.view(-1, *[1] * places)


def _local_convolution(call: OperatorCall, part: Part) -> LocalCall | None:
    places = len(call.dims("weight")) - 2
    if not part.splits(call.dims("input")[-places - 1]):
        return None
    if call.argument("groups") > 1:
        groups = part.length(call.dims("weight")[0])
        return LocalCall(call.node.target, *call.replace_arguments(groups=groups))
    bias = call.argument("bias")
    args, kwargs = call.replace_arguments(bias=None)
    if bias is None:
        return LocalCall(call.node.target, args, kwargs)
    return LocalCall(call.node.target, args, kwargs, _add_channels, (bias, places))


@rule("conv1d.default", "conv1d.padding", "conv2d.default", "conv2d.padding", local=_local_convolution)
def _convolution(call: OperatorCall) -> Dims:
    """Sum over input channels, or keep channels that are convolved each for itself."""
    given, weight, sizes = call.dims("input"), call.dims("weight"), call.output_sizes()
    places = len(weight) - 2
    channels, groups = given[-places - 1], call.argument("groups")
    if groups == 1:
        call.summed.append(unite_or_block(channels, weight[1]))
    elif call.sizes("weight")[:2] == (groups, 1):
        unite_or_block(channels, weight[0])
    else:
        raise MismatchError("its channels are in groups")
    if call.argument("bias") is not None:
        unite_or_block(call.dims("bias")[0], weight[0])
    for dim in (*given[-places:], *weight[-places:]):
        block(dim, _NEIGHBOURS)
    return (*given[: -places - 1], weight[0], *(whole_dim(size, _NEIGHBOURS) for size in sizes[-places:]))
