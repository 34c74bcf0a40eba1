"""Where what ranks hold of tensors lies in the whole: every element is written once, and read where it is."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.formats.checkpoint import sides_of
from autopar.runtime.checkpoint.pieces import fill, held_pieces, own_values
from autopar.runtime.messages.transport import Exchange, InProcessTransport
from autopar.runtime.stage.parameters import Team
from team_cuts import DIVISIONS, PARTS, cut_by, team_plan


@settings(max_examples=40, deadline=None)
@given(DIVISIONS, st.integers(0, 1))
def test_pieces_that_ranks_answer_for_make_up_the_whole_and_all_are_read_back(
    holders: list[set[int]], dim: int
) -> None:
    holders = [*holders, set(range(PARTS))]
    plan = team_plan(cut_by(holders, dim))
    shape = (len(holders), 2) if dim == 0 else (2, len(holders))
    whole, written = torch.arange(2.0 * len(holders)).view(shape), torch.zeros(shape)
    for part in range(PARTS):
        team = Team(plan, part, InProcessTransport(Exchange(), part))
        own = team.take("w", whole).clone()
        pieces = held_pieces("parameter", "w", own, None, team)
        assert len({piece.key for piece in pieces}) == len(pieces)
        for piece in pieces:
            assert piece.shape == shape
            places = tuple(slice(*side) for side in sides_of(piece.ranges, shape))
            torch.testing.assert_close(piece.tensor, whole[places])
            written[places] += piece.answers * 1.0

        def read(ranges: object) -> torch.Tensor:
            return whole[tuple(slice(*side) for side in sides_of(ranges, shape))]  # type: ignore[arg-type]

        assert torch.equal(own_values("w", own, team, read), own)
        cleared = torch.zeros_like(own)
        fill(held_pieces("parameter", "w", cleared, None, team), read)
        assert torch.equal(cleared, own)
    assert written.eq(1).all()


def test_what_is_alike_on_all_of_a_team_is_the_first_ones() -> None:
    plan = team_plan(cut_by([{0}, {1}, {2}]))
    teams = [Team(plan, part, InProcessTransport(Exchange(), part)) for part in range(PARTS)]
    pieces = [held_pieces("buffer", "b", torch.ones(2), None, team) for team in teams]
    assert [[piece.answers for piece in each] for each in pieces] == [[True], [False], [False]]
