"""Worker: what every rank does in a training run, however it was started.

In come a plan, a program and a workspace; out comes a rank's result. It builds the rank's job, runs its steps, notes
when each began and ended, looks inside stages in the first steps alone (times, FLOPs, memory), and writes weights, and
what others compare its training by, to files.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import TypeAdapter

from autopar.capture.graph import LayerGraph
from autopar.capture.model.source import UserModel, load
from autopar.capture.plain.loop import float64_model
from autopar.formats.plan import Plan
from autopar.formats.program import Fault, Program
from autopar.options.train import RunOptions, TrainSettings
from autopar.ranks.allocator import keep_pages
from autopar.ranks.board import FINISHED
from autopar.ranks.context import RankContext
from autopar.ranks.meeting import listens_everywhere
from autopar.runtime.checkpoint.saving import ComparisonFiles, write_stages
from autopar.runtime.checkpoint.training import Attempt, RunCheckpoints
from autopar.runtime.clocks import LayerTimes, clock_of
from autopar.runtime.data import same_samples
from autopar.runtime.device import PeakMemory, check_capacity, is_out_of_memory, out_of_memory
from autopar.runtime.faults import Drill, Injection
from autopar.runtime.job import DEFAULTS, Job
from autopar.runtime.log import RunLog
from autopar.runtime.loss import StepRecord
from autopar.runtime.messages.staging import connect
from autopar.runtime.outcome import ForwardFlops, RankResult, StepResults, peak_of
from autopar.runtime.stage.waves import EagerWaveWeights
from autopar.runtime.start.between import RunEvaluation
from autopar.runtime.start.following import FileWatch
from autopar.runtime.start.pulls import RunPulls
from autopar.runtime.start.supervision import slowness
from autopar.runtime.start.workspace import Workspace
from autopar.schedules.expand import expand

_TIMED_STEPS = range(1, 5)
"""Those in which layers are timed; the first step warms up."""


class _LayerMonitor:
    """Counts a rank's operations in the first step, where its device's peak is known, and then times its layers."""

    def __init__(self, job: Job, device: torch.device, steps: int, time_layers: bool) -> None:
        """Prepare; of a single step that nothing is counted in, layers are timed in that one."""
        self.peak_flops_per_s = peak_of(device, job.plan.precision)
        self._job, self.flops = job, ForwardFlops()
        layers = {index: [layer.name for layer in stage.layers] for index, stage in job.stages.items()}
        self.times = LayerTimes(job.actions, layers, clock_of(device))
        timed = range(1) if steps == 1 and self.peak_flops_per_s is None else _TIMED_STEPS
        self._timed_steps: Sequence[int] = timed if time_layers else ()

    def begin_step(self, step: int) -> None:
        """Set the watch of a step, before it runs."""
        timed, counted = step in self._timed_steps, step == 0 and self.peak_flops_per_s is not None
        if timed:
            self.times.begin_step()
        for stage in self._job.stages.values():
            stage.watch(self.times if timed else self.flops if counted else None)

    def end_step(self, step: int, record: StepRecord) -> None:
        """Take in when the actions of a step ran."""
        if step in self._timed_steps:
            self.times.end_step(record.times_s)


class StepClock:
    """Begins and ends of steps, in seconds from a moment that all ranks agree on.

    Where the device is behind the host, a step ends when the device is done with it; the host asks for that when it has
    given the device the next one, so that the device never waits for it.
    """

    def __init__(self, origin_s: float, *, lags: bool) -> None:
        """Begin with none; ``lags`` says whether the device may be behind the host."""
        self.starts_s: list[float] = []
        self.ends_s: list[float] = []
        self.pauses_s: dict[int, float] = {}
        """Before which step something else was done, and how long."""
        self._origin_s, self._lags = origin_s, lags
        self._open: StepRecord | None = None

    def begin(self) -> None:
        """Note the beginning of a step."""
        self.starts_s.append(time.perf_counter() - self._origin_s)

    def end(self, record: StepRecord) -> None:
        """Note that a step has been given to the device."""
        if self._lags:
            self.finish()
            self._open = record
        else:
            self.ends_s.append(time.perf_counter() - self._origin_s)

    def pause(self, seconds: float) -> None:
        """Note how long something else was done since the last step."""
        self.pauses_s[len(self.starts_s)] = seconds

    def finish(self) -> None:
        """Wait for the end of the step before, if that is not known: the one after it does not begin earlier."""
        if self._open is None:
            return
        self.ends_s.append(self._open.times_s[-1][1] - self._origin_s)
        self._open = None
        if len(self.starts_s) > len(self.ends_s):
            self.starts_s[-1] = max(self.starts_s[-1], self.ends_s[-1])


_RECORDED_STEPS = 32
"""Of how many last steps the times of all actions are kept."""


class _TrainingRun:
    """Steps a rank's job, tells whoever started the rank of every loss, and keeps what the report is made of."""

    def __init__(
        self,
        job: Job,
        context: RankContext,
        steps: int,
        checkpoints: RunCheckpoints | None,
        watch: FileWatch,
        log: RunLog | None,
        evaluation: RunEvaluation | None,
        pulls: RunPulls | None,
        *,
        time_layers: bool,
    ) -> None:
        """Prepare, together with all ranks, to train for some steps.

        Args:
            job: the rank's.
            context: the ranks.
            steps: how many mini-batches the run trains, with those before its checkpoint.
            checkpoints: where it goes on from one, and saves others.
            watch: of what the model file may change.
            log: of the steps, if one is asked for.
            evaluation: between steps, if it is asked for.
            pulls: their log, if pipelines are eager.
            time_layers: whether layers are timed in the first steps.
        """
        self._job, self._context, self._steps, self._checkpoints = job, context, steps, checkpoints
        self._watch, self._log, self._evaluation, self._pulls = watch, log, evaluation, pulls
        self._first = 0 if checkpoints is None else checkpoints.first_step
        self._watches = _LayerMonitor(job, context.device, steps - self._first, time_layers)
        self._origin_s = _common_origin(context)
        self._lags = clock_of(context.device).lags
        self._laps = StepClock(self._origin_s, lags=self._lags)
        self._slowness = slowness(job.plan, job.actions)
        self._records: list[StepRecord] = []

    def perform(self) -> None:
        """Train.

        Raises:
            AutoparError: an action failed; names it.
        """
        done, stop = self._first, self._steps
        while done < stop:
            before, end = done, stop
            if done < self._job.plan.synchronous_steps:
                end = done + 1
            else:
                # A checkpoint is of one version: the pipeline is drained for it, and where it was in what is replayed.
                every = (each.next_drain(done) for each in (self._checkpoints, self._pulls) if each is not None)
                end = min([stop, *(each for each in every if each is not None)])
            done, stop = self._perform(done, end, stop)
            if done == before:
                break
        self._job.finish()
        self._laps.finish()
        if self._checkpoints is not None:
            self._checkpoints.finish(done, self._steps)

    def _perform(self, first: int, end: int, stop: int) -> tuple[int, int]:
        """Train mini-batches from a fill to a drain; return how many are trained by then, and how many are to be."""
        board, rank, done, ahead = self._context.board, self._context.launched_as, first, self._job.plan.lead
        several, stoppable = self._job.plan.span, self._pulls is None or self._pulls.replayed is None
        for step in range(first - ahead, end, several):
            if (
                board is not None
                and board.ends_before(rank, max(step, 0))
                and board.last_step is not None
                and stoppable
            ):
                # Mini-batches that some rank has begun are trained.
                stop = min(stop, board.last_step + several + ahead)
            if step >= min(end, stop):
                break
            self._watch.check(max(step, 0))
            began_s = time.perf_counter()
            if step < first:
                self._job.step(step, min(end, stop), first)
                continue
            done += self._step(step, min(end, stop), first)
            if self._pulls is not None and done == min(end, stop):
                self._pulls.end(first, done)
            if self._checkpoints is not None:
                self._checkpoints.end_step(done, (time.perf_counter() - began_s) / several)
            if self._evaluation is not None and self._evaluation.is_due(done):
                self._evaluate(self._evaluation, done)
        return done, stop

    def _evaluate(self, evaluation: RunEvaluation, done: int) -> None:
        """Evaluate the model behind so many steps; no step has the time that it takes."""
        self._laps.finish()
        began_s = time.perf_counter()
        loss = evaluation.evaluate(done)
        self._laps.pause(time.perf_counter() - began_s)
        if self._log is not None:
            self._log.evaluation(done, loss)

    def results(self) -> StepResults:
        """Return what the steps gave."""
        ended = [each for record in self._records for each in record.every]
        timed = [(str(step), record) for step, record in enumerate(self._records) if record.times_s]
        return StepResults(
            loss=[record.loss for record in ended],
            count=[record.count for record in ended],
            terms=[record.terms for record in ended],
            starts_s=self._laps.starts_s,
            ends_s=self._laps.ends_s,
            pauses_s=[self._laps.pauses_s.get(step, 0.0) for step in range(len(self._records))],
            evaluations={} if self._evaluation is None else self._evaluation.losses,
            times_s={step: self._since_origin(each.times_s) for step, each in timed},
            loading_s={
                step: self._since_origin(each.loading.spans_s) for step, each in timed if each.loading is not None
            },
            loading_work_s=[each.loading.work_s for each in self._records if each.loading is not None],
            gradient_norm=[record.gradient_norm for record in ended],
            overflow=[record.overflow for record in ended],
            layers_s=self._watches.times.medians(),
            forward_flops=self._watches.flops.total,
            peak_flops_per_s=self._watches.peak_flops_per_s,
        )

    def _since_origin(self, spans_s: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(start_s - self._origin_s, end_s - self._origin_s) for start_s, end_s in spans_s]

    def _step(self, step: int, stop: int, start: int) -> int:
        """Perform a step, or a repetition; return how many mini-batches have ended in it."""
        done = len(self._laps.starts_s)
        self._watches.begin_step(done)
        self._laps.begin()
        record = self._job.step(step, stop, start)
        self._laps.end(record)
        self._watches.end_step(done, record)
        self._records.append(record)
        if self._log is not None:
            self._log.step(record)
        # Of the last step that the device is known to be done with.
        known = self._records[:-1] if self._lags else self._records
        if self._context.board is not None and known:
            self._context.board.write_slowness(self._context.launched_as, self._slowness(known[-1].times_s))
        if done >= _RECORDED_STEPS:
            self._records[done - _RECORDED_STEPS].times_s.clear()
        if self._job.team.part == 0 and any(stage.loss for stage in self._job.stages.values()):
            for each in record.every:
                self._context.report({"step": each.step, "loss": each.loss, "count": each.count})
        return len(record.every)


