"""What is kept of a job: every element is written once, and read where it is; plain values come back equal."""

import json
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.formats.checkpoint import sides_of
from autopar.runtime.checkpoint.state import (
    NotPlainError,
    fill,
    from_plain,
    held_pieces,
    own_values,
    plain_items,
    to_plain,
)
from autopar.runtime.messages.transport import Exchange, InProcessTransport
from autopar.runtime.stage.parameters import Team
from drawn_plans import DIVISIONS, PARTS, team_plan


@settings(max_examples=40, deadline=None)
@given(DIVISIONS, st.integers(0, 1))
def test_pieces_that_ranks_answer_for_make_up_the_whole_and_all_are_read_back(
    holders: list[set[int]], dim: int
) -> None:
    holders = [*holders, set(range(PARTS))]
    plan = team_plan(holders, dim)
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


def test_what_a_team_has_alike_is_the_first_ones_and_values_come_back_through_json() -> None:
    plan = team_plan([{0}, {1}, {2}])
    teams = [Team(plan, part, InProcessTransport(Exchange(), part)) for part in range(PARTS)]
    pieces = [held_pieces("buffer", "b", torch.ones(2), None, team) for team in teams]
    assert [[piece.answers for piece in each] for each in pieces] == [[True], [False], [False]]
    for seed in range(200):
        value = _value(random.Random(seed))
        assert _same(from_plain(json.loads(json.dumps(to_plain(value), allow_nan=False))), value), seed
    assert math.isnan(float(str(from_plain(to_plain(math.nan)))))
    with pytest.raises(NotPlainError):
        to_plain(print)
    with pytest.raises(NotPlainError):
        to_plain(torch.zeros(5000))
    assert plain_items({"lr": 0.1, "hook": print}) == {"lr": 0.1}


def _value(rng: random.Random, depth: int = 3) -> object:
    made = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.randrange(-(2**60), 2**60),
        lambda: rng.choice([rng.gauss(0, 1e-8), 1e300, 5e-324, -0.0, math.inf, -math.inf]),
        lambda: rng.choice(["", "lr", "é\n"]),
        lambda: torch.tensor(rng.gauss(0, 1), dtype=rng.choice([torch.float32, torch.float64, torch.bfloat16])),
        lambda: torch.tensor([rng.randrange(100) for _ in range(3)]),
    ]
    if depth:
        made += [
            lambda: [_value(rng, depth - 1) for _ in range(rng.randrange(4))],
            lambda: tuple(_value(rng, depth - 1) for _ in range(rng.randrange(4))),
            lambda: {f"key{at}": _value(rng, depth - 1) for at in range(rng.randrange(4))},
        ]
    return rng.choice(made)()


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, float) and isinstance(other, float):
        return one == other and math.copysign(1, one) == math.copysign(1, other)
    return type(one) is type(other) and one == other
