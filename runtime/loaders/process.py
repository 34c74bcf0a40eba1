"""Loader: a process that reads samples and collates them, and sends their rows to the ranks that need them.

In come tasks; out go messages to ranks, and word to the server that a task is done. It opens the dataset for itself:
nothing that a dataset has opened, no thread that it has started, is shared with another process.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

import torch
from pydantic import TypeAdapter

from autopar.capture.model.batch import slice_rows
from autopar.capture.model.source import load
from autopar.capture.plain.loop import float64_model
from autopar.errors import TrainingError
from autopar.formats.plan import Plan
from autopar.options.train import Last
from autopar.ranks.failure import Failure
from autopar.runtime.data import SampleReader
from autopar.runtime.loaders import wire
from autopar.runtime.loaders.work import RankRows, ReadingTask

TASK = TypeAdapter(ReadingTask)


class ReadingArguments(TypedDict):
    """What loaders need to know; plain data."""

    plan: str
    """The plan's JSON text."""
    model: str
    """MODEL, as :func:`autopar.capture.model.source.load` reads it."""
    data: str | None
    """The file that feeds an ``hf:`` model, if it has one."""
    last: Last
    double: bool
    """Whether inputs are cast to float64."""
    several_hosts: bool
    """Whether loaders of other hosts read the dataset, too."""


def serve_tasks(server: socket.socket, listener: socket.socket, arguments: ReadingArguments) -> None:
    """Open the dataset, meet the ranks, and perform the server's tasks until there are no more.

    Args:
        server: gives tasks.
        listener: where ranks ask for a connection.
        arguments: what is read.
    """
    try:
        plan, data = Plan.parse(arguments["plan"], Path("plan.json")), arguments["data"]
        # What is added up in parts depends on how many threads do so.
        torch.set_num_threads(plan.threads)
        found = load(arguments["model"], None if data is None else Path(data), plan.model)
        reader = SampleReader(float64_model(found) if arguments["double"] else found, plan, arguments["last"])
    except Exception as error:
        wire.send(server, {"failure": Failure.of(error).as_dict()})
        return
    whole = reader.model.whole_batches
    # What becomes of a sample may then depend on the others of its micro-batch, or mini-batch.
    facts = {
        "samples": reader.samples,
        "excerpt": reader.excerpt() if arguments["several_hosts"] else {},
        "collates": whole or reader.model.collates,
        "whole": whole,
    }
    wire.send(server, {"opened": facts})
    ranks = _Ranks()
    while (message := wire.receive(server)) is not None:
        if "ranks" in message:
            ranks.meet(listener, message["ranks"])
            continue
        _perform(TASK.validate_python(message["task"]), reader, ranks)
        wire.send(server, {"done": True})


class _Ranks:
    """Connections with ranks, and what each wants of a batch."""

    def __init__(self) -> None:
        self._links: dict[int, socket.socket] = {}
        self._names: dict[int, frozenset[str]] = {}

    def meet(self, listener: socket.socket, count: int) -> None:
        """Take up as many connections as there are ranks that read."""
        for _ in range(count):
            link, _ = listener.accept()
            hello = wire.receive(link)
            if hello is not None:
                self._links[hello["rank"]], self._names[hello["rank"]] = link, frozenset(hello["names"])
        listener.close()

    def send(self, rank: int, header: wire.Header, values: Mapping[str, torch.Tensor] | None = None) -> None:
        """Send a rank what it wants of some rows, and of the rest what it looks like.

        Raises:
            TrainingError: a tensor is not of a kind that can be sent.
        """
        wanted = self._names[rank]
        found = {name: wire.dense(name, value) for name, value in (values or {}).items() if name in wanted}
        described = [
            {
                "name": name,
                "dtype": str(value.dtype).removeprefix("torch."),
                "shape": list(value.shape),
                "strides": list(found[name].stride()) if name in found else None,
            }
            for name, value in (values or {}).items()
        ]
        try:
            wire.send(self._links[rank], {**header, "tensors": described}, list(found.values()))
        except OSError:
            # It has gone: whoever watches over it knows why.
            return


def _perform(task: ReadingTask, reader: SampleReader, ranks: _Ranks) -> None:
    """Read what a task is of, and send everybody's rows, or what failed."""
    began_s = time.perf_counter()
    try:
        whole = task.micro_batch is None
        values = reader.whole(task.step) if whole else reader.rows(task.step, *task.rows)
    except Exception as error:
        for share in task.shares:
            ranks.send(share.rank, {**_place(task, share), "failure": Failure.of(error).as_dict()})
        return
    work_s = (time.perf_counter() - began_s) / len(task.shares)
    for share in task.shares:
        first = share.micro_batch * reader.plan.micro_batch_size if whole else -task.start
        own = slice_rows(values, first + share.start, first + share.stop)
        header = _place(task, share)
        try:
            ranks.send(share.rank, {**header, "work_s": work_s}, own)
        except TrainingError as error:
            ranks.send(share.rank, {**header, "failure": Failure.of(error).as_dict()})


def _place(task: ReadingTask, share: RankRows) -> wire.Header:
    rows = [share.start, share.stop]
    return {"step": task.step, "micro_batch": share.micro_batch, "rows": rows, "exact": task.exact}
