"""Files that must not run: each leaves its name in a file ``RAN`` beside it, or above, where it does."""

import importlib.util
import marshal
import os
import struct
import sys
from collections.abc import Callable, Collection
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


def text(folder: Path, name: str) -> str:
    """Return a module that says that it has run."""
    return f"with open({str(folder / 'RAN')!r}, 'a') as file:\n    file.write('{name}\\n')\nNAME = 'stray'\n"


def marks(folder: Path) -> list[str]:
    """Return what has run."""
    return [line for path in sorted(folder.rglob("RAN")) for line in path.read_text().splitlines()]


def compiled(folder: Path, name: str, head: bytes) -> bytes:
    """Return a compiled module; ``head`` says how Python checks it."""
    code = compile(text(folder, name), f"{name}.py", "exec")
    return importlib.util.MAGIC_NUMBER + head + marshal.dumps(code)


def _module(folder: Path, name: str) -> str:
    (folder / f"{name}.py").write_text(text(folder, name))
    return f"{name}.py"


def _package(folder: Path, name: str) -> str:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text(folder, name))
    return name


def _namespace(folder: Path, name: str) -> str:
    (folder / name).mkdir()
    (folder / name / "inner.py").write_text(text(folder, name))
    return name


def _cached(folder: Path, name: str, head: bytes = struct.pack("<I", 1) + bytes(8)) -> None:
    """Write a file that Python does not check (PEP 552), or one that passes."""
    (folder / "__pycache__").mkdir(exist_ok=True)
    file = folder / "__pycache__" / f"{name}.{sys.implementation.cache_tag}.pyc"
    file.write_bytes(compiled(folder, name, head))


def _checked(folder: Path, name: str) -> None:
    file = folder / f"{name}.py"
    content = file.read_bytes() if file.exists() else b""
    _cached(folder, name, struct.pack("<I", 3) + importlib.util.source_hash(content))


def _dated(folder: Path, name: str) -> None:
    file = folder / f"{name}.py"
    found = os.stat(file if file.exists() else folder)
    _cached(folder, name, struct.pack("<III", 0, int(found.st_mtime) & 0xFFFFFFFF, found.st_size & 0xFFFFFFFF))


def _lone(folder: Path, name: str) -> str:
    (folder / f"{name}.pyc").write_bytes(compiled(folder, name, bytes(12)))
    return f"{name}.pyc"


def _extension(folder: Path, name: str) -> str:
    """Write a file that the system refuses to load."""
    (folder / f"{name}{EXTENSION_SUFFIXES[-1]}").write_bytes(b"\x7fELF")
    return f"{name}{EXTENSION_SUFFIXES[-1]}"


STRAYS: dict[str, Callable[[Path, str], str | None]] = {
    "module": _module,
    "package": _package,
    "namespace": _namespace,
    "cached": _cached,
    "checked": _checked,
    "dated": _dated,
    "lone": _lone,
    "extension": _extension,
}
"""What makes one of a name in a folder, by kind; returns what a model would be told to rename, if it is one."""
KINDS = tuple(STRAYS)


def lay(folder: Path, names: Collection[str]) -> None:
    """Lay out strays of many names, of the kinds in turn that Python runs, or fails to, for an import by that name."""
    kinds = ("module", "package", "lone", "extension")
    for index, name in enumerate(sorted(names)):
        STRAYS[kinds[index % len(kinds)]](folder, name)
