"""Embeddings and losses over a vocabulary, whole and in parts; and layers of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autopar.capture.split.rules import vocabulary
from operator_cases import Case, check_parts, check_refusal, ids, untried, x

aten = torch.ops.aten

CASES: list[Case] = [
    # The operator, what it is given, and how many names it leaves to be split.
    (aten.embedding.default, (x(7, 4), ids(7, 2, 3)), {}, 4),
    (aten.embedding.default, (x(7, 4), ids(7, 2, 3), 3), {}, 4),
    (aten.cross_entropy_loss.default, (x(6, 7), ids(7, 6)), {}, 1),
    (aten.cross_entropy_loss.default, (x(7), ids(7)), {}, 1),
    (aten.cross_entropy_loss.default, (x(2, 7, 3), ids(7, 2, 3), x(7).abs(), 0, 2, 0.1), {}, 1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
def test_parts_of_a_name_give_parts_or_summands_of_the_whole(case: Case) -> None:
    check_parts(case)


def test_every_operator_with_a_rule_is_tried() -> None:
    assert untried(vocabulary, CASES) == set()


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.embedding.default, (x(7, 4), ids(7, 3), -1, True)),
        (aten.cross_entropy_loss.default, (x(6, 7), x(6, 7).softmax(-1))),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)
def test_what_a_rule_cannot_tell_it_refuses(target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    check_refusal(target, args)
