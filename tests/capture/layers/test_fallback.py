"""Listed modules may change Python state that is theirs alone; a declared plan gives layers where capture fails."""
# ruff: noqa: ANN001, ANN201, ANN204

import itertools
import json
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autopar.capture import capture, capture_module, load, named_tensors, slice_rows
from autopar.capture.layers import fallback
from autopar.capture.layers.check import check_gradients
from autopar.capture.layers.evaluation import capture_evaluation, capture_prediction
from autopar.capture.model.batch import rebuild
from autopar.errors import CaptureError
from capture_zoo import Chain, Doubled, Late, Made, counting_loss, listed, mean_square, regression
from families import tiny_config
from stage_runs import assert_equal_to_plain, run

TABLE = {"n": 0}


class Own(nn.Module):
    """A module that counts its forwards; and whose generator draws."""

    def __init__(self, step, count=1):
        super().__init__()
        self.step, self.state, self.count = step, {"n": 0}, count
        self.mean, self.draws = torch.zeros(8).double(), torch.Generator().manual_seed(0)

    def forward(self, x):
        self.state["n"] += self.count
        if self.count:
            self.mean = self.mean * 0.9 + x.detach().mean(0)
            x = x + torch.rand(8, generator=self.draws)
        return torch.tanh(self.step(x)) * (2 if self.state["n"] > 40 else 1) - self.mean


def test_listed_modules_have_their_state_which_changes_once_or_is_global():
    model = nn.Sequential(*(Own(nn.Linear(8, 8), count) for count in (0, 1, 0))).double()
    graph = capture_module(model, regression(), mean_square, list)
    assert [set(layer.stateful) for layer in graph.layers] == [
        set(),
        {"Sequential.1.state['n']", "Sequential.1.mean", "Sequential.1.draws"},
        set(),
    ]
    own = model[1]
    assert own.state == {"n": 0}
    assert not own.mean.any()
    assert torch.equal(own.draws.get_state(), torch.Generator().manual_seed(0).get_state())
    with pytest.raises(CaptureError, match=r"Sequential\.1\.\S+ changes with every forward, and a copy"):
        capture_evaluation(model, regression(), mean_square, graph)
    before = TABLE["n"]
    model, batch = Chain().double(), regression()
    graph = capture_module(model, batch, mean_square, lambda model: [Doing(model.steps[0], count), *model.steps[1:]])
    assert graph.layers[0].stateful == ("global TABLE['n'] of test_fallback.py",)
    assert TABLE["n"] == before
    both = lambda model: [Doing(step, count) for step in model.steps]  # noqa: E731
    with pytest.raises(CaptureError, match=r"layers\(\): global TABLE\['n'\] of .* belongs to no single module"):
        capture_module(model, batch, mean_square, both)
    graph = capture_module(model, batch, mean_square, both, ignored_state=("TABLE",))
    assert not any(layer.stateful for layer in graph.layers)
    loss = counting_loss()
    graph = capture_module(Chain().double(), regression(), loss, lambda model: list(model.steps))
    assert [layer.stateful for layer in graph.layers] == [(), (), (), ("closure variable n of loss",)]
    assert loss.__closure__[0].cell_contents == 0
    steps = nn.Sequential(*(Once(nn.Linear(8, 8)) for _ in range(3))).double()
    for step in steps:
        step.means = [step.mean]
    graph = capture_module(steps, regression(), mean_square, list)
    assert [layer.stateful for layer in graph.layers] == [(f"Sequential.{index}.calls",) for index in range(3)]


class Doing(nn.Module):
    """A step of a chain, and something that is done before it."""

    def __init__(self, step, act):
        super().__init__()
        self.step, self.act = step, act

    def forward(self, x):
        self.act()
        return self.step(x)


def count():
    TABLE["n"] += 1


def shared_generator(model):
    draws = torch.Generator().manual_seed(0)
    found = [Own(step, 0) for step in model.steps]
    for each in found:
        each.draws, each.count = draws, 1
    return found


def counts_before(model):
    places = itertools.count()
    return [Doing(model.steps[0], lambda: next(places)), *model.steps[1:]]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (listed, r"\.state\['n'\] changes"),
        (lambda model: [Own(model.steps[0])] * 2, "belongs to no single module"),
        (shared_generator, "draws changes"),
        (lambda model: [Doing(step, lambda: random.random()) for step in model.steps], "generator of Python's random"),
        (counts_before, "cannot be put back"),
    ],
)
def test_state_that_several_listed_modules_share_is_refused(layers, message):
    with pytest.raises(CaptureError, match=message):
        capture_module(Late().double(), regression(), mean_square, layers)


