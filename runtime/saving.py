"""Saving: which stage writes which parameters and buffers, one file a stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from autopar.capture.graph import LayerGraph
from autopar.errors import FileError
from autopar.formats.plan import Plan
from autopar.runtime import weights
from autopar.runtime.job import Job

__all__ = ["folder_of", "holders", "make_folder", "shard_name", "write_stages"]


def shard_name(stage: int, stages: int) -> str:
    """Return the file name of a stage's trained weights."""
    return f"model-{stage + 1:05d}-of-{stages:05d}.safetensors"


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


def holders(plan: Plan, graph: LayerGraph) -> dict[str, int]:
    """Return, for every parameter and buffer that layers read, the first stage that holds it."""
    first: dict[str, int] = {}
    for stage, placed in enumerate(plan.stages):
        for layer in map(graph.layer, placed.layers):
            for name in (*layer.parameters.values(), *layer.buffers.values()):
                first.setdefault(name, stage)
    return first


def write_stages(
    job: Job, graph: LayerGraph, unread: Callable[[Iterable[str]], Mapping[str, torch.Tensor]], folder: Path
) -> dict[str, list[str]]:
    """Write what this rank's stages are the first to hold; the first stage adds what no layer reads.

    The first replica writes. The others give it their parts, one parameter after the other; none is held longer than it
    takes to write it.

    Args:
        job: the rank's.
        graph: the captured model.
        unread: gives what no layer reads, told the names of all that some layer does.
        folder: where the files go.

    Returns:
        Stage -> names of the tensors that this rank wrote of it; nothing on replicas but the first.
    """
    first, saved = holders(job.plan, graph), {}
    for index in job.stages:
        mine = {name: tensor for name, tensor in job.state().items() if first[name] == index}
        if job.replica != 0:
            for name in mine:
                job.whole(name)
            continue
        others = unread(first) if index == 0 else {}
        path = folder / shard_name(index, len(job.plan.stages))
        weights.write(path, {**mine, **others}, partial(_whole, job, frozenset(mine)))
        saved[str(index)] = sorted([*mine, *others])
    return saved


def _whole(job: Job, mine: frozenset[str], name: str) -> torch.Tensor | None:
    return job.whole(name) if name in mine else None
