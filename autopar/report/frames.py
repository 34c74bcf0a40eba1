"""Profiles and plans as pandas frames, for notebooks."""

from __future__ import annotations

import pandas as pd

from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.report.profile import crossing_bytes

__all__ = ["alternatives", "layers", "stages"]


def layers(profile: Profile) -> pd.DataFrame:
    """Return one row per layer and measured micro-batch size, with the bytes per sample that cross behind the layer."""
    crossing = crossing_bytes(profile)
    rows = [
        {
            "layer": layer.name,
            "micro_batch": cost.micro_batch,
            "forward_s": cost.forward_s,
            "backward_s": cost.backward_s,
            "saved_bytes": sum(saved.bytes for saved in cost.saved),
            "peak_bytes": cost.peak_bytes,
            "parameters_bytes": layer.parameters_bytes,
            "crossing_bytes_per_sample": crossing[index],
            "measured_as": layer.measured_as or layer.name,
        }
        for index, layer in enumerate(profile.layers)
        for cost in layer.costs
    ]
    return pd.DataFrame(rows).set_index(["layer", "micro_batch"])


def stages(plan: Plan) -> pd.DataFrame:
    """Return one row per stage."""
    rows = [
        {
            "stage": index,
            "first_layer": stage.layers[0],
            "last_layer": stage.layers[-1],
            "layers": len(stage.layers),
            "devices": list(stage.devices),
            "shares": list(stage.shares),
            "in_flight": stage.warmup,
            "peak_bytes": plan.predicted.peak_bytes[index],
        }
        for index, stage in enumerate(plan.stages)
    ]
    return pd.DataFrame(rows).set_index("stage")


def alternatives(plan: Plan) -> pd.DataFrame:
    """Return one row per alternative, quickest first, those that cannot be last."""
    rows = [alternative.model_dump() for alternative in plan.alternatives]
    columns = ["name", "step_s", "stages", "micro_batches", "schedule", "infeasible"]
    return pd.DataFrame(rows, columns=columns).sort_values("step_s", na_position="last", ignore_index=True)
