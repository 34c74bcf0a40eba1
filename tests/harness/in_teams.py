"""Plans of several ranks for each replica, made of plans of one."""

from collections.abc import Sequence

from autopar.capture.graph import LayerGraph
from autopar.formats.cuts import SequenceCut
from autopar.formats.plan import Plan
from autopar.formats.profile import LayerSplit
from autopar.formats.stage import Stage
from autopar.profiler.subject import SplitSurvey


def in_teams(graph: LayerGraph, plan: Plan, sizes: Sequence[int], *, sequence: bool = False) -> Plan:
    """Return a plan whose replicas are run by so many ranks each, by stage; devices count from 0."""
    splits = {size: SplitSurvey(graph).splits(size) for size in set(sizes) - {1}}
    every = [splits.get(size, {}) for size in sizes]
    stages, device = list[Stage](), 0
    places: dict[int, tuple[int, ...]] = {}
    for chunks in plan.groups:
        count = plan.stages[chunks[0]].replicas * sizes[chunks[0]]
        places |= dict.fromkeys(chunks, tuple(range(device, device + count)))
        device += count
    for index, stage in enumerate(plan.stages):
        cuts = {cut.parameter: cut for name in stage.layers if name in every[index] for cut in every[index][name].cuts}
        fields = {"devices": places[index], "tensor_parallel": sizes[index], "cuts": tuple(cuts.values())}
        stages.append(Stage(**(stage.model_dump() | fields)))
    made = Plan(**(dict(plan) | {"stages": tuple(stages), "nodes": ()}))
    return _with_slices(graph, made, every) if sequence else made


def _with_slices(graph: LayerGraph, plan: Plan, splits: Sequence[dict[str, LayerSplit]]) -> Plan:
    """Return a plan whose teams have in slices what all that make or read it, in teams as large, may have so."""
    stage_of = {layer: index for index, stage in enumerate(plan.stages) for layer in stage.layers}
    found: dict[int, list[SequenceCut]] = {index: [] for index in stage_of.values()}
    for tensor in (each for each in graph.tensors if each.producer is not None):
        layers = [layer for layer in (tensor.producer, *tensor.consumers) if layer is not None]
        own = {_slice_of(splits[stage_of[layer]].get(layer), tensor.name) for layer in layers}
        cut = own.pop()
        if cut is not None and not own and len({plan.stages[stage_of[layer]].tensor_parallel for layer in layers}) == 1:
            for stage in {stage_of[layer] for layer in layers}:
                found[stage].append(cut)
    stages = (stage.model_copy(update={"sequence": tuple(found[at])}) for at, stage in enumerate(plan.stages))
    return Plan(**(dict(plan) | {"stages": tuple(stages)}))


def _slice_of(split: LayerSplit | None, tensor: str) -> SequenceCut | None:
    return None if split is None else next((each for each in split.sequence if each.tensor == tensor), None)
