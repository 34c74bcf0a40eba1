"""Layers compiled with ``torch.compile``, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import CppCompileError

from autopar.capture import LayerGraph
from autopar.errors import UsageError

# Each takes seconds to compile, at every size; of the times of so many, a median is still good.
OF_A_KIND = 4


def compiled(graph: LayerGraph) -> LayerGraph:
    """Return a graph to measure: of every kind, some layers are compiled, and the others run the first one's code.

    What runs another layer's code does so with that one's weights: sizes and times are its own, values are not.
    """
    made: dict[str, list[Any]] = {}
    layers = []
    for layer in graph.layers:
        same = made.setdefault(layer.fingerprint, [])
        if len(same) < OF_A_KIND:
            same.append(torch.compile(layer.module, dynamic=False))
            layers.append(replace(layer, module=same[-1]))
        else:
            layers.append(replace(layer, module=same[0]))
    return replace(graph, layers=tuple(layers))


@contextmanager
def compiling(device: torch.device) -> Iterator[None]:
    """Compile in the block, with random numbers as uncompiled layers draw them (``docs/seeds.md``).

    Raises:
        UsageError: there is no working compiler, or it does not take a layer.
    """
    with torch._inductor.config.patch(fallback_random=True):
        try:
            torch.compile(torch.exp, dynamic=False)(torch.ones(2, device=device))
        except Exception as error:
            raise UsageError(
                f"`compile`: torch.compile does not work here ({_first_line(error)}); "
                + ("install a C++ compiler (g++)" if device.type == "cpu" else "install Triton and a C compiler")
            ) from error
        try:
            yield
        except (TorchDynamoException, CppCompileError) as error:
            raise UsageError(f"`compile`: a layer does not compile ({_first_line(error)}); leave it out") from error
        finally:
            torch._dynamo.reset()


def _first_line(error: BaseException) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)[:200]
