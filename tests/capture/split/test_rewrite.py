"""Layers in parts, as threads, against the whole layer: outputs and the gradients of all that has one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.split.analysis import analyse
from autopar.capture.split.choice import choose
from autopar.capture.split.rewrite import split_layer
from autopar.capture.split.rules.draws import attend_locally, draw_locally
from capture_zoo import Made
from drawn_split import drawn_layer
from part_threads import Comparison, compare, run_parts
from single_layers import FewKeys, layer_of, numbers

CLOSE = 1e-12


class MLP(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Head(nn.Module):
    def __init__(self, classes: int, **options: object) -> None:
        super().__init__()
        self.head = nn.Linear(8, classes)
        weight = options.pop("weight", None)
        self.register_buffer("weight", weight if isinstance(weight, torch.Tensor) else None)
        self.options = options

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x).transpose(1, 2), target, self.weight, **self.options)  # type: ignore[arg-type]


def compared(module: nn.Module, count: int, *inputs: torch.Tensor) -> Comparison:
    torch.manual_seed(0)
    return compare(layer_of(module.double(), *inputs), inputs, count)


@pytest.mark.parametrize(("hidden", "count"), [(12, 2), (12, 4), (7, 4), (10, 4)])
def test_an_mlp_is_split_by_what_is_between_its_matrices_evenly_or_not(hidden: int, count: int) -> None:
    found = compared(MLP(hidden=hidden), count, numbers(2, 3, 8))
    assert found.error < CLOSE
    assert found.forward == found.backward == [(2, 3, 8)]
    assert [name.size for split in found.splits for name in split.names] == [hidden]
    assert sum(found.parameters.values()) == 3


@pytest.mark.pairs
@pytest.mark.parametrize("padding", [None, 0, 5])
@pytest.mark.parametrize(("rows", "count"), [(8, 2), (7, 2), (7, 4), (9, 4)])
def test_rows_of_an_embedding_are_split(rows: int, count: int, padding: int | None) -> None:
    ids = torch.tensor([[0, 5, 6, 0], [1, 2, 5, 3]])
    found = compared(nn.Embedding(rows, 4, padding_idx=padding), count, ids)
    assert found.error < CLOSE
    assert found.forward == [(2, 4, 4)]
    assert found.backward == []
    assert found.split_share == 1


@pytest.mark.pairs
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("classes", "count"), [(8, 2), (7, 2), (9, 4)])
def test_a_loss_is_split(classes: int, count: int, reduction: str, smoothing: float, weighted: bool) -> None:
    weight = numbers(classes).abs() if weighted else None
    head = Head(classes, reduction=reduction, label_smoothing=smoothing, ignore_index=2, weight=weight)
    target = torch.tensor([[0, 2, 6], [2, 5, 1]])
    found = compared(head, count, numbers(2, 3, 8), target)
    assert found.error < CLOSE
    assert found.forward == [(2, 3, count + 1 + bool(smoothing))]
    assert found.backward == [(2, 3, 8)]
    assert found.split_share == 1


class PerHead(nn.Module):
    """Attend with a slope of every head, which is a buffer, and a bias that another layer made."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("slopes", torch.tensor([1.0, 2.0, 3.0, 4.0]).view(4, 1, 1))

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, 2)).permute(2, 0, 3, 1, 4)
        distance = torch.arange(3).cumsum(0) * torch.ones(4, 3, 1)
        mixed = (query @ key.transpose(-1, -2) + self.slopes * distance + bias).softmax(-1) @ value
        return x + self.out(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("count", [2, 4])
def test_a_part_is_taken_of_what_is_there_as_a_whole(count: int) -> None:
    found = compared(PerHead(), count, numbers(2, 3, 8), numbers(2, 4, 3, 3))
    assert found.error < CLOSE
    assert found.split_share > 0.9
    assert found.forward == [(2, 3, 8)]
    assert sorted(found.backward) == [(2, 3, 8), (2, 4, 3, 3)]


# What a matrix makes with itself: both dimensions of one tensor have the same name.
PRODUCT = Made(lambda m, x: (h := m.up(x)).transpose(1, 2).matmul(h).tanh().sum((1, 2)), up=nn.Linear(8, 6))
# Looks up as many tokens as there are, and compares them with all: rows are kept and summed over.
IDS = torch.tensor([3, 3, 0, 1, 5, 2])
LOOKUP = Made(lambda m, x: x + (m.table(m.ids) * m.table.weight).sum(0), table=nn.Embedding(6, 8), ids=IDS)


@pytest.mark.parametrize("module", [PRODUCT, LOOKUP])
def test_a_name_that_is_in_two_places_at_once_is_not_split(module: nn.Module) -> None:
    found = compared(module, 2, numbers(2, 3, 8))
    assert found.error < CLOSE
    assert [name.size for split in found.splits for name in split.names if name.size == 6] == []


COMPLEX = Made(
    lambda m, x: (h := torch.complex(x, x.flip(-1)) @ m.weight).real + h.imag.tanh(),
    weight=nn.Parameter(torch.randn(8, 8, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))),
)
ROTATED = Made(
    lambda m, x: m.down(torch.view_as_real(torch.view_as_complex(m.up(x).unflatten(-1, (6, 2))) * m.turn).flatten(-2)),
    up=nn.Linear(8, 12).double(),
    down=nn.Linear(12, 8).double(),
    turn=nn.Parameter(torch.randn(6, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))),
)


