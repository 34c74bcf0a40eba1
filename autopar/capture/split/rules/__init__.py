"""One rule per operator: what it does to the names of dimensions, and what a part calls in its place.

In: an operator. Out: its rule, if there is one. ``rule.py`` says what a rule promises; read it first. The other files
have the rules, a family each: ``arithmetic.py``, ``products.py`` (convolutions among them), ``attention.py``,
``vocabulary.py`` (embeddings, losses over classes), ``shapes.py``, ``indexing.py`` (what is cut, joined and picked),
and ``draws.py`` (random numbers).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from autopar.capture.split.names import MismatchError
from autopar.capture.split.rules import (
    arithmetic,
    attention,
    draws,
    indexing,
    products,
    shapes,
    vocabulary,
)
from autopar.capture.split.rules.rule import (
    RULES,
    Axis,
    Dims,
    LocalCall,
    OperatorCall,
    Part,
    Ranges,
    SplitRule,
    ranges,
    share,
    take_ranges,
)

__all__ = [
    "FAMILIES",
    "Axis",
    "Dims",
    "LocalCall",
    "OperatorCall",
    "Part",
    "Ranges",
    "SplitRule",
    "apply_rule",
    "find_rule",
    "local_call",
    "ranges",
    "share",
    "take_ranges",
]

FAMILIES = (
    arithmetic,
    attention,
    draws,
    indexing,
    products,
    shapes,
    vocabulary,
)
"""The files that register rules."""


def find_rule(target: object) -> SplitRule | None:
    """Return the rule of an operator, if it has one."""
    return RULES.get(str(target)) or arithmetic.pointwise(target)


def apply_rule(
    node: fx.Node, dims: Mapping[fx.Node, tuple[Dims, ...]], values: Mapping[fx.Node, Any]
) -> tuple[OperatorCall, tuple[Dims, ...]]:
    """Return an operator's call, of tensors with these dimensions, and the dimensions of all that it gives.

    Raises:
        MismatchError: it has no rule, or its rule does not apply.
    """
    rule = find_rule(node.target)
    if rule is None:
        raise MismatchError("it has no rule")
    call = OperatorCall(node, dims, values)
    found = rule.names(call)
    return call, tuple(found) if isinstance(found, list) else (found,)


def local_call(call: OperatorCall, part: Part) -> LocalCall:
    """Return what a part calls in place of an operator.

    Raises:
        MismatchError: nothing would do.
    """
    rule = find_rule(call.node.target)
    found = None if rule is None or rule.local is None else rule.local(call, part)
    return found or LocalCall(call.node.target, call.node.args, call.node.kwargs)
