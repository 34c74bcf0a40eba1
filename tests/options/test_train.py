"""What the user asks of a run is refused where it is out of range, contradicts itself, or means nothing."""

import json
import math
from dataclasses import asdict
from typing import Any

import pytest

from autopar.errors import UsageError
from autopar.options.train import DEFAULT_STEPS, RunOptions, TrainSettings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"clip_norm": 0.0}, "`clip_norm` must be positive, found 0.0"),
        ({"clip_norm": math.nan}, "`clip_norm` must be positive, found nan"),
        ({"clip_norm": 1.0, "clip": "rank"}, "`clip` must be one of model, stage; found 'rank'"),
        ({"clip": "stage"}, "`clip='stage'` says whose norm is bounded; say by what, too: `clip_norm`"),
        ({"deferred_batch_norm": True, "sync_batch_norm": True}, "exclude each other"),
        ({"split_seeds": True, "compile": True}, "`split_seeds` and `compile` exclude each other"),
        ({"last": "keep"}, "`last` must be one of drop, pad; found 'keep'"),
    ],
)
def test_values_out_of_range_are_refused_and_others_come_back_from_json(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        TrainSettings(**settings)
    some = TrainSettings(clip_norm=2.5, clip="stage", last="pad", sync_batch_norm=True, time_layers=True)
    assert TrainSettings(**json.loads(json.dumps(asdict(some)))) == some


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        *(
            (
                {"checkpoint": "saved", "every": wrong},
                f"`every` must be a number, at least 1, or 'auto'; found {wrong!r}",
            )
            for wrong in (0, -1, "often", True, "")
        ),
        *(
            ({"loaders": wrong}, "`loaders` must be a number, 0 or more, or 'auto'; found")
            for wrong in ("-1", "many", "")
        ),
        ({"epochs": 2, "steps": 3}, "`epochs=2` and `steps=3` contradict each other"),
        ({"every": 3}, "`every` is of checkpoints; name their folder, too"),
        ({"checkpoint": "saved", "accept_changes": True}, "pass `resume=True`, too"),
        ({"timeout_s": math.inf}, "`timeout_s` must be positive, and at most 1000000000 seconds, found inf"),
        ({"inject_fault": "kill@1"}, "kill@1"),
    ],
    ids=str,
)
def test_what_no_run_can_be_asked_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        RunOptions.of("train", asked)


def test_numbers_of_steps_are_read_from_text_and_left_open_where_epochs_are_counted() -> None:
    every = [RunOptions.of("train", {"checkpoint": "saved", "every": each}).every for each in ("12", "auto", 3)]
    assert every == [12, "auto", 3]
    asked = ({}, {"steps": 3}, {"epochs": 2})
    assert [RunOptions.of("train", each).steps for each in asked] == [DEFAULT_STEPS, 3, None]
