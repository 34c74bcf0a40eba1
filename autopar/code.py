"""Code: the files that a model is made of, found and hashed before any of them runs.

The imports of a file are read from its text, and followed as far as they lead to files below the same folder. What is
imported by a name that only running the code shows is not seen, nor is what a file reads.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from autopar.errors import FileError, ModelError
from autopar.formats.profile import ModelSource

_AGAIN = "run `autopar profile` and `autopar plan` again"
_MOST_FILES = 5000
"""No model has so many; a walk ends there."""


@dataclass(frozen=True)
class Code:
    """A model's file as it lies there."""

    path: Path
    source: bytes
    imports: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the files that are imported, by their paths from the folder that imports begin in."""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source).hexdigest()


def code_of_file(path: Path) -> Code:
    """Return a Python file that is run by itself, its folder being the first that it imports from.

    Raises:
        ModelError: it cannot be read.
    """
    source = _read(path)
    return Code(path, source, _imports(path, source, path.parent, path.parent, ()))


def code_of_module(name: str, spec: str) -> Code:
    """Return the file of a module; neither it nor a package that it is part of is run.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    parts = name.split(".")
    places: list[str] | None = None
    outer: list[Path] = []
    found: ModuleSpec | None = None
    for end, part in enumerate(parts):
        above, here = ".".join(parts[:end]), ".".join(parts[: end + 1])
        if end and places is None:
            raise ModelError(f"{spec}: {above} is a module, and no package with {part} in it")
        outer += [Path(found.origin)] if found and found.origin else []
        found = PathFinder.find_spec(here, places)
        if found is None:
            raise ModelError(f"{spec}: no module is called {here} (looked on sys.path and in this folder)")
        places = None if found.submodule_search_locations is None else list(found.submodule_search_locations)
    if found is None or found.origin is None or not found.has_location:
        raise ModelError(f"{spec}: the module {name} has no file of its own")
    path = Path(found.origin)
    levels = len(parts) - (path.name != "__init__.py")
    start = path.parents[levels]
    # Below the working folder all files are the user's; elsewhere those of the package.
    own = start if start.resolve() == Path.cwd().resolve() else start / parts[0]
    source = _read(path)
    return Code(path, source, _imports(path, source, start, own, outer))


def check_code(path: Path, sha256: str, imports: Mapping[str, str], expected_source: ModelSource | None) -> None:
    """Refuse a model's code that is not what was recorded, before it runs.

    Args:
        path: the model's file.
        sha256: of it.
        imports: hashes of what it imports.
        expected_source: what a profile or plan says of it; None: nothing.

    Raises:
        FileError: names the file that has changed.
    """
    if expected_source is None:
        return
    if sha256 != expected_source.sha256:
        raise FileError(f"{path} has changed since it was profiled; {_AGAIN}")
    before = imports if expected_source.imports is None else expected_source.imports
    for name in sorted(before.keys() | imports.keys()):
        if imports.get(name) != before.get(name):
            how = "is gone" if name not in imports else "is new" if name not in before else "has changed"
            raise FileError(f"{name}, which {path} is made of, {how} since it was profiled; {_AGAIN}")


def import_first(path: Path) -> None:
    """Import the installed packages that a file begins by importing, in its order, as the file itself would.

    What comes behind the first import of a file of the user's own, or behind anything else than imports, is left: the
    environment that it is imported in may have been changed by then.
    """
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        # It is said where it is run.
        return
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    for node in body:
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = {node.module: [alias.name for alias in node.names]}
        elif isinstance(node, ast.Import):
            names = {alias.name: [] for alias in node.names}
        else:
            return
        for name, attributes in names.items():
            if any(_files(path.parent, name.split("."))):
                return
            try:
                module = importlib.import_module(name)
            except BaseException:
                # It is said where the file is run.
                return
            for attribute in attributes:
                getattr(module, attribute, None)


def _imports(path: Path, source: bytes, start: Path, own: Path, outer: Sequence[Path]) -> dict[str, str]:
    """Return the hashes of what a file imports from the folder ``start``, as far as it lies below ``own``."""
    found: dict[str, str] = {}
    known = {os.path.realpath(path)}
    waiting = [(path, source)]

    def follow(files: Iterable[Path]) -> None:
        for each in files:
            if os.path.realpath(each) not in known and Path(os.path.abspath(each)).is_relative_to(os.path.abspath(own)):
                known.add(os.path.realpath(each))
                content = _read(each)
                found[_name(each, start)] = hashlib.sha256(content).hexdigest()
                waiting.append((each, content))

    follow(outer)
    while waiting and len(found) < _MOST_FILES:
        follow(_imported_files(*waiting.pop(), start))
    return dict(sorted(found.items()))


def _imported_files(path: Path, source: bytes, start: Path) -> Iterator[Path]:
    """Give the files that the import statements of a file may run."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # It is said where it is run.
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(start, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = path.parents[min(node.level, len(path.parents)) - 1] if node.level else start
            parts = node.module.split(".") if node.module else []
            yield from _files(base, parts)
            for alias in node.names:
                yield from _files(base, [*parts, alias.name])


def _files(base: Path, parts: list[str]) -> Iterator[Path]:
    """Give the files of a module and of the packages that it is in."""
    for end in range(1, len(parts) + 1):
        place = base.joinpath(*parts[:end])
        for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            with contextlib.suppress(OSError):
                # A name may be longer than any file's.
                if file.is_file():
                    yield file
                    break


def _name(path: Path, start: Path) -> str:
    name = Path(os.path.relpath(os.path.abspath(path), os.path.abspath(start))).as_posix()
    return name if name.isprintable() else name.encode("unicode_escape", "backslashreplace").decode()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ModelError(f"{path}: no such model file") from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
