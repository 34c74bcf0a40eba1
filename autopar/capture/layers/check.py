"""Check that layers do what the model does: nothing of it is lost, and gradients and buffers are the plain model's.

What no layer takes along of a model is refused: hooks on gradients, shared memory, stale tensors, Python state. State
that a forward changes is found by running it again on other batches. A captured graph is computed as the state was when
it was captured, so a change is refused, unless the user says that the state is only logged. Of listed modules the state
may change where it is one module's alone.

To compare with the plain model what one batch gives, the graph's layers run one after another in this process, with one
autograd tape per layer.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from autopar.capture.graph import Layer, LayerGraph
from autopar.capture.layers.shortening import DifferentError
from autopar.capture.model.batch import StepModule, named_tensors, row_count
from autopar.capture.model.effects import FALLBACK, OperatorMode, storage_of, users_error, written_nodes
from autopar.capture.model.python_state import Path, Roots, Snapshot, differences, snapshot
from autopar.capture.model.state import preserve_buffers, preserve_parameters
from autopar.capture.model.terms import starts_of
from autopar.errors import AutoparError, CaptureError, ModelError


def refuse_lost(model: nn.Module) -> None:
    """Check that parameters can be made anew, as every rank does from their names and values.

    Raises:
        CaptureError: a parameter has a hook on its gradient, or shares memory with another tensor, or a buffer is
            sparse; names it.
    """
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"the parameter {name} has a hook on its gradient, which ranks would train without; change gradients "
                "in the optimizer or the loss"
            )
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided:
            raise CaptureError(
                f"the buffer {name} is sparse, and ranks hold dense ones; register it dense: (...).to_dense(), and "
                "multiply by it with torch.mm or @"
            )
    named = [*model.named_parameters(), *model.named_buffers()]
    parameters = {name for name, _ in model.named_parameters()}
    for names in _sharing(named):
        if parameters.intersection(names):
            raise CaptureError(
                f"{names[0]} and {names[1]} are two tensors that share memory, which ranks would hold apart; to tie "
                "parameters, assign the parameter itself, not nn.Parameter(...) of it"
            )


def refuse_backward_hooks(model: nn.Module) -> None:
    """Check that no module has a backward hook.

    Raises:
        CaptureError: one has, which a captured graph would not run; names the module.
    """
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"the module {name or 'itself'} has a backward hook, which cannot be captured; {FALLBACK}"
            )


def refuse_stale(graph: LayerGraph, replaced_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check that no layer holds, as a constant, a tensor that the forward ``replaced_tensors`` in its module.

    Raises:
        CaptureError: one does, so that every step would read the first one; names it.
    """
    real = [each for each in replaced_tensors if not isinstance(each[1], FakeTensor) and each[1].device.type != "meta"]
    memory = {tensor.data_ptr(): path for path, tensor in real if tensor.numel()}
    for layer in graph.layers:
        for attribute, constant in layer.module.named_buffers():
            path = memory.get(constant.data_ptr()) if attribute not in layer.buffers else None
            if path is not None:
                raise CaptureError(
                    f"{path} is replaced by a forward and read by the next, which cannot be captured; register it as a "
                    f"buffer and write into it (copy_), {FALLBACK}"
                )


def refuse_shared_writes(graph: LayerGraph, model: nn.Module) -> None:
    """Check that no layer writes memory of two buffers, as each of them is made anew on every rank.

    Raises:
        CaptureError: one does; names both.
    """
    pairs = _sharing(model.named_buffers())
    changed = {name for layer in graph.layers for name in _written_buffers(layer)} if pairs else set()
    for pair in pairs:
        if changed.intersection(pair):
            raise CaptureError(
                f"the buffers {pair[0]} and {pair[1]} share memory that the forward writes, which ranks would hold "
                "apart; keep one of them"
            )


def _written_buffers(layer: Layer) -> set[str]:
    assert isinstance(layer.module, fx.GraphModule)
    attributes = (str(node.target) for node in written_nodes(layer.module.graph) if node.op == "get_attr")
    return {layer.buffers[each] for each in attributes if each in layer.buffers}


