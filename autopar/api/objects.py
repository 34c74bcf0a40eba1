"""Objects: what scripts have of models, clusters, plans, runs and comparisons, with what can be asked of them.

Each shows itself: in a line, as text, in notebooks as tables with a small picture, as a frame of pandas, in pictures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import PrivateAttr

from autopar.api import views
from autopar.errors import UsageError
from autopar.formats import cluster as clusters
from autopar.formats import contest as contests
from autopar.formats import plan as plans
from autopar.formats import profile as profiles
from autopar.formats import report as reports
from autopar.formats import timeline as timelines
from autopar.formats.document import Record
from autopar.formats.prediction import MetPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure
    from pandas import DataFrame

    from autopar.formats.prediction import Throughput

    R = TypeVar("R", bound=Record)


PlanFile = plans.Plan | str | Path
"""A plan, or the file that it is in. Files that a plan names are relative to its own, or to the working folder."""


class Shown(ABC):
    """Shows itself."""

    @abstractmethod
    def view(self) -> views.View:
        """Return what there is to be seen of it."""

    def __repr__(self) -> str:
        return repr(self.view())

    def __str__(self) -> str:
        return str(self.view())

    def _repr_html_(self) -> str:
        return self.view()._repr_html_()

    def plot(self, kind: str | None = None, path: str | Path | None = None) -> Figure:
        """Return a picture, and write it to a file if one is named.

        Args:
            kind: which picture; None: the first of those that the class names.
            path: a file that ends in ``.png``, ``.svg`` or ``.pdf``.

        Raises:
            UsageError: there is no such picture; names those that there are.
        """
        return self.view().plot(kind, path)

    def to_html(self, path: str | Path | None = None) -> str:
        """Return a page of its own, which asks no network, and write it to a file if one is named."""
        return self.view().to_html(path)


def shown_as(kind: type[R], record: Record) -> R:
    """Return a record as one of a kind below its own, which shows itself."""
    return kind.model_construct(**_fields(record))


class Profile(Shown, profiles.Profile):
    """What was measured of a model on one kind of device, layer by layer; its picture is ``layers``."""

    def view(self) -> views.View:
        """Return what there is to be seen of it."""
        return views.view_profile(self)

    def to_frame(self) -> DataFrame:
        """Return one row per layer and micro-batch size, with the bytes per sample that cross behind the layer."""
        from autopar.report.frames import profile_frame

        return profile_frame(self)


class Cluster(Shown, clusters.Cluster):
    """Devices and their links; its picture is ``devices``, in which nodes alike are one."""

    @classmethod
    def of(cls, text: str | Path) -> Self:
        """Return a built-in cluster by name, or the one that a file describes.

        >>> len(Cluster.of("2x8xH100:400Gbps").devices)
        16

        Raises:
            UsageError: the name is not known.
            FileError: the file is missing or malformed.
        """
        from autopar.api.inputs import given_cluster

        return shown_as(cls, given_cluster(text))

    def view(self) -> views.View:
        """Return what there is to be seen of it."""
        return views.view_cluster(self)

    def to_frame(self) -> DataFrame:
        """Return one row per device, in the order to which plans refer."""
        from autopar.report.frames import cluster_frame

        return cluster_frame(self)


class Timeline(Shown, timelines.Timeline):
    """When every action of a step runs.

    Its pictures are ``timeline``, in which ranks alike are one row and repetitions a gap, and ``messages``, the same
    with an arrow for each.
    """

    @classmethod
    def of(cls, timeline: timelines.Timeline) -> Self:
        """Return a timeline that shows itself."""
        return cls(**{each.name: getattr(timeline, each.name) for each in fields(timeline)})

    def view(self) -> views.View:
        """Return what there is to be seen of it."""
        return views.view_timeline(self)

    def to_frame(self) -> DataFrame:
        """Return one row per action: its rank, its text and what that means, and its seconds from the step's start."""
        from autopar.report.frames import timeline_frame

        return timeline_frame(self)


class Report(Shown, reports.Report):
    """Outcome of a run; its picture is ``loss``."""

    def view(self) -> views.View:
        """Return what there is to be seen of it."""
        return views.view_report(self)

    def to_frame(self) -> DataFrame:
        """Return one row per step: its loss, the loss's terms by name, and the gradients' norm where it is known."""
        from autopar.report.frames import report_frame

        return report_frame(self)


class Comparison(Shown, reports.Comparison):
    """autopar's plan beside those of others; its picture is ``planners``."""

    def view(self) -> views.View:
        """Return what there is to be seen of it."""
        return views.view_comparison(self)

    def to_frame(self) -> DataFrame:
        """Return one row per planner: its stages, the seconds of its step, or why it cannot be run."""
        from autopar.report.frames import comparison_frame

        return comparison_frame(self.rows)


class RunComparison(Shown, contests.RunComparison):
    """Plans of one model, compared by running them; its picture is ``losses``."""

    def view(self) -> views.View:
        """Return what there is to be seen of it."""
        return views.view_contests(self)

    def to_frame(self) -> DataFrame:
        """Return one row per contestant: its loss, seconds and bytes, or what happened to it."""
        from autopar.report.frames import contest_frame

        return contest_frame(self.rows, self.loss)

    def losses(self) -> DataFrame:
        """Return one row per mini-batch, and a column of losses for every contestant and seed."""
        from autopar.report.frames import losses_frame

        return losses_frame(self.rows)


