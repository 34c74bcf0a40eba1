"""Launch: starts a training run on this host, or joins one that a launcher has started."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch

from autopar.capture.model.batch import seed_data
from autopar.capture.model.source import UserModel
from autopar.code import import_first
from autopar.errors import UsageError, printable
from autopar.formats.plan import Plan
from autopar.formats.profile import TRANSFORMERS, path_of
from autopar.formats.program import Program
from autopar.options.train import PULLS, Last, RunOptions
from autopar.ranks.board import SET_UP_S
from autopar.ranks.context import RankContext, join_from_environment
from autopar.ranks.device import FoundDevice, found_device, gpus_of_host
from autopar.ranks.environment import LaunchedRank, refuse_siblings
from autopar.ranks.fork_server import can_fork
from autopar.ranks.meeting import Arrival
from autopar.ranks.pool import RankPool
from autopar.ranks.scratch import Scratch
from autopar.ranks.supervisor import SupervisedRank
from autopar.runtime.checkpoint.saving import check_shared, folder_of, make_folder, new_set, set_of
from autopar.runtime.checkpoint.training import Attempt, attempt_in
from autopar.runtime.checkpoint.weights import publish
from autopar.runtime.data import steps_of_epoch
from autopar.runtime.faults import check_faults
from autopar.runtime.loaders.process import ReadingArguments
from autopar.runtime.loaders.server import loading, spare_process
from autopar.runtime.loaders.work import count_of, processors
from autopar.runtime.outcome import Outcome, RankResult, loss_of_step, outcome_of
from autopar.runtime.settings import check_pipelines, check_training
from autopar.runtime.start.placement import Placement, place, place_here
from autopar.runtime.start.pulls import check_steps, replayed_log
from autopar.runtime.start.supervision import watch_of
from autopar.runtime.start.worker import FACTS, RunFacts, TrainTask, load_for, train
from autopar.runtime.start.workspace import Workspace
from autopar.schedules.check import check, read_program
from autopar.schedules.expand import expand

_OPTIMIZERS_IMPORT = "torch._dynamo"
"""What torch imports where the first optimizer is made: a second, and every rank makes one."""
StepProgress = Callable[[int, float], None]
"""Called with (step, loss of the mini-batch) as steps end."""


def run(
    plan: Plan, model: str, options: RunOptions, progress: StepProgress | None = None, pool: RankPool | None = None
) -> Outcome:
    """Train on processes of this host, one per rank.

    Args:
        plan: what to carry out.
        model: MODEL, as :func:`autopar.capture.model.source.load` reads it.
        options: how long, from which weights.
        progress: told of every step.
        pool: processes to use, if some are there already.

    Raises:
        AutoparError: the model does not fit the plan, or a rank failed; no process is left.
    """
    refuse_siblings(os.environ)
    program, everyone = _program(plan, options), range(len(plan.devices))
    check_devices(plan, options.share_gpus)
    name = new_set()
    if can_fork():
        # Once, for this process and the ranks, which are its forks.
        _import_for(model)
    count = 0 if plan.pipelines else count_of(options.loaders, plan.device_type, len(plan.devices), processors())
    # The ranks start while this process loads and captures the model.
    with (
        _ranks(plan, pool, options.share_gpus, spare=count > 0) as ranks,
        spare_process(ranks, plan, wanted=count > 0) as spare,
    ):
        placement = _place_here(plan, ranks)
        user_model = load_for(options.settings, model, options.data, plan)
        steps = _steps(user_model, plan, options)
        with folder_of(options.save), set_of(options.save, name), _attempt(options, steps) as attempt:
            facts = RunFacts(steps, name, attempt)
            reading = _reading(plan, model, options, several_hosts=False)
            with (
                Scratch("run") as scratch,
                loading(spare, scratch.path, count, everyone, reading) as come,
            ):
                evaluates = options.eval_every is not None
                initial = Workspace(scratch.path).prepare(user_model, plan, options.weights, evaluates=evaluates)
                come()
                loaders = scratch.path if count else None
                watch = watch_of(plan, lambda: program, everyone, options.timeout_s, options.black_box)
                results = ranks.run(
                    "autopar.runtime.start.worker:train",
                    _task(plan, program, model, scratch.path, options, facts, loaders),
                    ranks=len(plan.devices),
                    watch=replace(watch, on_message=_sum_losses(plan, progress)),
                    # What is replayed ends where pipelines were drained, or is given up.
                    stoppable=options.replay is None,
                    devices=[placement.ranks.index(rank) for rank in everyone],
                )
            found = [cast(RankResult, result) for result in results]
            return _conclude(plan, program, found, options, initial, facts, placement.notes)


def _place_here(plan: Plan, ranks: RankPool) -> Placement:
    """Return where the ranks are, by this host's devices."""
    devices = [found_device(torch.device("cpu"))]
    if plan.nodes and plan.device_type == "cuda":
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # No rank is a fork of this process, which need not wait for one to start.
            devices = gpus_of_host()
        else:
            (found,) = cast(list[list[list[Any]]], ranks.run("autopar.ranks.device:gpus_of_rank", ranks=1))
            devices = [FoundDevice(*each) for each in found]
    return place_here(plan, devices)


