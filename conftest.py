"""Examples in docstrings of the library run in a folder that holds the files which they name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["pytester", "suite.costs", "suite.stacks", "suite.tiers"]

DOCUMENTED = ("autopar.api.", "autopar.rehearsals.", "autopar.inputs.", "autopar.runtime.start.materialize.")
"""Modules whose examples are of a user's folder; others need none."""


def _is_documented(item: pytest.Item) -> bool:
    return isinstance(item, pytest.DoctestItem) and item.name.startswith(DOCUMENTED)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark these examples as slow: a model is profiled and trained for them."""
    for item in filter(_is_documented, items):
        item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def example_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with a profiled and planned model, a checkpoint, and other systems' files."""
    import autopar
    from autopar.examples import __path__ as examples
    from example_inputs import write_inputs
    from random_problems import local_cluster

    folder = tmp_path_factory.mktemp("examples")
    shutil.copy(Path(next(iter(examples))) / "mlp.py", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        profile = autopar.profile("mlp.py", 64, budget_s=0.1)
        profile.save("profile.json")
        local_cluster(2).save("cluster.json")
        stages = f"0-2:1,3-{len(profile.layers) - 1}:1"
        # A plan that a command writes names the files that it was made of.
        subprocess.run([sys.executable, "-m", "autopar", "--quiet", "plan", "--stages", stages], check=True)
        autopar.train("plan.json", steps=2, checkpoint="saved")
    write_inputs(folder)
    return folder


@pytest.fixture(autouse=True)
def example_folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doctest_namespace: dict[str, Any]
) -> None:
    """Have the library's examples run in a copy of that folder, with autopar imported."""
    if _is_documented(request.node):
        import autopar

        shutil.copytree(request.getfixturevalue("example_files"), tmp_path, dirs_exist_ok=True)
        monkeypatch.chdir(tmp_path)
        doctest_namespace["autopar"] = autopar
