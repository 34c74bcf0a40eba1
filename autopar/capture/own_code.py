"""Own code: the files that a model's file is made of, found and hashed before any of them runs.

The imports of a file are read from its text, and followed as far as they lead to files below the same folder. What is
imported by a name that only running the code shows is not seen, nor is what a file reads.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from autopar.errors import FileError, ModelError
from autopar.formats.profile import ModelSource

_AGAIN = "run `autopar profile` and `autopar plan` again"
MOST_FILES = 5000
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
        """Of the file itself."""
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
    for end in range(1, len(parts) + 1):
        found = PathFinder.find_spec(".".join(parts[:end]), places)
        if found is None:
            missing = ".".join(parts[:end])
            raise ModelError(f"{spec}: no module is called {missing} (looked on sys.path and in this folder)")
        places = None if found.submodule_search_locations is None else list(found.submodule_search_locations)
        if end < len(parts):
            if places is None:
                raise ModelError(f"{spec}: {'.'.join(parts[:end])} is a module, and no package with {parts[end]} in it")
            outer += [Path(found.origin)] if found.origin else []
    if found is None or found.origin is None or not found.has_location:
        raise ModelError(f"{spec}: the module {name} has no file of its own")
    path = Path(found.origin)
    levels = len(parts) - (path.name != "__init__.py")
    start = path.parents[levels]
    # Below the working folder all files are the user's; elsewhere those of the package.
    own = start if start.resolve() == Path.cwd().resolve() else start / parts[0]
    source = _read(path)
    return Code(path, source, _imports(path, source, start, own, outer))


def check_code(path: Path, sha256: str, imports: Mapping[str, str], recorded: ModelSource | None) -> None:
    """Refuse a model's code that is not what was recorded, before it runs.

    Args:
        path: the model's file.
        sha256: of it.
        imports: hashes of what it imports.
        recorded: what a profile or plan says of it; None: nothing.

    Raises:
        FileError: names the file that has changed.
    """
    if recorded is None:
        return
    if sha256 != recorded.sha256:
        raise FileError(f"{path} has changed since it was profiled; {_AGAIN}")
    before = imports if recorded.imports is None else recorded.imports
    for name in sorted(before.keys() | imports.keys()):
        if imports.get(name) != before.get(name):
            how = "is gone" if name not in imports else "is new" if name not in before else "has changed"
            raise FileError(f"{name}, which {path} is made of, {how} since it was profiled; {_AGAIN}")


def _imports(path: Path, source: bytes, start: Path, own: Path, outer: list[Path] | tuple[Path, ...]) -> dict[str, str]:
    """Return the hashes of what a file imports from the folder ``start``, as far as it lies below ``own``."""
    found: dict[str, str] = {}
    known = {_real(path)}
    waiting = [(path, source)]
    for each in outer:
        if _real(each) not in known and _is_below(each, own):
            known.add(_real(each))
            waiting.append((each, _read(each)))
    found.update((_name(each, start), hashlib.sha256(text).hexdigest()) for each, text in waiting[1:])
    while waiting and len(found) < MOST_FILES:
        here, text = waiting.pop()
        for each in _imported(here, text, start):
            if _real(each) in known or not _is_below(each, own):
                continue
            known.add(_real(each))
            content = _read(each)
            found[_name(each, start)] = hashlib.sha256(content).hexdigest()
            waiting.append((each, content))
    return dict(sorted(found.items()))


def _imported(path: Path, source: bytes, start: Path) -> Iterator[Path]:
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


def _is_below(path: Path, folder: Path) -> bool:
    return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder))


def _real(path: Path) -> str:
    return os.path.realpath(path)


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
