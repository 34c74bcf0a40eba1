"""Models that cannot be used are refused in one line: what, where, and what to do; and bytes that are alive."""
# ruff: noqa: ANN001, ANN201, ANN205

import cProfile
import inspect
import math
import random
import time
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path

import numpy
import pytest
import torch
import torch.utils.checkpoint
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import capture_zoo
from autopar.capture import capture_module
from autopar.capture.cache.store import load_graph, save_graph
from autopar.capture.layers.check import check_gradients
from autopar.capture.model.effects import StorageTracker, written_arguments
from autopar.capture.model.meta import parameters_on_meta
from autopar.errors import CaptureError, FileError, ModelError
from capture_zoo import By, Chain, captured, listed, mean_square, regression

ONES = [torch.ones(4, 8), torch.ones(4, 8)]


def replaced(model, x):
    model.average = model.average * 0.9 + x.detach().mean(0) * 0.1
    return x - model.average


def counting(model, x):
    model.calls += 1
    return x / model.calls


def in_list(model, x):
    model.means[0] = 0.9 * model.means[0] + x.detach().mean(0)
    return x - model.means[0]


def remembering(model, x):
    """Replace a tensor that no later forward reads, and make one once."""
    model.seen = x.detach()
    model.table = torch.arange(8.0).cos() if model.table is None else model.table
    return x * model.table


def overlapping():
    both = torch.zeros(2, 8)
    return By(lambda model, x: (model.both.add_(1), x * model.one)[1], {"both": both, "one": both[0]})


@pytest.mark.parametrize(
    ("kind", "construct", "line"),
    [
        (lambda: By(replaced, {"average": torch.zeros(8)}), "buffer average is replaced", "model.average = model.av"),
        (lambda: By(counting, calls=0), "the attribute calls changes from 0 to 1", "model.calls += 1"),
        (lambda: By(lambda _, x: x * random.uniform(0, 1)), "would be drawn only once", "random.uniform(0"),
        (lambda: By(lambda _, x: x * numpy.random.rand()), "would be drawn only once", "numpy.random.rand("),
        (lambda: By(lambda _, x: x * (time.monotonic() > 0)), "a clock is read", "time.monotonic()"),
        (lambda: By(lambda _, x: x * datetime.now().year), "a clock is read", "datetime.now()"),
        (lambda: By(lambda _, x: x / len(x)), "number of samples", "x / len(x)"),
        (
            lambda: By(lambda _, x: torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0]),
            "a derivative within forward or loss",
            "torch.autograd.grad(",
        ),
        (capture_zoo.OwnFunction, "autograd.Function Doubled", "return Doubled.apply(x)"),
        (capture_zoo.Checkpointed, "torch.utils.checkpoint", "return torch.utils.checkpoint.checkpoint("),
        (capture_zoo.Branching, "values decide what runs", "return x * 2 if x.sum() > 0"),
        (lambda: By(lambda _, x: (x, x.register_hook(torch.zeros_like))[0]), "a hook on a gradient", "x.register_hook"),
    ],
)
def test_what_cannot_be_captured_is_named_with_its_line_and_the_fallback(kind, construct, line, capfd):
    with pytest.raises(CaptureError) as caught:
        capture_module(kind().double(), regression(), mean_square)
    assert capfd.readouterr() == ("", "")
    message, file = str(caught.value), Path(inspect.getfile(kind))
    assert construct in message
    assert "layers(model)" in message
    number = next(index for index, text in enumerate(file.read_text().splitlines(), 1) if line in text)
    assert f"{file}:{number}" in message


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: By(replaced, average=torch.zeros(8)), "average is replaced"),
        (lambda: By(in_list, means=[torch.zeros(8)]), r"means\[0\] is replaced|list"),
        (lambda: By(lambda m, x: x * m.mean.mul_(2), mean=torch.ones(8)), "mean .* is no buffer"),
    ],
)
def test_a_tensor_that_changes_and_is_no_buffer_is_refused(make, message, on_meta):
    with parameters_on_meta() if on_meta else nullcontext():
        model = make()
    with pytest.raises(CaptureError, match=message):
        capture_module(model, ONES, mean_square)


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_tensor_that_no_later_forward_needs_anew_is_captured(on_meta):
    with parameters_on_meta() if on_meta else nullcontext():
        model = By(remembering, seen=torch.zeros(8), table=None)
    graph = capture_module(model, ONES, mean_square)
    assert not any(isinstance(value, FakeTensor) for layer in graph.layers for value in layer.module.buffers())


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (overlapping, id, "both and one share memory that the forward writes"),
        (
            Chain,
            lambda model: setattr(model.steps[2], "weight", nn.Parameter(model.steps[1].weight)),
            r"steps\.1\.weight and steps\.2\.weight are two tensors that share memory",
        ),
        (Chain, lambda model: model.steps[1].weight.register_hook(id), r"the parameter steps\.1\.weight has a hook"),
        (Chain, lambda model: model.steps[1].register_full_backward_hook(id), r"module steps\.1 has a backward hook"),
        (lambda: By(lambda model, x: x @ model.mix, {"mix": torch.eye(8).to_sparse()}), id, "mix is sparse"),
        (lambda: By(lambda _, x: x.reshape(4, 8) if len(x) == 4 else x[:1, :1]), id, "number of samples|samples only"),
    ],
)
def test_what_ranks_would_not_have_or_is_for_one_number_of_samples_is_refused(kind, change, message):
    model = kind()
    change(model)
    with pytest.raises(CaptureError, match=message):
        capture_module(model, ONES, mean_square)


