"""Which names are chosen, in which order; how that divides parameters; and what is said of layers that do not split."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.graph import Layer
from autopar.capture.split import choice
from autopar.capture.split.analysis import Analysis, analyse
from autopar.capture.split.choice import (
    AttributeCut,
    Split,
    choose,
    counts_that_split,
    cuts_of,
    explain,
    split_dim,
    written_tensor,
)
from autopar.capture.split.names import MismatchError
from autopar.capture.split.rewrite import peers, split_layer
from capture_zoo import Made
from drawn_split import drawn_layer
from single_layers import FewKeys, between, layer_of


def splits(module: nn.Module, count: int) -> tuple[Split, ...]:
    return choose(analyse(layer_of(module, torch.zeros(2, 3, 8))), count)


def counts_in(split: Split) -> tuple[int, ...]:
    """Return in how many parts each name is split."""
    return tuple(axis.count for axis in split.parts[0].axes)


@pytest.mark.parametrize(
    ("keys", "group", "count", "counts"),
    [(4, 1, 2, (2,)), (4, 1, 4, (4,)), (2, 2, 2, (2,)), (2, 2, 4, (2, 2)), (2, 4, 8, (2, 4)), (6, 2, 4, (2, 2))],
)
def test_heads_are_split_few_with_their_queries(keys: int, group: int, count: int, counts: tuple[int, ...]) -> None:
    (found,) = splits(FewKeys(keys, group), count)
    assert counts_in(found) == counts
    assert [name.size for name in found.names] == [keys, group][: len(counts)]
    parts = found.parts
    assert len(parts) == count
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
def test_smaller_sums_are_preferred(nearly: float, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "NEARLY", nearly)
    (found,) = choose(analyse(layer_of(LongAttention(), torch.zeros(2, 16, 8))), 4)
    assert counts_in(found) == counts


def two() -> nn.Module:
    """Make two pairs of matrices, the second of more numbers."""
    first, second = (nn.Sequential(nn.Linear(8, size), nn.GELU(), nn.Linear(size, 8)) for size in (4, 6))
    return Made(lambda m, x: x + m.first(x) + m.second(x), first=first, second=second)


def test_what_saves_most_is_first_and_parts_have_ranges_of_queries_keys_and_values() -> None:
    for count, sizes in ((2, [6, 4]), (4, [6, 4]), (5, [6]), (7, [])):
        assert [split.names[0].size for split in splits(two(), count)] == sizes
    saved = [split.numbers_saved for split in splits(two(), 2)]
    assert saved == [(8 * 6 + 6 + 6 * 8) / 2, (8 * 4 + 4 + 4 * 8) / 2]
    assert [split.numbers_summed for split in splits(two(), 2)] == [3 * 8, 3 * 8]
    analysis = analyse(grouped())
    cuts = cuts_of(analysis, choose(analysis, 2))
    without = cuts_of(analysis, choose(analysis, 2, forbidden=["held_down_weight", "held_down_bias", "no_such"]))
    assert cuts.keys() - without.keys() == {"held_up_weight", "held_up_bias", "held_down_weight"}
    assert without.items() <= cuts.items()
    assert cuts_of(analysis, choose(analysis, 2, without, ["held_up_bias"])) == without
    analysis = analyse(grouped())
    cuts = cuts_of(analysis, choose(analysis, 4))
    assert cuts["held_up_weight"] == AttributeCut(0, (((0, 3),), ((3, 6),), ((6, 8),), ((8, 10),)))
    assert cuts_of(analysis, choose(analysis, 2))["held_qkv_weight"] == AttributeCut(
        0, (((0, 4), (8, 10), (12, 14)), ((4, 8), (10, 12), (14, 16)))
    )
    assert "held_down_bias" not in cuts
    # Of two key heads, two parts have the same one.
    keys, others = ((8, 10), (12, 14)), ((10, 12), (14, 16))
    expected = (((0, 2), *keys), ((2, 4), *keys), ((4, 6), *others), ((6, 8), *others))
    assert cuts["held_qkv_weight"] == AttributeCut(0, expected)


class Grouped(FewKeys):
    """Two key heads with two queries each, in one fused projection; and two matrices after them."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.up, self.down = nn.Linear(8, 10), nn.Linear(10, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x + self.down(F.gelu(self.up(x)))


