"""Worker: what every rank does in a training run, however it was started.

In come a plan, a program and a workspace; out comes a rank's result. It builds the rank's job, runs its steps, notes
when each began and ended, looks inside stages in the first steps alone (times, FLOPs, memory), and writes weights, and
what others compare its training by, to files. Faults that are injected happen as the rank begins the actions that they
name.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import resource
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import torch

from autopar.capture.graph import LayerGraph
from autopar.capture.model.source import UserModel, load
from autopar.capture.plain.loop import float64_model
from autopar.formats.checkpoint import StateKey
from autopar.formats.plan import Plan
from autopar.formats.program import FORWARD, SLOWER_S, Fault, Program, RankProgram
from autopar.options.train import TrainSettings
from autopar.ranks.allocator import keep_pages
from autopar.ranks.board import FINISHED
from autopar.ranks.context import RankContext
from autopar.ranks.meeting import listens_everywhere
from autopar.runtime.checkpoint.training import CheckpointArguments, RunCheckpoints
from autopar.runtime.device import LayerTimes, PeakMemory, check_capacity, clock_of, is_out_of_memory, out_of_memory
from autopar.runtime.execute import StepRecord
from autopar.runtime.messages.staging import connect
from autopar.runtime.outcome import ForwardFlops, RankResult, StepResults, peak_of
from autopar.runtime.stage.parameters import local
from autopar.runtime.start.following import FileWatch
from autopar.runtime.start.job import DEFAULTS, Job
from autopar.runtime.start.saving import ComparisonFiles, holders, write_stages
from autopar.runtime.start.supervision import slowness
from autopar.runtime.start.workspace import Workspace
from autopar.runtime.weights import StoredFile
from autopar.schedules.check import check
from autopar.schedules.continuing import lead
from autopar.schedules.expand import expand, stages_of

TIMED_STEPS = range(1, 5)
"""Those in which layers are timed; the first step warms up."""


class LayerMonitor:
    """Counts a rank's operations in the first step, where its device's peak is known, and then times its layers."""

    def __init__(self, job: Job, device: torch.device, steps: int, time_layers: bool) -> None:
        """Prepare; of a single step that nothing is counted in, layers are timed in that one."""
        self.peak_flops_per_s = peak_of(device, job.plan.precision)
        self._job, self._flops = job, ForwardFlops()
        layers = {index: [layer.name for layer in stage.layers] for index, stage in job.stages.items()}
        self._times = LayerTimes(job.actions, layers, clock_of(device))
        timed = range(1) if steps == 1 and self.peak_flops_per_s is None else TIMED_STEPS
        self._timed_steps: Sequence[int] = timed if time_layers else ()

    def begin_step(self, step: int) -> None:
        """Set the watch of a step, before it runs."""
        timed, counted = step in self._timed_steps, step == 0 and self.peak_flops_per_s is not None
        if timed:
            self._times.begin_step()
        for stage in self._job.stages.values():
            stage.watch(self._times if timed else self._flops if counted else None)

    def end_step(self, step: int, record: StepRecord) -> None:
        """Take in when the actions of a step ran."""
        if step in self._timed_steps:
            self._times.end_step(record.times_s)

    def layers_s(self) -> dict[str, tuple[float, float]]:
        """Return the median seconds of every layer that was timed, forward and backward."""
        return self._times.medians()

    def forward_flops(self) -> int:
        """Return the operations of a step's forwards; 0 where they were not counted."""
        return self._flops.total


class StepClock:
    """Begins and ends of steps, in seconds from a moment that all ranks agree on.

    Where the device is behind the host, a step ends when the device is done with it; the host asks for that when it has
    given the device the next one, so that the device never waits for it.
    """

    def __init__(self, origin_s: float, *, lags: bool) -> None:
        """Begin with none; ``lags`` says whether the device may be behind the host."""
        self.starts_s: list[float] = []
        self.ends_s: list[float] = []
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

    def finish(self) -> None:
        """Wait for the end of the step before, if that is not known: the one after it does not begin earlier."""
        if self._open is None:
            return
        self.ends_s.append(self._open.times_s[-1][1] - self._origin_s)
        self._open = None
        if len(self.starts_s) > len(self.ends_s):
            self.starts_s[-1] = max(self.starts_s[-1], self.ends_s[-1])


RECORDED_STEPS = 32
"""Of how many last steps the times of all actions are kept."""


