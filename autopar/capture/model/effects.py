"""What a model does besides computing: writes, aliases and random numbers of an exported graph's nodes; its memory.

What torch.export would capture wrongly without a word is found by watching one ordinary forward.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any, Self, TypeVar
from unittest.mock import patch

import numpy
import torch
import torch.utils.checkpoint
from torch import fx, nn
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from autopar.capture.model.python_state import is_own_file
from autopar.errors import CaptureError, ModelError, cause_of

T = TypeVar("T")


def reachable(starts: Iterable[T], following: Callable[[T], Iterable[T]]) -> dict[T, None]:
    """Return some nodes of a graph and all that follow them, in the order of a search in depth."""
    found: dict[T, None] = {}
    ahead = list(starts)
    while ahead:
        node = ahead.pop()
        if node not in found:
            found[node] = None
            ahead += following(node)
    return found


def tensor_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the nodes among a node's arguments, sub-graphs of higher-order operators excluded."""
    return [argument for argument in node.all_input_nodes if _submodule(argument) is None]


def submodules(node: fx.Node) -> list[fx.GraphModule]:
    """Return the sub-graphs that a higher-order operator calls."""
    return [module for argument in node.all_input_nodes if (module := _submodule(argument)) is not None]


def _submodule(node: fx.Node) -> fx.GraphModule | None:
    if node.op != "get_attr":
        return None
    found: object = node.graph.owning_module
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, fx.GraphModule) else None


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a node writes in place."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return list(_written_by_submodules(node))
    written = written_values(node.target, node.args, node.kwargs)
    # batch_norm and its kin write their running statistics without saying so in the schema.
    values = values_by_name(node.target, node.args, node.kwargs)
    if any(values.get(name) is True for name in ("training", "train", "use_input_stats")):
        written += [values.get("running_mean"), values.get("running_var")]
    return _nodes(written)


