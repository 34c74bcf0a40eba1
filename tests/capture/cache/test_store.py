"""Models of nested blocks train as plainly, by plans of their blocks and by plans that an earlier autopar made."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import fx

from autopar.capture.cache.store import load_graph, save_graph
from autopar.capture.graph import Layer, LayerGraph
from autopar.capture.layers import segment as cutting
from autopar.capture.layers.export import capture, capture_module
from autopar.capture.layers.units import Units
from autopar.capture.model.source import UserModel, load
from autopar.capture.plain.loop import train_plainly
from autopar.errors import FileError
from autopar.formats.plan import Plan
from autopar.runtime.start.workspace import fit_to_plan
from dictated import dictate
from threads import train_in_threads

STEPS = 2
FILE = """
import torch
import torch.nn.functional as F
from torch import nn

class Block(nn.Module):
    def __init__(self, rate=0.2):
        super().__init__()
        self.norm, self.linear, self.rate = nn.LayerNorm(6), nn.Linear(6, 6), rate
    def forward(self, x):
        return x + F.dropout(self.linear(self.norm(x)), self.rate, self.training)

class Stage(nn.Module):
    def __init__(self, entry):
        super().__init__()
        self.blocks, self.entry = nn.ModuleList(Block(rate) for rate in (0.0, 0.2, 0.2)), entry
    def forward(self, x):
        x = F.dropout(x, 0.1) if self.entry else x
        for block in self.blocks:
            x = block(x)
        return x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.stages = nn.Sequential(Stage(False), nn.Sequential(Block(), Block()), Stage(True))
    def forward(self, x):
        return self.head(self.stages(self.stem(x)))

def model(): return Net().double()
def dataset():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(90, 6, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, torch.randint(0, 3, (90,), generator=generator))
def loss(output, batch): return F.cross_entropy(output, batch[-1])
def optimizer(parameters): return torch.optim.AdamW(parameters, lr=1e-2)
"""


def check(user: UserModel, plan: Plan, folder: Path) -> None:
    """Train by a plan, whose layers may be those of before, and plainly; both are equal."""
    module = user.build(0)
    graph = fit_to_plan(capture(user, module), plan, user)
    assert [layer.name for layer in graph.layers] == [name for stage in plan.stages for name in stage.layers]
    train_in_threads(plan, graph, user, dict(module.state_dict()), folder, STEPS)
    truth = train_plainly(user, plan, STEPS)
    found: dict[str, torch.Tensor] = {}
    for rank in range(len(plan.devices)):
        found |= load_file(folder / f"parameters-{rank}")
    assert found.keys() == truth.parameters.keys()
    for name, value in truth.parameters.items():
        assert float((found[name] - value).abs().max()) <= 1e-12, name


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> UserModel:
    path = tmp_path_factory.mktemp("model") / "model.py"
    path.write_text(FILE)
    return load(str(path))


def as_before(user: UserModel, name: str, replacement: object) -> LayerGraph:
    """Capture as an earlier autopar did."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, name, replacement)
        return capture(user, user.build(0))


@pytest.mark.some(1)
@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_a_plan_of_whole_stages_runs_as_it_did(user: UserModel, cut: int, tmp_path: Path) -> None:
    before = as_before(user, "split_units", lambda model, nodes: Units(model, lambda path: False))
    assert [layer.name for layer in before.layers] == ["stem", "stages.0", "stages.1", "stages.2", "head"]
    check(user, dictate(before, user, [1, 2], 3, 4, cuts=[cut]), tmp_path)


@pytest.mark.slow
def test_a_plan_that_names_joined_modules_after_the_first_runs_as_it_did(tmp_path: Path) -> None:
    text = FILE.replace("self.stages =", "self.norm = nn.LayerNorm(6)\n        self.stages =")
    (tmp_path / "model.py").write_text(text.replace("self.stem(x)", "F.dropout(self.norm(self.stem(x)), 0.3)"))
    user = load(str(tmp_path / "model.py"))
    after = capture(user, user.build(0))
    assert (after.layers[0].name, after.layers[0].random) == ("stem+norm", True)
    before = as_before(user, "_layer_name", lambda first, others: first)
    assert before.layers[0].name == "stem"
    for graph in (after, before):
        check(user, dictate(graph, user, [1, 2], 3, 4, cuts=[3]), tmp_path)


JOINED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(12, 3)
    def forward(self, x):
        return self.head(torch.cat((self.left(x), self.right(x)), 1))
