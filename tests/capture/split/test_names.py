"""Names against a plain list of every index's labels."""

import random

import pytest
import torch

from autopar.capture.split.names import (
    Dim,
    MismatchError,
    Name,
    block,
    carries,
    cut,
    factor,
    is_partial,
    join,
    leaves,
    positions,
    resolve,
    size,
    split_places,
    unite,
)


def labels(dim: Dim) -> list[dict[Name, int]]:
    """Write out, for every index of a dimension, where it is in every name."""
    found: list[dict[Name, int]] = [{}]
    for name in resolve(dim):
        if name.pieces is None:
            own = [{name: index} for index in range(name.size)]
        else:
            own = [label for piece in name.pieces for label in labels(piece)]
        found = [{**outer, **inner} for outer in found for inner in own]
    return found


def draw_dim(draw: random.Random, names: list[Name], depth: int = 2) -> Dim:
    found: list[Name] = []
    for _ in range(draw.randint(1, 2)):
        if depth and draw.random() < 0.3:
            found += join([draw_dim(draw, names, depth - 1) for _ in range(2)])
        else:
            found.append(draw.choice(names))
    return tuple(found)


@pytest.mark.parametrize("seed", range(60))
def test_positions_are_those_whose_label_is_in_the_part(seed: int) -> None:
    draw = random.Random(seed)
    dim = draw_dim(draw, [Name(draw.randint(1, 4)) for _ in range(3)])
    for name in dict.fromkeys(leaves(dim)):
        try:
            if not carries(dim, name):
                continue
        except MismatchError:
            continue
        part = range(1, name.size)
        every = labels(dim)
        wanted = [index for index, label in enumerate(every) if label.get(name, part.start) in part]
        assert positions(dim, {name: part}).tolist() == wanted
        assert split_places(dim, name).tolist() == [name in label for label in every]
        assert is_partial(dim, name) == (len({name in label for label in every}) > 1)


def test_uniting_factors_what_is_not_factored_and_a_cut_goes_through_pieces() -> None:
    whole, heads, width = Name(12), Name(3), Name(4)
    unite((whole,), (heads, width))
    assert resolve((whole,)) == (heads, width)
    outer, inner = Name(6), Name(2)
    unite((whole,), (outer, inner))
    assert [name.size for name in resolve((outer, inner))] == [3, 2, 2]
    assert resolve((outer, inner)) == resolve((whole,))
    first, inner = Name(6), Name(2)
    left, right = cut((first, inner), (0, 4, 12))
    assert (size(left), size(right)) == (4, 8)
    assert [size(piece) for piece in cut((first, inner), (0, 8, 12))] == [8, 4]
    assert first.pieces is not None
    assert [size(piece) for piece in first.pieces] == [2, 2, 2]
    with pytest.raises(MismatchError):
        cut((first, inner), (0, 3, 12))


def test_pieces_unite_once_where_they_fit_and_have_the_obstacles_of_any() -> None:
    with pytest.raises(MismatchError, match="4 and 6"):
        unite((Name(4),), (Name(6),))
    with pytest.raises(MismatchError, match="2 times"):
        unite((Name(3), Name(2)), (Name(3),))
    one, other = Name(6), Name(6)
    cut((one,), (0, 2, 6))
    cut((other,), (0, 4, 6))
    with pytest.raises(MismatchError, match="two ways"):
        unite((one,), (other,))
    with pytest.raises(MismatchError):
        factor(one, 2)
    with pytest.raises(MismatchError, match="twice"):
        carries((name := Name(2), name), name)
    whole, other = Name(6), Name(6)
    block((whole,), "first")
    pieces = cut((whole,), (0, 2, 6))
    unite((other,), (whole,))
    block((other,), "second")
    assert {name.obstacle for piece in pieces for name in leaves(piece)} == {"first"}
    assert torch.equal(positions((other,), {}), torch.arange(6))
    block((third := Name(6),), "third")
    assert [name.obstacle for name in factor(third, 2)] == ["third"] * 2
