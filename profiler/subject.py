"""Subject: a user's model, built, captured and compared with itself; what is then measured or estimated.

Its profile also says how the ranks of a team may divide its layers. Layers that compute the same split alike, so each
kind is analysed once. Layers that share a parameter have to cut it alike, or leave it whole.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from autopar.capture import Layer, LayerGraph, UserModel, named_tensors
from autopar.capture.cache.recall import capture_to_keep
from autopar.capture.layers.check import check_gradients
from autopar.capture.layers.losses import UNKNOWN, LossCheck, check_loss
from autopar.capture.layers.shortening import is_long
from autopar.capture.model.batch import check_reading
from autopar.capture.model.optimizer import needs_all, try_sharding
from autopar.capture.model.python_state import Path, parameters_reached
from autopar.capture.model.source import NamedParameters
from autopar.capture.split.analysis import Analysis, analyse
from autopar.capture.split.choice import AttributeCut, choose, cuts_of, explain
from autopar.capture.split.sequence import sequence_dims
from autopar.errors import CaptureError, ModelError, UsageError
from autopar.formats import profile as formats
from autopar.formats.cuts import ParameterCut, SequenceCut
from autopar.formats.profile import LayerSplit, PartCosts, Precision, Profile
from autopar.options.profile import ProfileOptions
from autopar.profiler import device as devices
from autopar.progress import Progress, no_progress
from autopar.signals import unwinding_aborts

# The weights, and the gradients of the plain model and of the layers that are held against each other.
COPIES = 3
# Samples that can be parted unevenly.
LEAST = 3
NEEDS_ALL = (
    "the optimizer's step {why}, and would do something else on ranks that hold some of them: `autopar run` refuses "
    "plans of several stages"
)
HOLLOW = (
    "the model is larger than memory: its gradients were not checked against the plain model's, nor whether its "
    "forward changes Python state, nor whether the loss is that of its micro-batches"
)


@dataclass(frozen=True, eq=False)
class Subject:
    """What is measured or estimated."""

    user: UserModel
    module: nn.Module
    """In training mode, on the CPU."""
    graph: LayerGraph
    precision: Precision
    """What the layers compute in: the parameters' own, or that of autocast."""
    notes: tuple[str, ...]
    """What the profile should say about the model."""
    loss_difference: float | None = None
    """How far a mini-batch's loss is from that of its parts, relative; accepted by the user."""
    indivisible: str | None = None
    """Why the optimizer cannot step parts of parameters; none: it can, or it was not tried."""

    def batch(self, rows: int) -> dict[str, torch.Tensor]:
        """Return the dataset's first samples as named tensors, on the CPU."""
        return named_tensors(self.user.load_batch(self.user.dataset(), range(rows)))

    def sample_times(self, rows: int) -> dict[str, float]:
        """Return ``read_s`` and ``collate_s`` of a profile: medians of three times, by the dataset's first samples."""
        dataset, times = self.user.dataset(), list[tuple[float, float]]()
        for _ in range(3):
            began_s = time.perf_counter()
            samples = [self.user.sample(dataset, index) for index in range(rows)]
            read_s = time.perf_counter()
            named_tensors(self.user.collate(samples))
            times.append((read_s - began_s, time.perf_counter() - read_s))
        read, collated = (statistics.median(column) / rows for column in zip(*times, strict=True))
        return {"read_s": read, "collate_s": collated}

    @cached_property
    def survey(self) -> SplitSurvey:
        """How the layers split."""
        return SplitSurvey(self.graph)

    def record(self, batch: int, layers: Sequence[formats.Layer], parts: Parts, **fields: Any) -> Profile:  # noqa: ANN401
        """Return a profile of the model; ``layers``, ``parts`` and ``fields`` were measured or estimated of it."""
        return Profile(
            model=self.user.model_source,
            batch=batch,
            precision=self.precision,
            tied=describe_ties(self.graph),
            indivisible=self.indivisible,
            ignored_state=self.user.ignored_state,
            loss_difference=self.loss_difference,
            counts_labels=self.user.counts_labels,
            layers=with_splits(self.survey, layers, parts),
            **fields,
        )


