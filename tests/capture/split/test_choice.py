"""Which names are chosen, and in which order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.split import choice
from autopar.capture.split.analysis import analyse
from autopar.capture.split.choice import Split, choose
from autopar.capture.split.rewrite import peers
from single_layers import layer_of


class Attention(nn.Module):
    """Heads of queries share those of keys and values in groups; written without a size of the whole."""

    def __init__(self, keys: int, group: int, width: int = 2) -> None:
        super().__init__()
        self.sizes = (keys, group, width)
        self.query = nn.Linear(8, keys * group * width)
        self.both = nn.Linear(8, 2 * keys * width)
        self.out = nn.Linear(keys * group * width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys, group, width = self.sizes
        query = self.query(x).unflatten(-1, (keys * group, width)).transpose(1, 2)
        both = self.both(x).unflatten(-1, (2, keys, width)).permute(2, 0, 3, 1, 4).unbind(0)
        key, value = (each.repeat_interleave(group, 1) for each in both)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def splits(module: nn.Module, count: int) -> tuple[Split, ...]:
    return choose(analyse(layer_of(module, torch.zeros(2, 3, 8))), count)


@pytest.mark.parametrize(
    ("keys", "group", "count", "counts"),
    [(4, 1, 2, (2,)), (4, 1, 4, (4,)), (2, 2, 2, (2,)), (2, 2, 4, (2, 2)), (2, 4, 8, (2, 4)), (6, 2, 4, (2, 2))],
)
def test_heads_are_split_and_where_they_are_too_few_their_queries_too(
    keys: int, group: int, count: int, counts: tuple[int, ...]
) -> None:
    (found,) = splits(Attention(keys, group), count)
    assert found.counts == counts
    assert [name.size for name in found.names] == [keys, group][: len(counts)]
    parts = [found.part(index) for index in range(count)]
    assert len({tuple((axis.index, axis.count) for axis in part.axes) for part in parts}) == count
    for index, part in enumerate(parts):
        assert peers(part, part.axes) == tuple(range(count))
        assert peers(part, []) == (index,)


class LongAttention(nn.Module):
    """Few keys, in plain operators: the width of heads could be split, if all scores were summed."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.both, self.out = nn.Linear(8, 32), nn.Linear(8, 16), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query(x).unflatten(-1, (2, 4, 4)).permute(0, 2, 3, 1, 4)
        key, value = self.both(x).unflatten(-1, (2, 2, 1, 4)).permute(2, 0, 3, 4, 1, 5)
        mixed = (query @ key.transpose(-1, -2)).softmax(-1) @ value
        return x + self.out(mixed.permute(0, 3, 1, 2, 4).flatten(2))


@pytest.mark.parametrize(("nearly", "counts"), [(choice.NEARLY, (2, 2)), (2.0, (4,))])
def test_what_saves_nearly_as_much_and_sums_much_less_is_preferred(
    nearly: float, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "NEARLY", nearly)
    (found,) = choose(analyse(layer_of(LongAttention(), torch.zeros(2, 16, 8))), 4)
    assert found.counts == counts


class Two(nn.Module):
    """Two pairs of matrices, the second of more numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 8))
        self.second = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.first(x) + self.second(x)


def test_what_saves_the_most_comes_first_and_only_even_parts_of_many_or_uneven_ones_of_a_plain_name_are_taken() -> None:
    assert [split.names[0].size for split in splits(Two(), 2)] == [6, 4]
    assert [split.names[0].size for split in splits(Two(), 4)] == [6, 4]
    assert [split.names[0].size for split in splits(Two(), 5)] == [6]
    assert splits(Two(), 7) == ()
    saved = [split.numbers_saved for split in splits(Two(), 2)]
    assert saved == [(8 * 6 + 6 + 6 * 8) / 2, (8 * 4 + 4 + 4 * 8) / 2]
    assert [split.numbers_summed for split in splits(Two(), 2)] == [3 * 8, 3 * 8]


def test_the_same_layer_is_always_split_alike() -> None:
    for module in (Two(), Attention(2, 2)):
        shown = [[(each.counts, sorted(map(str, each.region))) for each in splits(module, 4)] for _ in range(3)]
        assert shown[0] == shown[1] == shown[2]
