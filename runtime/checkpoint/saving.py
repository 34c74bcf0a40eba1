"""Saving: which stage writes which parameters and buffers, one file a stage, into a folder that all hosts see.

What is compared with another training (see ``verify.py``) goes into a folder of each rank: its gradients of the first
step, as the optimizer was given them, its parameters and its buffers.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.capture.graph import LayerGraph
from autopar.errors import FileError
from autopar.formats.plan import Plan
from autopar.ranks.context import RankContext
from autopar.runtime.checkpoint import weights
from autopar.runtime.job import Job
from autopar.runtime.stage.parameters import first_stages, whole


def new_set() -> str:
    """Return a name for a set of weights that no other has: its files stand beside those of the set before."""
    return secrets.token_hex(8)


_OF_SET = re.compile(r"model-\d{5,}-of-\d{5,}-[0-9a-f]{16}\.safetensors|\.autopar-[0-9a-f]{16}")
"""Names of a set's files, and of those that have not been given theirs."""


@contextmanager
def set_of(folder: Path | None, name: str) -> Iterator[None]:
    """Return the context in which the files of a set are written and published; they go if it fails.

    What processes that were killed have left of theirs goes first, where no other is saving into the folder.
    """
    with nullcontext() if folder is None else _saving(folder):
        try:
            yield
        except BaseException:
            for path in () if folder is None else folder.glob(f"model-*-{name}.safetensors"):
                # An interrupt may come when the set is there already.
                if path.name not in weights.indexed_file_names(path.parent):
                    with suppress(OSError):
                        path.unlink()
            raise


@contextmanager
def _saving(folder: Path) -> Iterator[None]:
    """Say that a process saves into a folder, as long as it does; sweep the folder if no other does."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        # What is wrong with the folder is said where files are written.
        yield
        return
    try:
        # Some file systems of networks lock no folders; nothing is swept there.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _sweep(folder)
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        with suppress(OSError):
            os.close(handle)


def _sweep(folder: Path) -> None:
    named = weights.indexed_file_names(folder)
    if not named and os.path.lexists(folder / weights.INDEX):
        # It cannot be read; what it names is not known.
        return
    for each in folder.iterdir():
        if each.name not in named and _OF_SET.fullmatch(each.name):
            each.unlink()


def make_folder(path: Path) -> None:
    """Make the folder for the weights of a run, and those above it.

    Raises:
        FileError: that cannot be done; names the folder.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot make the folder {path}: {error.strerror}") from error


@contextmanager
def folder_of(path: Path | None) -> Iterator[None]:
    """Return the context in which a run has a folder for its weights; a new one goes with a run that fails before them.

    Raises:
        FileError: as :func:`make_folder`.
    """
    new = path is not None and not path.exists()
    if path is not None:
        make_folder(path)
    try:
        yield
    except BaseException:
        if path is not None and new:
            # It stays if there is anything in it.
            with suppress(OSError):
                path.rmdir()
        raise


def state_keys(module: nn.Module) -> dict[str, str]:
    """Return the keys of a model's ``state_dict``, each with the first name of what it has there."""
    names = {id(value): name for name, value in (*module.named_parameters(), *module.named_buffers())}
    state = module.state_dict(keep_vars=True).items()
    return {key: names[id(value)] for key, value in state if id(value) in names}


