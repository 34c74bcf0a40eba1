"""Files of other systems are read from Python as by the command, and refused by name."""

from pathlib import Path

import pytest

import autopar
from autopar.errors import FileError, UsageError
from equal_plans import llama_profile


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"none\.txt: .*PipeDream"):
        autopar.import_pipedream(tmp_path / "none.txt")
    with pytest.raises(UsageError, match=r"`replicas` must be at least 1, found 0"):
        autopar.import_layout("Et*6|t*6L", llama_profile(), replicas=0)


def test_stages_of_a_layout_are_options_of_the_planner() -> None:
    found = autopar.import_layout("Et*6|t*6L", llama_profile(), replicas=2)
    plan = autopar.plan(llama_profile(), "4xH100", times_of="cpu", **found.options)
    assert [stage.replicas for stage in plan.stages] == [2, 2]
