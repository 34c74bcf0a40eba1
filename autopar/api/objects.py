"""Objects: models, clusters, plans and timelines as scripts have them, with what can be asked of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import PrivateAttr

from autopar.errors import UsageError
from autopar.formats import cluster as clusters
from autopar.formats import plan as plans
from autopar.formats import timeline as timelines
from autopar.formats.document import Record
from autopar.formats.profile import Profile

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

    from autopar.capture import UserModel
    from autopar.options.profile import ProfileOptions


PlanFile = plans.Plan | str | Path
"""A plan, or the file that it is in. Files that a plan names are relative to its own, or to the working folder."""


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
        from autopar.hardware.clusters import find_cluster

        return cls.model_validate(_fields(find_cluster(text)))


class Timeline(timelines.Timeline):
    """When every action of a step runs."""

    @classmethod
    def of(cls, timeline: timelines.Timeline) -> Self:
        """Return a timeline that can be drawn."""
        return cls(**{each.name: getattr(timeline, each.name) for each in fields(timeline)})

    def plot(self, path: str | Path | None = None) -> Figure:
        """Return a picture of the timeline, and write it to a file (``.png``, ``.svg``, ``.pdf``) if one is named."""
        from autopar.report.pictures import draw_timeline

        figure = draw_timeline(self)
        if path is not None:
            figure.savefig(path)
        return figure


class Plan(plans.Plan):
    """Which layers run where, in which order; knows what it was made of, unless it was read from a file."""

    _origin: tuple[Profile, clusters.Cluster] | None = PrivateAttr(default=None)

    @classmethod
    def of(cls, plan: plans.Plan, profile: Profile, cluster: clusters.Cluster) -> Self:
        """Return a plan that knows what it was made of, with the notes of its cluster before its own."""
        made = cls.model_validate({**_fields(plan), "notes": (*cluster.notes, *plan.notes)})
        made._origin = profile, cluster
        return made

    @property
    def origin(self) -> tuple[Profile, clusters.Cluster] | None:
        """The profile and the cluster that it was made of; None of a plan that was read from a file."""
        return self._origin

    def __str__(self) -> str:
        """Return :meth:`explain`'s text: a plan printed field by field tells nobody anything."""
        return self.explain()

    def explain(self) -> str:
        """Return the stages, what is predicted of them and why, and the alternatives, as text."""
        from autopar.report.plan import plan_text

        return plan_text(self)

    def timeline(self, profile: Profile | None = None, cluster: clusters.Cluster | None = None) -> Timeline:
        """Return when every action of a step is predicted to run.

        Args:
            profile: what the plan was made of; needed for a plan that was read from a file.
            cluster: likewise.

        Raises:
            UsageError: one of them is missing.
            FileError: the profile is of another model.
        """
        known = self._origin or (None, None)
        profile, cluster = profile or known[0], cluster or known[1]
        if profile is None or cluster is None:
            raise UsageError(
                "a plan that was read from a file needs its profile and cluster: timeline(profile, cluster)"
            )
        from autopar.planner import simulate

        return Timeline.of(simulate(self, profile, cluster))


def _fields(record: Record) -> dict[str, object]:
    """Return what a record holds, to make one of a kind with more methods."""
    return {name: getattr(record, name) for name in type(record).model_fields}


def user_model(
    model: nn.Module | str | Path,
    batch: object,
    functions: dict[str, Callable[..., Any] | None],
    ignored_state: tuple[str, ...],
    options: ProfileOptions,
) -> tuple[UserModel, int]:
    """Return the model that is profiled, from a file or of a script, and the samples of a step."""
    if not isinstance(model, str | Path):
        _check_absent(None, data=options.data, sequence=options.sequence)
        from autopar.capture.layers.losses import copied_model

        return copied_model(model, batch, ignored_state, **functions)
    _check_absent(model, **functions, ignored_state=ignored_state or None)
    if not isinstance(batch, int):
        raise UsageError(
            f"profile() takes the samples of a step as batch, for a model in a file; found {type(batch).__name__}"
        )
    from autopar.capture import load

    data = None if options.data is None else str(options.data)
    return load(str(model), data, sequence=options.sequence), batch


def _check_absent(file: str | Path | None, **arguments: object) -> None:
    """Refuse what a model in a file says itself, or, of a module, what only files have."""
    for name, value in arguments.items():
        if value is not None and file is not None:
            raise UsageError(f"profile() takes no {name} for {file}: a model file has its own")
        if value is not None:
            raise UsageError(f"profile() takes {name} for models in files only; a module's inputs are those of batch")
