"""Elementwise operators, reductions and losses of numbers, whole and in parts."""

from __future__ import annotations

import pytest
import torch

from autopar.capture.split.rules import arithmetic
from operator_cases import Case, check_parts, untried, x

aten = torch.ops.aten

CASES: list[Case] = [
    # The operator, what it is given, and how many names it leaves to be split.
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
    (aten.mul.Tensor, (x(4, 3), x(4, 3)), {}, 2),
    (aten.ones_like.default, (x(4, 3),), {}, 2),
    (aten.to.device, (x(4, 3), torch.device("cpu"), torch.float32), {}, 2),
    (aten.to.dtype, (x(4, 3), torch.float32), {}, 2),
    (aten.to.dtype_layout, (x(4, 3),), {"dtype": torch.float32}, 2),
    (aten.to.other, (x(4, 3), x(2).float()), {}, 3),
    (aten.type_as.default, (x(4, 3), x(2).float()), {}, 3),
    (aten.where.ScalarOther, (x(3) > 0, x(4, 3), 0.0), {}, 2),
    (aten.where.ScalarSelf, (x(3) > 0, 0.0, x(4, 3)), {}, 2),
    (aten.where.self, (x(3) > 0, x(4, 3), x(4, 1)), {}, 2),
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
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
def test_parts_of_a_name_give_parts_or_summands_of_the_whole(case: Case) -> None:
    check_parts(case)


def test_every_operator_with_a_rule_is_tried() -> None:
    assert untried(arithmetic, CASES) == set()
