"""Resume: a job goes on from a checkpoint, if what has changed since allows for it.

How training is carried out may change: plan, ranks, schedule, sharding, micro-batches, torch. That is said. What
training is may not, unless its user accepts that: batch, seed, samples, architecture, optimizer, scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from autopar.capture.graph import LayerGraph
from autopar.errors import UsageError
from autopar.formats.checkpoint import Checkpoint, SavedPlan, SavedRun
from autopar.runtime.checkpoint.plain import plain_items
from autopar.runtime.checkpoint.reader import CheckpointReader
from autopar.runtime.checkpoint.state import class_name, restore_generators, restore_optimizer, restore_tensors
from autopar.runtime.start.job import Job

SHOWN = 3
"""Names that a refusal lists."""
Shapes = Mapping[str, tuple[int, ...]]


def changes(checkpoint: Checkpoint, run: SavedRun, shapes: Shapes) -> Iterator[str]:
    """Say what of training is not as it was, but for the optimizer.

    Args:
        checkpoint: what is gone on from.
        run: what is asked for now.
        shapes: of the model's parameters and buffers.
    """
    for name, before, now in (
        ("batch", checkpoint.run.batch, run.batch),
        ("seed", checkpoint.run.seed, run.seed),
        ("number of samples", checkpoint.run.samples, run.samples),
        ("last", checkpoint.run.last, run.last),
    ):
        if before != now and None not in (before, now):
            yield f"the {name} is {now}, it was {before}"
    stored = {each.name: each.shape for each in checkpoint.tensors if each.kind in ("parameter", "buffer")}
    for what, names in (
        ("the model has {} that the checkpoint has not", shapes.keys() - stored.keys()),
        ("the checkpoint has {} that the model has not", stored.keys() - shapes.keys()),
    ):
        if names:
            yield what.format(_list_names(names))
    for name in sorted(shapes.keys() & stored.keys()):
        if shapes[name] != stored[name]:
            yield f"{name} has shape {list(shapes[name])}, it had {list(stored[name])}"


def _list_names(names: Sequence[str] | set[str]) -> str:
    shown, more = sorted(names)[:SHOWN], len(names) - SHOWN
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def optimizer_changes(checkpoint: Checkpoint, job: Job) -> Iterator[str]:
    """Say what of a rank's optimizer and scheduler is not as it was."""
    update, saved = job.update, checkpoint.optimizer
    if update.optimizer is None or saved is None:
        return
    if saved.kind != class_name(update.optimizer):
        yield f"the optimizer is {class_name(update.optimizer)}, it was {saved.kind}"
        return
    before = {name: group.settings for group in saved.groups for name in group.parameters}
    names = {parameter: name for name, parameter in update.optimizer_parameters.items()}
    for fresh, group in zip(update.fresh_groups, update.optimizer.param_groups, strict=True):
        now = plain_items(fresh)
        for name in (names[each] for each in group["params"] if each in names):
            if name not in before:
                yield f"the optimizer steps {name}, it did not"
                continue
            # Another version of torch may have settings that this one lacks.
            key = next((key for key, value in now.items() if before[name].get(key, value) != value), None)
            if key is not None:
                yield f"the optimizer's {key} is {now[key]} for {name}, it was {before[name][key]}"
                break
    stepped = {names[each] for group in update.optimizer.param_groups for each in group["params"] if each in names}
    left = sorted((update.optimizer_parameters.keys() & before.keys()) - stepped)
    if left:
        yield f"the optimizer leaves out {_list_names(left)}, which it stepped"
    scheduler = None if update.scheduler is None else class_name(update.scheduler)
    past = None if checkpoint.scheduler is None else checkpoint.scheduler.kind
    if scheduler != past:
        yield f"the scheduler is {scheduler or 'absent'}, it was {past or 'absent'}"


