"""How parameters are divided, and choices that repeat earlier ones."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.split.analysis import Analysis, analyse
from autopar.capture.split.choice import choose
from autopar.capture.split.cuts import AttributeCut, cuts_of
from autopar.capture.split.names import MismatchError
from autopar.capture.split.rewrite import split_layer
from autopar.capture.split.rules import ranges
from drawn_split import Drawn
from single_layers import layer_of


class Grouped(nn.Module):
    """Two key heads with two queries each, in one fused projection; and two matrices after them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 16, bias=False), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 10), nn.Linear(10, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).split([8, 4, 4], -1)
        query = query.unflatten(-1, (4, 2)).transpose(1, 2)
        key, value = (each.unflatten(-1, (2, 2)).transpose(1, 2).repeat_interleave(2, 1) for each in (key, value))
        x = x + self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def grouped() -> Analysis:
    torch.manual_seed(0)
    return analyse(layer_of(Grouped(), torch.zeros(2, 3, 8)))


def drawn(seed: int) -> Analysis:
    return analyse(layer_of(Drawn(seed), torch.zeros(2, 3, 8, dtype=torch.float64)))


def test_a_part_has_ranges_of_queries_keys_and_values_and_uneven_ones_of_a_plain_name() -> None:
    analysis = grouped()
    cuts = cuts_of(analysis, choose(analysis, 4))
    assert cuts["held_up_weight"] == AttributeCut(0, (((0, 3),), ((3, 6),), ((6, 8),), ((8, 10),)))
    assert cuts_of(analysis, choose(analysis, 2))["held_qkv_weight"] == AttributeCut(
        0, (((0, 4), (8, 10), (12, 14)), ((4, 8), (10, 12), (14, 16)))
    )
    assert "held_down_bias" not in cuts
    # Of two key heads, two parts have the same one.
    assert cuts["held_qkv_weight"] == AttributeCut(
        0,
        (
            ((0, 2), (8, 10), (12, 14)),
            ((2, 4), (8, 10), (12, 14)),
            ((4, 6), (10, 12), (14, 16)),
            ((6, 8), (10, 12), (14, 16)),
        ),
    )


@pytest.mark.parametrize("seed", range(16))
def test_ranges_are_the_indices_that_a_part_is_cut_by(seed: int) -> None:
    layer = layer_of(Drawn(seed), torch.zeros(2, 3, 8, dtype=torch.float64))
    analysis = analyse(layer)
    cuts = cuts_of(analysis, choose(analysis, 2))
    for index in range(2):
        part = split_layer(layer, None, index, 2)  # type: ignore[arg-type]
        written = {
            name: [i for start, stop in cut.parts[index] for i in range(start, stop)] for name, cut in cuts.items()
        }
        assert written == {name: cut.indices.tolist() for name, cut in part.cuts.items()}
        assert {name: cut.dim for name, cut in part.cuts.items()} == {name: cut.dim for name, cut in cuts.items()}


def test_indices_without_a_gap_are_one_range() -> None:
    for indices in ([3], [0, 1, 2], [0, 2, 3, 7], [1, 3, 5]):
        found = ranges(torch.tensor(indices))
        assert [i for start, stop in found for i in range(start, stop)] == indices
        assert all(stop < start for (_, stop), (start, _) in pairwise(found))


def restored(cuts: dict[str, AttributeCut]) -> dict[str, AttributeCut]:
    """Write cuts to JSON and read them back."""
    text = json.dumps({name: cut._asdict() for name, cut in cuts.items()})
    return {
        name: AttributeCut(each["dim"], tuple(tuple((a, b) for a, b in part) for part in each["parts"]))
        for name, each in json.loads(text).items()
    }


@pytest.mark.parametrize("seed", range(20))
def test_a_choice_repeats_the_cuts_that_were_recorded_of_any(seed: int) -> None:
    """Also of a choice that would not be made now: one of fewer regions."""
    analysis, another, count = drawn(seed), drawn(seed), 2 if seed % 3 else 4
    splits = choose(analysis, count)
    for end in range(len(splits) + 1):
        cuts = cuts_of(analysis, splits[:end])
        again = choose(another, count, restored(cuts))
        assert [split.counts for split in again] == [split.counts for split in splits[:end]]
        assert cuts_of(analysis, choose(analysis, count, cuts)) == cuts


def test_cuts_that_cannot_be_repeated_are_refused_with_the_parameter() -> None:
    analysis = grouped()
    cuts = cuts_of(analysis, choose(analysis, 2))
    up = cuts["held_up_weight"]
    for wrong in (up._replace(dim=1), up._replace(parts=up.parts[::-1])):
        with pytest.raises(MismatchError, match="held_up_weight cannot be cut in 2 parts"):
            choose(analysis, 2, {**cuts, "held_up_weight": wrong})
    with pytest.raises(MismatchError, match="held_down_bias"):
        choose(analysis, 2, {**cuts, "held_down_bias": AttributeCut(0, (((0, 4),), ((4, 8),)))})
    with pytest.raises(MismatchError, match="in 4 parts"):
        choose(analysis, 4, cuts)
    with pytest.raises(MismatchError, match="held_other"):
        split_layer(layer_of(Grouped(), torch.zeros(2, 3, 8)), None, 0, 2, {"held_other": up})  # type: ignore[arg-type]


def test_a_parameter_that_stays_whole_keeps_those_whole_that_are_cut_with_it() -> None:
    analysis = grouped()
    cuts = cuts_of(analysis, choose(analysis, 2))
    without = cuts_of(analysis, choose(analysis, 2, forbidden=["held_down_weight", "held_down_bias", "no_such"]))
    assert cuts.keys() - without.keys() == {"held_up_weight", "held_up_bias", "held_down_weight"}
    assert without.items() <= cuts.items()
    assert cuts_of(analysis, choose(analysis, 2, without, ["held_up_bias"])) == without
