"""Products of matrices: the dimension in the middle is summed over, all others are kept.

Where a part has only some of what is summed over, it gives a summand of the product; the bias is added to the sum.
"""

from __future__ import annotations

import torch

from autopar.capture.split.names import MismatchError
from autopar.capture.split.rules.rule import Dims, LocalCall, OperatorCall, Part, broadcast, rule, unite_or_block

_ADD = torch.ops.aten.add.Tensor


def _local_linear(call: OperatorCall, part: Part) -> LocalCall:
    args, kwargs = call.replace_arguments(bias=None)
    bias = call.argument("bias")
    if bias is None or not part.splits(call.dims("input")[-1]):
        return LocalCall(call.node.target, call.node.args, call.node.kwargs)
    return LocalCall(call.node.target, args, kwargs, _ADD, (bias,))


@rule("linear.default", local=_local_linear)
def linear(call: OperatorCall) -> Dims:
    """Sum over the input's last dimension, which is the weight's columns."""
    given, weight = call.dims("input"), call.dims("weight")
    call.summed.append(unite_or_block(given[-1], weight[1]))
    if call.argument("bias") is not None:
        unite_or_block(call.dims("bias")[0], weight[0])
    return (*given[:-1], weight[0])


def _local_addmm(call: OperatorCall, part: Part) -> LocalCall:
    if not part.splits(call.dims("mat1")[1]):
        return LocalCall(call.node.target, call.node.args, call.node.kwargs)
    factors = (call.argument("mat1"), call.argument("mat2"))
    return LocalCall(torch.ops.aten.mm.default, factors, {}, _ADD, (call.argument("self"),))


@rule("addmm.default", local=_local_addmm)
def addmm(call: OperatorCall) -> Dims:
    """Sum over the dimension between two matrices, and add a bias to the product."""
    if (call.argument("beta"), call.argument("alpha")) != (1, 1):
        raise MismatchError("its summands have factors")
    left, right = call.dims("mat1"), call.dims("mat2")
    call.summed.append(unite_or_block(left[1], right[0]))
    return broadcast([(left[0], right[1]), call.dims("self")])


@rule("bmm.default", "mm.default")
def product(call: OperatorCall) -> Dims:
    """Sum over the dimension between two matrices."""
    return _product_dims(call, call.dims("self"), call.dims("mat2"))


@rule("matmul.default")
def matmul(call: OperatorCall) -> Dims:
    """Sum over the dimension between matrices; those before the last two are broadcast."""
    return _product_dims(call, call.dims("self"), call.dims("other"))


def _product_dims(call: OperatorCall, one: Dims, other: Dims) -> Dims:
    if min(len(one), len(other)) < 2:
        raise MismatchError("it multiplies a vector")
    call.summed.append(unite_or_block(one[-1], other[-2]))
    return (*broadcast([one[:-2], other[:-2]]), one[-2], other[-1])
