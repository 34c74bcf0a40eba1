"""Under autocast parts exchange its type, of what it computes in it; elsewhere, and of all else, nothing changes."""

from types import SimpleNamespace

import pytest
import torch
from torch import fx

from autopar.capture.split.autocast import PRODUCTS, products_of
from autopar.capture.split.rewrite import split_layer
from autopar.capture.split.sequence import sequence_dims
from autopar.capture.split.sums import Enter, lowered
from part_threads import ThreadSums, run_parts
from single_layers import AttentionBlock, layer_of, numbers

ATEN = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)


class Weighed:
    """Sums that note the bytes of what is summed, or of the whole that is gathered or scattered."""

    def __init__(self, sums: ThreadSums) -> None:
        self._sums = sums
        self.sizes: list[int] = []

    def sum(self, tensor: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
        self.sizes.append(tensor.nbytes)
        return self._sums.sum(tensor, parts)

    def gather(self, tensor: torch.Tensor, dim: int, parts: tuple[int, ...]) -> torch.Tensor:
        self.sizes.append(tensor.nbytes * len(parts))
        return self._sums.gather(tensor, dim, parts)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, parts: tuple[int, ...]) -> torch.Tensor:
        self.sizes.append(tensor.nbytes)
        return self._sums.reduce_scatter(tensor, dim, parts)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("dtype", [*HALVES, None])
def test_a_block_exchanges_the_bytes_of_its_activations(dtype: torch.dtype | None, sequence: bool) -> None:
    """Two sums forwards and two backwards; in slices, a gather and a scatter for each."""
    x = numbers(2, 8, 16).float()
    layer = layer_of(AttentionBlock().float(), x)
    dims = sequence_dims(layer, 2) if sequence else {}

    def act(sums: ThreadSums, index: int) -> list[int]:
        weighed = Weighed(sums)
        part = split_layer(layer, weighed, index, 2, sequence=dims, deferred_sums=list(layer.parameters))
        own = (x.chunk(2, 1)[index] if sequence else x).clone().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            (output,) = part.module(2, own)
        output.backward(torch.ones_like(output))
        assert (output.dtype, own.grad.dtype) == (torch.float32, torch.float32)
        return weighed.sizes

    activations = x.numel() * (4 if dtype is None else 2)
    assert run_parts(2, act) == [[activations] * (8 if sequence else 4)] * 2


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("products", [1, 3])
def test_a_float16_sum_is_not_too_large_where_the_float32_one_is_not(products: int, parts: int) -> None:
    largest = torch.finfo(torch.float16).max

    def act(sums: ThreadSums, index: int) -> torch.Tensor | None:
        x = torch.ones(1, 1, requires_grad=True)
        with torch.autocast("cpu", torch.float16):
            entered = Enter(sums)(x, tuple(range(parts)), products=products)
            found = [entered @ torch.full((1, 1), largest) for _ in range(products)]
        torch.autograd.backward(found, [torch.ones_like(each) for each in found])
        return x.grad

    # Rounded as float16 is.
    for gradient in run_parts(parts, act):
        assert gradient.item() == pytest.approx(largest * products * parts, rel=2**-10)


def test_small_float16_gradients_keep_their_digits() -> None:
    x, sums = torch.tensor([[2.0**-14, 1.0, -3.0]]), SimpleNamespace(sum=lambda tensor, parts: tensor)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(lowered(sums, x, 3).sum(x, (0, 1)), x)


SHAPES = {
    "addmm.default": [(4,), (2, 3), (3, 4)],
    "baddbmm.default": [(2, 2, 4), (2, 2, 3), (2, 3, 4)],
    "bmm.default": [(2, 2, 3), (2, 3, 4)],
    "conv1d.default": [(2, 3, 5), (4, 3, 2)],
    "conv1d.padding": [(2, 3, 5), (4, 3, 2)],
    "conv2d.default": [(2, 3, 5, 5), (4, 3, 2, 2)],
    "conv2d.padding": [(2, 3, 5, 5), (4, 3, 2, 2)],
    "linear.default": [(2, 3), (4, 3)],
    "matmul.default": [(2, 2, 3), (3, 4)],
    "mm.default": [(2, 3), (3, 4)],
    "scaled_dot_product_attention.default": [(1, 1, 2, 3)] * 3,
}


def test_products_are_what_autocast_computes_in_its_type() -> None:
    drawn = {name: [numbers(*shape).float() for shape in shapes] for name, shapes in SHAPES.items()}
    named = {f"{operator._schema.name.split('::')[1]}.{operator._overloadname}": operator for operator in PRODUCTS}
    assert named.keys() == {*drawn, "einsum.default"}
    x = numbers(3, 3).float()
    for dtype in HALVES:
        with torch.autocast("cpu", dtype):
            for name, tensors in drawn.items():
                assert named[name](*tensors).dtype == dtype, name
            assert named["einsum.default"]("ab,cb->ac", [x, x]).dtype == dtype
            others = [ATEN.gelu(x), ATEN.layer_norm(x, [3]), ATEN.softmax.int(x, -1), x * x, x.t(), ATEN.cumsum(x, 0)]
            assert {each.dtype for each in others} == {torch.float32}


def test_what_anything_else_reads_goes_in_float32() -> None:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    assert products_of(x) == 0
    graph.call_function(ATEN.linear.default, (x, weight))
    assert products_of(x) == 1
    graph.call_function(ATEN.matmul.default, (x, x))
    assert products_of(x) == 3
    graph.call_function(ATEN.gelu.default, (x,))
    assert products_of(x) == 0
    sums, tensor = SimpleNamespace(), torch.ones(2)
    with torch.autocast("cpu", torch.bfloat16):
        assert lowered(sums, tensor, 0) is sums
        assert lowered(sums, tensor.double(), 1) is sums
        assert lowered(sums, tensor, 1) is not sums
    assert lowered(sums, tensor, 1) is sums
