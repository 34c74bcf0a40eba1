"""Steps of a plan in virtual time: its program performed by all ranks, with layers that stand in for the model's.

The executor, the mailbox and the messages are those of training. Ranks are processes of this host, or threads of this
process; what passes between two actions is no time at all, but where ranks sleep.

Why: docs/design/decisions.md, "Simulator and bounds: Steps in virtual time".
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypedDict, cast

from pydantic import GetPydanticSchema, TypeAdapter
from pydantic_core.core_schema import no_info_plain_validator_function, plain_serializer_function_ser_schema

from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.formats.program import (
    KINDS,
    UPDATE,
    Action,
    ActionPrices,
    Fault,
    Program,
)
from autopar.formats.timeline import Timeline
from autopar.progress import Progress, no_progress
from autopar.ranks.context import RankContext
from autopar.ranks.failure import PeerLostError
from autopar.ranks.monitor import Watch
from autopar.ranks.pool import RankPool
from autopar.runtime.clocks import SleepingClock, VirtualClock
from autopar.runtime.faults import Drill, Loss, Moment, check_faults, losses_of
from autopar.runtime.job import DEFAULTS
from autopar.runtime.messages.staging import connect
from autopar.runtime.messages.transport import (
    Exchange,
    InProcessTransport,
    Transport,
    reducing_groups,
    team_groups,
)
from autopar.runtime.rehearsal.priced import PricedTransport
from autopar.runtime.rehearsal.stand_ins import MemoryLedger, StandInJob, stand_in_graph, tensors_on
from autopar.runtime.settings import check_scope
from autopar.runtime.start.supervision import describe
from autopar.schedules.check import check
from autopar.schedules.expand import expand
from autopar.schedules.repetition import Repetition, repetitions, written_out

UPDATE_CODE = KINDS.index(UPDATE)
_MOST_PROCESSES = 16
"""Ranks that are processes; of more, each with a torch of its own, they would take the memory of this host."""


@dataclass(frozen=True)
class Rehearsal:
    """What steps in virtual time gave."""

    steps_s: tuple[float, ...]
    """Seconds of every step, from its begin on the first rank to its end on the last."""
    timeline: Timeline
    """When every action of the last step ran, as its rank recorded it, and what was held meanwhile."""
    notes: tuple[str, ...]
    """What a reader must know of how ranks ran."""
    losses: tuple[Loss, ...] = ()
    """What faults cost."""


class _RankRecord(TypedDict):
    """What one rank recorded; plain data."""

    spans: list[tuple[float, float]]
    """Of every mini-batch: when the pipeline was filled for it, and its end."""
    filled_s: float
    """When the pipeline was filled for the last time."""
    times_s: list[tuple[float, float]]
    """Since then: begins and ends of its actions."""
    moments: list[tuple[float, int]]
    """Since then: when how many bytes were held."""
    faults: list[tuple[str, int, float]]
    """When faults befell the rank; see :class:`autopar.runtime.faults.Moment`."""


def rehearse_steps(
    plan: Plan,
    profile: Profile,
    prices: ActionPrices,
    steps: int = 1,
    *,
    program: Program | None = None,
    real_time: bool = False,
    threads: bool | None = None,
    timeout_s: float = 300.0,
    faults: Sequence[Fault] = (),
    every: int | None = None,
    progress: Progress = no_progress,
    pool: RankPool | None = None,
) -> Rehearsal:
    """Perform steps of a plan by all of its ranks, none of which computes anything.

    Args:
        plan: what would be carried out.
        profile: what the plan was made of: layers and tensors.
        prices: how long actions take.
        steps: how many.
        program: what is performed, by default what the plan expands to.
        real_time: whether ranks sleep as long as actions take; otherwise time is a number, and no step waits.
        threads: whether ranks are threads of this process; by default those of more than 16 ranks are.
        timeout_s: longest that a rank may stand still.
        faults: what is to go wrong; ranks go on, but for the slow as if nothing had happened.
        every: steps from one checkpoint to the next; None: there are none.
        progress: told of every step.
        pool: processes to use, if some are there already.

    Raises:
        UsageError: no program follows from the plan.
        ProgramError: the program does not carry out the plan.
        TrainingError: a rank failed or was lost; names it.
    """
    check_scope(plan)
    why = plan.policy.refusal_of("faults")
    if why is not None and (faults or every):
        raise UsageError(f"`{'inject_fault' if faults else 'every'}`: {why}")
    program = program or expand(plan)
    check(program, plan)
    check_faults(faults, len(plan.devices), steps)
    if threads is None:
        threads = len(plan.devices) > _MOST_PROCESSES
    # Stand-ins are on CPUs, their numbers of one type, and every rank of a team has all of them.
    tensors = tuple(each.model_copy(update={"dtype": "float32"}) for each in plan.tensors)
    stages = tuple(each.model_copy(update={"cuts": ()}) for each in plan.stages)
    own = {"device_type": "cpu", "precision": "fp32", "threads": 1, "tensors": tensors, "stages": stages}
    notes, plan = [], plan.model_copy(update=own)
    if threads and any(stage.shard != "none" for stage in plan.stages):
        notes.append("ranks are threads, whose replicas divide no parameters: what that costs is in the prices")
        stages = tuple(each.model_copy(update={"shard": "none"}) for each in plan.stages)
        plan = plan.model_copy(update={"stages": stages})
    if prices.slowed:
        notes.append(
            "every action is priced as if it were alone: what devices that share links cost each other, and computing "
            "beside communication, is in what is simulated only"
        )
    task = _RehearsalTask(plan, profile, prices, program, steps, real_time, tuple(faults))
    ranks = _in_threads(task, timeout_s, progress) if threads else _in_processes(task, pool, timeout_s, progress)
    return _rehearsal(task, ranks, notes, every)


def _rehearsal(
    task: _RehearsalTask, ranks: Sequence[_RankRecord], notes: Sequence[str], every: int | None
) -> Rehearsal:
    """Put what the ranks recorded together."""
    ended_s = [max(rank["spans"][step][1] for rank in ranks) for step in range(task.steps)]
    filled_s = [min(rank["spans"][step][0] for rank in ranks) for step in range(task.steps)]
    drained = list(task.plan.policy.between_drains(range(task.steps)))
    # A mini-batch lasts from the fill on, or from the end of the one before; what was recorded is from the last fill.
    began_s = [filled_s[step] if step == each.start else ended_s[step - 1] for each in drained for step in each]
    timeline, program = Timeline("rehearsed"), written_out(task.program, task.plan, len(drained[-1]))
    origin_s = min(rank["filled_s"] for rank in ranks)
    for rank, (actions, own) in enumerate(zip(program.ranks, ranks, strict=True)):
        for action, (start_s, end_s) in zip(actions, own["times_s"], strict=True):
            timeline.add(rank, action, start_s - origin_s, end_s - origin_s)
        timeline.memory[rank] = [(max(0.0, at_s - origin_s), size) for at_s, size in own["moments"]]
    limits = ((rank, held.limit) for rank, held in enumerate(task.prices.holds))
    timeline.limits_bytes.update({rank: limit for rank, limit in limits if limit is not None})
    lengths_s = tuple(end - begin for begin, end in zip(began_s, ended_s, strict=True))
    moments = [Moment(*each) for rank in ranks for each in rank["faults"]]
    return Rehearsal(lengths_s, timeline, tuple(notes), losses_of(moments, lengths_s, every))


_PROGRAM_TEXT = GetPydanticSchema(
    lambda source, handler: no_info_plain_validator_function(
        lambda text: Program.parse(text, Path("program.json")),
        serialization=plain_serializer_function_ser_schema(Program.dumps),
    )
)


@dataclass(frozen=True)
class _RehearsalTask:
    """What is performed."""

    plan: Plan
    profile: Profile
    prices: ActionPrices
    program: Annotated[Program, _PROGRAM_TEXT]
    steps: int
    real_time: bool
    faults: tuple[Fault, ...]


_TASK = TypeAdapter(_RehearsalTask)


def _in_processes(
    what: _RehearsalTask, pool: RankPool | None, timeout_s: float, progress: Progress
) -> list[_RankRecord]:
    """Perform the steps in processes that are there, or in new ones."""
    count = len(what.plan.devices)

    def tell(rank: int, message: Mapping[str, object]) -> None:
        if rank == 0:
            progress(f"step {message['step']} of {what.steps}", int(str(message["step"])) / what.steps)

    progress(f"starting {count} ranks", 0.0)
    with RankPool(count, imports=[__name__]) if pool is None else nullcontext(pool) as ranks:
        found = ranks.run(
            f"{__name__}:{_rehearse_rank.__name__}",
            _TASK.dump_json(what).decode(),
            ranks=count,
            watch=Watch(timeout_s, describe(what.program, what.plan), tell),
        )
    return [cast(_RankRecord, each) for each in found]


def _rehearse_rank(context: RankContext, task: str) -> _RankRecord:
    """Perform one rank's part, as a process."""
    what = _TASK.validate_json(task)

    def done(step: int) -> None:
        context.report({"step": step})

    transport = connect(context, what.plan, DEFAULTS, [*reducing_groups(what.plan), *team_groups(what.plan)])
    return _perform(what, context.rank, transport, context.note, done, context.barrier)