def _sharing(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, ...]]:
    """Return the names of tensors, two at a time, that have an element of memory in common."""
    holders: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors:
        if tensor.device.type != "meta" and tensor.layout is torch.strided and tensor.numel():
            holders.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    pairs = [(one, other) for group in holders.values() for i, one in enumerate(group) for other in group[:i]]
    return [(other[0], one[0]) for one, other in pairs if _overlap(one[1], other[1])]


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype:
        return True
    size = one.untyped_storage().nbytes() // one.element_size()
    taken = torch.zeros(size, dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())


_GENERATORS = {
    Path("random", "the generator of Python's "): random._inst,
    Path("numpy.random", "the generator of "): numpy.random.mtrand._rand,
}


def refuse_state(roots: Roots, calls: Sequence[Callable[[], object]], ignored_state: tuple[str, ...]) -> None:
    """Check that no call, a forward each on different batches, changes Python state that is not ignored.

    A call before these has filled what is made once.

    Raises:
        CaptureError: one does; names it.
    """
    for call in calls:
        before = snapshot(roots)
        call()
        for path, how in differences(before, snapshot(roots)).items():
            if not path.matches_any(ignored_state):
                raise CaptureError(
                    f"{path} {how} with every forward, which cannot be captured; keep it in a buffer and write into "
                    f"it, name it in ignored_state if it is only logged, {FALLBACK}"
                )


def carried_over(roots: Roots, calls: Sequence[Callable[[], object]]) -> tuple[Path, torch.Tensor] | None:
    """Return a tensor of the Python state, with its path, that a call replaces and has read the old one of."""
    for call in calls:
        before = snapshot(roots)
        with _Reads() as reads, contextlib.suppress(Exception):
            call()
        for path in _changed_paths(before, snapshot(roots), reads.storages - _of_buffers(roots)):
            if path in before.tensors:
                return path, before.tensors[path][0][0]
    return None


def stateful_modules(
    elements: Sequence[Mapping[Path, object]],
    whole: Roots,
    calls: Sequence[Callable[[], object]],
    ignored_state: tuple[str, ...],
) -> list[tuple[str, ...]]:
    """Return for every listed module which state of its own a call changes; calls are as of :func:`refuse_state`.

    ``elements`` are what each of the modules begins with: itself, and the loss if it computes it; ``whole`` is what
    else there is.

    Raises:
        CaptureError: state changes that is not one module's alone; names it.
    """
    everything = {path: value for each in (*elements, whole, _GENERATORS) for path, value in each.items()}
    changed: dict[Path, None] = {}
    found: list[dict[Path, None]] = [{} for _ in elements]
    for call in calls:
        before, parts = snapshot(everything), [snapshot(roots) for roots in elements]
        with _Reads() as reads:
            call()
        read = reads.storages - _of_buffers(everything)
        changed |= _changed_paths(before, snapshot(everything), read)
        for own, roots, part in zip(found, elements, parts, strict=True):
            own |= _changed_paths(part, snapshot(roots), read)
    _refuse_shared(changed, found, ignored_state)
    return [tuple(str(path) for path in own if not path.matches_any(ignored_state)) for own in found]


def refuse_lasting(before: Snapshot, after: Snapshot, changed_paths: Sequence[Collection[str]]) -> None:
    """Check that state which listed modules change was put back, so that training starts where plain training does.

    Raises:
        CaptureError: some was not, as of iterators; names it.
    """
    for path in differences(before, after):
        if any(str(path) in own for own in changed_paths):
            raise CaptureError(
                f"layers(): {path} changes with every forward and cannot be put back after the capture; keep numbers, "
                "or a generator of torch, in the module instead of an iterator"
            )


