"""Pieces: where what a rank holds of a tensor lies in the whole, which replicas and teams may divide.

In comes a tensor of a rank; out come views of it, each with the index ranges that it has of the whole. A part of a
fused weight has several ranges of one dimension, and so several pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from autopar.formats.checkpoint import IndexRange, Kind, key_of
from autopar.formats.cuts import CutPiece, ParameterCut
from autopar.runtime.stage.parameters import Team, cut_views, local, sharded_ranges


class HeldPiece(NamedTuple):
    """What a rank holds of a tensor, or one of several pieces of that."""

    kind: Kind
    name: str
    state: str | None
    shape: tuple[int, ...]
    """Of the whole."""
    ranges: tuple[IndexRange, ...]
    """Of the dimensions that are not whole here."""
    tensor: torch.Tensor
    """This rank's."""
    is_sharded: bool = False
    """Whether replicas divide it."""
    answers: bool = True
    """Whether this rank is the first of its team that has it."""
    number: int = 0
    """Among several pieces."""

    @property
    def key(self) -> str:
        """Its name within a file."""
        name = key_of(self.kind, self.name, self.state)
        return f"{self.number}:{name}" if self.number else name


def held_pieces(
    kind: Kind, name: str, tensor: torch.Tensor, state: str | None = None, team: Team | None = None
) -> list[HeldPiece]:
    """Return what this rank holds of a tensor.

    Args:
        kind: what it is.
        name: of the parameter or buffer that it is, or belongs to.
        tensor: this rank's.
        state: what it is to the optimizer.
        team: with whom the rank divides the tensor; None: it is alike on all of a team.
    """
    # What has no rows here has no such range, and nobody writes it.
    sides, own = sharded_ranges(tensor), local(tensor.detach())
    ranges = [IndexRange.model_construct(dim=dim, start=start, stop=stop) for dim, start, stop in sides]
    cut = None if team is None else team.cuts.get(name)
    if team is None or cut is None:
        first = team is None or team.part == 0
        return [HeldPiece(kind, name, state, tuple(tensor.shape), tuple(ranges), own, bool(ranges), first)]
    whole, others = team.shape(name, tensor.shape), [each for each in ranges if each.dim != cut.dim]
    bounds = next(((each.start, each.stop) for each in ranges if each.dim == cut.dim), (0, tensor.shape[cut.dim]))
    return [
        HeldPiece(
            kind, name, state, whole, (*others, _range(cut, piece)), view, bool(ranges), piece.parts[0] == team.part, at
        )
        for at, (piece, view) in enumerate(cut_views(cut, team.part, bounds, own))
    ]


def _range(cut: ParameterCut, piece: CutPiece) -> IndexRange:
    return IndexRange.model_construct(dim=cut.dim, start=piece.start, stop=piece.start + piece.size)


def fill(pieces: Sequence[HeldPiece], read: Callable[[Sequence[IndexRange]], torch.Tensor]) -> None:
    """Put stored values where pieces have theirs; ``read`` gives those of ranges of the whole."""
    for piece in pieces:
        if piece.tensor.numel():
            piece.tensor.copy_(read(piece.ranges))


def own_values(
    name: str, parameter: torch.Tensor, team: Team, read: Callable[[Sequence[IndexRange]], torch.Tensor]
) -> torch.Tensor:
    """Return what a rank has of something stored that is divided as its parameter is; see :func:`fill`."""
    own = local(parameter)
    if not own.numel() and own is not parameter:
        return torch.empty_like(own)
    found = [read(piece.ranges) for piece in held_pieces("parameter", name, parameter, None, team)]
    return found[0] if len(found) == 1 else torch.cat(found, dim=team.cuts[name].dim)
