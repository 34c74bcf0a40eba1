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

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.api import (
        Cluster,
        Plan,
        Timeline,
        checkpoints,
        compare,
        estimate,
        export,
        export_checkpoint,
        import_layout,
        import_pipedream,
        import_piper,
        import_profiles,
        import_torchtitan,
        links,
        plan,
        probe,
        profile,
        recalibrate,
        rehearse,
        show,
        simulate,
        train,
        verify,
    )
    from autopar.formats.profile import Profile
    from autopar.runtime.start.materialize import materialize

__all__ = [
    "Cluster",
    "Plan",
    "Profile",
    "Timeline",
    "checkpoints",
    "compare",
    "estimate",
    "export",
    "export_checkpoint",
    "import_layout",
    "import_pipedream",
    "import_piper",
    "import_profiles",
    "import_torchtitan",
    "links",
    "materialize",
    "plan",
    "probe",
    "profile",
    "recalibrate",
    "rehearse",
    "show",
    "simulate",
    "train",
    "verify",
]

_HOMES = {"Profile": "autopar.formats.profile", "materialize": "autopar.runtime.start.materialize"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "autopar.api")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