def _refuse_shared(
    changed_paths: Collection[Path], paths_by_module: Sequence[Collection[Path]], ignored_state: tuple[str, ...]
) -> None:
    for path in dict.fromkeys([*changed_paths, *(path for own in paths_by_module for path in own)]):
        holders = sum(path in own for own in paths_by_module)
        # What a module reaches under another path than the whole does, another one reaches as well.
        if (holders != 1 or path not in changed_paths) and not path.matches_any(ignored_state):
            raise CaptureError(
                f"layers(): {path} changes with every forward and belongs to no single module of the list, which ranks "
                "would hold apart; keep it in the module that needs it, or name it in ignored_state if it is only "
                "logged"
            )


def _changed_paths(before: Snapshot, after: Snapshot, read: Collection[int]) -> dict[Path, None]:
    """Return the paths that differ; of tensors those of which the call has read the old one."""
    found = dict.fromkeys(differences(before, after))
    for path, tensors in before.tensors.items():
        pairs = zip(tensors, after.tensors.get(path, []), strict=False)
        gone = len(tensors) != len(after.tensors.get(path, []))
        changed = gone or any(one[0] is not other[0] or one[1] != other[1] for one, other in pairs)
        if changed and any(storage_of(tensor) in read for tensor, _ in tensors):
            found[path] = None
    return found


def _of_buffers(roots: Roots) -> set[int]:
    """Return the memory of buffers, which layers hold as such, under whichever other names they are reached."""
    modules = [value for value in roots.values() if isinstance(value, nn.Module)]
    return {storage_of(buffer) for module in modules for buffer in module.buffers()}


class _Reads(OperatorMode):  # type: ignore[no-untyped-call]
    """Notes which memory operators read."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        leaves = tree_leaves((args, kwargs))
        self.storages.update(storage_of(value) for value in leaves if isinstance(value, torch.Tensor))
        return super().run(operator, args, kwargs)


def other_batches(batch: object, others: Sequence[object]) -> list[dict[str, torch.Tensor]]:
    """Return two batches of the shapes of the first: of the others, or its own rows in another order."""
    tensors = named_tensors(batch)
    found = []
    for shift in (1, 2):
        given = named_tensors(others[shift - 1]) if len(others) >= shift else {}
        alike = {name: tensor.shape for name, tensor in given.items()} == {n: t.shape for n, t in tensors.items()}
        found.append(given if alike else {name: tensor.roll(shift, 0) for name, tensor in tensors.items()})
    return found


# Relative tolerance of a gradient's norm. A wrong gradient is off by tenths, a reordered sum by far less than this.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


def check_gradients(model: nn.Module, graph: LayerGraph, batch: object, loss: Callable[..., Any] | None) -> None:
    """Compare one batch's gradients of the layers, run one after another, with those of the plain model.

    And what both leave in the buffers: a write that the graph does not show is found so. Where the graph can be run on
    short samples, whole ones are run only if those do not agree.

    Raises:
        CaptureError: a parameter's gradient, or a buffer, differs by more than rounding; names it.
        ModelError: the plain model's is sparse, or not finite; names it. Or its backward raised.
    """
    if graph.short is not None:
        with contextlib.suppress(AutoparError, DifferentError):
            return _check_gradients(model, graph.short.graph, graph.short.batch(batch), loss)
    return _check_gradients(model, graph, batch, loss)


def _check_gradients(model: nn.Module, graph: LayerGraph, batch: object, loss: Callable[..., Any] | None) -> None:
    tensors = named_tensors(batch)
    expected, left = _plain(model, batch, loss, tensors)
    norms: dict[str, float] = {}
    for name, gradient in expected.items():
        if gradient.layout is not torch.strided:
            raise ModelError(f"the gradient of {name} is sparse, which ranks cannot add up; build it with sparse=False")
        norms[name] = float(gradient.norm())
        if not math.isfinite(norms[name]):
            raise ModelError(
                f"the plain model's gradient of {name} is not finite in the first samples; correct the loss"
            )
    found, buffers = _run_layers(model, graph, tensors)
    _check_buffers(left, buffers)
    largest = max(norms.values(), default=0.0)
    for name in sorted(expected.keys() | found.keys()):
        _check_gradient(name, expected.get(name), found.get(name), norms.get(name), largest)


def _check_gradient(
    name: str, plain: torch.Tensor | None, other: torch.Tensor | None, norm: float | None, largest: float
) -> None:
    """Compare the gradients of a parameter, of which one at most is none.

    ``norm`` is that of the plain model's, ``largest`` that of all its parameters'.
    """
    known = [gradient for gradient in (plain, other) if gradient is not None]
    difference = float((known[0] - known[1] if len(known) == 2 else known[0]).norm())
    # A gradient that is zero but for rounding is compared with the largest one instead of with itself.
    scale = max(difference if norm is None else norm, 1e-3 * largest)
    if not difference <= _TOLERANCE.get(known[0].dtype, 1e-4) * scale:
        raise CaptureError(
            f"the captured graph gives another gradient of {name} than the model (relative difference "
            f"{difference / scale if scale else difference:.1e}); give layers(model) in the model file"
        )


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def _check_buffers(plain_buffers: Mapping[str, torch.Tensor], layer_buffers: Mapping[str, torch.Tensor]) -> None:
    for name, expected in plain_buffers.items():
        other = layer_buffers[name]
        tolerance = _TOLERANCE.get(expected.dtype, 1e-4) if expected.is_floating_point() else 0.0
        if expected.shape != other.shape or not torch.allclose(expected, other, tolerance, tolerance, equal_nan=True):
            raise CaptureError(
                f"the captured graph leaves another buffer {name} than the model's forward; write into it in place "
                f"(self.{name.rpartition('.')[2]}.copy_(...)), {FALLBACK}"
            )


def _plain(
    model: nn.Module, batch: object, loss: Callable[..., Any] | None, tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the gradients, and the buffers afterwards."""
    with preserve_buffers(model), preserve_parameters(model):
        torch.manual_seed(0)
        step = StepModule(model, batch, loss)
        values = step(*(tensor.clone() for tensor in tensors.values()))
        outputs = dict(zip(step.outputs.value, values, strict=True))
        total = sum(outputs[name] for name in starts_of(step.outputs.value))
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        try:
            gradients = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # The user's own, or torch's: reentrant checkpoints have no part in gradients that are asked for.
            raise users_error("the plain backward", error) from error
        buffers = _buffers(model)
    return {name: each for name, each in zip(trained, gradients, strict=True) if each is not None}, buffers


