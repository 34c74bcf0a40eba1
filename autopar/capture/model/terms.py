"""Terms: what a loss is the sum of, by the names of the outputs that a captured model gives for it.

    return {"tokens": (token_sum, token_count), "pairs": pair_mean, "log": {"accuracy": right}}

gives the outputs ``sum:tokens``, ``count:tokens``, ``mean:pairs`` and ``log:accuracy``. A mini-batch's loss is the sum
of its terms: of means over samples, and of sums, each divided by its own count over all micro-batches and replicas. A
term of which nothing is counted adds 0. What is under ``log`` has no part in it. A lone mean is ``loss``, a lone pair
``loss_sum`` and ``loss_count``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
