"""Rows of a contest: trouble is in front and stays, and the time to a loss is that of a slower count."""

import random
from statistics import fmean

import pytest

from autopar.formats.contest import MEAN_OF, Contestant, ContestResult, ContestRow, ordered
from played import plan_of, small_plan


def _row(name: str, *losses: list[float], step_s: float = 0.5, emulated: bool = False) -> ContestRow:
    results = tuple(ContestResult(loss=tuple(each), step_s=step_s, peak_bytes=1) for each in losses)
    return ContestRow(Contestant(name, plan_of("1f1b", (1, 1)), "0:1,1:1"), results, emulated)


@pytest.mark.parametrize("seed", range(20))
def test_a_loss_is_reached_where_a_plain_count_says_so(seed: int) -> None:
    draw = random.Random(seed)
    losses = [[draw.uniform(0, 4) + 8 / (1 + at) for at in range(draw.randrange(1, 60))] for _ in range(3)]
    row, wanted = _row("drawn", *losses), draw.uniform(1, 6)
    reached = []
    for own in losses:
        means = [fmean(own[max(0, at - MEAN_OF + 1) : at + 1]) for at in range(len(own))]
        reached.append(next((at + 1 for at, mean in enumerate(means) if mean <= wanted), None))
    assert [each.steps_to(wanted) for each in row.results] == reached
    known = sorted(each for each in reached if each is not None)
    is_known = len(known) == 3 and not row.trouble
    assert row.seconds_to(wanted) == (known[1] * 0.5 if is_known else None)


def test_trouble_is_first_and_what_never_reaches_the_loss_is_last() -> None:
    sinking = [5.0 - at / 10 for at in range(30)]
    diverged = ContestRow(
        Contestant("diverges", plan_of("1f1b", (1, 1))),
        (ContestResult(loss=tuple(sinking), step_s=0.1), ContestResult(loss=(1.0,), diverged="the loss is inf")),
    )
    rows = [
        _row("slow", sinking, step_s=2.0),
        _row("never", [5.0] * 30, step_s=0.01),
        diverged,
        _row("fast", sinking, step_s=1.0),
        _row("rises", sinking[::-1], step_s=0.01),
        ContestRow(Contestant("refused", refusal="no"), ()),
    ]
    assert [each.contestant.name for each in ordered(rows, 3.5)][3:] == ["fast", "slow", "never"]
    assert {each.contestant.name for each in ordered(rows, 3.5)[:3]} == {"diverges", "rises", "refused"}
    assert [each.contestant.name for each in ordered(rows, None)][3:] == ["never", "fast", "slow"]
    assert diverged.trouble == "diverged after 1 mini-batches: the loss is inf"
    assert (diverged.spread, diverged.seconds_to(9.0)) == (None, None)
    assert diverged.as_dict(9.0)["loss"] == [fmean(sinking[-MEAN_OF:]), None]


def test_what_is_emulated_takes_what_is_simulated() -> None:
    row = _row("emulated", [5.0, 4.0, 1.0], step_s=100.0, emulated=True)
    assert row.measured_s is None
    assert row.seconds_to(4.5) == 2 * (row.predicted_s or 0)


def test_versions_and_delays_are_those_of_the_deepest_stage() -> None:
    plan = small_plan((1, 1, 1), 1)
    stages = [stage.model_copy(update={"warmup": 3 - at}) for at, stage in enumerate(plan.stages)]
    stash = plan.model_copy(update={"weight_policy": "stash", "stages": tuple(stages)})
    for chosen, found in ((plan, (1, 0.0)), (stash, (3, 2.0))):
        row = ContestRow(Contestant("it", chosen), ())
        assert (row.versions, row.delay) == found
