"""Exports: a plan becomes another trainer's files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from autopar.errors import FileError, UsageError, unknown
from autopar.formats.cluster import Cluster
from autopar.formats.document import parse_json, read_text
from autopar.formats.plan import Plan
from autopar.formats.profile import TRANSFORMERS, Profile, path_of
from autopar.formats.references import named_file, rebase_paths
from autopar.interop import accelerate, deepspeed, launchers, megatron, torch_pipelining, torchtitan
from autopar.interop.target import ExportFile, ExportSubject, Target, parts_of

TARGETS: dict[str, Target] = {
    "torch": torch_pipelining.TARGET,
    "torchtitan": torchtitan.TARGET,
    "megatron": megatron.TARGET,
    "deepspeed": deepspeed.TARGET,
    "accelerate": accelerate.TARGET,
    "torchrun": launchers.TORCHRUN,
    "slurm": launchers.SLURM,
    "kubernetes": launchers.KUBERNETES,
}
"""By the format's name."""


class Export(NamedTuple):
    """What a plan is to another trainer."""

    files: tuple[ExportFile, ...]
    """The main one first."""
    plan: Plan
    """That was exported: the nearest one, where that was asked for."""
    notes: tuple[str, ...] = ()
    """What the nearest plan costs, and why it was needed."""

    @property
    def text(self) -> str:
        """What the main file holds."""
        return self.files[0].text


def target_of(name: str) -> Target:
    """Return the target of a format.

    Raises:
        UsageError: there is no such format; says which there are.
    """
    if name not in TARGETS:
        raise unknown(UsageError, f"FORMAT must be one of {', '.join(TARGETS)}; found {name!r}", name, TARGETS)
    return TARGETS[name]


def export_plan(
    name: str,
    inputs: tuple[Plan, Profile, Cluster],
    path: Path,
    output: Path | None = None,
    schedule_file: str | None = None,
    *,
    nearest: bool = False,
) -> Export:
    """Return a plan in another trainer's format.

    ``inputs`` are the plan, its profile and its cluster, and ``path`` is the plan's file; the other arguments are those
    of :func:`autopar.export`.

    Raises:
        UsageError: there is no such format, or it cannot express the plan; says why.
        FileError: the configuration of the plan's model is missing or malformed.
        InfeasibleError: no plan that it can express fits the memory.
    """
    target = target_of(name)
    if schedule_file is not None and not target.takes_schedule_file:
        raise UsageError(f"`schedule_file` is of torchtitan; leave it out of an export to {name}")
    output = path.parent / target.file if output is None else output
    subject = _subject(inputs, path, output, schedule_file)
    why = target.refusal(subject)
    if why is not None and nearest:
        subject = _nearest(target, subject, why)
        why = target.refusal(subject)
    if why is not None:
        helps = not nearest and target.expressible is not None and subject.plan.policy.refusal_of("export") is None
        remedy = "; `nearest=True` exports what it can express" if helps else ""
        raise UsageError(f"{path} cannot be exported to {name}: {why}{remedy}")
    exported = subject.plan.model_copy(update={"model": inputs[0].model})
    return Export(tuple(target.write(subject, target._replace(file=output.name))), exported, subject.notes)


def _subject(
    inputs: tuple[Plan, Profile, Cluster], path: Path, output: Path, schedule_file: str | None
) -> ExportSubject:
    """Return what is exported, with the model's path relative to the file that is written."""
    plan, profile, cluster = inputs
    moved = plan.model_copy(update={"model": rebase_paths(plan.model, path, output)})
    return ExportSubject(moved, profile, cluster, str(path), configuration_of(plan, path), schedule_file)


def _nearest(target: Target, subject: ExportSubject, why: str) -> ExportSubject:
    """Return the nearest plan that a trainer can express; ``why`` it cannot the one that there is."""
    from autopar.planner.objectives.nearest import nearest_plan

    plan, limits, parts = subject.plan, target.limits(subject), parts_of(subject.profile)
    if limits is None or plan.policy.refusal_of("export") is not None:
        return subject
    blocks = range(0) if parts is None else parts.blocks
    found = nearest_plan(plan, subject.profile, subject.cluster, limits, blocks, target.edges(subject))
    more = found.predicted.step_s / plan.predicted.step_s - 1
    note = f"not the plan itself but the nearest that {limits.trainer} can express, {more * 100:+.1f} %: {why}"
    return subject._replace(plan=found.model_copy(update={"model": plan.model}), notes=(note,))


def configuration_of(plan: Plan, path: Path) -> dict[str, object]:
    """Return the configuration of a plan's ``hf:`` model; nothing for other models.

    Raises:
        FileError: the configuration is missing or malformed.
    """
    source = path_of(plan.model.source)
    if source is None or not plan.model.source.startswith(TRANSFORMERS):
        return {}
    file = named_file(path, source, "model.source", folders=True)
    file = file / "config.json" if file.is_dir() else file
    content = parse_json(read_text(file, "Transformers configuration"), file)
    if not isinstance(content, dict):
        raise FileError(f"{file}: expected a JSON object")
    return content
