"""LoadedShares: a rank's rows of its mini-batches, as the loaders of its host read them.

A thread of the rank takes in what loaders send, into memory from which a GPU copies beside its work, and puts together
what several of them have read. What is wrong with rows that a rank would not have read as a whole, it has read again as
a whole: then errors are the same as without loaders.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch

from autopar.capture.graph import TensorSpec
from autopar.capture.model.source import UserModel
from autopar.errors import AutoparError, TrainingError, cause_of
from autopar.formats.plan import Plan
from autopar.options.train import Last
from autopar.ranks.failure import Failure
from autopar.runtime.data import Batch, Excerpt, Loader, check_inputs, steps_of_epoch
from autopar.runtime.device import Copies
from autopar.runtime.loaders import wire
from autopar.runtime.loaders.server import SERVER

_AWAY = "the process that deals out the loaders' work has ended"


@dataclass
class _Rows:
    """A rank's rows of one micro-batch, as far as they have come."""

    missing: int
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of what has not been sent, only shapes and types."""
    apart: bool = False
    """Whether what has come does not go together, or could not be read."""
    failure: AutoparError | None = None


class LoadedShares(Loader):
    """Loads, for one rank, the model inputs that its layers read, from the loaders of its host."""

    def __init__(
        self,
        model: UserModel,
        plan: Plan,
        rank: int,
        specs: Sequence[TensorSpec],
        folder: Path,
        last: Last = "drop",
        copies: Copies | None = None,
    ) -> None:
        """Meet the loaders, once all ranks of the host do.

        Args:
            model: the user's file.
            plan: how a mini-batch is divided.
            rank: whose share is loaded.
            specs: the model inputs that its layers read.
            folder: where the loaders listen.
            last: what becomes of an epoch's last mini-batch.
            copies: of the rank's device, in whose buffers rows are put; None: it has no memory of its own.

        Raises:
            AutoparError: the dataset cannot be opened, or has too few samples.
        """
        super().__init__(plan, rank, specs)
        self._copies = copies
        self._excerpt: Excerpt = {}
        self._server = self._connect(folder, SERVER, {"rank": rank, "reads": bool(specs)})
        self._come: dict[tuple[int, int], _Rows] = {}
        self._latest = -1
        """Of the mini-batches that were asked for."""
        self._changed, self._work_s, self._lost = threading.Condition(), 0.0, ""
        if specs:
            self._ahead = self._meet(folder)
            steps_of_epoch(model, self.samples, plan, last)
            threading.Thread(target=self._take_in, name="autopar-loading", daemon=True).start()

    def _meet(self, folder: Path) -> int:
        """Connect with every loader, once the dataset is open; return how many mini-batches are read ahead."""
        facts = wire.receive(self._server)
        if facts is not None and "failure" in facts:
            raise Failure(**facts["failure"]).as_error()
        if facts is None or "lost" in facts:
            raise self._error(_AWAY if facts is None else facts["lost"])
        self.samples, self.loaders, self._excerpt = facts["samples"], facts["loaders"], facts["excerpt"]
        hello = {"rank": self._rank, "names": [spec.name for spec in self._specs]}
        self._links = [self._connect(folder, f"{SERVER}-{number}", hello) for number in range(self.loaders)]
        return int(facts["ahead"])

    def excerpt(self) -> Excerpt:
        """See :class:`Loader`."""
        return self._excerpt

    def _connect(self, folder: Path, name: str, hello: wire.Header) -> socket.socket:
        """Return a connection with the server, or a loader, which has been told who it is with."""
        try:
            link = wire.connect(folder, name)
            wire.send(link, hello)
        except OSError as error:
            raise self._error(_AWAY) from error
        return link

    def expect(self, step: int, following: range, first: int) -> None:
        """Have a step's mini-batch read, and as many of those that follow as are read ahead."""
        if not self._specs:
            return
        wanted = [each for each in (step, *following[: self._ahead]) if each > self._latest]
        if wanted:
            self._latest = wanted[-1]
            self._ask({"load": wanted, "first": first})

    def _ask(self, message: wire.Header) -> None:
        # If nobody hears it, whoever waits finds out.
        with suppress(OSError):
            wire.send(self._server, message)

    def is_there(self, step: int) -> bool:
        """Tell whether a step's mini-batch has been read."""
        with self._changed:
            return all(self._is_there(step, micro_batch) for micro_batch in self._own)

    def _is_there(self, step: int, micro_batch: int) -> bool:
        rows = self._come.get((step, micro_batch))
        return rows is not None and not rows.missing

    def load(self, step: int) -> Batch:
        """Return the share's inputs of every micro-batch of a step, rows along each tensor's batch dimension.

        Raises:
            AutoparError: as :meth:`autopar.runtime.data.ShareLoader.load`; or a loader has ended.
        """
        loaded: Batch = [{} for _ in range(self._plan.micro_batches)]
        for micro_batch in self._own:
            rows = self._await(step, micro_batch)
            with self._naming(step, micro_batch):
                if rows.failure is not None:
                    raise rows.failure
                check_inputs(rows.values, self._specs)
            loaded[micro_batch] = {spec.name: rows.values[spec.name] for spec in self._specs}
        with self._changed:
            for micro_batch in self._own:
                del self._come[step, micro_batch]
        return loaded

    def _await(self, step: int, micro_batch: int) -> _Rows:
        with self._changed:
            self._changed.wait_for(lambda: self._is_there(step, micro_batch) or self._lost)
            if not self._is_there(step, micro_batch):
                raise TrainingError(f"{self._place(step, micro_batch)}: {self._lost}")
            return self._come[step, micro_batch]

    def _error(self, what: str) -> TrainingError:
        return TrainingError(f"rank {self._rank} (setting up): {what}")

    def work_s(self) -> float:
        """Return the seconds in which loaders read and collated for this rank, since this was last asked."""
        with self._changed:
            found, self._work_s = self._work_s, 0.0
            return found

    def close(self) -> None:
        """Leave the loaders; once all ranks of the host have, they end."""
        # The thread, which reads from it, closes it.
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        if not self._specs:
            self._server.close()

    def _take_in(self) -> None:
        """Take in what is sent, until the server or a loader has gone."""
        try:
            if self._copies is not None:
                self._copies.prepare_thread()
            lost = self._hear_all()
        except Exception as error:
            lost = cause_of(error)
        for link in (self._server, *self._links):
            link.close()
        with self._changed:
            self._lost = lost
            self._changed.notify_all()

    def _hear_all(self) -> str:
        """Take in messages until one says that the loaders are lost; return how."""
        with selectors.DefaultSelector() as selector:
            for link in (self._server, *self._links):
                selector.register(link, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._server:
                        said = wire.receive(self._server)
                        return _AWAY if said is None else str(said.get("lost") or said["failure"]["message"])
                    assert isinstance(key.fileobj, socket.socket)
                    if not self._hear(key.fileobj):
                        # The server says how it has ended.
                        selector.unregister(key.fileobj)

    def _hear(self, link: socket.socket) -> bool:
        """Take in a message of a loader; return whether that is still there."""
        header = wire.receive(link)
        if header is None:
            return False
        (start, stop), (first, behind) = header["rows"], self._rows
        key = header["step"], header["micro_batch"]
        rows = self._come.get(key) or _Rows(behind - first)
        if "failure" in header:
            rows.apart = True
            rows.failure = Failure(**header["failure"]).as_error() if header["exact"] else None
        elif not self._fill(link, header["tensors"], rows, range(start - first, stop - first)):
            return False
        # Whoever waits sees rows that none misses any more: not before it is known whether all are read again.
        with self._changed:
            rows.missing -= stop - start
            is_read_again = not rows.missing and rows.apart and rows.failure is None
            self._come[key] = _Rows(behind - first) if is_read_again else rows
            self._work_s += header.get("work_s", 0.0)
            self._changed.notify_all()
        if is_read_again:
            self._ask({"again": list(key)})
        return True

    def _fill(self, link: socket.socket, tensors: Sequence[wire.Header], rows: _Rows, own: range) -> bool:
        """Fill in the values of some rows; return whether whoever sends them is still there."""
        rows.apart |= bool(rows.values) and [each["name"] for each in tensors] != list(rows.values)
        for each in tensors:
            name, shape, dtype = each["name"], each["shape"], getattr(torch, each["dtype"])
            if each["strides"] is None:
                # Not asked for, and named in what is said of others that lack.
                rows.values.setdefault(name, torch.empty(shape, dtype=dtype, device="meta"))
                continue
            if name not in rows.values:
                rows.values[name] = self._memory(shape, each["strides"], dtype)
            place = _place(rows.values[name], own, shape, each["strides"], dtype)
            rows.apart |= place is None
            if not wire.fill(link, wire.bytes_of(torch.empty(shape, dtype=dtype) if place is None else place)):
                return False
        return True

    def _memory(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for all rows, given those of which a loader has sent the first."""
        count = self._rows[1] - self._rows[0]
        if shape[0] != count:
            shape, strides = (count, *shape[1:]), (prod(shape[1:]), *strides[1:])
        like = torch.empty(prod(shape), dtype=dtype, device="meta")
        flat = torch.empty(prod(shape), dtype=dtype) if self._copies is None else self._copies.buffer(like)
        return flat.as_strided(shape, strides)


def _place(
    tensor: torch.Tensor, own: range, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> torch.Tensor | None:
    """Return the rows of a tensor that others of a shape are to fill; None where they are not alike."""
    found = tensor[own.start : own.stop]
    alike = list(found.shape) == list(shape) and found.dtype == dtype
    # Of a single row, no stride leads to the next.
    if not alike or tensor.stride()[1:] != tuple(strides[1:]) or (len(own) > 1 and tensor.stride()[0] != strides[0]):
        return None
    return found
