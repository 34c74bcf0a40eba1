"""Profile as tables: layers, what crosses their boundaries, totals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.markup import escape

from autopar.report.quantity import duration, percentage, size
from autopar.report.table import new_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

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
    columns = ("index", "layer", ">parameters", ">forward", ">backward", ">saved", ">peak", ">crosses")
    table = new_table(f"Layers (micro-batch of {rows}, each)", columns, folded="layer", footer=True)
    crossing = profile.crossing_bytes()
    for first, last in _alike(profile):
        layer, cost = profile.layers[first], profile.layers[first].costs[-1]
        table.add_row(
            f"{first}-{last}" if last > first else str(first),
            escape(layer.name) + (" .." if last > first else ""),
            size(layer.parameters_bytes),
            duration(cost.forward_s),
            duration(cost.backward_s),
            size(_saved(cost)),
            size(cost.peak_bytes),
            size(crossing[last] * rows) if last + 1 < len(profile.layers) else "",
        )
    for column, footer in zip(table.columns, _totals(profile), strict=True):
        column.footer = footer
    return table


def _alike(profile: Profile) -> Iterator[tuple[int, int]]:
    """Yield the first and the last index of every run of layers that share a measurement and a boundary's bytes."""
    crossing = profile.crossing_bytes()
    first = 0
    for index, layer in enumerate(profile.layers):
        leader = profile.layers[first]
        alike = layer.measured_as == (leader.measured_as or leader.name) and crossing[index] == crossing[first]
        if index > first and not alike:
            yield first, index - 1
            first = index
    yield first, len(profile.layers) - 1


def _totals(profile: Profile) -> tuple[str, ...]:
    costs = [layer.costs[-1] for layer in profile.layers]
    return (
        "",
        f"{len(profile.layers)} layers",
        size(_parameters(profile.layers) - _shared(profile)),
        duration(sum(cost.forward_s for cost in costs)),
        duration(sum(cost.backward_s for cost in costs)),
        size(sum({saved.storage: saved.bytes for cost in costs for saved in cost.saved}.values())),
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
