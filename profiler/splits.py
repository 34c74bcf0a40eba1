"""Splits: how the ranks of a team may divide the layers of a captured model, for its profile.

Layers that compute the same split alike, so each kind is analysed once. What a layer may take and give in slices of the
sequence is recorded beside how its parameters are cut. Layers that share a parameter have to cut it
alike, or leave it whole.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from torch import fx

from autopar.capture.graph import Layer, LayerGraph
from autopar.capture.split.analysis import Analysis, analyse
from autopar.capture.split.choice import choose
from autopar.capture.split.cuts import ParameterCut as LayerCut
from autopar.capture.split.cuts import cuts_of
from autopar.capture.split.sequence_choice import choose_slices
from autopar.formats import profile as formats
from autopar.formats.cuts import LayerSplit, ParameterCut, SequenceCut

COUNTS = (2, 4, 8)
"""Ranks of a team that a profile says of how they divide a layer: as many as a node's GPUs."""

_SplitsByKind = dict[tuple[str, frozenset[int]], tuple[list[LayerCut | None], dict[int, int]]]
"""The cut of every parameter, and the dimension of every input or output that may be in slices, by its place.

By the layer's kind and the places of parameters that are to stay whole.
"""


def with_splits(graph: LayerGraph, layers: Collection[formats.Layer]) -> tuple[formats.Layer, ...]:
    """Return records of a model's layers with how each splits, and what of it does not."""
    survey = _Survey(graph)
    found = [survey.splits(count) for count in COUNTS]
    records = []
    for layer in layers:
        splits = tuple(each[layer.name] for each in found if layer.name in each)
        fields = {"splits": splits, "split_obstacles": survey.obstacles(layer.name)}
        records.append(layer.model_copy(update=fields))
    return tuple(records)


def splits_of(graph: LayerGraph, count: int) -> dict[str, LayerSplit]:
    """Return how layers split in so many parts, by name; those that do not are left out."""
    return _Survey(graph).splits(count)


@dataclass(eq=False)
class _Survey:
    """The layers of a model, with what was found out of each kind."""

    graph: LayerGraph
    analyses: dict[str, Analysis | None] = field(default_factory=dict)
    """Of the first layer of every kind, by fingerprint; none of a module that was listed, not captured."""
    firsts: dict[str, Layer] = field(default_factory=dict)

    def splits(self, count: int) -> dict[str, LayerSplit]:
        """Return how layers split in so many parts, so that those with a parameter in common cut it alike.

        Layers that do not split are left out.
        """
        alike: _SplitsByKind = {}
        whole: set[str] = set()
        while True:
            found = {layer.name: self._split(layer, count, whole, alike) for layer in self.graph.layers}
            disputed = {name for name, layers in self._shared() if len({_cut_of(found[at], name) for at in layers}) > 1}
            if disputed <= whole:
                return {name: split for name, split in found.items() if split is not None}
            whole |= disputed

    def obstacles(self, name: str) -> tuple[str, ...]:
        """Return which operators of a layer every part computes whole, each once, and why."""
        analysis = self._analysis(self.graph.layer(name))
        if analysis is None:
            return ("the module was listed, not captured",)
        return tuple(dict.fromkeys(f"{node.target}: {why}" for node, why in analysis.obstacles.items()))

    def _shared(self) -> Collection[tuple[str, tuple[str, ...]]]:
        return self.graph.tied_parameters().items()

    def _analysis(self, layer: Layer) -> Analysis | None:
        if layer.fingerprint not in self.analyses:
            captured = isinstance(layer.module, fx.GraphModule)
            self.analyses[layer.fingerprint] = analyse(layer) if captured else None
            self.firsts[layer.fingerprint] = layer
        return self.analyses[layer.fingerprint]

    def _split(self, layer: Layer, count: int, whole: Collection[str], alike: _SplitsByKind) -> LayerSplit | None:
        analysis = self._analysis(layer)
        if analysis is None:
            return None
        # Layers of a kind have their parameters, inputs and outputs in the same places.
        places = frozenset(place for place, name in enumerate(layer.parameters.values()) if name in whole)
        key = layer.fingerprint, places
        if key not in alike:
            alike[key] = _split_of_kind(analysis, self.firsts[layer.fingerprint], count, places)
        cuts, dims = alike[key]
        pairs = {name: cut for name, cut in zip(layer.parameters.values(), cuts, strict=True) if cut is not None}
        if not pairs:
            return None
        tensors = {(*layer.inputs, *layer.outputs)[place]: dim for place, dim in dims.items()}
        return LayerSplit(
            count=count,
            cuts=tuple(ParameterCut(parameter=name, dim=cut.dim, parts=cut.parts) for name, cut in pairs.items()),
            sequence=tuple(SequenceCut(tensor=name, dim=dim) for name, dim in tensors.items()),
        )


def _split_of_kind(
    analysis: Analysis, layer: Layer, count: int, places: Collection[int]
) -> tuple[list[LayerCut | None], dict[int, int]]:
    """Return how the first layer of a kind splits, if parameters at some places stay whole."""
    attributes = list(layer.parameters)
    splits = choose(analysis, count, forbidden=[attributes[place] for place in places])
    cuts = cuts_of(analysis, splits)
    dims = choose_slices(analysis, splits, layer.inputs, layer.outputs, count)
    crossing = enumerate((*layer.inputs, *layer.outputs))
    return [cuts.get(each) for each in attributes], {place: dims[name] for place, name in crossing if name in dims}


def _cut_of(split: LayerSplit | None, name: str) -> ParameterCut | None:
    return next((cut for cut in split.cuts if cut.parameter == name), None) if split is not None else None
