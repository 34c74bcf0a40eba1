"""Runs: the measured training runs that a user calibrates estimates with, read from a CSV file."""

from __future__ import annotations

import csv
import difflib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from autopar.errors import FileError
from autopar.formats.document import MOST_RANKS, SHOWN, read_text
from autopar.schedules.spelling import canonical

COLUMNS = ("step_s", "batch", "model", "devices", "stages", "micro_batches", "schedule", "recompute", "cluster")
PRICED = ("gpipe", "1f1b")
"""Schedules of one stage per device and of whole backwards, as a run is described here."""
_REQUIRED = ("step_s", "batch")
_SHORTEST_S, _LONGEST_S = 1e-6, 86_400.0
_MOST = 2**31 - 1
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class MeasuredRun:
    """One row (docs/estimating.md)."""

    at: str
    """Where it stands, for messages: file and row."""
    step_s: float
    batch: int
    model: str | None = None
    """None: the model that is profiled."""
    devices: int = 1
    stages: str = "1"
    """How many equal ones, or which: ``0-5:2,6-11:2``."""
    micro_batches: int = 1
    schedule: str = "1f1b"
    recompute: bool = False
    cluster: str | None = None
    """None: nodes of eight devices, as many as are needed."""


def read_runs(path: str | Path) -> tuple[MeasuredRun, ...]:
    """Read the runs of a CSV file with a header; an empty cell is the column's default.

    Raises:
        FileError: the file is missing or holds no run, a column is missing or unknown, or a value is not what its
            column takes; names the row (1 is the header) and the column.
    """
    path = Path(path)
    if not path.exists():
        raise FileError(f"{path}: no such file; docs/estimating.md says which runs it holds, and how")
    reader = csv.DictReader(io.StringIO(read_text(path, "runs").removeprefix("\ufeff")))
    try:
        names = [name.strip() for name in reader.fieldnames or ()]
    except csv.Error as error:
        raise FileError(f"{path}: row 1: {error}") from error
    _check_header(path, names)
    reader.fieldnames = names
    try:
        runs = tuple(_run(f"{path}: row {reader.line_num}", row) for row in reader)
    except csv.Error as error:
        raise FileError(f"{path}: row {reader.line_num}: {error}") from error
    if not runs:
        raise FileError(f"{path}: holds no run; write one per line below the header")
    return runs


def _check_header(path: Path, names: list[str]) -> None:
    for name in _REQUIRED:
        if name not in names:
            raise FileError(f"{path}: row 1: column {name} is missing; {', '.join(_REQUIRED)} are needed")
    for name in names:
        if name not in COLUMNS:
            near = difflib.get_close_matches(name, COLUMNS, n=1)
            meant = f"did you mean {near[0]}?" if near else f"columns are {', '.join(COLUMNS)}"
            raise FileError(f"{path}: row 1: no column is called {name[:SHOWN]!r}; {meant}")
        if names.count(name) > 1:
            raise FileError(f"{path}: row 1: column {name} is given twice")


def _run(at: str, row: Mapping[str | None, str | list[str] | None]) -> MeasuredRun:
    if None in row:
        raise FileError(f"{at}: has more cells than the header has columns")
    cells = {name: value.strip() for name, value in row.items() if name is not None and isinstance(value, str)}

    def cell(name: str, read: Callable[[str], _Value], what: str, default: _Value | None) -> _Value:
        text = cells.get(name, "")
        if not text and default is not None:
            return default
        try:
            return read(text)
        except ValueError as error:
            raise FileError(f"{at}, column {name}: {text[:SHOWN]!r} is not {what}") from error

    count = "a whole number from 1 up"
    names = ", ".join(PRICED)
    found = MeasuredRun(
        at=at,
        step_s=cell("step_s", _seconds, "the seconds of a step, between a microsecond and a day", None),
        batch=cell("batch", _count, count, None),
        model=cells.get("model") or None,
        devices=cell("devices", _devices, f"a whole number from 1 to {MOST_RANKS}", 1),
        stages=cells.get("stages") or "1",
        micro_batches=cell("micro_batches", _count, count, 1),
        schedule=cell("schedule", _schedule, f"one of {names}", "1f1b"),
        recompute=cell("recompute", _one_of("none", "full"), "one of none, full", "none") == "full",
        cluster=cells.get("cluster") or None,
    )
    if found.batch % found.micro_batches:
        raise FileError(f"{at}, column micro_batches: {found.micro_batches} does not divide the batch {found.batch}")
    return found


def _seconds(text: str) -> float:
    value = float(text)
    # Not a number is between no two.
    if not _SHORTEST_S <= value <= _LONGEST_S:
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise ValueError(text)
    return int(text)


def _devices(text: str) -> int:
    found = _count(text)
    if found > MOST_RANKS:
        raise ValueError(text)
    return found


def _schedule(text: str) -> str:
    return _one_of(*PRICED)(canonical(text) or text)


def _one_of(*values: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in values:
            raise ValueError(text)
        return text

    return read
