"""What a rank holds in a step, to the byte.

Threads of gloo's are waited for, which keep a sum's tensors a moment longer; and what no operator makes is counted.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from autopar.capture.model.effects import StorageTracker
from autopar.runtime.job import Job
from autopar.runtime.messages.transport import GroupTransport, Later

_MOST_YIELDS = 10_000


def peak_of_second_step(build: Callable[[], Job]) -> int:
    """Build a job and train two steps; return the most bytes of tensors that are alive in the second.

    The order of the samples, of which a rank that reads some keeps eight bytes each, is left out.
    """
    with StorageTracker() as tracker, _gloo_lets_go():
        job = build()
        job.step(0)
        tracker.peak_bytes = tracker.alive_bytes
        job.step(1)
        job.finish()
    order = 8 * job.plan.batch if job.inputs else 0
    return int(tracker.peak_bytes) + _counter_bytes(job.update.optimizer) - order


def peak_between(build: Callable[[], Job], steps: int) -> int:
    """Build a job and train from a fill to a drain; return the most bytes of tensors alive until that begins."""
    with StorageTracker() as tracker, _gloo_lets_go():
        job = build()
        plan = job.plan
        for step in range(-plan.lead, steps - plan.lead, plan.span):
            job.step(step, steps)
        found = int(tracker.peak_bytes)
        for step in range(steps - plan.lead, steps, plan.span):
            job.step(step, steps)
        job.finish()
    order = 8 * plan.step_samples if job.inputs else 0
    return found + _counter_bytes(job.update.optimizer) - order


def _counter_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of an optimizer's counters of steps, which torch makes without an operator."""
    states = [] if optimizer is None else optimizer.state.values()
    values = [value for state in states for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor) and not value.dim())


@contextmanager
def _gloo_lets_go() -> Iterator[None]:
    """Wait behind every sum until gloo's thread, which is done with it, has let go of the tensors, too."""
    with ExitStack() as stack:
        for name in ("all_reduce", "all_gather"):
            stack.enter_context(patch.object(GroupTransport, name, _waiting(getattr(GroupTransport, name))))
        yield


def _waiting(begin: Callable[..., Any]) -> Callable[..., Later]:
    def act(transport: GroupTransport, *arguments: Any, **options: Any) -> Later:  # noqa: ANN401
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        work = [begin(transport, *arguments, **options)]

        def wait() -> None:
            if not work:
                return
            work.pop().wait()
            for _ in range(_MOST_YIELDS):
                if all(each._use_count() == 1 for each in tensors):
                    break
                os.sched_yield()
            tensors.clear()

        return Later(wait)

    return act
