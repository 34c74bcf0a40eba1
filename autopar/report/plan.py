"""Plans as tables and text: stages, predictions, bounds and what binds them, alternatives, and comparisons.

A plan's memory: each stage's predicted peak beside what it was found to hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from autopar.formats.document import MOST_RANKS, least_certain
from autopar.formats.prediction import BoundPart, Price
from autopar.formats.report import ComparisonRow
from autopar.report.folding import ranges
from autopar.report.table import Part, Table, duration, figure, fill, percentage, size
from autopar.report.throughput import throughput_cells, throughput_columns, throughput_rows

if TYPE_CHECKING:
    from autopar.formats.plan import Plan
    from autopar.formats.prediction import Throughput
    from autopar.formats.stage import Stage


def bound_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return the stack of bounds, weakest first, and the gap of the step to the last, which is the plan's own."""
    predicted, bounds = plan.predicted, plan.predicted.bounds
    least_s = predicted.lower_bound_s
    rows = [("lower bound", least_s)]
    if bounds is not None:
        work = ("bound of any plan: work alone", bounds.work_s)
        if len(plan.groups[0]) == 1:
            # The others are of plans with one stage on every device.
            links = [("one stage a device: contiguous", bounds.contiguous_s), ("+ links", bounds.linked_s)]
            rows = [work, *links, ("+ memory: their lower bound", least_s)]
        else:
            rows = [work, *(rows if least_s > bounds.work_s else [])]
    gap = [("gap to it", percentage(predicted.step_s / least_s - 1))] if least_s > 0 else []
    if bounds is not None and len(plan.groups[0]) > 1 and bounds.linked_s > bounds.work_s:
        # Chosen beside plans with one stage on every device, which are bounded, if not above this one's step.
        gap.append(("one stage a device: at least", duration(max(bounds.linked_s, predicted.lower_bound_s))))
    return [*((name, duration(seconds)) for name, seconds in rows), *gap]


def binding_text(plan: Plan) -> str:
    """Return what binds a plan, by its own bound; empty where unknown."""
    parts = plan.predicted.binding
    if not parts:
        return ""
    own_s = sum(part.seconds for part in parts)
    found = f"{_term(plan, parts[0])}: {duration(parts[0].seconds)} of its own bound of {duration(own_s)}"
    if len(parts) > 1:
        found += f"; then {_term(plan, parts[1])}: {duration(parts[1].seconds)}"
    return found


def _term(plan: Plan, part: BoundPart) -> str:
    stage, depth = part.stage, plan.stages[part.stage].warmup
    return {
        "compute": f"computing on stage {stage}",
        "round trip": f"round trips of stage {stage} with {depth} in flight"
        + (", more than which its memory does not hold" if part.full else ""),
        "link": f"messages between stages {stage} and {stage + 1}",
        "filling": f"filling and draining the pipeline around stage {stage}",
        "synchronisation": f"gradient synchronisation of stage {stage}",
        "update": f"the update of stage {stage}",
        "overhead": "the step's overhead",
    }[part.term]


def share_text(plan: Plan) -> str:
    """Return what the ranks' time goes to; empty where unknown."""
    shares = plan.predicted.shares
    if shares is None:
        return ""
    named = {
        "computing": shares.computing,
        "waiting for messages": shares.messages,
        "for gradients to be reduced": shares.reduction,
        "idle": shares.idle,
    }
    return ", ".join(f"{name} {percentage(share)}" for name, share in named.items())


MOST_STAGES = 48
"""Of an alternative, in full."""


def title_of(plan: Plan) -> str:
    """Return of which model a plan is, and in how many stages, micro-batches and samples it trains."""
    count = len(plan.stages)
    devices = len(plan.devices)
    wanted = "" if plan.objective == "step" else f" (objective {plan.objective})"
    chunks = len(plan.groups[0])
    shared = f", {chunks} on each" if chunks > 1 else ""
    named = plan.weight_policy if plan.ahead == "counted" else f"{plan.weight_policy}, {plan.ahead}"
    if plan.pipelines:
        named += f", waves of {plan.wave}, staleness {plan.staleness}{', eager' if plan.eager else ''}"
    average = "" if plan.ema_decay is None else f", average of weights ({plan.ema_decay:g})"
    several = f" in {len(plan.pipelines)} pipelines" if plan.pipelines else ""
    return (
        f"plan of {plan.model.source}{wanted}: {count} stage{'s' if count > 1 else ''}{several} on {devices} "
        f"device{'s' if devices > 1 else ''}{shared}, {plan.schedule}{plan.policy.title(named)}, "
        f"{plan.micro_batches} x {plan.micro_batch_size} samples, {plan.precision}{average}"
    )


