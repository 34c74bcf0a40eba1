"""Joining the ranks that a launcher started: what its environment may not say."""

from __future__ import annotations

import pytest

from autopar.errors import UsageError
from autopar.ranks.context import joined_from_environment

GOOD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": None, "MASTER_PORT": None}, "RANK, MASTER_PORT not set; start workers with torchrun"),
        ({"RANK": "first"}, "RANK must be a number, found 'first'"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK must be a number, found '-1'"),
        ({"WORLD_SIZE": "3"}, "the number of ranks started is 3, more than the 2 that the plan needs"),
        ({"RANK": "2"}, "RANK is 2, and WORLD_SIZE 2: ranks count from 0"),
    ],
)
def test_an_environment_that_contradicts_the_plan_is_refused_before_anyone_waits(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None], message: str
) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**GOOD, **changes}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as caught, joined_from_environment("cpu", 1.0, 2):
        raise AssertionError
    assert str(caught.value).startswith(message)
