"""The file border: strict reading and atomic writing of autopar's JSON documents, and of sizes and bandwidths as text.

In comes JSON, out come records, or the path of what is wrong. A file that is written is there whole, or not at all,
whatever fails meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import stat
import sys
import tomllib
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Literal, NamedTuple, NoReturn, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)
from pydantic_core import CoreSchema, PydanticCustomError, from_json

from autopar.errors import FileError, UsageError, unknown


@contextlib.contextmanager
def new_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Give a file to write, which takes the place of ``path`` when the block ends.

    Until then it has a name in the same folder that nobody can guess. What ``path`` was before stays if anything fails;
    where it was a link, the link is replaced, and what it leads to stays. Who may read the file is up to the umask. A
    file that is not ``durable`` may be lost with the host's power.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f".autopar-{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(temporary, flags, 0o666)
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have a folder's new names outlive a loss of power, where its file system can; the file is there in any case."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


_MAX_FILE_BYTES = 256 * 2**20
MAX_DEPTH = 64
_SAFE_RECURSION = 3000
"""Python's limit of recursion, up to which its JSON parser gives up before its stack is used up: it ends the process
where a module, as some of torch's do, has raised the limit."""
_MAX_DIGITS = 1000
MAX_OBJECTS, MAX_KEYS = 2_000_000, 20_000
"""Of a file, and of one object: what holds more is no file of autopar, and takes long to refuse otherwise."""
FEW_CONTAINERS, FEW_VALUES = 100_000, 400_000
CONTAINER_LETTERS, VALUE_LETTERS = 25, 12
"""A file has more lists and objects, or values, than a few only if it has so many letters for each: where they are
empty, or of one digit, they take a hundred times their letters of memory."""
LONGEST_MESSAGE, LONGEST_PATH, SHOWN = 250, 160, 80
"""Letters of what is wrong, of a JSON path, and of a value or a key in one, that a message shows."""
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
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""A SHA-256."""
Text = Annotated[str, Field(min_length=1), AfterValidator(_printable)]
"""A line, as long as what it tells of."""
Name = Annotated[Text, Field(max_length=1024)]


def least_certain(provenances: Iterable[Provenance]) -> Provenance | None:
    """Return where the least certain of several numbers comes from; none if there are none.

    >>> least_certain(["measured", "interpolated"]), least_certain([])
    ('interpolated', None)
    """
    order: tuple[Provenance, ...] = get_args(Provenance)
    return max(provenances, key=order.index, default=None)


def _fail_fast(schema: Any) -> None:  # noqa: ANN401
    """Set what pydantic's FailFast sets, for every list within a record."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple", "set", "frozenset"):
            schema["fail_fast"] = True
        for value in schema.values():
            _fail_fast(value)
    elif isinstance(schema, list):
        for value in schema:
            _fail_fast(value)


