"""Parts of layers, as the ranks of a team have them: which of them differ, and what one costs a rank.

In: a model's layers, and how they split. Out: for every number of ranks, and with tensors between layers whole or in
slices of the sequence, what a part holds, takes, and would exchange. Each runs on one device, alone
(:mod:`autopar.capture.split.alone`): the first part and the largest one, of which the slower counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from autopar.capture import Layer, LayerGraph, UserModel
from autopar.capture.split.alone import LoneSums, PartsBeside
from autopar.capture.split.analysis import Analysis, analyse
from autopar.capture.split.rewrite import LayerPart, split_as_recorded
from autopar.capture.split.rules.draws import draw_locally
from autopar.capture.split.sums import Sums
from autopar.errors import first_line
from autopar.formats import profile as formats
from autopar.formats.cuts import ParameterCut
from autopar.formats.profile import LayerSplit, PartSum
from autopar.profiler.device import Computing, peak_bytes
from autopar.profiler.layer_runs import (
    LayerInputs,
    LayerPass,
    Recording,
    SeparateChain,
    SplitPass,
    record_layer,
    rename_storages,
)
from autopar.profiler.measure import Timing, fit_line, measure
from autopar.profiler.optimizer import UpdateCosts, measure_updates, memory_of, parameters_at
from autopar.profiler.subject import COUNTS, PartKey, SplitSurvey
from autopar.progress import Progress

COPIES = 2
"""Most copies of a part that are run, so that its weights are not what the caches have."""


@dataclass(frozen=True, eq=False)
class PartKind:
    """Layers of which the ranks of a team have parts that compute alike."""

    key: str
    """Stands for the fingerprint of what its parts compute."""
    layers: list[Layer]
    """Of the first one, parts are made."""
    count: int
    """Ranks of the team."""
    cuts: Mapping[str, ParameterCut]
    """Of the first one's parameters, by name."""
    sequence: Mapping[str, int]
    """Dimensions of its inputs and outputs that are in slices; none: all are whole."""
    deferred_names: frozenset[str]
    """Of its parameters, those that it alone has: summands of their gradients are added up once a mini-batch."""
    held: str
    """Equal for kinds whose parts hold the same of parameters of the same shapes."""

    @property
    def layer(self) -> Layer:
        """The first one."""
        return self.layers[0]

    def make(self, analysis: Analysis, on_gpu: bool, sums: Sums, index: int) -> LayerPart:
        """Return a part of the first layer; a GPU draws dropout of fused attention inside (`--split-seeds`)."""
        part = split_as_recorded(
            self.layer, sums, index, self.count, self.cuts, self.sequence, self.deferred_names, analysis
        )
        if on_gpu:
            draw_locally(part.module, index)
        return part

    def on(self, layer: Layer) -> PartKind:
        """Return the same, with parts made of a layer like the first one, which is there with its weights."""
        first = self.layer
        parameters = dict(zip(layer.parameters, first.parameters.values(), strict=True))
        placed = replace(first, module=layer.module, parameters=parameters)
        return replace(self, layers=[placed, *self.layers[1:]])

    def largest(self) -> int:
        """Return the first of the parts that hold most."""
        held = [0] * self.count
        for attribute, name in self.layer.parameters.items():
            cut = self.cuts.get(name)
            for index, ranges in enumerate(cut.parts if cut else ()):
                length = sum(stop - start for start, stop in ranges)
                held[index] += self.layer.parameter(attribute).nbytes // cut.size * length  # type: ignore[union-attr]
        return held.index(max(held))


def part_kinds(graph: LayerGraph, survey: SplitSurvey, most: int) -> list[PartKind]:
    """Return what differs of the parts of a model's layers, for teams of up to so many ranks."""
    uses = Counter(name for layer in graph.layers for name in layer.parameters.values())
    found: dict[object, PartKind] = {}
    held: dict[object, str] = {}
    for count in (each for each in COUNTS if each <= most):
        for name, split in survey.splits(count).items():
            layer = graph.layer(name)
            names, crossing = list(layer.parameters.values()), (*layer.inputs, *layer.outputs)
            cuts = tuple((names.index(cut.parameter), cut.dim, cut.parts) for cut in split.cuts)
            same = (layer.fingerprint, count, cuts)
            held.setdefault(same, f"{layer.fingerprint}/{len(held)}")
            deferred = frozenset(each for each in names if uses[each] == 1)
            for sequence in _sequences(split):
                places = tuple((crossing.index(tensor), dim) for tensor, dim in sequence.items())
                key = (*same, places, tuple(each in deferred for each in names))
                if key not in found:
                    own = {cut.parameter: cut for cut in split.cuts}
                    made = f"{layer.fingerprint}/{len(found)} of {count}"
                    found[key] = PartKind(made, [], count, own, sequence, deferred, held[same])
                found[key].layers.append(layer)
    return list(found.values())