def _backpropagate(graph: LayerGraph, batch: Mapping[str, torch.Tensor]) -> None:
    """Run every layer on the named tensors of a batch, and backward, last layer first, from the first loss output.

    Inputs are leaves of a layer's own tape; they require a gradient where the producer's output does.
    """
    rows, known = row_count(batch), dict(batch)
    runs = []
    for layer in graph.layers:
        inputs = {name: known[name].detach().requires_grad_(known[name].requires_grad) for name in layer.inputs}
        outputs = dict(zip(layer.outputs, layer.module(rows, *inputs.values()), strict=True))
        known.update(outputs)
        runs.append((inputs, outputs))
    gradients = {name: torch.ones_like(known[name]) for name in starts_of(graph.outputs)}
    for inputs, outputs in reversed(runs):
        reached = [name for name, tensor in outputs.items() if name in gradients and tensor.requires_grad]
        if reached:
            torch.autograd.backward([outputs[name] for name in reached], [gradients.pop(name) for name in reached])
        for name, tensor in inputs.items():
            if tensor.grad is not None:
                gradients[name] = gradients[name] + tensor.grad if name in gradients else tensor.grad


def _run_layers(
    model: nn.Module, graph: LayerGraph, tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the gradients, and the buffers afterwards."""
    parameters = dict(model.named_parameters())
    kept = {name: parameter.grad for name, parameter in parameters.items()}
    with preserve_buffers(model), preserve_parameters(model):
        torch.manual_seed(0)
        for parameter in parameters.values():
            parameter.grad = None
        try:
            _backpropagate(graph, {name: tensor.clone() for name, tensor in tensors.items()})
            return {name: p.grad for name, p in parameters.items() if p.grad is not None}, _buffers(model)
        finally:
            for name, parameter in parameters.items():
                parameter.grad = kept[name]
