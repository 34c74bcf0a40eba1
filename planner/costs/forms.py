"""Forms: what runs a replica of a stage: a device of some kind, or a team of them, each of which has a part of layers.

Every form has its own seconds and bytes of layers. Those of single devices are there from the beginning, by kind; those
of teams are made when they are first asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.errors import UsageError
from autopar.formats.profile import Layer, LayerSplit, Profile, TiedParameter
from autopar.hardware.topology import ALONE
from autopar.planner.candidate import CandidateStage
from autopar.planner.costs.communication import Flows
from autopar.planner.costs.layers import Form, LayerCosts
from autopar.planner.costs.memory import MemoryModel


class Forms:
    """All forms of a question, by their numbers."""

    def __init__(
        self, profile: Profile, layers: Sequence[tuple[Layer, ...]], flows: Flows, *, averaged: bool = False
    ) -> None:
        """Begin with single devices, the kinds of which have ``layers`` of costs of their own.

        Where weights are ``averaged``, an average is kept of all that are trained, and divided as these are.
        """
        self._profile, self._of_kinds, self._averaged = profile, layers, averaged
        self.every: list[Form] = []
        self.layers: list[tuple[Layer, ...]] = []
        """As one rank has them."""
        self.costs: list[LayerCosts] = []
        self.flows: list[Flows] = []
        self.memory: list[MemoryModel] = []
        self._numbers: dict[Form, int] = {}
        for kind, own in enumerate(layers):
            self._add_new(Form(kind), own, flows)

    def number(self, form: Form) -> int:
        """Return a form's number.

        Raises:
            UsageError: the profile does not say what parts of layers cost.
        """
        if form not in self._numbers:
            anywhere = form._replace(place=ALONE)
            if anywhere not in self._numbers:
                self._add_team(anywhere)
            own = self._numbers[anywhere]
            self._add(form, self.layers[own], self.costs[own], self.flows[own], self.memory[own])
        return self._numbers[form]

    def _add(self, form: Form, layers: tuple[Layer, ...], costs: LayerCosts, flows: Flows, memory: MemoryModel) -> None:
        self._numbers[form] = len(self.every)
        self.every.append(form)
        self.layers.append(layers)
        self.costs.append(costs)
        self.flows.append(flows)
        self.memory.append(memory)

    def _add_team(self, form: Form) -> None:
        """Add a team, wherever its devices stand."""
        layers = tuple(_part_of(layer, form) for layer in self._of_kinds[form.kind])
        self._add_new(form, layers, Flows(_on_team(self._profile, form)))

    def _add_new(self, form: Form, layers: tuple[Layer, ...], flows: Flows) -> None:
        kept = tuple(map(_with_average, layers)) if self._averaged else layers
        costs = LayerCosts(kept)
        self._add(form, kept, costs, flows, MemoryModel(costs, flows, self._profile.updates_at_once))


def _with_average(layer: Layer) -> Layer:
    return layer.model_copy(update={"optimizer_bytes": layer.optimizer_bytes + layer.trainable_bytes})


def _part_of(layer: Layer, form: Form) -> Layer:
    found = layer.on_team(form.team, sliced=form.sliced)
    if found is None:
        slices = " with slices of the sequence" if form.sliced else ""
        raise UsageError(
            f"the profile does not say what a part of layer {layer.name} costs on one of {form.team} devices{slices}; "
            f"profile again, with `tensor={form.team}` or more"
        )
    return found


def _on_team(profile: Profile, form: Form) -> Profile:
    """Return a profile with the sizes that a rank of a team has of shared parameters, and of tensors in slices."""
    splits = {layer.name: layer.split(form.team) for layer in profile.layers}
    sliced = sliced_tensors(profile, splits) if form.sliced else {}
    tensors = (
        each.model_copy(update={"bytes_per_sample": -(-each.bytes_per_sample // form.team)})
        if each.name in sliced
        else each
        for each in profile.tensors
    )
    tied = (each.model_copy(update={"bytes": _part_bytes(each, splits)}) for each in profile.tied)
    return profile.model_copy(update={"tensors": tuple(tensors), "tied": tuple(tied)})


def sliced_tensors(profile: Profile, splits: Mapping[str, LayerSplit | None]) -> dict[str, int]:
    """Return the tensors that all layers that make or read them may have in slices, alike, and along which dimension.

    Args:
        profile: has the tensors.
        splits: by layer, how it is split, if it is.
    """
    cut = {layer: split.sequence if split else () for layer, split in splits.items()}
    dims = {layer: {each.tensor: each.dim for each in own} for layer, own in cut.items()}
    found = {}
    for tensor in profile.tensors:
        if tensor.producer is not None:
            own = {dims[layer].get(tensor.name) for layer in (tensor.producer, *tensor.consumers)}
            dim = own.pop()
            if dim is not None and not own:
                found[tensor.name] = dim
    return found


def slices_of(profile: Profile, stages: Sequence[CandidateStage]) -> list[dict[str, int]]:
    """Return the tensors that every stage's teams have in slices, and along which dimension.

    Of a tensor between stages, all have as many devices a replica, and slice what they can.
    """
    names = [layer.name for layer in profile.layers]
    placed = {name: index for index, stage in enumerate(stages) for name in names[stage.first : stage.stop]}
    splits = {
        layer.name: layer.split(stages[placed[layer.name]].team) if stages[placed[layer.name]].sliced else None
        for layer in profile.layers
    }
    found: list[dict[str, int]] = [{} for _ in stages]
    sliced = sliced_tensors(profile, splits)
    for tensor in (each for each in profile.tensors if each.name in sliced):
        own = {placed[layer] for layer in (tensor.producer, *tensor.consumers) if layer is not None}
        if len({stages[at].team for at in own}) == 1:
            for at in own:
                found[at][tensor.name] = sliced[tensor.name]
    return found


def _part_bytes(tied: TiedParameter, splits: Mapping[str, LayerSplit | None]) -> int:
    """Return what the largest part has of a parameter that layers share; they cut it alike, or not at all."""
    split = splits[tied.layers[0]]
    cut = None if split is None else next((each for each in split.cuts if each.parameter == tied.parameter), None)
    if cut is None:
        return tied.bytes
    largest = max(sum(stop - start for start, stop in part) for part in cut.parts)
    return -(-tied.bytes * largest // cut.size)
