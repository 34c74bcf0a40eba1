"""The three placement policies on pictures, and what must hold of any choice."""

from __future__ import annotations

import random

import pytest

from autopar.planner.peers.dapple import choose, reachable
from autopar.planner.placement.pool import choices


@pytest.mark.parametrize(
    ("free", "count", "fresh", "append", "scatter"),
    [
        # nodes of 8; 4 of node 0 and 2 of node 1 are taken
        ((4, 6, 8), 6, (0, 0, 6), (4, 2, 0), (3, 3, 0)),
        # more than the fresh node has: what is left comes from the first that is begun
        ((4, 6, 8), 10, (2, 0, 8), (4, 6, 0), (4, 6, 0)),
        # nothing is taken yet: scattering takes of all
        ((8, 8, 8), 4, (4, 0, 0), (4, 0, 0), (2, 1, 1)),
        # scattering goes on with fresh nodes once the begun ones are used up
        ((1, 8, 8), 4, (0, 4, 0), (1, 3, 0), (1, 2, 1)),
        # a node without any left gives none
        ((0, 5, 8), 3, (0, 0, 3), (0, 3, 0), (0, 3, 0)),
    ],
)
def test_each_policy_takes_what_its_paper_says(
    free: tuple[int, ...], count: int, fresh: tuple[int, ...], append: tuple[int, ...], scatter: tuple[int, ...]
) -> None:
    assert choices(free, (8, 8, 8), count) == list(dict.fromkeys((fresh, append, scatter)))


def test_policies_take_exactly_what_is_asked_of_what_is_there() -> None:
    for seed in range(500):
        rng = random.Random(seed)
        sizes = [rng.randint(1, 6) for _ in range(rng.randint(1, 5))]
        free = [rng.randint(0, size) for size in sizes]
        if not sum(free):
            continue
        count = rng.randint(1, sum(free))
        for taken in choices(free, sizes, count):
            assert sum(taken) == count
            assert all(0 <= one <= most for one, most in zip(taken, free, strict=True)), f"seed {seed}"


def test_one_node_leaves_no_choice_but_the_number() -> None:
    assert choose((5,), (8,), 8).free_after == [(4,), (3,), (2,), (1,)]
    assert reachable((8,), 1000) == 8


def test_a_stage_takes_no_more_devices_than_a_micro_batch_has_samples() -> None:
    assert choose((8, 8), (8, 8), 3).groups.widths.max() == 3
