"""Capture: a model, a loss and an example batch become a LayerGraph.

In training mode one ordinary forward is tried out, the model with its loss is exported from two samples
(``torch.export``, not strict, number of samples free), and the exported graph is cut into layers. Where that fails, the
modules that the model or its user lists are taken instead. The parameters of a model that is captured for its graph and
shapes alone need no values.

All modules of a model file are put into training mode, as ``train()`` does; profile, plan and report name those that
were in evaluation mode. To keep one there, give it a ``train()`` of its own. A script's model is trained as it is: what
the script has put into evaluation mode stays there, unless it is the whole model. ``autopar profile`` compares the
gradients of one batch with the plain model's, and refuses a graph that differs.

Refused with file and line are: a branch that depends on values, an ``autograd.Function`` of your own,
``torch.utils.checkpoint``, a hook on a gradient, a random number of Python's or NumPy's global generators, a buffer or
number of a module that a forward replaces, and batch normalisation with ``momentum=None``. Refused by name are: Python
state that changes from forward to forward, a tensor that is no buffer and that a forward replaces and reads, a hook on
a parameter's gradient or a module's backward, a parameter that shares memory with another tensor of the model. For
these, list the layers.

Where a graph is compiled, its parameters, buffers and constants are arguments of the code, so that layers of a kind
share it; listed layers are compiled one by one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import logging
import operator
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType, MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from autopar.capture.graph import Layer, LayerGraph
from autopar.capture.layers.build import SegmentedProgram, build_layers, counting_module, right_for_one, tensor_specs
from autopar.capture.layers.check import (
    carried_over,
    other_batches,
    refuse_backward_hooks,
    refuse_lost,
    refuse_shared_writes,
    refuse_stale,
    refuse_state,
)
from autopar.capture.layers.fallback import NOTHING_TO_TRAIN, declared_layers, listed_layers
from autopar.capture.layers.segment import GraphInputs, segment
from autopar.capture.layers.shortening import (
    WORTH,
    Shortening,
    emptied_caches,
    for_lengths,
    free_dims,
    is_long,
    shortening_of,
)
from autopar.capture.layers.split_backward import gradient_flow
from autopar.capture.model.batch import StepModule, loss_of, named_tensors, row_count
from autopar.capture.model.changes import names_read
from autopar.capture.model.effects import (
    FALLBACK,
    ConversionsApart,
    first_fixing,
    forget_aliases,
    general_masks,
    submodules,
    user_line,
    users_error,
    watch,
)
from autopar.capture.model.masks import as_in_training
from autopar.capture.model.meta import fake_parameters, is_on_meta, refuse_lost_buffers, without_fakes
from autopar.capture.model.python_state import (
    FROM,
    Path,
    Snapshot,
    differences,
    preserve_state,
    snapshot,
)
from autopar.capture.model.source import UserModel
from autopar.capture.model.state import preserve_buffers, preserve_parameters
from autopar.errors import AutoparError, CaptureError, ModelError, first_line, text_of
from autopar.formats.profile import Joins
from autopar.signals import unwinding_aborts

_MOST_NAMED = 5


def _note(paths: list[str]) -> str:
    known = set(paths)
    highest = [path for path in paths if not path or path.rpartition(".")[0] not in known]
    if "" in known:
        named = "the model was"
    else:
        more = [f"{len(highest) - _MOST_NAMED} more"] if len(highest) > _MOST_NAMED else []
        named = f"{', '.join(highest[:_MOST_NAMED] + more)} {'were' if len(highest) > 1 else 'was'}"
    return f"{named} in evaluation mode (eval()); training puts all modules into training mode, as train() does"


_LIMITS = re.compile(r"^ *batch = Dim\('batch'(?:, min=(?P<least>\d+))?(?:, max=(?P<most>\d+))?\)$", re.MULTILINE)
"""The numbers of rows with which torch proposes to export again."""


def capture(model: UserModel, module: nn.Module, captured: Callable[..., LayerGraph] | None = None) -> LayerGraph:
    """Capture what a model file defines; ``module`` is what its ``model()`` built, the example two of its samples.

    ``captured`` stands for :func:`capture_module`, where what it gives may be known.

    Raises:
        ModelError: as :func:`capture_module`; or the dataset holds a single sample.
        CaptureError: as :func:`capture_module`.
    """
    dataset = model.dataset()
    samples = model.sample_count(dataset)
    if samples < 2:
        raise ModelError(f"{model.path}: capturing needs a dataset of at least 2 samples, found {samples}")
    # Others than the first two, where there are.
    batch, *others = (model.load_batch(dataset, [first % samples, (first + 1) % samples]) for first in (0, 2, 4))
    before = [(path, part) for path, part in module.named_modules() if not part.training]
    keep = model.keeps_modes and module.training
    captured = captured or capture_module
    rest = model.loss, model.layers, others, model.ignored_state, model.joins
    graph = captured(module, batch, *rest, keep_modes=keep)
    # Some keep their mode, by a train() of their own.
    put_back = [path for path, part in before if part.training]
    return replace(graph, notes=(_note(put_back), *graph.notes)) if put_back else graph


@unwinding_aborts()
def capture_module(
    model: nn.Module,
    batch: object,
    loss: Callable[..., Any] | None = None,
    layers: Callable[..., Any] | None = None,
    others: Sequence[object] = (),
    ignored_state: tuple[str, ...] = (),
    joins: Joins = "reader",
    *,
    keep_modes: bool = False,
) -> LayerGraph:
    """Capture a model with its loss as a chain of layers, in training mode (or as it is), on the CPU.

    ``batch`` is an example of two rows or more; the number of rows stays free. Parameters inside the graph are the
    model's own objects; buffers, Python state and the random state are left as they were. With ``layers``, its list of
    modules is taken as it is, one layer each. ``others`` are two more batches, of other samples, and ``ignored_state``
    names the Python state that forwards may change, since it is only logged. ``joins`` says which layers these belong
    to, where plans and profiles of an earlier autopar have them elsewhere.

    A model whose parameters have no values (``UserModel.build(on_meta=True)``) gives a graph without values. Its
    modules are listed by running them on shapes, or, where values decide what one runs, with random weights for it.

    Raises:
        ModelError: the model raises, or batch, output and loss do not fit together.
        CaptureError: the model cannot be captured; names the construct, file and line.
    """
    # Export imports it; within a forward that is watched, importing it would take ten times as long.
    importlib.import_module("torch._dynamo")
    if not keep_modes:
        model.train()
    refuse_lost(model)
    if is_on_meta(model):
        refuse_lost_buffers(model)
    tensors = named_tensors(batch)
    if row_count(tensors) < 2:
        raise ModelError("capturing needs an example batch of at least 2 samples, found 1")
    step = StepModule(model, batch, loss)
    trial = _Trial(step, tensors, other_batches(batch, others), ignored_state, joins)
    with preserve_buffers(model), preserve_state(step.roots.value, ignored_state):
        if layers is not None:
            mistakes = convert_user_errors("running the modules of layers(model)")
            with preserve_parameters(model), mistakes, watch() as codes:
                graph = listed_layers(model, batch, loss, layers, trial.others, ignored_state)
            counting_module(graph.layers[-1], graph.inputs)
            return _with_codes(graph, codes)
        if found := _captured_on_short(trial):
            return _with_codes(found, trial.codes)
        try:
            program = _export_step(trial)
        except CaptureError as error:
            # A forward that does not go by the plan is refused for what cannot be captured.
            with contextlib.suppress(Exception), watch() as codes:
                if declared := declared_layers(model, batch, loss, trial.others, ignored_state):
                    counting_module(declared.layers[-1], declared.inputs)
                    return _with_codes(declared, codes)
            if not is_on_meta(model):
                _refuse_carried_over(trial, error)
            raise
    return _with_codes(_checked_graph(program, trial, tensors), trial.codes)


def _with_codes(graph: LayerGraph, codes: Collection[CodeType]) -> LayerGraph:
    """Note what forward and loss ran."""
    return replace(graph, names_read=names_read(codes), files_run=frozenset(code.co_filename for code in codes))


def _captured_on_short(trial: _Trial) -> LayerGraph | None:
    """Return the graph of a model that is tried out on short samples; none if whole ones have to tell, or are short."""
    step, state = trial.step, trial.step.roots.value
    try:
        free = free_dims(trial.tensors)
        if is_on_meta(step.model) or not any(free.values()) or not is_long(step.model, trial.tensors, WORTH):
            return None
        with emptied_caches():
            with preserve_state(state, ()):
                program = _exported_between(step, for_lengths(trial.tensors), 1, None, free)
            shortening = shortening_of(program, trial.tensors)
            if shortening is None:
                return None
            tensors, others = shortening.tensors(trial.tensors), [shortening.tensors(each) for each in trial.others]
            with preserve_state(state, ()) as before:
                program = _export_step(replace(trial, tensors=tensors, others=others), trial.tensors)
                if not _sets_what_others_set(trial, shortening, before):
                    return None
            return _checked_graph(program, trial, tensors, shortening)
    except Exception:
        # Whole samples tell what is wrong, if anything is.
        return None


def _sets_what_others_set(trial: _Trial, shortening: Shortening, before: Snapshot) -> bool:
    """Tell whether what short samples have set, numbers and texts, is what others set: whole ones find the same."""
    step, state = trial.step, trial.step.roots.value
    changed = differences(before, snapshot(state))
    if not all(how.startswith(FROM) for how in changed.values()):
        return False
    if changed:
        longer = replace(shortening, short={symbol: 2 * length for symbol, length in shortening.short.items()})
        with preserve_state(state, ()), preserve_buffers(step), preserve_parameters(step):
            before.restore()
            step(*longer.tensors(trial.tensors).values())
            return differences(before, snapshot(state)) == changed
    return True


@dataclass(frozen=True)
class _Trial:
    """A model with its loss, and the batches that it is tried out on."""

    step: StepModule
    tensors: Mapping[str, torch.Tensor]
    others: Sequence[Mapping[str, torch.Tensor]]
    """More batches."""
    ignored_state: tuple[str, ...]
    joins: Joins
    codes: set[CodeType] = field(default_factory=set)
    """What has been run."""

    @property
    def calls(self) -> list[Callable[[], object]]:
        """Forwards of the other batches."""
        return [functools.partial(self._call, tensors) for tensors in self.others]

    def _call(self, tensors: Mapping[str, torch.Tensor]) -> object:
        return self.step(*(tensor.clone() for tensor in tensors.values()))


def _export_step(trial: _Trial, example: Mapping[str, torch.Tensor] | None = None) -> ExportedProgram:
    """Export a model with its loss once an ordinary forward has shown nothing that export would lose.

    ``example`` is what it is exported from; none: what it is tried out on.
    """
    step, model = trial.step, trial.step.model
    on_meta = is_on_meta(model)
    with fake_parameters(model) if on_meta else contextlib.nullcontext() as mode:
        refuse_backward_hooks(model)
        try:
            _try_out(trial, mode)
        except CaptureError as refusal:
            # Once more: a first forward may have set what later ones leave alone.
            try:
                _try_out(trial, mode)
            except CaptureError:
                raise refusal from None
        if not on_meta:
            with preserve_buffers(step), preserve_parameters(step), convert_user_errors("the model's forward"):
                refuse_state(step.roots.value, trial.calls, trial.ignored_state)
        # What is only logged would keep tensors of the graph, which have no values.
        with preserve_state(step.roots.value, ()):
            program = export_rows(step, trial.tensors if example is None else example)
    if on_meta:
        # Export has kept the fake tensors that stood for the parameters.
        program.state_dict.update(step.named_parameters(remove_duplicate=False))
    return program


def _checked_graph(
    program: ExportedProgram,
    trial: _Trial,
    tensors: Mapping[str, torch.Tensor],
    shortening: Shortening | None = None,
) -> LayerGraph:
    """Cut an exported model into layers, and find how many samples they take at least."""
    step = trial.step
    graph = _cut(program, step, tensors, trial.joins)
    refuse_stale(graph, step.replaced_tensors.value)
    refuse_shared_writes(graph, step.model)
    run = graph
    if shortening is not None:
        short, values = (
            shortening.shorten(graph.segmented_program),
            sorted_inputs(program, step.model, list(tensors))[1],
        )
        gradients = {tensor.name: tensor.gradient for tensor in graph.tensors}
        run = with_gradients(assemble(short, graph.inputs, values), gradients)
        graph = replace(graph, short=replace(shortening, graph=run))
    if graph.on_meta or graph.layers[0].least_rows > 1:
        return graph
    with preserve_state(step.roots.value, ()):
        return graph if right_for_one(step, run.layers, tensors) else _with_least(graph, 2)


def _try_out(trial: _Trial, mode: FakeTensorMode | None) -> None:
    """Run one ordinary forward (on fake tensors in a fake mode), to meet mistakes and what cannot be captured."""
    step, kind = trial.step, type(trial.step.model).__name__
    paths = {module: Path(f"{kind}.{name}".rstrip(".")) for name, module in step.model.named_modules()}

    def is_ignored(module: nn.Module, name: str) -> bool:
        return module in paths and paths[module].attribute(name).matches_any(trial.ignored_state)

    def example(tensor: torch.Tensor) -> torch.Tensor:
        return mode.from_tensor(tensor, static_shapes=True) if mode else tensor.clone()

    with (
        preserve_buffers(step),
        without_fakes(step) if mode else preserve_parameters(step),
        general_masks() if mode else contextlib.nullcontext(),
        convert_user_errors("the model's forward"),
        watch(is_ignored) as codes,
        mode or contextlib.nullcontext(),
    ):
        outputs = step(*map(example, trial.tensors.values()))
    trial.codes.update(codes)
    if not outputs[0].requires_grad:
        raise ModelError(NOTHING_TO_TRAIN)


def _refuse_carried_over(trial: _Trial, refusal: CaptureError) -> None:
    """Name a tensor with the samples of a batch that the next forward reads, where a model is refused: that is why."""
    with preserve_buffers(trial.step), preserve_parameters(trial.step):
        found = carried_over(trial.step.roots.value, trial.calls)
    if found is not None and row_count(trial.others[0]) in found[1].shape:
        raise CaptureError(
            f"{found[0]} carries what a forward made of one batch to the next, which other samples and micro-batches "
            "follow; begin every forward without it (set it to None first)"
        ) from refusal


@contextlib.contextmanager
def convert_user_errors(what: str) -> Iterator[None]:
    """Run the user's code as it is, so that the user's mistakes are told from those of capturing."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except AutoparError:
        raise
    except (Exception, SystemExit) as error:
        if _reads_values(error):
            raise CaptureError(_explain(error)) from error
        if any(frame.f_code is loss_of.__code__ for frame, _ in traceback.walk_tb(error.__traceback__)):
            what = "loss()"
        raise users_error(what, error) from error


