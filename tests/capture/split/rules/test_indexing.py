"""Operators that cut, join and pick, whole and in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autopar.capture.split.rules import indexing
from operator_cases import Case, check_parts, check_refusal, ids, untried, x

aten = torch.ops.aten

CASES: list[Case] = [
    # The operator, what it is given, and how many names it leaves to be split.
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
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
def test_parts_of_a_name_give_parts_or_summands_of_the_whole(case: Case) -> None:
    check_parts(case)


def test_every_operator_with_a_rule_is_tried() -> None:
    assert untried(indexing, CASES) == set()


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.roll.default, (x(2, 3), [1])),
        (aten.index.Tensor, (x(2, 5), [x(2, 5) > 0])),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)
def test_what_a_rule_cannot_tell_it_refuses(target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    check_refusal(target, args)