def _common_origin(context: RankContext) -> float:
    """Return a moment that all ranks agree on, on this rank's clock.

    Ranks of one host share a clock; those of several agree to within the time that leaving a barrier takes.
    """
    context.barrier()
    origin = torch.tensor([time.perf_counter()], dtype=torch.float64)
    if context.local_size == context.size:
        context.broadcast(origin)
    return float(origin)


class RunFacts(NamedTuple):
    """What all ranks are told alike."""

    steps: int
    """Of the whole run."""
    save_as: str
    """Name of the set of trained weights."""
    attempt: Attempt


@dataclass(frozen=True)
class TrainTask:
    """What a rank needs to know."""

    plan: str
    """The plan's JSON text."""
    program: str | None
    """The program's JSON text, where it is another than the plan expands to."""
    model: str
    """MODEL, as :func:`autopar.capture.model.source.load` reads it."""
    workspace: Path
    options: RunOptions
    """Folders in it are absolute."""
    facts: RunFacts
    loaders: Path | None
    """Folder where this host's loaders listen; none: every rank loads for itself."""

    def as_data(self) -> object:
        """Return it as plain data."""
        return _TASK.dump_python(self, mode="json", warnings=False)


FACTS, _TASK = TypeAdapter(RunFacts), TypeAdapter(TrainTask)
"""Make plain data of them, and read it."""


