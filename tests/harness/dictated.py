"""Plans dictated by tests, made from a captured graph without any measurement."""

from collections.abc import Collection, Sequence
from itertools import accumulate

from autopar.capture.graph import LayerGraph
from autopar.capture.model.source import UserModel
from autopar.formats.plan import Plan
from autopar.formats.prediction import Prediction
from autopar.formats.profile import ModelSource
from autopar.formats.stage import SharedParameter, Stage, group_of, layout_of
from autopar.ownership import Shard, even_shares
from autopar.runtime.stage.layers import crossings
from autopar.schedules import SCHEDULES


def dictate(
    graph: LayerGraph,
    model: UserModel,
    widths: Sequence[int],
    micro_batches: int,
    rows: int,
    schedule: str = "1f1b",
    warmup: str | Sequence[int] | None = None,
    cuts: Sequence[int] | None = None,
    shares: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
    turns: Sequence[int] = (),
    recompute: bool | Collection[str] = False,
    chunks: int = 1,
    shard: Shard | Sequence[Shard] = "none",
) -> Plan:
    """Place layers on stages of the given widths, cut evenly unless ``cuts`` says where.

    Of ``chunks`` stages per group of devices, ``widths`` and ``shares`` are by group.

    The replicas of stages ``turns`` take whole micro-batches in turn, and depths that are given as numbers are theirs;
    with ``recompute``, all layers are recomputed, or those that it names; with ``shard``, every stage of several
    replicas is sharded, or each as its own entry says.
    """
    names = [layer.name for layer in graph.layers]
    groups, stages = len(widths), len(widths) * chunks
    edges = [0, *(cuts or [len(names) * index // stages for index in range(1, stages)]), len(names)]
    depths = SCHEDULES[schedule].warmups(groups, chunks, micro_batches)
    given = warmup is not None and not isinstance(warmup, str)
    if warmup is None or isinstance(warmup, str):
        warmup = depths[warmup] if warmup else next(iter(depths.values()))
    placed, stage_of = [], {}
    starts = [0, *accumulate(widths)]
    for index in range(stages):
        group = group_of(layout_of(schedule), index, groups)
        width = widths[group]
        mine = tuple(names[edges[index] : edges[index + 1]])
        stage_of.update(dict.fromkeys(mine, index))
        devices = tuple(range(starts[group], starts[group + 1]))
        share, depth = tuple(shares[group]) if shares else even_shares(rows, width), warmup[index]
        if index in turns:
            share, depth = (rows,) * width, depth if given else -(-depth // width)
        placed.append(
            Stage(
                layers=mine,
                devices=devices,
                shares=share,
                warmup=depth,
                division="round-robin" if index in turns else "split",
                recompute=tuple(name for name in mine if recompute is True or (recompute and name in recompute)),
                shard="none" if width == 1 else shard if isinstance(shard, str) else shard[index],
            )
        )
    return Plan(
        model=ModelSource(source=str(model.path), sha256=model.sha256),
        batch=micro_batches * rows,
        precision="fp64",
        seed=seed,
        schedule=schedule,  # type: ignore[arg-type]
        micro_batches=micro_batches,
        micro_batch_size=rows,
        stages=tuple(placed),
        tensors=crossings(graph.tensors, stage_of),
        tied=tuple(_tied(graph, stage_of)),
        predicted=Prediction(step_s=0.0, lower_bound_s=0.0, bubble=0.0, peak_bytes=(0,) * stages),
    )


def _tied(graph: LayerGraph, stage_of: dict[str, int]) -> list[SharedParameter]:
    found = []
    for name, layers in graph.tied_parameters().items():
        stages = tuple(sorted({stage_of[layer] for layer in layers}))
        parameter = graph.parameter(name)
        if parameter.requires_grad and len(stages) > 1:
            found.append(SharedParameter(parameter=name, stages=stages, bytes=parameter.nbytes))
    return found
