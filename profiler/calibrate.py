"""Calibrate: fit the constants of estimates to a few measured training runs, read from a CSV file."""

from __future__ import annotations

import csv
import difflib
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

import numpy as np
from pydantic import BeforeValidator, Field, ValidationError, model_validator
from scipy.optimize import least_squares

from autopar.errors import FileError
from autopar.formats.document import MOST_RANKS, SHOWN, Count, Record, fault, first_fault, read_text
from autopar.ownership import Shard
from autopar.profiler.estimate import TeamShape, Workload, layer_seconds
from autopar.profiler.kernels import Constants, Numbers
from autopar.schedules import canonical

NOISE = 0.07
"""Relative error that a run is expected to be predicted with: what the constants cannot explain."""
FEWEST_TO_LEAVE_OUT = 3


class _Prior(NamedTuple):
    """How far a constant may be from its default: its logarithm's standard deviation."""

    deviation: float
    least: float
    most: float


# In the order of the constants.
_PRIORS = {
    "matmul_share": _Prior(0.2, 0.05, 1.0),
    "half_outputs": _Prior(0.7, 1e3, 1e8),
    "half_depth": _Prior(0.7, 1.0, 2e3),
    "memory_share": _Prior(0.2, 0.05, 1.0),
    "kernel_s": _Prior(0.7, 1e-7, 1e-4),
    "forward_launch_s": _Prior(0.7, 1e-7, 1e-3),
    "backward_launch_s": _Prior(0.7, 1e-7, 1e-3),
    "update_share": _Prior(0.5, 0.01, 3.0),
    "step_s": _Prior(1.0, 1e-5, 10.0),
}


@dataclass(frozen=True)
class Observation:
    """A run that was measured."""

    load: Workload
    """Of its model; holds the run's numbers of rows among its sizes."""
    step_of: Callable[..., float]
    """Prices its stages, micro-batches and recomputation, as ``DictatedRun.step_s`` of the planner does."""
    step_s: float
    teams: tuple[TeamShape, ...] = ()
    """Of which ranks ran each layer; empty: of one each."""


@dataclass(frozen=True)
class Calibration:
    """Fitted constants, and how well they do; errors are medians of |predicted / measured - 1|."""

    constants: Constants
    runs: int
    error_before: float
    error_after: float
    error_left_out: float | None
    """Of each run with constants fitted to the others; none for fewer than three runs."""

    def notes(self) -> tuple[str, ...]:
        """Return what a profile says of its constants.

        >>> Calibration(Constants(), 6, 0.31, 0.04, 0.07).notes()[0]
        'constants fitted to 6 measured runs: median error 4.0 %, by default 31.0 %, of a run left out 7.0 %'
        """
        left_out = (
            f"too few to leave one out (at least {FEWEST_TO_LEAVE_OUT})"
            if self.error_left_out is None
            else f"of a run left out {100 * self.error_left_out:.1f} %"
        )
        values = ", ".join(f"{name} {value:.3g}" for name, value in asdict(self.constants).items())
        return (
            f"constants fitted to {self.runs} measured run{'s' if self.runs > 1 else ''}: median error "
            f"{100 * self.error_after:.1f} %, by default {100 * self.error_before:.1f} %, {left_out}",
            f"fitted constants: {values}",
        )


def calibrate(observations: Sequence[Observation], start: Constants, leave_out: bool = True) -> Calibration:
    """Fit constants to measured runs.

    Least squares of the logarithms of predicted over measured steps, robust to single bad runs (soft l1), with every
    constant drawn to where it starts, so that few runs move only what they tell about.
    """
    fitted = _fit(observations, start)
    left_out = None
    if leave_out and len(observations) >= FEWEST_TO_LEAVE_OUT:
        left_out = statistics.median(
            abs(predict([each], _fit([*observations[:index], *observations[index + 1 :]], start))[0] / each.step_s - 1)
            for index, each in enumerate(observations)
        )
    return Calibration(
        constants=fitted,
        runs=len(observations),
        error_before=_error(observations, start),
        error_after=_error(observations, fitted),
        error_left_out=left_out,
    )


def predict(observations: Sequence[Observation], constants: Constants) -> list[float]:
    """Return the predicted seconds of every run's step."""
    priced: dict[int, Callable[[Observation], float]] = {}
    for each in observations:
        if id(each.load) not in priced:
            priced[id(each.load)] = _step_seconds(each.load, constants)
    return [priced[id(each.load)](each) for each in observations]


def _step_seconds(load: Workload, constants: Constants) -> Callable[[Observation], float]:
    """Return what gives the seconds of a step of this workload's runs."""

    @cache
    def times(teams: tuple[TeamShape, ...]) -> tuple[object, ...]:
        found = layer_seconds(load, constants, teams)
        kernels = _by_rows(load, found.forward_s, found.backward_s)
        launches = _by_rows(load, found.forward_launch_s, found.backward_launch_s)
        return *kernels, found.accumulate_s.tolist(), found.update_s.tolist(), constants.step_s, launches

    return lambda each: each.step_of(*times(each.teams))


_ByRows = Mapping[int, Sequence[float]]
"""Seconds of every layer, by number of samples."""


def _by_rows(load: Workload, forward_s: Numbers, backward_s: Numbers) -> tuple[_ByRows, _ByRows]:
    forwards, backwards = (dict(zip(load.sizes, each.tolist(), strict=True)) for each in (forward_s, backward_s))
    return forwards, backwards


