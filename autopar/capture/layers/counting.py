"""Counting: what the terms of a loss are divided by, computed of the batch alone, before anything runs forward.

Gradients of several quotients cannot be divided by one count when they are complete, so their counts have to be known
before the first backward. In comes the last layer, as captured; out comes the part of it that gives the counts.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from autopar.capture.graph import Layer
from autopar.capture.model.effects import reachable
from autopar.capture.model.terms import terms_of
from autopar.errors import CaptureError


def counting_module(layer: Layer, batch_names: Collection[str]) -> fx.GraphModule | None:
    """Return what counts for a loss: called as the last layer's module is, it gives the counts; None where none do.

    Args:
        layer: the last, as captured.
        batch_names: of a batch's tensors.

    Raises:
        CaptureError: a count is computed of something else; names the term.
    """
    terms = [term for term in terms_of([name for name in layer.outputs if ":" in name]) if term.divisor is not None]
    if not terms:
        return None
    if not isinstance(layer.module, fx.GraphModule):
        raise CaptureError(
            f"loss() divides {terms[0].name!r} by a count of its own, which a model whose layers are listed cannot; "
            "let loss() return one (sum, count), or means"
        )
    graph = copy.deepcopy(layer.module.graph)
    end: Any = graph.output_node()
    results = dict(zip(layer.outputs, end.args[0], strict=True))
    read = dict(zip(list(graph.find_nodes(op="placeholder"))[1:], layer.inputs, strict=True))
    late = {node for node, name in read.items() if name not in batch_names}
    late |= {node for node in graph.find_nodes(op="get_attr") if node.target in layer.parameters}
    for term in terms:
        count = results[str(term.divisor)]
        if isinstance(count, fx.Node) and late & reachable([count], lambda node: node.all_input_nodes).keys():
            raise CaptureError(
                f"the count of {term.name!r} in what loss() returns is computed of the model's output, and has to be "
                "known before the first backward; compute it of the batch alone, or let loss() return one (sum, count)"
            )
    end.args = (tuple(results[str(term.divisor)] for term in terms),)
    graph.eliminate_dead_code()
    return fx.GraphModule(layer.module, graph, class_name="Counts")


def counts_of(module: fx.GraphModule, rows: int, layer: Layer, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the counts of a share of a micro-batch, of the terms that have one, as float64.

    What else the last layer reads is not there yet, and not asked for.
    """
    nothing = torch.empty(0)
    given = module(rows, *(inputs.get(name, nothing) for name in layer.inputs))
    return torch.stack([torch.as_tensor(each).detach().double().reshape(()) for each in given])
