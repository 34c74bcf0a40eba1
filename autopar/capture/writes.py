"""What a layer's forward changes beside its outputs, running statistics of batch normalisation apart.

Of a captured layer the graph tells; of a listed module, what operators write while it runs, and which of its buffers
are others afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from autopar.capture.effects import Storages, operands, submodules, written
from autopar.capture.unchanged import WriteLog
from autopar.formats.profile import Writes

_MEAN, _VARIANCE, _TRAINING = 3, 4, 5
"""Places of arguments of ``batch_norm``."""


def graph_writes(
    module: fx.GraphModule, parameters: Mapping[str, str], buffers: Mapping[str, str], inputs: Sequence[str]
) -> Writes | None:
    """Return what a captured layer changes; none if nothing.

    Args:
        module: the layer's.
        parameters: from attribute to name.
        buffers: from attribute to name.
        inputs: names of the tensors that it takes after the number of rows.
    """
    nodes = list(module.graph.nodes)
    storages = Storages(nodes)
    # A constant that the forward makes is detached in place, which writes no value.
    calls = [node for node in nodes if node.op == "call_function" and node.target is not torch.ops.aten.detach_.default]
    roots = {storages.root(target) for node in calls for target in written(node)}
    changed = [node for node in nodes if storages.root(node) in roots]
    named = {buffers[str(node.target)]: node for node in changed if node.op == "get_attr" and node.target in buffers}
    statistics = {name for name, node in named.items() if _is_statistic(node)}
    statistics |= {f"{name.rpartition('.')[0]}.num_batches_tracked".removeprefix(".") for name in statistics}
    places = {node: place for place, node in enumerate(node for node in nodes if node.op == "placeholder")}
    return _of(
        [name for name in named if name not in statistics],
        [parameters[str(node.target)] for node in changed if node.op == "get_attr" and node.target in parameters],
        [inputs[places[node] - 1] for node in changed if node in places],
    )


def _is_statistic(node: fx.Node) -> bool:
    """Tell whether a buffer's only readers are batch normalisations that write it."""
    return bool(node.users) and all(_normalizes(user, node) for user in node.users)


def _normalizes(user: fx.Node, buffer: fx.Node) -> bool:
    if user.target is torch.ops.aten.batch_norm.default:
        places = [place for place, argument in enumerate(user.args) if argument is buffer]
        return {_MEAN, _VARIANCE}.issuperset(places) and user.args[_TRAINING] is True
    inner = submodules(user)
    if len(inner) != 1:
        return False
    given = operands(user)
    placeholders = [node for node in inner[0].graph.nodes if node.op == "placeholder"]
    if len(given) != len(placeholders):
        return False
    return all(_is_statistic(inside) for outside, inside in zip(given, placeholders, strict=True) if outside is buffer)


@contextlib.contextmanager
def watched(module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Iterator[list[Writes]]:
    """Watch a listed module run inside the block; the list then holds what it changed, if anything.

    Names are those that the module has for its buffers and parameters, and the keys of ``inputs``.
    """
    found: list[Writes] = []
    statistics = running_statistics(module)
    buffers = {name: each for name, each in _buffers(module).items() if name not in statistics}
    memory = {name: each.untyped_storage()._cdata for name, each in buffers.items()}
    log = WriteLog([*module.parameters(), *buffers.values(), *inputs.values()])
    with log:
        yield found
    written_ids = {id(tensor) for tensor, _ in log.written}
    after = _buffers(module)

    def replaced(name: str) -> bool:
        now = after.get(name)
        return now is not buffers[name] or now.untyped_storage()._cdata != memory[name]

    changes = _of(
        [name for name, each in buffers.items() if id(each) in written_ids or replaced(name)],
        [name for name, each in module.named_parameters(remove_duplicate=False) if id(each) in written_ids],
        [name for name, each in inputs.items() if id(each) in written_ids],
    )
    if changes is not None:
        found.append(changes)


def _buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_buffers(remove_duplicate=False))


def running_statistics(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the running statistics of torch's own batch normalisations in a module, by attribute."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, each in module.named_modules(remove_duplicate=False)
        if isinstance(each, _BatchNorm) and type(each).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
        for name, buffer in each.named_buffers(recurse=False)
    }


def read_statistics(module: nn.Module, run: Callable[[], Sequence[torch.Tensor]]) -> tuple[str, ...]:
    """Return a listed module's running statistics, if anything but batch normalisation reads them.

    ``run`` runs the module on the same inputs each time; statistics that are read move what it gives.
    """
    statistics = running_statistics(module)
    floating = [each for each in statistics.values() if each.is_floating_point()]
    if not floating:
        return ()
    before = {name: each.clone() for name, each in _buffers(module).items()}
    given = []
    with torch.no_grad():
        for shift in (0.0, 1.0):
            for name, each in _buffers(module).items():
                each.copy_(before[name])
            for each in floating:
                each.add_(shift)
            with torch.random.fork_rng(devices=[]):
                given.append([output.detach().clone() for output in run()])
        for name, each in _buffers(module).items():
            each.copy_(before[name])
    alike = all(torch.equal(one, other) for one, other in zip(*given, strict=True))
    return () if alike else tuple(statistics)


def joined(every: Sequence[Writes]) -> Writes | None:
    """Return all changes of several runs."""
    return _of(
        [name for each in every for name in each.buffers],
        [name for each in every for name in each.parameters],
        [name for each in every for name in each.inputs],
    )


def _of(buffers: Sequence[str], parameters: Sequence[str], inputs: Sequence[str]) -> Writes | None:
    names = [tuple(dict.fromkeys(each)) for each in (buffers, parameters, inputs)]
    return Writes(buffers=names[0], parameters=names[1], inputs=names[2]) if any(names) else None