@pytest.mark.pairs
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("module", [COMPLEX, ROTATED])
def test_gradients_of_complex_numbers_are_summed_too(
    module: nn.Module, count: int, sliced: bool, deferred: bool
) -> None:
    inputs = numbers(2, 4, 8)
    layer = layer_of(module, inputs)
    edges = dict.fromkeys((*layer.inputs, *layer.outputs), 1) if sliced else {}
    found = compare(layer, (inputs,), count, sequence=edges, deferred=deferred)
    assert found.error < CLOSE
    assert found.split_share > 0


@pytest.mark.some(5)
@pytest.mark.parametrize("seed", range(60))
def test_drawn_layers_train_in_parts_as_whole_and_in_slices_too(seed: int) -> None:
    """Slices are of the sequence, of three, or of the width; what cannot be computed in slices is computed whole."""
    layer, x, count = drawn_layer(seed), numbers(2, 3, 8), 2 if seed % 2 else 4
    # Some multiply numbers that grow, and with them what was rounded.
    assert compare(layer, [x], count, deferred=seed % 3 == 0).error < 10 * CLOSE
    names = [layer.inputs, layer.outputs, (*layer.inputs, *layer.outputs)][seed % 3]
    sliced = compare(layer, [x], count, sequence=dict.fromkeys(names, 2), deferred=seed % 5 < 3)
    assert sliced.error < 10 * CLOSE


def test_most_drawn_layers_are_split_and_impossible_classes_and_tokens_are_as_torch_has_them() -> None:
    assert sum(bool(choose(analyse(drawn_layer(seed)), 2)) for seed in range(0, 60, 5)) > 6
    head = Head(8)
    with torch.no_grad():
        head.head.bias[6:] = -torch.inf
    found = compared(head, 4, 1e3 * numbers(2, 3, 8), torch.tensor([[0, 1, 2], [3, 5, 4]]))
    assert found.error < CLOSE
    assert found.split_share == 1
    layer = layer_of(nn.Embedding(8, 4), torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(IndexError):
        run_parts(2, lambda sums, index: split_layer(layer, sums, index, 2).module(2, torch.full((2, 3), 8)))


class Dropping(nn.Module):
    """Attend with dropout of weights, and of what is in a region and outside, in several orders of memory."""

    def __init__(self, fused: bool, width: int = 2) -> None:
        super().__init__()
        self.fused, self.width = fused, width
        self.qkv, self.out = nn.Linear(8, 12 * width), nn.Linear(4 * width, 8)
        self.up, self.down = nn.Linear(8, 10), nn.Linear(10, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x, 0.2)
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, self.width)).permute(2, 0, 3, 1, 4)
        query = F.dropout(query, 0.1)
        if self.fused:
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.2, is_causal=True)
        else:
            mixed = F.dropout((query @ key.transpose(-1, -2)).softmax(-1), 0.2) @ value
        x = x + F.dropout(self.out(F.dropout(mixed.transpose(1, 2) * 2, 0.1).flatten(2)), 0.2)
        return x + torch.rand_like(x[:, :1, :1]) + self.down(F.dropout(F.gelu(self.up(x)), 0.5))


