"""Calls of operators that have a rule, for their parts to be held against the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest
import torch

from autopar.capture.split.names import MismatchError
from autopar.capture.split.rules.rule import RULES
from oracles.operator_parts import OperatorParts

Case = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], int]
"""An operator, what it is given, and how many names it leaves to be split."""


def x(*sizes: int) -> torch.Tensor:
    """Draw numbers in double precision, of the same sizes always the same."""
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(sizes, generator=generator, dtype=torch.float64)


def ids(below: int, *sizes: int) -> torch.Tensor:
    """Draw indices."""
    return torch.randint(below, sizes, generator=torch.Generator().manual_seed(below))


def check_parts(case: Case) -> None:
    """Hold an operator's parts, in two and in as many as there are, against the whole, for every name."""
    target, args, kwargs, count = case
    parts = OperatorParts(target, args, kwargs)
    names = parts.names()
    assert len(names) == count
    for name in names:
        for pieces in {2, name.size}:
            assert parts.error(name, pieces) < 1e-12


def check_refusal(target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Have a rule refuse a call."""
    with pytest.raises(MismatchError):
        OperatorParts(target, args, {})


def untried(family: ModuleType, cases: Iterable[Case]) -> set[str]:
    """Return the operators whose rule a file has, and that no case calls."""
    own = {name for name, rule in RULES.items() if rule.names.__module__ == family.__name__}
    assert own, f"{family.__name__} has no rules"
    return own - {str(case[0]) for case in cases}
