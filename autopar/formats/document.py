"""The file border: strict reading and atomic writing of autopar's JSON documents."""

from __future__ import annotations

import json
import math
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NoReturn, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from autopar.errors import FileError, UsageError

__all__ = [
    "MOST_RANKS",
    "Bytes",
    "BytesPerSecond",
    "Count",
    "Document",
    "Index",
    "Name",
    "Provenance",
    "Record",
    "Seconds",
    "fault",
    "first_fault",
    "least_certain",
    "parse_json",
    "read_text",
    "write_bytes",
    "write_text",
]

MAX_FILE_BYTES = 256 * 2**20
MAX_DEPTH = 64
MAX_DIGITS = 1000
MOST_RANKS = 2**16
"""More than any cluster that could be planned for: a larger number is a slip."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise PydanticCustomError("name", "holds control characters")
    return text


# Thirty thousand years: sums and products of seconds stay finite.
Seconds = Annotated[float, Field(ge=0, lt=1e12)]
Bytes = Annotated[int, Field(ge=0, lt=2**63)]
BytesPerSecond = Annotated[float, Field(ge=1, lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Index = Annotated[int, Field(ge=0, lt=2**31)]
Provenance = Literal["measured", "interpolated", "estimated"]
"""Where a number comes from: ``interpolated`` lies between measured ones, ``estimated`` follows from a model."""
Name = Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_printable)]


def least_certain(known: Iterable[Provenance]) -> Provenance | None:
    """Return where the least certain of several numbers comes from; none if there are none.

    >>> least_certain(["measured", "interpolated"]), least_certain([])
    ('interpolated', None)
    """
    order: tuple[Provenance, ...] = get_args(Provenance)
    return max(known, key=order.index, default=None)


class Record(BaseModel):
    """A frozen, strict piece of a document: unknown keys, NaN and loose types are refused."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Document(Record):
    """A file of autopar: ``format``, ``version`` and content, written byte-equal for equal content."""

    KIND: ClassVar[str]

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read and validate a document.

        Raises:
            FileError: the file is missing, too large, not JSON, or violates the schema; names the JSON path.
        """
        path = Path(path)
        return cls.parse(read_text(path, cls.KIND), path)

    @classmethod
    def parse(cls, text: str, path: Path) -> Self:
        """Validate a document's text; ``path`` is only named in errors."""
        content = parse_json(text, path)
        _check_kind(content, f"autopar.{cls.KIND}", path)
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise FileError(f"{path}: {first_fault(error, content)}") from error

    def dumps(self) -> str:
        """Return the canonical JSON text, newline at the end."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def save(self, path: str | Path, *, overwrite: bool = True) -> None:
        """Write atomically; see :func:`write_text`."""
        write_text(path, self.dumps(), overwrite=overwrite)


def fault(at: str, message: str) -> NoReturn:
    """Refuse a document inside a validator, naming the JSON path ``at`` (such as ``layers[3].name``)."""
    raise PydanticCustomError("fault", "{message}", {"message": message, "at": at})


def write_text(path: str | Path, text: str, *, overwrite: bool = True) -> None:
    """Write a text file atomically; see :func:`write_bytes`."""
    write_bytes(path, text.encode(), overwrite=overwrite)


def write_bytes(path: str | Path, content: bytes, *, overwrite: bool = True) -> None:
    """Write a file atomically: it is there whole, or not at all.

    Raises:
        UsageError: the file exists and ``overwrite`` is false, or it is a folder or a device.
        FileError: the folder is missing or not writable.
    """
    path = Path(path)
    if path.exists():
        if not path.is_file():
            raise UsageError(f"{path} is not a regular file and cannot be replaced; name another file")
        if not overwrite:
            raise UsageError(f"{path} exists; pass --overwrite to replace it")
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise FileError(f"cannot write {path}: {error.strerror}") from error


def parse_json(text: str, path: Path) -> object:
    """Parse JSON strictly: duplicate keys, NaN, infinities and absurd nesting are refused with their JSON path.

    Raises:
        FileError: the text is not strict JSON.
    """
    try:
        content: object = json.loads(text, object_pairs_hook=_object, parse_constant=_Refused)
    except json.JSONDecodeError as error:
        raise FileError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from error
    except RecursionError as error:
        raise FileError(f"{path}: $: nested deeper than {MAX_DEPTH} levels") from error
    except ValueError:
        # An integer of thousands of digits; read again to find its path.
        content = json.loads(text, object_pairs_hook=_object, parse_constant=_Refused, parse_int=_bounded)
    refusal = _refusal(content)
    if refusal is not None:
        raise FileError(f"{path}: {refusal}")
    return content


class _Refused:
    """Stands in the parsed tree where strict JSON has no value, so that its path can be found."""

    def __init__(self, what: str) -> None:
        self.message = f"{what} is not a JSON number"


class _Duplicate(_Refused):
    def __init__(self) -> None:
        self.message = "key is given twice"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        result[key] = _Duplicate() if key in result else value
    return result


class _Large(_Refused):
    def __init__(self) -> None:
        self.message = "number is too large"


def _bounded(digits: str) -> int | _Large:
    return int(digits) if len(digits) < MAX_DIGITS else _Large()


class _Place(NamedTuple):
    """Where a value stands: its key or index in a container, and the container's place."""

    outer: _Place | None
    key: str | int

    def path(self) -> str:
        own = f"[{self.key}]" if isinstance(self.key, int) else f".{self.key}"
        return self.outer.path() + own if self.outer else str(self.key)


