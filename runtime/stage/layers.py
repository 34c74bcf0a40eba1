"""What a plan says of layers: the tensors that cross between stages, shared parameters, seeds, and the precision.

Seeds depend on nothing but how the mini-batch is divided, and are documented in ``docs/howto/verify.md``, so that a
plain loop can set the same in forward hooks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from autopar.capture.data import number_of, seed_data
from autopar.capture.evaluation import EvaluationGraph
from autopar.capture.graph import LayerGraph, TensorSpec
from autopar.formats.plan import Crossing, Plan
from autopar.formats.profile import Precision


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


def used_by_several(layers: Iterable[Iterable[torch.nn.Parameter]]) -> frozenset[torch.nn.Parameter]:
    """Return the parameters that several layers use, given those of each."""
    uses = Counter(parameter for layer in layers for parameter in set(layer))
    return frozenset(parameter for parameter, count in uses.items() if count > 1)


def seed_of(run_seed: int, layer: str, step: int, micro_batch: int, share: int) -> int:
    """Return the seed set before a random layer runs; counts start at 0.

    The first 8 bytes, big-endian, of the SHA-256 of the numbers and the layer's name joined by ``/``, without the
    highest bit.

    >>> seed_of(0, "blocks.3", step=1, micro_batch=2, share=0)
    2988136112197922945
    """
    return number_of(f"{run_seed}/{layer}/{step}/{micro_batch}/{share}")


def seed_generator(device: torch.device, seed: int) -> None:
    """Seed the device's default generator, and nothing else (``torch.manual_seed`` costs a hundred times more)."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def seed_optimizer(device: torch.device, run_seed: int, step: int) -> None:
    """Seed what the optimizer draws from in a step: the generators of :func:`seed_data`, and the device's."""
    seed_data(run_seed, "optimizer", step)
    if device.type == "cuda":
        seed_generator(device, number_of(f"{run_seed}/optimizer/{step}"))


_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_of(precision: Precision, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Return what makes the context that every layer's forward runs in."""
    dtype = _AUTOCAST.get(precision)
    if dtype is None:
        return nullcontext
    return lambda: torch.autocast(device.type, dtype)


def crossing_specs(plan: Plan, graph: LayerGraph | EvaluationGraph) -> list[TensorSpec]:
    """Return the tensors that layers of the model make and others read, of the types that they have in the plan.

    The graph knows the types that the model has without autocast; those with it were found when it was profiled.
    """
    specs = [tensor for tensor in graph.tensors if tensor.producer is not None]
    if plan.precision not in _AUTOCAST:
        return specs
    floating = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, *_AUTOCAST.values())}
    planned = {tensor.name: floating[tensor.dtype] for tensor in plan.tensors if tensor.dtype in floating}
    return [
        replace(spec, dtype=planned.get(spec.name, spec.dtype)) if spec.dtype == torch.float32 else spec
        for spec in specs
    ]