def _fit(observations: Sequence[Observation], start: Constants) -> Constants:
    deviations, least, most = np.array([*zip(*_PRIORS.values(), strict=True)])
    measured = np.log([each.step_s for each in observations])
    origin = _encode(start)

    def residuals(point: Numbers) -> Numbers:
        predicted = np.log(predict(observations, _decode(point)))
        # The robust loss (scipy's soft_l1: the square of small errors, twice the size of large ones) is for runs; a
        # pull to the start is made as strong there as the square is.
        errors = np.sign(predicted - measured) * np.sqrt(2 * (np.sqrt(1 + ((predicted - measured) / NOISE) ** 2) - 1))
        return np.concatenate((errors, (point - origin) / deviations))

    bounds = np.log(least), np.log(most)
    found = []
    for slower in _SLOWER:
        moved = replace(start, **{name: slower * getattr(start, name) for name in _LAUNCHES})
        begin = np.clip(_encode(moved), bounds[0] + 1e-9, bounds[1] - 1e-9)
        found.append(least_squares(residuals, begin, bounds=bounds, x_scale=deviations, **_PRECISION))
    return _decode(min(found, key=lambda result: float(result.cost)).x)


_LAUNCHES = "forward_launch_s", "backward_launch_s"
_SLOWER = 1.0, 3.0
"""Launches that a fit begins with, over the constants' own: where kernels hide them in all runs, none tells of them."""
_PRECISION = {"diff_step": 1e-4, "ftol": 1e-5, "xtol": 1e-5}


def _encode(constants: Constants) -> Numbers:
    return np.log(list(asdict(constants).values()))


def _decode(point: Numbers) -> Constants:
    return Constants(*np.exp(point).tolist())


def _error(observations: Sequence[Observation], constants: Constants) -> float:
    predicted = predict(observations, constants)
    return statistics.median(abs(p / each.step_s - 1) for p, each in zip(predicted, observations, strict=True))


class MeasuredRun(Record):
    """One measured run, priced by the simulator as a plan of these stages would be."""

    at: str
    """Where it stands, for messages: file and row."""
    step_s: Annotated[float, Field(ge=1e-6, le=86_400)]
    """Of one optimizer step, steady state; between a microsecond and a day."""
    batch: Count
    """Samples per step, over all devices."""
    model: str | None = None
    """As on the command line; None: the model that is profiled."""
    devices: Annotated[int, Field(ge=1, le=MOST_RANKS)] = 1
    """How many were used."""
    stages: str = "1"
    """How many equal ones (a divisor of ``devices``), or which: ``0-5:2,6-11:2``, or ``0-5:2x4`` with teams of four."""
    tensor: Count = 1
    """How many GPUs ran each replica of equal stages, each a part of every layer."""
    sequence_parallel: bool = False
    """Whether they kept slices of the sequence between split layers, as far as layers can."""
    micro_batches: Count = 1
    """Per step; a divisor of ``batch``."""
    schedule: Annotated[Literal["gpipe", "1f1b"], BeforeValidator(lambda name: canonical(name) or name)] = "1f1b"
    """Of one stage per device and of whole backwards."""
    recompute: Annotated[str, Field(pattern=r"^(none|full|\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*)$")] = "none"
    """Whose backward ran their forward again: ``full``, all layers'; or those of some layers, such as ``0-5,8``."""
    shard: Shard = "none"
    """What replicas divided, as ``autopar plan --shard`` says it."""
    cluster: str | None = None
    """A name or a file; None: nodes of such GPUs (of eight, of GB200s of 72), as many as are needed."""

    @model_validator(mode="after")
    def _micro_batches_are_equal(self) -> Self:
        if self.batch % self.micro_batches:
            fault("micro_batches", f"{self.micro_batches} does not divide the batch {self.batch}")
        if self.tensor > 1 and not self.stages.isdecimal():
            fault("tensor", f"{self.tensor} is of equal stages; write 0-5:2x{self.tensor} in column stages")
        return self


COLUMNS = tuple(name for name in MeasuredRun.model_fields if name != "at")


def read_runs(path: str | Path) -> tuple[MeasuredRun, ...]:
    """Read the runs of a CSV file with a header; an empty cell is the column's default.

    Raises:
        FileError: the file is missing or holds no run, a column is missing or unknown, or a value is not what its
            column takes; names the row (1 is the header) and the column.
    """
    path = Path(path)
    if not path.exists():
        raise FileError(f"{path}: no such file; docs/howto/other_gpus.md says which runs it holds, and how")
    reader = csv.DictReader(io.StringIO(read_text(path, "runs").removeprefix("\ufeff")))
    try:
        reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        _check_header(path, reader.fieldnames)
        runs = tuple(_run(f"{path}: row {reader.line_num}", row) for row in reader)
    except csv.Error as error:
        raise FileError(f"{path}: row {max(1, reader.line_num)}: {error}") from error
    if not runs:
        raise FileError(f"{path}: holds no run; write one per line below the header")
    return runs


def _check_header(path: Path, names: Sequence[str]) -> None:
    for name in names:
        if name not in COLUMNS:
            matches = difflib.get_close_matches(name, COLUMNS, n=1)
            meant = f"did you mean {matches[0]}?" if matches else f"columns are {', '.join(COLUMNS)}"
            raise FileError(f"{path}: row 1: no column is called {name[:SHOWN]!r}; {meant}")
        if names.count(name) > 1:
            raise FileError(f"{path}: row 1: column {name} is given twice")


def _run(at: str, row: Mapping[str | None, str | None]) -> MeasuredRun:
    if None in row:
        raise FileError(f"{at}: has more cells than the header has columns")
    cells = {name: value.strip() for name, value in row.items() if value and value.strip()}
    try:
        return MeasuredRun.model_validate_strings({**cells, "at": at})
    except ValidationError as error:
        raise FileError(f"{at}, column {first_fault(error, cells).removeprefix('$.')}") from error
