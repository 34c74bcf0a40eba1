"""Products of matrices and convolutions, whole and in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autopar.capture.split.rules import products
from operator_cases import Case, check_parts, check_refusal, untried, x

aten = torch.ops.aten

CASES: list[Case] = [
    # The operator, what it is given, and how many names it leaves to be split.
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
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
def test_parts_of_a_name_give_parts_or_summands_of_the_whole(case: Case) -> None:
    check_parts(case)


def test_every_operator_with_a_rule_is_tried() -> None:
    assert untried(products, CASES) == set()


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.einsum.default, ("...i,ij", [x(3, 4), x(4, 5)])),
        (aten.einsum.default, ("ii->i", [x(4, 4)])),
        (aten.conv1d.default, (x(2, 4, 8), x(6, 2, 3), None, [1], [0], [1], 2)),
        (aten.matmul.default, (x(4), x(4))),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)
def test_what_a_rule_cannot_tell_it_refuses(target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    check_refusal(target, args)
