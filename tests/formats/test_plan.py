"""Plans that contradict themselves are refused; stages' groups and turns by hand."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from autopar.formats.cuts import ParameterCut, SequenceCut
from autopar.formats.plan import FileReference, NodeDevices, Plan
from autopar.formats.prediction import Prediction
from autopar.formats.stage import LAYOUTS, SharedParameter, Stage, group_of, groups_of
from drawn_plans import chain, crossing, make
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


def _tied(*stages: int, count: int = 1) -> dict[str, object]:
    return {"tied": (SharedParameter(parameter="w", stages=stages, bytes=4),) * count}


def _with(at: int, plan: Plan | None = None, **changes: object) -> dict[str, object]:
    """Return fields of a plan of which a stage is another."""
    fields = dict(plan or small_plan((2, 1), 2))
    placed = enumerate(fields["stages"])
    return {**fields, "stages": tuple(s.model_copy(update=changes) if index == at else s for index, s in placed)}


CUT = ParameterCut(parameter="w", dim=0, parts=(((0, 1),), ((1, 2),)))
TURNS: dict[str, object] = {"division": "round-robin", "shares": (8, 8)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (_with(1, recompute=("l0",)), "is not in this stage"),
        (_with(1, shard="optimizer"), "needs several replicas"),
        (_with(0, **TURNS, shard="gradients", warmup=1), "not take turns"),
        (_with(0, division="round-robin"), "round-robin replicas take all 8 rows each"),
        (_with(0, **TURNS, warmup=2), "2 is more than the 1 micro-batches of a replica"),
        (_with(0, shares=(3.5, 4.5)), "rows are whole"),
        (_with(0, devices=(0, 1, 3), tensor_parallel=2), "3 devices do not make groups of 2"),
        (_with(1, cuts=(CUT,)), "2 parts for groups of 1 devices"),
        (_with(1, cuts=(CUT, CUT), devices=(2, 3), tensor_parallel=2), "parameter 'w' is given twice"),
        (_with(0, sequence=(SequenceCut(tensor="t0", dim=1),)), "not alike in all stages"),
        (_with(2, small_plan((2, 1), 2, "interleaved", 2), shares=(3, 5)), "must divide rows alike"),
        ({"schedule": "gpipe"}, "gpipe keeps all 2 micro-batches"),
        ({"weight_policy": "stash", "schedule": "gpipe"}, "runs by 1f1b, found gpipe"),
        ({"weight_policy": "pipemare"}, "pipemare reduces rates"),
        ({"synchronous_steps": 1}, "only pipemare begins"),
        (_with(0, warmup=4) | {"weight_policy": "2bw"}, "2bw needs 3 with 4 in flight"),
        (_with(1, warmup=3) | {"weight_policy": "stash"}, "deadlock"),
        (
            {"cluster": FileReference(path="c", sha256="0" * 64), "cluster_name": "8xH100"},
            "may not name a built-in one",
        ),
        ({"tensors": (crossing("t", 1, (1,)),)}, "must lie behind the producer 1"),
        ({"tensors": (crossing("t", 0, (2,)),)}, "and below 2"),
        ({"tensors": chain(2) * 2}, "tensor 't0' is given twice"),
        (_tied(0, 2), "lie below 2"),
        (_tied(0, 1, count=2), "parameter 'w' is given twice"),
        ({"batch": 7}, "must be the batch 7, found 2 x 8"),
        ({"ahead": "xpipe", "weight_policy": "stash"}, "only predict sees weights ahead of the newest"),
        ({"nodes": (NodeDevices(node=0, type="cpu", memory_bytes=1, count=2),)}, "on device 2, and the nodes have 2"),
        ({"predicted": _predicted(peak_bytes=(1,))}, "1 numbers for 2 stages"),
        ({"stages": _stages(("a", 2, 1))}, "shares must sum"),
        ({"stages": _stages(("a", 8, 1), ("b", 8, 2))}, "deadlock"),
        ({"stages": _stages(("a", 8, 2), ("a", 8, 2))}, "placed twice"),
        (_tied(1, 0), "must ascend"),
        (_tied(0, 0, 1), "must ascend without repeats"),
        ({"micro_batches": True}, "valid integer"),
    ],
)
@pytest.mark.reliability(54)
def test_an_unsound_plan_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        _plan(**changes)


def test_a_plan_says_what_its_stages_divide_alike() -> None:
    assert _plan(**_with(0, warmup=3) | {"weight_policy": "2bw"}).depths[0].depth == 3
    for widths, micro_batches, said in (((1,), 1, False), ((2,), 1, True), ((1,), 2, True)):
        plan = small_plan(widths, micro_batches).model_copy(update={"loss_difference": 0.1})
        assert any("differ by 0.1" in each for each in plan.caveats) == said
    spreading = small_plan((2,), 1).model_copy(update={"times_spread": 0.35})
    assert spreading.caveats == (
        "the profile's times of the same layer spread by 35% of their median, so that predictions may be as far off; "
        "profile again on an idle machine",
    )
    assert spreading.accepted == (), "how steady a machine was is no matter of what is trained"
    teams = make("1f1b", 2, [(2,)] * 3, [2, 2, 1], chain(3))
    teams = teams.model_copy(update=_with(0, teams, sequence=(SequenceCut(tensor="t0", dim=1),)))
    assert [teams.ownership.joins(*ends) for ends in ((0, 1), (0, 2), (1, 2))] == [False, True, True]
    # Parts that are as many are not the same ones.
    shared: Any = SimpleNamespace(parameter="w", stages=(0, 1))
    stages = [SimpleNamespace(tensor_parallel=2, cut=lambda name, at=at: at) for at in (0, 1, 0)]
    plans: list[Any] = [SimpleNamespace(stages=stages[at : at + 2]) for at in (0, 1)] + [
        SimpleNamespace(stages=stages[::2])
    ]
    assert [Plan.cuts_alike(each, shared) for each in plans] == [False, False, True]


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


@pytest.mark.parametrize("schedule", LAYOUTS)
def test_stages_on_other_devices_than_the_schedule_has_them_on_are_refused(schedule: str) -> None:
    groups, stages = (2, 2) if LAYOUTS[schedule] == "line" else (2, 4)
    plan = make(schedule, 4, [(2,), (2,)], [4, 4, 4, 4][:stages], chain(stages))
    assert len(plan.groups) == groups
    first, *others = plan.stages
    moved = first.model_copy(update={"devices": others[0].devices})
    with pytest.raises(ValidationError, match=f"used twice|{schedule} has stage . on the devices of|stages on"):
        Plan.model_validate({**dict(plan), "stages": (moved, *others)})