class Record(BaseModel):
    """A frozen, strict piece of a document: unknown keys, NaN and loose types are refused."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def parse(cls, text: str, path: Path) -> Self:
        """Validate strict JSON; ``path`` is only named in errors.

        Raises:
            FileError: the text is not JSON, or violates the schema; names the JSON path.
        """
        cls._check_kind(parse_json(text, path), path)
        try:
            # Of a large file there is one tree at a time.
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise FileError(f"{path}: {first_fault(error, parse_json(text, path))}") from error

    @classmethod
    def _check_kind(cls, content: object, path: Path) -> None:
        """Refuse another kind of file before its keys are."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        """Have lists refused at their first fault: a list may have millions."""
        schema = handler(source)
        _fail_fast(schema)
        return schema


class SparseRecord(Record):
    """A record that leaves some fields out of its JSON where they have their defaults.

    What was written before they were thought of is then written as it was.
    """

    LEFT_OUT: ClassVar[tuple[str, ...]] = ()
    """Names of the fields."""

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = serialize(self)
        for name in self.LEFT_OUT:
            if getattr(self, name) == type(self).model_fields[name].default:
                content.pop(name, None)
        return content


class Document(Record):
    """A file of autopar: ``format``, ``version`` and content, written byte-equal for equal content."""

    KIND: ClassVar[str]

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:  # noqa: ANN401
        super().__pydantic_init_subclass__(**kwargs)
        cls.KIND = cls.model_fields["format"].default.removeprefix("autopar.")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read and validate a document.

        Raises:
            FileError: the file is missing, too large, not JSON, or violates the schema; names the JSON path.
        """
        path = Path(path)
        return cls.parse(read_text(path, cls.KIND), path)

    @classmethod
    def _check_kind(cls, content: object, path: Path) -> None:
        wanted = f"autopar.{cls.KIND}"
        if not isinstance(content, dict):
            raise FileError(f'{path}: $: expected an object with "format": "{wanted}"')
        kind, version = content.get("format"), content.get("version")
        if kind != wanted:
            raise FileError(
                f'{path}: $.format: expected "{wanted}", found {value_text(kind)}{_remedy(kind, wanted, path)}'
            )
        if version != 1 or type(version) is not int:
            raise FileError(f"{path}: $.version: this autopar reads version 1, found {value_text(version)}")

    def dumps(self) -> str:
        """Return the canonical JSON text, newline at the end."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def save(self, path: str | Path, *, overwrite: bool = True) -> None:
        """Write atomically; see :func:`write_text`."""
        write_text(path, self.dumps(), overwrite=overwrite)


def fault(at: str, message: str) -> NoReturn:
    """Refuse a document inside a validator, naming the JSON path ``at`` (such as ``layers[3].name``)."""
    raise PydanticCustomError("fault", "{message}", {"message": message[:LONGEST_MESSAGE], "at": at})


def each_once(keys: Iterable[Hashable], at: str, what: str) -> None:
    """Refuse a document inside a validator in which a key is given twice.

    Args:
        keys: in their order.
        at: the JSON path of one, with ``{}`` for its index.
        what: the word for one.
    """
    seen = set[Hashable]()
    for index, key in enumerate(keys):
        if key in seen:
            fault(at.format(index), f"{what} {key!r} is given twice")
        seen.add(key)


def ascending(values: Sequence[int], at: str, what: str) -> None:
    """Refuse a document inside a validator in which values do not ascend; ``at`` is their JSON path."""
    if list(values) != sorted(set(values)):
        fault(at, f"{what} must ascend without repeats, found {list(values)}")


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
            raise UsageError(f"{path} exists; pass `overwrite=True` to replace it")
    try:
        with new_file(path) as file:
            file.write(content)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}") from error


def parse_json(text: str, path: Path, keys: int = MAX_KEYS) -> object:
    """Parse JSON strictly: duplicate keys, NaN, infinities and absurd nesting are refused with their JSON path.

    Raises:
        FileError: the text is not strict JSON.
    """
    try:
        if sys.getrecursionlimit() > _SAFE_RECURSION:
            _check_depth(text)
        content: object = json.loads(
            text,
            object_pairs_hook=_Objects(path, keys).make,
            parse_constant=lambda name: _InvalidValue(f"{name} is not a JSON number"),
            parse_int=lambda digits: int(digits) if len(digits) < _MAX_DIGITS else _LARGE,
        )
    except json.JSONDecodeError as error:
        what = f"; `autopar profile {path}` measures the model of a Python file" if path.suffix == ".py" else ""
        raise FileError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}{what}") from error
    except RecursionError as error:
        raise FileError(f"{path}: $: nested deeper than {MAX_DEPTH} levels") from error
    refusal = _refusal(content, len(text))
    if refusal is not None:
        raise FileError(f"{path}: {refusal}")
    return content


_MAX_TOML_LETTERS = 2**20
_LONG_KEY = re.compile(rf"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{MAX_DEPTH},}}""")
"""A dotted key: Python's parser takes the square of its parts."""


def parse_toml(text: str, path: Path) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        FileError: it is none, or absurdly nested or large.
    """
    if len(text) > _MAX_TOML_LETTERS:
        raise FileError(f"{path}: {len(text):,} letters are too many for a description (at most {_MAX_TOML_LETTERS:,})")
    try:
        if _LONG_KEY.search(text) is not None:
            raise RecursionError
        return tomllib.loads(text)
    except RecursionError as error:
        raise FileError(f"{path}: not TOML: nested too deeply") from error
    except ValueError as error:
        # Also of numbers with thousands of digits, and of dates that are none.
        raise FileError(f"{path}: not TOML: {str(error)[:SHOWN]}") from error


def _check_depth(text: str) -> None:
    """Raise what Python's parser raises of what is nested too deeply for one that has a limit of its own."""
    try:
        from_json(text)
    except ValueError as error:
        if "recursion limit" in str(error):
            raise RecursionError from error


@dataclass(frozen=True)
class _InvalidValue:
    """Stands in the parsed tree where strict JSON has no value, so that its path can be found."""

    message: str


_DUPLICATE, _LARGE = _InvalidValue("key is given twice"), _InvalidValue("number is too large")


