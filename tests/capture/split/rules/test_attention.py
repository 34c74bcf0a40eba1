"""Attention in one operator, whole and in parts; and what its dropout draws."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.capture.split.rules import attention
from autopar.capture.split.rules.attention import attend_part
from autopar.errors import UsageError
from operator_cases import Case, check_parts, untried, x

aten = torch.ops.aten
MASK = torch.ones(3, 4, dtype=torch.bool).tril()

CASES: list[Case] = [
    # The operator, what it is given, and how many names it leaves to be split.
    (aten.scaled_dot_product_attention.default, (x(2, 4, 3, 6), x(2, 4, 4, 6), x(2, 4, 4, 5), MASK), {}, 3),
    (aten.scaled_dot_product_attention.default, (x(2, 4, 3, 6), x(2, 4, 3, 6), x(2, 4, 3, 6), None, 0.0, True), {}, 3),
    (
        aten.scaled_dot_product_attention.default,
        (x(2, 6, 3, 4), x(2, 3, 3, 4), x(2, 3, 3, 4)),
        {"enable_gqa": True, "attn_mask": x(1, 6, 3, 3)},
        4,
    ),
    *(
        (aten.scaled_dot_product_attention.default, (x(2, 4, 3, 6), x(2, 2, 3, 6), x(2, 2, 3, 5)), options, 4)
        for options in (
            {"dropout_p": 0.5, "enable_gqa": True},
            {"dropout_p": 0.5, "enable_gqa": True, "is_causal": True},
            {"dropout_p": 0.5, "enable_gqa": True, "attn_mask": MASK[:, :3], "scale": 0.3},
            {"dropout_p": 0.5, "enable_gqa": True, "attn_mask": x(2, 1, 3, 3), "scale": -0.3},
        )
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
def test_parts_of_a_name_give_parts_or_summands_of_the_whole(case: Case) -> None:
    check_parts(case)


def test_every_operator_with_a_rule_is_tried() -> None:
    assert untried(attention, CASES) == set()


def test_fused_attention_with_dropout_is_refused_on_a_gpu() -> None:
    with FakeTensorMode():
        query = torch.empty(2, 2, 3, 4, device="cuda")
        with pytest.raises(UsageError, match="attn_implementation='eager'"):
            attend_part(query, query, query, None, 0.1, True, None, False, ((1, 4, ((0, 2),)),))
