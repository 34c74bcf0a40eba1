"""Names of dimensions: what a dimension of a tensor is made of, and which dimensions are one and the same.

A dimension is a product of names, the outermost first: ``view(rows, 12, 4, 8)`` makes of the last dimension of
``(rows, 12, 32)`` the product ``heads * width``. A name may be several dimensions behind one another: the rows of a
fused projection are ``queries + keys + values``. Operators find out more and more: they factor names, cut them, and say
of two that they are one. That holds for every dimension that a name is in, whenever it was made.

    >>> fused = (Name(12),)
    >>> queries, keys = cut(fused, (0, 8, 12))
    >>> heads, width, group = Name(2), Name(2), Name(2)
    >>> unite(keys, (heads, width))
    >>> unite(queries, (heads, group, width))
    >>> positions(fused, {heads: range(0, 1)}).tolist()
    [0, 1, 2, 3, 8, 9]

Names that are united form trees whose paths are shortened as they are walked (union-find), so that looking one up takes
a nearly constant time, times the names in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod

import torch


class MismatchError(Exception):
    """Dimensions do not fit together as their operator would have it, as far as names can say."""


class Name:
    """A part of a dimension's size, with what was found out about it."""

    __slots__ = ("obstacle", "pieces", "product", "size")

    def __init__(self, size: int, obstacle: str | None = None) -> None:
        self.size = size
        self.obstacle = obstacle
        """Why it cannot be split; none while nothing forbids it."""
        self.product: Dim | None = None
        """What it turned out to be: another name, or several."""
        self.pieces: tuple[Dim, ...] | None = None
        """The dimensions that it is made of, behind one another."""

    def __repr__(self) -> str:
        return f"Name({self.size}, {self.obstacle!r})"


Dim = tuple[Name, ...]
"""A product of names, the outermost first. The empty product is a dimension of size 1."""


def size(dim: Dim) -> int:
    """Return how long a dimension is."""
    return prod(name.size for name in dim)


def resolve(dim: Dim) -> Dim:
    """Return the product of a dimension with everything that was found out; names of size 1 are left out."""
    found: list[Name] = []
    for name in dim:
        if name.product is not None:
            name.product = resolve(name.product)
            found.extend(name.product)
        elif name.size != 1:
            found.append(name)
    return tuple(found)


def leaves(dim: Dim) -> Iterator[Name]:
    """Yield the names that a dimension is made of, those of pieces included; one may come several times."""
    for name in resolve(dim):
        if name.pieces is None:
            yield name
        for piece in name.pieces or ():
            yield from leaves(piece)


def block(dim: Dim, obstacle: str) -> None:
    """Let nothing in a dimension be split; what is said first of a name stays."""
    for name in leaves(dim):
        name.obstacle = name.obstacle or obstacle


def join(dims: Sequence[Dim]) -> Dim:
    """Return the dimension that several make behind one another; those without indices count nothing."""
    dims = [dim for dim in dims if size(dim)] or dims
    if len(dims) == 1:
        return dims[0]
    name = Name(sum(map(size, dims)))
    name.pieces = tuple(dims)
    return (name,)


def unite(one: Dim, other: Dim) -> None:
    """Make two dimensions one, from their outermost names inwards.

    Raises:
        MismatchError: they are divided in ways that do not fit. Some of their names may be united by then: block both.
    """
    while True:
        one, other = resolve(one), resolve(other)
        if not one or not other:
            break
        left, right = one[0], other[0]
        if left.size == right.size:
            _merge(left, right)
            one, other = one[1:], other[1:]
        elif right.size and left.size % right.size == 0:
            factor(left, right.size)
        elif left.size and right.size % left.size == 0:
            factor(right, left.size)
        else:
            raise MismatchError(f"sizes {left.size} and {right.size} have no common names")
    if one or other:
        raise MismatchError(f"a dimension is {size(one or other)} times the other")


def _merge(one: Name, other: Name) -> None:
    """Make two names of the same size one, which is what either was."""
    if one is other:
        return
    if one.pieces is None:
        one, other = other, one
    if one.pieces is not None and other.pieces is not None:
        if [size(piece) for piece in one.pieces] != [size(piece) for piece in other.pieces]:
            raise MismatchError(f"a dimension of size {one.size} is put together in two ways")
        for left, right in zip(one.pieces, other.pieces, strict=True):
            unite(left, right)
    other.product = (one,)
    if other.obstacle:
        block((one,), other.obstacle)


