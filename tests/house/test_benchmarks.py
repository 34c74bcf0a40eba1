"""Benchmarks that name what is in the tree name what is there."""

import importlib

import constants


def test_a_constant_that_is_given_other_values_is_one_of_the_searchs() -> None:
    for family, line in constants.LINES.items():
        for module in line.modules:
            found = vars(importlib.import_module(constants.SEARCH + module))
            assert all(name in found for values in line.others for name in values), family
