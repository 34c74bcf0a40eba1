"""What tests of commands share: a folder that holds a profile and a cluster."""

import pytest

from calls import Run
from random_problems import gpt_profile, local_cluster


@pytest.fixture
def run(run: Run) -> Run:
    """Run autopar in a folder that holds a profile and a cluster; return (exit code, stdout, stderr)."""
    gpt_profile().save("profile.json")
    local_cluster(2).save("cluster.json")
    return run


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have layers timed once, and no links."""
    monkeypatch.setattr("autopar.profiler.measure.MAX_ROUNDS", 1)
    monkeypatch.setattr("autopar.cli.measure._local_ranks", lambda here, asked: 1)