def train(context: RankContext, data: object) -> RankResult:
    """Train for some steps as one rank of the plan, and say how it went; ``data`` is that of a :class:`TrainTask`.

    Raises:
        AutoparError: an action failed; names it.
    """
    task = _TASK.validate_python(data)
    plan, options, settings = Plan.parse(task.plan, Path("plan.json")), task.options, task.options.settings
    check_capacity(plan, context.rank, plan.ownership.ranks[context.rank].stages, context.device)
    peak = PeakMemory(context.device)
    model, workspace = load_for(settings, task.model, options.data, plan), Workspace(task.workspace)
    graph = workspace.graph(model, plan, context.rank)
    program = None if task.program is None else Program.parse(task.program, Path("program.json"))
    try:
        job = build(context, plan, model, graph, workspace, settings, program, options.inject_fault, task.loaders)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        place = f"rank {context.rank} (setting up)"
        raise out_of_memory(place, error, plan, plan.ownership.ranks[context.rank].stages, context.device) from error
    samples = _samples(context, job, model)
    notes = [*workspace.facts.notes, *(_warmed_up(job) if settings.compile else [])]
    checkpoints = _checkpoints(context, job, graph, workspace, options, task.facts.attempt, samples)
    watch = FileWatch(model, frozenset(workspace.facts.names_read), plan.ignored_state)
    log = None if options.log_dir is None else RunLog(context, job, options.log_dir)
    evaluation = None
    if options.eval_every is not None:
        evaluation = RunEvaluation(context, job, workspace.evaluation(model, graph), model, options.eval_every)
    pulls, versions = None, job.versions
    if isinstance(versions, EagerWaveWeights):
        pulls = RunPulls(context, job, versions, options, checkpoints)
    told = (watch, log, evaluation, pulls)
    run = _TrainingRun(job, context, task.facts.steps, checkpoints, *told, time_layers=settings.time_layers)
    kept = None if options.keep is None else ComparisonFiles(job, options.keep)
    with nullcontext() if log is None else log:
        run.perform()
    if context.board is not None:
        context.board.write(context.launched_as, FINISHED)
    # Nothing is kept before all ranks are done: one of them may yet find that its last gradients are not finite.
    context.barrier()
    if kept is not None:
        kept.write(workspace.unread(plan, graph))
    return RankResult(
        **run.results(),
        rank=context.rank,
        host=context.ranks_of_host[0],
        loaders=job.batches.loaders,
        stages=list(job.stages),
        replica=job.own.replica,
        backend="nccl" if context.nccl else "gloo",
        peak_bytes=peak.peak_bytes(),
        peak_kind=peak.kind,
        samples=job.batches.samples,
        checkpoints=[] if checkpoints is None else checkpoints.writer.results,
        buffers_bytes=0 if checkpoints is None else checkpoints.writer.buffers_bytes,
        notes=[*notes, *job.notes, *([] if checkpoints is None else checkpoints.notes), *_notes(context, workspace)]
        + ([] if log is None else log.notes)
        + ([] if pulls is None else pulls.notes),
        saved_files=[]
        if options.save is None
        else write_stages(job, graph, partial(workspace.unread, plan, graph), options.save, task.facts.save_as),
    )