class Once(nn.Module):
    """Changes state with its second forward only, and a buffer that it also holds in a list."""

    def __init__(self, step):
        super().__init__()
        self.step, self.calls = step, 0
        self.register_buffer("mean", torch.zeros(8).double())
        self.means = [self.mean]

    def forward(self, x):
        self.calls = min(self.calls + 1, 3)
        self.means[0].mul_(0.9).add_(x.detach().mean(0))
        return self.step(x) - self.means[0]


LLAMA = tiny_config("llama", 3, 10, attention_dropout=0.1, architectures=["LlamaForCausalLM"])
GEMMA = tiny_config("gemma3_text", 3, 10, head_dim=8, sliding_window=4, architectures=["Gemma3ForCausalLM"])


def own_activation(x):
    """Activate with a backward that is not the forward's derivative, which no capture keeps."""
    return Doubled.apply(torch.tanh(x))


def decide(x):
    return torch.tanh(x) if x.sum() < 1e9 else x


def activate(model, activation):
    for layer in model.model.layers:
        del layer.mlp.act_fn
        layer.mlp.act_fn = activation


def models(folder, content):
    pytest.importorskip("transformers", reason="autopar[hf] is not installed")
    (folder / "config.json").write_text(json.dumps(content))
    user = load(f"hf:{folder}")
    model = user.build(1).train()
    activate(model, own_activation)
    return user, model


@pytest.mark.parametrize("content", [LLAMA, pytest.param(GEMMA, marks=pytest.mark.slow)], ids=["llama", "gemma3"])
def test_the_declared_plan_trains_and_evaluates_as_the_plain_model(content, tmp_path):
    user, model = models(tmp_path, content)
    graph = capture(user, model)
    assert not graph.portable
    assert "pipeline plan" in graph.notes[0]
    blocks = [f"model.layers.{index}" for index in range(3)]
    assert [layer.name for layer in graph.layers] == ["model.embed_tokens", *blocks, "model.norm", "lm_head"]
    batch = user.load_batch(user.dataset(), range(4))
    check_gradients(model, graph, batch, user.loss)
    model.eval()
    with torch.no_grad():
        output = model(**batch)
        # It is copies that are in evaluation mode.
        model.train()
        known = named_tensors(batch)
        for captured, *expected in (
            (capture_evaluation, *user.loss(output, batch)),
            (capture_prediction, output.logits),
        ):
            found = captured(model, batch, user.loss, graph)
            values = run(found.layers, known)
            assert all(torch.equal(values[name], each) for name, each in zip(found.results, expected, strict=True))
    for rows, cuts in ((4, (1, 2, 3, 4, 5)), (3, (2,)), (1, (3,))):
        part = rebuild(batch, slice_rows(named_tensors(batch), 0, rows))
        assert_equal_to_plain(model, graph, part, user.loss, cuts, tolerance=1e-6)


def test_a_model_whose_plan_leaves_parameters_out_or_does_not_hold_is_refused_as_before(tmp_path):
    user, model = models(tmp_path, LLAMA)
    model.model.rotary_emb.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(CaptureError, match=r"autograd\.Function Doubled"):
        capture(user, model)
    del model.model.rotary_emb.scale
    model._pp_plan, model.config.base_model_pp_plan = {}, None
    with pytest.raises(CaptureError, match=r"autograd\.Function Doubled"):
        capture(user, model)
    model = Made(lambda m, x: m.second(signal=m.first(x)), first=nn.Linear(4, 4), second=Second(4, 4))
    model._pp_plan = {"first": (), "second": ()}
    with pytest.raises(CaptureError, match=r"autograd\.Function Doubled"):
        capture_module(model, torch.ones(3, 4), lambda output, batch: output.mean())


class Second(nn.Linear):
    def forward(self, signal):
        return super().forward(Doubled.apply(signal))


@pytest.mark.parametrize(("results", "passed"), [(0, "hidden"), (1, ("hidden",)), (3, ("hidden", None, None))])
def test_a_part_that_is_passed_by_returns_as_much_as_it_did(results, passed):
    assert fallback._passing(SimpleNamespace(results=results), "hidden")("more", option=1) == passed