def export_rows(step: nn.Module, tensors: Mapping[str, torch.Tensor]) -> ExportedProgram:
    """Export a module that takes the tensors of a batch; the number of rows stays free.

    Raises:
        CaptureError: it cannot be exported; names the construct, file and line.
    """
    try:
        return _export(step, tensors)
    except Exception as error:
        place = ""
        if _fixes_rows(error):
            with first_fixing() as found, contextlib.suppress(Exception):
                _export(step, tensors)
            place = f"{found[0]}: " if found else ""
        raise CaptureError(place + _explain(error)) from error


def _export(step: nn.Module, tensors: Mapping[str, torch.Tensor]) -> ExportedProgram:
    """Export for any number of rows, or for those between the limits that torch names (``if x.shape[0] < 64:``)."""
    try:
        return _exported_between(step, tensors, 1, None)
    except Exception as error:
        found = _LIMITS.search(str(error))
        if found is None:
            raise
        least, most = (None if found[name] is None else int(found[name]) for name in ("least", "most"))
        return _exported_between(step, tensors, least or 1, most)


def _exported_between(
    step: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    least: int,
    most: int | None,
    free: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> ExportedProgram:
    """Export for a range of rows, and any size of the dimensions ``free``, by tensor, that the model allows."""
    rows, auto = Dim("batch", min=least, max=most), Dim.AUTO
    shapes = (tuple({0: rows, **dict.fromkeys(free.get(name, ()), auto)} for name in tensors),)
    with _quiet(), general_masks(), as_in_training(), ConversionsApart():
        program = torch.export.export(
            step, tuple(tensor.clone() for tensor in tensors.values()), dynamic_shapes=shapes, strict=False
        )
    forget_aliases(program.graph_module)
    _forget_types(program)
    _give_outputs(program)
    return program


def _forget_types(program: ExportedProgram) -> None:
    """Take away what blocks assert of their tensors' types, which are others under autocast."""
    for module in program.graph_module.modules():
        if module is not program.graph_module and isinstance(module, fx.GraphModule):
            for node in module.graph.find_nodes(
                op="call_function", target=torch.ops.aten._assert_tensor_metadata.default
            ):
                module.graph.erase_node(node)
            module.recompile()


def _give_outputs(program: ExportedProgram) -> None:
    """Let blocks that return nothing, which ``torch.export.load`` refuses, return what they wrote last."""
    for node in list(program.graph.nodes):
        blocks = submodules(node) if node.op == "call_function" else []
        calls = [inner for inner in blocks[0].graph.nodes if inner.op == "call_function"] if len(blocks) == 1 else []
        if not calls or node.meta.get("val"):
            continue
        last, value = calls[-1], calls[-1].meta["val"]
        blocks[0].graph.output_node().args = ((last,),)
        blocks[0].recompile()
        node.meta["val"] = (value,)
        with program.graph.inserting_after(node):
            program.graph.call_function(operator.getitem, (node, 0)).meta["val"] = value
        program.graph_module.recompile()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep export from printing the graph where it fails, and from warning of attributes that LSTM and its kin set."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        # What the model prints was seen when it was tried out.
        sink = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _fixes_rows(error: BaseException) -> bool:
    return "Constraints violated" in text_of(error) or "ConstraintViolation" in type(error).__name__


def _reads_values(error: BaseException) -> bool:
    """Whether values were asked of a tensor that has none, as while capturing."""
    return "DataDependent" in type(error).__name__ or "data-dependent" in text_of(error)


def _explain(error: BaseException) -> str:
    line, source = user_line(error.__traceback__)
    place = f"{line}: cannot capture `{source}`" if source else f"{line}: cannot be captured"
    kind = type(error).__name__
    if _reads_values(error):
        remedy = "set layerdrop to 0" if "layerdrop" in source else "use torch.where"
        return f"{place}: a tensor's values decide what runs; {remedy}, {FALLBACK}"
    if "DynamicOutputShape" in kind:
        operator = str(error).removeprefix("aten.").partition(".")[0].strip("_")
        remedy = FALLBACK.removeprefix("or ") if operator == "ctc_loss" else f"use torch.where, {FALLBACK}"
        return f"{place}: {operator} makes a tensor whose size depends on values; {remedy}"
    if _fixes_rows(error):
        remedy = "let it depend on the batch (x.shape[0], not len(x) or int())"
        return f"the model fixes the number of samples, which must stay free; {remedy}, {FALLBACK}"
    return f"{place}: {kind}: {first_line(error)}; rewrite it, {FALLBACK}"


def _cut(program: ExportedProgram, step: StepModule, tensors: Mapping[str, torch.Tensor], joins: Joins) -> LayerGraph:
    model = step.model
    inputs, values = sorted_inputs(program, model, list(tensors))
    segments = segment(program.graph, inputs, model, joins)
    if not segments or not segments[-1].owned_nodes:
        raise CaptureError("the loss depends on no parameter and input together; there is nothing to cut into layers")
    graph = assemble(SegmentedProgram(program, inputs, segments, step.outputs.value), list(tensors), values)
    counting_module(graph.layers[-1], graph.inputs)
    return with_gradients(graph, gradient_flow(graph))


_TABLES = {InputKind.PARAMETER: "parameters", InputKind.BUFFER: "buffers"}


def sorted_inputs(
    program: ExportedProgram, model: nn.Module, tensors: Sequence[str]
) -> tuple[GraphInputs, dict[str, torch.Tensor]]:
    """Return what the placeholders of an exported model are, and its parameters and buffers by name.

    Raises:
        CaptureError: the number of rows is fixed, or the model draws from a generator of its own.
    """
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = {id(value): name for name, value in values.items()}
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    canonical = {f"model.{name}": names[id(value)] for name, value in every}
    tables: dict[str, dict[str, str]] = {"parameters": {}, "buffers": {}, "constants": {}, "tensors": {}}
    remaining = iter(tensors)
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            tables["tensors"][spec.arg.name] = next(remaining)
        elif spec.kind in _TABLES:
            tables[_TABLES[spec.kind]][spec.arg.name] = canonical[str(spec.target)]
        else:
            tables["constants"][spec.arg.name] = str(spec.target)
            if isinstance(program.constants.get(str(spec.target)), torch.Generator):
                raise CaptureError(
                    "the model draws from a torch.Generator of its own, whose state no layer takes along; draw from "
                    f"the default one (docs/howto/verify.md), {FALLBACK}"
                )
    node = next(node for node in program.graph.nodes if node.name in tables["tensors"])
    rows = node.meta["val"].shape[0]
    if not isinstance(rows, torch.SymInt):
        raise CaptureError(f"the model works for {rows} samples only; let its sizes depend on the batch, {FALLBACK}")
    symbol = str(rows.node.expr)
    limits = next(limits for name, limits in program.range_constraints.items() if str(name) == symbol)
    most = int(limits.upper) if limits.upper.is_Integer else None
    return GraphInputs(**tables, symbol=symbol, least=max(1, int(limits.lower)), most=most), values


def with_gradients(graph: LayerGraph, gradients: Mapping[str, bool]) -> LayerGraph:
    """Note over which tensors a gradient flows back; layers that differ in this are no longer alike."""

    def with_fingerprint(layer: Layer) -> Layer:
        text = f"{layer.fingerprint} {[gradients.get(name, False) for name in layer.inputs]}"
        return replace(layer, fingerprint=hashlib.sha256(text.encode()).hexdigest()[:16])

    return replace(
        graph,
        layers=tuple(map(with_fingerprint, graph.layers)),
        tensors=tuple(replace(tensor, gradient=gradients.get(tensor.name, False)) for tensor in graph.tensors),
    )


def _with_least(graph: LayerGraph, rows: int) -> LayerGraph:
    """Return a captured graph whose layers are given so many samples at least."""
    exported: SegmentedProgram = graph.segmented_program
    layers = tuple(replace(layer, least_rows=max(rows, layer.least_rows)) for layer in graph.layers)
    return replace(
        graph, layers=layers, segmented_program=replace(exported, inputs=replace(exported.inputs, least=rows))
    )


def assemble(
    segmented_program: SegmentedProgram, tensors: Sequence[str], values: Mapping[str, torch.Tensor]
) -> LayerGraph:
    """Build the layer graph of a program of which ``values`` are the parameters and buffers."""
    layers = build_layers(segmented_program, values)
    return LayerGraph(
        layers=tuple(layers),
        tensors=tuple(tensor_specs(segmented_program, layers)),
        inputs=tuple(tensors),
        outputs=segmented_program.loss,
        on_meta=any(value.device.type == "meta" for value in values.values() if isinstance(value, nn.Parameter)),
        segmented_program=segmented_program,
    )
