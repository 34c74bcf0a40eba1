"""Expressible: which plans another trainer can express: pipelines that are alike, beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from autopar.formats.plan import Plan
from autopar.formats.stage import layout_of
from autopar.ownership import Shard

Recomputation = Literal["none", "blocks", "all", "first"]
"""Layers that run forward again: none; every block; every layer; the first few blocks of each stage, as many of all."""


class Grid(NamedTuple):
    """A plan as other trainers see it: so many pipelines, each on devices of its own."""

    groups: int
    """Devices of a pipeline."""
    pipelines: int
    """Beside each other, each with samples of its own."""
    micro_batches: int
    """Of a pipeline in a step."""
    rows: int
    """Samples of a pipeline's micro-batch."""
    shard: Shard
    """What the replicas of a stage divide."""
    tensor: int = 1
    """Devices that run every replica together."""
    sliced: bool = False
    """Whether these keep slices of the sequence between layers."""

    @property
    def ranks(self) -> int:
        """All devices."""
        return self.groups * self.pipelines * self.tensor


class Expressible(NamedTuple):
    """What a trainer can express."""

    trainer: str
    schedules: tuple[str, ...]
    shards: tuple[Shard, ...] = ("none",)
    """Of stages that are one of several."""
    single_stage_shards: tuple[Shard, ...] = ("none",)
    """Of a single stage."""
    recompute: tuple[Recomputation, ...] = ("none",)
    single_stage_recompute: tuple[Recomputation, ...] | None = None
    """Of a single stage; None: as of several."""
    recompute_needs_shards: bool = False
    """Whether layers run forward again only where replicas divide something."""
    any_depth: bool = False
    """Whether a stage may have other micro-batches in flight than its schedule has by itself."""
    any_count: bool = False
    """Whether a schedule with several stages a device may have any number of micro-batches."""
    most_stages: int | None = None
    tied: bool = False
    """Whether stages may share a parameter."""
    tensor: int = 1
    """What the devices divide that run every replica together; 0: there may be any number of them, as many of each."""

    def refusal(self, plan: Plan, blocks: Sequence[str], depths: Sequence[Sequence[int]]) -> str | None:
        """Return why a plan cannot be expressed, in one line; None where it can.

        Args:
            plan: the plan.
            blocks: its layers that are blocks.
            depths: micro-batches in flight of every stage, as the schedule has them by itself; any of these.
        """
        return next(self._refusals(plan, blocks, depths), None)

    def _refusals(self, plan: Plan, blocks: Sequence[str], depths: Sequence[Sequence[int]]) -> Iterator[str]:
        why = _not_alike(plan)
        if why is not None:
            yield why
            return
        grid, has = grid_of(plan), f"{self.trainer} has"
        if self.tensor % grid.tensor:
            heads = f", and {self.trainer} has them divide {self.tensor} heads of keys"
            lacking = heads if self.tensor > 1 else f", which is not written for {self.trainer}"
            yield f"{grid.tensor} devices run each replica together{lacking}"
        if self.most_stages is not None and len(plan.stages) > self.most_stages:
            yield f"{has} no pipelines, and the plan has {len(plan.stages)} stages"
        if len(plan.stages) > 1 and plan.schedule not in self.schedules:
            yield f"{has} no schedule {plan.schedule}, only {', '.join(self.schedules) or 'none'}"
        if grid.shard not in self.shards_of(len(plan.stages)):
            of_stages = "of a pipeline's stages " if len(plan.stages) > 1 else ""
            yield f"{has} no replicas {of_stages}that divide {grid.shard} as the plan's do"
        yield from self._depth_refusals(plan, grid, depths)
        skipping = next((each for each in plan.tensors if each.consumers[-1] > each.producer + 1), None)
        if skipping is not None:
            far = f"from stage {skipping.producer} to stage {skipping.consumers[-1]}"
            yield f"tensor {skipping.name} passes {far}, and {has} messages between neighbours only"
        if plan.tied and not self.tied:
            yield f"parameter {plan.tied[0].parameter} is shared between stages, which {self.trainer} does not add up"
        how = recomputation_of(plan, blocks)
        if how != "none" and grid.shard == "none" and self.recompute_needs_shards:
            yield f"{self.trainer} recomputes layers only where replicas divide something"
        if how not in self.recomputations_of(len(plan.stages)):
            yield self._recompute_refusal(plan, blocks)

    def _depth_refusals(self, plan: Plan, grid: Grid, depths: Sequence[Sequence[int]]) -> Iterator[str]:
        if len(plan.stages) == 1 or plan.schedule not in self.schedules:
            return
        if layout_of(plan.schedule) == "loop" and not self.any_count and grid.micro_batches % grid.groups:
            yield (
                f"{grid.micro_batches} micro-batches are no multiple of {grid.groups} devices, as {self.trainer}'s "
                f"{plan.schedule} needs"
            )
        own = [stage.warmup for stage in plan.stages]
        if not self.any_depth and own not in [list(each) for each in depths]:
            at, deep = next((at, deep) for at, deep in enumerate(own) if deep != depths[0][at])
            yield (
                f"stage {at} keeps {deep} micro-batches in flight, and {depths[0][at]} by {self.trainer}'s "
                f"{plan.schedule}"
            )

    def _recompute_refusal(self, plan: Plan, blocks: Sequence[str]) -> str:
        at, stage = next((at, stage) for at, stage in enumerate(plan.stages) if stage.recompute)
        own = self.recomputations_of(len(plan.stages))
        words = {"none": "no layer", "blocks": "all blocks", "all": "all layers", "first": "the first blocks of stages"}
        what = f"stage {at} recomputes {len(stage.recompute)} of {len(stage.layers)} layers"
        if recomputation_of(plan, blocks) in ("all", "blocks"):
            what = f"the plan recomputes {words[recomputation_of(plan, blocks) or 'all']}"
        return f"{what}, and {self.trainer} recomputes {' or '.join(words[each] for each in own)}"

    def shards_of(self, stages: int) -> tuple[Shard, ...]:
        """Return what replicas may divide where there are so many stages."""
        return self.shards if stages > 1 else self.single_stage_shards

    def recomputations_of(self, stages: int) -> tuple[Recomputation, ...]:
        """Return which layers may run forward again where there are so many stages."""
        return self.recompute if stages > 1 or self.single_stage_recompute is None else self.single_stage_recompute


