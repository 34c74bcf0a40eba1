"""Of what lies beside a model only its own files run, as they were hashed, whatever is called or compiled like them."""

import os
import shutil
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from autopar.capture.model import source
from autopar.capture.model.source import load
from autopar.code import code_of_file, code_of_module
from autopar.errors import FileError, ModelError
from autopar.importer import ModelImporter
from strays import KINDS, STRAYS, marks

INSTALLED = ("json", "typing", "numpy", "torch", "autopar", "time", "_io", "wave")
"""Python's own, built in, frozen, loaded and not, and packages."""
NOT_INSTALLED = ("cuda", "sitecustomize", "apex", "cache")
"""What libraries try, or have a part that is called so."""
OWN = ("helper", "library", "zoo", "wave", *NOT_INSTALLED)
MODEL = "import helper, library\nNAME = helper.NAME\n{}\ndef model():\n    return library.torch.nn.Linear(1, 1)\n"
LIBRARY = """import torch

def tried(name):
    try:
        return getattr(__import__(name), "NAME", "installed")
    except ImportError:
        return None
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "library.py").write_text(LIBRARY)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "helper.py").write_text("NAME = 'own'\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = dict(sys.modules)
    yield tmp_path / "here"
    for name in sys.modules.keys() - before.keys():
        if name.partition(".")[0] in OWN:
            del sys.modules[name]
    assert not [name for name, each in before.items() if sys.modules.get(name) is not each]


def write(folder: Path, *lines: str) -> str:
    (folder / "model.py").write_text(MODEL.format("\n".join(lines)))
    return "model.py"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*INSTALLED, *NOT_INSTALLED])
def test_what_the_model_does_not_import_never_runs(name: str, kind: str, here: Path) -> None:
    STRAYS[kind](here, name)
    loaded = load(write(here, f"FOUND = library.tried({name!r})"))
    found = loaded.factory.__globals__
    assert (found["NAME"], found["FOUND"]) == ("own", "installed" if name in INSTALLED else None)
    assert library_finds(name) is found["FOUND"]
    assert not marks(here)
    assert list(code_of_file(Path("model.py")).imports) == ["helper.py"]


def library_finds(name: str) -> object:
    return sys.modules["library"].tried(name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", INSTALLED)
def test_what_the_model_imports_and_an_installed_name_hides_is_refused_by_name(
    name: str, kind: str, here: Path
) -> None:
    hidden = STRAYS[kind](here, name)
    spec = write(here, f"import {name}")
    if hidden is None or kind == "namespace":
        # Python runs none of these in its place.
        assert load(spec).imports.keys() == {"helper.py"}
    else:
        with pytest.raises(
            ModelError, match=rf"{hidden}: model\.py imports {name}, which is installed.*; rename {hidden}"
        ):
            load(spec)
    assert not marks(here)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NOT_INSTALLED)
def test_what_only_the_model_has_is_hashed_and_runs_for_it(name: str, kind: str, here: Path) -> None:
    made = STRAYS[kind](here, name)
    spec = write(here, f"import {name}.inner" if kind == "namespace" else f"import {name}")
    if made is None:
        with pytest.raises(ModelError, match=f"No module named '{name}'"):
            load(spec)
    elif kind == "extension":
        with pytest.raises(ModelError, match="ImportError"):
            load(spec)
    else:
        load(spec)
        (own,) = code_of_file(Path(spec)).imports.keys() - {"helper.py"}
        assert own.partition("/")[0].partition(".")[0] == name
        assert marks(here) == [name]
    assert list(code_of_file(Path(spec)).imports) == sorted(code_of_file(Path(spec)).imports)


@pytest.mark.parametrize("kind", ["cached", "checked", "dated", "extension", "lone"])
@pytest.mark.parametrize("name", ["helper", "zoo.part"])
def test_nothing_stands_in_for_a_text(name: str, kind: str, here: Path) -> None:
    (here / "zoo").mkdir()
    (here / "zoo" / "part.py").write_text("NAME = 'own'\n")
    place = here.joinpath(*name.split("."))
    STRAYS[kind](place.parent, place.name)
    found = load(write(here, "import zoo.part", f"FOUND = {name}.NAME")).factory.__globals__
    assert found["FOUND"] == "own"
    assert not marks(here)


def test_what_runs_is_what_was_hashed_though_the_file_has_changed_since(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "check_code", lambda *_: (here / "helper.py").write_text("NAME = 'changed'\n"))
    loaded = load(write(here))
    assert loaded.factory.__globals__["NAME"] == "own"
    assert load("model.py").factory.__globals__["NAME"] == "changed"


def test_an_extension_without_a_text_is_hashed_and_runs(here: Path) -> None:
    suffix = EXTENSION_SUFFIXES[0]
    built = Path(os.__file__).parent / "lib-dynload" / f"_bisect{suffix}"
    if not built.exists():
        pytest.skip("this Python has no extension to copy")
    (here / "zoo").mkdir()
    shutil.copy(built, here / "zoo" / built.name)
    recorded = load(write(here, "from zoo import _bisect", "FOUND = _bisect.__file__")).model_source
    assert recorded.imports is not None
    assert f"zoo/_bisect{suffix}" in recorded.imports
    assert load("model.py", expected_source=recorded).factory.__globals__["FOUND"] == str(here / "zoo" / built.name)
    with (here / "zoo" / built.name).open("ab") as file:
        file.write(b"changed")
    with pytest.raises(FileError, match=rf"zoo/_bisect{suffix}, which model.py is made of, has changed"):
        load("model.py", expected_source=recorded)


LAZY = """def dataset():
    import importlib, zoo.late
    return [importlib.import_module("la" + "ter").NAME, zoo.late.NAME]
