"""Watches: what is looked at inside stages in the first steps of a run, and in no other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.runtime.clock import clock_of
from autopar.runtime.execute import StepRecord
from autopar.runtime.flops import ForwardFlops, peak_of
from autopar.runtime.job import Job
from autopar.runtime.layer_times import LayerTimes

__all__ = ["Watches"]

TIMED_STEPS = range(1, 5)
"""Those in which layers are timed; the first step warms up."""


class Watches:
    """Counts a rank's operations in the first step, where its device's peak is known, and then times its layers."""

    def __init__(self, job: Job, device: torch.device, steps: int, time_layers: bool) -> None:
        """Prepare; of a single step that nothing is counted in, layers are timed in that one."""
        self.peak_flops_per_s = peak_of(device, job.plan.precision)
        self._job, self._flops = job, ForwardFlops()
        layers = {index: [layer.name for layer in stage.layers] for index, stage in job.stages.items()}
        self._times = LayerTimes(job.actions, layers, clock_of(device))
        timed = range(1) if steps == 1 and self.peak_flops_per_s is None else TIMED_STEPS
        self._timed: Sequence[int] = timed if time_layers else ()

    def begin_step(self, step: int) -> None:
        """Set the watch of a step, before it runs."""
        timed, counted = step in self._timed, step == 0 and self.peak_flops_per_s is not None
        if timed:
            self._times.begin_step()
        for stage in self._job.stages.values():
            stage.watch(self._times if timed else self._flops if counted else None)

    def end_step(self, step: int, record: StepRecord) -> None:
        """Take in when the actions of a step ran."""
        if step in self._timed:
            self._times.end_step(record.times_s)

    def layers_s(self) -> dict[str, tuple[float, float]]:
        """Return the median seconds of every layer that was timed, forward and backward."""
        return self._times.medians()

    def forward_flops(self) -> int:
        """Return the operations of a step's forwards; 0 where they were not counted."""
        return self._flops.total