@unwinding_aborts()
def prepare(user: UserModel, options: ProfileOptions, progress: Progress = no_progress) -> Subject:
    """Build and capture a model, and check the captured graph against it.

    Raises:
        UsageError: the dataset is too small for the batch, or the precision does not fit the parameters.
        ModelError: the model file is broken, its dataset is empty, or it has nothing to train.
        CaptureError: the model cannot be captured.
    """
    with contextlib.redirect_stdout(sys.stderr):
        samples = _check_batch(user, options.batch)
        check_reading(user, options.seed, accept_mixing=options.accept_loss)
        progress("building the model", 0.0)
        module = _build(user, options)
        precision = _precision(module, user, options.precision)
        progress("capturing the model", 0.0)
        captured = capture_to_keep(user, module, options.seed)
        graph = captured.graph
        if graph.on_meta:
            notes, difference = [HOLLOW], None
        else:
            difference, note = _check(user, module, graph, samples, options.accept_loss, progress)
            notes = [] if note is None else [note]
        notes += _remarks(module, graph)
        progress("trying the optimizer", 0.0)
        trained = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        notes += _remarks_on_steps(user, module, trained)
        why = needs_all(user, trained)
        if why is not None:
            notes.append(NEEDS_ALL.format(why=why))
        indivisible = try_sharding(user, trained)
        kept = captured.keep()
        if kept is not None:
            progress(f"keeping the captured model for later runs ({kept.bytes:,} bytes; `autopar cache list`)", 1.0)
    graph = replace(graph, short=None)
    return Subject(user, module, graph, precision, (*user.notes, *graph.notes, *notes), difference, indivisible)


def _remarks_on_steps(user: UserModel, module: nn.Module, trained: NamedParameters) -> list[str]:
    """Say what is reached and not stepped.

    Raises:
        ModelError: the optimizer steps nothing, or parameters that only the loss has.
    """
    own = {id(each) for each in module.parameters()}
    reached = parameters_reached({Path("loss"): user.loss})
    others = {id(each): path for path, each in reached.items() if each.requires_grad and id(each) not in own}
    stepped = {id(each) for group in user.make_optimizer(trained).param_groups for each in group["params"]}
    taken = [path for key, path in others.items() if key in stepped]
    if taken:
        raise ModelError(
            f"{user.path}: {taken[0]} is a parameter that the loss reaches, the model does not have, and optimizer() "
            "steps; make it the model's: let model() assign what has it to the module (net.criterion = criterion), and "
            "optimizer() take its argument alone"
        )
    if not stepped:
        raise ModelError(f"{user.path}: optimizer() steps none of the model's {len(trained)} trained parameters")
    first = next(iter(others.values()), None)
    return [] if first is None else [f"{first} is a parameter that the model does not have: it stays as it is"]


def _precision(module: nn.Module, user: UserModel, precision: Precision | None) -> Precision:
    kinds = {parameter.dtype for parameter in module.parameters()}
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ModelError(f"{user.path}: the model has no parameter that requires a gradient; there is nothing to train")
    own: Precision
    if kinds <= {torch.float32, torch.complex64}:
        own = "fp32"
    elif kinds <= {torch.float64, torch.complex128}:
        own = "fp64"
    else:
        names = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        raise ModelError(
            f"{user.path}: parameters are {names}; all must be float32 or complex64, or all float64 or complex128: let "
            "model() return the module's float(), and pass `precision='bf16'` to compute in half precision"
        )
    if precision is None or precision == own:
        return own
    if own == "fp64" or precision == "fp64":
        remedy = "leave the option out" if own == "fp32" else "leave the option out, or build them in float32"
        raise UsageError(f"`precision={precision!r}`: the parameters of {user.path} are {own}; {remedy}")
    return precision


def _check(
    user: UserModel, module: nn.Module, graph: LayerGraph, samples: int, accept_loss: bool, progress: Progress
) -> LossCheck:
    """Check gradients on a small batch, and whether the loss adds up."""
    progress("checking gradients", 0.0)
    few = user.load_batch(user.dataset(), range(2))
    rows = 2 if graph.short is None and is_long(module, named_tensors(few)) else 4
    check_gradients(module, graph, user.load_batch(user.dataset(), range(min(rows, samples))), user.loss)
    if samples < LEAST:
        return LossCheck(note=f"{UNKNOWN}: the dataset has {samples} samples, and it takes {LEAST}")
    progress("checking the loss", 0.0)
    return check_loss(user, module, graph, accept_loss=accept_loss)