@pytest.mark.pairs
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("count", [2, 4])
def test_numbers_that_are_drawn_do_not_depend_on_the_number_of_parts(count: int, fused: bool, rows: int) -> None:
    found = compare(layer_of(Dropping(fused).double(), numbers(2, 3, 8)), (numbers(rows, 3, 8),), count)
    assert found.error < CLOSE
    assert [name.size for split in found.splits for name in split.names] == [4, 10]
    assert len(found.forward) == len(found.backward) == 2


@pytest.mark.parametrize("share_keys", [False, True])
def test_parts_may_draw_the_dropout_of_fused_attention_each_for_itself(share_keys: bool) -> None:
    """Other weights are dropped on every part, the same ones each time; what is drawn behind is alike."""
    query, key = numbers(2, 4, 50, 8), numbers(2, 2 if share_keys else 4, 50, 8)
    value = torch.eye(50, dtype=torch.float64).expand(2, key.shape[1], 50, 50)
    weights = F.scaled_dot_product_attention(query, key, value, enable_gqa=share_keys)

    def dropped(part: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(5)
        return attend_locally(part, query, key, value, None, 0.25, False, None, share_keys), torch.rand(1)

    torch.manual_seed(5)
    first, following = torch.rand(1), torch.rand(1)
    masks = []
    for part in (0, 1, 0):
        found, then = dropped(part)
        assert then == following != first
        mask = found != 0
        torch.testing.assert_close(found, weights * mask / 0.75)
        assert float(mask.double().mean()) == pytest.approx(0.75, abs=0.02)
        masks.append(mask)
    assert torch.equal(masks[0], masks[2])
    # Of two masks that do not depend on each other, 1 - 2 * 0.75 * 0.25 agree.
    assert float((masks[0] == masks[1]).double().mean()) == pytest.approx(0.625, abs=0.02)


@pytest.mark.parametrize(("count", "alone"), [(2, True), (3, False)])
def test_heads_that_no_parts_divide_draw_for_all(count: int, alone: bool) -> None:
    """Two matrices behind them are split among three parts; four heads are not."""
    part = split_layer(layer_of(Dropping(True).double(), numbers(2, 3, 8)), None, 0, count)  # type: ignore[arg-type]
    assert part.cuts
    assert draw_locally(part.module, 0) == alone


@pytest.mark.parametrize(("keys", "group", "count"), [(1, 4, 2), (1, 4, 4), (2, 2, 4), (2, 4, 4), (2, 4, 8)])
def test_keys_of_a_fused_projection_are_on_every_part_where_they_are_too_few(keys: int, group: int, count: int) -> None:
    layer, x = layer_of(FewKeys(keys, group).double(), numbers(2, 3, 8)), numbers(2, 3, 8)
    found = compare(layer, (x,), count)
    assert found.error < CLOSE
    assert all(cut for name, cut in found.parameters.items() if "out_bias" not in name)
    assert found.forward == [(2, 3, 8)]
    # Of the whole rows of the projection, and its bias.
    rows = 4 * keys // min(keys, count)
    assert sorted(found.backward) == [(2, 3, 8), (rows,), (rows, 8)]
    deferred = compare(layer, (x,), count, deferred=True)
    assert deferred.error < CLOSE
    assert deferred.backward[0] == (2, 3, 8)
