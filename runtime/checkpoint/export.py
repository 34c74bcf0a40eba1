"""Export: what a folder of checkpoints holds, and a checkpoint's model as one file that other libraries read."""

from __future__ import annotations

from pathlib import Path

import torch

from autopar.errors import FileError, UsageError
from autopar.formats.checkpoint import CheckpointView, StoredTensor
from autopar.progress import Progress, no_progress
from autopar.runtime.checkpoint.folder import CheckpointFolder, StoredCheckpoint, read_manifest, read_verified
from autopar.runtime.checkpoint.reader import CheckpointReader
from autopar.runtime.result import weights


def views(folder: Path, *, thorough: bool = False, progress: Progress = no_progress) -> list[CheckpointView]:
    """Return the checkpoints of a folder, by their steps; ``thorough``: every file is read, and its hash compared.

    Raises:
        FileError: there is no such folder, or nothing in it.
    """
    checkpoints, found = CheckpointFolder(folder), list[CheckpointView]()
    steps = _steps(checkpoints)
    for at, step in enumerate(steps):
        progress(f"reading step {step}", at / len(steps))
        place, manifest, problem = checkpoints.folder_of(step), None, None
        try:
            manifest = read_verified(place) if thorough else read_manifest(place)
        except FileError as error:
            problem = str(error)
        found.append(CheckpointView(step, place, manifest, problem, thorough and problem is None))
    return found


def _steps(checkpoints: CheckpointFolder) -> list[int]:
    steps = checkpoints.steps()
    if not steps:
        raise FileError(f"{checkpoints.path}: holds no checkpoints (folders step-N)")
    return steps


def find_checkpoint(folder: Path, step: int | None) -> StoredCheckpoint:
    """Return a checkpoint of a folder that is sound: that of a step, or the newest.

    Raises:
        FileError: there is none, or it is damaged.
        UsageError: there is none of that step.
    """
    checkpoints = CheckpointFolder(folder)
    steps = _steps(checkpoints)
    if step is None:
        newest, _ = checkpoints.newest()
        assert newest is not None
        return newest
    if step not in steps:
        raise UsageError(f"{folder} has no checkpoint of `step={step}`; it has those of {', '.join(map(str, steps))}")
    return StoredCheckpoint(checkpoints.folder_of(step), read_verified(checkpoints.folder_of(step)))


def export(folder: Path, output: Path, step: int | None = None) -> int:
    """Write a checkpoint's model as one safetensors file, under the keys of its ``state_dict``; return its step.

    A tied parameter is there under every one of its names. No more than one tensor is held at a time.

    Raises:
        FileError: as :func:`find_checkpoint`, or the file cannot be written.
    """
    place, manifest = find_checkpoint(folder, step)
    stored = {each.name: each for each in manifest.tensors if each.kind in ("parameter", "buffer")}
    keys = {each.key: each.tensor for each in manifest.state_keys} or {name: name for name in stored}
    missing = [key for key, name in keys.items() if name not in stored]
    if missing:
        raise FileError(f"{place}: the manifest has the key {missing[0]!r}, but nothing that it is of")
    with CheckpointReader(place, manifest) as reader:
        like = {key: _like(stored[name]) for key, name in keys.items()}
        weights.write(output, like, lambda key: reader.read(stored[keys[key]]))
    return manifest.step


def _like(record: StoredTensor) -> torch.Tensor:
    """Return a tensor without values."""
    return torch.empty(record.shape, dtype=getattr(torch, record.dtype), device="meta")
