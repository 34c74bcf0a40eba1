"""The files that a model is made of are hashed before any of them runs."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopar.capture.model.source import load
from autopar.code import code_of_file, code_of_module
from autopar.errors import FileError, ModelError
from autopar.formats.profile import ModelSource

MARK = "import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\n"
FILES = {
    "model.py": f"{MARK}import json, torch, helper\nfrom zoo import layers as l\nfrom zoo.deep.inner import f\n"
    "def model():\n    import lazy\n    return lazy.made()\n",
    "helper.py": f"{MARK}from json import loads\n",
    "lazy.py": "import torch\ndef made():\n    return torch.nn.Linear(1, 1)\n",
    "unused.py": MARK,
    "zoo/__init__.py": MARK,
    "zoo/layers.py": f"{MARK}from . import other\nfrom .deep import inner\n",
    "zoo/other.py": MARK,
    "zoo/unused.py": MARK,
    "zoo/deep/__init__.py": MARK,
    "zoo/deep/inner.py": f"{MARK}from ..other import __name__ as name\nimport helper\ndef f():\n    pass\n"
    "def small():\n    import torch\n    return torch.nn.Linear(1, 1)\n",
}
COVERED = ["helper.py", "lazy.py", "zoo/__init__.py", "zoo/deep/__init__.py", "zoo/deep/inner.py"]
COVERED += ["zoo/layers.py", "zoo/other.py"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("helper", "lazy", "zoo"):
            del sys.modules[name]


def _ran(here: Path) -> list[str]:
    return sorted(path.name for path in here.rglob("*.ran"))


def test_all_that_a_file_imports_below_its_folder_is_covered_and_nothing_runs(here: Path) -> None:
    assert list(code_of_file(Path("model.py")).imports) == COVERED
    with pytest.raises(FileError, match=r"model\.py has changed since it was profiled"):
        load("model.py", expected_source=ModelSource(source="model.py", sha256="0" * 64))
    assert not _ran(here)


def test_of_a_factory_the_packages_above_are_covered(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(here)
    found = code_of_module("zoo.deep.inner", "zoo.deep.inner:small")
    assert list(found.imports) == ["helper.py", "zoo/__init__.py", "zoo/deep/__init__.py", "zoo/other.py"]
    (here / "bare").mkdir()
    for name, said in (
        ("zoo.deep.none", r"no module is called zoo\.deep\.none"),
        ("zoo.other.inner", r"zoo\.other is a module, and no package"),
        ("bare", "has no file of its own"),
    ):
        with pytest.raises(ModelError, match=said):
            code_of_module(name, f"{name}:small")
    assert not _ran(here)


@pytest.mark.parametrize("spec", ["model.py", "zoo.deep.inner:small"])
@pytest.mark.parametrize("change", ["changed", "gone", "new"])
def test_what_has_changed_is_named_before_anything_runs(spec: str, change: str, here: Path) -> None:
    recorded = load(spec).model_source
    for path in here.rglob("*.ran"):
        path.unlink()
    for name in [name for name in sys.modules if name.split(".")[0] in ("helper", "zoo")]:
        del sys.modules[name]
    assert recorded.imports is not None
    load(spec, expected_source=recorded)
    for path in here.rglob("*.ran"):
        path.unlink()
    if change == "gone":
        (here / "zoo" / "other.py").unlink()
    elif change == "new":
        recorded = recorded.model_copy(update={"imports": {**recorded.imports}})
        del recorded.imports["zoo/other.py"]  # type: ignore[attr-defined]
    else:
        (here / "zoo" / "other.py").write_text("import os")
    said = {"changed": "has changed", "gone": "is gone", "new": "is new"}[change]
    with pytest.raises(FileError, match=rf"zoo/other\.py, which .* is made of, {said} since it was profiled"):
        load(spec, expected_source=recorded)
    assert not _ran(here)


def test_what_an_older_profile_does_not_cover_runs(here: Path) -> None:
    recorded = load("model.py").model_source.model_copy(update={"imports": None})
    (here / "helper.py").write_text("changed = True")
    assert load("model.py", expected_source=recorded).imports.keys() == set(COVERED)


def test_a_file_that_cannot_be_parsed_is_told_where_it_runs(here: Path) -> None:
    (here / "model.py").write_text("def model(:\n")
    assert code_of_file(Path("model.py")).imports == {}
    with pytest.raises(ModelError, match=r"model\.py:1"):
        load("model.py")
