"""Crossings: the tensors that stages hand each other, found from those that layers do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.capture.graph import TensorSpec
from autopar.formats.plan import Crossing

__all__ = ["crossings"]


def crossings(tensors: Iterable[TensorSpec], stage_of: Mapping[str, int]) -> tuple[Crossing, ...]:
    """Return what is made in one stage and read in later ones, given the stage of every layer."""
    found = []
    for tensor in tensors:
        if tensor.producer is None:
            continue
        made = stage_of[tensor.producer]
        readers = tuple(sorted({stage_of[name] for name in tensor.consumers} - {made}))
        if readers:
            found.append(
                Crossing(
                    name=tensor.name,
                    producer=made,
                    consumers=readers,
                    bytes_per_sample=tensor.bytes_per_sample,
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    gradient=tensor.gradient,
                )
            )
    return tuple(found)
