"""Schedules by autopar's names and torch's, however they are spelled."""

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from autopar.errors import UsageError
from autopar.planner import PlanOptions
from autopar.schedules import SCHEDULES, TORCH_NAMES, canonical, schedule_named


@pytest.mark.parametrize(("spelled", "name"), [*((name, name) for name in SCHEDULES), *TORCH_NAMES.items()])
@pytest.mark.parametrize("prefix", ["", "Schedule", "schedule_"])
def test_a_schedule_is_found_in_any_case_with_and_without_torchs_prefix(spelled: str, name: str, prefix: str) -> None:
    for text in (spelled, spelled.lower(), spelled.upper(), spelled.replace("-", "_"), spelled.replace("-", "")):
        assert PlanOptions(schedule=f"{prefix}{text}").schedule == name


def test_every_class_of_torch_is_a_schedule_or_told_apart() -> None:
    classes = [name for name in dir(torch_schedules) if name.startswith("Schedule")]
    assert {f"Schedule{name}" for name in TORCH_NAMES} <= set(classes)
    for name in classes:
        if canonical(name) is None:
            with pytest.raises(UsageError, match=f"torch's {name.removeprefix('Schedule')} has no counterpart, near"):
                schedule_named(name)


@pytest.mark.parametrize("text", ["magic", "", "schedule", "1f1b1f1b", "auto-1f1b", None, 3])
def test_what_is_no_schedule_is_refused_with_those_that_are_and_auto_is_any(text: object) -> None:
    with pytest.raises(UsageError, match=r"`schedule` must be one of auto, gpipe, 1f1b, .*; found "):
        PlanOptions(schedule=text)  # type: ignore[arg-type]
    assert PlanOptions(schedule="AUTO").schedule == "auto"
