"""Tables of what runs leave: reports, verifications, checkpoints, last actions before a failure; and of programs."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from autopar.formats.program import WORDS
from autopar.report.folding import evenly
from autopar.report.table import Part, Table, duration, figure, fill, percentage, size
from autopar.report.throughput import throughput_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from autopar.formats.checkpoint import Checkpoint, CheckpointView, SavedPlan
    from autopar.formats.program import Program
    from autopar.formats.pulls import PullLog
    from autopar.formats.report import BlackBox, CheckpointTimes, LoadingTimes, Report, Verification


_SHOWN_LOSSES = 8
_LAST_ACTIONS = 12
"""How many of a rank that has failed are listed; the file, and `--json`, have more."""
_SPENT = ("compute", "loading", "update", "reduce", "waiting", "transfer", "idle")
_COMPARABLE = {
    "resident": "a process grows by more than tensors: by what allocators and libraries keep",
    "allocated": "the allocator's figure has the workspaces of matrix products in it, which plans reserve apart",
}


def title_of(report: Report) -> str:
    """Return what was trained, and by what."""
    where = f"{report.ranks} ranks on {report.device} with {report.backend}, torch {report.torch}"
    return f"{report.model}: {report.steps} steps by {where}"


def render(report: Report) -> Iterator[Part]:
    """Yield a report's loss, step times and ranks."""
    yield title_of(report)
    yield _loss(report)
    if report.evaluations:
        yield _evaluations(report)
    yield _times(report)
    if report.causes:
        yield _causes(report)
    if report.kinds:
        yield _kinds(report)
    yield _ranks(report)
    yield _memory(report)
    if report.loading is not None and report.loading.work_s > 0:
        yield _loading(report.loading, report.step_s.median)
    if report.checkpoints is not None:
        yield _checkpoints(report.checkpoints)
    yield f"initial weights: {report.initial_weights}"
    for note in report.notes:
        yield f"note: {note}"


def _loss(report: Report) -> Table:
    shown = evenly(len(report.loss), _SHOWN_LOSSES)
    table = Table("Loss", ("step", *(f">{report.first_step + index + 1}" for index in shown)))
    table.add_row("loss", *(figure(report.loss[index]) for index in shown))
    for name, values in report.losses.items():
        table.add_row(name, *(figure(values[index]) for index in shown))
    if report.gradient_norm:
        norms = (report.gradient_norm[index] for index in shown)
        table.add_row("gradient norm", *("overflow" if norm is None else figure(norm) for norm in norms))
    return table


def _evaluations(report: Report) -> Table:
    every = [report.evaluations[index] for index in evenly(len(report.evaluations), _SHOWN_LOSSES)]
    table = Table("Evaluation", ("after step", *(f">{each.step}" for each in every)))
    table.add_row("loss", *(figure(each.loss) for each in every))
    return table


def _times(report: Report) -> Table:
    table = Table("Prediction and measurement", ("", ""))
    spread = f"(p10 {duration(report.step_s.p10)}, p90 {duration(report.step_s.p90)})"
    table.add_row("measured step (median)", f"{duration(report.step_s.median)} {spread}")
    if report.step_s.longest is not None and report.step_s.first is not None:
        outer = f"{duration(report.step_s.first)}, {duration(report.step_s.longest)}"
        table.add_row("first step (left out), longest of the others", outer)
    known = (("computing", report.predicted_compute), ("communication", report.predicted_communication))
    parts = ", ".join(f"{what} {each}" for what, each in known if each is not None)
    table.add_row("predicted step", duration(report.predicted_step_s) + (f" ({parts})" if parts else ""))
    table.add_row("error", percentage(report.error, with_sign=True))
    for row in throughput_rows(report.throughput):
        table.add_row(*row)
    if report.throughput is None:
        table.add_row("samples per second", figure(report.samples_per_s))
    if report.flops_utilisation is not None:
        table.add_row("model FLOPs utilisation", percentage(report.flops_utilisation))
    table.add_row("bubble", percentage(report.bubble))
    return table


def _causes(report: Report) -> Table:
    heads = ("critical path", ">measured", ">predicted", ">of the measured step")
    table = Table("What the step is spent on, where nothing is waited for", heads)
    for each in report.causes:
        share = (each.measured_s - each.predicted_s) / report.step_s.median
        table.add_row(
            each.cause, duration(each.measured_s), duration(each.predicted_s), percentage(share, with_sign=True)
        )
    return table