def _import_for(model: str) -> None:
    """Import what training MODEL begins by importing, of torch and of installed packages."""
    importlib.import_module(_OPTIMIZERS_IMPORT)
    file = path_of(model)
    if model.startswith(TRANSFORMERS):
        # It is said where the model is loaded if they are not there.
        with suppress(Exception):
            importlib.import_module("transformers.modeling_utils")
            importlib.import_module("transformers.models.auto.modeling_auto")
    elif file is not None:
        import_first(Path(file))


def join(
    plan: Plan,
    model: str,
    options: RunOptions,
    launch: LaunchedRank,
    progress: StepProgress,
    supervised_rank: SupervisedRank,
) -> Outcome | None:
    """Train as one of the ranks that a launcher has started; its rank 0 returns the outcome.

    Raises:
        UsageError: another number of ranks was started than the plan needs.
        AutoparError: as :func:`run`, on every rank.
    """
    program = _program(plan, options)
    files = _digests(plan, program, model, options)
    # Twice as long, so that a supervisor, which knows what every rank was doing, is the first to speak.
    patience_s = 2 * max(options.timeout_s, SET_UP_S)
    count = 0 if plan.pipelines else count_of(options.loaders, plan.device_type, launch.local_size, processors())
    leads = launch.local_rank == 0
    joining = (launch, plan.device_type, patience_s, len(plan.devices), files, options.share_gpus)
    notes: list[str] = []

    def placed(arrivals: Sequence[Arrival]) -> Sequence[int]:
        found = place(plan, arrivals)
        notes.extend(found.notes)
        return found.ranks

    with (
        # Started before this process computes, or has a GPU.
        spare_process(None, plan, wanted=leads and count > 0) as spare,
        join_from_environment(*joining, supervised_rank.board, options.timeout_s, placed) as context,
        _speaking(supervised_rank),
    ):
        for shared in (options.save, options.checkpoint):
            if shared is not None and not launch.one_host:
                check_shared(context, shared)
        with ExitStack() as stack:
            reading = _reading(plan, model, options, several_hosts=not launch.one_host)
            serve = partial(loading, spare, count=count, ranks=context.ranks_of_host, reading=reading)
            folder, initial, facts = _prepare_host(context, model, plan, options, stack, serve)
            loaders = folder if count else None
            with set_of(options.save, facts.save_as):
                result = train(context, _task(plan, program, model, folder, options, facts, loaders))
                gathered = [json.loads(text) for text in context.gather(json.dumps(result))]
                if context.rank != context.leader:
                    return None
                return _conclude(plan, program, gathered, options, initial, facts, notes)


@contextmanager
def _speaking(supervised_rank: SupervisedRank) -> Iterator[None]:
    """Tell the supervisor of an error before the others are left, which may take as long as they let it."""
    try:
        yield
    except Exception as error:
        supervised_rank.fail(error)
        raise


def _digests(plan: Plan, program: Program, model: str, options: RunOptions) -> dict[str, str]:
    """Return what all ranks must have been given alike: its name and its SHA-256."""
    path = path_of(model)
    source = None if path is None else Path(path)
    if source is not None and source.is_dir():
        source /= "config.json"
    # How long each waits is its own; of a path, it is the same that there is one.
    asked = {name: value for name, value in asdict(options).items() if name != "timeout_s"}
    contents = {
        "log of pulls": b"" if options.replay is None else options.replay.read_bytes(),
        "plan": plan.dumps().encode(),
        "program": program.dumps().encode(),
        "model": model.encode() if source is None else source.read_bytes(),
        "dataset file": b"" if options.data is None else options.data.read_bytes(),
        "command line": json.dumps({name: isinstance(value, Path) or value for name, value in asked.items()}).encode(),
    }
    return {name: sha256(content).hexdigest() for name, content in contents.items()}


