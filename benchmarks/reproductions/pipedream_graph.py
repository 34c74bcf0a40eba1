"""PipeDreamGraph: what PipeDream's planner knows of a model, for all layers up to each one in the profile's order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.errors import UsageError
from autopar.formats.profile import Profile

__all__ = ["Numbers", "PipeDreamGraph", "mini_batch", "pipedream_graph"]

Numbers = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]


class PipeDreamGraph(NamedTuple):
    """Sums over the layers up to each one; arrays of one number per layer."""

    seconds: Numbers
    """Forward and backward of one mini-batch."""
    parameters_bytes: Numbers
    outputs_bytes: Numbers
    """What PipeDream's planner counts as crossing a cut behind the layer, once."""


def mini_batch(profile: Profile) -> int:
    """Return the largest number of samples that all layers were profiled with.

    Raises:
        UsageError: the layers were profiled with no size in common.
    """
    sizes = set.intersection(*({cost.micro_batch for cost in layer.costs} for layer in profile.layers))
    if not sizes:
        raise UsageError("the layers were profiled with no micro-batch size in common; profile the model again")
    return max(sizes)


def pipedream_graph(profile: Profile) -> PipeDreamGraph:
    """Sum up a profile at the largest mini-batch that all of its layers were profiled with.

    A cut's outputs are those of its *augmented antichain*, in the words of PipeDream's optimizer: of every layer that
    nothing on this side of the cut reads (a), and of every layer before such a one with a reader that is neither a nor
    before a. Where several such layers a end the cut's side, this also counts what one branch is given and reads up.

    Raises:
        UsageError: the layers were profiled with no size in common.
    """
    size = mini_batch(profile)
    costs = [next(cost for cost in layer.costs if cost.micro_batch == size) for layer in profile.layers]
    outputs = np.array([cost.output_bytes for cost in costs], dtype=np.float64)
    return PipeDreamGraph(
        # PipeDream's planner leaves input nodes out.
        seconds=np.cumsum(
            [
                cost.forward_s - layer.input_s + cost.backward_s
                for layer, cost in zip(profile.layers, costs, strict=True)
            ]
        ),
        parameters_bytes=np.cumsum([float(layer.parameters_bytes) for layer in profile.layers]),
        outputs_bytes=_outputs_bytes(_readers(profile), outputs),
    )


def _readers(profile: Profile) -> _Flags:
    """Return who reads whom, as ``[producer, consumer]``."""
    order = {layer.name: index for index, layer in enumerate(profile.layers)}
    readers = np.zeros((len(order), len(order)), dtype=np.bool_)
    for tensor in profile.tensors:
        if tensor.producer is not None:
            readers[order[tensor.producer], [order[name] for name in tensor.consumers]] = True
    return readers


def _outputs_bytes(readers: _Flags, sizes: Numbers) -> Numbers:
    count = len(sizes)
    upto = np.eye(count, dtype=np.bool_)
    for layer in range(count):
        upto[layer] |= upto[readers[:, layer]].any(axis=0)
    # Of the readers of each layer (column), how many lie before each layer (row) or are it.
    inside = upto.astype(np.float32) @ readers.T.astype(np.float32)
    leaving = upto & (inside < readers.sum(axis=1))
    np.fill_diagonal(leaving, True)
    first_reader = np.where(readers.any(axis=1), readers.argmax(axis=1), count)
    outputs = [sizes[leaving[: cut + 1][first_reader[: cut + 1] > cut].any(axis=0)].sum() for cut in range(count)]
    return np.array(outputs)
