"""Operators that order numbers anew, or repeat them, whole and in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autopar.capture.split.rules import shapes
from operator_cases import Case, check_parts, check_refusal, untried, x

aten = torch.ops.aten

CASES: list[Case] = [
    # The operator, what it is given, and how many names it leaves to be split.
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
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
def test_parts_of_a_name_give_parts_or_summands_of_the_whole(case: Case) -> None:
    check_parts(case)


def test_every_operator_with_a_rule_is_tried() -> None:
    assert untried(shapes, CASES) == set()


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.view.default, (x(4, 6), [3, 8])),
        (aten.repeat_interleave.self_int, (x(4, 6), 3)),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)
def test_what_a_rule_cannot_tell_it_refuses(target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    check_refusal(target, args)