def _in_threads(what: _RehearsalTask, timeout_s: float, progress: Progress) -> list[_RankRecord]:
    size = len(what.plan.devices)
    exchange, together = Exchange(timeout_s), threading.Barrier(size)
    found: dict[int, _RankRecord] = {}
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        def done(step: int) -> None:
            if rank == 0:
                progress(f"step {step} of {what.steps}", step / what.steps)

        def meet() -> None:
            together.wait(timeout_s)

        try:
            transport = InProcessTransport(exchange, rank)
            found[rank] = _perform(what, rank, transport, lambda step, position: None, done, meet)
        except BaseException as error:
            errors.append(error)
            exchange.break_off()
            together.abort()

    ranks = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    if errors:
        # What follows from a failure is no cause.
        consequences = (PeerLostError, threading.BrokenBarrierError)
        raise next((each for each in errors if not isinstance(each, consequences)), errors[0])
    return [found[rank] for rank in range(size)]


def _stand_in_job(
    what: _RehearsalTask,
    rank: int,
    transport: Transport,
    note: Callable[[int, int], None],
    ledger: MemoryLedger,
) -> tuple[StandInJob, Callable[[], None]]:
    """Return a rank's job of layers that compute nothing, whose actions cost their prices; and what begins a fill."""
    prices, holds, actions = what.prices.ranks[rank], what.prices.holds[rank], what.program.ranks[rank]
    priced = PricedTransport(transport, ledger, prices, what.plan, rank, actions)

    def charge(step: int, position: int) -> None:
        note(step, position)
        priced.charge(position)
        if actions.kinds[position] == UPDATE_CODE:
            ledger.spike(holds.update)

    tensors = tensors_on(what.plan, rank, what.profile.tensors)
    graph = stand_in_graph(what.profile.model_copy(update={"tensors": tensors}), ledger, holds.layers)
    job = StandInJob(ledger, charge, what.plan, what.program, rank, graph, priced)

    def refill() -> None:
        priced.refill()
        ledger.clock.refill()
        ledger.begin_step()

    return job, refill