def render(plan: Plan, throughput: Throughput | None = None) -> Iterator[Part]:
    """Yield a plan's stages, its prediction, what its step is in other units if that is known, and alternatives."""
    chunks = len(plan.groups[0])
    yield title_of(plan)
    yield _stages(plan)
    if chunks > 1:
        yield "peak memory is that of all stages of a device"
    if any(stage.types for stage in plan.stages):
        yield _kinds(plan)
    yield _prediction(plan, plan.predicted.throughput or throughput)
    for name, text in (("what binds", binding_text(plan)), ("ranks' time", share_text(plan))):
        if text:
            yield f"{name}: {text}"
    if plan.alternatives:
        yield _alternatives(plan)
    for note in (*plan.caveats, *plan.notes):
        yield f"note: {note}"


def _stages(plan: Plan) -> Table:
    predicted = plan.predicted
    computed = (">forward", ">backward")
    pipeline = (">pipeline",) if plan.pipelines else ()
    columns = (
        *pipeline,
        ">stage",
        "layers",
        "devices",
        "shares",
        ">in flight",
        *computed,
        ">peak memory",
        ">headroom",
        "known",
    )
    known = set(predicted.compute)
    title = f"Stages (times of one micro-batch{f', {min(known)}' if len(known) == 1 else ''})"
    table = Table(title, columns)
    rows: list[tuple[str, ...]] = []
    for index, stage in enumerate(plan.stages):
        times = [duration(numbers[index]) if numbers else "" for numbers in (predicted.forward_s, predicted.backward_s)]
        peak = predicted.peak_bytes[index]
        headroom = size(max(0, predicted.limit_bytes[index] - peak)) if predicted.limit_bytes else ""
        shares = f"{_shares(stage.shares)}{_manner(stage)}"
        row = (
            *(str(plan.pipeline_of(index)) for _ in pipeline),
            str(index),
            _layers(stage),
            ranges(stage.devices, most=MOST_RANKS),
            shares,
            str(stage.warmup),
            *times,
            size(peak),
        )
        rows.append((*row, headroom, *(predicted.compute[index : index + 1] if len(known) > 1 else ())))
    fill(table, rows)
    return table


