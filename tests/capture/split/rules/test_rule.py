"""Operators, whole and in parts: every one that has a rule is tried; those that draw or write have none."""

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.capture.split.names import MismatchError, Name, carries, is_partial, leaves
from autopar.capture.split.rules import Axis, Dims, LocalCall, Part, apply_rule, local_call, ranges
from autopar.capture.split.rules.draws import attend_part
from autopar.capture.split.rules.rule import RULES, find_rule, memory_order, new_dims
from autopar.errors import UsageError


class OperatorParts:
    """An operator with real tensors, run on the parts of what it is given, and held against the whole.

    That is what a rule promises of every name that it does not block (``autopar/capture/split/rules/rule.py``).
    """

    def __init__(self, target: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        graph, self._values = fx.Graph(), dict[fx.Node, Any]()

        def node_of(value: object) -> object:
            if isinstance(value, list) and any(isinstance(each, torch.Tensor) for each in value):
                return [node_of(each) for each in value]
            if not isinstance(value, torch.Tensor):
                return value
            node = graph.placeholder(f"x{len(self._values)}")
            self._values[node] = value
            return node

        nodes = [node_of(each) for each in args]
        options = {name: node_of(each) for name, each in kwargs.items()}
        self._tensors = dict(self._values)
        self._node = graph.call_function(target, tuple(nodes), options)  # type: ignore[arg-type]
        torch.manual_seed(0)
        self.whole = target(*args, **kwargs)
        self._values[self._node] = self.whole
        self.dims: dict[fx.Node, tuple[Dims, ...]] = {node: (new_dims(value),) for node, value in self._tensors.items()}
        self._call, self.dims[self._node] = apply_rule(self._node, self.dims, self._values)

    def names(self) -> list[Name]:
        """Return all names that the rule leaves to be split, and that it does not both keep and sum over."""
        every = [dim for outputs in self.dims.values() for dims in outputs for dim in dims]
        names = dict.fromkeys(name for dim in every for name in leaves(dim) if name.obstacle is None)
        return [name for name in names if self._is_legal(name)]

    def _is_legal(self, name: Name) -> bool:
        try:
            dims = self.dims.items()
            per_tensor = {node: [sum([carries(dim, name) for dim in each]) for each in every] for node, every in dims}
            sums = any([carries(dim, name) for dim in self._call.summed])  # noqa: C419 - each may refuse
            is_summand = any(is_partial(dim, name) for dim in self._call.summed)
        except MismatchError:
            return False
        most = max(count for counts in per_tensor.values() for count in counts)
        return not is_summand and most <= 1 and not (sums and any(per_tensor[self._node]))

    def error(self, name: Name, count: int) -> float:
        """Return the largest difference between what parts give together and the whole."""
        parts = [Part((Axis(name, index, count),)) for index in range(count)]
        results = [self._run(part) for part in parts]
        if any(carries(dim, name) for dim in self._call.summed):
            total = torch.stack([result for result, _ in results]).sum(0)
            local = results[0][1]
            if local.then is not None:
                total = local.then(total, *fx.map_arg(local.then_args, self._tensors.__getitem__))
            return _difference(total, self.whole)
        return max(self._outputs_error(result, part) for (result, _), part in zip(results, parts, strict=True))

    def _run(self, part: Part) -> tuple[Any, LocalCall]:
        local = local_call(self._call, part)
        given = {node: take(value, self.dims[node][0], part) for node, value in self._tensors.items()}
        args, kwargs = fx.map_arg((local.args, dict(local.kwargs)), given.__getitem__)
        torch.manual_seed(0)
        return local.target(*args, **kwargs), local

    def _outputs_error(self, result: object, part: Part) -> float:
        found, whole = (list(each) if isinstance(each, tuple | list) else [each] for each in (result, self.whole))
        wanted = [take(each, dims, part) for each, dims in zip(whole, self.dims[self._node], strict=True)]
        return max(_difference(one, other) for one, other in zip(found, wanted, strict=True))


def take(value: torch.Tensor, dims: Dims, part: Part) -> torch.Tensor:
    """Return what a part has of a tensor."""
    for place, dim in enumerate(dims):
        if part.splits(dim):
            # In the whole's order of memory, as operators on parts give them.
            order = sorted(range(value.dim()), key=value.stride, reverse=True)
            value = value.index_select(place, part.positions(dim)).permute(order).contiguous()
            value = value.permute([order.index(each) for each in range(len(order))])
    return value


def _difference(one: Any, other: Any) -> float:  # noqa: ANN401
    if one.shape != other.shape:
        return float("inf")
    return float((one.double() - other.double()).abs().nan_to_num(float("inf")).max()) if one.numel() else 0.0


aten = torch.ops.aten
Case = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], int]
"""An operator, what it is given, and how many names it leaves to be split."""


