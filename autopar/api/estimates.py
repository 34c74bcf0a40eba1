"""Estimates: models to profile, and profiles of GPUs that are not there, with constants fitted to measured runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from autopar.errors import FileError, UsageError

if TYPE_CHECKING:
    from torch import nn

    from autopar.capture import UserModel
    from autopar.formats.cluster import Cluster
    from autopar.formats.profile import Profile
    from autopar.hardware.gpus import Gpu
    from autopar.options.profile import ProfileOptions
    from autopar.planner.costs.model import CostModel
    from autopar.planner.dictated import FixedStages
    from autopar.profiler.calibrate import Calibration, MeasuredRun, Observation
    from autopar.profiler.estimate import TeamShape, Workload
    from autopar.profiler.subject import Subject
    from autopar.progress import Progress


class DeviceKinds(NamedTuple):
    """The kinds of devices that a profile is asked for."""

    here: str | None
    """What is measured: ``auto``, ``cpu`` or ``cuda``; None: nothing is."""
    gpus: tuple[Gpu, ...]
    """Those that are not there, for which all is estimated."""


def device_kinds(options: ProfileOptions) -> DeviceKinds:
    """Return what ``device`` names; refuse other options that do not go with it.

    Raises:
        UsageError: a GPU is not known, a kind is named twice, or kinds do not go together, or with the options.
    """
    names = [name.strip() for name in options.device.split(",")]
    here = [name for name in names if name in ("auto", "cpu", "cuda")]
    asked = f"`device={options.device!r}`"
    gpus = tuple(gpu for name in names if name not in here for gpu in _gpus(asked, name))
    if here and not (len(names) == 1 or here == ["cuda"]):
        raise UsageError(
            f"{asked}: the ranks of a pipeline are all CPUs or all GPUs, and of several kinds one at most "
            "is measured here; name GPUs, and cuda for the one of this machine"
        )
    if len({gpu.name for gpu in gpus}) < len(gpus):
        raise UsageError(f"{asked}: the same GPU is named twice; name every kind once")
    measuring = {"threads": bool(gpus), "compile": bool(gpus), "budget_s": not here}
    for name in (name for name in options.non_defaults(measuring) if measuring[name]):
        shown = f"`{name}`" if name == "compile" else f"`{name}={getattr(options, name):g}`"
        how = "how long" if name == "budget_s" else "how"
        raise UsageError(f"{shown}: says {how} to measure, but {asked} is estimated; leave it out")
    fitting = f"`calibrate_with={str(options.calibrate_with)!r}`"
    if options.calibrate_with is not None and not gpus:
        raise UsageError(f"{fitting}: fits estimates; name a GPU that is not there with `device`")
    count = len(gpus) + len(here)
    if options.calibrate_with is not None and count > 1:
        raise UsageError(
            f"{fitting}: the runs of one kind of GPU, but {asked} names {count}; profile each with its own runs, "
            "and join the profiles with `autopar import profiles`"
        )
    return DeviceKinds(here[0] if here else None, gpus)


def _gpus(asked: str, name: str) -> tuple[Gpu, ...]:
    """Return the GPU of a name, or those of a cluster file."""
    from autopar.hardware.clusters import gpus_of
    from autopar.hardware.gpus import find

    if name.endswith(".toml"):
        return gpus_of(Path(name))
    try:
        return (find(name),)
    except UsageError as error:
        refused = UsageError(f"{asked}: none of auto, cpu and cuda, and {error}; `device='auto'` takes what is here")
        refused.meant = error.meant or (name, "auto")
        raise refused from error


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


def profile_kinds(user: UserModel, options: ProfileOptions, kinds: DeviceKinds, progress: Progress) -> Profile:
    """Return the profile of GPUs that are not there, and of a device that is if that is asked."""
    if not kinds.gpus:
        from autopar.profiler import profile

        return profile(user, options, progress)
    from autopar.hardware.kinds import NamedProfile, join_profiles
    from autopar.profiler.device import choose
    from autopar.profiler.subject import prepare

    if kinds.here is not None:
        choose(kinds.here)
    if options.precision is not None and options.precision != "fp64":
        for gpu in kinds.gpus:
            # Refused before anything is captured.
            gpu.flops_per_s(options.precision)
    subject = prepare(user, options, progress)
    found = [
        NamedProfile(f"`device={gpu.name!r}`", estimate_profile(subject, gpu, options, progress)) for gpu in kinds.gpus
    ]
    if kinds.here is not None:
        from autopar.profiler.profile import measure_layers

        # Last, for measuring moves the model to the device.
        found.insert(0, NamedProfile(f"`device={kinds.here!r}`", measure_layers(subject, options, progress)))
    return join_profiles(found)


def node_of(profile: Profile, gpus: int | None = None) -> Cluster | None:
    """Return a node of each kind that a profile has costs for, of as many GPUs as usual or as named; None of others."""
    from autopar.hardware.clusters import cluster_named
    from autopar.hardware.gpus import find, is_known, known_as

    names = [known_as(kind.device.name) for kind in profile.kinds]
    if not all(is_known(name) for name in names):
        return None
    return cluster_named("+".join(f"{find(name).domain if gpus is None else gpus}x{name}" for name in names))


def estimate_profile(subject: Subject, gpu: Gpu, options: ProfileOptions, progress: Progress) -> Profile:
    """Return the profile that a GPU would give, its constants fitted to measured runs if some are named.

    Raises:
        UsageError: the GPU does not compute in the precision.
        FileError: the runs cannot be read, or one of them cannot be.
    """
    from autopar.profiler.estimate import profile_of, workload
    from autopar.profiler.kernels import default_constants

    constants, notes = default_constants(gpu), tuple[str, ...]()
    if options.calibrate_with is not None:
        calibration = calibrate_gpu(subject, gpu, options, options.calibrate_with, progress)
        constants, notes = calibration.constants, calibration.notes()
    return profile_of(
        subject, workload(subject, gpu, options.batch, progress, tensor=options.tensor), options.batch, constants, notes
    )


def calibrate_gpu(subject: Subject, gpu: Gpu, options: ProfileOptions, path: Path, progress: Progress) -> Calibration:
    """Fit the constants of a GPU to measured runs of this model or others.

    Raises:
        FileError: the runs cannot be read, or one of them cannot be; names the row.
    """
    from autopar.profiler.calibrate import calibrate, read_runs
    from autopar.profiler.kernels import default_constants

    runs = read_runs(path)
    subjects = {spec: _prepare_subject(spec, runs, options, progress) for spec in {r.model for r in runs if r.model}}
    observations = []
    for spec in dict.fromkeys(run.model for run in runs):
        own = [run for run in runs if run.model == spec]
        observations += _observe(subjects[spec] if spec else subject, gpu, own, progress)
    progress(f"fitting constants to {len(runs)} runs", 0.0)
    return calibrate(observations, default_constants(gpu))


def _prepare_subject(spec: str, runs: tuple[MeasuredRun, ...], options: ProfileOptions, progress: Progress) -> Subject:
    from autopar.capture import load
    from autopar.profiler.subject import prepare

    with _in_column(next(run for run in runs if run.model == spec), "model"):
        return prepare(load(spec), replace(options, batch=1), progress)


@contextmanager
def _in_column(run: MeasuredRun, column: str) -> Iterator[None]:
    """Have an error name the row and the column of what is wrong."""
    try:
        yield
    except (FileError, UsageError) as error:
        raise FileError(f"{run.at}, column {column}: {str(error).removeprefix('`stages`: ')}") from error


def _observe(subject: Subject, gpu: Gpu, runs: list[MeasuredRun], progress: Progress) -> list[Observation]:
    """Return the runs of one model, whose layers are estimated at the rows that its replicas had."""
    from autopar.options.plan import PlanOptions
    from autopar.ownership import Replicas
    from autopar.planner.candidate import Family
    from autopar.planner.costs.model import CostModel
    from autopar.planner.dictated import with_teams
    from autopar.planner.dictated_run import DictatedRun
    from autopar.profiler.calibrate import Observation
    from autopar.profiler.estimate import profile_of, workload
    from autopar.profiler.kernels import default_constants

    names = [layer.name for layer in subject.graph.layers]
    stages = [_stages(run, names) for run in runs]
    rows = {count for run, own in zip(runs, stages, strict=True) for count in _rows(run, own.widths)}
    largest = max(size for own in stages for size in own.team_sizes)
    load: Workload = workload(subject, gpu, max(rows), progress, sizes=sorted(rows), tensor=largest)
    profile = profile_of(subject, load, max(rows), default_constants(gpu))
    costs: dict[tuple[int, str | None], CostModel] = {}
    observations = []
    for run, own in zip(runs, stages, strict=True):
        key = (run.devices, run.cluster)
        if key not in costs:
            costs[key] = CostModel(profile, _cluster(run, gpu), PlanOptions(gpus=run.devices))
        sliced = run.sequence_parallel
        with _in_column(run, "tensor" if run.tensor > 1 else "stages"):
            with_teams(profile, PlanOptions(sequence_parallel=sliced), own)
        family = Family(run.micro_batches, run.batch // run.micro_batches, run.schedule)
        replicas = [
            Replicas(width, shard=run.shard, team=size, sliced=sliced and size > 1)
            for width, size in zip(own.widths, own.team_sizes, strict=True)
        ]
        dictated = DictatedRun(costs[key], family, own.cuts, replicas, _recomputed_layers(run, names))
        observations.append(Observation(load, dictated.step_s, run.step_s, _teams(own, sliced=sliced)))
    return observations


def _teams(stages: FixedStages, *, sliced: bool) -> tuple[TeamShape, ...]:
    """Return which ranks ran each layer; none where each ran on one."""
    from autopar.profiler.estimate import TeamShape

    if not stages.has_teams:
        return ()
    ends = zip((0, *stages.cuts), stages.cuts, stages.team_sizes, strict=False)
    return tuple(TeamShape(size, sliced and size > 1) for first, stop, size in ends for _ in range(first, stop))


def _stages(run: MeasuredRun, names: list[str]) -> FixedStages:
    """Return where a run's stages end, and their replicas."""
    from autopar.ownership import even_shares
    from autopar.planner.dictated import FixedStages, parse

    if not run.stages.isdecimal():
        with _in_column(run, "stages"):
            dictated = parse(run.stages, names)
        used = sum(width * size for width, size in zip(dictated.widths, dictated.team_sizes, strict=True))
        if used != run.devices:
            raise FileError(f"{run.at}, column devices: {run.devices}, but the stages have {used}")
        return dictated
    count, each = int(run.stages), run.devices // (int(run.stages) * run.tensor or 1)
    if not 1 <= count <= len(names) or count * each * run.tensor != run.devices:
        teams = f", {run.tensor} to a replica" if run.tensor > 1 else ""
        raise FileError(
            f"{run.at}, column stages: {count} equal stages cannot be made of {len(names)} layers on {run.devices} "
            f"devices{teams}; the devices must be a multiple of them"
        )
    return FixedStages(tuple(accumulate(even_shares(len(names), count))), (each,) * count, (run.tensor,) * count)


