"""What files may name: regular files in their own folder or the working folder."""

import os
from pathlib import Path

import pytest

from autopar.errors import FileError
from autopar.formats.plan import FileReference
from autopar.formats.profile import ModelSource
from autopar.formats.references import allow_any_path, named_file, plan_files, rebase_paths
from played import small_plan


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan in a folder of its own, below the working folder, beside which there is something else."""
    for folder in ("here", "here/plans", "here/plans/parts", "outside"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.py").touch()
    (tmp_path / "here/plans/link.py").symlink_to(tmp_path / "outside/model.py")
    (tmp_path / "here/plans/near.py").symlink_to(tmp_path / "here/model.py")
    (tmp_path / "here/plans/folder").symlink_to(tmp_path / "outside")
    (tmp_path / "here/plans/loop.py").symlink_to("loop.py")
    os.mkfifo(tmp_path / "here/plans/pipe.py")
    monkeypatch.chdir(tmp_path / "here")
    return Path("plans/plan.json")


@pytest.mark.reliability(22)
def test_files_below_are_named_and_others_only_where_paths_are_trusted(plan: Path) -> None:
    for name in ("model.py", "../model.py", "parts/model.py", "parts/../model.py", "near.py"):
        assert named_file(plan, name, "model.source") == plan.parent / name
    assert named_file(plan, "parts", "model.source", folders=True) == Path("plans/parts")
    for name in ("../../outside/model.py", "/etc/passwd", "link.py", "folder/model.py", "/dev/zero"):
        with pytest.raises(FileError, match=r"plan\.json: \$\.model\.source: .* leads out of .*--trust-paths"):
            named_file(plan, name, "model.source")
    with pytest.raises(FileError, match=r"is an absolute path.*--trust-paths"):
        named_file(plan, str(Path("model.py").resolve()), "model.source")
    irregular = "not a regular file"
    said = {"pipe.py": irregular, "parts": irregular, "none.py": "no such file", "loop.py": "levels of symbolic links"}
    for name, words in said.items():
        with pytest.raises(FileError, match=words):
            named_file(plan, name, "model.source")
    with allow_any_path():
        for name in ("../../outside/model.py", "link.py", str(Path("model.py").resolve())):
            assert named_file(plan, name, "model.source").exists()
        with pytest.raises(FileError, match="not a regular file"):
            named_file(plan, "/dev/zero", "model.source")
    with pytest.raises(FileError):
        named_file(plan, "link.py", "model.source")
    model = ModelSource(source="model.py", sha256="0" * 64, data="parts/model.py")
    found = rebase_paths(model, plan, Path("../outside/other.json"))
    assert (found.source, found.data) == ("../here/plans/model.py", "../here/plans/parts/model.py")
    made = small_plan((1,), 1).model_copy(update={"model": model, "profile": FileReference(path="p", sha256="0" * 64)})
    assert plan_files(made, plan) == (plan, *(plan.parent / each for each in ("p", "model.py", "parts/model.py")))
