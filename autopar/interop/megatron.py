"""Megatron: a plan as Megatron-LM's arguments, and its layouts, texts of which layers are in which stage.

In a layout such as ``Et*7|(t*8|)*2t*9L``, ``E`` is the embedding, ``t`` a block, ``L`` the head with the loss; ``|``
ends a stage. ``x*n`` is n times x, and so is ``(...)*n``, whatever stands in it; commas say nothing.
(`megatron.core.transformer.pipeline_parallel_layer_layout`, ``PipelineParallelLayerLayout.parse_str_to_list``.)

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

import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import groupby

from autopar.errors import UsageError
from autopar.formats.expressible import Expressible, first_blocks, grid_of, recomputation_of
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.interop.target import (
    DictatedStages,
    ExportFile,
    ExportSubject,
    ModelParts,
    Target,
    comment,
    ends_refusal,
    heading,
    parts_of,
    stages_text,
)

_GROUP = re.compile(r"\(([^()]+)\)\*([0-9]{1,4})")
_REPEATED = re.compile(r"(.)\*([0-9]{1,4})")
_MOST = 10_000
"""More letters than any layout has, or means."""


def unfold(text: str) -> list[str]:
    """Return the letters of every stage.

    >>> unfold("Et*2|(t*3|)*2tL")
    ['Ett', 'ttt', 'ttt', 'tL']

    Raises:
        UsageError: the text is no layout.
    """
    plain = text.replace(",", "")
    for pattern in (_GROUP, _REPEATED):
        if len(plain) + sum(len(each[1]) * int(each[2]) for each in pattern.finditer(plain)) >= _MOST:
            raise UsageError(f"the layout {text[:80]!r} is too long")
        plain = pattern.sub(lambda match: match[1] * int(match[2]), plain)
    stages = plain.split("|")
    strange = next((each for each in plain if each not in "EtL|"), None)
    if strange is not None:
        raise UsageError(f"the layout {text[:80]!r} has {strange!r}; autopar knows E, t and L")
    whole = "".join(stages)
    if not re.fullmatch("Et+L", whole):
        raise UsageError(f"the layout {text[:80]!r} must have one E first, one L last, and t between them")
    return stages


def fold(stages: Sequence[str]) -> str:
    """Return the short text of stages' letters.

    >>> fold(["Ett", "ttt", "ttt", "tL"]), fold(["E", "t", "L"])
    ('Ett|(t*3|)*2tL', 'E|t|L')
    """
    last = len(stages) - 1
    ended = [_short(letters) + ("|" if at < last else "") for at, letters in enumerate(stages)]
    runs = ((each, len(list(same))) for each, same in groupby(ended))
    return "".join(each if count == 1 else f"({each})*{count}" for each, count in runs)


def _short(letters: str) -> str:
    runs = ((each, len(list(same))) for each, same in groupby(letters))
    return "".join(each * count if count < 3 else f"{each}*{count}" for each, count in runs)


def _letters_of(plan: Plan, profile: Profile, parts: ModelParts) -> list[str]:
    """Return the letters of a plan's stages."""
    first = dict.fromkeys((profile.layers[index].name for index in parts.before[:1]), "E")
    last = dict.fromkeys((profile.layers[index].name for index in parts.behind[-1:]), "L")
    letter = {**dict.fromkeys(parts.names(profile), "t"), **first, **last}
    return ["".join(letter.get(name, "") for name in stage.layers) for stage in plan.stages]


def import_layout(text: str, profile: Profile, replicas: int = 1, groups: int | None = None) -> DictatedStages:
    """Return the stages that a layout of Megatron's means of a profile's layers.

    Args:
        text: the layout.
        profile: of the model.
        replicas: pipelines beside each other (Megatron's data-parallel size).
        groups: devices of a pipeline (its pipeline-parallel size); None: one for every stage.

    Raises:
        UsageError: the text is no layout, or not of so many layers, or the devices do not divide its stages.
    """
    letters, parts = unfold(text), parts_of(profile)
    if parts is None or not parts.before or not parts.behind:
        raise UsageError("the profile's layers are no blocks of one list between an embedding and a head")
    count = sum(each.count("t") for each in letters)
    if count != len(parts.blocks):
        raise UsageError(f"the layout has {count} blocks, and the profile {len(parts.blocks)}")
    sizes = [
        each.count("t") + ("E" in each) * len(parts.before) + ("L" in each) * len(parts.behind) for each in letters
    ]
    groups = groups or len(letters)
    if len(letters) % groups:
        raise UsageError(f"{groups} devices do not divide the layout's {len(letters)} stages")
    chunks = len(letters) // groups
    schedule = "1f1b" if chunks == 1 else "interleaved"
    return DictatedStages(stages_text(sizes, replicas), schedule, chunks)


def write(subject: ExportSubject, target: Target) -> Iterator[ExportFile]:
    """Yield a file to be sourced, which leaves the arguments in an array."""
    grid = grid_of(subject.plan)
    launch = 'torchrun ... pretrain_gpt.py "${AUTOPAR_ARGUMENTS[@]}" ...'
    use = [
        f"ranks: {grid.ranks}, data-parallel size {grid.pipelines}. The model's own arguments, such "
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
    yield f"--tensor-model-parallel-size {grid.tensor}"
    yield f"--pipeline-model-parallel-size {grid.groups}"
    if len(plan.stages) > 1:
        layout = fold(_letters_of(plan, subject.profile, parts))
        yield f"--pipeline-model-parallel-layout {shlex.quote(layout)}"
    yield f"--micro-batch-size {grid.rows}"
    yield f"--global-batch-size {plan.batch}"
    if plan.precision != "fp32":
        yield f"--{plan.precision}"
    told = {"sequence-parallel": grid.sliced, "use-distributed-optimizer": grid.shard == "optimizer"}
    yield from (f"--{name}" for name, holds in told.items() if holds)
    yield from _recomputation(subject)


def _recomputation(subject: ExportSubject) -> Iterator[str]:
    plan, blocks = subject.plan, subject.blocks
    how = recomputation_of(plan, blocks)
    if how == "blocks":
        yield "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    if how == "first":
        count = first_blocks(plan, blocks)
        yield f"--recompute-granularity full --recompute-method block --recompute-num-layers {count}"


TARGET = Target(
    version="Megatron-LM core 0.16.1",
    trial="its layout and its configuration took such arguments",
    file="megatron.sh",
    write=write,
    expressible=Expressible(
        "Megatron-LM",
        ("1f1b", "interleaved"),
        shards=("none", "optimizer"),
        single_stage_shards=("none", "optimizer"),
        recompute=("none", "blocks", "first"),
        tied=True,
        tensor=0,
    ),
    names_refusal=lambda subject: ends_refusal(subject.plan, parts_of(subject.profile)),
)
