"""What is installed is what the tree holds, under the names that the house fixes."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from paths import ROOT

FOLDERS = {"examples": "autopar.examples", "planner": "autopar.planner"}
FOLDERS |= {"profiler": "autopar.profiler", "runtime": "autopar.runtime"}


def _setuptools() -> dict[str, dict[str, str]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def _modules() -> Iterator[str]:
    """Every file of the package, as its path below site-packages."""
    for name in ("autopar", *FOLDERS):
        prefix = Path(*FOLDERS.get(name, name).split("."))
        for path in chain.from_iterable((ROOT / name).rglob(f"*.{kind}") for kind in ("py", "css", "html", "js")):
            inside = path.relative_to(ROOT / name)
            if not (ROOT / name / inside.parts[0]).is_symlink():
                yield (prefix / inside).as_posix()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git would check out, so that building leaves nothing in the working tree."""
    target = tmp_path_factory.mktemp("tree") / "a clone with spaces"
    listing = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(listing, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("needs a git checkout to know which files belong to the tree")
    for name in filter(None, found.stdout.split("\0")):
        source, copy = ROOT / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            copy.symlink_to(source.readlink())
        elif source.exists():
            copy.write_bytes(source.read_bytes())
    return target


def _build(tree: Path, kind: str, folder: Path) -> Path:
    script = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    built = subprocess.run([sys.executable, "-c", script, str(folder)], cwd=tree, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-2000:]
    return folder / built.stdout.splitlines()[-1]


@pytest.mark.parametrize("source", ["a checkout", "a checkout without symlinks", "an sdist"])
def test_the_wheel_of_any_source_holds_exactly_the_modules_of_the_tree(tree: Path, tmp_path: Path, source: str) -> None:
    copy = tmp_path / "tree"
    if source == "an sdist":
        with tarfile.open(_build(tree, "sdist", tmp_path)) as sdist:
            sdist.extractall(copy, filter="data")
        (copy,) = copy.iterdir()
    else:
        shutil.copytree(tree, copy, symlinks=True)
        links = [each for each in (copy / "autopar").iterdir() if each.is_symlink()]
        for path in links if "without" in source else ():
            target = str(path.readlink())
            path.unlink()
            path.write_text(target)
    with zipfile.ZipFile(_build(copy, "wheel", tmp_path)) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert sorted(names) == sorted(_modules())


@pytest.mark.slow
def test_what_the_wheel_installs_can_be_imported_without_the_checkout(tree: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(_build(tree, "wheel", tmp_path)) as wheel:
        wheel.extractall(tmp_path / "installed")
    # -S leaves out the .pth files of site-packages, and with them the editable install; the libraries come by path.
    libraries = [str(tmp_path / "installed"), *(path for path in sys.path if path.endswith("site-packages"))]
    names = ", ".join(sorted(_setuptools()["packages"]))
    script = f"import sys; sys.path += {libraries!r}; import autopar, {names}; print(autopar.planner.__file__)"
    found = subprocess.run([sys.executable, "-S", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip()) == tmp_path / "installed" / "autopar" / "planner" / "__init__.py"


def test_every_folder_with_modules_is_a_package_and_pins_satisfy_what_is_declared() -> None:
    assert {".".join(Path(name).parent.parts) for name in _modules()} == set(_setuptools()["packages"])
    mapping = dict(_setuptools()["package-dir"])
    assert mapping.pop("autopar") == "autopar"
    assert mapping == {name: folder for folder, name in FOLDERS.items()}
    for folder in FOLDERS:
        assert (ROOT / "autopar" / folder).readlink() == Path("..") / folder
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    names = {name.lower() for name in pins}
    bare = [re.split(r"[\[>]", need)[0] for need in declared]
    assert not [name for name in bare if name != "autopar" and name not in names]
    assert pins["torch"] == "2.13.0"
    assert not [name for name in pins if name.startswith(("nvidia", "triton"))]


@pytest.mark.parametrize("folder", ["planner", "profiler", "runtime"])
def test_a_code_folder_refuses_to_be_imported_under_its_short_name(folder: str) -> None:
    found = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
    assert f"import this package as autopar.{folder}" in found.stderr