def loss(output, batch):
    return library.tried("late" + "st")"""


def test_hooks_import_what_lies_beside_the_model_and_libraries_do_not(here: Path) -> None:
    (here / "zoo").mkdir()
    (here / "zoo" / "late.py").write_text("NAME = 'late'\n")
    for name in ("later", "latest"):
        (here / f"{name}.py").write_text(f"NAME = {name!r}\n")
    loaded = load(write(here, LAZY))
    (here / "zoo" / "late.py").write_text("NAME = 'changed'\n")
    assert list(loaded.dataset()) == ["later", "late"]  # type: ignore[call-overload]
    assert loaded.functions["loss"](None, None) is None
    assert str(here) not in sys.path


def test_of_several_models_each_has_its_own_helpers_as_they_are_now(here: Path) -> None:
    (here / "helper.py").write_text("NAME, COUNT = 'own', []\n")
    first = load(write(here, "import helper")).factory.__globals__["helper"]
    assert load("model.py").factory.__globals__["helper"] is first
    (here / "other.py").write_text("import helper\ndef model(): pass\n")
    assert load("other.py").factory.__globals__["helper"] is first
    (here / "helper.py").write_text("NAME = 'changed'\n")
    assert load("model.py").factory.__globals__["NAME"] == "changed"
    (here / "beside").mkdir()
    (here / "beside" / "helper.py").write_text("NAME = 'beside'\n")
    shutil.copy("model.py", here / "beside")
    assert load("beside/model.py").factory.__globals__["NAME"] == "beside"
    assert len([each for each in sys.meta_path if isinstance(each, ModelImporter)]) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_only_running_shows_is_the_installed_module_s(kind: str, here: Path) -> None:
    STRAYS[kind](here, "wave")
    assert load(write(here, "W = __import__('wa' + 've').open")).factory.__globals__["W"]
    assert not marks(here)


def test_folders_that_are_no_packages_hide_no_file_and_are_hidden_themselves(here: Path) -> None:
    installed = here.parent / "installed"
    for place in (installed / "helper", installed / "zoo", here / "zoo"):
        STRAYS["namespace"](place.parent, place.name)
    assert load(write(here)).factory.__globals__["NAME"] == "own"
    with pytest.raises(ModelError, match=r"zoo: model\.py imports zoo, which is installed, .*; rename zoo "):
        load(write(here, "import zoo.inner"))
    assert not marks(here.parent)


def test_of_a_link_the_helpers_are_where_it_leads(here: Path) -> None:
    write(here)
    (here / "links").mkdir()
    (here / "links" / "model.py").symlink_to(here / "model.py")
    STRAYS["module"](here / "links", "helper")
    loaded = load("links/model.py")
    assert loaded.imports == code_of_file(here / "model.py").imports
    assert loaded.factory.__globals__["NAME"] == "own"
    assert not marks(here)


@pytest.mark.parametrize("kind", KINDS)
def test_a_factory_is_the_installed_module_s_unless_both_have_the_name(kind: str, here: Path) -> None:
    (here / "helper.py").rename(here.parent / "installed" / "helper.py")
    write(here.parent / "installed")
    hidden = STRAYS[kind](here, "model")
    if hidden is None or kind == "namespace":
        assert load("model:model").path == here.parent / "installed" / "model.py"
    else:
        with pytest.raises(ModelError, match=rf"{hidden}: model:model names model, which is installed"):
            load("model:model")
    sys.modules.pop("model", None)
    assert not marks(here)


@pytest.mark.parametrize("kind", ["cached", "checked", "dated", "extension", "lone"])
@pytest.mark.parametrize("folder", ["here", "installed"])
def test_nothing_stands_in_for_the_text_of_a_factory(folder: str, kind: str, here: Path) -> None:
    package = here.parent / folder / "zoo"
    package.mkdir()
    for name in ("__init__", "part"):
        (package / f"{name}.py").write_text("import json\nNAME = 'own'\n")
        STRAYS[kind](package, name)
    (package / "part.py").write_text("import zoo\ndef made():\n    return zoo.NAME\n")
    assert load("zoo.part:made").factory() == "own"
    assert not marks(here.parent)


def test_a_builtin_module_has_no_file(here: Path) -> None:
    with pytest.raises(ModelError, match="the module time has no file of its own"):
        code_of_module("time", "time:sleep")
