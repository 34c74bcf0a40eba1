"""Terms: what a loss is the sum of, by the names of the outputs that a captured model gives for it.

    return {"tokens": (token_sum, token_count), "pairs": pair_mean, "log": {"accuracy": right}}

gives the outputs ``sum:tokens``, ``count:tokens``, ``mean:pairs`` and ``log:accuracy``. A mini-batch's loss is the sum
of its terms: of means over samples, and of sums, each divided by its own count over all micro-batches and replicas. A
term of which nothing is counted adds 0. What is under ``log`` has no part in it. A lone mean is ``loss``, a lone pair
``loss_sum`` and ``loss_count``.

What sums are divided by is computed of the batch alone, before anything runs forward. Gradients of several quotients
cannot be divided by one count when they are complete, so their counts have to be known before the first backward. In
comes the last layer, as captured; out comes the part of it that gives the counts.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.capture.graph import Layer
from autopar.capture.model.effects import reachable
from autopar.errors import CaptureError

LOG = "log"
_LONE = {("loss",): ("", "loss", None), ("loss_sum", "loss_count"): ("", "loss_sum", "loss_count")}


class Term(NamedTuple):
    """A part of a loss, or a figure beside it."""

    name: str
    """As the loss has it; empty where there is one alone."""
    value: str
    """The name of the output that is a mean over samples, or a sum."""
    divisor: str | None
    """The name of the output that a sum is divided by."""
    logged: bool = False
    """Whether it has no part in what is trained."""


def terms_of(outputs: Sequence[str]) -> list[Term]:
    """Return the terms of a loss, by the names of its outputs.

    >>> terms_of(("sum:tokens", "count:tokens", "mean:pairs", "log:accuracy"))[1:]
    [Term(name='pairs', value='mean:pairs', divisor=None, logged=False), Term(name='accuracy', value='log:accuracy', \
divisor=None, logged=True)]
    """
    if tuple(outputs) in _LONE:
        return [Term(*_LONE[tuple(outputs)])]
    found = []
    for output in outputs:
        kind, _, name = output.partition(":")
        if kind in ("mean", LOG):
            found.append(Term(name, output, None, kind == LOG))
        elif kind in ("sum", f"{LOG}sum"):
            found.append(Term(name, output, f"{kind.removesuffix('sum')}count:{name}", kind != "sum"))
    return found


def output_names(name: str, *, counted: bool, logged: bool) -> tuple[str, ...]:
    """Return the names of a term's outputs."""
    kind = LOG if logged else ""
    return (f"{kind}sum:{name}", f"{kind}count:{name}") if counted else (f"{kind or 'mean'}:{name}",)


def starts_of(outputs: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the outputs from which a backward starts.

    >>> starts_of(("loss_sum", "loss_count")), starts_of(("mean:a", "sum:b", "count:b", "log:c"))
    (('loss_sum',), ('mean:a', 'sum:b'))
    """
    return tuple(term.value for term in terms_of(outputs) if not term.logged)


def is_named(outputs: Sequence[str]) -> bool:
    """Tell whether a loss has terms with names."""
    return bool(outputs) and tuple(outputs) not in _LONE


def total_of(terms: Sequence[Term], sums: Sequence[tuple[float, float]]) -> float:
    """Return a loss, given of every term what is to be divided, and by what; one of which nothing counts adds 0."""
    pairs = zip(terms, sums, strict=True)
    return sum(value / count for term, (value, count) in pairs if count and not term.logged)


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
