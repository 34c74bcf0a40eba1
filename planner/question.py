"""Question: what is planned, and which plans may answer it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from autopar.errors import UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.profile import Profile
from autopar.planner.candidate import Candidate, Family, has_chunks, plain
from autopar.planner.constraints import Constraints, FixedStages, parse, runnable
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions, admissible_options
from autopar.planner.search.judge import equal_widths
from autopar.planner.search.other_schedules import shape_of
from autopar.planner.simulator.simulate import Simulator
from autopar.progress import Progress, no_progress


@dataclass(frozen=True)
class Question:
    """A profile and a cluster, as the simulator prices them, and what the user asks of their plan."""

    simulator: Simulator
    options: PlanOptions
    fixed_stages: FixedStages | None = None
    """Stages that the user dictates."""

    @classmethod
    def of(cls, profile: Profile, cluster: Cluster, options: PlanOptions, progress: Progress = no_progress) -> Question:
        """Read what the user asks.

        Raises:
            UsageError: the options contradict the profile, the cluster or each other.
        """
        names = [layer.name for layer in profile.layers]
        fixed_stages = None if options.stages is None else parse(options.stages, names)
        options = options if fixed_stages is None else _options_for_stages(fixed_stages, options)
        options = replace(options, gpus=options.gpus or len(cluster.devices))
        question = cls(Simulator(CostModel(profile, cluster, options), progress=progress), options, fixed_stages)
        question._check_stages()
        return question

    @property
    def costs(self) -> CostModel:
        """Prices of the profile on the cluster."""
        return self.simulator.costs

    @cached_property
    def families(self) -> list[Family]:
        """Those that the options admit, some plan of which can run."""
        return runnable(self.costs, self.options)

    @cached_property
    def constraints(self) -> Constraints:
        """What the options forbid of stages."""
        return Constraints.of(self.costs, self.options)

    def under(self, options: PlanOptions) -> Question:
        """Return the question of the same profile and cluster, priced anew, with other options.

        Raises:
            UsageError: these contradict the profile.
        """
        options = admissible_options(options, self.costs.profile)
        costs = CostModel(self.costs.profile, self.costs.cluster, options)
        return Question(Simulator(costs), options, self.fixed_stages)

    def excluding_option(self, candidate: Candidate) -> str | None:
        """Return the option that excludes a plan of others; None where it may be chosen."""
        costs, options, stages = self.costs, self.options, candidate.stages
        shards = {stage.shard for stage in stages if len(stage.devices) > 1}
        broken = self.constraints.broken(stages, costs.kind_of)
        if broken is not None:
            return broken.text
        excludes = {
            "`use_all`": options.use_all and len(candidate.devices) < len(costs.devices),
            f"`shard={options.shard!r}`": options.shard != "auto" and not shards <= {options.shard},
            f"`schedule={options.schedule!r}`": not _as_asked(options.schedule, candidate),
            f"`recompute={options.recompute!r}`": options.recompute != "auto"
            and _recomputes(costs, candidate) != options.recompute,
            "`equal_widths`": options.equal_widths and not equal_widths(stages),
        }
        return next((option for option, excluding in excludes.items() if excluding), None)

    def _check_stages(self) -> None:
        """Refuse more stages than can be."""
        layers, devices = self.costs.layer_count, len(self.costs.devices)
        most, on = min(layers, devices), f" on {devices} devices"
        if self.options.schedule != "auto" and has_chunks(self.options.schedule):
            most, on = layers, ""
        if self.options.min_stages > most:
            raise UsageError(f"`min_stages={self.options.min_stages}`: {layers} layers{on} make at most {most} stages")


def _options_for_stages(fixed_stages: FixedStages, options: PlanOptions) -> PlanOptions:
    needed = sum(fixed_stages.widths if options.schedule == "auto" else shape_of(fixed_stages, options).widths)
    if options.gpus is not None and needed > options.gpus:
        raise UsageError(f"`stages` needs {needed} devices, but `gpus` is {options.gpus}")
    if options.use_all and options.gpus is not None and needed < options.gpus:
        raise UsageError(f"`stages` uses {needed} devices, but `use_all` asks for all {options.gpus}")
    if len(fixed_stages.cuts) < options.min_stages:
        raise UsageError(f"`stages` has {len(fixed_stages.cuts)} stages, but `min_stages` is {options.min_stages}")
    return replace(options, gpus=options.gpus or needed)


def _as_asked(schedule: str, candidate: Candidate) -> bool:
    """Whether a candidate is of a schedule; with all in flight, `1f1b` and `gpipe` are one."""
    if schedule == "auto":
        return True
    whole = plain(schedule) and plain(candidate.schedule)
    return schedule == candidate.schedule or (whole and (schedule == "1f1b" or candidate.all_in_flight))


def _recomputes(costs: CostModel, candidate: Candidate) -> str:
    """Return whether no layer is recomputed, or all that may be; or ``auto``."""
    again = sum(len(stage.recompute) for stage in candidate.stages)
    if not again:
        return "none"
    kind = costs.kind_of[candidate.stages[0].devices[0]]
    most = len(costs.recompute_levels(candidate.micro_batch_size, kind)[-1])
    return "full" if again == most else "auto"
