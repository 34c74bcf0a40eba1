"""RunOptions: what the user asks of a run; and TrainSettings, the part of it that is the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from autopar.errors import UsageError
from autopar.formats.program import Fault
from autopar.options.option import Options, option

DEFAULT_STEPS = 20
PULLS = Path("pulls.json")
"""Where the log of an eager run is written that nobody names."""
_MOST_PATIENCE_S = 10**9
"""Thirty years; torch's groups count milliseconds, and cannot wait without end."""

Last = Literal["drop", "pad"]
"""What becomes of an epoch's last mini-batch where samples do not fill it: it is left out, or filled up with the
epoch's first samples."""

Clip = Literal["model", "stage"]
"""Whose norm is bounded: that of all gradients, or of each stage's by itself."""

Count = int | Literal["auto"]

_CHECKPOINTS, _LAYERS, _PROCESSES = "Checkpoints", "How layers train", "Processes and devices"
_LOGS = "Logs and evaluation"


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Options):
    """What the user asks of training, the same on all ranks.

    Raises:
        UsageError: a value is out of range.
    """

    last: Last = option(
        "drop",
        "What becomes of samples at an epoch's end that do not fill a mini-batch: drop leaves them out, pad fills it "
        "up with the epoch's first ones, which then count twice.",
        _LAYERS,
    )
    clip_norm: float | None = option(
        None, "Scale gradients down to at most this norm, over all stages; see `clip`.", _LAYERS, above=0
    )
    clip: Clip | None = option(
        None,
        "Whose norm `clip_norm` bounds: model, that of all gradients; stage, each stage's own, which no stage waits "
        "for. Default: model.",
        _LAYERS,
    )
    deferred_batch_norm: bool = option(
        False, "Update running statistics once per mini-batch, by all its micro-batches.", _LAYERS
    )
    sync_batch_norm: bool = option(
        False, "Normalise by whole micro-batches' statistics where replicas divide them.", _LAYERS
    )
    split_seeds: bool = option(
        False,
        "Let each device of a replica draw the dropout of fused attention for the heads that it has.",
        _LAYERS,
    )
    compile: bool = option(False, "Compile layers (torch.compile) before the first step, one of each kind.", _LAYERS)
    cpu_offload: bool = option(
        False, "Keep what replicas divide (`autopar plan --shard`) in the host's memory; GPUs only.", _PROCESSES
    )

    time_layers: bool = option(
        False, "Time the layers inside stages in the first steps, for `autopar.recalibrate`.", _LAYERS, is_typed=False
    )
    double: bool = False
    """Whether parameters, buffers and inputs are cast to float64, as ``autopar verify`` has it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip is not None and self.clip_norm is None:
            raise UsageError(f"`clip={self.clip!r}` says whose norm is bounded; say by what, too: `clip_norm`")
        if self.deferred_batch_norm and self.sync_batch_norm:
            raise UsageError("`deferred_batch_norm` and `sync_batch_norm` exclude each other; choose one")
        if self.split_seeds and self.compile:
            raise UsageError("`split_seeds` and `compile` exclude each other; choose one")


@dataclass(frozen=True)
class RunOptions(TrainSettings):
    """What the user asks of a run.

    Raises:
        UsageError: a value is out of range, or two contradict each other.
    """

    steps: int | None = option(
        None, f"Optimizer steps to train; default: {DEFAULT_STEPS}, or those of the log that is replayed.", least=1
    )
    epochs: int | None = option(None, "Train so many times through the dataset, in place of `steps`.", least=1)
    weights: Path | None = option(None, "Folder of initial weights (safetensors); default: model()'s own.")
    save: Path | None = option(
        None, "Folder for the trained weights (safetensors with an index); all hosts must see it."
    )
    checkpoint: Path | None = option(None, "Folder to save checkpoints in; all hosts must see it.")
    resume: bool = option(False, "Go on from the newest sound checkpoint in `checkpoint`, if there is any.")

    log_dir: Path | None = option(
        None,
        "Folder for a line of JSON a step (steps.jsonl), and events for TensorBoard where it is installed.",
        _LOGS,
    )

    pulls: Path | None = option(
        None,
        "File for the log of what pulls took, of a plan that is `eager`; default: pulls.json. With `resume`, the run "
        "goes on with it.",
        _LOGS,
    )
    replay: Path | None = option(
        None, "Log of an `eager` run: pulls take what they took there, and the same weights are trained.", _LOGS
    )

    eval_every: int | None = option(
        None,
        "Evaluate the loss of the model file's evaluation_dataset() every so many steps, in evaluation mode.",
        _LOGS,
        least=1,
    )

    every: Count = option(
        "auto",
        "Steps from one checkpoint to the next; auto: as many as cost 3 % of the time.",
        _CHECKPOINTS,
        least=1,
    )
    accept_changes: bool = option(
        False,
        "Go on though model, batch, seed, samples or optimizer have changed: with what is new, and all that still "
        "fits.",
        _CHECKPOINTS,
    )

    program: Path | None = option(
        None,
        "Program to take in place of the plan's own (`autopar simulate --write-program`), edited or not.",
        _PROCESSES,
    )
    share_gpus: bool = option(
        False,
        "Let several ranks share a GPU where a host has too few; what they send then goes through its memory.",
        _PROCESSES,
    )
    loaders: Count = option(
        "auto",
        "Processes of each host that read samples and collate them ahead of its ranks, which wait for none then; 0: "
        "ranks do so themselves. auto: none where ranks compute on CPUs, else as many as there are processors beyond "
        "one a rank, at most 8 a rank.",
        _PROCESSES,
        least=0,
    )
    timeout_s: float = option(
        300.0,
        "Seconds that a rank may stand still before the run is given up.",
        _PROCESSES,
        unit="seconds",
        above=0,
        most=_MOST_PATIENCE_S,
    )
    inject_fault: tuple[Fault, ...] = option(
        (),
        "A drill: KIND@RANK:STEP[:ACTION], such as kill@1:7 or nan@0:3:F; kinds are kill, stop, segfault, exception, "
        "exit, slow, nan, out-of-memory, disconnect, disk-full, fail-write, fail-fsync, fail-rename.",
        _PROCESSES,
    )
    black_box: Path | None = option(
        None, "File for the last actions of every rank, if the run fails; `autopar.show` shows it.", is_typed=False
    )

    data: Path | None = None
    """Python file whose ``dataset()`` feeds an ``hf:`` model; none: synthetic inputs."""
    keep: Path | None = None
    """Folder for what every rank's training is compared by."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.checkpoint is None and (self.resume or self.accept_changes or self.every != "auto"):
            name = "resume" if self.resume else "accept_changes" if self.accept_changes else "every"
            raise UsageError(f"`{name}` is of checkpoints; name their folder, too: `checkpoint`")
        if self.accept_changes and not self.resume:
            raise UsageError("`accept_changes` says what a run may go on with; pass `resume=True`, too")
        if self.pulls is not None and self.replay is not None:
            raise UsageError("`pulls` names a log to be written, and `replay` one that is there; leave out one of them")
        if self.epochs is None and self.steps is None and self.replay is None:
            object.__setattr__(self, "steps", DEFAULT_STEPS)
        elif self.epochs is not None and self.steps is not None:
            raise UsageError(f"`epochs={self.epochs}` and `steps={self.steps}` contradict each other; give one")

    @property
    def settings(self) -> TrainSettings:
        """What of it all ranks are told."""
        return TrainSettings(**{each.name: getattr(self, each.name) for each in fields(TrainSettings)})