def _remarks(module: nn.Module, graph: LayerGraph) -> list[str]:
    """Say what is normalised by share, which layers have one replica, and which are not recomputed."""
    found: dict[str, list[str]] = {}
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules()):
        found[""] = ["batch normalisation takes its statistics per micro-batch and share"]
    for layer in graph.layers:
        if layer.writes is not None and layer.writes.single is not None:
            how = "has one replica and is not recomputed" if layer.writes.once else "has one replica"
            found.setdefault(how, []).append(f"layer {layer.name} {how}, since {layer.writes.single}")
    return [
        each[0] if len(each) == 1 else f"{each[0]} (and {len(each) - 1} more such layers)" for each in found.values()
    ]


def _check_batch(user: UserModel, batch: int) -> int:
    """Return the number of samples; refuse a batch of more, or one that no memory holds, before trying."""
    samples = user.sample_count(user.dataset())
    if samples == 0:
        raise ModelError(f"{user.data or user.path}: dataset() is empty; profiling needs at least 2 samples")
    if samples < batch:
        raise UsageError(
            f"{user.path}: the dataset has {samples} samples, `batch` asks for {batch}; give `batch={samples}` or less"
        )
    sample = named_tensors(user.load_batch(user.dataset(), range(1)))
    size, most = batch * sum(tensor.nbytes for tensor in sample.values()), devices.memory_bytes(torch.device("cpu"))
    if size > most:
        raise UsageError(
            f"`batch={batch}`: so many samples of {user.path} take {size} bytes, this machine has {most}; give less"
        )
    return samples


def _build(user: UserModel, options: ProfileOptions) -> nn.Module:
    """Build the model: with values for its parameters if they fit the memory, else with their shapes only."""
    try:
        on_meta = user.build(options.seed, on_meta=True)
    except (CaptureError, ModelError):
        # It says what is wrong where it is built with values, or is no larger than memory.
        return user.build(options.seed)
    most = [devices.memory_bytes(torch.device("cpu"))]
    if options.device in ("auto", "cuda") and torch.cuda.is_available():
        most.append(devices.memory_bytes(torch.device("cuda", 0)))
    weights = sum(parameter.nbytes for parameter in on_meta.parameters())
    return on_meta if COPIES * weights > min(most) else user.build(options.seed)


COUNTS = (2, 4, 8)
"""Ranks of a team that a profile says of how they divide a layer: as many as a node's GPUs."""

_CutsByKind = dict[tuple[str, frozenset[int]], list[AttributeCut | None]]
"""Of every parameter of a layer, by the layer's kind and the places of parameters that are to stay whole."""


class PartKey(NamedTuple):
    """Says of what layer a part is, and in which team."""

    layer: str
    ranks: int
    """Of the team."""
    sliced: bool
    """Whether tensors between layers are in slices."""


Parts = Mapping[PartKey, PartCosts]
"""What is known of parts of layers."""


def with_splits(
    survey: SplitSurvey, layers: Collection[formats.Layer], parts: Parts = MappingProxyType({})
) -> tuple[formats.Layer, ...]:
    """Return records of a model's layers with how each splits, what parts cost, and what of it does not split."""
    found = [survey.splits(count) for count in COUNTS]
    records = []
    for layer in layers:
        splits = tuple(_with_parts(each[layer.name], layer.name, parts) for each in found if layer.name in each)
        fields = {"splits": splits, "split_obstacles": survey.obstacles(layer.name, is_whole=not splits)}
        records.append(layer.model_copy(update=fields))
    return tuple(records)


def _with_parts(split: LayerSplit, layer: str, parts: Parts) -> LayerSplit:
    whole, sliced = (parts.get(PartKey(layer, split.count, each)) for each in (False, True))
    return split.model_copy(update={"part": whole, "sliced": sliced})


