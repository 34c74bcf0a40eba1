"""Scratch folders: gone when closed, and by the next one where their owner was killed."""

import subprocess
import sys
from pathlib import Path

import pytest

from autopar.ranks.scratch import Scratch

OWNER = "from autopar.ranks.scratch import Scratch; print(Scratch('run').path, flush=True); input()"


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.mark.reliability(31)
def test_scratch_folders_are_removed_also_behind_killed_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Scratch("run") as scratch:
        (scratch.path / "deep").mkdir()
        (scratch.path / "deep" / "file").write_text("x")
        assert scratch.path.parent == tmp_path
    assert list(tmp_path.iterdir()) == []
    scratch.close()
    (tmp_path / "autopar-notes").mkdir()
    (tmp_path / "autopar-link").symlink_to(tmp_path / "autopar-notes")
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        used = Path(owner.stdout.readline().strip())
        with Scratch("ranks"):
            assert used.is_dir()
        owner.kill()
    with monkeypatch.context() as patched:
        patched.setattr("os.getuid", lambda: -1)
        Scratch("ranks").close()
        assert used.is_dir()
    with Scratch("ranks"):
        assert not used.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["autopar-link", "autopar-notes"]
