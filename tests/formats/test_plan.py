"""Plans that contradict themselves are refused; stages' groups and turns by hand."""

import random
from collections import Counter

import pytest
from pydantic import ValidationError

from autopar.formats.plan import LAYOUTS, Plan, SharedParameter, Stage, group_of, groups_of, turns
from autopar.formats.prediction import Prediction
from drawn_plans import chain, make
from played import small_plan


def _plan(**changes: object) -> Plan:
    return Plan.model_validate({**dict(small_plan((2, 1), 2)), **changes})


def _predicted(**changes: object) -> Prediction:
    usual = {"step_s": 1, "lower_bound_s": 1, "bubble": 0, "peak_bytes": (1, 1)}
    return Prediction.model_validate({**usual, **changes}, strict=False)


def _stages(*stages: tuple[str, int, int]) -> tuple[Stage, ...]:
    """Return stages of a layer, with their rows and depths, on a device each."""
    own = enumerate(stages)
    return tuple(Stage(layers=(name,), devices=(at,), shares=(rows,), warmup=d) for at, (name, rows, d) in own)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 7}, "must be the batch 7, found 2 x 8"),
        ({"ahead": "xpipe", "weight_policy": "stash"}, "only predict sees weights ahead of the newest"),
        ({"predicted": _predicted(peak_bytes=(1,))}, "1 numbers for 2 stages"),
        ({"stages": _stages(("a", 2, 1))}, "shares must sum"),
        ({"stages": _stages(("a", 8, 1), ("b", 8, 2))}, "deadlock"),
        ({"stages": _stages(("a", 8, 2), ("a", 8, 2))}, "placed twice"),
        ({"tied": (SharedParameter(parameter="w", stages=(1, 0), bytes=4),)}, "must ascend"),
        ({"micro_batches": True}, "valid integer"),
    ],
)
@pytest.mark.reliability(54)
def test_an_unsound_plan_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        _plan(**changes)


@pytest.mark.parametrize("seed", range(10))
def test_groups_are_read_off_the_devices_as_the_layout_dealt_the_stages_out(seed: int) -> None:
    draw = random.Random(seed)
    groups = draw.randint(1, 6)
    for layout, chunks in (("line", 1), ("loop", draw.randint(1, 4)), ("vee", 2)):
        dealt = [[turn * groups + at for turn in range(chunks)] for at in range(groups)]
        if layout == "vee":
            dealt = [[at, 2 * groups - 1 - at] for at in range(groups)]
        devices = [group_of(layout, stage, groups) for stage in range(groups * chunks)]  # type: ignore[arg-type]
        assert groups_of(devices) == tuple(map(tuple, dealt))


@pytest.mark.parametrize("division", ["split", "round-robin"])
def test_every_micro_batch_meets_all_replicas_that_split_it_or_one_of_those_that_take_turns(division: str) -> None:
    for replicas in range(1, 5):
        for micro_batches in range(1, 8):
            met = Counter[int]()
            for replica in range(replicas):
                met.update(turns(division, replicas, replica, micro_batches))  # type: ignore[arg-type]
            assert met == dict.fromkeys(range(micro_batches), replicas if division == "split" else 1)


@pytest.mark.parametrize("schedule", LAYOUTS)
def test_stages_on_other_devices_than_the_schedule_has_them_on_are_refused(schedule: str) -> None:
    groups, stages = (2, 2) if LAYOUTS[schedule] == "line" else (2, 4)
    plan = make(schedule, 4, [(2,), (2,)], [4, 4, 4, 4][:stages], chain(stages))
    assert len(plan.groups) == groups
    first, *others = plan.stages
    moved = first.model_copy(update={"devices": others[0].devices})
    with pytest.raises(ValidationError, match=f"used twice|{schedule} has stage . on the devices of|stages on"):
        Plan.model_validate({**dict(plan), "stages": (moved, *others)})
