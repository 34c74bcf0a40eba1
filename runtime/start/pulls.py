"""Pulls: the log of what the pulls of an eager run take, written as pipelines are drained; or one that is replayed.

A log is there as soon as the weights are that a run goes on from: what is trained between two drains is in it before
the checkpoint behind them is begun.
"""

from __future__ import annotations

import json

from autopar.errors import FileError, UsageError
from autopar.formats.plan import Plan
from autopar.formats.pulls import Fill, PullLog, digest_of
from autopar.options.train import PULLS, RunOptions
from autopar.ranks.context import RankContext
from autopar.runtime.checkpoint.training import RunCheckpoints
from autopar.runtime.job import Job
from autopar.runtime.stage.waves import EagerWaveWeights


def replayed_log(plan: Plan, options: RunOptions) -> PullLog | None:
    """Return the log that a run replays, if it replays one.

    Raises:
        FileError: it is missing, malformed, or of another plan.
    """
    if options.replay is None:
        return None
    found = PullLog.load(options.replay)
    found.check(plan, options.replay)
    return found


def check_steps(log: PullLog, options: RunOptions, steps: int) -> None:
    """Refuse to end a replay where the log's run was not drained.

    Raises:
        UsageError: says where it was.
    """
    if steps not in log.ends:
        raise UsageError(
            f"`steps`: {options.replay} is of a run that was drained behind step {', '.join(map(str, log.ends[-5:]))}, "
            f"and not behind {steps}; pass `steps={log.ends[-1]}`, or leave it out"
        )


class RunPulls:
    """The log of a run, which rank 0 writes, or which is replayed; all ranks call the same methods in one order."""

    def __init__(
        self,
        context: RankContext,
        job: Job,
        versions: EagerWaveWeights,
        options: RunOptions,
        checkpoints: RunCheckpoints | None,
    ) -> None:
        """Prepare.

        Args:
            context: the ranks.
            job: this rank's, before its first step.
            versions: of its weights.
            options: which log is written or replayed.
            checkpoints: those of the run, which may go on from one.

        Raises:
            FileError: the log cannot be read, or there is no folder for it; on all ranks.
            UsageError: the run is drained elsewhere than the one that is replayed.
        """
        self._context, self._plan, self._versions = context, job.plan, versions
        self._first = 0 if checkpoints is None else checkpoints.first_step
        self._path, self._fills = options.pulls or PULLS, list[Fill]()
        self.replayed, self.notes = replayed_log(job.plan, options), list[str]()
        if self.replayed is not None:
            self._check_drains(self.replayed, options, checkpoints)
            versions.follow(self.replayed.taken_by(context.rank))
            return
        self.notes += context.result_of_rank_0(self._begin)

    def _begin(self) -> list[str]:
        """Find what the log has of the steps before the run's first; return what a reader should know."""
        if not self._path.parent.is_dir():
            raise FileError(f"cannot write {self._path}: no such folder: {self._path.parent}")
        if not self._first:
            return []
        if self._path.exists():
            before = PullLog.load(self._path)
            if before.plan_sha256 == digest_of(self._plan) and self._first in before.ends:
                self._fills = [each for each in before.fills if each.stop <= self._first]
                return []
        return [
            f"{self._path.name} begins with step {self._first}: there was no log of the steps before, so that only a "
            "run that goes on from the same checkpoint repeats it"
        ]

    def next_drain(self, done: int) -> int | None:
        """Return behind which step pipelines are drained next in what is replayed, being drained behind ``done``."""
        if self.replayed is None:
            return None
        return next(end for end in self.replayed.ends if end > done)

    def end(self, first: int, done: int) -> None:
        """Log what was taken since the fill before step ``first``, pipelines being drained before step ``done``."""
        if self.replayed is not None:
            return
        rows = [json.loads(text) for text in self._context.gather(json.dumps(self._versions.taken))]
        taken = tuple(tuple(map(tuple, own)) for own in rows)
        self._fills.append(Fill(first_step=first, steps=done - first, taken=taken))
        self._context.result_of_rank_0(lambda: PullLog.of(self._plan, self._fills).save(self._path))

    def _check_drains(self, log: PullLog, options: RunOptions, checkpoints: RunCheckpoints | None) -> None:
        if self._first not in (log.fills[0].first_step, *log.ends):
            ends = ", ".join(map(str, log.ends[-5:]))
            raise UsageError(
                f"`replay`: {options.replay} is of a run that was drained behind step {ends}, and this one goes on "
                f"behind step {self._first}; leave `replay` out"
            )
        if checkpoints is None:
            return
        for fill in log.fills:
            drained = checkpoints.next_drain(fill.first_step)
            if self._first <= fill.first_step and drained is not None and drained < fill.stop:
                raise UsageError(
                    f"`replay`: checkpoints drain pipelines behind step {drained}, and the run of {options.replay} was "
                    f"drained behind step {fill.stop}; leave out `checkpoint`, or pass `every={fill.steps}`, too"
                )