def test_parts_of_one_memory_are_captured_and_what_changes_its_size_is_counted():
    model, whole = Chain(), torch.randn(8, 16)
    model.steps[1].weight, model.steps[2].weight = nn.Parameter(whole[:, :8]), nn.Parameter(whole[:, 8:])
    assert len(capture_module(model, ONES, mean_square).layers) == 4
    old = torch.ones(100)
    with StorageTracker() as tracker:
        old.mul_(2)
        view = old[1:]
        made = torch.ones(10)
        assert tracker.alive_bytes == 40
        made.untyped_storage().resize_(0)
        old.untyped_storage().resize_(800)
        assert tracker.alive_bytes == 0
        made.untyped_storage().resize_(400)
        assert (tracker.alive_bytes, tracker.peak_bytes) == (400, 400)
    del view, made
    assert tracker.alive_bytes == 0
    dense = torch.eye(4)
    with StorageTracker() as tracker:
        sparse = dense.to_sparse()
        # Two indices of eight bytes and a value of four for each of four entries.
        assert tracker.alive_bytes == 4 * (2 * 8 + 4)
        assert sparse.layout is torch.sparse_coo


class Reentrant(capture_zoo.Checkpointed):
    reentrant = True


class Failing(capture_zoo.Doubled):
    @staticmethod
    def backward(context, gradient):
        raise ValueError("no gradient today")


def test_what_the_plain_backward_does_wrong_is_the_users_and_listed_graphs_are_not_saved(tmp_path):
    for model, said in (
        (Reentrant(), "the plain backward raised RuntimeError: .*set use_reentrant=False"),
        (By(lambda _, x: Failing.apply(x)), r"test_effects\.py:\d+: the plain backward raised ValueError: no gradient"),
    ):
        graph = capture_module(model.double(), regression(), mean_square, listed)
        with pytest.raises(ModelError, match=said):
            check_gradients(model, graph, regression(), mean_square)
    model, batch, loss, graph = captured("chain")
    with pytest.raises(CaptureError, match=r"gives another gradient of steps\.\d"):
        check_gradients(Chain().double(), graph, batch, loss)
    loss = lambda output, batch: mean_square(output, batch) * float("nan")  # noqa: E731
    with pytest.raises(ModelError, match=r"gradient of .* is not finite"):
        check_gradients(model, capture_module(model, batch, loss), batch, loss)
    model, batch = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1)), torch.zeros(3, dtype=torch.long)
    loss = lambda output, batch: output.mean()  # noqa: E731
    with pytest.raises(ModelError, match=r"gradient of 0\.weight is sparse"):
        check_gradients(model, capture_module(model, batch, loss), batch, loss)
    model, batch, loss, portable = captured("chain")
    graph = capture_module(model, batch, loss, lambda model: [nn.Sequential(*model.steps)])
    with pytest.raises(CaptureError, match="cannot be saved"):
        save_graph(graph, tmp_path)
    with pytest.raises(FileError, match="cannot read"):
        load_graph(tmp_path)
    save_graph(portable, tmp_path)
    (tmp_path / "layers.json").write_text("{}")
    with pytest.raises(FileError, match="capture it again"):
        load_graph(tmp_path)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (lambda model: [], "a list of modules"),
        (lambda model: [torch.tanh], "a list of modules"),
        (lambda model: [nn.Linear(8, 8).double()], "none of the model's"),
        (lambda model: [model.steps[0], nn.Linear(3, 3)], "raised RuntimeError"),
        (lambda model: [model.steps[0], nn.Flatten(0), nn.Unflatten(0, (-1, 8))], "exactly one dimension"),
        (lambda model: [nn.Identity()], "nothing to train"),
    ],
)
def test_a_wrong_list_of_layers_is_refused(layers, message):
    model, batch, loss = capture_zoo.build("chain")
    with pytest.raises(ModelError, match=message):
        capture_module(model, batch, loss, layers)


@pytest.mark.parametrize("fake", [False, True])
def test_any_order_of_making_viewing_and_freeing_is_counted(fake: bool) -> None:
    draw = random.Random(9)
    with FakeTensorMode() if fake else torch.no_grad(), StorageTracker() as tracker:
        # Of every tensor, the storage that it lies in: a storage is alive as long as one of its tensors.
        tensors: list[tuple[int, torch.Tensor]] = []
        sizes: dict[int, int] = {}
        peak = 0
        for number in range(200):
            way = draw.choice(("make", "view", "change", "free")) if tensors else "make"
            if way == "make":
                sizes[number] = 4 * draw.randint(1, 50)
                tensors.append((number, torch.zeros(sizes[number] // 4)))
            elif way == "view":
                key, tensor = draw.choice(tensors)
                tensors.append((key, tensor[:1]))
                del tensor
            elif way == "change":
                tensors[-1][1].add_(1)
            else:
                tensors.pop(draw.randrange(len(tensors)))
            alive = sum(sizes[key] for key in {key for key, _ in tensors})
            peak = max(peak, alive)
            assert (tracker.alive_bytes, tracker.peak_bytes) == (alive, peak)


@pytest.mark.parametrize("norm", [torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default])
def test_statistics_are_written_though_no_schema_says_so(norm):
    graph = fx.Graph()
    x, mean, variance = map(graph.placeholder, ("x", "mean", "variance"))
    found = [
        written_arguments(graph.call_function(norm, (x, None, None, mean, variance, training, 0.1, 1e-5, False)))
        for training in (True, False)
    ]
    assert found == [[mean, variance], []]


def test_capturing_goes_on_under_a_profiler_of_the_users() -> None:
    """CProfile has no function that could be given back; what runs after the capture is in its figures, too."""
    profiler = cProfile.Profile()
    with profiler:
        graph = capture_module(nn.Linear(3, 2), (torch.randn(4, 3), torch.randn(4, 2)), mean_square)
        math.hypot(3.0, 4.0)
    assert graph.layers
    assert any("hypot" in str(entry.code) for entry in profiler.getstats())
