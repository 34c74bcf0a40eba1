"""Operators that draw random numbers, whole and in parts; and layers of them."""

from __future__ import annotations

import pytest
import torch

from autopar.capture.split.rules import draws
from operator_cases import Case, check_parts, untried, x

aten = torch.ops.aten

CASES: list[Case] = [
    # The operator, what it is given, and how many names it leaves to be split.
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
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
def test_parts_of_a_name_give_parts_or_summands_of_the_whole(case: Case) -> None:
    check_parts(case)


def test_every_operator_with_a_rule_is_tried() -> None:
    assert untried(draws, CASES) == set()
