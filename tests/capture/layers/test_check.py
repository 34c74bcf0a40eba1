"""Layers give the plain model's loss, gradients and buffers, run one after another; what they would lose is refused."""
# ruff: noqa: ANN001, ANN201

import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture import capture_module, named_tensors, slice_rows
from autopar.capture.cache.store import load_graph, save_graph
from autopar.capture.layers import check
from autopar.capture.layers.check import check_gradients
from autopar.capture.model.batch import rebuild
from autopar.errors import CaptureError
from capture_zoo import DEAR, MODELS, By, Chain, Made, build, captured, mean_square, regression
from stage_runs import assert_equal_to_plain, assert_same_layers


def carried_hidden(model, x):
    model.hidden = None if model.fresh else model.hidden
    output, hidden = model.cell(x.unsqueeze(1).expand(-1, 4, -1), model.hidden)
    model.hidden = hidden.detach()
    return model.last(output[:, -1])


def carrying(fresh=False):
    """Keep a recurrent state from batch to batch, as in training by truncated backpropagation."""
    return Made(carried_hidden, cell=nn.GRU(8, 8, batch_first=True), last=nn.Linear(8, 8), hidden=None, fresh=fresh)


def carried_mean(model, x):
    mean, model.mean = model.mean, x.detach().mean(0)
    return x if mean is None else x - mean


def ctc(output, batch):
    scores = (output.unsqueeze(0) * torch.arange(1, 6).view(5, 1, 1)).log_softmax(-1)
    lengths = torch.full((output.shape[0],), 5)
    targets = torch.ones(output.shape[0], 2, dtype=torch.int64)
    return F.ctc_loss(scores, targets, lengths, lengths - 3, reduction="none").mean()


@pytest.mark.parametrize(
    ("make", "loss", "said"),
    [
        (carrying, mean_square, r"Made\.hidden carries .* begin every forward"),
        (lambda: By(carried_mean, mean=None), mean_square, r"By\.mean is replaced .* as a buffer and write into"),
        (Chain, ctc, r"ctc_loss makes a tensor .*; give layers\(model\)"),
    ],
)
def test_a_refusal_names_what_is_wrong_and_its_remedy(make, loss, said):
    with pytest.raises(CaptureError, match=said):
        capture_module(make().double(), regression(), loss)


@pytest.mark.some(9)
@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each in DEAR)) for each in MODELS])
def test_stages_at_any_boundaries_equal_the_plain_model_with_any_rows_saved_or_not(name, tmp_path):
    """The graph is captured at two samples."""
    model, batch, loss, graph = captured(name)
    every, draw = range(1, len(graph.layers)), random.Random(name)
    part = rebuild(batch, slice_rows(named_tensors(batch), 0, 1))
    for cuts in (every, sorted(draw.sample(every, len(every) // 2))):
        assert_equal_to_plain(model, graph, batch, loss, cuts)
    save_graph(graph, tmp_path)
    loaded = load_graph(tmp_path)
    assert not any(buffer.requires_grad for layer in loaded.layers for buffer in layer.module.buffers())
    assert_same_layers(graph, loaded)
    assert all(p.device.type == "meta" for layer in loaded.layers for p in layer.module.parameters())
    assert_equal_to_plain(model, loaded, part, loss, every)


def test_capturing_leaves_the_model_as_it_was_and_remedies_work():
    model, batch, loss = build("norms")
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    graph = capture_module(model, batch, loss)
    check_gradients(model, graph, batch, loss)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert {p for layer in graph.layers for p in layer.module.parameters()} == {*model.parameters()}
    model, batch = carrying(fresh=True).double(), regression()
    check_gradients(model, capture_module(model, batch, mean_square), batch, mean_square)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
    check_gradients(model, capture_module(model, batch, ctc, list), batch, ctc)
    with warnings.catch_warnings(action="ignore"):
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 8)).double()
    batch = regression()
    mean_square(model(batch[0]), batch).backward()
    assert [layer.name for layer in capture_module(model, batch, mean_square).layers] == ["0", "1", "2"]
    # A small gradient is held to its own size, not to that of the largest.
    small = torch.full((1,), 1e-4, dtype=torch.float64)
    with pytest.raises(CaptureError, match="another gradient of w"):
        check._check_gradient("w", small, small + 5e-10, 1e-4, 1.0)