def factor(name: Name, outer: int) -> Dim:
    """Find out that a name is a product of two, the first of size ``outer``.

    Raises:
        MismatchError: it has pieces, or is no multiple.
    """
    if name.pieces is not None or name.size % outer:
        raise MismatchError(f"a dimension of size {name.size} is no product of {outer} and others")
    name.product = (Name(outer, name.obstacle), Name(name.size // outer, name.obstacle))
    return name.product


def cut(dim: Dim, bounds: Sequence[int]) -> list[Dim]:
    """Return what is between one position of a dimension and the next; ``bounds`` go from 0 to its size.

    Raises:
        MismatchError: the bounds do not ascend, or are inside the repetitions of an inner name.
    """
    dim = resolve(dim)
    if len(bounds) == 2 and tuple(bounds) == (0, size(dim)):
        return [dim]
    inner = size(dim[1:])
    steps = [end - start for start, end in pairwise(bounds)]
    if not dim or any(step <= 0 or step % inner for step in steps) or (bounds[0], bounds[-1]) != (0, size(dim)):
        raise MismatchError(f"a dimension of size {size(dim)} cannot be cut at {list(bounds)}")
    pieces = _cut_name(dim[0], [bound // inner for bound in bounds])
    return [(*piece, *dim[1:]) for piece in pieces]


def _cut_name(name: Name, bounds: Sequence[int]) -> list[Dim]:
    """Cut the pieces of a name where they go over a bound, and put together those between two bounds."""
    steps = [end - start for start, end in pairwise(bounds)]
    if name.pieces is None:
        name.pieces = tuple((Name(step, name.obstacle),) for step in steps)
        return list(name.pieces)
    refined: list[Dim] = []
    for start, piece in _with_offsets(name.pieces):
        inside = [bound - start for bound in bounds if start < bound < start + size(piece)]
        refined += cut(piece, [0, *inside, size(piece)])
    name.pieces = tuple(refined)
    placed = list(_with_offsets(name.pieces))
    return [join([piece for at, piece in placed if start <= at < end]) for start, end in pairwise(bounds)]


def _with_offsets(pieces: Sequence[Dim]) -> Iterator[tuple[int, Dim]]:
    return zip(accumulate(map(size, pieces), initial=0), pieces, strict=False)


def carries(dim: Dim, name: Name) -> bool:
    """Tell whether splitting a name splits a dimension, or some of its pieces: parts have the whole of the others.

    Raises:
        MismatchError: it would split it twice.
    """
    times = 0
    for each in resolve(dim):
        # All pieces are asked: each may refuse.
        times += each is name or any([carries(piece, name) for piece in each.pieces or ()])  # noqa: C419
    if times > 1:
        raise MismatchError("a dimension would be split twice")
    return bool(times)


def split_places(dim: Dim, name: Name) -> torch.Tensor:
    """Return for every index of a dimension whether it is in a piece that a name splits; takes their number."""
    found = torch.ones(size(dim), dtype=torch.bool)
    found[positions(dim, {name: range(0)})] = False
    return found


def is_partial(dim: Dim, name: Name) -> bool:
    """Tell whether splitting a name splits some pieces of a dimension, and others not."""
    for each in resolve(dim):
        pieces = each.pieces or ()
        if len({carries(piece, name) for piece in pieces}) > 1 or any(is_partial(piece, name) for piece in pieces):
            return True
    return False


def positions(dim: Dim, part: Mapping[Name, range]) -> torch.Tensor:
    """Return which indices of a dimension belong to ranges of names, in ascending order; takes their number."""
    found = torch.zeros(1, dtype=torch.int64)
    for each in resolve(dim):
        found = (found[:, None] * each.size + _own_positions(each, part)).flatten()
    return found


def _own_positions(each: Name, part: Mapping[Name, range]) -> torch.Tensor:
    if each in part:
        return torch.arange(part[each].start, part[each].stop)
    if each.pieces is None:
        return torch.arange(each.size)
    return torch.cat([start + positions(piece, part) for start, piece in _with_offsets(each.pieces)])
