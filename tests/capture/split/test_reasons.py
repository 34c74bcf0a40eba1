"""What is said of layers that do not split, against trying all numbers of parts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.split.analysis import Analysis, analyse
from autopar.capture.split.choice import choose
from autopar.capture.split.cuts import cuts_of
from autopar.capture.split.reasons import counts_that_split, explain, written_tensor
from drawn_split import Drawn
from single_layers import layer_of


class Heads(nn.Module):
    """Attention of some heads, and two matrices that split in any number of parts."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.width = 24 // heads
        self.qkv, self.out, self.up, self.down = (
            nn.Linear(24, 72),
            nn.Linear(24, 24),
            nn.Linear(24, 24),
            nn.Linear(24, 24),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces = (each.unflatten(-1, (-1, self.width)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(*pieces).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Function(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(6, 6), nn.Linear(6, 6), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.function(self.up(x)))  # type: ignore[operator]


def analysis_of(module: nn.Module, *sizes: int) -> Analysis:
    return analyse(layer_of(module, torch.zeros(2, 3, *sizes)))


def test_a_block_splits_in_the_numbers_that_its_heads_allow() -> None:
    six = analysis_of(Heads(6), 24)
    assert counts_that_split(six) == (2, 3, 6)
    assert counts_that_split(six, 3) == (2, 3)
    assert explain(six, 3) is None
    assert explain(six, 4) == "does not split in 4 parts; 2, 3, 6 would"
    assert explain(analysis_of(Heads(12), 24), 12) is None


def test_what_splits_in_no_number_of_parts_says_what_keeps_it_whole() -> None:
    assert explain(analysis_of(nn.LayerNorm(6), 6), 2) == ("splits in no number of parts: it is normalised as a whole")
    assert explain(analysis_of(nn.GELU(), 6), 2) == "splits in no number of parts: it has no parameters"


def test_a_layer_that_writes_a_buffer_says_which() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    analysis = analyse(layer_of(module, torch.zeros(2, 6)))
    assert explain(analysis, 2) == "splits in no number of parts: it writes into held_1_num_batches_tracked"
    seen = analysis_of(Function(lambda x: (x.view(-1, 3, 6), x.relu_())[0]), 6)
    assert written_tensor(seen.module) == "tensors that are read again (aten.relu_.default)"
    assert written_tensor(analysis_of(Function(F.relu_), 6).module) is None


@pytest.mark.parametrize("seed", range(20))
def test_numbers_of_parts_are_those_that_cut_nearly_as_much_as_any(seed: int) -> None:
    layer = layer_of(Drawn(seed), torch.zeros(2, 3, 8, dtype=torch.float64))
    analysis = analyse(layer)
    numbers = list[float]()
    for count in range(2, 6):
        cuts = cuts_of(analysis, choose(analysis, count))
        saved = 0.0
        for name, cut in cuts.items():
            length, parameter = layer.module.get_parameter(name).shape[cut.dim], layer.module.get_parameter(name)
            own = [sum(stop - start for start, stop in part) for part in cut.parts]
            saved += parameter.numel() * (1 - sum(own) / count / length)
        numbers.append(saved * count / (count - 1))
    wanted = [count for count, found in enumerate(numbers, 2) if found and found >= 0.9 * max(numbers)]
    assert list(counts_that_split(analysis, 5)) == wanted
    assert [count for count in range(2, 6) if explain(analysis, count, 5) is None] == wanted
