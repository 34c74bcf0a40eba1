"""Interface: profiling, planning and training from Python, with the model at hand instead of in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import PrivateAttr

from autopar.errors import UsageError
from autopar.formats import cluster as clusters
from autopar.formats import plan as plans
from autopar.formats import timeline as timelines
from autopar.formats.document import Record
from autopar.formats.profile import Precision, Profile

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure
    from torch import nn

__all__ = ["Cluster", "Plan", "Timeline", "plan", "profile"]


class Cluster(clusters.Cluster):
    """Devices and their links."""

    @classmethod
    def of(cls, text: str) -> Self:
        """Return a built-in cluster by name, or the one that a file describes.

        >>> len(Cluster.of("2x8xH100:400Gbps").devices)
        16

        Raises:
            UsageError: the name is not known.
            FileError: the file is missing or malformed.
        """
        from autopar.hardware.clusters import cluster_named, is_file, read_cluster

        return cls.model_validate(_fields(read_cluster(text) if is_file(text) else cluster_named(text)))


class Timeline(timelines.Timeline):
    """When every action of a step runs."""

    def plot(self, path: str | Path | None = None) -> Figure:
        """Return a picture of the timeline, and write it to a file (``.png``, ``.svg``, ``.pdf``) if one is named."""
        from autopar.report.timeline import draw

        figure = draw(self)
        if path is not None:
            figure.savefig(path)
        return figure


class Plan(plans.Plan):
    """Which layers run where, in which order; knows what it was made of, unless it was read from a file."""

    _origin: tuple[Profile, clusters.Cluster] | None = PrivateAttr(default=None)

    def explain(self) -> str:
        """Return the stages, what is predicted of them and why, and the alternatives, as text."""
        from autopar.report.plan import explained

        return explained(self)

    def timeline(self, profile: Profile | None = None, cluster: clusters.Cluster | None = None) -> Timeline:
        """Return when every action of a step is predicted to run.

        Args:
            profile: what the plan was made of; needed for a plan that was read from a file.
            cluster: likewise.

        Raises:
            UsageError: one of them is missing.
            FileError: the profile is of another model.
        """
        from autopar.planner import simulate

        known = self._origin or (None, None)
        profile, cluster = profile or known[0], cluster or known[1]
        if profile is None or cluster is None:
            raise UsageError(
                "a plan that was read from a file needs its profile and cluster: timeline(profile, cluster)"
            )
        found = simulate(self, profile, cluster)
        return Timeline(found.origin, found.ranks, found.actions, found.starts_s, found.ends_s)


def profile(
    model: nn.Module,
    batch: object,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    layers: Callable[[nn.Module], list[nn.Module]] | None = None,
    ignored_state: Sequence[str] = (),
    accept_loss: bool = False,
    device: str = "auto",
    precision: Precision | None = None,
    threads: int = 1,
    budget_s: float = 10.0,
) -> Profile:
    """Measure every layer of a model on this machine; a copy of it, so that the model stays as it is.

    Args:
        model: the module to train.
        batch: a mini-batch as the data loader gives it: a dict or tuple of tensors, or one tensor.
        loss: ``loss(output, batch)``, a mean over samples, or a sum and a count; None: the output carries it.
        optimizer: makes an optimizer of some parameters; None: ``AdamW(parameters, lr=1e-3)``.
        layers: the model's layers, where it cannot be captured.
        ignored_state: paths of Python state that forwards may change, since it is only logged.
        accept_loss: whether a loss is taken that depends on how a mini-batch is divided.
        device: ``auto``, ``cpu``, ``cuda``, or the name of a GPU that is not there, for which all is estimated.
        precision: ``bf16`` or ``fp16`` computes under autocast; None: as the parameters are.
        threads: per rank on the CPU.
        budget_s: seconds to spend on timing layers, about.

    Raises:
        UsageError: the options do not fit the machine or each other.
        ModelError: model, batch and loss do not fit together.
        CaptureError: the model cannot be captured.
    """
    from dataclasses import replace

    from autopar.capture.batch import named_tensors, row_count
    from autopar.capture.copied import copied
    from autopar.capture.given import check_module, given_model
    from autopar.capture.losses import counted_loss, counts_labels
    from autopar.profiler import ProfileOptions
    from autopar.profiler import profile as measure

    check_module(model)
    own = copied(model)
    counts = loss is None and counts_labels(own.train(), batch)
    counted = counted_loss(own) if counts else loss
    user = given_model(own, batch, loss=counted, optimizer=optimizer, layers=layers)
    user = replace(user, ignored_state=tuple(ignored_state), counts_labels=counts)
    rows = row_count(named_tensors(batch))
    here = device in ("auto", "cpu", "cuda")
    options = ProfileOptions(
        rows, device if here else "cpu", threads, budget_s=budget_s, precision=precision, accept_loss=accept_loss
    )
    if here:
        return measure(user, options)

    from autopar.cli.estimating import estimated
    from autopar.hardware.gpus import find
    from autopar.profiler import prepare

    return estimated(prepare(user, options), find(device), options, None, lambda what, share: None)


def plan(profile: Profile, cluster: clusters.Cluster | None = None, **options: Any) -> Plan:  # noqa: ANN401
    """Return the fastest plan that fits, with its lower bound and alternatives.

    Args:
        profile: what was measured.
        cluster: the machines; None: ``gpus`` of the profile's devices, with estimated links.
        options: those of :class:`autopar.planner.PlanOptions`, such as ``gpus``, ``batch`` or ``schedule``.

    Raises:
        UsageError: options contradict the profile or each other.
        InfeasibleError: nothing fits the memory; names the stage and by how much.
    """
    from dataclasses import fields

    from autopar.planner import PlanOptions
    from autopar.planner import plan as search
    from autopar.planner.estimate import estimated_cluster

    known = [field.name for field in fields(PlanOptions)]
    for name in options:
        if name not in known:
            raise UsageError(f"plan() has no option {name!r}; its options are {', '.join(known)}")
    asked = PlanOptions(**options)
    machines = cluster if cluster is not None else estimated_cluster(profile, asked.gpus or 1)
    found = search(profile, machines, asked)
    made = Plan.model_validate({**_fields(found), "notes": (*machines.notes, *found.notes)})
    made._origin = profile, machines
    return made


def _fields(record: Record) -> dict[str, object]:
    """Return what a record holds, to make one of a kind with more methods."""
    return {name: getattr(record, name) for name in type(record).model_fields}
