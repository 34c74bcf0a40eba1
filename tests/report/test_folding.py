"""What is drawn once for many: ranks alike, and the middle of what repeats; nothing else is left out."""

import random
from itertools import pairwise

import pytest

from autopar.formats.program import Action
from autopar.formats.timeline import Event, Timeline, track_of
from autopar.report.folding import (
    KEPT,
    MOST_BLOCKS,
    TimeAxis,
    about_equal,
    alike_ranks,
    evenly,
    left_out,
    ranges,
    stretches_of,
)
from played import play, small_plan


def _rows(timeline: Timeline) -> list[list[Event]]:
    rows: list[list[Event]] = [[] for _ in range(timeline.rank_count())]
    for event in timeline:
        rows[event.rank].append(event)
    return rows


@pytest.mark.parametrize(
    ("widths", "schedule", "jitter"),
    [((64,), "gpipe", 0.0), ((32, 1, 31), "1f1b", 0.0), ((16, 16), "zb-v", 0.05), ((8, 4), "interleaved", 0.05)],
)
def test_replicas_of_a_stage_are_one_and_those_of_others_another(
    widths: tuple[int, ...], schedule: str, jitter: float
) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    timeline = play(small_plan(widths, 4, schedule, chunks), "measured" if jitter else "simulated", jitter)
    found = alike_ranks(timeline)
    assert [len(each.members) for each in found] == list(widths)
    assert [rank for each in found for rank in each.members] == list(range(sum(widths)))


def test_a_rank_that_falls_behind_has_a_row_of_its_own_in_either_timeline() -> None:
    predicted, measured = Timeline("simulated"), Timeline("measured")
    for rank in range(8):
        predicted.add(rank, Action("F", 0, 0), 0.0, 1.0)
        measured.add(rank, Action("F", 0, 0), 0.0, 1.5 if rank == 5 else 1.0 + 0.01 * rank)
    assert [each.label() for each in alike_ranks(predicted)] == ["ranks 0-7"]
    for both in ((measured, predicted), (predicted, measured)):
        assert [each.label() for each in alike_ranks(*both)] == ["ranks 0-4, 6, 7", "rank 5"]
    assert [each.times for each in alike_ranks(measured)] == ["x 7", ""]


def test_what_is_about_equal_and_what_is_chosen_evenly() -> None:
    draw = random.Random(1)
    for _ in range(200):
        values = {at: draw.choice((0.0, 1.0, 1.05, 1.2, 5.0)) * draw.choice((1.0, 1.0, 1e-9)) for at in range(12)}
        groups = about_equal(values)
        assert sorted(at for each in groups for at in each.members) == list(values)
        for each in groups:
            own = [values[at] for at in each.members]
            assert max(own) <= 1.1 * min(own)
        count, most = draw.randrange(1, 2000), draw.randrange(2, 40)
        chosen = evenly(count, most)
        assert (chosen[0], chosen[-1], len(chosen)) == (0, count - 1, min(count, most))
        assert chosen == sorted(set(chosen))
        members = sorted(draw.sample(range(300), draw.randrange(1, 200)))
        assert len(ranges(members)) < 40
        assert ranges(members, 10**6) == ranges(members, 10**6).strip()
    assert ranges((*range(100), 200, *range(300, 400))) == "0-99, 200, 300-399"


@pytest.mark.parametrize("pattern", ["F", "FB", "FFB", "FBW", "FFFFBBBB"])
@pytest.mark.parametrize("before", ["", "FFFF", "UUUU"])
def test_repeated_patterns_are_found_wherever_they_begin(pattern: str, before: str) -> None:
    text = before + pattern * 40 + "U"
    longest = max(stretches_of(text), key=lambda each: each.stop - each.first)
    own = text[longest.first : longest.stop]
    assert own == (own[: longest.period] * 400)[: len(own)]
    assert len(own) >= len(pattern) * 39
    assert stretches_of(pattern * 5 + "U") == [] or len(pattern) * 5 >= 12 * stretches_of(pattern * 5)[0].period


@pytest.mark.parametrize(
    ("widths", "micro_batches", "schedule"),
    [((1,) * 4, 256, "1f1b"), ((1,) * 4, 256, "gpipe"), ((2, 1), 128, "zb-v"), ((1,) * 8, 128, "zb-h1")],
)
def test_only_the_middle_of_what_every_row_repeats_is_left_out(
    widths: tuple[int, ...], micro_batches: int, schedule: str
) -> None:
    timeline = play(small_plan(widths, micro_batches, schedule))
    rows = _rows(timeline)
    gaps = left_out(rows, timeline.end_s)
    assert sum(end_s - start_s for start_s, end_s in gaps) > 0.3 * timeline.end_s
    for row in rows:
        blocks = [event for event in row if track_of(event.action.kind) == "compute"]
        for start_s, end_s in gaps:
            before = [event.action.kind for event in blocks if event.start_s < start_s]
            hidden = [event.action.kind for event in blocks if start_s <= event.start_s < end_s]
            behind = [event.action.kind for event in blocks if event.start_s >= end_s]
            # What is drawn on either side says what lies between.
            assert any((hidden[:period] * len(hidden))[: len(hidden)] == hidden for period in range(1, 25))
            assert set(hidden) <= set(before[-24:]) & set(behind[:24])
            assert min(len(before), len(behind)) >= KEPT


def test_few_computations_or_unlike_ones_are_all_drawn() -> None:
    few = play(small_plan((1, 1), MOST_BLOCKS // 2 - 1))
    assert left_out(_rows(few), few.end_s) == ()
    draw, mixed = random.Random(0), Timeline("simulated")
    for at in range(400):
        mixed.add(0, Action(draw.choice("FBIW"), draw.randrange(9), at), at, at + 1)
    assert left_out(_rows(mixed), mixed.end_s) == ()
    assert left_out([], 0.0) == ()


def test_an_axis_keeps_the_order_of_moments_and_the_length_of_what_it_draws() -> None:
    draw = random.Random(2)
    for _ in range(100):
        edges = sorted(draw.sample(range(1000), 2 * draw.randrange(0, 4)))
        axis = TimeAxis(1000.0, tuple(zip(map(float, edges[::2]), map(float, edges[1::2]), strict=True)))
        moments = sorted(draw.uniform(0, 1000) for _ in range(50))
        places = [axis.place(at) for at in moments]
        assert all(one <= two for one, two in pairwise(places))
        start, end = sorted((draw.uniform(0, 1000), draw.uniform(0, 1000)))
        pieces = axis.pieces(start, end)
        hidden = sum(max(0.0, min(end, two) - max(start, one)) for one, two in axis.gaps)
        assert sum(two - one for one, two in pieces) == pytest.approx(end - start - hidden)
        assert axis.pieces(500.0, 500.0) in ([(axis.place(500.0),) * 2], [])
        drawn = sum(two - one for one, two in axis.windows)
        assert axis.length_s == pytest.approx(drawn + len(axis.gaps) * axis.gap_s)