@dataclass(eq=False)
class SplitSurvey:
    """The layers of a model, with what was found out of each kind."""

    graph: LayerGraph
    analyses: dict[str, Analysis | None] = field(default_factory=dict)
    """Of the first layer of every kind, by fingerprint; none of a module that was listed, not captured."""
    firsts: dict[str, Layer] = field(default_factory=dict)
    reasons: dict[str, str | None] = field(default_factory=dict)
    """Why kinds that do not split are whole."""
    slices: dict[tuple[str, tuple[tuple[int, AttributeCut], ...]], dict[str, int]] = field(default_factory=dict)
    """By kind and how its parameters are cut, dimensions by the first layer's names of inputs and outputs."""
    known: dict[int, dict[str, LayerSplit]] = field(default_factory=dict)
    """How layers split, by number of parts."""

    def splits(self, count: int) -> dict[str, LayerSplit]:
        """Return how layers split in so many parts; those that do not are left out."""
        if count not in self.known:
            self.known[count] = {
                name: LayerSplit(count=count, cuts=cuts, sequence=self._slices_of(self.graph.layer(name), cuts))
                for name, found in self._cuts(count).items()
                if (cuts := tuple(found.values()))
            }
        return self.known[count]

    def _slices_of(self, layer: Layer, cuts: tuple[ParameterCut, ...]) -> tuple[SequenceCut, ...]:
        """Return what a layer whose parameters are cut so can take and give in slices."""
        analysis, places = self._analysis(layer), {name: at for at, name in enumerate(layer.parameters.values())}
        assert analysis is not None
        recorded = {places[cut.parameter]: AttributeCut(cut.dim, cut.parts) for cut in cuts}
        key, first = (layer.fingerprint, tuple(recorded.items())), self.firsts[layer.fingerprint]
        if key not in self.slices:
            attributes, count = list(first.parameters), len(cuts[0].parts)
            known = {attributes[place]: cut for place, cut in recorded.items()}
            self.slices[key] = sequence_dims(first, count, known, analysis)
        names = dict(zip((*first.inputs, *first.outputs), (*layer.inputs, *layer.outputs), strict=True))
        return tuple(SequenceCut(tensor=names[name], dim=dim) for name, dim in self.slices[key].items())

    def _cuts(self, count: int) -> Mapping[str, Mapping[str, ParameterCut]]:
        """Return how every layer splits in so many parts, so that layers with a parameter in common cut it alike."""
        alike: _CutsByKind = {}
        whole: set[str] = set()
        ties = self.graph.tied_parameters().items()
        while True:
            found = {layer.name: self._cuts_of(layer, count, whole, alike) for layer in self.graph.layers}
            disputed = {name for name, layers in ties if len({found[each].get(name) for each in layers}) > 1}
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

    def _analysis(self, layer: Layer) -> Analysis | None:
        if layer.fingerprint not in self.analyses:
            captured = isinstance(layer.module, fx.GraphModule)
            self.analyses[layer.fingerprint] = analyse(layer) if captured else None
            self.firsts[layer.fingerprint] = layer
        return self.analyses[layer.fingerprint]

    def _cuts_of(
        self, layer: Layer, count: int, whole: Collection[str], alike: _CutsByKind
    ) -> Mapping[str, ParameterCut]:
        analysis = self._analysis(layer)
        if analysis is None:
            return {}
        # Layers of a kind have their parameters in the same places.
        places = frozenset(place for place, name in enumerate(layer.parameters.values()) if name in whole)
        key = layer.fingerprint, places
        if key not in alike:
            attributes = list(self.firsts[layer.fingerprint].parameters)
            cuts = cuts_of(analysis, choose(analysis, count, forbidden=[attributes[place] for place in places]))
            alike[key] = [cuts.get(attribute) for attribute in attributes]
        pairs = zip(layer.parameters.values(), alike[key], strict=True)
        return {name: ParameterCut(parameter=name, dim=cut.dim, parts=cut.parts) for name, cut in pairs if cut}


def describe_ties(graph: LayerGraph) -> tuple[formats.TiedParameter, ...]:
    """Return the records of parameters that several layers use."""
    parameters = ((name, layers, graph.parameter(name)) for name, layers in graph.tied_parameters().items())
    return tuple(
        formats.TiedParameter(parameter=name, layers=layers, bytes=each.nbytes, trainable=each.requires_grad)
        for name, layers, each in parameters
    )
