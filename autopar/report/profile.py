"""Profile as tables: layers, what crosses their boundaries, totals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from autopar.report.quantity import duration, percentage, size

if TYPE_CHECKING:
    from rich.console import Console

    from autopar.formats.profile import Cost, Layer, Profile

__all__ = ["render"]


def render(profile: Profile, console: Console) -> None:
    """Print a profile's layers at the largest size measured, totals and notes."""
    device = profile.device
    threads = f", {device.threads} thread{'s' if device.threads > 1 else ''} per rank" if device.type == "cpu" else ""
    title = f"profile of {profile.model.source}: {profile.precision} on {device.name}{threads}"
    console.print(title, highlight=False, markup=False)
    console.print(_layers(profile))
    spread = f"median {percentage(profile.noise.median_spread)}, largest {percentage(profile.noise.max_spread)}"
    console.print(f"spread of the times: {spread}", highlight=False, markup=False)
    overhead = duration(profile.step_overhead_s)
    console.print(f"loading a mini-batch of {profile.batch}: {overhead}", highlight=False, markup=False)
    for tied in profile.tied:
        console.print(f"tied: {tied.parameter} in {', '.join(tied.layers)}", highlight=False, markup=False)
    for note in profile.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def _layers(profile: Profile) -> Table:
    rows = profile.layers[0].costs[-1].micro_batch
    columns = ("layer", "parameters", "optimizer", "forward", "backward", "saved", "peak", "crosses", "measured")
    table = Table(*columns, title=f"Layers (micro-batch of {rows})", title_justify="left", show_footer=True)
    for index, layer in enumerate(profile.layers):
        cost = layer.costs[-1]
        table.add_row(
            escape(layer.name),
            size(layer.parameters_bytes),
            size(layer.optimizer_bytes),
            duration(cost.forward_s),
            duration(cost.backward_s),
            size(_saved(cost)),
            size(cost.peak_bytes),
            size(_crossing(profile, index) * rows) if index + 1 < len(profile.layers) else "",
            f"{cost.repeats} x" if layer.measured_as is None else f"as {escape(layer.measured_as)}",
        )
    for column, footer in zip(table.columns, _totals(profile), strict=True):
        column.footer = footer
        column.justify = "left" if column.header in ("layer", "measured") else "right"
    return table


def _totals(profile: Profile) -> tuple[str, ...]:
    costs = [layer.costs[-1] for layer in profile.layers]
    return (
        f"{len(profile.layers)} layers",
        size(_parameters(profile.layers) - _shared(profile)),
        size(sum(layer.optimizer_bytes for layer in profile.layers)),
        duration(sum(cost.forward_s for cost in costs)),
        duration(sum(cost.backward_s for cost in costs)),
        size(sum({saved.storage: saved.bytes for cost in costs for saved in cost.saved}.values())),
        "",
        "",
        "",
    )


def _parameters(layers: tuple[Layer, ...]) -> int:
    return sum(layer.parameters_bytes for layer in layers)


def _shared(profile: Profile) -> int:
    """Return the bytes of tied parameters that layers count more than once."""
    return sum(tied.bytes * (len(tied.layers) - 1) for tied in profile.tied)


def _saved(cost: Cost) -> int:
    return sum(saved.bytes for saved in cost.saved)


def _crossing(profile: Profile, index: int) -> int:
    """Return the bytes per sample that cross the boundary behind a layer."""
    order = {layer.name: place for place, layer in enumerate(profile.layers)}
    return sum(
        tensor.bytes_per_sample
        for tensor in profile.tensors
        if tensor.producer is not None
        and order[tensor.producer] <= index < max(order[consumer] for consumer in tensor.consumers)
    )
