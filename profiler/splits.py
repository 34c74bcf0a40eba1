"""Splits: how the ranks of a team may divide the layers of a captured model, for its profile.

Layers that compute the same split alike, so each kind is analysed once. Layers that share a parameter have to cut it
alike, or leave it whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import fx

from autopar.capture.graph import Layer, LayerGraph
from autopar.capture.split.analysis import Analysis, analyse
from autopar.capture.split.choice import AttributeCut, choose, cuts_of, explain
from autopar.capture.split.edges import choose_slices
from autopar.formats import profile as formats
from autopar.formats.cuts import LayerSplit, ParameterCut, SequenceCut

COUNTS = (2, 4, 8)
"""Ranks of a team that a profile says of how they divide a layer: as many as a node's GPUs."""

_CutsByKind = dict[tuple[str, frozenset[int]], list[AttributeCut | None]]
"""Of every parameter of a layer, by the layer's kind and the places of parameters that are to stay whole."""


_EDGES = ("inputs", "outputs")


def with_splits(graph: LayerGraph, layers: Collection[formats.Layer]) -> tuple[formats.Layer, ...]:
    """Return records of a model's layers with how each splits, and what of it does not."""
    survey = _Survey(graph)
    found = [survey.splits(count) for count in COUNTS]
    records = []
    for layer in layers:
        splits = tuple(each[layer.name] for each in found if layer.name in each)
        fields = {"splits": splits, "split_obstacles": survey.obstacles(layer.name, is_whole=not splits)}
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
    reasons: dict[str, str | None] = field(default_factory=dict)
    """Why kinds that do not split are whole."""
    slices: dict[tuple[str, tuple[tuple[int, AttributeCut], ...]], dict[str, int]] = field(default_factory=dict)
    """By kind and how its parameters are cut, dimensions by the place of an input or output."""

    def splits(self, count: int) -> dict[str, LayerSplit]:
        """Return how layers split in so many parts; those that do not are left out."""
        return {
            name: LayerSplit(count=count, cuts=cuts, sequence=self._slices_of(self.graph.layer(name), cuts))
            for name, cuts in self._cuts(count).items()
            if cuts
        }

    def _slices_of(self, layer: Layer, cuts: tuple[ParameterCut, ...]) -> tuple[SequenceCut, ...]:
        """Return what a layer whose parameters are cut so can take and give in slices."""
        analysis, places = self._analysis(layer), {name: at for at, name in enumerate(layer.parameters.values())}
        assert analysis is not None
        recorded = {places[cut.parameter]: AttributeCut(cut.dim, cut.parts) for cut in cuts}
        key = layer.fingerprint, tuple(recorded.items())
        if key not in self.slices:
            attributes, count = list(self.firsts[layer.fingerprint].parameters), len(cuts[0].parts)
            splits = choose(analysis, count, {attributes[place]: cut for place, cut in recorded.items()})
            inputs, outputs = ([f"{what} {at}" for at, _ in enumerate(getattr(layer, what))] for what in _EDGES)
            self.slices[key] = choose_slices(analysis, splits, inputs, outputs, count)
        names = {f"{what} {at}": name for what in _EDGES for at, name in enumerate(getattr(layer, what))}
        return tuple(SequenceCut(tensor=names[place], dim=dim) for place, dim in self.slices[key].items())

    def _cuts(self, count: int) -> Mapping[str, tuple[ParameterCut, ...]]:
        """Return how every layer splits in so many parts, so that layers with a parameter in common cut it alike."""
        found: dict[str, tuple[ParameterCut, ...]] = {}
        alike: _CutsByKind = {}
        whole: set[str] = set()
        while True:
            found = {layer.name: self._cuts_of(layer, count, whole, alike) for layer in self.graph.layers}
            disputed = {
                name for name, layers in self._shared() if len({_cut_of(found[each], name) for each in layers}) > 1
            }
            if disputed <= whole:
                return found
            whole |= disputed

    def obstacles(self, name: str, *, is_whole: bool) -> tuple[str, ...]:
        """Return which operators of a layer every part computes whole, each once, and why.

        Before them stands what keeps a layer with parameters whole that no number of parts splits.
        """
        layer = self.graph.layer(name)
        analysis = self._analysis(layer)
        if analysis is None:
            return ("the module was listed, not captured",)
        found = [f"{node.target}: {why}" for node, why in analysis.obstacles.items()]
        if is_whole and analysis.parameters:
            if layer.fingerprint not in self.reasons:
                self.reasons[layer.fingerprint] = explain(analysis, COUNTS[0], COUNTS[-1])
            found.insert(0, self._in_its_names(layer, self.reasons[layer.fingerprint] or ""))
        return tuple(filter(None, dict.fromkeys(found)))

    def _in_its_names(self, layer: Layer, text: str) -> str:
        """Return what is said of the first layer of a kind with a layer's own names of buffers in the model."""
        pairs = list(zip(self.firsts[layer.fingerprint].buffers, layer.buffers.values(), strict=True))
        for attribute, name in sorted(pairs, key=lambda pair: -len(pair[0])):
            text = text.replace(attribute, name)
        return text

    def _shared(self) -> Collection[tuple[str, tuple[str, ...]]]:
        return self.graph.tied_parameters().items()

    def _analysis(self, layer: Layer) -> Analysis | None:
        if layer.fingerprint not in self.analyses:
            captured = isinstance(layer.module, fx.GraphModule)
            self.analyses[layer.fingerprint] = analyse(layer) if captured else None
            self.firsts[layer.fingerprint] = layer
        return self.analyses[layer.fingerprint]

    def _cuts_of(
        self, layer: Layer, count: int, whole: Collection[str], alike: _CutsByKind
    ) -> tuple[ParameterCut, ...]:
        analysis = self._analysis(layer)
        if analysis is None:
            return ()
        # Layers of a kind have their parameters in the same places.
        places = frozenset(place for place, name in enumerate(layer.parameters.values()) if name in whole)
        key = layer.fingerprint, places
        if key not in alike:
            attributes = list(self.firsts[layer.fingerprint].parameters)
            cuts = cuts_of(analysis, choose(analysis, count, forbidden=[attributes[place] for place in places]))
            alike[key] = [cuts.get(attribute) for attribute in attributes]
        pairs = zip(layer.parameters.values(), alike[key], strict=True)
        named = {name: cut for name, cut in pairs if cut is not None}
        return tuple(ParameterCut(parameter=name, dim=cut.dim, parts=cut.parts) for name, cut in named.items())


def _cut_of(cuts: Collection[ParameterCut], name: str) -> ParameterCut | None:
    return next((cut for cut in cuts if cut.parameter == name), None)
