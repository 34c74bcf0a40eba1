"""Target: another trainer that plans are exported to, what is exported, and what every export says of its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

from autopar.errors import UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.expressible import Expressible, grid_of
from autopar.formats.plan import Plan, chunks_of, layout_of
from autopar.formats.profile import Profile
from autopar.interop.layout import parts_of
from autopar.schedules import SCHEDULES


class ExportFile(NamedTuple):
    """A file of an export."""

    name: str
    text: str


class ExportSubject(NamedTuple):
    """A plan that is exported, and what it was made of."""

    plan: Plan
    profile: Profile
    cluster: Cluster
    plan_file: str
    """What launches call the plan."""
    configuration: Mapping[str, object] = MappingProxyType({})
    """Of a Transformers model; empty for others."""
    schedule_file: str | None = None
    """What a schedule is written to, where the trainer takes one from a file."""
    notes: tuple[str, ...] = ()
    """What else is said of the plan."""

    @property
    def architecture(self) -> str | None:
        """The class of a Transformers model, as its configuration names it."""
        classes = self.configuration.get("architectures")
        first = classes[0] if isinstance(classes, list) and classes else None
        return first if isinstance(first, str) else None

    @property
    def blocks(self) -> tuple[str, ...]:
        """The layers that are blocks."""
        parts = parts_of(self.profile)
        return () if parts is None else parts.names(self.profile)


def _no_refusal(_: ExportSubject) -> str | None:
    return None


def _as_it_is(expressible: Expressible, _: ExportSubject) -> Expressible:
    return expressible


class Target(NamedTuple):
    """What plans are exported to."""

    version: str
    """That exports are written for and were tried with, such as ``torchtitan 0.3.0``."""
    trial: str
    """What was tried with it (`make exports`)."""
    file: str
    """Name of the main file, where none is asked for."""
    write: Callable[[ExportSubject, Target], Iterator[ExportFile]]
    """Makes the files, the main one first, which is called as the target says."""
    expressible: Expressible | None = None
    """What the trainer can express; None: any plan that autopar itself can run."""
    takes_schedule_file: bool = False
    names_refusal: Callable[[ExportSubject], str | None] = _no_refusal
    """Why the trainer has no names for the plan's cuts; None where it has."""
    adjust: Callable[[Expressible, ExportSubject], Expressible] = _as_it_is
    """What can be expressed of a plan's devices."""
    cuts_layers: bool = False
    """Whether stages may begin with any layer, and not only with blocks and what stands behind them."""

    def limits(self, subject: ExportSubject) -> Expressible | None:
        """Return what can be expressed: with a schedule in a file, any depth that a schedule may have."""
        if self.expressible is None:
            return None
        found = self.adjust(self.expressible, subject)
        if subject.schedule_file is None:
            return found
        return found._replace(schedules=tuple(SCHEDULES), any_depth=True, any_count=True)

    def edges(self, subject: ExportSubject) -> tuple[int, ...]:
        """Return the layers before which stages may begin, and how many layers there are."""
        count, parts = len(subject.profile.layers), parts_of(subject.profile)
        if self.cuts_layers:
            return tuple(range(count + 1))
        inner = () if parts is None else (*parts.blocks, parts.blocks.stop)
        return tuple(sorted({0, *inner, count}))

    def refusal(self, subject: ExportSubject) -> str | None:
        """Return why the plan cannot be exported, in one line; None where it can."""
        limits = self.limits(subject)
        if limits is None:
            return subject.plan.refusal
        why = limits.refusal(subject.plan, subject.blocks, usual_depths(subject.plan))
        return why or self.names_refusal(subject)


def usual_depths(plan: Plan) -> list[tuple[int, ...]]:
    """Return how many micro-batches every stage has in flight by the schedule itself, as other trainers run it."""
    grid, chunks = grid_of(plan), len(plan.groups[0])
    depths = SCHEDULES[plan.schedule].warmups(grid.groups, chunks, grid.micro_batches)
    return [next(iter(depths.values()))]


def heading(subject: ExportSubject, target: Target) -> list[str]:
    """Return what every export says first, as lines without marks of a comment."""
    plan, grid = subject.plan, grid_of(subject.plan)
    peaks = ", ".join(f"{each / 2**30:.3g} GiB" for each in plan.predicted.peak_bytes)
    chunks = chunks_of(layout_of(plan.schedule)) != 1 and f", {len(plan.groups[0])} of them a device"
    return [
        f"{plan.model.source}, planned by autopar. Written for {target.version}: {target.trial}.",
        f"stages: {len(plan.stages)}{chunks or ''}; replicas: {grid.pipelines}; schedule: {plan.schedule}; "
        f"micro-batches: {grid.micro_batches} of {grid.rows}; batch: {plan.batch}{_sequence(plan)}",
        f"predicted: step {plan.predicted.step_s:.4g} s, bubble {plan.predicted.bubble:.1%}, peak memory {peaks}",
        *subject.notes,
    ]


def launch_heading(subject: ExportSubject, target: Target) -> list[str]:
    """Return what every launch of autopar's own ranks says first."""
    plan = subject.plan
    peaks = ", ".join(f"{each / 2**30:.3g} GiB" for each in plan.predicted.peak_bytes)
    return [
        f"{plan.model.source}, planned by autopar. Written for {target.version}: {target.trial}.",
        f"predicted: step {plan.predicted.step_s:.4g} s, bubble {plan.predicted.bubble:.1%}, peak memory {peaks}",
    ]


def equal_nodes(subject: ExportSubject) -> tuple[int, int]:
    """Return how many machines there are, and the ranks of each.

    Raises:
        UsageError: they differ, or ranks of a machine do not follow each other.
    """
    counts = nodes_of(subject)
    if len(set(counts)) > 1:
        raise UsageError(f"machines have {', '.join(map(str, counts))} ranks, and this launcher starts as many on each")
    return len(counts), counts[0]


def _sequence(plan: Plan) -> str:
    return "" if plan.model.sequence is None else f"; tokens of a sample: {plan.model.sequence}"


def comment(lines: Sequence[str]) -> str:
    """Return lines as a comment of Python, shells and YAML, each at most 120 characters where words allow it."""
    import textwrap

    return "".join(f"{each}\n" for line in lines for each in textwrap.wrap(f"# {line}", 120, subsequent_indent="#   "))


def modules_of_stage(subject: ExportSubject, stage: int) -> tuple[str, ...]:
    """Return the modules of a stage's layers, in their order.

    Raises:
        UsageError: a module is called several times, so that it has no one stage.
    """
    position = {layer.name: layer for layer in subject.profile.layers}
    found = [module for name in subject.plan.stages[stage].layers for module in position[name].modules]
    for module in found:
        if "@" in module:
            raise UsageError(
                f"stage {stage} begins or holds call {module!r}: a module that is called twice has no name"
            )
    return tuple(found)


def nodes_of(subject: ExportSubject) -> list[int]:
    """Return how many ranks every machine has, in the order of ranks.

    Raises:
        UsageError: ranks of a machine do not follow each other, so that no launcher numbers them so.
    """
    listed = subject.cluster.devices
    # A plan may have more devices than the cluster lists: they are like those, in turn.
    nodes = [listed[device % len(listed)].node for device in subject.plan.devices]
    runs = [(node, len(list(same))) for node, same in groupby(nodes)]
    if len({node for node, _ in runs}) < len(runs):
        raise UsageError("the plan's ranks of a machine do not follow each other; plan with another order of devices")
    return [count for _, count in runs]