def written_values(
    operator: torch._ops.OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[object]:
    """Return the arguments that an operator's schema says it writes in place."""
    return [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def values_by_name(
    operator: torch._ops.OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Return all arguments of an operator, defaults included."""
    return {
        argument.name: args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
        for position, argument in enumerate(operator._schema.arguments)
    }


def _nodes(value: object) -> list[fx.Node]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, fx.Node)]


def _written_by_submodules(node: fx.Node) -> Iterator[fx.Node]:
    for module in submodules(node):
        storages = Storages(module.graph.nodes)
        roots = {storages.root(target) for inner in module.graph.nodes for target in written_arguments(inner)}
        placeholders = [inner for inner in module.graph.nodes if inner.op == "placeholder"]
        flat = [argument for argument in operands(node) if isinstance(argument, fx.Node)]
        if len(flat) == len(placeholders):
            yield from (outer for outer, inner in zip(flat, placeholders, strict=True) if storages.root(inner) in roots)
        elif roots:
            yield from tensor_arguments(node)


def written_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes of a graph that share memory with what its operators write."""
    nodes = list(graph.nodes)
    storages = Storages(nodes)
    # A constant that the forward makes is detached in place, which writes no value.
    calls = [node for node in nodes if node.op == "call_function" and node.target is not torch.ops.aten.detach_.default]
    roots = {storages.root(target) for node in calls for target in written_arguments(node)}
    return [node for node in nodes if storages.root(node) in roots]


def operands(node: fx.Node) -> list[object]:
    """Return a higher-order operator's arguments behind its last sub-graph: what the sub-graph is called with."""
    last = max(index for index, value in enumerate(node.args) if isinstance(value, fx.Node) and _submodule(value))
    flat: list[object] = []
    for value in node.args[last + 1 :]:
        flat.extend(value if isinstance(value, (tuple, list)) else [value])
    return flat


def draws_random_numbers(node: fx.Node) -> bool:
    """Tell whether a node uses the random number generator, given its arguments (dropout of 0 does not)."""
    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload):
        return any(draws_random_numbers(inner) for module in submodules(node) for inner in module.graph.nodes)
    return draws(operator, node.args, node.kwargs)


def draws(operator: torch._ops.OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Tell whether an operator called so uses the random number generator."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    values = values_by_name(operator, args, kwargs)
    if any(values.get(name) is False for name in ("train", "training")):
        return False
    rates = {"dropout", "dropout_p", "p"} if values.keys() & {"train", "dropout_p"} else set()
    return not any(values[rate] in (0, 0.0) for rate in rates & values.keys())


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has a method run every operator while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Run an operator."""
        return operator(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        return self.run(func, args, kwargs or {})


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that is equal for tensors that share memory; of sparse ones, one of each."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


class Storages:
    """Which nodes may share memory: as operators' schemas say, and as the example's tensors do.

    The tensors are asked too because some operators return their input without declaring it (dropout of 0).
    """

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}
        holders: dict[int, fx.Node] = {}
        for node in nodes:
            for source in _aliased_arguments(node):
                self._join(node, source)
            value = node.meta.get("val")
            for tensor in value if isinstance(value, (tuple, list)) else [value]:
                if isinstance(tensor, torch.Tensor):
                    self._join(node, holders.setdefault(tensor.untyped_storage()._cdata, node))

    def root(self, node: fx.Node) -> fx.Node:
        """Return the node that stands for all that share memory with this one."""
        while node in self._parent:
            node = self._parent[node]
        return node

    def _join(self, one: fx.Node, other: fx.Node) -> None:
        first, second = self.root(one), self.root(other)
        if first is not second:
            self._parent[first] = second


def _aliased_arguments(node: fx.Node) -> list[fx.Node]:
    if node.op != "call_function":
        return []
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.all_input_nodes if getattr(node.target, "__name__", "") == "getitem" else []
    schema = node.target._schema
    if not any(result.alias_info for result in schema.returns):
        return []
    found: list[fx.Node] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and position < len(node.args):
            found.extend(_nodes(node.args[position]))
    return found


FALLBACK = "or give layers(model) in the model file: a list of modules that are called one after another"

_CHECKPOINT = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__
# Their backward is the derivative of their forward, which automatic differentiation finds as well.
_HARMLESS = {"transformers.models.bloom.modeling_bloom.GeLUFunction"}

_TIMES = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_DATES = ("datetime.now", "datetime.utcnow", "datetime.today", "date.today")
_CLOCKS = {("time", name + unit) for name in _TIMES for unit in ("", "_ns")} | {(None, name) for name in _DATES}
"""Module and name of functions that read one."""
_READ_ONCE = f"a clock is read, and every step would find the first time; read it in the dataset, {FALLBACK}"
_DRAWN_ONCE = f"Python's or NumPy's random numbers would be drawn only once; draw them with torch, {FALLBACK}"
_APPLY = inspect.unwrap(torch.autograd.Function.apply.__func__).__code__  # type: ignore[attr-defined]
_HOOK = torch.Tensor.register_hook.__code__
_DERIVATIVES = {torch.autograd.grad.__code__, torch.autograd.backward.__code__, torch.Tensor.backward.__code__}
_ASSIGN = nn.Module.__setattr__.__code__
_FIXING = {torch.SymInt.__index__.__code__, torch.SymInt.__int__.__code__, torch.SymBool.__bool__.__code__}
_LIBRARY = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OF_MODELS = (os.path.join(_LIBRARY, "nn", ""), os.path.join(_OWN, "examples", ""))


@contextlib.contextmanager
def watch(is_ignored: Callable[[nn.Module, str], bool] | None = None) -> Iterator[set[CodeType]]:
    """Watch the calls inside the block.

    ``is_ignored`` tells which numbers of modules may be replaced; None: nothing is refused.

    Yields:
        The code that is run, of modules of torch and of all that is neither torch's nor autopar's.

    Raises:
        CaptureError: an ``autograd.Function`` of the user's own was applied (its backward would be replaced),
            ``torch.utils.checkpoint`` was used (its recomputation would be lost), a hook was put on a gradient (it
            would not run), a buffer or a number of a module was replaced (the next forward would find the old one), or
            a random number was drawn otherwise than with torch, or a clock was read (every step would find the first
            one); names file and line.
    """
    found: list[str] = []

    def on_event(frame: FrameType, event: str, arg: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and (not file.startswith((_LIBRARY, _OWN)) or file.startswith(_OF_MODELS)):
            codes.add(frame.f_code)
        if is_ignored is None or found:
            return
        if event == "call" and (said := _describe_call(frame, is_ignored)):
            found.append(f"{_caller(frame)}: {said}, {FALLBACK}")
        if event == "c_call" and _qualified(arg) in _CLOCKS and is_own_file(file):
            found.append(f"{_caller(frame)}: {_READ_ONCE}")
        draws = event == "c_call" and isinstance(getattr(arg, "__self__", None), random.Random)
        if draws or (event == "return" and _is_users(file) and before != _numpy_state()):
            found.append(f"{_caller(frame)}: {_DRAWN_ONCE}")

    before, codes = _numpy_state(), set[CodeType]()
    with _profiling(on_event):
        yield codes
    if found:
        raise CaptureError(found[0])


def _qualified(function: object) -> tuple[str | None, str | None]:
    return getattr(function, "__module__", None), getattr(function, "__qualname__", None)


def _describe_call(frame: FrameType, is_ignored: Callable[[nn.Module, str], bool]) -> str:
    """Say what cannot be captured of a call, and what to do; nothing of one that can be."""
    if frame.f_code is _CHECKPOINT:
        return "torch.utils.checkpoint cannot be captured; remove the checkpointing"
    if frame.f_code is _APPLY:
        name, home = frame.f_locals["cls"].__qualname__, frame.f_locals["cls"].__module__
        if home.partition(".")[0] != "torch" and f"{home}.{name}" not in _HARMLESS:
            return f"autograd.Function {name} cannot be captured; write it with differentiable operators"
    if frame.f_code in _DERIVATIVES and _called_by_user(frame):
        return (
            "a derivative within forward or loss cannot be captured; let layers(model) list the module that takes it, "
            "whole: [model], where that is the model itself"
        )
    if frame.f_code is _HOOK and _called_by_user(frame):
        return "a hook on a gradient cannot be captured; remove it"
    return _describe_replacement(frame, is_ignored) if frame.f_code is _ASSIGN else ""


def _numpy_state() -> tuple[int, int]:
    """Return something that changes when NumPy's global generator draws, whose functions a profile does not see."""
    state = numpy.random.get_state(legacy=False)["state"]
    return int(state["pos"]), int(state["key"][0])


def _describe_replacement(frame: FrameType, is_ignored: Callable[[nn.Module, str], bool]) -> str:
    """Say what an assignment to a module's attribute replaces, if the next forward would miss it."""
    module, name, value = (frame.f_locals[key] for key in ("self", "name", "value"))
    if not _called_by_user(frame):
        return ""
    before = module._buffers.get(name, module.__dict__.get(name))
    if isinstance(before, torch.Tensor) and name in module._buffers and value is not before:
        return f"the buffer {name} is replaced, which cannot be captured; write into it (self.{name}.copy_(...))"
    numbers = isinstance(before, (int, float)) and isinstance(value, (int, float))
    if numbers and value != before and not is_ignored(module, name):
        remedy = f"make it a buffer and write into it (self.{name}.add_(1))"
        return f"the attribute {name} changes from {before} to {value}, which cannot be captured; {remedy}"
    return ""


@contextlib.contextmanager
def first_fixing() -> Iterator[list[str]]:
    """Watch a ``torch.export`` inside the block; the list gets the first ``file:line`` that fixes a size, if any."""
    found: list[str] = []

    def on_event(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and not found and frame.f_code in _FIXING:
            known = frame.f_locals["self"].node.shape_env.replacements.values()
            if any(value.is_number for value in known):
                found.append(_caller(frame))

    with _profiling(on_event):
        yield found


@contextlib.contextmanager
def _profiling(on_event: Callable[[FrameType, str, object], None]) -> Iterator[None]:
    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        yield
    finally:
        give_back_profiler(before)


def give_back_profiler(before: Any) -> None:  # noqa: ANN401
    """Have the interpreter tell again whom it told before; cProfile, which is no function, begins by itself."""
    if before is None or callable(before):
        sys.setprofile(before)
    else:
        before.enable()


@contextlib.contextmanager
def general_masks() -> Iterator[None]:
    """Keep ``nn.Transformer`` and its kin from looking into masks inside the block.

    They compare a mask's values with a causal one's only to choose a faster kernel, and apply the mask in any case;
    told ``is_causal=True``, they still believe it. Without values, while a graph is captured, the look would fail.
    """

    def detect(mask: object, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    with patch.object(transformer, "_detect_is_causal_mask", detect):
        yield


_CONVERSIONS = {
    getattr(torch.Tensor, name) for name in ("to", "type", "type_as", "float", "double", "half", "bfloat16")
}


class ConversionsApart(TorchFunctionMode):
    """Keeps what a conversion is given apart from what it gives inside the block, in which a graph is captured.

    A tensor that has the type already is given back itself, and a graph would have all that reads it read the
    conversion, perhaps one without gradients. Under autocast it has another type, and they are two tensors. Here a
    conversion reads an alias, which :func:`forget_aliases` takes out of the graph.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if func in _CONVERSIONS:
            args = (torch.ops.aten.alias.default(args[0]), *args[1:])
        return func(*args, **kwargs or {})


def forget_aliases(module: nn.Module) -> None:
    """Let the graphs of a module read what aliases are of."""
    for each in module.modules():
        if isinstance(each, fx.GraphModule):
            for node in each.graph.find_nodes(op="call_function", target=torch.ops.aten.alias.default):
                node.replace_all_uses_with(node.args[0])
                each.graph.erase_node(node)
            each.recompile()


def _is_users(filename: str) -> bool:
    return not filename.startswith((_LIBRARY, _OWN, "<")) and filename != random.__file__


def _called_by_user(frame: FrameType) -> bool:
    return frame.f_back is not None and _is_users(frame.f_back.f_code.co_filename)


def _caller(frame: FrameType | None) -> str:
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "the model"


def user_line(trace: TracebackType | None) -> tuple[str, str]:
    """Return ``file:line`` and source text of the innermost frame that is neither torch's nor autopar's."""
    frames = [frame for frame in traceback.extract_tb(trace) if _is_users(frame.filename)]
    if not frames:
        return "the model", ""
    return f"{frames[-1].filename}:{frames[-1].lineno}", frames[-1].line or ""


def users_error(what: str, error: BaseException, place: str = "", remedy: str = "") -> ModelError:
    """Return the error that something of the user's raised another; says where, and all that the other says."""
    place = place or user_line(error.__traceback__)[0]
    return ModelError(f"{place}: {what} raised {cause_of(error)}{remedy}")


class StorageTracker(OperatorMode):
    """Counts the bytes of every storage made while it is active, until it is freed.

    Fake tensors count as real ones do, if parameters and inputs are fake as well; of tensors that several ranks hold
    together, this one's part; and storages that change their size as large as they are.

    >>> with StorageTracker() as tracker:
    ...     a = torch.ones(4)
    ...     b = a.exp()
    ...     del a
    ...     c = b.exp().exp()
    >>> tracker.peak_bytes, tracker.alive_bytes
    (48, 32)
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive_bytes = self.peak_bytes = 0
        self._sizes: dict[int, int] = {}

    def __enter__(self) -> Self:
        resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result: torch.UntypedStorage = resize(storage, size)
            if storage._cdata in self._sizes:
                self._count(storage._cdata, storage.nbytes())
            return result

        # No operator changes a storage's size: torch's FSDP2 lets go of gathered parameters that way.
        torch.UntypedStorage.resize_ = resize_and_count  # type: ignore[method-assign, assignment]
        return super().__enter__()  # type: ignore[no-untyped-call, no-any-return]

    def __exit__(self, *exc_info: object) -> None:
        del torch.UntypedStorage.resize_
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        given = {storage_of(tensor) for tensor in _tensors((args, kwargs))}
        result = super().run(operator, args, kwargs)
        for tensor in _tensors(result):
            if storage_of(tensor) not in given:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._sizes:
            self._count(storage._cdata, storage.nbytes())
            weakref.finalize(storage, self._remove, storage._cdata)

    def _count(self, key: int, size: int) -> None:
        self.alive_bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)

    def _remove(self, key: int) -> None:
        self.alive_bytes -= self._sizes.pop(key)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the dense tensors of a value, those that sparse ones and subclasses are made of among them."""
    leaf: Any
    for leaf in filter(torch.is_tensor, tree_leaves(value)):
        if leaf.layout is torch.sparse_coo:
            yield from (leaf._indices(), leaf._values())
        elif leaf.layout is torch.sparse_csr:
            yield from (leaf.crow_indices(), leaf.col_indices(), leaf.values())
        elif is_traceable_wrapper_subclass(leaf):
            yield from _tensors([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        else:
            yield leaf