class _Objects:
    """Makes the objects of a file."""

    def __init__(self, path: Path, keys: int) -> None:
        self._path, self._keys, self._count = path, keys, 0

    def make(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._count += 1
        if self._count > MAX_OBJECTS:
            raise FileError(f"{self._path}: holds more than {MAX_OBJECTS:,} objects, which no file of autopar does")
        result = dict(pairs)
        if len(result) > self._keys:
            return {next(iter(result)): _InvalidValue(f"one of more than {self._keys:,} keys of an object")}
        if len(result) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            return {key: _DUPLICATE if counts[key] > 1 else value for key, value in pairs}
        return result


class _JsonPlace(NamedTuple):
    """Where a value stands: its key or index in a container, and the container's place."""

    outer: _JsonPlace | None
    key: str | int

    def path(self) -> str:
        own = f"[{self.key}]" if isinstance(self.key, int) else f".{self.key[:SHOWN]}" if self.key else ""
        return self.outer.path() + own if self.outer else str(self.key)


def _refusal(content: object, letters: int) -> str | None:
    """Return the JSON path and reason of a value that strict JSON has not, if there is one.

    Large files hold millions of numbers: only containers and what is refused are visited one by one.
    """
    stack = [(_JsonPlace(None, "$"), _items(content))]
    containers = values = 0
    while stack:
        place, items = stack[-1]
        for key, item in items:
            if isinstance(item, _InvalidValue):
                return f"{_JsonPlace(place, key).path()}: {item.message}"
            if isinstance(item, float) and not math.isfinite(item):
                return f"{_JsonPlace(place, key).path()}: {_LARGE.message}"
            if isinstance(item, dict | list):
                containers, values = containers + 1, values + len(item)
                if (
                    containers > FEW_CONTAINERS + letters // CONTAINER_LETTERS
                    or values > FEW_VALUES + letters // VALUE_LETTERS
                ):
                    return f"{place.path()[:SHOWN]}: more lists, objects or values than a file of autopar has"
                if len(stack) > MAX_DEPTH:
                    return f"{place.path()[:SHOWN]}: nested deeper than {MAX_DEPTH} levels"
                stack.append((_JsonPlace(place, key), _items(item)))
                break
        else:
            stack.pop()
    return None


def _items(value: object) -> Iterator[tuple[str | int, object]]:
    if isinstance(value, dict):
        return iter(value.items())
    return (
        enumerate(value) if isinstance(value, list) else iter([("", value)] if isinstance(value, _InvalidValue) else ())
    )


_WRITERS = {
    "profile": "; `autopar profile` writes one",
    "plan": "; `autopar plan` writes one",
    "cluster": "; `autopar profile` writes one beside the profile",
    "autopar": "; `autopar demo` writes some",
}
"""Which command writes files of a kind that users name most."""


def _files_like(path: Path) -> list[str]:
    """Return the names beside a file that end as its own."""
    try:
        return [name for name in os.listdir(path.parent) if Path(name).suffix == path.suffix]
    except OSError:
        return []


def _remedy(kind: object, wanted: str, path: Path) -> str:
    """Return what to do with another file of autopar than the one that is wanted; nothing where it is none."""
    if not isinstance(kind, str) or not kind.startswith("autopar."):
        return ""
    if (kind, wanted) == ("autopar.profile", "autopar.plan"):
        return f"; `autopar plan {path}` plans with it"
    return f"; `autopar show {path}` shows it"


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
        if size > _MAX_FILE_BYTES:
            raise FileError(f"{path}: {size} bytes is too large for a {kind} (at most {_MAX_FILE_BYTES})")
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        message = f"{_short_path(path)}: no such {kind} file{_WRITERS.get(kind, '')}"
        raise unknown(FileError, message, path.name, _files_like(path)) from error
    except OSError as error:
        raise FileError(f"cannot read {_short_path(path)}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not UTF-8 at byte {error.start}") from error
    except ValueError as error:
        # Of a path with a NUL or half a surrogate pair.
        raise FileError(f"cannot read {_short_path(path)}: no file has such a name") from error


def _short_path(path: Path) -> str:
    """Return a path as a message names it: of a very long one, the beginning and the end."""
    text = str(path)
    return text if len(text) <= 2 * LONGEST_PATH else f"{text[:LONGEST_PATH]}...{text[-LONGEST_PATH:]}"


def value_text(value: object) -> str:
    """Return a value of a file as a message shows it.

    >>> value_text("a name"), value_text([1, 2, 3]), value_text(None), value_text(-(10**5000))
    ('"a name"', 'a list of 3', 'null', 'a huge number')
    """
    if isinstance(value, int) and value.bit_length() > _MAX_DIGITS:
        # Python writes no number of thousands of digits.
        return "a huge number"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value):,}"
    text = value[: SHOWN + 1] if isinstance(value, str) else value
    return json.dumps(text, default=str)[:SHOWN]