class TrainingRun:
    """Steps a rank's job, tells whoever started the rank of every loss, and keeps what the report is made of."""

    def __init__(
        self,
        job: Job,
        context: RankContext,
        steps: int,
        checkpoints: RunCheckpoints | None,
        watch: FileWatch,
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
            time_layers: whether layers are timed in the first steps.
        """
        self._job, self._context, self._steps, self._checkpoints = job, context, steps, checkpoints
        self._watch = watch
        self._first = 0 if checkpoints is None else checkpoints.first_step
        self._watches = LayerMonitor(job, context.device, steps - self._first, time_layers)
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
            elif self._checkpoints is not None:
                # A checkpoint is of one version: the pipeline is drained for it.
                end = min(stop, self._checkpoints.next_drain(done) or stop)
            done, stop = self._perform(done, end, stop)
            if done == before:
                break
        self._job.finish()
        self._laps.finish()
        if self._checkpoints is not None:
            self._checkpoints.finish(done, self._steps)

    def _perform(self, first: int, end: int, stop: int) -> tuple[int, int]:
        """Train mini-batches from a fill to a drain; return how many are trained by then, and how many are to be."""
        board, rank, done, ahead = self._context.board, self._context.rank, first, lead(self._job.plan)
        several = self._job.plan.span
        for step in range(first - ahead, end, several):
            if board is not None and board.ends_before(rank, max(step, 0)) and board.last_step is not None:
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
            if self._checkpoints is not None:
                self._checkpoints.end_step(done, (time.perf_counter() - began_s) / several)
        return done, stop

    def results(self) -> StepResults:
        """Return what the steps gave."""
        ended = [each for record in self._records for each in record.every]
        return StepResults(
            loss=[record.loss for record in ended],
            count=[record.count for record in ended],
            terms=[record.terms for record in ended],
            starts_s=self._laps.starts_s,
            ends_s=self._laps.ends_s,
            times_s={
                str(step): [(start - self._origin_s, end - self._origin_s) for start, end in record.times_s]
                for step, record in enumerate(self._records)
                if record.times_s
            },
            loading_s={
                str(step): [(start - self._origin_s, end - self._origin_s) for start, end in record.loading.spans_s]
                for step, record in enumerate(self._records)
                if record.times_s and record.loading is not None
            },
            loading_work_s=[each.loading.work_s for each in self._records if each.loading is not None],
            gradient_norm=[record.gradient_norm for record in ended],
            overflow=[record.overflow for record in ended],
            layers_s=self._watches.layers_s(),
            forward_flops=self._watches.forward_flops(),
            peak_flops_per_s=self._watches.peak_flops_per_s,
        )

    def _step(self, step: int, stop: int, start: int) -> int:
        """Perform a step, or a repetition; return how many mini-batches have ended in it."""
        done = len(self._laps.starts_s)
        self._watches.begin_step(done)
        self._laps.begin()
        record = self._job.step(step, stop, start)
        self._laps.end(record)
        self._watches.end_step(done, record)
        self._records.append(record)
        self._note_slowness()
        if done >= RECORDED_STEPS:
            self._records[done - RECORDED_STEPS].times_s.clear()
        if self._job.team.part == 0 and any(stage.loss for stage in self._job.stages.values()):
            for each in record.every:
                self._context.report({"step": each.step, "loss": each.loss, "count": each.count})
        return len(record.every)

    def _note_slowness(self) -> None:
        """Note how long the last step took that the device is known to be done with."""
        known = self._records[:-1] if self._lags else self._records
        if self._context.board is not None and known:
            self._context.board.write_slowness(self._context.rank, self._slowness(known[-1].times_s))


def _common_origin(context: RankContext) -> float:
    """Return a moment that all ranks agree on, on this rank's clock.

    Ranks of one host share a clock; those of several agree to within the time that leaving a barrier takes.
    """
    context.barrier()
    origin = torch.tensor([time.perf_counter()], dtype=torch.float64)
    if context.local_size == context.size:
        context.broadcast(origin)
    return float(origin)


class TrainArguments(TypedDict):
    """What a rank needs to know; plain data."""

    plan: str
    """The plan's JSON text."""
    program: str | None
    """The program's JSON text, where it is another than the plan expands to."""
    model: str
    """MODEL, as :func:`autopar.capture.model.source.load` reads it."""
    data: str | None
    """The file that feeds an ``hf:`` model, if it has one."""
    workspace: str
    steps: int
    save: str | None
    """Folder for the trained weights."""
    save_as: str
    """Name of the set that they are in the folder."""
    settings: dict[str, Any]
    """Of :class:`TrainSettings`."""
    checkpoint: CheckpointArguments | None
    """What is asked of checkpoints; none: none are saved."""
    faults: list[str]
    """What is to go wrong."""
    loaders: str | None
    """Folder where this host's loaders listen; none: every rank loads for itself."""
    keep: str | None
    """Folder for what is compared with another training; see :class:`autopar.runtime.start.saving.ComparisonFiles`."""


def train(context: RankContext, arguments: TrainArguments) -> RankResult:
    """Train for some steps as one rank of the plan, and say how it went.

    Raises:
        AutoparError: an action failed; names it.
    """
    plan = Plan.parse(arguments["plan"], Path("plan.json"))
    check_capacity(plan, context.rank, stages_of(plan, context.rank)[0], context.device)
    peak = PeakMemory(context.device)
    settings = TrainSettings(**arguments["settings"])
    model = load_for(settings, arguments["model"], None if arguments["data"] is None else Path(arguments["data"]), plan)
    workspace = Workspace(Path(arguments["workspace"]))
    graph = workspace.graph(model, plan, context.rank)
    edited = arguments["program"]
    program = None if edited is None else Program.parse(edited, Path("program.json"))
    faults = [Fault.parse(each) for each in arguments["faults"]]
    loaders = None if arguments["loaders"] is None else Path(arguments["loaders"])
    try:
        job = build(context, plan, model, graph, workspace, settings, program, faults, loaders)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        place = f"rank {context.rank} (setting up)"
        raise out_of_memory(place, error, plan, stages_of(plan, context.rank)[0], context.device) from error
    notes = [*workspace.notes(), *(_warmed_up(job) if settings.compile else [])]
    checkpoints = _checkpoints(context, job, graph, workspace, arguments["checkpoint"])
    watch = FileWatch(model, workspace.names_read(), plan.ignored_state)
    run = TrainingRun(job, context, arguments["steps"], checkpoints, watch, time_layers=settings.time_layers)
    kept = None if arguments["keep"] is None else ComparisonFiles(job, Path(arguments["keep"]))
    run.perform()
    _await_all(context)
    if kept is not None:
        kept.write(_unread(workspace, holders(plan, graph)))
    return RankResult(
        **run.results(),
        rank=context.rank,
        host=context.rank - context.local_rank,
        loaders=job.loaders,
        stages=list(job.stages),
        replica=job.replica,
        backend=context.backend,
        peak_bytes=peak.peak_bytes(),
        peak_kind=peak.kind,
        samples=job.samples,
        checkpoints=[] if checkpoints is None else checkpoints.results,
        buffers_bytes=0 if checkpoints is None else checkpoints.buffers_bytes,
        notes=[*notes, *job.notes, *([] if checkpoints is None else checkpoints.notes), *_notes(context, workspace)],
        saved_files=_save(job, graph, workspace, arguments["save"], arguments["save_as"]),
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
    check(program, plan)
    transport = connect(context, plan, settings)
    note = (lambda step, position: None) if context.board is None else context.board.stepping(context.rank)
    injector = FaultInjector(faults, context.rank, program.ranks[context.rank]) if faults else None
    place = (context.rank, graph, model, workspace.read, transport, context.device)
    noting = injector.noting(note) if injector else note
    job = Job(plan, program, *place, noting, settings, workspace.settings(), loaders)
    if injector is not None:
        injector.job = job
    job.try_optimizer()
    return job


def _checkpoints(
    context: RankContext, job: Job, graph: LayerGraph, workspace: Workspace, arguments: CheckpointArguments | None
) -> RunCheckpoints | None:
    if arguments is None:
        return None
    keys = tuple(StateKey(key=key, tensor=name) for key, name in workspace.state_keys().items())
    return RunCheckpoints(context, job, graph, _unread(workspace, holders(job.plan, graph)), keys, arguments)


def _warmed_up(job: Job) -> list[str]:
    """Compile a rank's layers, saying so on standard error; return notes for the report."""
    began_s = time.perf_counter()
    sys.stderr.write(f"rank {job.rank}: compiling\n")
    notes = job.warm_up()
    for note in notes:
        sys.stderr.write(f"rank {job.rank}: {note}\n")
    sys.stderr.write(f"rank {job.rank}: compiled in {time.perf_counter() - began_s:.1f} s\n")
    return notes


def _await_all(context: RankContext) -> None:
    """Keep nothing before all ranks are done: one of them may yet find that its last gradients are not finite."""
    if context.board is not None:
        context.board.write(context.rank, FINISHED)
    context.barrier()


def _notes(context: RankContext, workspace: Workspace) -> list[str]:
    notes = []
    if not (context.device.type == "cpu" or context.nccl or context.size == 1):
        notes.append("ranks share GPUs, or have no NCCL: what they sent each other went through the hosts' memory")
    port = context.meeting_port
    if context.rank == 0 and port is not None and listens_everywhere(port):
        notes.append(
            f"port {port} of this host, at which the ranks met, is open on all interfaces, and takes what anybody "
            "writes there: train in networks that you trust (SECURITY.md)"
        )
    if workspace.settings() is None:
        notes.append("optimizer() was not held against one for the whole model: it takes no parameters without values")
    return notes


def _save(job: Job, graph: LayerGraph, workspace: Workspace, folder: str | None, name: str) -> list[StoredFile]:
    if folder is None:
        return []
    return write_stages(job, graph, partial(_unread, workspace), Path(folder), name)


def _unread(workspace: Workspace, read: Iterable[str]) -> Mapping[str, torch.Tensor]:
    """Return what no layer reads, given what some layer does."""
    return workspace.read(workspace.names().difference(read))


class FaultInjector:
    """Stands in the way of what notes a rank's actions."""

    def __init__(self, faults: Sequence[Fault], rank: int, actions: RankProgram) -> None:
        """Find where the faults of a rank are; the job is given once there is one."""
        self.job: Job | None = None
        self._due: dict[tuple[int, int], Fault] = {}
        self._slow_from: tuple[int, int] | None = None
        every = list(actions)
        for fault in faults:
            if fault.rank == rank:
                self._due[fault.step, fault.position(every)] = fault

    def noting(self, note: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """Return what notes actions and has faults happen as they begin."""

        def act(step: int, position: int) -> None:
            note(step, position)
            fault = self._due.pop((step, position), None)
            if fault is not None:
                self._happen(fault, (step, position))
            if self._slow_from is not None and (step, position) >= self._slow_from:
                time.sleep(SLOWER_S)

        return act

    def _happen(self, fault: Fault, at: tuple[int, int]) -> None:
        kind = fault.kind
        if kind == "slow":
            self._slow_from = at
        elif kind in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[kind])
        elif kind == "segfault":
            ctypes.string_at(0)
        elif kind == "exit":
            os._exit(3)
        elif kind == "exception":
            raise RuntimeError(f"injected: {fault}")
        elif kind == "out-of-memory":
            raise torch.OutOfMemoryError(f"injected: {fault}")
        elif kind == "disconnect":
            _disconnect()
        elif kind == "nan":
            self._poison(fault)
        elif kind == "fail-write":
            _forbid_writing()
        else:
            _fail_next(*_CALLS[kind])

    def _poison(self, fault: Fault) -> None:
        """Have not-a-numbers come out of a forward, else stand in the gradients that are there."""
        assert self.job is not None
        if fault.action == FORWARD:
            module = next(iter(self.job.stages.values())).layers[-1].module

            def spoil(_: object, __: object, outputs: Any) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
                handle.remove()
                return tuple(each * math.nan if each.is_floating_point() else each for each in outputs)

            handle = module.register_forward_hook(spoil)
            return
        for parameter in self.job.parameters.values():
            if parameter.grad is not None:
                local(parameter.grad).fill_(math.nan)


_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_CALLS = {
    "disk-full": ("fsync", errno.ENOSPC),
    "fail-fsync": ("fsync", errno.EIO),
    "fail-rename": ("replace", errno.EIO),
}


def _fail_next(name: str, code: int) -> None:
    """Have the next call of a function of ``os`` fail; of a folder, nobody depends on its outcome."""
    real = getattr(os, name)

    def fail(first: Any, *others: Any, **options: Any) -> Any:  # noqa: ANN401
        if name == "fsync" and not stat.S_ISREG(os.fstat(first).st_mode):
            return real(first, *others, **options)
        setattr(os, name, real)
        raise OSError(code, os.strerror(code))

    setattr(os, name, fail)


def _forbid_writing() -> None:
    """Have the system refuse to let this process' files grow, until what one has failed at is removed."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before, real = resource.getrlimit(resource.RLIMIT_FSIZE), os.unlink
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))

    def allow(*arguments: Any, **options: Any) -> None:  # noqa: ANN401
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        os.unlink = real
        real(*arguments, **options)

    os.unlink = allow


def _disconnect() -> None:
    """Shut this process' connections, as a network that is gone does."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as found:
                    found.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue
