"""Code: the files that a model is made of, found and hashed before any of them runs.

The imports of a file are read from its text, and followed as far as they lead to files below the same folder. What is
imported by a name that only running the code shows is not seen, nor is what a file reads.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec
from pathlib import Path

from autopar.errors import FileError, ModelError, unknown
from autopar.formats.profile import ModelSource
from autopar.importer import ModelImporter, file_of, find_installed, folders_of, hider, is_package, is_read

_AGAIN = "run `autopar profile` and `autopar plan` again"
_MOST_FILES = 5000
"""No model has so many; a walk ends there."""


@dataclass(frozen=True)
class Code:
    """A model's file as it lies there, and what it is made of beside."""

    path: Path
    source: bytes
    folder: Path
    """The one that imports begin in."""
    own: Path
    """What is the user's: that folder, or a package in it."""
    imports: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the files that are imported, by their paths from the folder."""
    sources: Mapping[str, bytes] = field(default_factory=dict)
    """What was hashed, by real paths; of extensions, which the system loads, nothing."""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source).hexdigest()

    def importer(self, module: str = "") -> ModelImporter:
        """Return what imports these files; ``module``: the first one's, where it is run under a name of its own."""
        own = self.imports if module else (*self.imports, _name(self.path, self.folder))
        names = {name.partition("/")[0].partition(".")[0] for name in own}
        return ModelImporter(self.folder, names, self.sources, module=module, whole=self.own == self.folder)


def code_of_file(path: Path) -> Code:
    """Return a Python file that is run by itself, its folder being the one that it imports from.

    Raises:
        ModelError: it cannot be read, or what it imports is hidden by what is installed.
    """
    source = _read(path)
    # A link to a file is not where its helpers are.
    real = path.resolve()
    return _with_imports(Code(path, source, real.parent, real.parent), real)


def code_of_module(name: str, spec: str) -> Code:
    """Return the file of a module; neither it nor a package that it is part of is run.

    Raises:
        ModelError: there is none, it cannot be read, or what is installed hides it, or what it imports.
    """
    parts = name.split(".")
    folder = _folder_of(parts, spec)
    *outer, path = _files_of_module(folder, parts, spec)
    # In the working folder all files are the user's; elsewhere those of the package.
    own = folder if folder == Path.cwd() else folder / parts[0]
    return _with_imports(Code(path, _read(path), folder, own), path, outer)


def _folder_of(parts: Sequence[str], spec: str) -> Path:
    """Return the folder that a module, or the package that it is in, is found in: of what is installed, or this one."""
    here, name = Path.cwd(), parts[0]
    own, other = file_of(here, name), find_installed(name)
    if own is not None:
        if (hiding := hider(name, here)) is not None:
            raise _hidden_error(own, here, f"{spec} names", hiding)
        return here
    folders = [] if other is None else folders_of(other)
    if other is not None and other.origin is not None:
        if not folders:
            raise ModelError(f"{spec}: the module {name} has no file of its own")
        return folders[0]
    return next((each for each in (*folders, here) if any(_files(each, parts))), here)


def _files_of_module(folder: Path, parts: Sequence[str], spec: str) -> list[Path]:
    """Return the files of the packages that a module is in, from the outermost on, and its own."""
    files: list[Path | None] = []
    for end, part in enumerate(parts):
        above, name, place = ".".join(parts[:end]), ".".join(parts[: end + 1]), folder.joinpath(*parts[:end])
        if files and files[-1] is not None and not is_package(files[-1]):
            raise ModelError(f"{spec}: {above} is a module, and no package with {part} in it")
        files.append(file_of(place, part))
        if files[-1] is None and not os.path.isdir(place / part):
            raise ModelError(f"{spec}: no module is called {name} (looked among what is installed and in this folder)")
    if files[-1] is None:
        raise ModelError(f"{spec}: the module {'.'.join(parts)} has no file of its own")
    return [file for file in files if file is not None]


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
            if any(_files(path.resolve().parent, name.split("."))):
                return
            try:
                module = importlib.import_module(name)
            except BaseException:
                # It is said where the file is run.
                return
            for attribute in attributes:
                getattr(module, attribute, None)


def _with_imports(code: Code, file: Path, outer: Sequence[Path] = ()) -> Code:
    """Return the code of a file with what it imports, and with ``outer`` files, as far as that is the user's own."""
    imports, sources = dict[str, str](), {os.path.realpath(file): code.source}
    known, waiting = set(sources), [(file, code.source)]

    def follow(files: Iterable[Path]) -> None:
        for each in files:
            real = os.path.realpath(each)
            if real not in known and _is_below(each, code.own):
                known.add(real)
                content = _read(each)
                imports[_name(each, code.folder)] = hashlib.sha256(content).hexdigest()
                if is_read(each):
                    sources[real] = content
                    waiting.append((each, content))

    follow(outer)
    while waiting and len(imports) < _MOST_FILES:
        follow(_imported_files(*waiting.pop(), code))
    return replace(code, imports=dict(sorted(imports.items())), sources=sources)


def _imported_files(path: Path, source: bytes, code: Code) -> Iterator[Path]:
    """Give the files that the import statements of a file may run."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # It is said where it is run.
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _absolute_files(path, code, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            parts = node.module.split(".") if node.module else []
            for more in ([], *([alias.name] for alias in node.names)):
                if node.level:
                    yield from _files(path.parents[min(node.level, len(path.parents)) - 1], [*parts, *more])
                else:
                    yield from _absolute_files(path, code, [*parts, *more])


def _absolute_files(path: Path, code: Code, parts: list[str]) -> Iterator[Path]:
    """Give the files of a module that a file imports by its whole name; none where that is something installed.

    Raises:
        ModelError: there are such files, which what is installed hides.
    """
    first = next((each for each in _files(code.folder, parts) if _is_below(each, code.own)), None)
    if first is None:
        return
    other = hider(parts[0], code.folder)
    if other is None:
        yield from _files(code.folder, parts)
    elif file_of(code.folder, parts[0]) is not None or other.origin is None:
        raise _hidden_error(first, code.folder, f"{_name(path, code.folder)} imports", other)


def _hidden_error(file: Path, folder: Path, asked: str, other: ModuleSpec) -> ModelError:
    place = folder / file.relative_to(folder).parts[0]
    found = other.origin if other.has_location else None
    return ModelError(
        f"{place}: {asked} {other.name}, which is installed{f' ({found})' if found else ''}, so this one is never run; "
        f"rename {place.name} (and the import, if yours is meant)"
    )


def _files(base: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Give the files of a module and of the packages that it is in."""
    found = (file_of(base.joinpath(*parts[:end]), part) for end, part in enumerate(parts))
    return filter(None, found)


def _is_below(path: Path, folder: Path) -> bool:
    return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder))


def _name(path: Path, start: Path) -> str:
    name = Path(os.path.relpath(os.path.abspath(path), os.path.abspath(start))).as_posix()
    return name if name.isprintable() else name.encode("unicode_escape", "backslashreplace").decode()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        message = f"{path}: no such model file; `autopar init {path}` writes one"
        raise unknown(ModelError, message, path.name, (each.name for each in path.parent.glob("*.py"))) from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
