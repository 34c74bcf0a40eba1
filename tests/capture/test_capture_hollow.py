"""Models larger than memory are built and captured with shapes for parameters, and give the same graph."""
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import resource

import pytest
import torch
from capture_zoo import MODELS, build
from test_capture_gradients import assert_equal_to_plain
from torch import nn

from autopar.capture import capture, capture_module, load, materialize_random, release
from autopar.capture.hollow import hollow_parameters, is_hollow
from autopar.capture.store import load_graph, save_graph
from autopar.errors import CaptureError

ATTRIBUTES = ("name", "modules", "inputs", "outputs", "parameters", "buffers", "random", "fingerprint")
# Their constructors or forwards need values of parameters.
NEED_VALUES = {"parametrized"}


@pytest.mark.parametrize("name", sorted(MODELS.keys() - NEED_VALUES))
def test_a_hollow_model_gives_the_graph_of_the_real_one(name, tmp_path):
    model, batch, loss = build(name)
    with hollow_parameters():
        shapes = build(name)[0]
    assert is_hollow(shapes)
    real, hollow = capture_module(model, batch, loss), capture_module(shapes, batch, loss)
    assert (real.hollow, hollow.hollow) == (False, True)
    for one, other in zip(real.layers, hollow.layers, strict=True):
        assert [getattr(one, a) for a in ATTRIBUTES] == [getattr(other, a) for a in ATTRIBUTES]
    assert (real.tensors, real.inputs, real.outputs) == (hollow.tensors, hollow.inputs, hollow.outputs)
    assert all(parameter.device.type == "meta" for parameter in shapes.parameters())
    own = {id(parameter) for parameter in shapes.parameters()}
    assert all(id(parameter) in own for layer in hollow.layers for parameter in layer.module.parameters())
    save_graph(hollow, tmp_path)
    assert [layer.fingerprint for layer in load_graph(tmp_path).layers] == [part.fingerprint for part in hollow.layers]
    assert_equal_to_plain(model, hollow, batch, loss, range(1, len(hollow.layers)))


FILE = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        rates = torch.linspace(0, 1, 3).tolist()
        shared = nn.Parameter(torch.randn(8, 8))
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.first.weight = self.second.weight = shared
        self.register_buffer("table", torch.arange(8.0).cos() * rates[1])
        {line}
    def forward(self, x):
        return self.last(self.second(self.first(x * self.table + torch.tensor([1.0, 2.0] * 4))))
def model(): return Net()
def dataset(): return torch.utils.data.TensorDataset(torch.ones(6, 8), torch.ones(6, 4))
def loss(output, batch): return (output - batch[1]).square().mean()
"""


def write(folder, line="pass"):
    (folder / "model.py").write_text(FILE.replace("{line}", line))
    return load(str(folder / "model.py"))


def test_constants_and_buffers_of_a_hollow_model_keep_their_values(tmp_path):
    user = write(tmp_path)
    real, hollow = user.build(2), user.build(2, hollow=True)
    assert torch.equal(real.table, hollow.table)
    assert hollow.first.weight is hollow.second.weight
    graph = capture(user, hollow)
    assert graph.tied() == {"first.weight": ("first", "second")}
    assert_equal_to_plain(real, graph, user.load_batch(user.dataset(), range(3)), user.loss, (1, 2))


@pytest.mark.parametrize(
    "line",
    ["self.scale = shared.max().item()", "self.scales = self.first.weight[0].tolist()", "assert shared.sum() < 1e9"],
)
def test_a_constructor_that_reads_parameters_is_refused_with_its_line(line, tmp_path):
    user = write(tmp_path, line)
    user.build()
    with pytest.raises(CaptureError, match=r"model\.py:12: .* reads the value of a parameter"):
        user.build(hollow=True)


def test_a_buffer_computed_from_parameters_is_refused(tmp_path):
    user = write(tmp_path, 'self.register_buffer("mean", self.first.weight.detach().mean(0))')
    with pytest.raises(CaptureError, match="the buffer mean is computed from parameters"):
        capture(user, user.build(hollow=True))


def test_a_model_of_more_bytes_than_the_machine_has_takes_hardly_any(tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with hollow_parameters():
        model = nn.Sequential(*(nn.Linear(16384, 16384) for _ in range(64)))
    graph = capture_module(model, torch.zeros(2, 16384), layers=None, loss=lambda output, batch: output.mean())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 2**10
    assert sum(parameter.nbytes for parameter in model.parameters()) > 64 * 2**30
    assert len({layer.fingerprint for layer in graph.layers}) <= 3


def test_one_layer_at_a_time_is_given_values_and_made_hollow_again(tmp_path):
    user = write(tmp_path)
    graph = capture(user, user.build(hollow=True))
    layer = graph.layers[0]
    materialize_random(layer, seed=1)
    first = {name: value.clone() for name, value in layer.module.named_parameters()}
    assert float(first["parameter_first_weight"].std().detach()) == pytest.approx(0.02, rel=0.3)
    assert float(first["parameter_first_bias"].abs().max().detach()) == 0
    layer.module(2, torch.ones(2, 8))[0].sum().backward()
    release(layer)
    assert is_hollow(layer.module)
    materialize_random(layer, seed=1)
    assert all(torch.equal(value, first[name]) for name, value in layer.module.named_parameters())
    materialize_random(layer, seed=2)
    assert not torch.equal(layer.module.get_parameter("parameter_first_weight"), first["parameter_first_weight"])


def test_a_hollow_model_is_not_described_by_listed_layers(tmp_path):
    user = write(tmp_path)
    batch = user.load_batch(user.dataset(), range(2))
    with pytest.raises(CaptureError, match="exceeds the memory"):
        capture_module(user.build(hollow=True), batch, user.loss, lambda model: [model.first, model.last])
