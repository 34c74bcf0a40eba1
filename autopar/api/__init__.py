"""What autopar does in Python: a function for each command, and the objects that functions take and return.

Read ``calls`` first. Names are loaded when they are first used: planning imports no torch.
"""

# Type checkers look into the modules; the list below says what of them is public.
# ruff: noqa: F403, F405

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from autopar import errors

if TYPE_CHECKING:
    from autopar.api.calls import *
    from autopar.api.imports import *
    from autopar.api.objects import *
    from autopar.api.rehearsals import rehearse
    from autopar.api.runs import recalibrate
    from autopar.api.surroundings import environment
    from autopar.api.views import show
    from autopar.errors import *
    from autopar.runtime.start.materialize import materialize
    from autopar.schedules.check import ProgramError

__all__ = [
    "AutoparError",
    "CaptureError",
    "Cluster",
    "Comparison",
    "FileError",
    "InfeasibleError",
    "ModelError",
    "OutOfMemoryError",
    "Plan",
    "Profile",
    "ProgramError",
    "Report",
    "RunComparison",
    "Timeline",
    "TrainingError",
    "UsageError",
    "checkpoints",
    "compare",
    "compare_runs",
    "environment",
    "errors",
    "estimate",
    "export",
    "export_checkpoint",
    "import_layout",
    "import_pipedream",
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

_HOMES = {
    "ProgramError": "autopar.schedules.check",
    **dict.fromkeys(
        ("Cluster", "Comparison", "Plan", "Profile", "Report", "RunComparison", "Timeline"), "autopar.api.objects"
    ),
    "recalibrate": "autopar.api.runs",
    "environment": "autopar.api.surroundings",
    "show": "autopar.api.views",
    "materialize": "autopar.runtime.start.materialize",
    "rehearse": "autopar.api.rehearsals",
}
"""Where names are that are neither in ``calls`` nor in ``imports``."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    if hasattr(errors, name):
        return getattr(errors, name)
    home = "autopar.api.imports" if name.startswith("import_") else "autopar.api.calls"
    return getattr(import_module(_HOMES.get(name, home)), name)
