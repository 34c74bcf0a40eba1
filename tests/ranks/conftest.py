"""What tests of ranks share: jobs that rank processes find."""

import os

import pytest

from paths import HARNESS


@pytest.fixture(autouse=True)
def _jobs_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HARNESS), prepend=os.pathsep)