@contextmanager
def _attempt(options: RunOptions, steps: int) -> Iterator[Attempt]:
    """Return the context in which a run has its folder of checkpoints for itself, and what it goes on from.

    Raises:
        AutoparError: as :func:`attempt_in`; or the run has no step left.
    """
    if options.checkpoint is None:
        yield Attempt("")
        return
    with attempt_in(options.checkpoint, resume=options.resume) as attempt:
        for note in attempt.notes:
            sys.stderr.write(f"autopar: {printable(note)}\n")
        if attempt.step >= steps:
            raise UsageError(
                f"{options.checkpoint}: the newest checkpoint is of step {attempt.step}, and the run has {steps}; "
                f"raise `steps`, or `epochs`: they count from the run's first step"
            )
        yield attempt


def _program(plan: Plan, options: RunOptions) -> Program:
    """Return what is run, the plan and what is asked for being within the runtime's scope."""
    check_training(plan, options, share_gpus=options.share_gpus)
    check_pipelines(plan, options)
    if options.eval_every is not None:
        plan.policy.check("eval_every")
    check_faults(options.inject_fault, len(plan.devices))
    # What is wrong with a log is said before any rank starts.
    replayed_log(plan, options)
    if options.program is not None:
        return read_program(options.program, plan)
    program = expand(plan)
    check(program, plan)
    return program


def _steps(model: UserModel, plan: Plan, options: RunOptions) -> int:
    log = replayed_log(plan, options)
    if options.epochs is None:
        steps = log.ends[-1] if options.steps is None and log is not None else options.steps
        assert steps is not None
    else:
        steps = _steps_of_epochs(model, plan, options.epochs, options.last)
    if log is not None:
        check_steps(log, options, steps)
    return steps


def _steps_of_epochs(model: UserModel, plan: Plan, epochs: int, last: Last) -> int:
    seed_data(plan.seed, "dataset")
    samples = model.sample_count(model.dataset())
    # In a step, each pipeline takes a mini-batch.
    return epochs * steps_of_epoch(model, samples, plan, last) // len(plan.stages_by_pipeline)


Serve = Callable[[Path], AbstractContextManager[Callable[[], None]]]
"""Has loaders serve a host's ranks, which find them in a folder; see :func:`autopar.runtime.loaders.server.loading`."""


def _prepare_host(
    context: RankContext, model: str, plan: Plan, options: RunOptions, stack: ExitStack, serve: Serve
) -> tuple[Path, str, RunFacts]:
    """Let one rank of every host prepare the workspace, and count steps; a failure is raised on all ranks alike.

    Their leader has the folder of checkpoints for as long as ``stack`` is open; every host has loaders, by ``serve``.

    Returns:
        The workspace's folder, where the initial weights are from, and what is the same on all hosts.
    """

    def prepare() -> list[object]:
        if not context.leads_host:
            return []
        folder = stack.enter_context(Scratch("run")).path
        user_model = load_for(options.settings, model, options.data, plan)
        if options.save is not None:
            make_folder(options.save)
        come = stack.enter_context(serve(folder))
        evaluates = options.eval_every is not None
        initial = Workspace(folder).prepare(user_model, plan, options.weights, evaluates=evaluates)
        come()
        steps = _steps(user_model, plan, options)
        attempt = stack.enter_context(_attempt(options, steps)) if context.rank == context.leader else Attempt("")
        return [str(folder), initial, FACTS.dump_python(RunFacts(steps, new_set(), attempt), mode="json")]

    heard = context.gather_results(prepare)
    place, initial, _ = heard[context.ranks_of_host[0]]
    return Path(place), initial, FACTS.validate_python(heard[context.leader][-1])


