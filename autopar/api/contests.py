"""Contests: plans of one model are compared by running them, seed by seed, everyone in turn.

What a run has measured is kept in a file of its own, named by the plan and by all that its numbers depend on: whoever
is stopped goes on behind the last run that ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from autopar.api.inputs import model_inputs
from autopar.errors import FileError, TrainingError, UsageError
from autopar.formats.contest import Contestant, ContestResult, ContestRow, RunComparison, ordered
from autopar.formats.document import read_text, write_text
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.options.contest import ContestOptions
from autopar.progress import Progress
from autopar.signals import stopping


def compare_by_running(
    found: Sequence[Contestant], profile: Profile, first_seed: int, asked: ContestOptions, progress: Progress
) -> RunComparison:
    """Train all contestants that have a plan, and put what they measured side by side.

    Args:
        found: who takes part; plans name their model relative to the working folder.
        profile: what the plans were made of.
        first_seed: the first of as many seeds as are asked for.
        asked: how they train.
        progress: told what is done.

    Raises:
        FileError: the model is not there, or a kept result is malformed.
        TrainingError: a run was asked to end; what has ended is kept.
        UsageError: nobody can be trained here; says why of the first.
    """
    found = [_with_refusal(each, asked) for each in found]
    able = [each for each in found if each.refusal is None]
    if not able:
        raise UsageError(f"nobody can be trained here: {found[0].name}: {found[0].refusal}")
    seeds = range(first_seed, first_seed + asked.seeds)
    # Seed by seed, so that whatever else this host does meets all alike.
    contests = [_Contest(each, seed, asked) for seed in seeds for each in able]
    kept = {each.key: result for each in contests if (result := each.read()) is not None}
    to_run = [each for each in contests if each.key not in kept]
    results, to_end = dict(kept), threading.Event()

    def ask() -> bool:
        to_end.set()
        return False

    with stopping(ask):
        for at, each in enumerate(to_run):
            results[each.key] = each.perform(_share(progress, at, len(to_run), asked.steps))
            if to_end.is_set():
                # In the last of its mini-batches: the run has ended as it would have.
                raise TrainingError("was asked to end; the same call goes on behind the last run that is kept")
    rows = [
        ContestRow(
            each,
            tuple(results[contest.key] for contest in contests if contest.contestant is each),
            asked.on is not None,
        )
        for each in found
    ]
    notes = ["predictions are of the types that were profiled, and float64 was trained"] if asked.double else []
    notes += [f"{len(kept)} of {len(contests)} runs were found in {asked.results}"] if kept else []
    notes += dict.fromkeys(note for each in able if each.plan is not None for note in each.plan.caveats)
    return RunComparison(profile.model.source, ordered(rows, asked.loss), asked.loss, asked.on, tuple(notes))


def check_results(folder: Path) -> None:
    """Refuse a folder for results that cannot be made, or written to, before anything is planned.

    Raises:
        FileError: says why.
    """
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir():
        raise FileError(f"`results`: {there} is not a folder; name another")
    if not os.access(there, os.W_OK):
        raise FileError(f"`results`: {there} may not be written to; name another folder")


def _with_refusal(contestant: Contestant, asked: ContestOptions) -> Contestant:
    """Return a contestant with why it cannot be trained here, if it cannot."""
    from autopar.runtime.start.contest import check_host

    if contestant.plan is None:
        return contestant
    try:
        check_host(contestant.plan, asked)
    except UsageError as error:
        return contestant._replace(refusal=str(error))
    return contestant


def _share(progress: Progress, at: int, count: int, steps: int) -> Callable[[str, int], None]:
    """Return what tells a progress how far the ``at``-th of some runs is."""
    return lambda name, step: progress(f"training: {name}", (at + step / steps) / count)


@dataclass(frozen=True)
class _Contest:
    """One contestant with one seed."""

    contestant: Contestant
    seed: int
    asked: ContestOptions

    @property
    def plan(self) -> Plan:
        """What is trained."""
        assert self.contestant.plan is not None
        return self.contestant.plan.model_copy(update={"seed": self.seed})

    @cached_property
    def key(self) -> str:
        """A hash of all that decides what is measured."""
        import torch

        asked = self.asked
        settings = [asked.steps, asked.double, asked.on is not None, self.contestant.is_plain, torch.__version__]
        return hashlib.sha256(f"{json.dumps(settings)}\n{self.plan.dumps()}".encode()).hexdigest()

    @property
    def file(self) -> Path | None:
        """Where its result is kept."""
        name = re.sub(r"[^\w.]+", "-", self.contestant.name)
        return self.asked.results and self.asked.results / f"{name}-{self.seed}-{self.key[:16]}.json"

    def read(self) -> ContestResult | None:
        """Return the result of a run before this one, if there was one.

        Raises:
            FileError: the file is malformed.
        """
        if self.file is None or not self.file.exists():
            return None
        try:
            return ContestResult.parse(read_text(self.file, "result"), self.file)
        except FileError as error:
            raise FileError(f"{error}; remove it, and it is measured again") from error

    def perform(self, progress: Callable[[str, int], None]) -> ContestResult:
        """Train, and keep what was measured; of a failure nothing is kept, for it may not come again."""
        from autopar.runtime.start.contest import contest

        name = f"{self.contestant.name}, seed {self.seed}"
        progress(name, 0)

        def tell(step: int, loss: float) -> None:
            progress(name, step + 1)

        made = contest(*model_inputs(self.plan), self.asked, tell, is_plain=self.contestant.is_plain)
        if self.file is not None and made.failure is None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.file, f"{made.model_dump_json(indent=1)}\n")
        return made
