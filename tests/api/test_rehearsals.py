"""Rehearsals from Python: options of steps where there are none."""

import re
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.errors import AutoparError, FileError, UsageError
from random_problems import gpt_profile, local_cluster


@pytest.fixture
def plan() -> autopar.Plan:
    return autopar.plan(gpt_profile(blocks=4), local_cluster(2), gpus=2, stages="0-2:1,3-5:1")


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"steps": 0}, UsageError, "`steps` must be at least 1, found 0"),
        ({"real_time": True}, UsageError, "`real_time` is of steps in virtual time; pass `steps`, too"),
        ({"profile": Path("other.json")}, UsageError, "`profile` is of steps"),
        ({"steps": 1, "program": "no.json"}, FileError, "no.json"),
        ({"steps": 1, "inject_fault": "kill"}, UsageError, "kill"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused(
    plan: autopar.Plan, options: dict[str, Any], error: type[AutoparError], said: str
) -> None:
    with pytest.raises(error, match=re.escape(said)):
        autopar.rehearse(plan, **options)  # type: ignore[call-overload]
