"""A folder of a model, and a cache of its own."""

from pathlib import Path

import pytest

from autopar.cache import VARIABLE
from cached_models import write


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    write(tmp_path / "model")
    return tmp_path / "model"
