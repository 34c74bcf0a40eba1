"""Families, stages that are placed, and what schedules do with them, against all that there is."""

import random

import pytest

from autopar.errors import UsageError
from autopar.formats.stage import layout_of
from autopar.ownership import DIVISIONS, Replicas
from autopar.planner import PlanOptions, plan
from autopar.planner import candidate as candidates
from autopar.planner.candidate import CandidateStage, Family, families, place
from autopar.schedules import SCHEDULES
from autopar.schedules.order import places
from random_problems import gpt_profile, local_cluster


def test_families_divide_batches_and_placed_stages_take_every_layer_once() -> None:
    for batch in range(1, 130):
        counts = [count for count in range(1, batch + 1) if batch % count == 0]
        found = families(batch, PlanOptions())
        assert found == [Family(count, batch // count, "1f1b") for count in counts]
        for at, count in enumerate(counts):
            beside = {counts[max(0, at - 1)], counts[min(at + 1, len(counts) - 1)]} - {count}
            assert set(candidates.counts_beside(batch, count)) == beside
            assert families(batch, PlanOptions(micro_batches=count)) == [found[at]]
    with pytest.raises(UsageError, match="`micro_batches=7` does not divide the batch 60; near ones do: 4, 5, 6"):
        families(60, PlanOptions(micro_batches=7))
    profile = gpt_profile(blocks=6)
    for seed in range(4):
        rng = random.Random(seed)
        family = Family(4, 4, "1f1b")
        cuts = (*sorted(rng.sample(range(1, 8), rng.randint(0, 3))), 8)
        widths = [rng.randint(1, 3) for _ in cuts]
        turns = [width > 1 and rng.random() < 0.5 for width in widths]
        every = [Replicas(width, DIVISIONS[turn]) for width, turn in zip(widths, turns, strict=True)]
        stages = place(family, cuts, every)
        assert [layer for stage in stages for layer in range(stage.first, stage.stop)] == list(range(8))
        candidate = candidates.with_depths(family, stages, [rng.randint(1, stage.warmup) for stage in stages])
        assert (candidate.cuts, candidate.widths) == (cuts, tuple(widths))
        assert candidate.devices == tuple(range(sum(widths)))
        for stage in stages:
            turns = [len(samples.of(4)) for samples in stage.samples]
            assert sum(turns) == (4 if stage.division == "round-robin" else 4 * len(turns))
            assert sum(share * turn for share, turn in zip(stage.shares, turns, strict=True)) == 16
        made = plan(profile, local_cluster(12), PlanOptions(stages=candidate.text(), micro_batches=4))
        assert [len(stage.layers) for stage in made.stages] == [stage.stop - stage.first for stage in stages]
        assert [stage.devices for stage in made.stages] == [stage.devices for stage in stages]


def test_a_stage_is_as_far_behind_the_gradients_that_it_sent_as_the_messages_say() -> None:
    """Played: a gradient has arrived when what its receiver computes after it does."""
    leading = reached = 0
    for seed in range(200):
        rng = random.Random(seed)
        count, widths = rng.randint(1, 24), [rng.randint(1, 4) for _ in range(2)]
        most = [-(-count // width) for width in widths]
        one, two = (
            CandidateStage(at, at + 1, tuple(range(width)), (1,) * width, rng.randint(1, deep), division="round-robin")
            for at, (width, deep) in enumerate(zip(widths, most, strict=True))
        )
        lead, held = two.lead(one, count), [0]
        for replica in range(widths[1]):
            own = list(range(replica, count, widths[1]))
            for turn in range(len(own)):
                received = own[: turn + two.warmup]
                # A stage sends what follows a backward once that is over, on the same replica, so many turns later.
                late = [
                    each
                    for each in own[:turn]
                    if not any((other - each) % widths[0] == 0 and other >= each + one.in_flight for other in received)
                ]
                held.append(len(late) + min(two.warmup, len(own) - turn))
        assert max(held) <= two.warmup + lead, f"seed {seed}"
        leading += lead > 0
        reached += lead > 0 and max(held) == two.warmup + lead
    assert leading > 34
    assert reached > 0.5 * leading


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_backwards_are_in_halves_at_every_size_or_at_none_that_has_several_groups(schedule: str) -> None:
    for chunks in candidates.chunk_counts(schedule):
        for groups, count in ((2, 4), (3, 6), (4, 8)):
            for depths in SCHEDULES[schedule].warmups(groups, chunks, count).values():
                every = places(layout_of(schedule), groups, chunks, count, depths)
                halves = any(kind == "I" for each in every for kind, *_ in SCHEDULES[schedule].order(each))
                assert halves == candidates.splits_backward(schedule)
