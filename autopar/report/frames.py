"""Frames: what objects hold as pandas' tables of numbers, and the units in which people read them.

Names of columns end in their units: ``_s``, ``_bytes``, ``_bytes_per_s``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.report.table import bandwidth, duration, figure, size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pandas import DataFrame
    from pandas.io.formats.style import Styler

    from autopar.formats.cluster import Cluster
    from autopar.formats.contest import ContestRow
    from autopar.formats.plan import Plan
    from autopar.formats.prediction import Throughput
    from autopar.formats.profile import Profile
    from autopar.formats.report import ComparisonRow, Report
    from autopar.formats.timeline import Timeline


_UNITS: dict[str, Callable[[Any], str]] = {
    "_bytes_per_s": bandwidth,
    "_bytes": size,
    "_bytes_per_sample": size,
    "_per_s": figure,
    "_s": duration,
}


def style(frame: DataFrame) -> Styler:
    """Return a frame as pandas shows it, with its seconds, bytes and bandwidths in the units that people read.

    >>> from pandas import DataFrame
    >>> print(style(DataFrame({"step_s": [0.0125], "peak_bytes": [2**30]})).to_string(delimiter=" | "))
     | step_s | peak_bytes
    0 | 12.5 ms | 1 GiB
    <BLANKLINE>
    """
    formats: dict[Any, Any] = {
        name: next(unit for end, unit in _UNITS.items() if str(name).endswith(end))
        for name in frame.columns
        if str(name).endswith(tuple(_UNITS))
    }
    shown = frame.style.format(escape="html", na_rep="", precision=4).format(formats, na_rep="", escape="html")
    return shown.format_index(escape="html").format_index(escape="html", axis=1)


def profile_frame(profile: Profile) -> DataFrame:
    """Return one row per layer and micro-batch size, with the bytes per sample that cross behind the layer."""
    import pandas

    crossing = profile.crossing_bytes()
    rows = [
        {
            "layer": layer.name,
            "micro_batch": cost.micro_batch,
            "forward_s": cost.forward_s,
            "backward_s": cost.backward_s,
            "backward_input_s": cost.backward_input_s,
            "backward_weight_s": cost.backward_weight_s,
            "recompute_s": cost.recompute_s,
            "update_s": layer.update_s,
            "saved_bytes": cost.saved_bytes,
            "peak_bytes": cost.peak_bytes,
            "parameters_bytes": layer.parameters_bytes,
            "crossing_bytes_per_sample": crossing[index],
            "measured_as": layer.measured_as or layer.name,
            "provenance": cost.provenance,
        }
        for index, layer in enumerate(profile.layers)
        for cost in layer.costs
    ]
    return pandas.DataFrame(rows).set_index(["layer", "micro_batch"])


def cluster_frame(cluster: Cluster) -> DataFrame:
    """Return one row per device."""
    import pandas

    return pandas.DataFrame([device.model_dump() for device in cluster.devices]).rename_axis("device")


def plan_frame(plan: Plan) -> DataFrame:
    """Return one row per stage."""
    import pandas

    predicted = plan.predicted
    rows = [
        {
            "first_layer": stage.layers[0],
            "last_layer": stage.layers[-1],
            "layers": len(stage.layers),
            "devices": stage.devices,
            "replicas": stage.replicas,
            "shares": stage.shares,
            "in_flight": stage.warmup,
            "recomputed": len(stage.recompute),
            "shard": stage.shard,
        }
        for stage in plan.stages
    ]
    for index, row in enumerate(rows if plan.pipelines else ()):
        row["pipeline"] = plan.pipeline_of(index)
    known = {name: getattr(predicted, name) for name in ("forward_s", "backward_s", "peak_bytes", "limit_bytes")}
    frame = pandas.DataFrame(rows).rename_axis("stage")
    return frame.assign(**{name: list(values) or None for name, values in known.items()})


def timeline_frame(timeline: Timeline) -> DataFrame:
    """Return one row per action of a rank, in the order in which they were recorded."""
    import pandas

    actions = timeline.actions
    columns = {
        "rank": timeline.ranks,
        "action": list(map(str, actions)),
        "kind": [action.kind for action in actions],
        "stage": [action.stage for action in actions],
        "micro_batch": [action.micro_batch for action in actions],
        "start_s": timeline.starts_s,
        "end_s": timeline.ends_s,
    }
    return pandas.DataFrame(columns)


def report_frame(report: Report) -> DataFrame:
    """Return one row per step: its loss, the loss's terms by name, and the norm of the gradients where it is known."""
    import pandas

    columns: dict[str, Sequence[float | None]] = {"loss": report.loss, **report.losses}
    if report.gradient_norm:
        columns["gradient_norm"] = report.gradient_norm
    steps = range(report.first_step + 1, report.first_step + 1 + len(report.loss))
    return pandas.DataFrame(columns, index=pandas.Index(steps, name="step"))


def _figures(throughput: Throughput | None) -> dict[str, Any]:
    return {} if throughput is None else throughput.model_dump(exclude={"unit", "whole"})


def comparison_frame(rows: Sequence[ComparisonRow]) -> DataFrame:
    """Return one row per planner."""
    import pandas

    every = [{**row._asdict(), **_figures(row.throughput)} for row in rows]
    frame = pandas.DataFrame(every).drop(columns="throughput")
    return frame.set_index("name").rename_axis("planner")


def contest_frame(rows: Sequence[ContestRow], loss: float | None) -> DataFrame:
    """Return one row per contestant, with the mean of its last losses, and the least and the largest over seeds."""
    import pandas

    every = [
        {
            **{name: each for name, each in row.as_dict(loss).items() if name not in ("loss", "losses")},
            **dict(zip(("loss", "loss_least", "loss_most"), row.spread or (None,) * 3, strict=True)),
        }
        for row in rows
    ]
    return pandas.DataFrame(every).set_index("name").rename_axis("contestant")


def losses_frame(rows: Sequence[ContestRow]) -> DataFrame:
    """Return one row per mini-batch, and a column for every contestant and seed; none behind where a run ended."""
    import pandas

    columns = {
        (row.contestant.name, at): pandas.Series(each.loss, dtype=float)
        for row in rows
        for at, each in enumerate(row.results)
    }
    frame = pandas.DataFrame(columns)
    frame.columns = pandas.MultiIndex.from_tuples(columns, names=["contestant", "seed"])
    return frame.set_axis(range(1, len(frame) + 1)).rename_axis("mini-batch")