def plan_notes(before: SavedPlan, now: SavedPlan, *, random: bool, batch_norm: bool) -> Iterator[str]:
    """Say what of how training is carried out is not as it was, and what this changes of its numbers.

    Args:
        before: the checkpoint's.
        now: the plan's.
        random: whether some layer draws random numbers.
        batch_norm: whether some layer is a batch normalisation.
    """
    for name, past, present in (
        ("torch", before.torch, now.torch),
        ("ranks", before.ranks, now.ranks),
        ("stages", before.stages, now.stages),
        ("schedule", before.schedule, now.schedule),
        ("micro-batches", before.micro_batches, now.micro_batches),
        ("precision", before.precision, now.precision),
        ("ranks for a replica (by stage)", _team_sizes(before), _team_sizes(now)),
    ):
        if past != present:
            yield f"goes on with {name} {present}; the checkpoint was saved with {past}"
    if before.sharded != now.sharded:
        yield f"goes on {'with' if now.sharded else 'without'} sharding, unlike the checkpoint's run"
    if before.micro_batches == now.micro_batches and len({*before.division, *now.division}) == 1:
        return
    for there, what in ((random, "layers that draw random numbers"), (batch_norm, "batch normalisation")):
        if there:
            yield f"{what} go on otherwise: micro-batches are divided in another way (docs/howto/verify.md)"


def _team_sizes(plan: SavedPlan) -> str:
    """Return how many ranks run a replica of each stage together; of plans without teams, 1.

    Teams that all stages have alike are one number: stages may be others.
    """
    sizes = set(plan.tensor_parallel or (1,))
    return ", ".join(map(str, plan.tensor_parallel if len(sizes) > 1 else sizes))


def check_state(graph: LayerGraph) -> None:
    """Refuse a model whose forwards change what no checkpoint holds.

    Raises:
        UsageError: names the layer and the state.
    """
    for layer in graph.layers:
        if layer.writes is not None and layer.writes.state:
            raise UsageError(
                f"layer {layer.name} changes the Python state {layer.writes.state[0]} as it runs, which checkpoints do "
                "not hold; keep it in a buffer (register_buffer), or train without `checkpoint`"
            )


def shapes_of(graph: LayerGraph, unread: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters and buffers."""
    found = {name: tuple(tensor.shape) for name, tensor in unread.items()}
    for layer in graph.layers:
        tensors = {**dict(layer.module.named_parameters()), **dict(layer.module.named_buffers())}
        for attribute, name in (*layer.parameters.items(), *layer.buffers.items()):
            if attribute in tensors:
                found[name] = tuple(tensors[attribute].shape)
    return found


def resume(
    job: Job,
    rank: int,
    folder: Path,
    checkpoint: Checkpoint,
    differences: Sequence[str],
    device: torch.device,
    *,
    accept: bool,
) -> list[str]:
    """Have a job go on from a checkpoint that was verified; return what its reader should know.

    Args:
        job: a rank's, before its first step.
        rank: which.
        folder: the checkpoint's.
        checkpoint: its manifest.
        differences: what :func:`changes` says.
        device: of the rank.
        accept: whether changes are accepted.

    Raises:
        UsageError: something has changed; says what it was, and is.
    """
    changed = [*differences, *optimizer_changes(checkpoint, job)]
    if changed and not accept:
        raise _changed_error(folder, changed)
    with CheckpointReader(folder, checkpoint) as source:
        restore_tensors(job, source)
        restore_optimizer(job, source)
        mine = [each for each in checkpoint.tensors if each.kind == "generator" and each.name == f"rank {rank}"]
        restore_generators(device, {str(each.state): source.read(each) for each in mine})
    return [f"accepted: {each}" for each in changed]


def _changed_error(folder: Path, differences: Sequence[str]) -> UsageError:
    """Return the error that names what has changed since a checkpoint, as far as it is shown."""
    more = f" and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    return UsageError(
        f"{folder} cannot be gone on with: {'; '.join(differences[:SHOWN])}{more}; change it back, or pass "
        "`accept_changes=True` to take what is new and all that still fits"
    )
