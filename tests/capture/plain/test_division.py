"""How a whole model's forward is run so that every stage sees its own shares of rows."""

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from autopar.capture.layers.export import capture
from autopar.capture.model.source import UserModel, load
from autopar.capture.plain.division import (
    ROWS,
    WHOLE,
    Batch,
    Pattern,
    RowShare,
    divide,
    join_results,
    result_share,
    shares_of,
)
from autopar.formats.plan import Plan
from dictated import dictate
from paths import MODELS


def _planned(
    path: Path, widths: Sequence[int], shares: Sequence[Sequence[int]] | None = None
) -> tuple[UserModel, Plan]:
    user = load(str(path))
    return user, dictate(capture(user, user.build(0)), user, widths, 2, 6, shares=shares)


def _batch(user: UserModel) -> Batch:
    return Batch(user.load_batch(user.dataset(), range(6)))


def test_shares_of_any_call_join_to_the_whole_and_what_they_write_arrives_in_it() -> None:
    draw = random.Random(6)
    for _ in range(30):
        cuts = [0, *sorted(draw.sample(range(1, 8), draw.randint(0, 3))), 8]
        shares = [RowShare(i, i, *pair) for i, pair in enumerate(pairwise(cuts))]
        dims = [draw.choice((0, 1, 2, WHOLE, ROWS)) for _ in range(4)]
        leaves = [
            8 if dim == ROWS else torch.rand(3, 3, 3) if dim < 0 else torch.rand(3, 3, 8).movedim(2, dim)
            for dim in dims
        ]
        written = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        pattern = Pattern(tuple(dims), tuple(dims))
        parts = [pattern.share(written, share) for share in shares]
        assert [part[place] for part in parts for place in range(4) if dims[place] == ROWS] == [
            share.stop - share.start for share in shares for dim in dims if dim == ROWS
        ]
        assert all(
            torch.equal(one, other)
            for share, part in zip(shares, parts, strict=True)
            for one, other, dim in zip(result_share(leaves, dims, share), part, dims, strict=True)
            if dim != ROWS
        )
        for leaf, whole, dim in zip(leaves, join_results(parts, pattern.result_dims), dims, strict=True):
            assert dim == ROWS or torch.equal(leaf, whole)
        for part in parts:
            for value, dim in zip(part, dims, strict=True):
                if dim >= 0:
                    value.add_(1.0)
        # Copies were written, and the call's own tensors only when they are given back.
        assert all(dim < 0 or torch.equal(leaf, own) for leaf, own, dim in zip(leaves, written, dims, strict=True))
        pattern.give_back(written, parts)
        assert all(dim < 0 or torch.equal(leaf + 1, own) for leaf, own, dim in zip(leaves, written, dims, strict=True))


def test_every_row_is_of_one_share_and_calls_that_draw_are_split_where_stages_divide_differently() -> None:
    _, plan = _planned(MODELS / "dropout.py", (3, 2), shares=[[1, 2, 3], [2, 4]])
    found = [[(share.replica, share.start, share.stop) for share in shares_of(stage, 1)] for stage in plan.stages]
    assert found == [[(0, 0, 1), (1, 1, 3), (2, 3, 6)], [(0, 0, 2), (1, 2, 6)]]
    turns = plan.stages[0].model_copy(update={"division": "round-robin", "shares": (6, 6, 6)})
    assert [shares_of(turns, micro_batch) for micro_batch in (0, 4)] == [
        (RowShare(0, 0, 0, 6),),
        (RowShare(1, 0, 0, 6),),
    ]
    path = MODELS / "dropout.py"
    user, alone = _planned(path, (1, 1))
    assert divide(lambda: user.build(0), alone, user, _batch(user)).share_stage is None
    user, alike = _planned(path, (2, 2), shares=[[2, 4], [2, 4]])
    assert divide(lambda: user.build(0), alike, user, _batch(user)).share_stage == 0
    user, several = _planned(path, (3, 1))
    model = user.build(0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    division = divide(lambda: model, several, user, _batch(user))
    assert division.share_stage is None
    blocks = {layer.split(".")[0] for layer in several.stages[0].layers}
    assert {path.split(".")[0] for path, _ in division.splits} == blocks
    assert all(set(pattern.result_dims) == {0} for pattern in division.splits.values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
