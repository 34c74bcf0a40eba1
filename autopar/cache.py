"""Cache: the folder of the user's in which captured graphs are kept, an entry each.

    ~/.cache/autopar/              or what XDG_CACHE_HOME or AUTOPAR_CACHE says
        key                        what entries are signed with
        captured/6f1c.../          layers.json, constants.safetensors, entry.json, signature

It is never beside a profile or a plan, where a forged entry could come with it: the folder has to be the user's own,
with no access for others, and entries are signed with a key that lies there, so that one that was written elsewhere, or
is torn, is found out. Who writes and reads graphs is :mod:`autopar.capture.cache.recall`; nothing here knows torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from autopar.errors import CaptureError, FileError

VARIABLE = "AUTOPAR_CACHE"
"""Names the folder, in place of the usual one."""
MOST_BYTES = 2**30
"""Of all entries: beyond that, those that were not used for longest go."""
_ENTRIES, _KEY, _ENTRY, _SIGNATURE = "captured", "key", "entry.json", "signature"
_UNFINISHED = "new-"
"""Begins the names of folders that are being written."""


@dataclass(frozen=True)
class Entry:
    """A captured graph that is kept."""

    key: str
    """What it is found by: the identity of its model."""
    model: str
    """The model's file, or the class of a model that a script has made."""
    sha256: str
    """Of the model's file."""
    imports: Mapping[str, str]
    """SHA-256 of the files that it imports, by name."""
    captured_s: float
    """When, in seconds since 1970."""
    layers: int
    files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of files that the capture read beside the model, by path."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Hashes of variables of the environment that it read, by name."""
    contents: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the entry's own files, by name."""
    bytes: int = 0
    """Of these files."""


class Cache:
    """The captured graphs of one folder."""

    def __init__(self, folder: Path) -> None:
        """Take a folder, which is made when something is kept.

        Raises:
            FileError: it belongs to another user, or has access for others; nothing in it is believed.
        """
        self.folder = folder
        _check_owner(folder)

    def folder_of(self, key: str) -> Path:
        """Return where an entry is, or would be."""
        return self.folder / _ENTRIES / key

    def sound(self, key: str) -> Entry | None:
        """Return an entry whose files are as they were written, and note that it is used; None if it is not there."""
        folder = self.folder_of(key)
        entry = self._entry(folder)
        if entry is None or entry.key != key:
            return None
        try:
            sound = all(_hash(folder / name) == sha256 for name, sha256 in entry.contents.items())
            os.utime(folder)
        except OSError:
            return None
        return entry if sound else None

    def keep(self, entry: Entry, write: Callable[[Path], object]) -> Entry | None:
        """Keep what ``write`` writes into a folder; return the entry, or None where there cannot be one."""
        try:
            key = self._key(make=True)
            (self.folder / _ENTRIES).mkdir(mode=0o700, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder / _ENTRIES, prefix=_UNFINISHED) as name:
                made = Path(name) / entry.key
                write(made)
                described = asdict(entry) | {"contents": {path.name: _hash(path) for path in sorted(made.iterdir())}}
                content = json.dumps({**described, "bytes": _size(made)}).encode()
                (made / _ENTRY).write_bytes(content)
                (made / _SIGNATURE).write_text(_signature(key, content), encoding="utf-8")
                self.drop(entry.key)
                made.rename(self.folder_of(entry.key))
        except (OSError, FileError, CaptureError):
            return None
        self._prune(entry.key)
        return self._entry(self.folder_of(entry.key))

    def entries(self) -> list[Entry]:
        """Return what is kept, newest first."""
        found = filter(None, map(self._entry, self._folders()))
        return sorted(found, key=lambda entry: -entry.captured_s)

    def drop(self, key: str) -> None:
        """Let go of an entry, if it is there."""
        shutil.rmtree(self.folder_of(key), ignore_errors=True)

    def clear(self) -> int:
        """Let go of everything; return how many bytes that were."""
        size = _size(self.folder / _ENTRIES)
        shutil.rmtree(self.folder / _ENTRIES, ignore_errors=True)
        return size

    def knows(self, sha256: str, imports: Mapping[str, str]) -> bool:
        """Tell whether this user has captured a model file of this content, with these imports, on this machine."""
        return any(entry.sha256 == sha256 and entry.imports == imports for entry in self.entries())

    def _folders(self) -> list[Path]:
        try:
            return [path for path in (self.folder / _ENTRIES).iterdir() if not path.name.startswith(_UNFINISHED)]
        except OSError:
            return []

    def _entry(self, folder: Path) -> Entry | None:
        """Return the entry of a folder; None where it is not there, torn, or not signed here."""
        try:
            content = (folder / _ENTRY).read_bytes()
            signature = (folder / _SIGNATURE).read_bytes()
            if not hmac.compare_digest(signature, _signature(self._key(), content).encode()):
                return None
            return Entry(**{each.name: json.loads(content)[each.name] for each in fields(Entry)})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def _key(self, *, make: bool = False) -> bytes:
        """Return the key that entries are signed with.

        Raises:
            OSError: it is not there, or cannot be made.
        """
        path = self.folder / _KEY
        if make and not path.exists():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix=_UNFINISHED) as made:
                made.write(secrets.token_bytes(32))
                made.flush()
                with contextlib.suppress(FileExistsError):
                    os.link(made.name, path)
        return path.read_bytes()

    def _prune(self, last: str) -> None:
        """Let those go that were not used for longest, but not the one that was kept last."""
        sizes = {folder: _size(folder) for folder in sorted(self._folders(), key=_used_s)}
        total = sum(sizes.values())
        for folder, size in sizes.items():
            if total > MOST_BYTES and folder.name != last:
                total -= size
                self.drop(folder.name)


def cache_folder() -> Path:
    """Return the user's folder, which need not be there."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autopar"


def users_cache() -> Cache | None:
    """Return the user's cache; None where there can be none, which is said."""
    try:
        return Cache(cache_folder())
    except FileError as error:
        sys.stderr.write(f"autopar: {error}\n")
    except RuntimeError:
        # There is no home.
        sys.stderr.write(f"autopar: no folder to keep captured graphs in; set {VARIABLE}\n")
    return None


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _signature(key: bytes, content: bytes) -> str:
    return hmac.new(key, content, hashlib.sha256).hexdigest()


def _used_s(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def _size(folder: Path) -> int:
    """Return the bytes of all files in a folder, as far as they are there."""

    def sizes() -> Iterator[int]:
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):
                yield path.stat().st_size if path.is_file() else 0

    return sum(sizes())


def _check_owner(folder: Path) -> None:
    """Refuse a folder that another user could have written to."""
    try:
        found = folder.stat()
    except OSError:
        return
    if found.st_uid != os.geteuid():
        raise FileError(f"{folder} belongs to another user; captured graphs are not kept there, nor read")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise FileError(
            f"{folder} can be read or written by others; captured graphs are not kept there, nor read: chmod 700 "
            f"{folder}"
        )
