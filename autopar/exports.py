"""Exports: a plan becomes another trainer's files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from autopar.errors import FileError, UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.document import parse_json, read_text
from autopar.formats.plan import Plan
from autopar.formats.profile import TRANSFORMERS, Profile, path_of
from autopar.formats.references import named_file, rebase_paths
from autopar.interop import megatron, torch_pipelining
from autopar.interop.target import ExportFile, Subject, Target

TARGETS: dict[str, Target] = {"torch": torch_pipelining.TARGET, "megatron": megatron.TARGET}
"""By the format's name."""


class Export(NamedTuple):
    """What a plan is to another trainer."""

    files: tuple[ExportFile, ...]
    """The main one first."""
    plan: Plan
    """That was exported."""

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
        raise UsageError(f"FORMAT must be one of {', '.join(TARGETS)}; found {name!r}")
    return TARGETS[name]


def export_plan(name: str, planned: tuple[Plan, Profile, Cluster], path: Path, output: Path | None = None) -> Export:
    """Return a plan in another trainer's format.

    Args:
        name: of the format.
        planned: the plan, and what it was made of.
        path: the plan's file, which what it names is relative to.
        output: where the main file is to be written; None: beside the plan, as the target calls it.

    Raises:
        UsageError: there is no such format, or it cannot express the plan; says why.
        FileError: the configuration of the plan's model is missing or malformed.
    """
    target = target_of(name)
    output = path.parent / target.file if output is None else output
    subject = _subject(planned, path, output)
    why = target.refusal(subject)
    if why is not None:
        raise UsageError(f"{path} cannot be exported to {name}: {why}")
    return Export(tuple(target.write(subject, target._replace(file=output.name))), subject.plan)


def _subject(planned: tuple[Plan, Profile, Cluster], path: Path, output: Path) -> Subject:
    plan, profile, cluster = planned
    architecture = architecture_of(plan, path)
    moved = plan.model_copy(update={"model": rebase_paths(plan.model, path, output)})
    return Subject(moved, profile, cluster, str(path), architecture)


def architecture_of(plan: Plan, path: Path) -> str | None:
    """Return the class that the configuration of a plan's ``hf:`` model names; None of other models.

    Raises:
        FileError: the configuration is missing or malformed.
    """
    source = path_of(plan.model.source)
    if source is None or not plan.model.source.startswith(TRANSFORMERS):
        return None
    file = named_file(path, source, "model.source", folders=True)
    file = file / "config.json" if file.is_dir() else file
    content = parse_json(read_text(file, "Transformers configuration"), file)
    classes = content.get("architectures") if isinstance(content, dict) else None
    if classes is None:
        return None
    if not isinstance(classes, list) or not classes or not str(classes[0]).isidentifier():
        raise FileError(f"{file}: $.architectures: expected a list of class names")
    return str(classes[0])