def _refusal(content: object) -> str | None:
    """Return the JSON path and reason of a value that strict JSON has not, if there is one.

    Large files hold millions of numbers: only containers and what is refused are visited one by one.
    """
    stack: list[tuple[object, _Place, int]] = [(content, _Place(None, "$"), 0)]
    while stack:
        value, place, depth = stack.pop()
        if depth > MAX_DEPTH:
            return f"{place.path()[:80]}: nested deeper than {MAX_DEPTH} levels"
        if isinstance(value, _Refused):
            return f"{place.path()}: {value.message}"
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            if isinstance(item, dict | list | _Refused):
                stack.append((item, _Place(place, key), depth + 1))
            elif isinstance(item, float) and not math.isfinite(item):
                stack.append((_Large(), _Place(place, key), depth + 1))
    return None


def read_text(path: Path, kind: str) -> str:
    """Read a file of autopar of bounded size; ``kind`` is only named in errors.

    Raises:
        FileError: the file is missing, too large, unreadable or not UTF-8.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            # A pipe or a device may never end.
            raise FileError(f"cannot read {path}: not a regular file")
        size = status.st_size
        if size > MAX_FILE_BYTES:
            raise FileError(f"{path}: {size} bytes is too large for a {kind} (at most {MAX_FILE_BYTES})")
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise FileError(f"{path}: no such {kind} file; `autopar --help` lists the command that writes one") from error
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not UTF-8 at byte {error.start}") from error


def _check_kind(content: object, expected: str, path: Path) -> None:
    if not isinstance(content, dict):
        raise FileError(f'{path}: $: expected an object with "format": "{expected}"')
    found = content.get("format")
    if found != expected:
        raise FileError(f'{path}: $.format: expected "{expected}", found {json.dumps(found)[:80]}')
    if content.get("version") != 1 or type(content.get("version")) is not int:
        raise FileError(
            f"{path}: $.version: this autopar reads version 1, found {json.dumps(content.get('version'))[:80]}"
        )


def first_fault(error: ValidationError, content: object) -> str:
    """Return where the first of a validation's faults in ``content`` is, as a JSON path, and what it is."""
    first = error.errors(include_url=False)[0]
    at = "$"
    for part in first["loc"]:
        if isinstance(part, int):
            at, content = f"{at}[{part}]", content[part] if isinstance(content, list) else None
        elif isinstance(content, dict):
            # What else stands there is no key, but which of several types was tried.
            at, content = f"{at}.{part}", content.get(part)
    inner = first.get("ctx", {}).get("at")
    if inner:
        at += f".{inner}" if not inner.startswith("[") else inner
    message = first["msg"]
    if first["type"] not in ("fault", "json_invalid", "missing", "extra_forbidden"):
        message += f", found {json.dumps(first['input'], default=str)[:80]}"
    return f"{at}: {message}"
