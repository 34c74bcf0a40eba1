"""A part that runs alone computes what it computes beside others, on finite numbers, and notes what they sum."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.capture.graph import Layer
from autopar.capture.split.alone import LoneSums, PartsBeside
from autopar.capture.split.analysis import Analysis, analyse
from autopar.capture.split.choice import choose
from autopar.capture.split.rewrite import LayerPart, rewrite
from autopar.capture.split.rules.draws import attend_locally
from autopar.capture.split.sequence import find_edges, sequence_dims
from autopar.capture.split.sums import Sums
from autopar.formats.profile import PartSum
from capture_zoo import Made
from drawn_split import drawn_layer
from part_threads import ThreadSums, run_parts
from single_layers import AttentionBlock, FewKeys, layer_of, numbers

KINDS = {"all_reduce": "sum", "all_gather": "gather", "reduce_scatter": "reduce_scatter"}


def words(count: int = 97) -> Layer:
    """Make an embedding, a norm that has nothing added below its root, and a head with its loss."""
    module = Made(
        lambda m, tokens: F.cross_entropy(m.up(_unit(m.table(tokens))).movedim(-1, 1), tokens),
        table=nn.Embedding(count, 6),
        up=nn.Linear(6, count),
    )
    return layer_of(module.double(), torch.arange(6).view(2, 3))


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.pow(2).mean(-1, keepdim=True).sqrt()


def shares() -> Layer:
    """Make a region whose sum is divided by, and is zero for most parts."""
    module = Made(
        lambda m, x: m.down(_shared(F.relu(m.up(x) - m.high))),
        up=nn.Linear(4, 8),
        down=nn.Linear(8, 4),
        high=nn.Parameter(torch.tensor([-100.0, *[100.0] * 7])),
    )
    return layer_of(module.double(), numbers(2, 3, 4))


def _shared(x: torch.Tensor) -> torch.Tensor:
    return x / x.sum(-1, keepdim=True)


def present(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    return [each for each in tensors if each is not None]


def bytes_of(kinds: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[tuple[str, int]]:
    return [(kind, 8 * torch.Size(shape).numel()) for kind, shape in zip(kinds, shapes, strict=True)]


def run(module: nn.Module, rows: int, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return outputs, and all gradients."""
    torch.manual_seed(3)
    leaves = [each.clone().requires_grad_(each.is_floating_point()) for each in inputs]
    outputs = module(rows, *leaves)
    torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
    return list(outputs), present(*(leaf.grad for leaf in leaves), *(each.grad for each in module.parameters()))


def check(
    layer: Layer, count: int, inputs: Sequence[torch.Tensor], dims: Mapping[str, int] = MappingProxyType({})
) -> list[PartSum]:
    """Hold every part that runs alone against the same beside others."""
    analysis, rows = analyse(layer), len(inputs[0])
    splits, edges = choose(analysis, count), find_edges(analysis.module, layer, dims, count)
    if not splits:
        return []

    def make(sums: Sums, index: int) -> LayerPart:
        return rewrite(analysis, splits, sums, index, count, edges)

    entering = [dims.get(name) for name in layer.inputs]

    def own(index: int) -> list[torch.Tensor]:
        both = zip(inputs, entering, strict=True)
        return [each if dim is None else each.chunk(count, dim)[index].contiguous() for each, dim in both]

    def beside(sums: ThreadSums, index: int) -> tuple[list[tuple[str, int]], list[torch.Tensor]]:
        outputs, _ = run(make(sums, index).module, rows, own(index))
        return bytes_of(sums.kinds, sums.shapes), outputs

    torch.manual_seed(3)
    totals = PartsBeside(make, count).run(rows, [own(index) for index in range(count)])
    for index, (exchanged, wanted) in enumerate(run_parts(count, beside)):
        sums = LoneSums()
        part = make(sums, index)
        part.module.register_forward_pre_hook(sums.begin)
        sums.keep(rows, totals[index])
        sums.noted = []
        outputs, gradients = run(part.module, rows, own(index))
        assert [(KINDS[each.kind], each.bytes) for each in sums.noted] == exchanged
        assert all(bool(each.isfinite().all()) for each in (*outputs, *gradients))
        assert [each.shape for each in outputs] == [each.shape for each in wanted]
        if not layer.random and not dims and not draws(analysis):
            torch.testing.assert_close(outputs, wanted)
        # What runs again begins anew.
        again, _ = run(part.module, rows, own(index))
        torch.testing.assert_close(again, outputs)
    assert sums.noted
    return sums.noted


def draws(analysis: Analysis) -> bool:
    tags = (getattr(node.target, "tags", ()) for node in analysis.module.graph.nodes)
    attending = any("attention" in str(node.target) for node in analysis.module.graph.nodes)
    return attending or any(torch.Tag.nondeterministic_seeded in each for each in tags)


@pytest.mark.parametrize("count", [2, 4])
def test_a_vocabulary_of_97_stays_finite_where_most_parts_know_no_token(count: int) -> None:
    layer = words()
    noted = check(layer, count, [torch.arange(6).view(2, 3)])
    assert {each.ranks for each in noted} == {count}
    check(shares(), count, [numbers(2, 3, 4)])


@pytest.mark.some(6)
@pytest.mark.parametrize("seed", range(24))
def test_drawn_layers_alone_are_those_beside_others(seed: int) -> None:
    layer, count = drawn_layer(seed), 2 if seed % 2 else 4
    check(layer, count, [numbers(2, 3, 8)])


@pytest.mark.parametrize(("count", "scaled"), [(2, True), (4, False)])
def test_two_key_heads_and_slices_of_the_sequence_note_every_move(count: int, scaled: bool) -> None:
    check(layer_of(FewKeys(2, 2, scaled).double(), numbers(2, 3, 8)), count, [numbers(2, 3, 8)])
    layer = layer_of(AttentionBlock().double(), numbers(2, 8, 16))
    noted = check(layer, count, [numbers(2, 8, 16)], sequence_dims(layer, count))
    assert {each.kind for each in noted} >= {"all_gather", "reduce_scatter"}


def test_attention_that_draws_for_its_part_draws_nothing_for_fake_tensors() -> None:
    before = torch.get_rng_state()
    with FakeTensorMode():
        query = torch.empty(1, 2, 4, 8)
        attended = attend_locally(1, query, query, query, None, 0.5, True, None, False)
    assert attended.shape == query.shape
    assert torch.equal(torch.get_rng_state(), before)
