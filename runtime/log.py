"""Logs: what steps and evaluations gave, a line of JSON each, and for TensorBoard.

    {"step": 7, "loss": 0.31, "learning_rates": [0.001], "seconds": {"forwards": 0.02, "backwards": 0.05, ...}}
    {"step": 8, "evaluation": {"loss": 0.35}}
    {"step": 8, "checkpoint": {"failure": null}}

In come metrics; out comes an entry, for a function of the user's or for files. Seconds of a step on a GPU are known
when it is done: its entry waits for the step after it, so that the device does not wait for the host. In a run, whose
ranks are not to wait for each other either, the sums of a step's losses are under way meanwhile, too.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from autopar.errors import FileError, UsageError
from autopar.ranks.context import RankContext
from autopar.runtime.clocks import clock_of
from autopar.runtime.job import Job
from autopar.runtime.loss import StepRecord
from autopar.runtime.metrics import Metrics, MetricsSum

Entry = dict[str, Any]
"""What is logged at a time: plain data."""
LINES = "steps.jsonl"
"""Within a folder of logs."""
NO_TENSORBOARD = "tensorboard is not installed; `pip install tensorboard` to have its files, too"


def entry_of(metrics: Metrics) -> Entry:
    """Return what is logged of a step; what there is nothing of is left out.

    >>> entry_of(Metrics(3, 0.5, None, False, learning_rates=(0.1,)))
    {'step': 3, 'loss': 0.5, 'learning_rates': [0.1], 'overflow': False, 'loss_scale': 1.0}
    """
    found = {
        "step": metrics.step,
        "loss": metrics.loss,
        "losses": dict(metrics.losses),
        "learning_rates": list(metrics.learning_rates),
        "gradient_norm": metrics.gradient_norm,
        "overflow": metrics.overflow,
        "loss_scale": metrics.loss_scale,
        "seconds": {cause: seconds for cause, seconds in metrics.seconds.items() if seconds},
    }
    return {name: value for name, value in found.items() if value not in (None, {}, [])}


def scalars(entry: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of an entry by their paths.

    >>> list(scalars({"step": 3, "loss": 0.5, "learning_rates": [0.1], "evaluation": {"loss": 0.7}}))
    [('loss', 0.5), ('learning_rates/0', 0.1), ('evaluation/loss', 0.7)]
    """
    for name, value in entry.items():
        if isinstance(value, list):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            yield from scalars(value, f"{above}{name}/")
        elif isinstance(value, bool | int | float) and name != "step":
            yield f"{above}{name}", float(value)


class _Events:
    """TensorBoard's file: all numbers of an entry in one event, which takes a tenth of what an event for each does."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import FileWriter

        self._summary, self._writer = Summary, FileWriter(str(folder))
        self.close = self._writer.close

    def write(self, entry: Entry) -> None:
        """Write an entry's numbers."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars(entry)]
        self._writer.add_summary(self._summary(value=values), entry["step"])


def _events_in(folder: Path) -> _Events | None:
    """Return TensorBoard's file in a folder; None where it is not installed."""
    try:
        return _Events(folder)
    except ImportError:
        return None


class FileLog:
    """Writes entries into a folder: lines of JSON, behind those that are there, and events where there is TensorBoard.

    Raises:
        FileError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lines = (folder / LINES).open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise FileError(f"cannot write logs into {folder}: {error.strerror}") from error
        self._events = _events_in(folder)

    @property
    def notes(self) -> list[str]:
        """What a reader should know."""
        return [] if self._events is not None else [f"{self._lines.name}: {NO_TENSORBOARD}"]

    def __call__(self, entry: Entry) -> None:
        """Write an entry."""
        self._lines.write(json.dumps(_finite(entry)) + "\n")
        if self._events is not None:
            self._events.write(entry)

    def close(self) -> None:
        """End the files."""
        self._lines.close()
        if self._events is not None:
            self._events.close()


def _finite(value: Any) -> Any:  # noqa: ANN401
    """Return a value with null for numbers that JSON has not."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return list(map(_finite, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Log:
    """Tells a function of entries in their order; of a step, when the one after it has begun if the device ``lags``."""

    def __init__(
        self, tell: Callable[[Entry], object], *, lags: bool, close: Callable[[], None] = lambda: None
    ) -> None:
        """Begin; ``close`` is called in the end."""
        self._tell, self._most, self._close = tell, int(lags), close
        self._waiting: deque[Metrics] = deque()

    def step(self, metrics: Metrics) -> None:
        """Take note of a step that has been given to the device."""
        self._waiting.append(metrics)
        self._pass_on(self._most)

    def evaluation(self, steps: int, loss: float) -> None:
        """Take note of an evaluation behind so many steps."""
        self._pass_on(0)
        self._tell({"step": steps, "evaluation": {"loss": loss}})

    def checkpoint(self, steps: int, failure: str | None) -> None:
        """Take note of a checkpoint of so many steps: it is there, or why it is not."""
        self._pass_on(0)
        self._tell({"step": steps, "checkpoint": {"failure": failure}})

    def close(self, *, failed: bool = False) -> None:
        """Tell of what waits, but where training has ``failed``: it may never be known."""
        try:
            if not failed:
                self._pass_on(0)
        finally:
            self._close()

    def _pass_on(self, most: int) -> None:
        while len(self._waiting) > most:
            self._tell(entry_of(self._waiting.popleft()))


def log_of(how: str | Callable[[Entry], object], folder: Path, device: torch.device) -> Log:
    """Return the log of a script on a device: a function of its own, or files in a folder.

    Raises:
        UsageError: ``how`` is neither, or TensorBoard is not installed.
        FileError: the folder cannot be written.
    """
    lags = clock_of(device).lags
    if callable(how):
        return Log(how, lags=lags)
    if how != "tensorboard":
        raise UsageError(f"`log_with({how!r})`: give 'tensorboard' or a function that is called with a dict")
    files = FileLog(folder)
    if files.notes:
        files.close()
        raise UsageError(f"`log_with('tensorboard')`: {NO_TENSORBOARD}, or give a function in its place")
    return Log(files, lags=lags, close=files.close)


class RunLog:
    """The log of a run, which rank 0 writes; all ranks call the same methods in the same order."""

    def __init__(self, context: RankContext, job: Job, folder: Path) -> None:
        """Open the files.

        Raises:
            FileError: the folder cannot be written; on all ranks.
        """
        self._job, self._log = job, Log(lambda entry: None, lags=False)
        self._sums: deque[MetricsSum] = deque()

        def open_files() -> list[str]:
            files = FileLog(folder)
            self._log = Log(files, lags=False, close=files.close)
            return files.notes

        self.notes: list[str] = context.result_of_rank_0(open_files)
        """What a reader should know."""

    def step(self, record: StepRecord) -> None:
        """Take note of a step, or a repetition, that has been given to the device."""
        self._sums += [MetricsSum(self._job, each) for each in record.every]
        self._pass_on(self._job.plan.span)

    def evaluation(self, steps: int, loss: float) -> None:
        """Take note of an evaluation behind so many steps."""
        self._pass_on(0)
        self._log.evaluation(steps, loss)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._pass_on(0)
        self._log.close(failed=error is not None)

    def _pass_on(self, most: int) -> None:
        while len(self._sums) > most:
            self._log.step(self._sums.popleft().metrics())
