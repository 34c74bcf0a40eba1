"""How often checkpoints are saved."""

from __future__ import annotations

import itertools

import pytest

from autopar.errors import UsageError
from autopar.runtime.checkpoint.cadence import Cadence, known_every


def saved(cadence: Cadence, steps: int, step_s: float, cost_s: float | None, first: int = 0) -> list[int]:
    """Return after which steps a checkpoint was due; ``cost_s`` is what each takes."""
    found: list[int] = []
    for done in range(first + 1, steps + 1):
        cadence.add(step_s)
        if cadence.due(done, lambda: cost_s if found else None):
            found.append(done)
    return found


def test_a_number_of_steps_counts_from_the_runs_first() -> None:
    assert saved(Cadence(4, 0, float), 13, 1.0, 1.0) == [4, 8, 12]
    assert saved(Cadence(4, 6, float), 13, 1.0, 1.0, first=6) == [8, 12]


@pytest.mark.parametrize(("step_s", "cost_s"), [(0.1, 0.03), (1.0, 0.001), (0.01, 0.5)])
def test_by_itself_it_takes_as_much_of_the_time_as_is_allowed(step_s: float, cost_s: float) -> None:
    steps = 20_000
    found = saved(Cadence("auto", 0, float), steps, step_s, cost_s)
    assert found[0] == 5
    share = len(found) * cost_s / (steps * step_s)
    assert share < 0.0301
    gaps = {after - before for before, after in itertools.pairwise(found)}
    assert len(gaps) == 1
    assert gaps == {max(5, -(-cost_s // (0.03 * step_s)))} or share > 0.028


@pytest.mark.parametrize(("step_s", "cost_s"), [(0.1, 0.03), (1.0, 0.2), (0.01, 0.5)])
def test_a_pipeline_that_is_drained_for_them_asks_before_it_is_filled(step_s: float, cost_s: float) -> None:
    cadence, found, done = Cadence("auto", 0, float), list[int](), 0
    while done < 5000:
        end = cadence.next_after(done, lambda: cost_s if found else None)
        for step in range(done, end):
            cadence.add(step_s)
            if cadence.due(step + 1, lambda: cost_s):
                found.append(step + 1)
        assert found[-1] == end
        done = end
    assert found[0] == 5
    assert len(found) * cost_s / (done * step_s) == pytest.approx(0.03, rel=0.4) or len(found) == done // 5
    assert Cadence(4, 0, float).next_after(5, lambda: None) == 8


def test_ranks_go_by_what_the_slowest_takes() -> None:
    assert saved(Cadence("auto", 0, lambda number: 10 * number), 1000, 1.0, 1.0)[:3] == [5, 39, 73]


@pytest.mark.parametrize("wrong", [0, -1, "often", True, 1.5, ""])
def test_what_is_no_number_of_steps_is_refused(wrong: object) -> None:
    with pytest.raises(UsageError, match="`every` must be a number of steps"):
        known_every(wrong)  # type: ignore[arg-type]


def test_numbers_may_be_typed() -> None:
    assert (known_every("12"), known_every("auto"), known_every(3)) == (12, "auto", 3)
