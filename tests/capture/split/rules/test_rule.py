"""What all rules have in common: every family is tried, and operators that draw or write have none."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch

from autopar.capture.split.rules import FAMILIES, find_rule, ranges
from autopar.capture.split.rules.rule import RULES

aten = torch.ops.aten


def test_every_family_has_rules_and_a_file_that_tries_them() -> None:
    assert {rule.names.__module__ for rule in RULES.values()} == {each.__name__ for each in FAMILIES}
    tried = {each.stem for each in Path(__file__).parent.glob("test_*.py")}
    assert {f"test_{each.__name__.rpartition('.')[2]}" for each in FAMILIES} == tried - {"test_rule"}


def test_operators_that_draw_or_write_have_no_rule() -> None:
    for target in (aten.rrelu.default, aten.add_.Tensor, aten.bernoulli.default, aten.sort.default):
        assert find_rule(target) is None


def test_what_torch_says_is_pointwise_needs_no_rule_of_its_own() -> None:
    for target in (aten.add.Tensor, aten.gelu.default, aten.mul.Tensor, aten.where.self):
        assert str(target) not in RULES
        assert find_rule(target) is not None


def test_indices_without_a_gap_are_one_range() -> None:
    for indices in ([3], [0, 1, 2], [0, 2, 3, 7], [1, 3, 5]):
        found = ranges(torch.tensor(indices))
        assert [i for start, stop in found for i in range(start, stop)] == indices
        assert all(stop < start for (_, stop), (start, _) in pairwise(found))