def _perform(
    what: _RehearsalTask,
    rank: int,
    transport: Transport,
    note: Callable[[int, int], None],
    done: Callable[[int], None],
    meet: Callable[[], None],
) -> _RankRecord:
    """Build a rank's job of stand-ins, and step it."""
    plan, own = what.plan, list(what.program.ranks[rank])
    clock = (SleepingClock if what.real_time else VirtualClock)(what.prices.overhead_s)
    ledger = MemoryLedger(clock, what.prices.holds[rank].state)
    faults: list[tuple[str, int, float]] = []

    def note_fault(fault: Fault, step: int) -> None:
        faults.append((str(fault), step, clock.now_s))

    drill = Drill(what.faults, rank, what.program.ranks[rank], note_fault, clock.spend)
    job, refill = _stand_in_job(what, rank, transport, drill.noting(note), ledger)
    spans, times_s, filled_s = [], list[tuple[float, float]](), 0.0
    for batches in plan.policy.between_drains(range(what.steps)):
        # Told apart: none begins before the one before has ended everywhere.
        meet()
        times_s, filled_s = [], clock.now_s if what.real_time else 0.0
        refill()
        for repetition in repetitions(plan, batches):
            absent = repetition.absent(own)
            spent_s = job.step(repetition.number, batches.stop, batches.start).times_s
            times_s += [each for position, each in enumerate(spent_s) if position not in absent]
            if repetition.number >= batches.start:
                spans += _spans(plan, repetition, own, filled_s, spent_s, clock.now_s)
                done(len(spans))
    meet()
    job.finish()
    return _RankRecord(spans=spans, filled_s=filled_s, times_s=times_s, moments=ledger.moments, faults=faults)


def _spans(
    plan: Plan,
    repetition: Repetition,
    actions: Sequence[Action],
    filled_s: float,
    times_s: Sequence[tuple[float, float]],
    now_s: float,
) -> list[tuple[float, float]]:
    """Return begin and end of every mini-batch that ends in a repetition: of several, each with its update."""
    if repetition.span == 1:
        return [(filled_s, now_s)]
    return [
        (filled_s, times_s[position][1])
        for position, action in enumerate(actions)
        if action.kind == UPDATE and repetition.has(action)
        for _ in repetition.mini_batches_of(action, plan.stages[action.stage].period)
    ]