def _recomputed_layers(run: MeasuredRun, names: list[str]) -> tuple[int, ...]:
    """Return the layers whose backward ran their forward again."""
    if run.recompute in ("none", "full"):
        return tuple(range(len(names))) if run.recompute == "full" else ()
    ends = [[int(end) for end in part.split("-")] for part in run.recompute.split(",")]
    whole = all(each[0] <= each[-1] < len(names) for each in ends)
    found = [layer for each in ends for layer in range(each[0], each[-1] + 1)] if whole else []
    if not whole or len(set(found)) < len(found):
        raise FileError(
            f"{run.at}, column recompute: {run.recompute!r} is not of layers 0 to {len(names) - 1}, each named once"
        )
    return tuple(found)


def _rows(run: MeasuredRun, widths: tuple[int, ...]) -> set[int]:
    """Return the samples of a micro-batch that replicas take."""
    from autopar.ownership import even_shares

    size = run.batch // run.micro_batches
    if size < max(widths):
        raise FileError(
            f"{run.at}, column micro_batches: a micro-batch of {size} samples has none for some of {max(widths)} "
            "replicas"
        )
    return {share for width in widths for share in even_shares(size, width)}


def _cluster(run: MeasuredRun, gpu: Gpu) -> Cluster:
    from autopar.hardware.clusters import find_cluster
    from autopar.hardware.gpus import is_known

    if run.cluster is None and not is_known(gpu.name):
        raise FileError(f"{run.at}, column cluster: {gpu.name} has no built-in one; write the file that describes it")
    nodes = -(-run.devices // gpu.domain)
    usual = f"{run.devices}x{gpu.name}" if nodes == 1 else f"{nodes}x{gpu.domain}x{gpu.name}"
    with _in_column(run, "cluster"):
        cluster = find_cluster(run.cluster or usual)
    if len(cluster.devices) < run.devices:
        raise FileError(f"{run.at}, column devices: {run.devices}, but the cluster has {len(cluster.devices)}")
    return cluster