"""


def test_a_plan_says_by_which_rule_joins_were_cut_and_one_that_says_nothing_runs_as_it_did(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FILE.replace("class Net", "class Before") + JOINED)
    user = load(str(tmp_path / "model.py"))
    earlier = replace(user, joins="producer")
    before, after = (capture(each, user.build(0)) for each in (earlier, user))
    assert (
        [layer.name for layer in before.layers] == [layer.name for layer in after.layers] == ["left", "right", "head"]
    )
    assert [layer.inputs[-1] for layer in before.layers[1:]] == ["left:linear", "right:cat"]
    old, new = (dictate(graph, user, [1, 2, 1], 3, 4) for graph in (before, after))
    assert "joins" not in old.dumps()
    said = new.model_copy(update={"model": new.model.model_copy(update={"joins": user.model_source.joins})})
    for plan in (old, said):
        plan = Plan.parse(plan.dumps(), Path("plan.json"))
        check(load(str(user.path), expected_source=plan.model), plan, tmp_path)
    with pytest.raises(FileError, match="tensor 'left:linear'"):
        fit_to_plan(after, old, user)


WITH_PLUS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"a+b": nn.Linear(6, 6), "c": nn.Linear(6, 6)})
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)
    def forward(self, x):
        x = self.norm(F.dropout(x, 0.1))
        x = F.dropout(self.parts["c"](x), 0.2)
        x = self.parts["a+b"](x)
        return self.head(F.dropout(self.norm(x), 0.3))
"""


def test_names_with_a_plus_and_constants_without_elements_are_read_back(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FILE.replace("class Net", "class Before") + WITH_PLUS)
    user = load(str(tmp_path / "model.py"))
    graph = capture(user, user.build(0))
    assert [layer.name for layer in graph.layers] == ["norm+parts.c", "parts.a+b+norm@2", "head"]
    check(user, dictate(graph, user, [1, 1], 3, 4, cuts=[1]), tmp_path)

    class Caching(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.cat([torch.tensor([]), x.flatten()]).reshape(x.shape)) * self.scale

    model = Caching(4, 1)
    model.register_buffer("scale", torch.ones(4, 1)[:1].expand(1, 1).clone(), persistent=False)
    batch = (torch.randn(4, 4), torch.randn(4, 1))
    graph = capture_module(model, batch, lambda output, batch: (output - batch[1]).square().mean())
    save_graph(graph, tmp_path)
    (layer,) = load_graph(tmp_path).layers
    known = {*layer.parameters, *layer.buffers}
    assert [tuple(each.shape) for name, each in layer.module.named_buffers() if name not in known] == [(0,)]


def test_a_graph_that_is_read_back_is_right_for_as_many_rows(user: UserModel, tmp_path: Path) -> None:
    graph = capture(user, user.build(0))
    save_graph(replace(graph, layers=[replace(each, least_rows=2, most_rows=7) for each in graph.layers]), tmp_path)
    assert {(layer.least_rows, layer.most_rows) for layer in load_graph(tmp_path).layers} == {(2, 7)}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.some(4)
def test_constants_of_any_kind_are_read_back_as_they_lie_and_shared_ones_are_one(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool, torch.uint8]
    whole = (torch.randn(6, 5) * 3).to(draw.choice(kinds))
    views = [whole, whole.T, whole[1:4], whole[:, ::2], whole[2, 3], whole[:1].expand(4, 5), whole[:0], whole.clone()]
    chosen = [draw.choice(views) for _ in range(4)]
    layers, graphs = [], [fx.Graph() for _ in range(2)]
    for number, graph in enumerate(graphs):
        graph.placeholder("rows")
        graph.output(tuple(graph.get_attr(f"constant_{at}") for at in range(4)))
        module = fx.GraphModule({f"constant_{at}": value for at, value in enumerate(chosen)}, graph)
        layers.append(Layer(f"layer{number}", (), (), ("loss",), {}, {}, False, "", module))
    save_graph(LayerGraph(tuple(layers), (), (), ("loss",)), tmp_path)
    found = [layer.module(1) for layer in load_graph(tmp_path).layers]
    for one, other, value in zip(*found, chosen, strict=True):
        assert (one.dtype, one.shape) == (value.dtype, value.shape)
        assert torch.equal(one, value)
        assert torch.equal(other, value)
        assert not value.numel() or (one.stride() == value.stride() and one.data_ptr() == other.data_ptr())
