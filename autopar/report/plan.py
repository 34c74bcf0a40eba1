"""Plan as tables: its stages, what is predicted, and the alternatives."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from autopar.formats.document import least_certain
from autopar.report.bounds import binding_text, bound_rows, share_text
from autopar.report.quantity import duration, figure, percentage, size
from autopar.report.table import Table, as_text, fill, say

if TYPE_CHECKING:
    from rich.console import Console

    from autopar.formats.plan import Plan, Stage
from autopar.formats.predicted import Price

MOST_STAGES = 48
"""Of an alternative, in full."""


def explained(plan: Plan) -> str:
    """Return as plain text what ``autopar plan`` ends with: stages, bounds, what binds, alternatives."""
    return as_text(partial(render, plan))


def render(plan: Plan, console: Console) -> None:
    """Print a plan's stages, its prediction, and the alternatives."""
    count = len(plan.stages)
    devices = len(plan.devices)
    wanted = "" if plan.objective == "step" else f" (objective {plan.objective})"
    chunks = len(plan.groups[0])
    shared = f", {chunks} on each" if chunks > 1 else ""
    title = (
        f"plan of {plan.model.source}{wanted}: {count} stage{'s' if count > 1 else ''} on {devices} "
        f"device{'s' if devices > 1 else ''}{shared}, {plan.schedule}{_policy(plan)}, "
        f"{plan.micro_batches} x {plan.micro_batch_size} samples, {plan.precision}"
    )
    say(console, title)
    console.print(_stages(plan))
    if chunks > 1:
        say(console, "peak memory is that of all stages of a device")
    if any(stage.types for stage in plan.stages):
        say(console, _kinds(plan))
    console.print(_prediction(plan))
    for name, text in (("what binds", binding_text(plan)), ("ranks' time", share_text(plan))):
        if text:
            say(console, f"{name}: {text}")
    if plan.alternatives:
        console.print(_alternatives(plan))
    for note in (*plan.caveats, *plan.notes):
        say(console, f"note: {note}")


def _policy(plan: Plan) -> str:
    return "" if plan.weight_policy == "sync" else " without a pause, with stashed weights"


def _stages(plan: Plan) -> Table:
    predicted = plan.predicted
    computed = (">forward", ">backward")
    columns = (">stage", "layers", "devices", "shares", ">in flight", *computed, ">peak memory", ">headroom")
    known = set(predicted.compute)
    title = f"Stages (times of one micro-batch{f', {min(known)}' if len(known) == 1 else ''})"
    table = Table(title, (*columns, "known") if len(known) > 1 else columns)
    rows: list[tuple[str, ...]] = []
    for index, stage in enumerate(plan.stages):
        times = [duration(numbers[index]) if numbers else "" for numbers in (predicted.forward_s, predicted.backward_s)]
        peak = predicted.peak_bytes[index]
        headroom = size(max(0, predicted.limit_bytes[index] - peak)) if predicted.limit_bytes else ""
        numbers = (_ranges(stage.devices), _shares(stage.shares), str(stage.warmup))
        numbers = (numbers[0], f"{numbers[1]}{_manner(stage)}", numbers[2])
        row = (str(index), _layers(stage), *numbers, *times, size(peak), headroom)
        rows.append((*row, *(predicted.compute[index : index + 1] if len(known) > 1 else ())))
    fill(table, rows)
    return table


def _kinds(plan: Plan) -> str:
    """Return which stages are on which kind of device."""
    stages: dict[str, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        stages.setdefault(" and ".join(stage.types), []).append(index)
    return "; ".join(f"on {kinds}: stage {_ranges(tuple(each))}" for kinds, each in stages.items())


def _manner(stage: Stage) -> str:
    """Return how a stage is run, where it is out of the ordinary."""
    found = ["in turns"] if stage.division == "round-robin" else []
    if stage.tensor_parallel > 1:
        found.append(f"{stage.tensor_parallel} devices each")
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


def few_stages(stages: str) -> str:
    """Return stages as they are; of more than :data:`MOST_STAGES` the first and the last ones.

    >>> few_stages("0-1:1,2:4"), few_stages(",".join(f"{layer}:1" for layer in range(100)))
    ('0-1:1,2:4', '0:1,1:1,2:1, ... 94 more ..., 97:1,98:1,99:1')
    """
    each = stages.split(",")
    if len(each) <= MOST_STAGES:
        return stages
    ends = (",".join(part) for part in (each[:3], each[-3:]))
    return f", ... {len(each) - 6} more ..., ".join(ends)


def _prediction(plan: Plan) -> Table:
    predicted = plan.predicted
    table = Table("Predicted", ("", ""))
    table.add_row("step" if plan.weight_policy == "sync" else "per mini-batch", duration(predicted.step_s))
    if predicted.objective_s is not None:
        unit = {"pipedream": "PipeDream's, per mini-batch", "piper": "Piper's, per micro-batch"}
        table.add_row(f"slowest stage ({unit.get(plan.objective, plan.objective)})", duration(predicted.objective_s))
    if predicted.step_s > 0:
        table.add_row("samples per second", figure(plan.batch / predicted.step_s))
    if predicted.price is not None:
        _add_price(table, predicted.price)
    elif predicted.lower_bound_s > 0 or plan.objective == "step":
        for row in bound_rows(plan):
            table.add_row(*row)
    table.add_row("bubble", percentage(predicted.bubble))
    computing = least_certain(predicted.compute)
    if computing is not None:
        table.add_row("computing times", computing)
    if predicted.communication is not None:
        table.add_row("communication times", predicted.communication)
    return table


def _add_price(table: Table, price: Price) -> None:
    table.add_row("price of its devices per hour", figure(price.per_hour))
    table.add_row("cost of a step", figure(price.per_step))
    table.add_row("cost of a million samples", figure(price.per_million_samples))
    if price.deadline_s is not None:
        table.add_row("deadline of a step", duration(price.deadline_s))
    table.add_row("least that a step may cost", figure(price.lower_bound_per_step))
    if price.lower_bound_per_step > 0:
        table.add_row("gap to it", percentage(price.per_step / price.lower_bound_per_step - 1))


def _alternatives(plan: Plan) -> Table:
    price = plan.predicted.price
    columns: tuple[str, ...] = ("alternative", ">step", ">against plan")
    columns += (">cost of a step", ">cost against plan") if price is not None else ()
    columns += ("schedule", ">micro-batches", "stages, or why not")
    table = Table("Alternatives", columns)
    for each in plan.alternatives:
        if each.step_s is None:
            table.add_row(each.name, *[""] * (len(columns) - 2), each.infeasible or "")
            continue
        count = "" if each.micro_batches is None else str(each.micro_batches)
        name = each.name if each.excluded is None else f"{each.name} (excluded by {each.excluded})"
        row = [name, duration(each.step_s), _against(each.step_s, plan.predicted.step_s)]
        if price is not None:
            cost = each.price_per_step
            row += ["", ""] if cost is None else [figure(cost), _against(cost, price.per_step)]
        table.add_row(*row, each.schedule or "", count, few_stages(each.stages or ""))
    return table


def _against(value: float, planned: float) -> str:
    return percentage(value / planned - 1, signed=True) if planned > 0 else ""
