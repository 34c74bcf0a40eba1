"""Plans as pandas frames, for notebooks."""

from __future__ import annotations

import pandas as pd

from autopar.formats.plan import Plan


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