class Plan(Shown, plans.Plan):
    """Which layers run where, in which order; knows what it was made of, unless it was read from a file.

    Its pictures are ``stages`` (times and memory), and ``search`` (its step beside those of alternatives, of plans that
    were met, unless it was read from a file, and the bounds); and, where it knows what it was made of, ``placement``
    (stages on devices, and the step), ``timeline``, ``messages`` (the same with arrows), ``memory`` (what ranks hold
    over the step, by cause) and ``layers`` (where the model is cut).
    """

    _origin: tuple[Profile, Cluster] | None = PrivateAttr(default=None)
    _met: tuple[MetPlan, ...] = PrivateAttr(default=())

    @classmethod
    def of(
        cls, plan: plans.Plan, profile: profiles.Profile, cluster: clusters.Cluster, met: Sequence[MetPlan] = ()
    ) -> Self:
        """Return a plan that knows what it was made of, with the notes of its cluster before its own.

        ``met`` are plans that its search met.
        """
        made = cls.model_validate({**_fields(plan), "notes": (*cluster.notes, *plan.notes)})
        made._origin = shown_as(Profile, profile), shown_as(Cluster, cluster)
        made._met = tuple(met)
        return made

    @property
    def origin(self) -> tuple[Profile, Cluster] | None:
        """The profile and the cluster that it was made of; None of a plan that was read from a file."""
        return self._origin

    def view(self) -> views.View:
        """Return what there is to be seen of it."""
        return views.view_plan(self, self._made_of, self._made_of, self._met)

    def to_frame(self) -> DataFrame:
        """Return one row per stage: its layers, where they run and how, and what is predicted of it."""
        from autopar.report.frames import plan_frame

        return plan_frame(self)

    def explain(self) -> str:
        """Return the stages, what is predicted of them and why, and the alternatives, as text."""
        return str(self)

    def throughput(
        self,
        profile: profiles.Profile | str | Path | None = None,
        cluster: clusters.Cluster | str | Path | None = None,
        **length: object,
    ) -> Throughput | None:
        """Return what its step is in tokens, utilisation, hours and cost; None where none of them is known.

        Args:
            profile: what the plan was made of; needed for a plan that was read from a file.
            cluster: likewise.
            length: of a training: ``tokens``, such as ``"15T"``, or ``samples``; and ``tokens_per_sample``.

        Raises:
            UsageError: profile or cluster is missing, or nothing says how many tokens a sample has.
        """
        from autopar.options.plan import PlanOptions
        from autopar.planner.throughput import check_length, plan_throughput

        measured, machines = self._made_of(profile, cluster)
        asked = PlanOptions.of("throughput", length)
        check_length(measured, asked)
        return plan_throughput(self, measured, machines, asked)

    def timeline(
        self,
        profile: profiles.Profile | str | Path | None = None,
        cluster: clusters.Cluster | str | Path | None = None,
    ) -> Timeline:
        """Return when every action of a step is predicted to run.

        Args:
            profile: what the plan was made of; needed for a plan that was read from a file.
            cluster: likewise.

        Raises:
            UsageError: one of them is missing.
            FileError: the profile is of another model.
        """
        from autopar.planner import simulate

        return Timeline.of(simulate(self, *self._made_of(profile, cluster)))

    def reprice(
        self,
        cluster: clusters.Cluster | str | Path | None = None,
        *,
        batch: int | None = None,
        memory_bytes: int | str | None = None,
        bytes_per_s: float | str | None = None,
        profile: profiles.Profile | str | Path | None = None,
    ) -> Plan:
        """Return the same stages with what is predicted of them on other machines, or for another batch.

        Nothing is searched, so this takes a moment; and nothing is refused that does not fit the memory: see whether
        ``predicted.peak_bytes`` are above ``predicted.limit_bytes``. What is None stays as it is.

        Args:
            cluster: the machines, or their name, such as ``4x8xH100:400Gbps``.
            batch: samples of a step; micro-batches stay as large as they are, so that there are more of them.
            memory_bytes: limit per device, such as ``"40GiB"``, in place of the cluster's.
            bytes_per_s: bandwidth of every link, such as ``"100Gbps"``, in place of the cluster's.
            profile: what the plan was made of; needed for a plan that was read from a file.

        Raises:
            UsageError: the machines are too few, or micro-batches do not divide the batch.
            FileError: the profile is of another model.
        """
        from autopar.options.plan import PlanOptions
        from autopar.planner import reprice

        changes = {"batch": batch, "memory_bytes": memory_bytes, "bytes_per_s": bytes_per_s}
        asked = PlanOptions.of("reprice", changes)
        measured, machines = self._made_of(profile, cluster)
        priced = reprice(self, measured, machines, asked.batch, asked.memory_bytes, asked.bytes_per_s)
        return Plan.of(priced, measured, machines)

    def _made_of(
        self,
        profile: profiles.Profile | str | Path | None = None,
        cluster: clusters.Cluster | str | Path | None = None,
    ) -> tuple[profiles.Profile, clusters.Cluster]:
        from autopar.api.inputs import given_cluster, given_profile

        known = self._origin or (None, None)
        profile, cluster = profile or known[0], cluster or known[1]
        if profile is None or cluster is None:
            raise UsageError(
                "a plan that was read from a file needs its profile and cluster; pass `profile` and `cluster`"
            )
        return given_profile(profile), given_cluster(cluster)


def _fields(record: Record) -> dict[str, Any]:
    """Return what a record holds, to make one of a kind with more methods."""
    return {name: getattr(record, name) for name in type(record).model_fields}
