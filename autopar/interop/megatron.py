"""megatron: a plan as Megatron-LM's arguments.

``megatron.sh`` leaves arguments in an array: the pipeline's size and layout, micro-batch and global batch, precision,
``--use-distributed-optimizer`` where replicas divide the optimizer's state, and recomputation of all blocks or of the
first few of every stage. The schedules are ``1f1b`` and ``interleaved``, with the micro-batches in flight that they
have in Megatron: deeper ones are refused. Replicas that divide gradients or parameters are refused.

Data-parallel ranks are what the pipeline leaves of all, and stand in the comment; a step has ``--global-batch-size``
samples, of which every pipeline runs ``--micro-batch-size`` at a time (`megatron/training/arguments.py`,
`megatron.core.transformer`). The layout ``Et*7|(t*8|)*2t*9L`` has the embedding and seven blocks in the first stage,
and nine and the head in the last; virtual stages follow each other. The final normalisation is the head's.

Tried: ``PipelineParallelLayerLayout`` reads the layout and counts as many blocks on every rank and chunk;
``TransformerConfig`` takes the arguments. ``pretrain_gpt.py`` is no part of that package, and was not run: its
arguments' names are those of public scripts that call it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from autopar.formats.expressible import Expressible, first_blocks, grid_of, recomputation_of
from autopar.interop.layout import ends_refusal, fold, letters_of
from autopar.interop.names import parts_of
from autopar.interop.target import ExportFile, ExportSubject, Target, comment, heading


def write(subject: ExportSubject, target: Target) -> Iterator[ExportFile]:
    """Yield a file to be sourced, which leaves the arguments in an array."""
    grid = grid_of(subject.plan)
    launch = 'torchrun ... pretrain_gpt.py "${AUTOPAR_ARGUMENTS[@]}" ...'
    use = [
        f"ranks: {grid.groups * grid.pipelines}, data-parallel size {grid.pipelines}. The model's own arguments, such "
        f"as its width, are yours.",
        f"source this file, then {launch}",
    ]
    lines = "".join(f"    {each}\n" for each in _arguments(subject))
    yield ExportFile(target.file, f"{comment([*heading(subject, target), *use])}AUTOPAR_ARGUMENTS=(\n{lines})\n")


def _arguments(subject: ExportSubject) -> Iterator[str]:
    plan, grid = subject.plan, grid_of(subject.plan)
    parts = parts_of(subject.profile)
    assert parts is not None, "refused without parts"
    yield f"--num-layers {len(parts.blocks)}"
    yield f"--pipeline-model-parallel-size {grid.groups}"
    if len(plan.stages) > 1:
        layout = fold(letters_of(plan, subject.profile, parts))
        yield f"--pipeline-model-parallel-layout {shlex.quote(layout)}"
    yield f"--micro-batch-size {grid.rows}"
    yield f"--global-batch-size {plan.batch}"
    if plan.precision != "fp32":
        yield f"--{plan.precision}"
    if grid.shard == "optimizer":
        yield "--use-distributed-optimizer"
    yield from _recomputation(subject)


def _recomputation(subject: ExportSubject) -> Iterator[str]:
    plan, blocks = subject.plan, subject.blocks
    how = recomputation_of(plan, blocks)
    if how == "blocks":
        yield "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    if how == "first":
        count = first_blocks(plan, blocks)
        yield f"--recompute-granularity full --recompute-method block --recompute-num-layers {count}"


def _names_refusal(subject: ExportSubject) -> str | None:
    return ends_refusal(subject.plan, parts_of(subject.profile))


TARGET = Target(
    version="Megatron-LM core 0.16.1",
    trial="its layout and its configuration took such arguments",
    file="megatron.sh",
    write=write,
    expressible=Expressible(
        "Megatron-LM",
        ("1f1b", "interleaved"),
        shards=("none", "optimizer"),
        shards_alone=("none", "optimizer"),
        recompute=("none", "blocks", "first"),
        tied=True,
    ),
    names_refusal=_names_refusal,
)