def load_for(settings: TrainSettings, model: str, data: Path | None, plan: Plan) -> UserModel:
    """Load MODEL as it is trained: in the types that its file makes, or in float64.

    Raises:
        AutoparError: as :func:`autopar.capture.model.source.load`; it is not the model that was planned for.
    """
    found = load(model, data, plan.model)
    return float64_model(found) if settings.double else found


def build(
    context: RankContext,
    plan: Plan,
    model: UserModel,
    graph: LayerGraph,
    workspace: Workspace,
    settings: TrainSettings = DEFAULTS,
    program: Program | None = None,
    faults: Sequence[Fault] = (),
    loaders: Path | None = None,
) -> Job:
    """Build this rank's job from what was prepared on its host; ``program`` is by default what the plan expands to.

    ``faults`` happen as it is stepped; ``loaders`` is where those of the host listen, if it has any.
    """
    torch.set_num_threads(plan.threads)
    if context.device.type == "cpu":
        keep_pages()
    program = program or expand(plan)
    transport = connect(context, plan, settings)
    injection = Injection()
    note = Drill(faults, context.rank, program.ranks[context.rank], injection).noting(context.note)
    place = (context.rank, graph, model, workspace.read, transport, context.device)
    injection.job = job = Job(plan, program, *place, note, settings, workspace.facts.settings, loaders)
    job.try_optimizer()
    return job


def _samples(context: RankContext, job: Job, model: UserModel) -> int:
    """Return how many samples there are; all ranks that read have the same ones."""
    mine = job.batches.samples, job.batches.excerpt() if context.size > 1 else {}
    return same_samples([json.loads(each) for each in context.gather(json.dumps(mine))], model.spec)


def _checkpoints(
    context: RankContext,
    job: Job,
    graph: LayerGraph,
    workspace: Workspace,
    options: RunOptions,
    attempt: Attempt,
    samples: int,
) -> RunCheckpoints | None:
    if options.checkpoint is None:
        return None
    unread = workspace.unread(job.plan, graph)
    keys, folder = workspace.facts.keys, options.checkpoint
    return RunCheckpoints(context, job, graph, unread, keys, folder, options, attempt, samples)


def _warmed_up(job: Job) -> list[str]:
    """Compile a rank's layers, saying so on standard error; return notes for the report."""
    began_s = time.perf_counter()
    sys.stderr.write(f"rank {job.rank}: compiling\n")
    notes = job.warm_up()
    for note in notes:
        sys.stderr.write(f"rank {job.rank}: {note}\n")
    sys.stderr.write(f"rank {job.rank}: compiled in {time.perf_counter() - began_s:.1f} s\n")
    return notes


def _notes(context: RankContext, workspace: Workspace) -> list[str]:
    notes = []
    if not (context.device.type == "cpu" or context.nccl or context.size == 1):
        notes.append("ranks share GPUs, or have no NCCL: what they sent each other went through the hosts' memory")
    port = context.meeting_port
    if context.rank == context.leader and port is not None and listens_everywhere(port):
        notes.append(
            f"port {port} of this host, at which the ranks met, is open on all interfaces, and takes what anybody "
            "writes there: train in networks that you trust (SECURITY.md)"
        )
    if workspace.facts.settings is None:
        notes.append("optimizer() was not held against one for the whole model: it takes no parameters without values")
    return notes
