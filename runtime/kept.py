"""Kept: what a rank leaves in files for whoever compares its training with another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.runtime import weights
from autopar.runtime.job import Job

__all__ = ["BUFFERS", "GRADIENTS", "PARAMETERS", "UNREAD", "Kept", "kept_folder"]

GRADIENTS, PARAMETERS, BUFFERS, UNREAD = "gradients", "parameters", "buffers", "unread"
"""Folders of a rank: of the first step, as the optimizer was given them; after the last; and what no layer reads."""


def kept_folder(folder: Path, rank: int, what: str) -> Path:
    """Return where a rank leaves something."""
    return folder / f"rank-{rank}" / what


class Kept:
    """A rank's gradients of the first step, which the optimizer is given, and its parameters and buffers."""

    def __init__(self, job: Job, folder: Path) -> None:
        """Watch for the first step of the rank's optimizer, and write into ``folder``."""
        self._job, self._folder = job, folder
        self._gradients: dict[str, torch.Tensor] = {}
        self._handle = register_optimizer_step_pre_hook(lambda *_: self._keep())

    def write(self, unread: Mapping[str, torch.Tensor]) -> None:
        """Write all of it after the last step, ``unread`` on rank 0; replicas that divide parameters do so together."""
        self._write(GRADIENTS, self._gradients)
        for what, names in ((PARAMETERS, self._job.parameters), (BUFFERS, self._job.buffers)):
            state = self._job.state()
            self._write(what, {name: state[name] for name in names})
        if self._job.rank == 0:
            self._write(UNREAD, unread)

    def _keep(self) -> None:
        self._handle.remove()
        parameters = self._job.parameters.items()
        self._gradients = {name: _copy(each.grad) for name, each in parameters if each.grad is not None}

    def _write(self, what: str, tensors: Mapping[str, torch.Tensor]) -> None:
        folder = kept_folder(self._folder, self._job.rank, what)
        folder.mkdir(parents=True)
        weights.write(folder / weights.SINGLE, tensors, lambda name: _whole(tensors[name]), durable=False)


def _copy(gradient: torch.Tensor) -> torch.Tensor:
    dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
    return dense.clone()


def _whole(tensor: torch.Tensor) -> torch.Tensor | None:
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return None
    from autopar.runtime.sharded import whole

    return whole(tensor)
