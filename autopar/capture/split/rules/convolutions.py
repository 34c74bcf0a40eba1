"""Convolutions: input channels are summed over, output channels are kept; in depthwise ones both are one.

What goes over the edge of one position is in the next, so that places are not split.
"""

from __future__ import annotations

import torch

from autopar.capture.split.names import MismatchError, block
from autopar.capture.split.rules.rule import Dims, LocalCall, OperatorCall, Part, rule, unite_or_block, whole_dim

_NEIGHBOURS = "a convolution reads neighbours"


def add_channels(total: torch.Tensor, bias: torch.Tensor, places: int) -> torch.Tensor:
    """Add a number to every channel, behind which are dimensions of places."""
    return total + bias.view(-1, *[1] * places)


def _local_convolution(call: OperatorCall, part: Part) -> LocalCall:
    places = len(call.dims("weight")) - 2
    if not part.splits(call.dims("input")[-places - 1]):
        return LocalCall(call.node.target, call.node.args, call.node.kwargs)
    if call.argument("groups") > 1:
        groups = part.length(call.dims("weight")[0])
        return LocalCall(call.node.target, *call.replace_arguments(groups=groups))
    bias = call.argument("bias")
    args, kwargs = call.replace_arguments(bias=None)
    if bias is None:
        return LocalCall(call.node.target, args, kwargs)
    return LocalCall(call.node.target, args, kwargs, add_channels, (bias, places))


@rule("conv1d.default", "conv1d.padding", "conv2d.default", "conv2d.padding", local=_local_convolution)
def convolution(call: OperatorCall) -> Dims:
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
