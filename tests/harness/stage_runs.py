"""A captured model run stage by stage, beside the plain one."""

# ruff: noqa: ANN001, ANN201

import copy
import itertools

import torch

from autopar.capture import materialize, named_tensors
from autopar.capture.model.batch import StepModule


def plain(model, batch, loss):
    """One ordinary forward and backward of a copy; loss outputs, gradients, buffers."""
    model = copy.deepcopy(model)
    torch.manual_seed(5)
    outputs = StepModule(model, batch, loss)(*(t.clone() for t in named_tensors(batch).values()))
    outputs[0].backward()
    return outputs, {name: p.grad for name, p in model.named_parameters()}, dict(model.named_buffers())


def run(layers, values, rows=None):
    """Return what layers make of tensors, beside these; of so many rows, or of those that the first one has."""
    values, rows = dict(values), rows or len(next(iter(values.values())))
    for layer in layers:
        values.update(zip(layer.outputs, layer.module(rows, *(values[n] for n in layer.inputs)), strict=True))
    return values


def run_stages(graph, batch, cuts):
    """Run layers in stages, each on its own tape, as a pipeline does; gradients by the parameters' names."""
    known = {name: tensor.clone() for name, tensor in named_tensors(batch).items()}
    rows = len(next(iter(known.values())))
    edges = [0, *cuts, len(graph.layers)]
    stages = []
    torch.manual_seed(5)
    for low, high in itertools.pairwise(edges):
        layers = graph.layers[low:high]
        made = {name for layer in layers for name in layer.outputs}
        read = {name for layer in layers for name in layer.inputs if name not in made}
        entered = {name: known[name].detach().requires_grad_(known[name].requires_grad) for name in sorted(read)}
        values = run(layers, entered, rows)
        known.update({name: values[name] for name in made})
        stages.append((entered, {name: values[name] for name in made}))
    outputs = tuple(known[name] for name in graph.outputs)
    flowing = {graph.outputs[0]: torch.ones_like(outputs[0])}
    for entered, left in reversed(stages):
        names = [name for name in left if name in flowing]
        torch.autograd.backward([left[n] for n in names], [flowing[n] for n in names])
        for name, tensor in entered.items():
            if tensor.grad is not None:
                flowing[name] = flowing[name] + tensor.grad if name in flowing else tensor.grad
    return outputs


def assert_equal_to_plain(model, graph, batch, loss, cuts, tolerance=1e-12, of_loss=0.0):
    """Outputs and buffers are equal, gradients up to rounding: relative to the largest."""
    expected, gradients, buffers = plain(model, batch, loss)
    parameters = {n: torch.nn.Parameter(p.detach().clone(), p.requires_grad) for n, p in model.named_parameters()}
    own_buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
    for layer in graph.layers:
        materialize(layer, {**parameters, **own_buffers})
    for one, other in zip(run_stages(graph, batch, cuts), expected, strict=True):
        assert float((one - other).detach().abs().max()) <= of_loss * float(other.detach().abs().max())
    largest = max(float(g.abs().max()) for g in gradients.values() if g is not None)
    for name, gradient in gradients.items():
        found = parameters[name].grad
        assert (found is None) == (gradient is None), name
        if gradient is not None:
            assert float((found - gradient).abs().max()) <= tolerance * largest, name
    for name, buffer in buffers.items():
        assert torch.equal(own_buffers[name], buffer), name


ATTRIBUTES = ("name", "modules", "inputs", "outputs", "parameters", "buffers", "random", "fingerprint")


def assert_same_layers(one, other):
    """Graphs are the same but for the values of their parameters."""
    assert [[getattr(layer, name) for name in ATTRIBUTES] for layer in one.layers] == [
        [getattr(layer, name) for name in ATTRIBUTES] for layer in other.layers
    ]
    assert (one.tensors, one.inputs, one.outputs, one.loss) == (other.tensors, other.inputs, other.outputs, other.loss)
