"""Block partitions against the theorem that promises them, and every way to cut the sequence."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import combinations_with_replacement, pairwise

from autopar.planner.peers.torchgpipe import blocks


def _drawn(rng: random.Random) -> list[float]:
    count = rng.randint(1, 9)
    draws = [
        lambda: float(rng.randint(0, 3)),
        lambda: rng.uniform(0, 1),
        lambda: rng.lognormvariate(0, 2),
        lambda: rng.choice([0.0, 0.1, 1e-9, 1e9]),
    ]
    draw = rng.choice(draws)
    return [draw() for _ in range(count)]


def _sums(values: list[float], ends: tuple[int, ...]) -> list[Fraction]:
    return [sum(map(Fraction, values[start:stop]), Fraction(0)) for start, stop in pairwise((0, *ends))]


def test_sums_differ_by_no_more_than_the_largest_number() -> None:
    for seed in range(1000):
        rng = random.Random(seed)
        values, count = _drawn(rng), rng.randint(1, 6)
        ends = blocks(values, count)
        assert len(ends) == count
        assert ends[-1] == len(values)
        assert list(ends) == sorted(ends)
        sums = _sums(values, ends)
        assert max(sums) - min(sums) <= Fraction(max(values)), f"seed {seed}"


def test_the_largest_block_exceeds_the_enumerated_least_by_less_than_a_number() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        values, count = _drawn(rng), rng.randint(1, 4)
        largest = max(_sums(values, blocks(values, count)))
        every = combinations_with_replacement(range(len(values) + 1), count - 1)
        least = min(max(_sums(values, (*inner, len(values)))) for inner in every)
        assert least <= largest <= least + Fraction(max(values)), f"seed {seed}"


def test_equal_numbers_make_blocks_of_equal_lengths() -> None:
    assert blocks([0.1] * 12, 4) == (3, 6, 9, 12)


def test_numbers_without_any_size_stay_as_they_were_cut() -> None:
    assert blocks([0.0] * 6, 3) == (2, 4, 6)
