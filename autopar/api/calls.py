"""Calls: what autopar does, a function for each command; the command line parses, calls one of these, and prints.

Models are at hand, or in files as commands name them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.api.inputs import model_inputs, origin_of, read_inputs
from autopar.api.objects import (
    Cluster,
    Comparison,
    Plan,
    PlanFile,
    Profile,
    Report,
    RunComparison,
    Timeline,
    shown_as,
)
from autopar.errors import UsageError
from autopar.formats import cluster as clusters
from autopar.formats import profile as profiles
from autopar.formats.references import rebase_paths
from autopar.options.contest import ContestOptions
from autopar.options.option import options_of, takes
from autopar.options.plan import PlanOptions
from autopar.options.probe import ProbeOptions
from autopar.options.profile import ProfileOptions
from autopar.options.train import RunOptions
from autopar.progress import Progress, no_progress

if TYPE_CHECKING:
    import torch
    from torch import nn

    from autopar.api.exports import Export
    from autopar.formats.checkpoint import CheckpointView
    from autopar.formats.prediction import MetPlan
    from autopar.formats.report import Verification
    from autopar.runtime.outcome import Outcome
    from autopar.runtime.start.launch import StepProgress


@takes(ProfileOptions)
def profile(
    model: nn.Module | str | Path,
    batch: object = 64,
    options: ProfileOptions | None = None,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    layers: Callable[[nn.Module], list[nn.Module]] | None = None,
    ignored_state: Sequence[str] = (),
    progress: Progress = no_progress,
    **named: Any,  # noqa: ANN401
) -> Profile:
    """Measure every layer of a model on this machine, or estimate them for GPUs that are not there.

    Of a module a copy is measured, so that it stays as it is.

    Args:
        model: the module to train; or a Python file with ``model()``, ``package.module:factory``, or ``hf:`` and a
            Transformers configuration.
        batch: a mini-batch as the data loader gives it: a dict or tuple of tensors, or one tensor; for a model in a
            file, the samples of a step.
        options: how to measure; None: what ``named`` says.
        loss: ``loss(output, batch)``, a mean over samples, or a sum and a count; None: the output carries it.
        optimizer: makes an optimizer of some parameters; None: ``AdamW(parameters, lr=1e-3)``.
        layers: the model's layers, where it cannot be captured.
        ignored_state: paths of Python state that forwards may change, since it is only logged.
        progress: told what is done.
        named: fields of :class:`autopar.options.profile.ProfileOptions`, such as ``device`` or ``precision``.

    Raises:
        UsageError: the options do not fit the machine or each other.
        ModelError: model, batch and loss do not fit together.
        CaptureError: the model cannot be captured.

    >>> profile = autopar.profile("mlp.py", batch=64, budget_s=0.1)
    >>> len(profile.layers), profile.layers[0].name
    (11, '0')
    """
    from autopar.api.estimates import device_kinds, profile_kinds, user_model

    asked = ProfileOptions.of("profile", named, options)
    kinds = device_kinds(asked)
    functions = {"loss": loss, "optimizer": optimizer, "layers": layers}
    user, rows = user_model(model, batch, functions, tuple(ignored_state), asked)
    made = profile_kinds(user, replace(asked, batch=rows, device=kinds.here or "cpu"), kinds, progress)
    return shown_as(Profile, made)


def estimate(model: nn.Module | str | Path, batch: object = 64, *, device: str, **options: Any) -> Profile:  # noqa: ANN401
    """Return the profile that GPUs would give that are not there.

    Args:
        model: as of :func:`profile`.
        batch: likewise.
        device: the name of a GPU, such as ``H100``, or several with commas between them.
        options: the others of :func:`profile`, of which ``calibrate_with`` fits estimates to measured runs.

    Raises:
        UsageError: a GPU is not known.
        AutoparError: as :func:`profile`.

    >>> profile = autopar.estimate("mlp.py", batch=64, device="H100")
    >>> profile.device.name, profile.layers[0].costs[0].provenance
    ('H100-SXM', 'estimated')
    """
    from autopar.api.estimates import device_kinds

    if device_kinds(ProfileOptions(device=device)).here is not None:
        raise UsageError(f"`device={device!r}`: is measured, not estimated; name GPUs alone, such as H100")
    return profile(model, batch, device=device, **options)


@takes(PlanOptions)
def plan(
    profile: profiles.Profile | str | Path,
    cluster: clusters.Cluster | str | Path | None = None,
    options: PlanOptions | None = None,
    *,
    progress: Progress = no_progress,
    **named: Any,  # noqa: ANN401
) -> Plan:
    """Return the fastest plan that fits, with its lower bound and alternatives.

    Args:
        profile: what was measured, or its file.
        cluster: the machines, their file, or their name, such as ``4x8xH100:400Gbps``; None: ``gpus`` of the profile's
            devices, with estimated links.
        options: what to plan for; None: what ``named`` says.
        progress: told what is done; what it raises ends the search.
        named: fields of :class:`autopar.options.plan.PlanOptions`, such as ``gpus``, ``batch`` or ``schedule``;
            ``memory_bytes`` and ``bytes_per_s`` may be text, such as ``"16GiB"`` and ``"200Gbps"``.

    Raises:
        UsageError: options contradict the profile or each other.
        InfeasibleError: nothing fits the memory; names the stage and by how much.

    >>> plan = autopar.plan("profile.json", gpus=2, memory_bytes="1GiB")
    >>> plan.predicted.step_s >= plan.predicted.lower_bound_s
    True
    >>> plan.save("best.json")
    """
    from autopar.api.inputs import resolve_machines
    from autopar.planner import plan as search

    asked = PlanOptions.of("plan", named, options)
    measured, machines = resolve_machines(profile, cluster, asked)
    met: list[MetPlan] = []
    return Plan.of(search(measured, machines, asked, progress, met.extend), measured, machines, met)


@takes(PlanOptions)
def compare(
    profile: profiles.Profile | str | Path,
    cluster: clusters.Cluster | str | Path | None = None,
    options: PlanOptions | None = None,
    *,
    progress: Progress = no_progress,
    **named: Any,  # noqa: ANN401
) -> Comparison:
    """Return autopar's plan beside those of GPipe, torchgpipe, PipeDream, DAPPLE, HetPipe, and plain parallelism.

    torch's DataParallel and parameter servers are priced beside them; autopar does not run these.

    Arguments are those of :func:`plan`.

    Raises:
        UsageError: options contradict the profile or each other.
        InfeasibleError: nothing fits the memory; names the stage and by how much.

    >>> rows = autopar.compare("profile.json", gpus=2).rows
    >>> fastest = min(rows, key=lambda row: row.step_s or 1e9)
    >>> {"autopar", "GPipe", "PipeDream", "DAPPLE"} <= {row.name for row in rows}
    True
    """
    from autopar.api.inputs import resolve_machines
    from autopar.planner.comparison import compare as judge

    asked = PlanOptions.of("compare", named, options)
    measured, machines = resolve_machines(profile, cluster, asked)
    found = judge(measured, machines, asked, progress)
    return Comparison(found.rows, Plan.of(found.plan, measured, machines))


@takes(PlanOptions)
@takes(ContestOptions)
def compare_runs(
    profile: profiles.Profile | str | Path,
    cluster: clusters.Cluster | str | Path | None = None,
    options: PlanOptions | None = None,
    contest: ContestOptions | None = None,
    *,
    progress: Progress = no_progress,
    **named: Any,  # noqa: ANN401
) -> RunComparison:
    """Train a model by every schedule, weight policy and way to shard, and by the plain loop, and compare them.

    Seed by seed, all begin with the same weights and read the same mini-batches. What cannot be trained, fails or
    diverges is in front. Of measured seconds, the first mini-batch is left out.

    Args:
        profile: what was measured of the model, or its file.
        cluster: as of :func:`plan`; to be there, but for what ``on`` names.
        options: what all plans are asked; None: what ``named`` says.
        contest: how they are trained; None: likewise.
        progress: told what is done.
        named: fields of :class:`autopar.options.contest.ContestOptions`, such as ``steps``, ``seeds`` or ``on``, and of
            :class:`autopar.options.plan.PlanOptions`, such as ``gpus`` or ``micro_batches``.

    Raises:
        UsageError: options contradict the profile or each other, or nobody can be trained here.
        FileError: results cannot be kept in the folder that is named.
        InfeasibleError: nothing fits the memory.

    >>> found = autopar.compare_runs("profile.json", gpus=2, steps=100, loss=2.5)  # doctest: +SKIP
    >>> found.to_frame()  # doctest: +SKIP
    """
    from autopar.api.contests import check_results, compare_by_running
    from autopar.api.inputs import resolve_machines
    from autopar.planner.contestants import contestants

    of_contest = {name: value for name, value in named.items() if name in options_of(ContestOptions)}
    of_plans = {name: value for name, value in named.items() if name not in of_contest}
    asked = ContestOptions.of("compare_runs", of_contest, contest)
    planned = PlanOptions.of("compare_runs", of_plans, options)
    if asked.on is not None and cluster is not None:
        raise UsageError(f"`on={asked.on!r}` names the cluster that is planned for; leave out `cluster`")
    if asked.results is not None:
        check_results(asked.results)
    measured, machines = resolve_machines(profile, asked.on or cluster, planned)
    if not isinstance(profile, profiles.Profile):
        model = rebase_paths(measured.model, Path(profile), Path("plan.json"))
        measured = measured.model_copy(update={"model": model})
    found = contestants(measured, machines, planned, asked.steps, progress)
    return RunComparison(*compare_by_running(found, measured, planned.seed, asked, progress))


def simulate(
    plan: PlanFile,
    profile: profiles.Profile | str | Path | None = None,
    cluster: clusters.Cluster | str | Path | None = None,
    *,
    times_of: str | None = None,
    program: str | Path | None = None,
    progress: Progress = no_progress,
) -> Timeline:
    """Return when every action of a plan's step is predicted to run.

    Args:
        plan: a plan, or its file.
        profile: what it was made of, in place of what it knows or its file records.
        cluster: likewise; a cluster, its file, or its name.
        times_of: the kind of the profile's devices whose times stand for others.
        program: a file of the plan's program, edited or not; None: what the plan expands to.
        progress: told what is done.

    Raises:
        FileError: a file is missing, malformed, or no longer what it was when the plan was made.
        ProgramError: the program does not carry out its plan.
        UsageError: the program is too long to be listed action by action, or asynchronous.

    >>> timeline = autopar.simulate("plan.json")
    >>> timeline.save("predicted.json")
    >>> 0 <= timeline.bubble() < 1
    True
    """
    from autopar.api.inputs import program_of
    from autopar.planner import simulate as timeline_of

    inputs = read_inputs(plan, profile, cluster, times_of, progress)
    return Timeline.of(timeline_of(*inputs, program_of(program, inputs[0])))


def verify(
    plan: PlanFile, *, steps: int = 3, timeout_s: float = 300.0, progress: Progress = no_progress
) -> Verification:
    """Train some steps by a plan's ranks and by a plain loop, as processes of this host, and compare both.

    Args:
        plan: a plan, or its file; of one for GPUs ranks compute on the CPU.
        steps: how many mini-batches are trained.
        timeout_s: longest that a rank may stand still.
        progress: told what is done.

    Raises:
        UsageError: the plan cannot be run, or not on this host, or not be compared; says why.
        AutoparError: the model does not fit the plan, or a rank failed.

    >>> autopar.verify("plan.json", steps=1).equal
    True
    """
    inputs = model_inputs(plan)

    from autopar.runtime.start.verify import verify as check

    return check(*inputs, steps, timeout_s, progress)


@takes(RunOptions)
def train(
    plan: PlanFile,
    options: RunOptions | None = None,
    *,
    seed: int | None = None,
    progress: StepProgress | None = None,
    phases: Progress = no_progress,
    **named: Any,  # noqa: ANN401
) -> Outcome:
    """Train on processes of this host, one per rank, and compare what they take with the prediction.

    Args:
        plan: a plan, or its file.
        options: how to train; None: what ``named`` says.
        seed: run seed, in place of the plan's.
        progress: called with (step, loss) as steps end.
        phases: told what else is done.
        named: fields of :class:`autopar.options.train.RunOptions`, such as ``steps`` or ``clip_norm``. After a
            ``resume``, ``steps`` and ``epochs`` count from the run's first step; with ``time_layers`` the outcome
            serves :func:`recalibrate`.

    Raises:
        AutoparError: the model does not fit the plan, or a rank failed; no process is left.

    >>> outcome = autopar.train("plan.json", steps=2, clip_norm=1.0, checkpoint="checkpoints")
    >>> len(outcome.report.loss), outcome.report.ranks
    (2, 2)
    >>> outcome.report.save("report.json")
    """
    asked = RunOptions.of("train", named, options)
    planned, model, data = model_inputs(plan, seed)

    from autopar.api.runs import advise_on_memory, compare_with_prediction, tell_throughput
    from autopar.runtime.start.launch import run

    with advise_on_memory(planned, plan):
        outcome = run(planned, model, replace(asked, data=data), progress)
    outcome = tell_throughput(outcome, planned, partial(origin_of, plan))
    outcome = compare_with_prediction(outcome, planned, partial(simulate, plan, progress=phases))
    return replace(outcome, report=shown_as(Report, outcome.report), timeline=Timeline.of(outcome.timeline))


def checkpoints(
    folder: str | Path, *, thorough: bool = False, progress: Progress = no_progress
) -> list[CheckpointView]:
    """Return the checkpoints of a folder, by their steps, each with its manifest or with what is wrong with it.

    Args:
        folder: what :func:`train` was given as ``checkpoint``.
        thorough: whether every file is read, and its hash compared with the manifest's.
        progress: told what is done.

    Raises:
        FileError: there is no such folder, or nothing in it.

    >>> [each.step for each in autopar.checkpoints("saved")]
    [2]
    """
    from autopar.runtime.checkpoint.folder import views

    return views(Path(folder), thorough=thorough, progress=progress)


def export_checkpoint(folder: str | Path, output: str | Path, *, step: int | None = None) -> int:
    """Write the model of a checkpoint as one safetensors file, as ``load_state_dict`` takes it; return its step.

    Args:
        folder: what :func:`train` was given as ``checkpoint``.
        output: where to write; a file that is there is replaced.
        step: of which step; None: of the newest that is sound.

    Raises:
        FileError: there is no such checkpoint, or it is damaged.
        UsageError: there are others, but none of that step.

    >>> autopar.export_checkpoint("saved", "model.safetensors")
    2
    """
    from autopar.runtime.checkpoint.folder import export

    return export(Path(folder), Path(output), step)


@takes(ProbeOptions)
def probe(
    options: ProbeOptions | None = None,
    *,
    progress: Progress = no_progress,
    **named: Any,  # noqa: ANN401
) -> Cluster:
    """Measure messages, all-reduce, all-gather and reduce-scatter between ranks of this machine.

    Args:
        options: what to measure; None: what ``named`` says.
        progress: told what is done.
        named: fields of :class:`autopar.options.probe.ProbeOptions`, such as ``ranks``.

    Raises:
        UsageError: the machine has no such devices, or too few.
        TrainingError: a rank failed.

    >>> cluster = autopar.probe(ranks=2, device="cpu", quick=True, largest_bytes=65536)
    >>> sorted({curve.kind for curve in cluster.curves})
    ['all_gather', 'all_reduce', 'p2p', 'reduce_scatter']
    """
    asked = ProbeOptions.of("probe", named, options)

    from autopar.profiler.probe import Probe, cluster_here

    probe = Probe(asked.quick, asked.largest_bytes)
    return shown_as(Cluster, cluster_here(asked.ranks, asked.device, asked.threads, probe, clusters.PROBED, progress))


def links(
    *, ranks: int | None = None, device: str = "auto", threads: int = 1, progress: Progress = no_progress
) -> Cluster:
    """Return this machine as a cluster, from what ranks soon measure: what `autopar profile` writes beside a profile.

    Arguments are those of :func:`probe`.

    >>> cluster = autopar.links(ranks=2, device="cpu")  # doctest: +SKIP
    """
    from autopar.profiler.probe import cluster_here

    return shown_as(Cluster, cluster_here(ranks, device, threads, None, "local", progress))


def export(
    plan: PlanFile,
    target: str,
    *,
    output: str | Path | None = None,
    nearest: bool = False,
    schedule_file: str | None = None,
    profile: profiles.Profile | str | Path | None = None,
    cluster: clusters.Cluster | str | Path | None = None,
) -> Export:
    """Return a plan as the files of another trainer; nothing is written.

    Args:
        plan: a plan, or its file.
        target: the format, such as ``torch``; :data:`autopar.api.exports.TARGETS` has all.
        output: where the main file is to be, which what it names is relative to; None: beside the plan.
        nearest: whether the nearest plan is exported where the trainer cannot express this one; ``notes`` say what
            that costs.
        schedule_file: of torchtitan, the file that is to hold the plan's own schedule; None: one of torch's.
        profile: what the plan was made of, in place of what it knows or its file records.
        cluster: likewise.

    Raises:
        UsageError: there is no such format, or it cannot express the plan; says why.
        FileError: a file is missing, malformed, or no longer what it was when the plan was made.
        InfeasibleError: no plan that the trainer can express fits the memory.

    >>> [file.name for file in autopar.export("plan.json", "torch").files]
    ['schedule.csv', 'stages.py']
    """
    from autopar.api.exports import export_plan
    from autopar.api.inputs import planned_file

    resolved, path = read_inputs(plan, profile, cluster), planned_file(plan)
    return export_plan(target, resolved, path, None if output is None else Path(output), schedule_file, nearest=nearest)
