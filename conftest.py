"""The suite's plugins and threads; examples in docstrings run in a folder that holds the files which they name."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

# Set before anything imports numpy or torch: threads of two tests that wait for each other spin, for up to ten times
# the processor seconds.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

if "PYTEST_XDIST_WORKER" not in os.environ:
    # Captured models are kept for the length of the session, by all its processes, and none of the user's are read.
    _cache = tempfile.TemporaryDirectory(prefix="autopar-cache-")
    os.environ["AUTOPAR_CACHE"] = _cache.name

pytest_plugins = ["pytester", "suite.costs", "suite.stacks", "suite.tiers"]

DOCUMENTED = (
    "autopar.api.calls.",
    "autopar.api.imports.",
    "autopar.api.rehearsals.",
    "autopar.api.runs.",
    "autopar.api.surroundings.",
    "autopar.api.views.",
    "autopar.runtime.start.materialize.",
)
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
    from example_inputs import write_inputs
    from profiled import write_profiled
    from random_problems import local_cluster
    from suite import warm

    folder = tmp_path_factory.mktemp("examples")
    write_profiled(folder, "mlp-64")
    local_cluster(2).save(folder / "cluster.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        # A plan that a command writes names the files that it was made of.
        warm.run([sys.executable, "-m", "autopar", "--quiet", "plan", "--stages", "0-2:1,3-10:1"], check=True)
        autopar.train("plan.json", steps=2, checkpoint="saved")
    write_inputs(folder)
    return folder


@pytest.fixture(autouse=True)
def example_folder(request: pytest.FixtureRequest) -> None:
    """Have the library's examples run in a copy of that folder, with autopar imported."""
    # Other tests have a folder where they ask for one: among thousands, another one takes its time.
    if _is_documented(request.node):
        import autopar

        folder: Path = request.getfixturevalue("tmp_path")
        shutil.copytree(request.getfixturevalue("example_files"), folder, dirs_exist_ok=True)
        request.getfixturevalue("monkeypatch").chdir(folder)
        request.getfixturevalue("doctest_namespace")["autopar"] = autopar