def _sequences(split: LayerSplit) -> list[dict[str, int]]:
    sliced = {cut.tensor: cut.dim for cut in split.sequence}
    return [{}, sliced] if sliced else [{}]


def without_part(kind: PartKind, error: Exception) -> str:
    """Return the note that parts of a kind of layers are missing."""
    return (
        f"parts of layer {kind.layer.name} for {kind.count} devices a replica were not found out, so that no stage "
        f"with it is planned so: {first_line(error)[:160]}"
    )


class LonePart(NamedTuple):
    """A part that runs alone."""

    layer: Layer
    part: LayerPart
    sums: LoneSums


def lone_part(kind: PartKind, make: Callable[[Sums, int], LayerPart], index: int) -> LonePart:
    """Return a part of a kind's first layer, which takes its forwards' sums from others that ran before."""
    sums = LoneSums()
    part = make(sums, index)
    part.module.register_forward_pre_hook(sums.begin)
    return LonePart(replace(kind.layer, module=part.module, fingerprint=f"{kind.key}, {index}"), part, sums)


class _NotedPass(SplitPass):
    """A pass whose sums know which half runs."""

    def __init__(self, lone: LonePart, inputs: LayerInputs, loss: tuple[str, ...], computing: Computing) -> None:
        super().__init__(lone.layer, inputs, loss, computing)
        self._sums = lone.sums

    def forward(self) -> None:
        self._sums.at = "forward"
        super().forward()

    def backward_input(self) -> None:
        self._sums.at = "backward_input"
        super().backward_input()

    def backward_weight(self) -> None:
        self._sums.at = "backward_weight"
        super().backward_weight()


def exchanges_of(
    lone: LonePart, inputs: LayerInputs, loss: tuple[str, ...], computing: Computing
) -> tuple[tuple[PartSum, ...], int]:
    """Run a part once; return what it would exchange, in order, and the bytes that it holds between its halves."""
    lone.sums.noted = noted = list[PartSum]()
    halved = _NotedPass(lone, inputs, loss, computing)
    try:
        pending = halved.pending_bytes()
        halved.backward_weight()
    finally:
        halved.discard()
        lone.sums.noted = None
        lone.layer.module.zero_grad(set_to_none=True)
    return tuple(noted), pending


def part_record(
    part: LayerPart, optimizer: tuple[int, int], costs: Sequence[formats.Cost], updates: UpdateCosts
) -> formats.PartCosts:
    """Return the record of a part; ``optimizer`` is the bytes of its state and of what its step holds for a while."""
    parameters = list(part.module.parameters())
    trainable = sum(each.nbytes for each in parameters if each.requires_grad)
    sizes = [cost.micro_batch for cost in costs]
    return formats.PartCosts(
        parameters_bytes=sum(each.nbytes for each in parameters),
        trainable_bytes=trainable,
        gradient_bytes=trainable,
        optimizer_bytes=optimizer[0],
        summand_bytes=_summand_bytes(part),
        update_s=updates.seconds,
        accumulate_s=updates.accumulate_s,
        update_bytes=optimizer[1],
        costs=tuple(costs),
        forward_fit=fit_line(sizes, [cost.forward_s for cost in costs]),
        backward_fit=fit_line(sizes, [cost.backward_s for cost in costs]),
    )


def _summand_bytes(part: LayerPart) -> int:
    total = 0
    for attribute, summands in part.summands.items():
        parameter = part.module.get_parameter(attribute)
        for _, dim, indices in summands:
            if indices is None:
                total += parameter.nbytes
            else:
                total += parameter.nbytes // parameter.shape[dim] * sum(stop - start for start, stop in indices)
    return total