def x(*sizes: int) -> torch.Tensor:
    """Draw numbers in double precision, of the same sizes always the same."""
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)), dtype=torch.float64)


def ids(below: int, *sizes: int) -> torch.Tensor:
    """Draw indices."""
    return torch.randint(below, sizes, generator=torch.Generator().manual_seed(below))


MASK = torch.ones(3, 4, dtype=torch.bool).tril()
CASES: list[Case] = [
    # Arithmetic
    (aten.__and__.Tensor, (x(4, 3) > 0, x(3) > 0), {}, 2),
    (aten.__or__.Tensor, (x(4, 3) > 0, x(3) > 0), {}, 2),
    (aten._to_copy.default, (x(4, 3),), {"dtype": torch.float32}, 2),
    (aten.add.Tensor, (x(4, 1, 3), x(5, 1)), {}, 3),
    (aten.alias.default, (x(4, 3),), {}, 2),
    (aten.contiguous.default, (x(4, 3),), {}, 2),
    (aten.detach.default, (x(4, 3),), {}, 2),
    (aten.full_like.default, (x(4, 3), 2.0), {}, 2),
    (aten.gelu.default, (x(4, 3),), {}, 2),
    (aten.masked_fill.Tensor, (x(4, 3), x(3) > 0, torch.tensor(2.0)), {}, 2),
    (aten.ones_like.default, (x(4, 3),), {}, 2),
    (aten.to.device, (x(4, 3), torch.device("cpu"), torch.float32), {}, 2),
    (aten.to.dtype, (x(4, 3), torch.float32), {}, 2),
    (aten.to.dtype_layout, (x(4, 3),), {"dtype": torch.float32}, 2),
    (aten.to.other, (x(4, 3), x(2).float()), {}, 3),
    (aten.type_as.default, (x(4, 3), x(2).float()), {}, 3),
    (aten.where.ScalarOther, (x(3) > 0, x(4, 3), 0.0), {}, 2),
    (aten.where.ScalarSelf, (x(3) > 0, 0.0, x(4, 3)), {}, 2),
    (aten.zeros_like.default, (x(4, 3),), {}, 2),
    (aten.expand_as.default, (x(2, 1, 4), x(3, 2, 5, 4)), {}, 4),
    (aten.lift_fresh_copy.default, (x(2, 3),), {}, 2),
    (aten.where.Scalar, (x(4, 3) > 0, 1.0, 2.0), {}, 2),
    *(
        (loss, (x(3, 4), x(4), reduction), {}, 2)
        for loss in (aten.huber_loss.default, aten.l1_loss.default, aten.mse_loss.default, aten.smooth_l1_loss.default)
        for reduction in (0, 1, 2)
    ),
    (aten.sum.dim_IntList, (x(2, 3, 4), [1, -1]), {}, 3),
    (aten.sum.dim_IntList, (x(2, 3, 4), [1], True), {}, 3),
    (aten.sum.default, (x(2, 3),), {}, 2),
    (aten.mean.dim, (x(2, 3, 4), [-1], True), {}, 2),
    (aten.mean.default, (x(2, 3, 5),), {}, 3),
    (aten.logsumexp.default, (x(2, 3, 4), [1]), {}, 2),
    (aten.std.correction, (x(2, 3, 4), [1]), {}, 2),
    (aten.amax.default, (x(2, 3, 4), [1]), {}, 2),
    (aten.amin.default, (x(2, 3, 4), [1]), {}, 2),
    (aten.var.correction, (x(2, 3, 4), [1]), {}, 2),
    (aten._softmax.default, (x(2, 3, 4), -1, False), {}, 2),
    (aten._safe_softmax.default, (x(2, 3, 4), -1), {}, 2),
    (aten._log_softmax.default, (x(2, 3, 4), -1, False), {}, 2),
    (aten.softmax.int, (x(2, 3, 4), 1), {}, 2),
    (aten.log_softmax.int, (x(2, 3, 4), 1), {}, 2),
    (aten.layer_norm.default, (x(2, 3, 4), [3, 4], x(3, 4), x(3, 4)), {}, 1),
    (aten.rms_norm.default, (x(2, 3, 4), [4], x(4)), {}, 2),
    # Attention
    (aten.scaled_dot_product_attention.default, (x(2, 4, 3, 6), x(2, 4, 4, 6), x(2, 4, 4, 5), MASK), {}, 3),
    (aten.scaled_dot_product_attention.default, (x(2, 4, 3, 6), x(2, 4, 3, 6), x(2, 4, 3, 6), None, 0.0, True), {}, 3),
    *(
        (aten.scaled_dot_product_attention.default, (x(2, 4, 3, 6), x(2, 2, 3, 6), x(2, 2, 3, 5)), options, 4)
        for options in (
            {"enable_gqa": True, "attn_mask": x(1, 4, 3, 3)},
            {"dropout_p": 0.5, "enable_gqa": True},
            {"dropout_p": 0.5, "enable_gqa": True, "is_causal": True},
            {"dropout_p": 0.5, "enable_gqa": True, "attn_mask": MASK[:, :3], "scale": 0.3},
            {"dropout_p": 0.5, "enable_gqa": True, "attn_mask": x(2, 1, 3, 3), "scale": -0.3},
        )
    ),
    # Draws
    (aten.dropout.default, (x(4, 3), 0.5, False), {}, 2),
    (aten.dropout.default, (x(4, 3), 0.5, True), {}, 2),
    (aten.dropout.default, (x(4, 3, 5).permute(2, 0, 1), 0.5, True), {}, 3),
    (aten.dropout.default, (x(4, 2, 3, 5).transpose(1, 2), 0.5, True), {}, 4),
    (aten.dropout.default, (x(4, 3, 10)[..., ::2], 0.5, True), {}, 3),
    (aten.dropout.default, (x(4, 3), 1.0, True), {}, 2),
    (aten.native_dropout.default, (x(4, 3, 5).permute(2, 0, 1), 0.5, True), {}, 3),
    (aten.native_dropout.default, (x(4, 3), 0.5, False), {}, 2),
    (aten.bernoulli.p, (x(4, 3).t(), 0.5), {}, 2),
    (aten.rand_like.default, (x(4, 3, 5).permute(2, 0, 1),), {"dtype": torch.float32}, 3),
    (aten.randn_like.default, (x(4, 3).t(),), {}, 2),
    # Indexing
    (aten.chunk.default, (x(2, 6), 3, 1), {}, 4),
    (aten.split.Tensor, (x(2, 6), 4, -1), {}, 3),
    (aten.split_with_sizes.default, (x(2, 6), [1, 5], 1), {}, 2),
    (aten.slice.Tensor, (x(2, 6), 1, 2, -1), {}, 3),
    (aten.slice.Tensor, (x(2, 6), 1, 0, 2**63 - 1), {}, 2),
    (aten.slice.Tensor, (x(2, 6), 1, 6, 9), {}, 2),
    (aten.cat.default, ([x(2, 3), x(2, 5)], -1), {}, 3),
    (aten.glu.default, (x(2, 8), 1), {}, 2),
    (aten.slice.Tensor, (x(2, 6), 1, 1, 6, 2), {}, 1),
    (aten.cumsum.default, (x(2, 3, 4), 1), {}, 2),
    (aten.flip.default, (x(2, 3, 4), [0, -1]), {}, 1),
    (aten.roll.default, (x(2, 3, 4), [1], [1]), {}, 2),
    (aten.tril.default, (x(2, 3, 4, 4), 1), {}, 2),
    (aten.triu.default, (x(2, 4, 4),), {}, 1),
    (aten.pad.default, (x(2, 3, 4, 5), [1, 2, 0, 1]), {}, 2),
    (aten.constant_pad_nd.default, (x(2, 3, 4), [1, -1], 2.0), {}, 2),
    (aten.index_select.default, (x(2, 5, 3), 1, ids(5, 4)), {}, 3),
    (aten.gather.default, (x(2, 5, 3), 1, ids(5, 2, 4, 3)), {}, 3),
    (aten.gather.default, (x(2, 5, 3), 2, ids(3, 2, 4, 4)), {}, 2),
    (aten.index.Tensor, (x(2, 5, 3), [None, ids(5, 4, 2)]), {}, 4),
    (aten.index.Tensor, (x(2, 5, 3, 4), [None, ids(5, 4, 1), ids(3, 2)]), {}, 4),
    (aten.index.Tensor, (x(2, 5, 3, 4), [None, ids(5, 2), None, ids(4, 2)]), {}, 3),
    (aten.stack.default, ([x(2, 3), x(2, 3)], -1), {}, 2),
    # Products
    (aten.linear.default, (x(2, 4, 6), x(3, 6)), {}, 4),
    (aten.linear.default, (x(2, 4, 6), x(3, 6), x(3)), {}, 4),
    (aten.addmm.default, (x(3), x(4, 6), x(6, 3)), {}, 3),
    (aten.mm.default, (x(4, 6), x(6, 3)), {}, 3),
    (aten.bmm.default, (x(2, 4, 6), x(2, 6, 3)), {}, 4),
    (aten.matmul.default, (x(5, 2, 4, 6), x(2, 6, 3)), {}, 5),
    (aten.baddbmm.default, (x(2, 4, 3), x(2, 4, 6), x(2, 6, 3)), {"beta": 0.5, "alpha": 2.0}, 4),
    (aten.baddbmm.default, (x(3), x(2, 4, 6), x(2, 6, 3)), {}, 4),
    (aten.addmm.default, (x(3), x(4, 6), x(6, 3)), {"beta": 2.0, "alpha": 0.5}, 3),
    (aten.einsum.default, ("b q h d, b k h d -> b h q k", [x(2, 3, 4, 5), x(2, 6, 4, 5)]), {}, 5),
    (aten.einsum.default, ("bld,ed,e->bl", [x(2, 3, 4), x(5, 4), x(5)]), {}, 4),
    (aten.conv1d.default, (x(2, 4, 8), x(6, 4, 3), x(6), [2], [1]), {}, 3),
    (aten.conv1d.padding, (x(2, 4, 8), x(6, 4, 3), x(6)), {"padding": "same"}, 3),
    (aten.conv2d.default, (x(2, 4, 8, 7), x(6, 4, 3, 2)), {}, 3),
    (aten.conv2d.default, (x(2, 4, 8, 7), x(4, 1, 3, 2), x(4)), {"groups": 4}, 2),
    (aten.conv2d.padding, (x(4, 8, 7), x(6, 4, 3, 2), x(6)), {"padding": "valid"}, 2),
    # Shapes
    (aten.view.default, (x(2, 3, 8), [2, 3, 4, 2]), {}, 4),
    (aten.view.default, (x(2, 3, 4, 2), [6, -1]), {}, 4),
    (aten._unsafe_view.default, (x(2, 6, 2), [2, 3, 4]), {}, 4),
    (aten.reshape.default, (x(12, 2), [2, -1, 4]), {}, 4),
    (aten.flatten.using_ints, (x(2, 3, 4), 1, -1), {}, 3),
    (aten.unflatten.int, (x(2, 12), 1, [3, -1]), {}, 3),
    (aten.expand.default, (x(2, 1, 4), [3, 2, 5, -1]), {}, 4),
    (aten.repeat_interleave.self_int, (x(2, 3), 2, 1), {}, 3),
    (aten.transpose.int, (x(2, 3, 4), 0, -1), {}, 3),
    (aten.t.default, (x(2, 3),), {}, 2),
    (aten.permute.default, (x(2, 3, 4), [2, 0, -2]), {}, 3),
    (aten.unsqueeze.default, (x(2, 3), -1), {}, 2),
    (aten.squeeze.dim, (x(2, 1, 3), 1), {}, 2),
    (aten.squeeze.dim, (x(2, 4, 3), 1), {}, 3),
    (aten.select.int, (x(2, 4, 3), 1, 2), {}, 2),
    (aten.unbind.int, (x(2, 4, 3), 1), {}, 2),
    (aten.full.default, ([4, 3], 2.0), {}, 2),
    (aten.new_ones.default, (x(2), [4, 3]), {}, 3),
    (aten.new_zeros.default, (x(2), [4, 3]), {}, 3),
    (aten.ones.default, ([4, 3],), {}, 2),
    (aten.zeros.default, ([4, 3],), {}, 2),
    (aten.broadcast_to.default, (x(2, 1, 4), [2, 5, 4]), {}, 3),
    (aten.numpy_T.default, (x(2, 3, 4),), {}, 3),
    (aten.movedim.int, (x(2, 3, 4), 0, -1), {}, 3),
    (aten.movedim.intlist, (x(2, 3, 4, 5), [3, 0], [0, 2]), {}, 4),
    (aten.repeat.default, (x(2, 3), [4, 1, 2]), {}, 4),
    # Vocabulary
    (aten.embedding.default, (x(7, 4), ids(7, 2, 3)), {}, 4),
    (aten.embedding.default, (x(7, 4), ids(7, 2, 3), 3), {}, 4),
    (aten.cross_entropy_loss.default, (x(6, 7), ids(7, 6)), {}, 1),
    (aten.cross_entropy_loss.default, (x(7), ids(7)), {}, 1),
    (aten.cross_entropy_loss.default, (x(2, 7, 3), ids(7, 2, 3), x(7).abs(), 0, 2, 0.1), {}, 1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
def test_parts_of_a_name_give_parts_or_summands_of_the_whole(case: Case) -> None:
    target, args, kwargs, count = case
    parts = OperatorParts(target, args, kwargs)
    names = parts.names()
    assert len(names) == count
    for name in names:
        for pieces in {2, name.size}:
            assert parts.error(name, pieces) < 1e-12


def test_operators_with_rules_are_tried_and_memory_and_indices_are_as_torchs() -> None:
    assert RULES.keys() - {str(case[0]) for case in CASES} == set()
    for target in (aten.add.Tensor, aten.gelu.default, aten.mul.Tensor, aten.where.self):
        assert str(target) not in RULES
        assert find_rule(target) is not None
    for target in (aten.rrelu.default, aten.add_.Tensor, aten.bernoulli.default, aten.sort.default):
        assert find_rule(target) is None
    with FakeTensorMode():
        query = torch.empty(2, 2, 3, 4, device="cuda")
        with pytest.raises(UsageError, match="attn_implementation='eager'"):
            attend_part(query, query, query, None, 0.1, True, None, False, ((1, 4, ((0, 2),)),))
    chance = random.Random(0)
    for _ in range(300):
        sizes = [chance.choice([1, 2, 3]) for _ in range(chance.randint(1, 4))]
        tensor = torch.empty([1 if chance.random() < 0.4 else size for size in sizes]).expand(*sizes)
        tensor = tensor.permute(chance.sample(range(len(sizes)), len(sizes)))
        assert torch.empty_like(tensor).permute(memory_order(tensor)).is_contiguous()
    for indices in ([3], [0, 1, 2], [0, 2, 3, 7], [1, 3, 5]):
        found = ranges(torch.tensor(indices))
        assert [i for start, stop in found for i in range(start, stop)] == indices
        assert all(stop < start for (_, stop), (start, _) in pairwise(found))


REFUSED: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (aten.roll.default, (x(2, 3), [1])),
    (aten.index.Tensor, (x(2, 5), [x(2, 5) > 0])),
    (aten.einsum.default, ("...i,ij", [x(3, 4), x(4, 5)])),
    (aten.einsum.default, ("ii->i", [x(4, 4)])),
    (aten.conv1d.default, (x(2, 4, 8), x(6, 2, 3), None, [1], [0], [1], 2)),
    (aten.matmul.default, (x(4), x(4))),
    (aten.view.default, (x(4, 6), [3, 8])),
    (aten.repeat_interleave.self_int, (x(4, 6), 3)),
    (aten.embedding.default, (x(7, 4), ids(7, 3), -1, True)),
    (aten.cross_entropy_loss.default, (x(6, 7), x(6, 7).softmax(-1))),
]


@pytest.mark.parametrize(("target", "args"), REFUSED, ids=lambda value: str(value) if callable(value) else "")
def test_what_a_rule_cannot_tell_it_refuses(target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with pytest.raises(MismatchError):
        OperatorParts(target, args, {})
