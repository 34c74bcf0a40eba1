"""Importer: imports the files of a model as they were hashed, and nothing else that lies beside them.

A model's folder is not on ``sys.path``, where Python runs what is called like a module that somebody else wants:

- An import finds what is installed first. That a file of the model's own is hidden by it is said where files are
  hashed (:mod:`autopar.code`).
- Text is compiled as it was hashed. Neither what lies in ``__pycache__`` nor an extension of that name stands for it.
- A file that was not hashed, since only running the code shows its name, is found by imports of the model's own files,
  not by those of libraries, which try packages that are not installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    ModuleSpec,
    SourceFileLoader,
    SourcelessFileLoader,
)
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

_SUFFIXES = (*SOURCE_SUFFIXES, *EXTENSION_SUFFIXES, *BYTECODE_SUFFIXES)


def file_of(folder: Path, name: str) -> Path | None:
    """Return the file of a module in a folder: a package's before a module's, text before what is compiled."""
    for place in (folder / name / "__init__", folder / name):
        for suffix in _SUFFIXES:
            file = place.with_name(place.name + suffix)
            if os.path.isfile(file):
                return file
    return None


def is_package(file: Path) -> bool:
    """Tell whether a file is that of a package."""
    return file.name.startswith("__init__.")


def is_read(file: Path) -> bool:
    """Tell whether Python reads a file to run it; the system loads extensions."""
    return file.suffix in (*SOURCE_SUFFIXES, *BYTECODE_SUFFIXES)


def find_installed(name: str) -> ModuleSpec | None:
    """Return what an import finds without the files of a model: in memory, or where finders look."""
    loaded: ModuleSpec | None = getattr(sys.modules.get(name), "__spec__", None)
    if loaded is not None and not any(name in each.given for each in _importers()):
        return loaded
    finders = (each for each in sys.meta_path if not isinstance(each, ModelImporter))
    return next(filter(None, (each.find_spec(name, None) for each in finders)), None)


def folders_of(spec: ModuleSpec) -> list[Path]:
    """Return the folders that a module is in: several of a namespace package, none of what is built in."""
    if spec.submodule_search_locations is not None:
        return [Path(each).parent for each in spec.submodule_search_locations]
    return [Path(spec.origin).parent] if spec.has_location and spec.origin else []


def hider(name: str, folder: Path) -> ModuleSpec | None:
    """Return what an import finds in place of the module of that name in a folder, if it does."""
    other = find_installed(name)
    if other is None or os.path.realpath(folder) in map(os.path.realpath, folders_of(other)):
        return None
    is_namespace = other.origin is None
    return None if is_namespace and file_of(folder, name) is not None else other


class ModelImporter(MetaPathFinder):
    """Finds and loads the modules of a model's own."""

    def __init__(
        self,
        folder: Path,
        names: Collection[str],
        sources: Mapping[str, bytes],
        *,
        module: str = "",
        whole: bool = True,
    ) -> None:
        """Take a model's files.

        Args:
            folder: the one that imports begin in.
            names: of modules in it that are the model's, whoever imports them.
            sources: what was hashed, by real paths.
            module: the model's file, where it is not imported itself.
            whole: whether all in the folder is the model's: its own files may import more than ``names``.
        """
        self.folder, self.sources, self.given = folder, dict(sources), set[str]()
        self._names, self._module, self._whole = frozenset(names), module, whole

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of the model's own; None: others may find it."""
        folders = self._folders(fullname) if path is None else self._folders_of_package(fullname, path)
        last = fullname.rpartition(".")[2]
        found = next(filter(None, (self._spec(fullname, folder / last) for folder in folders)), None)
        if found is not None:
            self.given.add(fullname)
        return found

    def _folders(self, name: str) -> list[Path]:
        is_own = name in self._names or (self._whole and _asker() in {self._module, *self.given})
        return [self.folder] if is_own and hider(name, self.folder) is None else []

    def _folders_of_package(self, name: str, path: Sequence[str]) -> list[Path]:
        is_own = name.partition(".")[0] in self._names | self.given
        return [Path(each) for each in path if is_own and Path(each).is_relative_to(self.folder)]

    def _spec(self, name: str, place: Path) -> ModuleSpec | None:
        file = file_of(place.parent, place.name)
        if file is not None:
            inner = [str(place)] if is_package(file) else None
            loader = self._loader(name, file)
            return spec_from_file_location(name, file, loader=loader, submodule_search_locations=inner)
        if not os.path.isdir(place):
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(place)]
        return spec

    def _loader(self, name: str, file: Path) -> Loader:
        if not is_read(file):
            return ExtensionFileLoader(name, str(file))
        real = os.path.realpath(file)
        if real not in self.sources:
            self.sources[real] = file.read_bytes()
        kind = _TextLoader if file.suffix in SOURCE_SUFFIXES else _CompiledLoader
        return kind(name, str(file), self.sources[real])

    def continues(self, before: ModelImporter) -> bool:
        """Whether modules that another importer has loaded may stay: they are as this one's, or installed."""
        same = (self.sources.get(file, source) == source for file, source in before.sources.items())
        return (self.folder == before.folder or not before._whole) and all(same)


class _TextLoader(SourceFileLoader):
    """Compiles a text, whatever was compiled of its file before."""

    def __init__(self, name: str, path: str, content: bytes) -> None:
        super().__init__(name, path)
        self._content = content

    def get_data(self, path: str) -> bytes:
        return self._content if path == self.path else super().get_data(path)

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._content, self.path)


class _CompiledLoader(SourcelessFileLoader):
    """Runs what has no text."""

    def __init__(self, name: str, path: str, content: bytes) -> None:
        super().__init__(name, path)
        self._content = content

    def get_data(self, path: str) -> bytes:
        return self._content if path == self.path else super().get_data(path)


def use(importer: ModelImporter) -> None:
    """Have a model's files found from now on, in place of those of the model that was loaded before."""
    for before in _importers():
        sys.meta_path.remove(before)
        if not importer.continues(before):
            for name in before.given:
                sys.modules.pop(name, None)
        elif importer.folder == before.folder:
            importer.given |= before.given
    sys.meta_path.insert(0, importer)


def _importers() -> Iterator[ModelImporter]:
    return (each for each in list(sys.meta_path) if isinstance(each, ModelImporter))


def _asker() -> str:
    """Return the module whose import is performed."""
    frame = sys._getframe(3)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("importlib"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))