@dataclass(eq=False)
class _Run:
    """One part of a kind, in some copies, and what was noted of it by micro-batch size."""

    kind: PartKind
    index: int
    copies: list[LonePart]
    inputs: dict[int, LayerInputs] = field(default_factory=dict)
    saved: dict[int, dict[str, int]] = field(default_factory=dict)
    output_bytes: dict[int, int] = field(default_factory=dict)
    peaks: dict[int, int] = field(default_factory=dict)
    pending: dict[int, int] = field(default_factory=dict)
    sums: dict[int, tuple[PartSum, ...]] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        return self.copies[0].layer.fingerprint

    def note(
        self, inputs: LayerInputs, loss: tuple[str, ...], crossing: set[str], computing: Computing, device: torch.device
    ) -> None:
        """Run the first copy for its bytes, and for what it would exchange."""
        lone, size, recording = self.copies[0], inputs.rows, Recording()
        record_layer(lone.layer, inputs, loss, crossing, computing, recording)
        self.inputs[size] = inputs
        self.saved[size] = recording.saved_bytes[lone.layer.name]
        self.output_bytes[size] = recording.output_bytes[lone.layer.name]
        for parameter in lone.layer.module.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        self.peaks[size] = peak_bytes(LayerPass(lone.layer, inputs, loss, computing).whole, device)
        lone.layer.module.zero_grad(set_to_none=True)
        self.sums[size], self.pending[size] = exchanges_of(lone, inputs, loss, computing)

    def costs(self, timed: _Run, timings: Mapping[tuple[str, int], Timing], layer: Layer) -> list[formats.Cost]:
        """Return costs under a layer's names: this part's bytes, and the times and sums of the one that was timed."""
        return [
            timings[timed.fingerprint, size].cost(
                size,
                rename_storages(self.saved[size], self.kind.layer, layer),
                self.peaks[size],
                self.output_bytes[size],
                self.pending[size],
                timed.sums[size],
            )
            for size in self.inputs
        ]


