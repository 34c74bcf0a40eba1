"""Models larger than memory are built and captured with shapes for parameters, and give the same graph."""
# ruff: noqa: ANN001, ANN201, ANN202

import resource

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import capture_zoo
from autopar.capture import capture, capture_module, load, materialize_random, release
from autopar.capture.cache.store import load_graph, save_graph
from autopar.capture.layers.check import check_gradients
from autopar.capture.model.meta import is_on_meta, parameters_on_meta
from autopar.errors import CaptureError, ModelError
from capture_zoo import DEAR, MODELS, Branching, build, captured, listed, mean_square, regression
from stage_runs import assert_equal_to_plain, assert_same_layers

# Their constructors or forwards need values of parameters.
NEED_VALUES = {"parametrized"}


def check_alike(real, on_meta, shapes):
    """Check that a graph is that of a model on the meta device, and but for its values that of the real one."""
    assert (real.on_meta, on_meta.on_meta) == (False, True)
    assert_same_layers(real, on_meta)
    assert all(parameter.device.type == "meta" for parameter in shapes.parameters())
    own = {id(parameter) for parameter in shapes.parameters()}
    assert all(id(parameter) in own for layer in on_meta.layers for parameter in layer.module.parameters())


@pytest.mark.some(7)
@pytest.mark.parametrize("name", sorted(MODELS.keys() - NEED_VALUES - DEAR))
def test_a_model_on_meta_gives_the_graph_of_the_real_one(name):
    model, batch, loss, real = captured(name)
    with parameters_on_meta():
        shapes = build(name)[0]
    assert is_on_meta(shapes)
    on_meta = capture_module(shapes, batch, loss)
    check_alike(real, on_meta, shapes)
    assert_equal_to_plain(model, on_meta, batch, loss, range(1, len(on_meta.layers)))


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


def test_constants_of_a_model_on_meta_keep_their_values_and_listed_layers_have_none_at_once(tmp_path):
    user = write(tmp_path)
    real, on_meta = user.build(2), user.build(2, on_meta=True)
    assert torch.equal(real.table, on_meta.table)
    assert on_meta.first.weight is on_meta.second.weight
    graph = capture(user, on_meta)
    assert graph.tied_parameters() == {"first.weight": ("first", "second")}
    save_graph(graph, tmp_path)
    assert [part.fingerprint for part in load_graph(tmp_path).layers] == [layer.fingerprint for layer in graph.layers]
    assert_equal_to_plain(real, graph, user.load_batch(user.dataset(), range(3)), user.loss, (1, 2))
    alive: list[int] = []

    class Counting(capture_zoo.Between):
        def forward(self, x):
            held = [p for step in self.model[0].steps for p in step.parameters() if type(p) is nn.Parameter]
            alive.append(sum(not isinstance(p.data, FakeTensor) for p in held))
            return super().forward(x)

    with parameters_on_meta():
        model = Branching().double()
    layers = lambda model: [Counting(model, step) for step in model.steps]  # noqa: E731
    capture_module(model, regression(), mean_square, layers, ignored_state=("alive",))
    assert set(alive) == {0, 2}  # of a step, its weight and its bias


@pytest.mark.parametrize(
    "line",
    ["self.scale = shared.max().item()", "self.scales = self.first.weight[0].tolist()", "assert shared.sum() < 1e9"],
)
def test_a_constructor_that_reads_parameters_is_refused_with_its_line(line, tmp_path):
    user = write(tmp_path, line)
    user.build()
    with pytest.raises(CaptureError, match=r"model\.py:12: .* reads the value of a parameter"):
        user.build(on_meta=True)


def test_a_model_on_meta_takes_no_bytes_and_no_computed_parameters(tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with parameters_on_meta():
        model = nn.Sequential(*(nn.Linear(16384, 16384) for _ in range(64)))
    graph = capture_module(model, torch.zeros(2, 16384), layers=None, loss=lambda output, batch: output.mean())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 2**10
    assert sum(parameter.nbytes for parameter in model.parameters()) > 64 * 2**30
    assert len({layer.fingerprint for layer in graph.layers}) <= 3
    user = write(tmp_path, 'self.register_buffer("mean", self.first.weight.detach().mean(0))')
    with pytest.raises(CaptureError, match="the buffer mean is computed from parameters"):
        capture(user, user.build(on_meta=True))
    with parameters_on_meta():
        model = Branching().double()
    with pytest.raises(ModelError, match=r"layers\(model\) raised RuntimeError"):
        capture_module(model, regression(), mean_square, lambda model: [model.steps[0], nn.Linear(3, 3).double()])


def test_one_layer_at_a_time_is_given_values_and_put_on_meta_again(tmp_path):
    user = write(tmp_path)
    layer = capture(user, user.build(on_meta=True)).layers[0]
    materialize_random(layer, seed=1)
    first = {name: value.clone() for name, value in layer.module.named_parameters()}
    assert float(first["parameter_first_weight"].std().detach()) == pytest.approx(0.02, rel=0.3)
    assert float(first["parameter_first_bias"].abs().max().detach()) == 0
    layer.module(2, torch.ones(2, 8))[0].sum().backward()
    release(layer)
    assert is_on_meta(layer.module)
    materialize_random(layer, seed=1)
    assert all(torch.equal(value, first[name]) for name, value in layer.module.named_parameters())
    materialize_random(layer, seed=2)
    assert not torch.equal(layer.module.get_parameter("parameter_first_weight"), first["parameter_first_weight"])


@pytest.mark.parametrize("kind", [Branching, capture_zoo.OwnFunction, capture_zoo.Checkpointed, MODELS["dropout"][0]])
def test_the_layers_fallback_runs_what_cannot_be_captured_and_is_the_same_of_a_model_on_meta(kind):
    with parameters_on_meta():
        shapes = kind().double()
    batch, state = regression(), torch.get_rng_state()
    on_meta = capture_module(shapes, batch, mean_square, listed)
    assert torch.equal(state, torch.get_rng_state())
    model = kind().double()
    real = capture_module(model, batch, mean_square, listed)
    check_alike(real, on_meta, shapes)
    assert not real.portable
    assert not on_meta.portable
    check_gradients(model, real, batch, mean_square)
    assert [tensor.sizes for tensor in real.tensors] == [(8,)] * 5
    assert real.tensors[2].gradient
    assert [layer.random for layer in on_meta.layers] == [kind in MODELS["dropout"]] * 4
