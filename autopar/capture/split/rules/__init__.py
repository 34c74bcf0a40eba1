"""One rule per operator: what it does to the names of dimensions, and what a part calls in its place.

In: an operator. Out: its rule, if there is one. ``rule.py`` says what a rule promises, and has that of operators on
numbers in their places; read it first. The other files register rules when they are imported, a family each:
``arithmetic.py`` (reductions, products of matrices, convolutions, embeddings, losses over classes), ``draws.py``
(random numbers, attention), and ``shapes.py`` (views, what is cut, joined and picked).
"""

from autopar.capture.split.rules import arithmetic, draws, shapes
from autopar.capture.split.rules.rule import (
    Axis,
    Dims,
    LocalCall,
    OperatorCall,
    Part,
    Ranges,
    apply_rule,
    local_call,
    ranges,
    take_ranges,
)

__all__ = [
    "Axis",
    "Dims",
    "LocalCall",
    "OperatorCall",
    "Part",
    "Ranges",
    "apply_rule",
    "arithmetic",
    "draws",
    "local_call",
    "ranges",
    "shapes",
    "take_ranges",
]
