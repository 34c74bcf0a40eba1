"""RehearsalOptions: what the user asks of a rehearsal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autopar.errors import UsageError
from autopar.formats.program import Fault
from autopar.options.option import Options, again, option
from autopar.options.plan import PlanOptions
from autopar.options.train import RunOptions


@dataclass(frozen=True)
class RehearsalOptions(Options):
    """What the user asks of a rehearsal; without ``steps``, bytes are counted, and nothing else may be asked.

    Raises:
        UsageError: a value is out of range, or is of steps.
    """

    steps: int | None = option(
        None, "Perform so many steps in virtual time, by all ranks, instead of checking memory.", least=1
    )
    real_time: bool = option(False, "Sleep as long as actions take: steps are as long as on the devices.")
    times_of: str | None = again(PlanOptions, "times_of")
    program: Path | None = again(RunOptions, "program")
    inject_fault: tuple[Fault, ...] = again(RunOptions, "inject_fault")
    every: int | None = option(
        None, "Steps from one checkpoint to the next, of what `inject_fault` costs; default: there are none.", least=1
    )
    threads: bool | None = option(
        None,
        "Whether ranks are threads, and not processes; default: those of more than 16 ranks are.",
        is_typed=False,
    )
    timeout_s: float = option(300.0, "Longest that a rank may stand still.", unit="seconds", above=0, is_typed=False)

    def check_counting(self, **others: object) -> None:
        """Refuse what is of steps where there are none; ``others`` are not options, but of steps as well.

        Raises:
            UsageError: names the first.
        """
        names = [name for name, value in others.items() if value is not None]
        for name in (
            *names,
            *self.non_defaults(("real_time", "times_of", "program", "inject_fault", "every", "threads")),
        ):
            raise UsageError(f"`{name}` is of steps in virtual time; pass `steps`, too")
