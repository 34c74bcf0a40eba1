"""Tiers: which tests are run. `make test` runs the core, `make check` the core and then the rest.

The core has what is not marked `slow`, and what is marked `core`. Of a function that is marked `pairs` it has the cases
in which every pair of two parameters' values occurs; of one that is marked `some(n)`, n cases with as many values as n
can have. The rest are all that are slow, and of the cases that those marks leave out a seventh that goes by the date:
seven days in a row run every case.
"""

import datetime
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from operator import itemgetter
from typing import Literal, TypeVar

import pytest

Tier = Literal["all", "core", "rest", "check"]
TIERS = ("all", "core", "rest", "check")
DAYS = 7
Case = TypeVar("Case")


def pair_cover(cases: Sequence[Mapping[str, object]]) -> list[int]:
    """Return which cases have every pair of two parameters' values that any case has, in ascending order.

    The next case is always the one with most pairs that are not there yet; of equal ones, the first. So there are
    hardly more of them than the two largest parameters' values multiplied.

    >>> pair_cover([{"a": a, "b": b, "c": c} for a in "xy" for b in "xy" for c in "xy"])
    [0, 3, 5, 6]
    """
    # One parameter alone is a pair with nothing.
    pairs = [set(combinations(sorted(case.items(), key=itemgetter(0)), min(2, len(case)))) for case in cases]
    missing, chosen = set().union(*pairs), list[int]()
    while missing:
        best = max(range(len(cases)), key=lambda index: (len(pairs[index] & missing), -index))
        chosen.append(best)
        missing -= pairs[best]
    return sorted(chosen)


def evenly(count: int, most: int) -> list[int]:
    """Return as many of the first ``count`` whole numbers, evenly spaced, as there may be at most.

    >>> evenly(10, 4)
    [0, 2, 5, 7]
    """
    most = min(count, most)
    return [index * count // most for index in range(most)]


def spread(cases: Sequence[Mapping[str, object]], most: int) -> list[int]:
    """Return some cases, in ascending order: those of one parameter evenly spaced.

    Of several, the next case is always the one with most values that are not there yet, of equal ones that with most
    pairs of them, and of those the one farthest from all that are there.

    >>> spread([{"a": a, "b": b} for a in "xyz" for b in "xyz"], 3)
    [0, 4, 8]
    """
    if not cases or len(cases[0]) < 2:
        return evenly(len(cases), most)
    values = [set(case.items()) for case in cases]
    pairs = [set(combinations(sorted(case.items(), key=itemgetter(0)), 2)) for case in cases]
    chosen: list[int] = []

    def rank(index: int) -> tuple[int, int, int, int]:
        new, new_pairs = (each[index].difference(*(each[at] for at in chosen)) for each in (values, pairs))
        return len(new), len(new_pairs), min((abs(index - at) for at in chosen), default=0), -index

    while len(chosen) < min(most, len(cases)):
        chosen.append(max(set(range(len(cases))).difference(chosen), key=rank))
    return sorted(chosen)


def due(count: int, date: datetime.date) -> list[int]:
    """Return which of so many cases are run on a date; in seven days in a row, each is once.

    >>> due(10, datetime.date(2026, 11, 28))
    [6]
    >>> sorted(each for day in range(1, 8) for each in due(10, datetime.date(2026, 11, day))) == list(range(10))
    True
    """
    return [index for index in range(count) if index % DAYS == date.toordinal() % DAYS]


def choose(
    cases: Sequence[Case],
    tier: Tier,
    date: datetime.date,
    *,
    slow: Callable[[Case], bool],
    first: Callable[[Sequence[Case]], list[int]],
) -> list[Case]:
    """Return the cases of one test function that a tier runs on a date: ``first`` are those that its marks choose."""
    if tier == "all":
        return list(cases)
    chosen = [cases[index] for index in first(cases)]
    core = [case for case in chosen if not slow(case)]
    left = [case for case in cases if case not in chosen]
    rest = [case for case in chosen if slow(case)] + [left[index] for index in due(len(left), date)]
    wanted = {"core": core, "rest": rest, "check": core + rest}[tier]
    return [case for case in cases if case in wanted]


def _values(item: pytest.Item) -> dict[str, object]:
    spec = getattr(item, "callspec", None)
    return {} if spec is None else {name: _told(value) for name, value in spec.params.items()}


def _told(value: object) -> object:
    """Return what tells a parameter's value from others: the value if it is plain, else the object that it is."""
    if isinstance(value, tuple | list):
        return tuple(map(_told, value))
    return repr(value) if isinstance(value, str | int | float | bool | None) else id(value)


def _first(items: Sequence[pytest.Item]) -> list[int]:
    if (some := items[0].get_closest_marker("some")) is not None:
        return spread([_values(item) for item in items], some.args[0])
    if items[0].get_closest_marker("pairs") is not None:
        return pair_cover([_values(item) for item in items])
    return list(range(len(items)))


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None and item.get_closest_marker("core") is None


def of_tier(items: Iterable[pytest.Item], tier: Tier, date: datetime.date) -> list[pytest.Item]:
    """Return the items that a tier runs on a date, in their order."""
    by_function: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    items = list(items)
    for item in items:
        by_function[item.nodeid.partition("[")[0]].append(item)
    wanted = {
        item.nodeid for cases in by_function.values() for item in choose(cases, tier, date, slow=_is_slow, first=_first)
    }
    return [item for item in items if item.nodeid in wanted]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Have --tier and --date."""
    parser.addoption("--tier", choices=TIERS, default="all", help="which tests are run (tests/suite/tiers.py)")
    by = "the day by which the rest's cases are chosen (default: today)"
    parser.addoption("--date", type=datetime.date.fromisoformat, help=by)


def pytest_configure(config: pytest.Config) -> None:
    """Say what the marks are, and settle the date, which all processes of the suite have to agree on."""
    for line in (
        "slow: takes over two seconds; no part of the core, and run last",
        "core: part of the core although it is slow: what a user does, once, with real processes",
        "pairs: the core has the cases in which every pair of two parameters' values occurs",
        "some(n): the core has n of the cases, evenly spaced or, of several parameters, with most of their values",
    ):
        config.addinivalue_line("markers", line)
    config.option.date = config.option.date or datetime.date.today()


def pytest_report_header(config: pytest.Config) -> str:
    """Print the tier and the date, with which the same cases are run again."""
    return f"tests: --tier {config.option.tier} --date {config.option.date.isoformat()}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is no part of the tier; run slow tests last."""
    kept = of_tier(items, config.option.tier, config.option.date)
    names = {item.nodeid for item in kept}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in names])
    items[:] = sorted(kept, key=lambda item: item.get_closest_marker("slow") is not None)
