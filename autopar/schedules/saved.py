"""Saved: a program that was written to a file, perhaps edited, and takes the place of what its plan expands to."""

from __future__ import annotations

from pathlib import Path

from autopar.formats.plan import Plan
from autopar.formats.program import BACKWARDS, REDUCE, REDUCE_TIED, Program, RankProgram
from autopar.schedules.check import ProgramError, check
from autopar.schedules.expand import expand
from autopar.schedules.holding import holdings

Reduction = tuple[str, int]
"""Its kind, and its stage or shared parameter."""

_NOUNS = {
    "micro_batches": "micro-batches whose backward is not complete",
    "received": "messages that are not yet computed with",
    "unsent": "messages that are not yet sent",
}
"""What takes memory; a weight half that is to come belongs to a backward that is not complete."""


def read_program(path: Path, plan: Plan) -> Program:
    """Read a program that is to be run in place of the plan's own.

    Raises:
        FileError: it is missing or malformed.
        ProgramError: it does not carry out its plan, would deadlock, or holds more at once than was planned for.
    """
    program = Program.load(path)
    try:
        check(program, plan)
        check_bounds(program, plan)
    except ProgramError as error:
        raise ProgramError(f"{path}: {error}") from error
    return program


def check_bounds(program: Program, plan: Plan) -> None:
    """Refuse a sound program that asks for more memory than the plan's own, or reduces in other orders on other ranks.

    Raises:
        ProgramError: names the rank and the stage.
    """
    for rank, (actions, planned) in enumerate(zip(program.ranks, expand(plan).ranks, strict=True)):
        allowed = holdings(planned)
        for stage, holding in holdings(actions).items():
            for name, noun in _NOUNS.items():
                count, most = getattr(holding, name), getattr(allowed[stage], name)
                if count > most:
                    where = f"rank {rank} (stage {stage})"
                    raise ProgramError(f"{where} holds {count} {noun}, and memory was planned for {most}")
    check_reductions(program)


def check_reductions(program: Program) -> None:
    """Refuse a program in which ranks that reduce several things among them do not begin them in one order.

    Raises:
        ProgramError: names two ranks, and what each begins with.
    """
    begun = [_begun(actions) for actions in program.ranks]
    members: dict[Reduction, tuple[int, ...]] = {}
    for rank, reductions in enumerate(begun):
        for reduction in reductions:
            members[reduction] = (*members.get(reduction, ()), rank)
    for ranks in dict.fromkeys(members.values()):
        first, *others = ([each for each in begun[rank] if members[each] == ranks] for rank in ranks)
        for rank, order in zip(ranks[1:], others, strict=True):
            if order != first:
                at = next(at for at, pair in enumerate(zip(order, first, strict=True)) if pair[0] != pair[1])
                raise ProgramError(
                    f"rank {rank} begins to reduce {_named(order[at])} where rank {ranks[0]} begins with "
                    f"{_named(first[at])}; they must keep one order"
                )


def _named(reduction: Reduction) -> str:
    kind, index = reduction
    return f"stage {index}" if kind == REDUCE else f"tied parameter {index}"


def _begun(actions: RankProgram) -> list[Reduction]:
    """Return a rank's reductions in the order in which it begins them: a stage's while its last backward runs.

    A replica that takes turns and gets none has no backward, and begins where the reduction stands.
    """
    found: dict[Reduction, int] = {}
    last: dict[int, int] = {}
    for position, (kind, stage, index, *_) in enumerate(actions):
        if kind in BACKWARDS:
            last[stage] = position
        elif kind == REDUCE:
            found[kind, stage] = last.get(stage, position)
        elif kind == REDUCE_TIED:
            found[kind, index] = position
    return sorted(found, key=found.__getitem__)
