"""Plan as tables: its stages, what is predicted, and the alternatives."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

from rich.markup import escape

from autopar.formats.document import least_certain
from autopar.report.bounds import binding_text, bound_rows, share_text
from autopar.report.quantity import duration, percentage, size
from autopar.report.table import new_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from autopar.formats.plan import Plan, Stage

__all__ = ["explained", "render"]

WIDTH = 120


def explained(plan: Plan) -> str:
    """Return as plain text what ``autopar plan`` ends with: stages, bounds, what binds, alternatives."""
    from rich.console import Console

    text = StringIO()
    render(plan, Console(file=text, width=WIDTH, color_system=None))
    return text.getvalue()


def render(plan: Plan, console: Console) -> None:
    """Print a plan's stages, its prediction, and the alternatives."""
    count = len(plan.stages)
    devices = len(plan.devices)
    title = (
        f"plan of {plan.model.source}: {count} stage{'s' if count > 1 else ''} on {devices} "
        f"device{'s' if devices > 1 else ''}, {plan.schedule}, "
        f"{plan.micro_batches} x {plan.micro_batch_size} samples, {plan.precision}"
    )
    console.print(title, highlight=False, markup=False)
    console.print(_stages(plan))
    console.print(_prediction(plan))
    for name, text in (("what binds", binding_text(plan)), ("ranks' time", share_text(plan))):
        if text:
            console.print(f"{name}: {text}", highlight=False, markup=False)
    if plan.alternatives:
        console.print(_alternatives(plan))
    for note in plan.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def _stages(plan: Plan) -> Table:
    predicted = plan.predicted
    computed = (">forward", ">backward")
    columns = (">stage", "layers", "devices", "shares", ">in\nflight", *computed, ">peak\nmemory", ">headroom")
    known = set(predicted.compute)
    title = f"Stages (times of one micro-batch{f', {min(known)}' if len(known) == 1 else ''})"
    table = new_table(title, (*columns, "known") if len(known) > 1 else columns, folded="layers")
    for index, stage in enumerate(plan.stages):
        times = [duration(numbers[index]) if numbers else "" for numbers in (predicted.forward_s, predicted.backward_s)]
        peak = predicted.peak_bytes[index]
        headroom = size(max(0, predicted.limit_bytes[index] - peak)) if predicted.limit_bytes else ""
        numbers = (_ranges(stage.devices), _shares(stage.shares), str(stage.warmup))
        numbers = (numbers[0], f"{numbers[1]}{_manner(stage)}", numbers[2])
        row = (str(index), escape(_layers(stage)), *numbers, *times, size(peak), headroom)
        table.add_row(*row, *(predicted.compute[index : index + 1] if len(known) > 1 else ()))
    return table


def _manner(stage: Stage) -> str:
    """Return how a stage is run, where it is out of the ordinary."""
    found = ["in turns"] if stage.division == "round-robin" else []
    if stage.recompute:
        every = len(stage.recompute) == len(stage.layers)
        found.append("recomputes " + ("all" if every else f"{len(stage.recompute)} of {len(stage.layers)}"))
    if stage.shard != "none":
        found.append(f"shards {stage.shard}")
    return "".join(f"\n{each}" for each in found)


def _ranges(numbers: tuple[int, ...]) -> str:
    """Return consecutive numbers as a range.

    >>> _ranges((0, 1, 2)), _ranges((3,)), _ranges((0, 2))
    ('0-2', '3', '0, 2')
    """
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 2 and numbers == tuple(range(first, last + 1)):
        return f"{first}-{last}"
    return ", ".join(map(str, numbers))


def _shares(shares: tuple[float, ...]) -> str:
    if len(set(shares)) == 1:
        return f"{len(shares)} x {shares[0]:g}"
    return "+".join(f"{share:g}" for share in shares)


def _layers(stage: Stage) -> str:
    if len(stage.layers) == 1:
        return stage.layers[0]
    return f"{stage.layers[0]} .. {stage.layers[-1]}"


def _prediction(plan: Plan) -> Table:
    predicted = plan.predicted
    table = new_table("Predicted", ("", ""))
    table.add_row("step", duration(predicted.step_s))
    if predicted.step_s > 0:
        table.add_row("samples per second", f"{plan.batch / predicted.step_s:.4g}")
    for row in bound_rows(plan):
        table.add_row(*row)
    table.add_row("bubble", percentage(predicted.bubble))
    computing = least_certain(predicted.compute)
    if computing is not None:
        table.add_row("computing times", computing)
    if predicted.communication is not None:
        table.add_row("communication times", predicted.communication)
    return table


def _alternatives(plan: Plan) -> Table:
    columns = ("alternative", ">step", ">against\nplan", "schedule", ">micro-\nbatches", "stages, or why not")
    table = new_table("Alternatives", columns, folded="stages, or why not")
    for each in plan.alternatives:
        if each.step_s is None:
            table.add_row(escape(each.name), "", "", "", "", escape(each.infeasible or ""))
            continue
        slower = percentage(each.step_s / plan.predicted.step_s - 1, signed=True) if plan.predicted.step_s > 0 else ""
        count = "" if each.micro_batches is None else str(each.micro_batches)
        row = (each.name, duration(each.step_s), slower, each.schedule or "", count, each.stages or "")
        table.add_row(*map(escape, row))
    return table
