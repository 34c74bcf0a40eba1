"""What loaders read for the ranks of a host: every row that a rank needs, once, in tasks that keep all of them busy."""

import random
from collections import Counter

import pytest

from autopar.runtime.loaders.work import ReadingDivision
from loaded import draw_plan


@pytest.mark.parametrize("seed", range(30))
def test_every_row_that_ranks_of_a_host_need_is_read_once_and_sent_to_all_that_need_it(seed: int) -> None:
    rng = random.Random(seed)
    plan = draw_plan(rng)
    ranks = tuple(rank for rank in range(len(plan.devices)) if rng.random() < 0.7)
    division = ReadingDivision(plan, ranks, rng.randint(1, 6), collates=seed % 3 == 1, whole=seed % 3 == 2)
    first, step = rng.randrange(3), rng.randrange(3, 9)
    readers, tasks = division.readers(step, first), division.tasks(step, first)
    sent = Counter(
        (s.rank, s.micro_batch, row) for task in tasks for s in task.shares for row in range(s.start, s.stop)
    )
    owned = [plan.ownership.ranks[rank] for rank in readers]
    needed = [(own.rank, m, row) for own in owned for m in own.micro_batches for row in own.rows]
    assert sent == Counter(needed)
    read = Counter((task.micro_batch, row) for task in tasks for row in range(task.start, task.stop))
    assert set(read.values()) <= {1}
    if division.collates or division.whole:
        assert all(task.exact for task in tasks)
    else:
        assert set(read) == {(m, row) for _, m, row in needed}
        every = plan.batch // division.loaders
        assert all(task.stop - task.start <= max(1, every + 1) for task in tasks)
    # So many mini-batches have a task for every loader, and never fewer than two are read ahead.
    assert division.ahead >= 2
    assert not ranks or division.ahead * max(1, len(division.tasks(0, 0))) >= division.loaders
