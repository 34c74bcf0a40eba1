"""A folder with a model and its profile, which the first test that asks for it measures for all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from paths import MODELS

_MEASURED: dict[str, dict[str, str]] = {}


def write_profiled(folder: Path, model: str, call: Callable[..., tuple[int, str, str]]) -> None:
    """Write a model's file, profile.json and cluster.json into the working folder; call runs autopar's commands."""
    shutil.copy(MODELS / model, folder)
    if model not in _MEASURED:
        code, _, err = call("profile", model, "--batch", "8")
        assert code == 0, err
        _MEASURED[model] = {name: (folder / name).read_text() for name in ("profile.json", "cluster.json")}
    for name, text in _MEASURED[model].items():
        (folder / name).write_text(text)
