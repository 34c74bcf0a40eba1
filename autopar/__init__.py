"""autopar: measure a PyTorch model, plan the fastest way to train it, train it that way.

In Python, with the model at hand::

    profile = autopar.profile(model, batch, loss=loss)
    plan = autopar.plan(profile, autopar.Cluster.of("8xH100"))
    job = autopar.materialize(model, plan, loss=loss, optimizer=make_optimizer)
    for batch in loader:
        metrics = job.step(batch)

Names are loaded when they are first used: planning does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar import api

if TYPE_CHECKING:
    from autopar.api import *  # noqa: F403

__all__ = api.__all__


def __getattr__(name: str) -> object:
    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