def _loading(times: LoadingTimes, step_s: float) -> Table:
    table = Table("Loading of mini-batches", ("", ""))
    table.add_row("loaders of a host", str(times.loaders) if times.loaders else "none: ranks read for themselves")
    table.add_row("reading and collating took, of a step", duration(times.work_s))
    share = f" ({percentage(times.waiting_s / step_s)} of a step)" if step_s else ""
    table.add_row("waited for it, with nothing to compute", f"{duration(times.waiting_s)}{share}")
    if times.loaders_needed:
        table.add_row("loaders that would keep up", str(times.loaders_needed))
    return table


def _checkpoints(times: CheckpointTimes) -> Table:
    table = Table("Checkpoints", ("", ""))
    saved = f"{len(times.steps)}, the newest after step {times.steps[-1]}" if times.steps else "none"
    table.add_row("saved", saved)
    table.add_row("training waited for one (median)", duration(times.pause_s))
    table.add_row("writing one took of a processor", duration(times.busy_s))
    table.add_row("copies in memory (most of a rank)", size(max(times.buffers_bytes)))
    for each in times.failures:
        table.add_row("failed", each)
    return table


def _kinds(report: Report) -> Table:
    heads = ("action", ">actions", ">measured", ">predicted", ">measured over predicted")
    table = Table("Actions by themselves (medians)", heads)
    for each in report.kinds:
        times = duration(each.measured_s), duration(each.predicted_s)
        table.add_row(f"{each.kind} {WORDS[each.kind]}", str(each.actions), *times, f"{each.ratio:.3g} x")
    return table


def _ranks(report: Report) -> Table:
    heads = (">rank", ">stage", ">replica", *(f">{name}" for name in _SPENT))
    table = Table("Where the ranks' time went, in a step of median length", heads)
    rows = []
    for times in report.rank_times:
        spent = [duration(getattr(times, f"{name}_s")) for name in _SPENT]
        rows.append((str(times.rank), ", ".join(map(str, times.stages)), str(times.replica), *spent))
    fill(table, rows)
    return table


def _memory(report: Report) -> Table:
    """Return every rank's peak beside the predicted one, and its micro-batches in flight."""
    heads = (">rank", f">peak ({report.peak_kind})", ">predicted", ">in flight", ">predicted")
    table = Table("Memory", heads, _COMPARABLE[report.peak_kind] if report.predicted_peak_bytes else "")
    rows = []
    for times in report.rank_times:
        peaks = [
            peak[times.rank] for peak in (report.peak_bytes, report.predicted_peak_bytes) if times.rank < len(peak)
        ]
        flights = [", ".join(map(str, depths)) for depths in (times.in_flight, times.predicted_in_flight)]
        rows.append((str(times.rank), *([size(peak) for peak in peaks] + ["", ""])[:2], *flights))
    fill(table, rows)
    return table


def render_verification(verification: Verification) -> Iterator[Part]:
    """Yield the largest difference of every kind beside what is allowed, and what differs by choice."""
    steps = f"{verification.steps} step{'s' if verification.steps > 1 else ''} of {verification.ranks} ranks"
    title = f"{steps} and of the plain loop, in {verification.computed}"
    columns = ("", ">compared", ">largest difference", ">allowed", "where")
    table = Table(title, columns)
    for each in verification.differences:
        largest = "no number" if each.largest is None else f"{each.largest:.2g}"
        row = (each.what, str(each.compared), largest, f"{each.allowed:.2g}", each.where)
        table.add_row(*row, style="" if each.equal else "bold red")
    yield table
    units = "; ".join(f"{each.what} by {each.unit}" for each in verification.differences)
    yield f"differences are divided: {units}"
    yield f"allowed: {verification.rounding}"
    for choice in verification.by_choice:
        yield f"by choice: {choice}"
    for note in verification.notes:
        yield f"note: {note}"


_SHOWN_ACTIONS = 200