def _conclude(
    plan: Plan,
    program: Program,
    results: list[RankResult],
    options: RunOptions,
    initial: str,
    facts: RunFacts,
    placed: Sequence[str],
) -> Outcome:
    """Make an outcome of what ranks have; ``placed`` is what is to be said of where they are."""
    if options.save is not None:
        publish(options.save, (file for result in results for file in result["saved_files"]))
    notes = [] if options.program is None else [f"the program of {options.program} was run, not the plan's own"]
    if options.replay is not None:
        notes.append(f"pulls took what {options.replay} says")
    elif plan.eager:
        log = str(options.pulls or PULLS)
        notes.append(f"what pulls took is in {log}; a run with `replay={log!r}` trains the same weights")
    notes += [*placed, *facts.attempt.notes]
    if facts.attempt.resume is not None:
        initial = f"the checkpoint of step {facts.attempt.step}"
    trained = facts.attempt.step + len(results[0]["loss"])
    if trained < facts.steps:
        notes.append(f"was asked to end, and has trained {trained} of {facts.steps} steps")
    notes += _of_epochs(max(result["samples"] for result in results), plan, options.last)
    notes += dict.fromkeys(note for result in results for note in result["notes"])
    return outcome_of(plan, program, results, initial, notes, facts.attempt.step)


def _of_epochs(samples: int, plan: Plan, last: Last) -> list[str]:
    """Say what becomes of samples that do not fill a mini-batch."""
    left = samples % plan.batch
    if not left:
        return []
    if last == "drop":
        return [f"an epoch leaves out {left} of {samples} samples, which do not fill a mini-batch (`last='drop'`)"]
    return [f"the last mini-batch of an epoch repeats {plan.batch - left} of its {samples} samples (`last='pad'`)"]


def _reading(plan: Plan, model: str, options: RunOptions, *, several_hosts: bool) -> ReadingArguments:
    """Return what loaders are told."""
    return ReadingArguments(
        plan=plan.dumps(),
        model=model,
        data=None if options.data is None else str(options.data),
        last=options.settings.last,
        double=options.settings.double,
        several_hosts=several_hosts,
    )


def _task(
    plan: Plan,
    program: Program,
    model: str,
    folder: Path,
    options: RunOptions,
    facts: RunFacts,
    loaders: Path | None,
) -> object:
    """Return what ranks are told, as plain data; ``loaders`` is where those of the host listen."""
    edited = None if options.program is None else program.dumps()
    # Code of the user's may change the folder that ranks work in.
    places = {name: getattr(options, name) for name in ("save", "checkpoint", "keep", "log_dir", "replay")}
    places |= {"pulls": options.pulls or (PULLS if plan.eager and options.replay is None else None)}
    asked = replace(options, **{name: each and each.resolve() for name, each in places.items()})
    return TrainTask(plan.dumps(), edited, model, folder, asked, facts, loaders).as_data()


def check_devices(plan: Plan, share: bool) -> None:
    """Refuse a plan for more GPUs than this host has.

    Raises:
        UsageError: says how many there are.
    """
    if plan.device_type == "cpu":
        return
    found, needed = torch.cuda.device_count(), 1 if share else len(plan.devices)
    if found >= needed:
        return
    remedy = "run it where they are, or profile here with `device='cpu'`"
    if found:
        remedy = f"plan again with `gpus={found}`, or pass `share_gpus=True`"
    raise UsageError(f"the plan needs {len(plan.devices)} GPUs, this host has {found}; {remedy}")


def _ranks(plan: Plan, pool: RankPool | None, share_gpus: bool, *, spare: bool) -> AbstractContextManager[RankPool]:
    """Return the context in which there are processes for ranks."""
    if pool is not None:
        return nullcontext(pool)
    return RankPool(
        len(plan.devices),
        threads=plan.threads,
        device_type=plan.device_type,
        share_gpus=share_gpus,
        imports=[train.__module__, _OPTIMIZERS_IMPORT],
        spare=spare,
    )


def _sum_losses(plan: Plan, progress: StepProgress | None) -> Callable[[int, dict[str, object]], None]:
    """Return what adds up the parts of a step's loss that the last stage's replicas report."""
    parts: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
    awaited = sum(plan.stages[own[-1]].replicas for own in plan.stages_by_pipeline)

    def take(rank: int, message: dict[str, object]) -> None:
        step = int(str(message["step"]))
        parts[step][rank] = float(str(message["loss"])), float(str(message["count"]))
        if len(parts[step]) == awaited:
            loss = loss_of_step(plan, parts.pop(step))
            if progress is not None:
                progress(step, loss)

    return take