def unread(model: nn.Module, plan: Plan, graph: LayerGraph) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a model that none of its layers reads."""
    read = first_stages(plan, graph)
    known = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: value for name, value in known.items() if name not in read}


def write_stages(
    job: Job, graph: LayerGraph, unread: Callable[[], Mapping[str, torch.Tensor]], folder: Path, name: str
) -> list[weights.StoredFile]:
    """Write what this rank's stages are the first to hold; the first stage adds what no layer reads.

    Of the first replica, the rank with the first part writes. The others give it theirs, one parameter after the other;
    none is held longer than it takes to write it.

    Args:
        job: the rank's.
        graph: the captured model.
        unread: gives what no layer reads.
        folder: where the files go.
        name: of the set that they are of, the same on all ranks.

    Returns:
        What this rank wrote; nothing on other replicas and parts than the first. The folder's set is that before until
        :func:`autopar.runtime.checkpoint.weights.publish` is given the files of all ranks.
    """
    with job.used_weights():
        return list(_write_stages(job, first_stages(job.plan, graph), unread, folder, name))


def _write_stages(
    job: Job, first: Mapping[str, int], unread: Callable[[], Mapping[str, torch.Tensor]], folder: Path, name: str
) -> Iterator[weights.StoredFile]:
    for index in job.stages:
        mine = {name: job.team.outline(name, each) for name, each in job.state().items() if first[name] == index}
        if job.own.replica != 0 or job.own.part != 0:
            for each in mine:
                job.whole(each)
            continue
        others = unread() if index == 0 else {}
        path = folder / f"model-{index + 1:05d}-of-{len(job.plan.stages):05d}-{name}.safetensors"
        yield weights.write(path, {**mine, **others}, partial(_whole, job, frozenset(mine)))


def _whole(job: Job, mine: frozenset[str], name: str) -> torch.Tensor | None:
    return job.whole(name) if name in mine else None


def check_shared(context: RankContext, folder: Path) -> None:
    """Refuse, on all ranks alike, a folder that is not the same one on all hosts.

    Raises:
        FileError: rank 0 cannot write there, or a host sees another folder; names it.
    """
    marker = context.gather(_mark(folder) if context.rank == 0 else "")[0]
    missing = not (folder / marker).exists()
    hosts = context.gather(platform.node() if missing else "")
    if context.rank == 0 and not missing:
        (folder / marker).unlink()
    for rank, host in enumerate(hosts):
        if host:
            why = f"cannot be written on {host}" if rank == 0 else f"rank {rank} on {host} sees another than rank 0"
            raise FileError(f"`save={str(folder)!r}`: {why}; name a folder that all hosts share")


def _mark(folder: Path) -> str:
    """Return the name of a new file in the folder; it is not there if it could not be made."""
    marker = f".shared-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / marker).touch()
    except OSError:
        # Found missing, then, like a folder that is another's.
        pass
    return marker


GRADIENTS, PARAMETERS, BUFFERS, UNREAD = "gradients", "parameters", "buffers", "unread"
"""Folders of a rank: of the first step, as the optimizer was given them; after the last; and what no layer reads."""


def kept_folder(folder: Path, rank: int, what: str) -> Path:
    """Return where a rank leaves something."""
    return folder / f"rank-{rank}" / what


class ComparisonFiles:
    """A rank's gradients of the first step, which the optimizer is given, and its parameters and buffers."""

    def __init__(self, job: Job, folder: Path) -> None:
        """Watch for the first step of the rank's optimizer, and write into ``folder``."""
        self._job, self._folder = job, folder
        self._gradients: dict[str, torch.Tensor] = {}
        self._handle = register_optimizer_step_pre_hook(lambda *_: self._keep())

    def write(self, unread: Mapping[str, torch.Tensor]) -> None:
        """Write all of it after the last step, ``unread`` on rank 0; replicas that divide parameters do so together."""
        self._write(GRADIENTS, self._gradients)
        self._write(PARAMETERS, self._job.parameters)
        self._write(BUFFERS, self._job.buffers)
        if self._job.rank == 0:
            self._write(UNREAD, unread)

    def _keep(self) -> None:
        self._handle.remove()
        parameters = self._job.parameters.items()
        gradients = {name: each.grad.detach() for name, each in parameters if each.grad is not None}
        dense = {name: each.to_dense() if each.is_sparse else each for name, each in gradients.items()}
        self._gradients = {name: each.clone() for name, each in dense.items()}

    def _write(self, what: str, tensors: Mapping[str, torch.Tensor]) -> None:
        folder = kept_folder(self._folder, self._job.rank, what)
        folder.mkdir(parents=True)
        weights.write(folder / weights.SINGLE, tensors, lambda name: whole(tensors[name]), durable=False)