class PartMeasurement:
    """Measures what parts of layers cost a rank."""

    def __init__(
        self,
        user: UserModel,
        loss: tuple[str, ...],
        crossing: set[str],
        owned_places: Mapping[str, tuple[int, ...]],
        device: torch.device,
        computing: Computing,
    ) -> None:
        """Prepare; ``owned_places`` says, by layer, which of its parameters it updates."""
        self.found: dict[PartKey, formats.PartCosts] = {}
        self.notes: list[str] = []
        """What was not measured."""
        self._user, self._loss, self._crossing, self._places = user, loss, crossing, owned_places
        self._device, self._computing = device, computing
        self._updates: dict[tuple[str, tuple[int, ...]], UpdateCosts] = {}
        self._analyses: dict[nn.Module, Analysis] = {}
        self.update_wait_s = 0.0
        """For how long, and for every tensor, a GPU waits for the host to launch the optimizer's step."""
        self._optimizer: dict[str, tuple[int, int]] = {}

    def measure(
        self,
        kinds: Sequence[PartKind],
        inputs: Mapping[tuple[str, int], LayerInputs],
        budget_s: float,
        progress: Progress,
        split: bool,
    ) -> None:
        """Measure the parts of some kinds of layers, which are there with their weights.

        Args:
            kinds: whose parts.
            inputs: what whole layers read, by fingerprint and micro-batch size.
            budget_s: seconds for timing, about.
            progress: is told what is measured.
            split: whether backwards are split in halves.
        """
        forms: dict[tuple[int, bool], list[PartKind]] = defaultdict(list)
        for kind in kinds:
            forms[kind.count, bool(kind.sequence)].append(kind)
        for number, ((count, sliced), same) in enumerate(sorted(forms.items())):
            what = f"parts of layers, {count} ranks{', slices of the sequence' * sliced}"

            def tell(_: str, share: float, what: str = what, number: int = number) -> None:
                progress(f"timing {what}", (number + share) / len(forms))

            progress(f"recording {what}", number / len(forms))
            runs = [run for kind in same for run in self._runs_if_any(kind, inputs)]
            if not runs:
                continue
            timings = self._time(runs, budget_s / len(forms), tell, split)
            self._measure_updates(runs)
            for own in ([run for run in runs if run.kind is kind] for kind in same):
                if own:
                    self._describe(own, timings)

    def _runs_if_any(self, kind: PartKind, inputs: Mapping[tuple[str, int], LayerInputs]) -> list[_Run]:
        """Return :meth:`_runs`; a part that does not run leaves its layer whole, and the profile as it is."""
        try:
            return self._runs(kind, inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.notes.append(without_part(kind, error))
            return []

    def _runs(self, kind: PartKind, inputs: Mapping[tuple[str, int], LayerInputs]) -> list[_Run]:
        """Make parts of a kind, and note what they keep and would exchange."""
        make = partial(kind.make, self._analysis(kind.layer), self._device.type == "cuda")
        beside, copies = PartsBeside(make, kind.count), min(COPIES, len(kind.layers))
        indices = sorted({0, kind.largest()})
        runs = [_Run(kind, index, [lone_part(kind, make, index) for _ in range(copies)]) for index in indices]
        for (fingerprint, size), whole in inputs.items():
            if fingerprint == kind.layer.fingerprint:
                each = [part_inputs(kind, whole, index) for index in range(kind.count)]
                with self._computing():
                    totals = beside.run(size, [list(own.tensors.values()) for own in each])
                for run in runs:
                    for copy in run.copies:
                        copy.sums.keep(size, totals[run.index])
                    run.note(each[run.index], self._loss, self._crossing, self._computing, self._device)
        return runs

    def _analysis(self, layer: Layer) -> Analysis:
        """Return that of a layer, of which there may be parts of several kinds."""
        if layer.module not in self._analyses:
            self._analyses[layer.module] = analyse(layer)
        return self._analyses[layer.module]

    def _time(
        self, runs: Sequence[_Run], budget_s: float, progress: Progress, split: bool
    ) -> dict[tuple[str, int], Timing]:
        layers = [copy.layer for run in runs for copy in run.copies]
        given = {(run.fingerprint, size): own for run in runs for size, own in run.inputs.items()}
        chain = SeparateChain(layers, self._loss, self._computing, self._device, given)
        sizes = {size: LayerInputs(size, {}, {}) for _, size in given}
        timings = measure(chain, sizes, budget_s, progress, split, seldom=True)
        for layer in layers:
            layer.module.zero_grad(set_to_none=True)
        return timings

    def _measure_updates(self, runs: Sequence[_Run]) -> None:
        """Measure the optimizer on what parts hold."""
        groups = {}
        for run in runs:
            if run.index == run.kind.largest():
                part = run.copies[0].layer
                for places in {self._places[layer.name] for layer in run.kind.layers}:
                    groups[run.kind.held, places] = parameters_at(part, places)
                if run.kind.held not in self._optimizer:
                    self._optimizer[run.kind.held] = memory_of(self._user, part.named_parameters(), self._device)
        new = [(key, parameters) for key, parameters in groups.items() if key not in self._updates]
        found = measure_updates(self._user, new, self._device)
        self._updates |= {key: each.later(self.update_wait_s * len(key[1])) for key, each in found.items()}

    def _describe(self, runs: Sequence[_Run], timings: Mapping[tuple[str, int], Timing]) -> None:
        kind, size = runs[0].kind, max(runs[0].inputs)
        large = next(run for run in runs if run.index == kind.largest())
        slow = max(runs, key=lambda run: timings[run.fingerprint, size].seconds)
        for layer in kind.layers:
            costs, updates = large.costs(slow, timings, layer), self._updates[kind.held, self._places[layer.name]]
            found = part_record(large.copies[0].part, self._optimizer[kind.held], costs, updates)
            self.found[PartKey(layer.name, kind.count, bool(kind.sequence))] = found


def part_inputs(kind: PartKind, whole: LayerInputs, index: int) -> LayerInputs:
    """Return what a part of a kind's first layer reads, given what a layer like it reads as a whole."""
    tensors, gradient = {}, {}
    for name, other in zip(kind.layer.inputs, whole.tensors, strict=True):
        tensor, dim = whole.tensors[other], kind.sequence.get(name)
        tensors[name] = tensor if dim is None else tensor.chunk(kind.count, dim)[index].contiguous()
        gradient[name] = whole.gradient[other]
    return LayerInputs(whole.rows, tensors, gradient)