def first_fault(error: ValidationError, content: object) -> str:
    """Return where the first of a validation's faults in ``content`` is, as a JSON path, and what it is."""
    first = error.errors(include_url=False)[0]
    at = "$"
    for place, part in enumerate(first["loc"], 1):
        if isinstance(part, int):
            at, content = f"{at}[{part}]", content[part] if isinstance(content, list) else None
        elif isinstance(content, dict) and (part in content or place == len(first["loc"])):
            # What else stands there is no key, but which of several types was tried.
            at, content = f"{at}.{part[:SHOWN]}", content.get(part)
    inner = first.get("ctx", {}).get("at", "")[:LONGEST_PATH]
    if inner:
        at += f".{inner}" if not inner.startswith("[") else inner
    message = first["msg"]
    if first["type"] not in ("fault", "json_invalid", "missing", "extra_forbidden"):
        message += f", found {value_text(first['input'])}"
    return f"{at[:LONGEST_PATH]}: {message[: LONGEST_MESSAGE + SHOWN]}"


_BINARY = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BITS = {"KBPS": 10**3, "MBPS": 10**6, "GBPS": 10**9, "TBPS": 10**12}
_PLAIN_SPELLING = re.compile(r"[KMGT][bB](?:/s|ps)$")
"""Of a bandwidth that says whether it counts bits or bytes."""
_NUMBER = re.compile(r"(?P<number>\d{1,18}(?:\.\d{1,9})?)\s*(?P<unit>[A-Za-z]*)")


_FEW = 1024
"""Whoever writes a smaller number without a unit does not mean bytes."""


def parse_bytes(text: str, flag: str) -> int:
    """Read bytes: a number with B, KiB .. TiB (powers of 1024) or KB .. TB (powers of 1000).

    >>> parse_bytes("16GiB", "--memory"), parse_bytes("1.5 kb", "--memory"), parse_bytes("3000", "--memory")
    (17179869184, 1500, 3000)

    Raises:
        UsageError: it is not a size, or a few without a unit.
    """
    return int(_parse(text, flag, {**_DECIMAL, **_BINARY}, "16GiB"))


def parse_bandwidth(text: str, flag: str) -> float:
    """Read bytes per second: a size followed by /s, or bits per second as networks are sold.

    Behind a capital K, M, G or T, b is a bit and B a byte, whichever of ``/s`` and ``ps`` follows.

    >>> [parse_bandwidth(each, "--bandwidth") for each in ("25GB/s", "200Gbps", "25GBps", "200Gb/s")]
    [25000000000.0, 25000000000.0, 25000000000.0, 25000000000.0]

    Raises:
        UsageError: it is not a bandwidth.
    """
    text = text.strip()
    if _PLAIN_SPELLING.search(text):
        text = text[:-2] + ("ps" if text[-3] == "b" else "/s")
    if text.casefold().endswith("bps"):
        return _parse(text, flag, _BITS, "200Gbps") / 8
    if not text.endswith("/s"):
        raise UsageError(f"{flag} {text[:80]!r}: write bytes or bits per second, such as 25GB/s or 200Gbps")
    return _parse(text.removesuffix("/s"), flag, {**_DECIMAL, **_BINARY}, "25GB/s")


def _parse(text: str, flag: str, units: dict[str, int], example: str) -> float:
    match = _NUMBER.fullmatch(text.strip())
    factor = units.get((match["unit"] or "B").upper()) if match else None
    few = match is not None and not match["unit"] and float(match["number"]) < _FEW
    if match is None or factor is None or few:
        names = ", ".join(unit.replace("IB", "iB").replace("BPS", "bps") for unit in units)
        example = match["number"] + example.lstrip("0123456789") if match is not None and few else example
        raise UsageError(f"{flag} {text[:80]!r}: write a number and a unit ({names}), such as {example}")
    value = float(match["number"]) * factor
    if not 1 <= value < 2**63:
        raise UsageError(f"{flag} {text[:80]!r}: must be at least 1 and below 2**63")
    return value


_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_COUNT = re.compile(r"(?P<number>[+-]?\d{1,18}(?:\.\d{1,9})?(?:[eE]\+?\d{1,2})?)\s*(?P<unit>[KMBT]?)", re.IGNORECASE)


def parse_count(text: str, flag: str) -> int:
    """Read how many of something there are: a number, with K, M, B or T for thousands to millions of millions.

    >>> [parse_count(each, "--tokens") for each in ("15T", "1.5b", "300", "1e15")]
    [15000000000000, 1500000000, 300, 1000000000000000]

    Raises:
        UsageError: it is no number.
    """
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{flag} {text[:80]!r}: write a number, such as 15T, 2B, 300M or 1e15")
    return int(Decimal(match["number"]) * _COUNTS[match["unit"].upper()])
