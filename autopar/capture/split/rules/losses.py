"""Losses of numbers against numbers: of every part, the sum of its own."""

from __future__ import annotations

from autopar.capture.split.rules.reductions import local_mean
from autopar.capture.split.rules.rule import Dims, LocalCall, OperatorCall, Part, broadcast, rule


def _local_loss(call: OperatorCall, part: Part) -> LocalCall:
    if call.argument("reduction") != 1:
        return LocalCall(call.node.target, call.node.args, call.node.kwargs)
    return local_mean(call, part)


@rule("huber_loss.default", "l1_loss.default", "mse_loss.default", "smooth_l1_loss.default", local=_local_loss)
def loss(call: OperatorCall) -> Dims:
    """Compare every number with its target; sum them over all dimensions, or take the mean."""
    dims = broadcast([call.dims("self"), call.dims("target")])
    if call.argument("reduction") == 0:
        return dims
    call.summed += dims
    return ()