def render_program(program: Program) -> Iterator[Part]:
    """Yield every rank's actions, the first of them where there are many."""
    table = Table(f"Program of {len(program.ranks)} ranks", (">rank", ">actions", "in order"))
    for rank, actions in enumerate(program.ranks):
        shown = " ".join(str(actions[index]) for index in range(min(len(actions), _SHOWN_ACTIONS)))
        left = len(actions) - _SHOWN_ACTIONS
        table.add_row(str(rank), str(len(actions)), shown + (f" and {left} more" if left > 0 else ""))
    yield table


def render_checkpoints(checkpoints: Sequence[CheckpointView]) -> Iterator[Part]:
    """Yield the checkpoints, and what is wrong with those that are not sound."""
    heads = (">step", ">size", "saved by", "torch", ">tensors", "state")
    table = Table(f"Checkpoints in {checkpoints[0].folder.parent}", heads)
    for each in checkpoints:
        if each.manifest is None:
            table.add_row(str(each.step), "", "", "", "", "damaged")
            continue
        plan = each.manifest.plan
        whole = "not finite" if each.manifest.unsound else "verified" if each.verified else "not verified"
        state = "damaged" if each.problem is not None and not each.manifest.unsound else whole
        row = (_carried_out(plan), plan.torch, str(len(each.manifest.tensors)), state)
        table.add_row(str(each.step), size(each.bytes), *row)
    yield table
    for each in checkpoints:
        if each.problem is not None:
            yield f"step {each.step}: {each.problem}"


def render_manifest(manifest: Checkpoint, title: str) -> Iterator[Part]:
    """Yield what a manifest says of a checkpoint's run and its files."""
    run, plan = manifest.run, manifest.plan
    yield f"{title}: saved by {_carried_out(plan)}, torch {plan.torch}"
    yield f"batch {run.batch}, seed {run.seed}, {run.samples or 'unknown'} samples, {plan.precision}"
    table = Table("Tensors", ("", ">tensors", ">pieces"))
    for kind in dict.fromkeys(each.kind for each in manifest.tensors):
        mine = [each for each in manifest.tensors if each.kind == kind]
        table.add_row(kind, str(len(mine)), str(sum(len(each.pieces) for each in mine)))
    yield table
    files = Table("Files", ("", ">size"))
    for file in manifest.files:
        files.add_row(file.name, size(file.bytes))
    yield files


def _carried_out(plan: SavedPlan) -> str:
    counts = (plan.ranks, "rank"), (plan.stages, "stage")
    return ", ".join((*(f"{count} {what}{'s' if count > 1 else ''}" for count, what in counts), plan.schedule))


def title_of_pulls(log: PullLog) -> str:
    """Return of which steps a log is."""
    return f"pulls of {len(log.fills[0].taken)} ranks in steps {log.fills[0].first_step} to {log.ends[-1] - 1}"


def render_pulls(log: PullLog) -> Iterator[Part]:
    """Yield by how many waves others were ahead of what each rank had pushed where it took theirs; below 0, behind."""
    yield title_of_pulls(log)
    table = Table("Waves by which others were ahead at a pull", (">rank", ">pulls", ">least", ">mean", ">most"))
    for rank, _ in enumerate(log.fills[0].taken):
        rows = [(pushed, row) for fill in log.fills for pushed, row in enumerate(fill.taken[rank], 1)]
        ahead = [count - pushed for pushed, row in rows for count in row] or [0]
        table.add_row(str(rank), str(len(rows)), str(min(ahead)), figure(fmean(ahead)), str(max(ahead)))
    yield table


def render_black_box(box: BlackBox) -> Iterator[Part]:
    """Yield what was said of the failure, what every rank was doing, and what it had begun before, newest first."""
    yield f"{box.date}: {box.message}"
    doing = Table("When the failure was noticed", (">rank", "doing", ">for"))
    for rank in box.ranks:
        doing.add_row(str(rank.rank), rank.doing, duration(rank.actions[-1].before_s) if rank.actions else "")
    yield doing
    last = Table(
        "Last actions of every rank: STEP ACTION, newest first", tuple(f"rank {each.rank}" for each in box.ranks)
    )
    newest = [list(reversed(rank.actions))[:_LAST_ACTIONS] for rank in box.ranks]
    for index in range(max(map(len, newest), default=0)):
        row = (each[index] if index < len(each) else None for each in newest)
        last.add_row(*("" if action is None else f"{action.step} {action.action}" for action in row))
    yield last
