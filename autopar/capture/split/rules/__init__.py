"""One rule per operator: what it does to the names of dimensions, and what a part calls in its place.

In: an operator. Out: its rule, if there is one. ``rule.py`` says what a rule promises; read it first. The other files
have the rules, a family each: ``arithmetic.py``, ``products.py`` (convolutions among them), ``attention.py``,
``vocabulary.py`` (embeddings, losses over classes), ``shapes.py``, ``indexing.py`` (what is cut, joined and picked),
and ``draws.py`` (random numbers).
"""

from __future__ import annotations

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
    "find_rule",
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