def grouped() -> Layer:
    return layer_of(Grouped(), torch.zeros(2, 3, 8))


@pytest.mark.some(4)
@pytest.mark.parametrize("seed", range(16))
def test_ranges_are_those_that_a_part_is_cut_by_and_those_of_the_first_split_of_a_parameter(seed: int) -> None:
    layer = drawn_layer(seed)
    analysis = analyse(layer)
    splits = choose(analysis, 2)
    expected: dict[str, tuple[int, list[list[int]]]] = {}
    for split in splits:
        for name, dims in analysis.parameters.items():
            at = split_dim(dims, split.parts[0])
            if at is not None and name not in expected:
                expected[name] = (at, [part.positions(dims[at]).tolist() for part in split.parts])
    cuts = cuts_of(analysis, splits)
    assert {
        name: (cut.dim, [cut.indices(part).tolist() for part in range(2)]) for name, cut in cuts.items()
    } == expected
    for index in range(2):
        part = split_layer(layer, None, index, 2)  # type: ignore[arg-type]
        assert part.cuts == cuts
        for name in layer.parameters:
            whole, own = layer.module.get_parameter(name), part.module.get_parameter(name)
            if name in cuts:
                whole = whole.index_select(cuts[name].dim, torch.tensor(expected[name][1][index]))
            assert torch.equal(own, whole)


@pytest.mark.some(6)
@pytest.mark.parametrize("seed", range(20))
def test_a_choice_is_repeated_and_numbers_of_parts_cut_nearly_as_much_as_any(seed: int) -> None:
    """Also of a choice that would not be made now: one of fewer regions."""
    analysis, another, count = analyse(drawn_layer(seed)), analyse(drawn_layer(seed)), 2 if seed % 3 else 4
    splits = choose(analysis, count)
    for end in range(len(splits) + 1):
        cuts = cuts_of(analysis, splits[:end])
        again = choose(another, count, cuts)
        assert list(map(counts_in, again)) == list(map(counts_in, splits[:end]))
        assert cuts_of(analysis, choose(analysis, count, cuts)) == cuts
    layer = drawn_layer(seed)
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


def analysis_of(module: nn.Module, size: int) -> Analysis:
    return analyse(layer_of(module, torch.zeros(2, 3, size)))


def test_blocks_split_as_their_heads_allow_and_cuts_that_cannot_be_repeated_are_refused() -> None:
    six = analysis_of(FewKeys(6, 1), 8)
    assert counts_that_split(six) == (2, 3, 6)
    assert counts_that_split(six, 3) == (2, 3)
    assert explain(six, 3) is None
    assert explain(six, 4) == "does not split in 4 parts; 2, 3, 6 would"
    assert explain(analysis_of(FewKeys(12, 1), 8), 12) is None
    assert explain(analysis_of(nn.LayerNorm(6), 6), 2) == "splits in no number of parts: it is normalised as a whole"
    assert explain(analysis_of(nn.GELU(), 6), 2) == "splits in no number of parts: it has no parameters"
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    analysis = analyse(layer_of(module, torch.zeros(2, 6)))
    assert explain(analysis, 2) == "splits in no number of parts: it writes into held_1_num_batches_tracked"
    seen = analysis_of(between(lambda x: (x.view(-1, 3, 6), x.relu_())[0]), 4)
    assert written_tensor(seen.module) == "tensors that are read again (aten.relu_.default)"
    assert written_tensor(analysis_of(between(F.relu_), 4).module) is None
    analysis = analyse(grouped())
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
        split_layer(grouped(), None, 0, 2, {"held_other": up})  # type: ignore[arg-type]
