"""Profiles of GPUs that are not there, with constants fitted to measured runs where the user has some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import FileError, UsageError

if TYPE_CHECKING:
    from autopar.formats.cluster import Cluster
    from autopar.formats.profile import Profile
    from autopar.hardware.gpus import Gpu
    from autopar.planner.costs.model import CostModel
    from autopar.planner.dictated_run import DictatedRun
    from autopar.profiler.calibrate import Calibration, Observation
    from autopar.profiler.estimate import Workload
    from autopar.profiler.options import ProfileOptions
    from autopar.profiler.runs import MeasuredRun
    from autopar.profiler.subject import Subject

__all__ = ["calibrated", "estimated"]

GPUS_PER_NODE = 8


def estimated(
    subject: Subject,
    gpu: Gpu,
    options: ProfileOptions,
    runs: Path | None,
    progress: Callable[[str, float], None],
) -> Profile:
    """Return the profile that a GPU would give, its constants fitted to the runs of a CSV file if there is one.

    Raises:
        UsageError: the GPU does not compute in the precision.
        FileError: the runs cannot be read, or one of them cannot be.
    """
    from autopar.profiler.estimate import estimate, profile_of, workload

    if runs is None:
        return estimate(subject, gpu, options, progress=progress)
    calibration = calibrated(subject, gpu, options, runs, progress)
    load = workload(subject, gpu, options.batch, progress)
    return profile_of(subject, load, options.batch, calibration.constants, calibration.notes())


def calibrated(
    subject: Subject, gpu: Gpu, options: ProfileOptions, path: Path, progress: Callable[[str, float], None]
) -> Calibration:
    """Fit the constants of a GPU to measured runs of this model or others.

    Raises:
        FileError: the runs cannot be read, or one of them cannot be; names the row.
    """
    from autopar.profiler.calibrate import calibrate
    from autopar.profiler.roofline import default_constants
    from autopar.profiler.runs import read_runs

    runs = read_runs(path)
    subjects = {spec: _prepared(spec, runs, options, progress) for spec in {r.model for r in runs if r.model}}
    observations = []
    for spec in dict.fromkeys(run.model for run in runs):
        own = [run for run in runs if run.model == spec]
        observations += _observe(subjects[spec] if spec else subject, gpu, own, progress)
    progress(f"fitting constants to {len(runs)} runs", 0.0)
    return calibrate(observations, default_constants(gpu))


def _prepared(
    spec: str, runs: tuple[MeasuredRun, ...], options: ProfileOptions, progress: Callable[[str, float], None]
) -> Subject:
    from autopar.capture import load
    from autopar.profiler.subject import prepare

    at = next(run.at for run in runs if run.model == spec)
    try:
        return prepare(load(spec), replace(options, batch=1), progress)
    except (FileError, UsageError) as error:
        raise FileError(f"{at}, column model: {error}") from error


def _observe(
    subject: Subject, gpu: Gpu, runs: list[MeasuredRun], progress: Callable[[str, float], None]
) -> list[Observation]:
    """Return the runs of one model, whose layers are estimated at the rows that its replicas had."""
    from autopar.planner.costs.model import CostModel
    from autopar.planner.options import PlanOptions
    from autopar.profiler.calibrate import Observation
    from autopar.profiler.estimate import profile_of, workload
    from autopar.profiler.roofline import default_constants

    names = [layer.name for layer in subject.graph.layers]
    stages = [_stages(run, names) for run in runs]
    rows = {count for run, (_, widths) in zip(runs, stages, strict=True) for count in _rows(run, widths)}
    load: Workload = workload(subject, gpu, max(rows), progress, sizes=sorted(rows))
    profile = profile_of(subject, load, max(rows), default_constants(gpu))
    costs: dict[tuple[int, str | None], CostModel] = {}
    observations = []
    for run, (cuts, widths) in zip(runs, stages, strict=True):
        key = (run.devices, run.cluster)
        if key not in costs:
            costs[key] = CostModel(profile, _cluster(run, gpu), PlanOptions(gpus=run.devices))
        dictated = _dictated(run, costs[key], cuts, widths)
        observations.append(Observation(load, dictated, run.recompute, run.step_s))
    return observations


def _stages(run: MeasuredRun, names: list[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the layers before which a run's stages end, and their replicas."""
    from autopar.planner.dictated import parse
    from autopar.schedules.route import even_shares

    if not run.stages.isdecimal():
        try:
            dictated = parse(run.stages, names)
        except UsageError as error:
            raise FileError(f"{run.at}, column stages: {str(error).removeprefix('--stages: ')}") from error
        used = sum(dictated.widths)
        if used != run.devices:
            raise FileError(f"{run.at}, column devices: {run.devices}, but the stages have {used} replicas")
        return dictated.cuts, dictated.widths
    count = int(run.stages)
    if not 1 <= count <= len(names) or run.devices % count:
        raise FileError(
            f"{run.at}, column stages: {count} equal stages cannot be made of {len(names)} layers on {run.devices} "
            "devices; the devices must be a multiple of them"
        )
    return tuple(accumulate(even_shares(len(names), count))), (run.devices // count,) * count


def _rows(run: MeasuredRun, widths: tuple[int, ...]) -> set[int]:
    """Return the samples of a micro-batch that replicas take."""
    from autopar.schedules.route import even_shares

    size = run.batch // run.micro_batches
    if size < max(widths):
        raise FileError(
            f"{run.at}, column micro_batches: a micro-batch of {size} samples has none for some of {max(widths)} "
            "replicas"
        )
    return {share for width in widths for share in even_shares(size, width)}


def _cluster(run: MeasuredRun, gpu: Gpu) -> Cluster:
    from autopar.hardware.clusters import cluster_named, is_file, read_cluster

    nodes = -(-run.devices // GPUS_PER_NODE)
    usual = f"{run.devices}x{gpu.name}" if nodes == 1 else f"{nodes}x{GPUS_PER_NODE}x{gpu.name}"
    try:
        named = run.cluster or usual
        cluster = read_cluster(named) if is_file(named) else cluster_named(named)
    except (FileError, UsageError) as error:
        raise FileError(f"{run.at}, column cluster: {error}") from error
    if len(cluster.devices) < run.devices:
        raise FileError(f"{run.at}, column devices: {run.devices}, but the cluster has {len(cluster.devices)}")
    return cluster


def _dictated(run: MeasuredRun, costs: CostModel, cuts: tuple[int, ...], widths: tuple[int, ...]) -> DictatedRun:
    from autopar.planner.dictated_run import DictatedRun

    return DictatedRun(costs, cuts, widths, run.micro_batches, run.batch // run.micro_batches, run.schedule)
