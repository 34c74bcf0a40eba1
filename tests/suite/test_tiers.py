"""Tests of tiers: every pair of values is there, every case is run within a week, and no tier takes another's."""

import datetime
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suite.tiers import choose, evenly, pair_cover, spread


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 4), min_size=1, max_size=60, unique=True))
def test_every_pair_of_values_that_any_case_has_is_in_a_case_that_is_chosen(rows: list[tuple[int, ...]]) -> None:
    cases = [dict(zip("abcd", row, strict=True)) for row in rows]
    chosen = [cases[index] for index in pair_cover(cases)]
    for first, second in combinations("abcd", 2):
        assert {(case[first], case[second]) for case in chosen} == {(case[first], case[second]) for case in cases}


@given(st.lists(st.integers(1, 5), min_size=2, max_size=3), st.integers(1, 9))
def test_some_cases_of_a_product_have_as_many_values_of_each_parameter_as_there_are_cases(
    sizes: list[int], most: int
) -> None:
    cases = [dict(zip("abc", row, strict=False)) for row in product(*map(range, sizes))]
    chosen = [cases[index] for index in spread(cases, most)]
    assert len(chosen) == min(most, len(cases))
    for name, size in zip("abc", sizes, strict=False):
        assert len({case[name] for case in chosen}) == min(most, size)


@given(st.integers(0, 60), st.dates(), st.integers(0, 9), st.integers(2, 5))
def test_core_and_rest_have_no_case_in_common_and_a_week_has_all(
    count: int, date: datetime.date, most: int, slow: int
) -> None:
    cases = list(range(count))

    def chosen(tier: str, later: int = 0) -> list[int]:
        day = date.fromordinal(max(1, date.toordinal() - 7) + later)
        return choose(cases, tier, day, slow=lambda case: case % slow == 0, first=lambda of: evenly(len(of), most))  # type: ignore[arg-type]

    core, week = chosen("core"), [chosen("rest", later) for later in range(7)]
    assert not any(set(core) & set(rest) for rest in week)
    assert set(core).union(*week) == set(cases)
    assert chosen("check", 3) == sorted(core + week[3])
    assert chosen("all") == cases
    assert not any(case % slow == 0 for case in core)


SUITE = """
import pytest

@pytest.mark.pairs
@pytest.mark.parametrize("a", [(1, 2), lambda: 0, 3])
@pytest.mark.parametrize("b", ["x", "y"])
@pytest.mark.parametrize("c", [True, False])
def test_product(a, b, c):
    pass

@pytest.mark.some(2)
@pytest.mark.parametrize("seed", range(20))
def test_seeds(seed):
    pass

@pytest.mark.slow
def test_slow():
    pass

@pytest.mark.slow
@pytest.mark.core
def test_journey():
    pass

def test_quick():
    pass
"""


@pytest.mark.parametrize(("tier", "count"), [("all", 35), ("core", 6 + 2 + 2), ("rest", 1 + 0 + 2)])
def test_marks_choose_what_a_tier_runs_and_the_slow_come_last(tier: str, count: int, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    ran = pytester.inline_run("--tier", tier, "--date", "2026-11-28", "-p", "suite.tiers", "-p", "no:cacheprovider")
    names = [report.nodeid.split("::")[1] for report in ran.listoutcomes()[0]]
    slow = {"all": ["test_slow", "test_journey"], "core": ["test_journey"], "rest": ["test_slow"]}[tier]
    assert len(names) == count
    assert names[-len(slow) :] == slow