def stage_texts(plan: Plan) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield a line for every stage, and what there is to be said of it."""
    for index, stage in enumerate(plan.stages):
        count = len(stage.layers)
        layers = f"{_layers(stage)} ({count} layer{'s' if count > 1 else ''})"
        devices = f"device{'s' if len(stage.devices) > 1 else ''} {ranges(stage.devices, most=MOST_RANKS)}"
        texts = {
            "layers": ", ".join(stage.layers),
            "devices": ", ".join(map(str, stage.devices)),
            "shares": f"{_shares(stage.shares)}{_manner(stage)}".replace("\n", ", "),
            "recomputed": ", ".join(stage.recompute),
            "cut": ", ".join(cut.parameter for cut in stage.cuts),
        }
        of = f" of pipeline {plan.pipeline_of(index)}" if plan.pipelines else ""
        yield (
            f"stage {index}{of}: {layers} on {devices}",
            tuple(f"{name}: {text}" for name, text in texts.items() if text),
        )


def _kinds(plan: Plan) -> str:
    """Return which stages are on which kind of device."""
    stages: dict[str, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        stages.setdefault(" and ".join(stage.types), []).append(index)
    return "; ".join(f"on {kinds}: stage {ranges(each, most=MOST_RANKS)}" for kinds, each in stages.items())


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


def _shares(shares: tuple[float, ...]) -> str:
    if len(set(shares)) == 1:
        return f"{len(shares)} x {shares[0]:g}"
    return "+".join(f"{share:g}" for share in shares)


def _layers(stage: Stage) -> str:
    if len(stage.layers) == 1:
        return stage.layers[0]
    return f"{stage.layers[0]} .. {stage.layers[-1]}"


def _stages_text(stages: str) -> str:
    """Return stages with spaces, where lines may end; of more than :data:`MOST_STAGES` the first and the last ones.

    >>> _stages_text("0-1:1,2:4"), _stages_text(",".join(f"{layer}:1" for layer in range(100)))
    ('0-1:1, 2:4', '0:1, 1:1, 2:1, ... 94 more ..., 97:1, 98:1, 99:1')
    """
    each = stages.split(",")
    few = each if len(each) <= MOST_STAGES else (*each[:3], f"... {len(each) - 6} more ...", *each[-3:])
    return ", ".join(few).replace("/", " / ")


def _prediction(plan: Plan, throughput: Throughput | None) -> Table:
    predicted = plan.predicted
    table = Table("Predicted", ("", ""))
    table.add_row(plan.policy.unit, duration(predicted.step_s))
    if predicted.objective_s is not None:
        unit = {"pipedream": "PipeDream's, per mini-batch", "piper": "Piper's, per micro-batch"}
        table.add_row(f"slowest stage ({unit.get(plan.objective, plan.objective)})", duration(predicted.objective_s))
    for row in throughput_rows(throughput):
        table.add_row(*row)
    if throughput is None and predicted.step_s > 0:
        table.add_row("samples per second", figure(plan.step_samples / predicted.step_s))
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
    price, costs = plan.predicted.price, (">cost of a step", ">cost against plan")
    columns = ("alternative", ">step", ">against plan", *costs, "schedule", ">micro-batches", "stages, or why not")
    table = Table("Alternatives", columns)
    for each in plan.alternatives:
        if each.step_s is None:
            table.add_row(each.name, *[""] * 6, each.infeasible or "")
            continue
        count = "" if each.micro_batches is None else str(each.micro_batches)
        name = each.name if each.excluded is None else f"{each.name} (excluded by {each.excluded})"
        times, cost = (duration(each.step_s), _against(each.step_s, plan.predicted.step_s)), each.price_per_step
        prices = ("", "") if price is None or cost is None else (figure(cost), _against(cost, price.per_step))
        table.add_row(name, *times, *prices, each.schedule or "", count, _stages_text(each.stages or ""))
    return table


def _against(value: float, plan_value: float) -> str:
    return percentage(value / plan_value - 1, with_sign=True) if plan_value > 0 else ""


_WAVES = (
    "note: several pipelines (policy wsp) are never flushed, see older weights, and have whole mini-batches each: a "
    "step is then the time in which they train together as many samples as one mini-batch has"
)
_PRICED = (
    "note: autopar runs no servers of parameters; their steps are priced, and in brackets is how much of a step is "
    "spent on the busiest link"
)


def render_comparison(rows: Sequence[ComparisonRow], own_step_s: float) -> Iterator[Part]:
    """Yield the plans of a comparison against the one that takes ``own_step_s``."""
    units = throughput_columns(row.throughput for row in rows)
    known = (*units, "schedule", ">micro-batches", ">peak memory", "stages, or why not")
    table = Table("Planners", ("planner", ">step", ">over autopar", *known))
    for row in rows:
        count = "" if row.micro_batches is None else str(row.micro_batches)
        peak = "" if row.peak_bytes is None else size(row.peak_bytes)
        stages = row.infeasible or (_stages_text(row.stages) if row.stages else f"priced, not run ({row.priced})")
        if row.waves:
            stages += f" ({row.waves})"
        if row.division == "round-robin" and not row.infeasible:
            stages += " in turns"
        step = "" if row.step_s is None else duration(row.step_s)
        over = "" if row.step_s is None or row.name == "autopar" else _against(row.step_s, own_step_s)
        cells = throughput_cells(row.throughput) if units else ()
        table.add_row(row.name, step, over, *cells, row.schedule or "", count, peak, stages)
    yield table
    if any(row.waves for row in rows):
        yield _WAVES
    if any(row.priced for row in rows):
        yield _PRICED


def render_memory(plan: Plan, held_bytes: Sequence[int]) -> Iterator[Part]:
    """Yield every stage's predicted peak beside the bytes that it was found to hold."""
    columns = (">stage", ">predicted", ">rehearsed", ">predicted over rehearsed", ">device memory")
    table = Table("Memory (largest replica of each stage)", columns)
    limits = plan.predicted.limit_bytes
    for index, (peak, held) in enumerate(zip(plan.predicted.peak_bytes, held_bytes, strict=True)):
        error = percentage(peak / held - 1, with_sign=True) if held else ""
        table.add_row(str(index), size(peak), size(held), error, size(limits[index]) if limits else "")
    yield table


class ClusterRow(NamedTuple):
    """The plan for one of several clusters, or why there is none."""

    cluster: str
    """Its file or name."""
    output: str | None = None
    """The plan's file."""
    plan: Plan | None = None
    throughput: Throughput | None = None
    infeasible: str | None = None
    """Why nothing fits."""

    def as_dict(self) -> dict[str, object]:
        """Return it as JSON has it: the plan with what its step is in other units."""
        if self.plan is None:
            return {"cluster": self.cluster, "infeasible": self.infeasible}
        plan, known = self.plan.model_dump(mode="json"), self.throughput
        if known is not None:
            plan["predicted"]["throughput"] = known.model_dump(mode="json")
        return {"cluster": self.cluster, "output": self.output, "plan": plan}


def render_clusters(rows: Sequence[ClusterRow]) -> Iterator[Part]:
    """Yield the plans for several clusters beside each other."""
    units = throughput_columns(row.throughput for row in rows)
    known = (*units, ">devices", ">stages", "schedule", ">micro-batches", "written to, or why not")
    table = Table("Clusters", ("cluster", ">step", *known))
    for row in rows:
        if row.plan is None:
            table.add_row(row.cluster, *[""] * (len(known)), row.infeasible or "")
            continue
        plan, cells = row.plan, throughput_cells(row.throughput) if units else ()
        counts = str(len(plan.devices)), str(len(plan.stages)), plan.schedule, str(plan.micro_batches)
        table.add_row(row.cluster, duration(plan.predicted.step_s), *cells, *counts, row.output or "")
    yield table
    for row in rows:
        for note in () if row.plan is None else (*row.plan.caveats, *row.plan.notes):
            yield f"note ({row.cluster}): {note}"