def recomputation_of(plan: Plan, blocks: Sequence[str]) -> Recomputation | None:
    """Return which layers of a plan run forward again; None: some others.

    ``all`` is every layer, ``blocks`` all blocks and nothing else.
    """
    again = [name for stage in plan.stages for name in stage.recompute]
    own = set(blocks)
    if not again:
        return "none"
    if set(again) == own:
        return "blocks"
    if len(again) == sum(len(stage.layers) for stage in plan.stages):
        return "all"
    return None if first_blocks(plan, blocks) is None else "first"


def first_blocks(plan: Plan, blocks: Sequence[str]) -> int | None:
    """Return how many blocks every stage recomputes, where these are its first ones, and as many of every stage.

    A stage that has fewer recomputes all that it has. None: it is not so.
    """
    own, most = set(blocks), max(len(stage.recompute) for stage in plan.stages)
    for stage in plan.stages:
        inside = [name for name in stage.layers if name in own]
        if sorted(inside[:most]) != sorted(stage.recompute):
            return None
    return most


def grid_of(plan: Plan) -> Grid:
    """Return how other trainers see a plan whose stages are alike (:meth:`Expressible.refusal`)."""
    first = plan.stages[0]
    own = plan.ownership.ranks[0]
    rows, micro_batches = len(own.rows), len(own.samples.of(plan.micro_batches))
    sliced = any(stage.sequence for stage in plan.stages)
    return Grid(len(plan.groups), first.replicas, micro_batches, rows, first.shard, first.tensor_parallel, sliced)


def _not_alike(plan: Plan) -> str | None:
    """Return why a plan is no set of pipelines that are alike."""
    why = plan.refusal or plan.policy.refusal_of("export")
    if why is not None:
        return why
    if plan.ema_decay is not None:
        return "it keeps an average of the weights; plan without `ema_decay`"
    if plan.divisible:
        return "micro-batches were taken to divide freely; plan without `divisible`"
    first = plan.stages[0]
    for at, stage in enumerate(plan.stages):
        if stage.tensor_parallel != first.tensor_parallel:
            sizes = f"{stage.tensor_parallel} devices run each replica of stage {at}"
            return f"{sizes}, and {first.tensor_parallel} of stage 0: other trainers have as many of every stage"
        if stage.replicas != first.replicas:
            widths = f"stage 0 has {first.replicas} replicas and stage {at} has {stage.replicas}"
            return f"{widths}: other trainers have as many of every stage"
        if stage.division != first.division:
            return f"replicas of stage {at} and of stage 0 divide micro-batches differently (turns, shares)"
        if stage.shard != first.shard:
            return f"replicas of stage {at} divide {stage.shard}, those of stage 0 {first.shard}"
    if len(set(first.shares)) > 1:
        return f"replicas take {', '.join(map(str, first.rows))} rows of a micro-batch: not as many each"
    if first.division == "round-robin" and plan.micro_batches % first.replicas:
        return f"{first.replicas} replicas take turns at {plan.micro_batches} micro-batches: not as many each"
    return None
