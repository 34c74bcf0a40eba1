"""Benchmarks that name what is in the tree name what is there."""

from __future__ import annotations

import importlib

import pytest

import constants


@pytest.mark.parametrize("family", constants.LINES)
def test_a_constant_that_is_given_other_values_is_one_of_the_searchs(family: str) -> None:
    line = constants.LINES[family]
    for module in line.modules:
        found = vars(importlib.import_module(constants.SEARCH + module))
        assert all(name in found for values in line.others for name in values)
